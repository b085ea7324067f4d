"""MathVista's rules of extraction, its normalization, and its accuracies of a file."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmqa_jax.benchmarks.mathvista import (
    KIND,
    read_mathvista_predictions,
    score_mathvista,
)
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.multiple_choice import (
    ANSWER_TYPE,
    PRECISION,
    extracted_by_rule,
    normalized,
)
from tests.fuzz_scorers import traps
from tests.fuzz_scorers.case import Case, Score
from tests.fuzz_scorers.choice_texts import choices, choosing
from tests.fuzz_scorers.files import written
from tests.fuzz_scorers.official import definitions

_ASKED = "what a language model says"
_CHOICE, _FREE = "multi_choice", "free_form"
_NUMBERS = (
    *(
        "5",
        "-5",
        "5.0",
        "5.55",
        "5.555",
        "0.5",
        ".5",
        "1e3",
        "1e400",
        "nan",
        "inf",
        "1_000",
        "1,000",
    ),
    *(
        " 7 ",
        "７",
        "٣",
        "5%",
        "$5",
        "five",
        "1/2",
        "",
        "2.5",
        "3.5",
        "-0.0",
        "0",
        "12 apples",
        "[1, 2]",
    ),
)
_VALUES = {
    "language": ("english", "chinese"),
    "source": ("IQTest", "PlotQA"),
    "category": ("general-vqa", "math-targeted-vqa"),
    "task": ("figure question answering", "math word problem"),
    "context": ("bar chart", "puzzle test"),
    "grade": ("not applicable", "high school"),
}
_SKILLS = ("algebraic reasoning", "scientific reasoning", "statistical reasoning")


def _draw_problem(draw: random.Random) -> dict[str, Any]:
    """A problem as the official files have it, with an extraction and a response."""
    answer_type = draw.choice(("text", "text", "integer", "float", "list"))
    problem = {
        "question_type": _CHOICE if answer_type == "text" else _FREE,
        "answer_type": answer_type,
        "choices": choices(draw, 2, 6) if answer_type == "text" else None,
        "precision": float(draw.choice((1, 2))) if answer_type == "float" else None,
    }
    if answer_type == "text":
        said = draw.choice(
            ("", choosing(draw, problem["choices"]), draw.choice(problem["choices"]))
        )
        problem["answer"] = draw.choice(problem["choices"])
    else:
        numbers = [draw.choice(_NUMBERS), traps.text(draw, _NUMBERS, most=2)]
        said = draw.choice((*numbers, traps.text(draw, most=2)))
        problem["answer"] = draw.choice(("5", "5.0", "0.5", "5.55", "3", "1000", "[1, 2]"))
    if draw.random() < 0.3:
        said = draw.choice(('The answer is "{}".', 'The answer is "{}". "."', "{}.")).format(said)
    return {**problem, "extraction": said}


def _question(name: str, problem: dict[str, Any]) -> Question:
    precision = problem["precision"]
    return Question(
        name,
        "val",
        "?",
        answers=(problem["answer"],),
        choices=tuple(problem["choices"] or ()),
        category=problem.get("metadata", {}).get("task", ""),
        extra={
            KIND: problem["question_type"],
            ANSWER_TYPE: problem["answer_type"],
            PRECISION: None if precision is None else int(precision),
            **problem.get("metadata", {}),
        },
    )


def _official_extraction(file: Path) -> Score:
    """What both forms of the rules take from a response."""
    official = definitions(file, "extract_answer", demo_prompt="")
    model = SimpleNamespace(get_response=lambda user_prompt: _ASKED)

    def score(given: dict[str, Any]) -> list[str]:
        problem = {**given, "query": "", "pid": "1"}
        return [
            official.extract_answer(model, given["extraction"], problem, quick)
            for quick in (False, True)
        ]

    return score


def _extraction(given: dict[str, Any]) -> list[str]:
    found = [
        extracted_by_rule(given["extraction"], _question("1", given), quick=quick)
        for quick in (False, True)
    ]
    return [_ASKED if one is None else one for one in found]


def _distance() -> Callable[[str, str], int]:
    """Levenshtein's distance, from a package that is there."""
    from nltk.metrics.distance import edit_distance

    return edit_distance


