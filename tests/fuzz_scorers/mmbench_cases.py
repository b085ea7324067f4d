"""MMBench's letters by VLMEvalKit's two rules, and its accuracies of whole files."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmqa_jax.benchmarks.mmbench import (
    BASE,
    L2,
    PASS,
    PASS_STEP,
    read_mmbench_predictions,
    score_mmbench,
)
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation import multiple_choice as rules
from tests.fuzz_scorers.case import Case, Score
from tests.fuzz_scorers.choice_texts import LETTERS, choices, choosing
from tests.fuzz_scorers.files import written
from tests.fuzz_scorers.official import definitions

_LETTERS_FILE = "vlmeval/utils/matching_util.py"
# What the pattern of June 2026 is replaced by for the rule before it.
_NEVER = re.compile(r"(?!)")
_ABILITIES = {"fine": ("fine", ("color", "count")), "coarse": ("coarse", ("style", "scene"))}


def _draw_answer(draw: random.Random) -> dict[str, Any]:
    options = choices(draw)
    return {"text": choosing(draw, options), "choices": options}


def _matching(file: Path, *, answer_is: bool) -> Callable[[str, dict[str, str]], str | bool]:
    """The official inference of a letter from a text."""
    replaced = {} if answer_is else {"_VERBOSE_ANSWER_RE": _NEVER}
    return definitions(file, "can_infer", logger=None, **replaced).can_infer


def _official_letter(*, answer_is: bool) -> Callable[[Path], Score]:
    """The letter's index; None for none of the choices."""

    def opened(file: Path) -> Score:
        can_infer = _matching(file, answer_is=answer_is)

        def score(given: dict[str, Any]) -> int | None:
            named = dict(zip(LETTERS, given["choices"], strict=False))
            letter = can_infer(given["text"], named)
            return LETTERS.index(letter) if letter and letter != "Z" else None

        return score

    return opened


def _letter(*, answer_is: bool) -> Score:
    return lambda given: rules.vlmeval_choice(given["text"], given["choices"], answer_is=answer_is)


def _draw_file(draw: random.Random) -> list[dict[str, Any]]:
    """Questions with their passes; of each pass an answer, right more often than not."""
    rows = []
    for number in range(draw.randint(1, 6)):
        options = choices(draw, 2, 4)
        ability, kinds = draw.choice(list(_ABILITIES.values()))
        right = draw.randrange(len(options))
        answers = []
        for shift in range(len(options)):
            letter = LETTERS[(right + shift) % len(options)]
            is_plain = draw.random() < 0.8
            answers.append(f"{letter}." if is_plain else choosing(draw, options))
        rows.append(
            {
                "index": number,
                "choices": options,
                "right": right,
                "answers": answers,
                "l2": f"{ability} grained",
                "category": draw.choice(kinds),
            }
        )
    return rows


def _passes(row: dict[str, Any]) -> list[tuple[int, list[str], int, str]]:
    """(index, choices, correct one, answer) of each pass: choice j stands at place j + pass."""
    count = len(row["choices"])
    return [
        (
            row["index"] + shift * PASS_STEP,
            [row["choices"][(place - shift) % count] for place in range(count)],
            (row["right"] + shift) % count,
            answer,
        )
        for shift, answer in enumerate(row["answers"])
    ]


def _official_file(file: Path) -> Score:
    """Circular and vanilla accuracy, of all questions and by ability, by today's rule."""
    import pandas as pd

    pd.set_option("mode.chained_assignment", None)
    kept: dict[str, Any] = {}
    official = definitions(
        file,
        *("mcq_circular_eval", "mcq_vanilla_eval", "report_acc"),
        can_infer=_matching(file.parents[3] / _LETTERS_FILE, answer_is=True),
        dump=lambda content, name: kept.update({name: content}),
        load=lambda name: kept[name],
        track_progress_rich=_one_by_one(kept),
        istype=lambda value, kind: True,
        get_pred_file_format=lambda: "pkl",
        timestr=lambda: "table",
        build_option_str=str,
        cn_string=lambda text: False,
        can_infer_lego=None,
        MMB_abbrs={},
        logger=SimpleNamespace(warning=print, info=print),
    )

    def score(given: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
        table = pd.DataFrame(
            {
                "index": index,
                "question": "?",
                **dict(zip(LETTERS, options, strict=False)),
                "answer": LETTERS[right],
                "prediction": answer,
                L2: row["l2"],
                "category": row["category"],
                "split": "dev",
            }
            for row in given
            for index, options, right, answer in _passes(row)
        )
        firsts = table[table["index"] < PASS_STEP].copy()
        circular = official.mcq_circular_eval(None, table.copy(), table, 1, "absent", "MMBench")
        kept["absent"] = {}
        vanilla = official.mcq_vanilla_eval(None, firsts, firsts.copy(), 1, "absent", "MMBench")
        found = {"circular": circular, "vanilla": vanilla}
        return {
            name: {key: values[0] for key, values in official.report_acc(one).items()}
            for name, one in found.items()
        }

    return score


def _one_by_one(kept: dict[str, Any]) -> Callable[..., list[Any]]:
    """In place of VLMEvalKit's worker processes."""

    def run(function: Any, inputs: Any, *, save: str, keys: list[int], **_: Any) -> list[Any]:
        found = [function(**one) for one in inputs]
        kept[save] = dict(zip(keys, found, strict=True))
        return found

    return run


def _file(given: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    questions, rows = [], []
    for row in given:
        for index, options, right, answer in _passes(row):
            extra = {BASE: str(row["index"]), PASS: index // PASS_STEP, L2: row["l2"]}
            questions.append(
                Question(
                    str(index),
                    "val",
                    "?",
                    choices=tuple(options),
                    answer_index=right,
                    category=row["category"],
                    extra=extra,
                )
            )
            rows.append({"index": index, "prediction": answer})
    with written(predictions=rows) as (path,):
        predictions = read_mmbench_predictions(path, questions)
    (scores,) = score_mmbench(questions, predictions).scored
    return {
        rule: {
            "split": "dev",
            "Overall": scores.scores[f"mmbench/{rule}_2026"],
            **{
                group.partition(": ")[2]: found[f"mmbench/{rule}_2026"]
                for group, found in scores.by_category.items()
            },
        }
        for rule in ("circular", "vanilla")
    }


_KIT = "open-compass/VLMEvalKit"
CASES = (
    Case(
        "mmbench_letter",
        _KIT,
        _LETTERS_FILE,
        draw=_draw_answer,
        official=_official_letter(answer_is=False),
        ours=_letter(answer_is=False),
    ),
    Case(
        "mmbench_letter_2026",
        _KIT,
        _LETTERS_FILE,
        draw=_draw_answer,
        official=_official_letter(answer_is=True),
        ours=_letter(answer_is=True),
    ),
    Case(
        "mmbench_circular",
        _KIT,
        "vlmeval/dataset/utils/multiple_choice.py",
        draw=_draw_file,
        official=_official_file,
        ours=_file,
        rows=10,
    ),
)
