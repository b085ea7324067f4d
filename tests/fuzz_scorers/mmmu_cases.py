"""MMMU's letters, open answers and both of its scripts; MRAG-Bench's letters."""

import ast
import json
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmqa_jax.benchmarks.mmmu import DISCIPLINES, read_mmmu_predictions, score_mmmu
from mmqa_jax.benchmarks.mragbench import score_mragbench
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import is_open_answer, mmmu_choice
from tests.fuzz_scorers import traps
from tests.fuzz_scorers.case import Case, Score, always
from tests.fuzz_scorers.choice_texts import LETTERS, choices, choosing
from tests.fuzz_scorers.files import written
from tests.fuzz_scorers.official import definitions, run_script

_SUBJECTS = tuple(subject for subjects in DISCIPLINES.values() for subject in subjects)
_FORMS = (
    *("{any}", "The answer is {any}.", "so {any}", "{any} = {near}", "x = {near}", "it is {near}."),
    *("Therefore {any}. Thus {near}", "{any}\nfinal answer {near}", "could be {near} or {any}"),
    *("The result is {near}\nso {any}", "{near}", "{near}.", "is :", "is x", "answer is {near} "),
    *("{any}. The result {near}", "so so {near}", "is ", "={near}", "final {any} is {near}"),
)


def _draw_choice(draw: random.Random) -> dict[str, Any]:
    options = choices(draw, 2, 9)
    return {"text": choosing(draw, options), "choices": options}


def _official_choice(file: Path) -> Score:
    """The index of the choice; None where the script draws one."""
    drawn = SimpleNamespace(choice=lambda letters: None)
    official = definitions(file, "parse_multi_choice_response", random=drawn)

    def score(given: dict[str, Any]) -> int | None:
        named = dict(zip(LETTERS, given["choices"], strict=False))
        letter = official.parse_multi_choice_response(given["text"], list(named), named)
        return None if letter is None else LETTERS.index(letter)

    return score


def _choice(given: dict[str, Any]) -> int | None:
    return mmmu_choice(given["text"], len(given["choices"]), given["choices"])


def _draw_open(draw: random.Random) -> dict[str, Any]:
    answers = [traps.text(draw, most=2) for _ in range(draw.choice((1, 1, 2)))]
    near = traps.near(draw, draw.choice(answers))
    response = draw.choice(_FORMS).format(any=traps.text(draw), near=near)
    return {"response": response, "answers": answers}


def _official_open(file: Path) -> Score:
    official = definitions(file, "parse_open_response", "eval_open")

    def score(given: dict[str, Any]) -> bool:
        return official.eval_open(given["answers"], official.parse_open_response(given["response"]))

    return score


def _draw_file(draw: random.Random) -> list[dict[str, Any]]:
    """Questions of three subjects, of both kinds, with responses."""
    rows = []
    for subject in draw.sample(_SUBJECTS, 3):
        for number in range(1, draw.randint(2, 7)):
            row = {"id": f"validation_{subject}_{number}", "subject": subject}
            if draw.random() < 0.7:
                options = choices(draw, 2, 5)
                right = draw.randrange(len(options))
                is_plain = draw.random() < 0.4
                said = LETTERS[right] if is_plain else choosing(draw, options)
                row |= {"choices": options, "right": right, "response": said}
            else:
                row |= _draw_open(draw)
            rows.append(row)
    return rows


def _official_parsed(file: Path) -> Score:
    """Accuracy of each subject by main_parse_and_eval.py."""

    def score(given: list[dict[str, Any]]) -> dict[str, float]:
        subjects: dict[str, list[dict[str, Any]]] = {}
        for row in given:
            subjects.setdefault(row["subject"], []).append(_output(row))
        with tempfile.TemporaryDirectory() as folder:
            for subject, outputs in subjects.items():
                Path(folder, subject).mkdir()
                Path(folder, subject, "output.json").write_text(json.dumps(outputs), "utf-8")
            run_script(file, "--path", folder, "--subject", "ALL")
            return {
                subject: json.loads(Path(folder, subject, "result.json").read_text("utf-8"))["acc"]
                for subject in subjects
            }

    return score