def _official_normalized(file: Path) -> Score:
    """The normalized extraction, empty ones taken as the shortest option and as none."""
    official = definitions(file, "normalize_extracted_answer", distance=_distance())
    keys = ("extraction", "choices", "question_type", "answer_type", "precision")

    def score(given: dict[str, Any]) -> list[str | None]:
        arguments = [given[key] for key in keys]
        return [official.normalize_extracted_answer(*arguments, empty) for empty in (False, True)]

    return score


def _normalized(given: dict[str, Any]) -> list[str | None]:
    question = _question("1", given)
    return [
        normalized(given["extraction"], question, ignore_empty=empty) for empty in (False, True)
    ]


def _draw_file(draw: random.Random) -> list[dict[str, Any]]:
    """Problems as JSON has them: an extraction may be a number, a list or null, too."""
    no_texts = (5, 5.0, 0.5, 5.554, 3.7, 1000, [1, 2], None)
    return [
        {
            **_draw_problem(draw),
            **({"extraction": draw.choice(no_texts)} if draw.random() < 0.3 else {}),
            "metadata": {
                **{key: draw.choice(values) for key, values in _VALUES.items()},
                "skills": draw.sample(_SKILLS, draw.randint(1, 3)),
            },
        }
        for _ in range(draw.randint(1, 15))
    ]


def _official_file(file: Path) -> Score:
    """Accuracies by each key, as calculate_score.py writes them."""

    def score(given: list[dict[str, Any]]) -> dict[str, Any]:
        # Numbers, since the script takes the rows of its table by theirs.
        results = dict(enumerate(given))
        with written(scores={}) as (path,):
            arguments = SimpleNamespace(
                output_dir=str(path.parent),
                output_file="unused",
                score_file=path.name,
                dataset_name="",
                test_split_name="",
                max_num_problems=-1,
                rerun=False,
                caculate_gain=False,
                ignore_empty_extractions=False,
            )
            official = definitions(
                file,
                "main",
                distance=_distance(),
                parse_args=lambda: arguments,
                load_dataset=lambda name, split: [],
                read_json=lambda path: results,
                save_json=lambda content, path: None,
                tqdm=list,
                get_full_metrics_str=str,
            )
            official.main()
            found = json.loads(path.read_text(encoding="utf-8"))
        return {
            "average": found.pop("average")["accuracy"],
            **{
                f"{key}: {name}": [values["accuracy"], values["total"]]
                for key, groups in found.items()
                for name, values in groups.items()
            },
        }

    return score


def _file(given: list[dict[str, Any]]) -> dict[str, Any]:
    questions = [_question(str(n), problem) for n, problem in enumerate(given)]
    said = {str(n): {"extraction": problem["extraction"]} for n, problem in enumerate(given)}
    with written(said=said) as (path,):
        predictions = read_mathvista_predictions(path, questions)
    (scores,) = score_mathvista(questions, predictions).scored
    name = "mathvista/official"
    groups = {
        group: [found[name], scores.counts[group]] for group, found in scores.by_category.items()
    }
    return {"average": scores.scores[name], **groups}


_MATHVISTA = "lupantech/MathVista"
CASES = (
    Case(
        "mathvista_extraction",
        _MATHVISTA,
        "evaluation/extract_answer.py",
        draw=_draw_problem,
        official=_official_extraction,
        ours=_extraction,
    ),
    Case(
        "mathvista_normalized",
        _MATHVISTA,
        "evaluation/calculate_score.py",
        draw=_draw_problem,
        official=_official_normalized,
        ours=_normalized,
    ),
    Case(
        "mathvista_file",
        _MATHVISTA,
        "evaluation/calculate_score.py",
        draw=_draw_file,
        official=_official_file,
        ours=_file,
        rows=8,
    ),
)
