"""VQA's accuracy, A-OKVQA's two, and how Prophet and PICa normalize answers."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmqa_jax.benchmarks import aokvqa, okvqa
from mmqa_jax.benchmarks.aokvqa import read_aokvqa_predictions
from mmqa_jax.benchmarks.okvqa import read_okvqa_predictions
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.answers import pica_answer, prep_ans
from mmqa_jax.data.formats.official import DIFFICULT
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation import vqa
from tests.fuzz_scorers import traps
from tests.fuzz_scorers.case import Case, Known, Raised, Score, always
from tests.fuzz_scorers.files import written
from tests.fuzz_scorers.official import definitions
from tests.fuzz_scorers.text_cases import boundaries_differ

_UNROUNDED = 30  # decimals to which the official code rounds percentages
_TYPES = ("what", "how many", "is the")


def _draw_annotated(draw: random.Random) -> dict[str, Any]:
    """An answer and ten annotators' answers, which are of one to three kinds."""
    kinds = [traps.text(draw, most=3) for _ in range(draw.randint(1, 3))]
    references = [draw.choice(kinds) for _ in range(10)]
    if draw.random() < 0.7:
        references = [traps.near(draw, one) if draw.random() < 0.4 else one for one in references]
    return {"answer": traps.answer(draw, references), "references": references}


def _draw_annotated_file(draw: random.Random) -> list[dict[str, Any]]:
    return [{**_draw_annotated(draw), "type": draw.choice(_TYPES)} for _ in range(20)]


def _evaluated(file: Path, rows: list[dict[str, Any]]) -> Any:
    """The official object after it has scored rows."""
    questions, results = {}, {}
    for number, row in enumerate(rows):
        answers = [{"answer": one, "answer_id": n} for n, one in enumerate(row["references"])]
        kind = row.get("type", "")
        questions[number] = {"answers": answers, "question_type": kind, "answer_type": kind}
        results[number] = {"answer": row["answer"]}
    official = definitions(file, "VQAEval").VQAEval(
        SimpleNamespace(getQuesIds=lambda: list(questions), qa=questions),
        SimpleNamespace(qa=results),
        n=_UNROUNDED,
    )
    official.evaluate()
    return official


def _official_accuracy(file: Path) -> Score:
    return lambda given: _evaluated(file, [given]).evalQA[0] / 100


def _official_by_type(file: Path) -> Score:
    def score(given: list[dict[str, Any]]) -> dict[str, float]:
        accuracy = _evaluated(file, given).accuracy
        return {"overall": accuracy["overall"], **accuracy["perQuestionType"]}

    return score


def _by_type(given: list[dict[str, Any]]) -> dict[str, float]:
    questions = [
        Question(str(n), "val", "?", answers=tuple(row["references"]), category=row["type"])
        for n, row in enumerate(given)
    ]
    results = [{"question_id": n, "answer": row["answer"]} for n, row in enumerate(given)]
    with written(results=results) as (path,):
        predictions = read_okvqa_predictions(path, questions)
    (scores,) = okvqa.score_okvqa(questions, predictions).scored
    name = "vqa_accuracy/official"
    by_type = {kind: 100 * found[name] for kind, found in scores.by_category.items()}
    return {"overall": 100 * scores.scores[name], **by_type}


def _of_answer(rule: Callable[[str, list[str]], float]) -> Score:
    return lambda given: rule(given["answer"], given["references"])


def _draw_aokvqa(draw: random.Random) -> dict[str, Any]:
    """Questions with options and direct answers, and predictions of some, of either kind."""
    questions, predictions = [], {}
    for number in range(draw.randint(1, 12)):
        kinds = [traps.text(draw, most=2) or "dog" for _ in range(3)]
        direct = [draw.choice(kinds) for _ in range(10)]
        choices = [draw.choice((*kinds, *traps.PLAIN)) for _ in range(4)]
        questions.append(
            {
                "question_id": f"q{number}",
                "choices": choices,
                "correct_choice_idx": draw.randrange(4),
                "direct_answers": direct,
                "difficult_direct_answer": draw.random() < 0.3,
            }
        )
        if draw.random() < 0.9:
            predictions[f"q{number}"] = {
                "direct_answer": traps.answer(draw, direct),
                "multiple_choice": draw.choice((*choices, traps.answer(draw, choices))),
            }
    predictions.setdefault("q0", {})["multiple_choice"] = questions[0]["choices"][0]
    predictions["q0"].setdefault("direct_answer", "dog")
    return {"questions": questions, "predictions": predictions}