def _output(row: dict[str, Any]) -> dict[str, Any]:
    """A row as models' outputs are kept."""
    output = {"id": row["id"], "response": row["response"]}
    if "choices" not in row:
        return {**output, "question_type": "open", "answer": row["answers"]}
    named = dict(zip(LETTERS, row["choices"], strict=False))
    return {
        **output,
        "question_type": "multiple-choice",
        "answer": LETTERS[row["right"]],
        "all_choices": list(named),
        "index2ans": named,
    }


def _official_letters(file: Path) -> Score:
    """What main_eval_only.py prints: number and accuracy of each group."""

    def score(given: list[dict[str, Any]]) -> dict[str, Any]:
        said = {row["id"]: row["response"] for row in given}
        wanted = {
            row["id"]: {"question_type": one["question_type"], "ground_truth": one["answer"]}
            for row in given
            for one in [_output(row)]
        }
        with written(said=said, wanted=wanted) as (output, answers):
            printed = run_script(file, "--output_path", str(output), "--answer_path", str(answers))
        groups = ast.literal_eval(printed.splitlines()[-1])
        return {name: group for name, group in groups.items() if group["num"]}

    return score


def _scored(given: list[dict[str, Any]]) -> Any:
    questions = [
        Question(
            row["id"],
            "val",
            "?",
            answers=tuple(row["answers"]) if "answers" in row else (row["choices"][row["right"]],),
            choices=tuple(row.get("choices", ())),
            answer_index=row.get("right"),
            category=row["subject"],
        )
        for row in given
    ]
    with written(said={row["id"]: row["response"] for row in given}) as (path,):
        predictions = read_mmmu_predictions(path, questions)
    (scores,) = score_mmmu(questions, predictions).scored
    return scores


def _parsed(given: list[dict[str, Any]]) -> dict[str, float]:
    by_group = _scored(given).by_category
    return {row["subject"]: by_group[row["subject"]]["mmmu/official"] for row in given}


def _letters(given: list[dict[str, Any]]) -> dict[str, Any]:
    scores = _scored(given)
    names = [f"Overall-{discipline}" for discipline in DISCIPLINES]
    groups = {
        name: {"num": count, "acc": round(scores.by_category[name]["mmmu/letter"], 3)}
        for name, count in scores.counts.items()
        if name in _SUBJECTS or name in names
    }
    overall = {"num": scores.n, "acc": round(scores.scores["mmmu/letter"], 3)}
    return {**groups, "Overall": overall}


def _draw_mrag(draw: random.Random) -> dict[str, Any]:
    options = choices(draw, 4, 4)
    return {"text": choosing(draw, options), "right": draw.randrange(4)}


def _official_mrag(file: Path) -> Score:
    """Whether the choice is right; wrong where the script asks a language model."""
    official = definitions(file, "parse_multi_choice_response")

    def score(given: dict[str, Any]) -> float:
        said = given["text"].strip()
        letter = official.parse_multi_choice_response(said, list("ABCD"), given["right"])
        return float(letter == LETTERS[given["right"]])

    return score


def _mrag(given: dict[str, Any]) -> float:
    question = Question("q", "test", "?", choices=tuple("wxyz"), answer_index=given["right"])
    (scores,) = score_mragbench([question], [Prediction("q", given["text"])]).scored
    return scores.scores["mragbench/rule"]


_MMMU = "MMMU-Benchmark/MMMU"
CASES = (
    Case(
        "mmmu_choice",
        _MMMU,
        "mmmu/utils/eval_utils.py",
        draw=_draw_choice,
        official=_official_choice,
        ours=_choice,
    ),
    Case(
        "mmmu_open",
        _MMMU,
        "mmmu/utils/eval_utils.py",
        draw=_draw_open,
        official=_official_open,
        ours=lambda given: is_open_answer(given["response"], given["answers"]),
    ),
    Case(
        "mmmu_file",
        _MMMU,
        "mmmu/main_parse_and_eval.py",
        draw=_draw_file,
        official=_official_parsed,
        ours=_parsed,
        rows=10,
    ),
    Case(
        "mmmu_letter_file",
        _MMMU,
        "mmmu/main_eval_only.py",
        draw=_draw_file,
        official=_official_letters,
        ours=_letters,
        rows=10,
    ),
    Case(
        "mragbench",
        "mragbench/MRAG-Bench",
        "eval/utils/automatic_extract.py",
        draw=_draw_mrag,
        official=_official_mrag,
        ours=_mrag,
        # An answer of more than five words without a letter: the script passes no contents.
        at_error=always(0.0),
    ),
)
