"""ScienceQA's letters and columns, LLaVA's evaluation of it, and SEED-Bench's letters."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmqa_jax.benchmarks.scienceqa import (
    read_scienceqa,
    read_scienceqa_predictions,
    score_scienceqa,
)
from mmqa_jax.benchmarks.seedbench import (
    DATA_TYPE,
    DIMENSION,
    score_seed_bench,
)
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation import multiple_choice as rules
from tests.fuzz_scorers.case import Case, Score
from tests.fuzz_scorers.choice_texts import LETTERS, choices, choosing
from tests.fuzz_scorers.files import lines, written
from tests.fuzz_scorers.official import definitions, run_script

_SUBJECTS = ("natural science", "social science", "language science")
# The official names of ScienceQA's columns.
_COLUMNS = {
    "acc_natural": "NAT",
    "acc_social": "SOC",
    "acc_language": "LAN",
    "acc_has_text": "TXT",
    "acc_has_image": "IMG",
    "acc_no_context": "NO",
    "acc_grade_1_6": "G1-6",
    "acc_grade_7_12": "G7-12",
}
_EMPTY = -1  # the official score of a column without questions
_OPTIONS = list("ABCDE")


def _draw_letter(draw: random.Random) -> dict[str, Any]:
    options = choices(draw)
    return {"text": choosing(draw, options), "choices": len(options)}


def _official_letter(file: Path) -> Score:
    """The index of the choice; None where the script draws one."""
    said: list[str] = []
    completion = SimpleNamespace(create=lambda **_: {"choices": [{"text": said[-1]}]})
    official = definitions(
        file,
        "get_gpt3_result",
        "get_pred_idx",
        openai=SimpleNamespace(Completion=completion),
        random=SimpleNamespace(choice=lambda numbers: None),
    )
    names = ("engine", "temperature", "max_tokens", "top_p", "frequency_penalty")
    arguments = SimpleNamespace(**dict.fromkeys((*names, "presence_penalty")))

    def score(given: dict[str, Any]) -> int | None:
        said.append(given["text"])
        letter, _ = official.get_gpt3_result("", arguments)
        return official.get_pred_idx(letter, range(given["choices"]), _OPTIONS)

    return score


def _problem(draw: random.Random) -> dict[str, Any]:
    options = choices(draw)
    return {
        "question": "?",
        "choices": options,
        "answer": draw.randrange(len(options)),
        "hint": draw.choice(("", "", "Look.")),
        "image": draw.choice((None, "image.png")),
        "subject": draw.choice(_SUBJECTS),
        "grade": f"grade{draw.randint(1, 12)}",
        "topic": draw.choice(("verbs", "physics", "culture")),
        "split": "test",
    }


def _draw_columns(draw: random.Random) -> dict[str, Any]:
    problems = {str(number): _problem(draw) for number in range(draw.randint(1, 30))}
    results = {
        name: draw.choice((one["answer"], draw.randrange(-1, 5), str(one["answer"])))
        for name, one in problems.items()
    }
    return {"problems": problems, "results": results}


def _official_columns(file: Path) -> Score:
    import pandas as pd

    pd.set_option("mode.chained_assignment", None)
    # The file asserts that there are 4,241 results.
    official = definitions(file, "get_scores", asserts=False)

    def score(given: dict[str, Any]) -> dict[str, str]:
        with written(problems=given["problems"], results=given) as (problems, results):
            found = official.get_scores(results, problems)
        columns = {ours: found[name] for name, ours in _COLUMNS.items() if found[name] != _EMPTY}
        return {"average": found["acc_average"], **columns}

    return score


def _columns(given: dict[str, Any]) -> dict[str, str]:
    with written(problems=given["problems"], results=given) as (problems, results):
        questions = read_scienceqa(problems).questions
        predictions = read_scienceqa_predictions(results, questions)
    (scores,) = score_scienceqa(questions, predictions).scored
    name = "scienceqa/recorded_choice"
    columns = {column: f"{found[name] * 100:.2f}" for column, found in scores.by_category.items()}
    return {"average": f"{scores.scores[name] * 100:.2f}", **columns}


def _draw_llava(draw: random.Random) -> dict[str, Any]:
    """Problems and LLaVA's lines of most of them, the first one's with a picture."""
    problems = {str(number): _problem(draw) for number in range(draw.randint(1, 20))}
    answers = {
        name: choosing(draw, one["choices"])
        for name, one in problems.items()
        if name == "0" or draw.random() < 0.9
    }
    return {"problems": problems, "answers": answers}


def _llava_lines(given: dict[str, Any]) -> str:
    return lines(
        {"question_id": name, "text": text, "prompt": "<image>" if name == "0" else ""}
        for name, text in given["answers"].items()
    )


def _official_llava(file: Path) -> Score:
    def score(given: dict[str, Any]) -> dict[str, Any]:
        problems = given["problems"]
        splits = {"test": list(problems)}
        with written(problems=problems, pid_splits=splits) as (path, _):
            folder = path.parent
            said, out, result = folder / "a.jsonl", folder / "o.json", folder / "r.json"
            said.write_text(_llava_lines(given), encoding="utf-8")
            run_script(
                file,
                *("--base-dir", str(folder), "--result-file", str(said)),
                *("--output-file", str(out), "--output-result", str(result)),
            )
            found = json.loads(result.read_text(encoding="utf-8"))
        return {"choices": found["results"], "accuracy": found["acc"]}

    return score


def _llava(given: dict[str, Any]) -> dict[str, Any]:
    problems = given["problems"]
    with written(problems=problems) as (path,):
        questions = read_scienceqa(path).questions
        said = path.with_name("a.jsonl")
        said.write_text(_llava_lines(given), encoding="utf-8")
        predictions = read_scienceqa_predictions(said, questions)
    answers = {one.question_id: one.answer for one in predictions}
    found = {
        name: rules.llava_choice(answers.get(name, "FAILED"), len(one["choices"]))
        for name, one in problems.items()
    }
    (scores,) = score_scienceqa(questions, predictions).scored
    return {
        "choices": {name: -1 if choice is None else choice for name, choice in found.items()},
        "accuracy": scores.scores["scienceqa/letter_or_wrong"] * 100,
    }


def _draw_seed(draw: random.Random) -> list[dict[str, Any]]:
    """Questions on pictures and videos, some of each, with answers.

    Of each dimension one is right: the official script ends with an error where none is.
    """
    rows: list[dict[str, Any]] = []
    for number in range(draw.randint(2, 20)):
        answer = draw.choice("ABCD")
        dimension = draw.randint(1, 9) if number % 2 else draw.randint(10, 12)
        is_new = all(row["dimension"] != dimension for row in rows)
        is_right = is_new or draw.random() < 0.3
        text = answer if is_right else choosing(draw, choices(draw, 4, 4))
        rows.append({"dimension": dimension, "answer": answer, "text": text})
    return rows


def _kind(dimension: int) -> str:
    return "image" if dimension < 10 else "video"


def _official_seed(file: Path) -> Score:
    def score(given: list[dict[str, Any]]) -> dict[str, str]:
        questions = [
            {
                "question_id": number,
                "question_type_id": row["dimension"],
                "data_type": _kind(row["dimension"]),
                "answer": row["answer"],
            }
            for number, row in enumerate(given)
        ]
        names = {str(dimension): dimension for dimension in range(1, 13)}
        with written(data={"questions": questions, "question_type": names}) as (data,):
            said, out = data.with_name("a.jsonl"), data.with_name("o.jsonl")
            said.write_text(_seed_lines(given), encoding="utf-8")
            printed = run_script(
                file,
                *("--annotation-file", str(data), "--result-file", str(said)),
                *("--result-upload-file", str(out)),
            )
        return dict(line.split(": ") for line in printed.splitlines())

    return score


def _seed_lines(given: list[dict[str, Any]]) -> str:
    return lines({"question_id": n, "text": row["text"]} for n, row in enumerate(given))


def _seed(given: list[dict[str, Any]]) -> dict[str, str]:
    questions = [
        Question(
            str(number),
            "test",
            "?",
            choices=tuple("wxyz"),
            answer_index=LETTERS.index(row["answer"]),
            extra={DIMENSION: row["dimension"], DATA_TYPE: _kind(row["dimension"])},
        )
        for number, row in enumerate(given)
    ]
    with written(unused={}) as (path,):
        said = path.with_name("a.jsonl")
        said.write_text(_seed_lines(given), encoding="utf-8")
        predictions = rules.read_choice_lines(said, questions)
    (scores,) = score_seed_bench(questions, predictions).scored
    name = "seed_bench/letter"
    found = {group: f"{one[name] * 100:.2f}%" for group, one in scores.by_category.items()}
    return {
        **{group.strip(): value for group, value in found.items() if "," not in group},
        "Total accuracy": f"{scores.scores[name] * 100:.2f}%",
        "image accuracy": found["pictures, 1-9"],
        "video accuracy": found["videos, 10-12"],
    }


CASES = (
    Case(
        "scienceqa_letter",
        "lupantech/ScienceQA",
        "models/run_gpt3.py",
        draw=_draw_letter,
        official=_official_letter,
        ours=lambda given: rules.gpt3_choice(given["text"], given["choices"]),
    ),
    Case(
        "scienceqa_columns",
        "lupantech/ScienceQA",
        "tools/evaluate_acc.py",
        draw=_draw_columns,
        official=_official_columns,
        ours=_columns,
        rows=15,
    ),
    Case(
        "scienceqa_llava",
        "haotian-liu/LLaVA",
        "llava/eval/eval_science_qa.py",
        draw=_draw_llava,
        official=_official_llava,
        ours=_llava,
        rows=10,
    ),
    Case(
        "seed_bench",
        "haotian-liu/LLaVA",
        "scripts/convert_seed_for_submission.py",
        draw=_draw_seed,
        official=_official_seed,
        ours=_seed,
        rows=10,
    ),
)