def _official_aokvqa(key: str) -> Callable[[Path], Score]:
    def opened(file: Path) -> Score:
        evaluate = definitions(file, "eval_aokvqa").eval_aokvqa

        def score(given: dict[str, Any]) -> float:
            said = {name: row[key] for name, row in given["predictions"].items()}
            chooses = key == "multiple_choice"
            return evaluate(given["questions"], said, multiple_choice=chooses, strict=False)

        return score

    return opened


def _aokvqa(key: str) -> Score:
    def score(given: dict[str, Any]) -> float:
        questions = [
            Question(
                row["question_id"],
                "val",
                "?",
                answers=tuple(row["direct_answers"]),
                choices=tuple(row["choices"]),
                answer_index=row["correct_choice_idx"],
                extra={DIFFICULT: row["difficult_direct_answer"]},
            )
            for row in given["questions"]
        ]
        said = {name: {key: row[key]} for name, row in given["predictions"].items()}
        with written(predictions=said) as (path,):
            predictions = read_aokvqa_predictions(path, questions)
        (scores,) = aokvqa.score_aokvqa(questions, predictions).scored
        (value,) = scores.scores.values()
        return 100 * value

    return score


def _draw_answer(draw: random.Random) -> str:
    return traps.text(draw)


def _official_kat(file: Path) -> Score:
    rule = definitions(file, "okvqa_ems").okvqa_ems
    return lambda given: rule(given["answer"], given["references"])


def _boundaries_differ(given: dict[str, Any]) -> bool:
    return boundaries_differ([given["answer"], *given["references"]])


def _official_prep_ans(file: Path) -> Score:
    return definitions(file, "prep_ans").prep_ans


def _official_pica(file: Path) -> Score:
    return definitions(file, "process_answer").process_answer


_VQA = ("GT-Vision-Lab/VQA", "PythonEvaluationTools/vqaEvaluation/vqaEval.py")
_AOKVQA = ("allenai/aokvqa", "evaluation/eval_predictions.py")
_PROPHET = "MILVLG/prophet"
# The official code adds up ten accuracies, ours multiplies by counts; percentages of files alike.
_SUM, _PERCENT = 1e-12, 1e-10
CASES = (
    Case(
        "vqa",
        *_VQA,
        draw=_draw_annotated,
        official=_official_accuracy,
        ours=_of_answer(vqa.official_accuracy),
        tolerance=_SUM,
    ),
    Case(
        "vqa_file",
        *_VQA,
        draw=_draw_annotated_file,
        official=_official_by_type,
        ours=_by_type,
        rows=20,
        tolerance=_PERCENT,
    ),
    Case(
        "vqa_prophet",
        _PROPHET,
        "evaluation/vqa_utils/vqaEval.py",
        draw=_draw_annotated,
        official=_official_accuracy,
        ours=_of_answer(vqa.prophet_accuracy),
        tolerance=_SUM,
    ),
    Case(
        "vqa_kat",
        "guilk/KAT",
        "src/evaluation.py",
        draw=_draw_annotated,
        official=_official_kat,
        ours=_of_answer(vqa.kat_accuracy),
        known=(Known("KAT's word boundaries are those of the package regex", _boundaries_differ),),
    ),
    Case(
        "prep_ans",
        _PROPHET,
        "evaluation/ans_punct.py",
        draw=_draw_answer,
        official=_official_prep_ans,
        ours=prep_ans,
    ),
    Case(
        "pica_answer",
        "microsoft/PICa",
        "gpt3_api_okvqa.py",
        draw=_draw_answer,
        official=_official_pica,
        ours=pica_answer,
    ),
    Case(
        "aokvqa_direct",
        *_AOKVQA,
        draw=_draw_aokvqa,
        official=_official_aokvqa("direct_answer"),
        ours=_aokvqa("direct_answer"),
        rows=6,
        tolerance=_PERCENT,
        at_error=always(Raised(UserError.__name__)),  # a split of difficult questions alone
    ),
    Case(
        "aokvqa_choice",
        *_AOKVQA,
        draw=_draw_aokvqa,
        official=_official_aokvqa("multiple_choice"),
        ours=_aokvqa("multiple_choice"),
        rows=6,
        tolerance=_PERCENT,
    ),
)
