"""MathVista's files (https://github.com/lupantech/MathVista; AI4Math/MathVista on the hub).

    testmini.json, test.json, here or in data/   {pid: problem}
    images/{pid}.jpg, here or in data/           the pictures of these
    {testmini,test}-*.parquet, here or in data/  instead of all these; pictures in decoded_image

A problem has pid, question, choices or null, unit, precision, answer, question_type (multi_choice
or free_form), answer_type (text, integer, float, list) and metadata. Answers of test are hidden.

MathVista's extraction rules, scores and result file (lupantech/MathVista, evaluation/).

    mathvista/official      answers are extractions (calculate_score.py): of a choice the letter, or
                            the option of least edit distance; numbers rounded; lists as they are
    mathvista/empty_wrong   the same with --ignore_empty_extractions: an empty one names no option

Extractions come from responses by rules, and by a language model where these find none
(extract_answer.py; papers/mathvista.py asks it). The file is {pid: problem with `extraction`}.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.official import ParquetPictures, hub_tables, parquet_entries
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.multiple_choice import (
    ANSWER_TYPE,
    LETTERS,
    PRECISION,
    by_choice,
    extracted_by_rule,
    normalized,
)
from mmqa_jax.evaluation.scores import groups_by, paired, read_object, read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers

# Keys of Question.extra: how a question is answered, and the unit that prompts name.
KIND, UNIT = "question_type", "unit"
CHOICE, FREE = "multi_choice", "free_form"
ANSWER_TYPES = ("text", "integer", "float", "list")
# Keys of `metadata`, kept in extra: by these the official script groups its scores.
GROUPS = ("language", "source", "category", "task", "context", "grade", "skills")

# The paper, table 1.
PUBLISHED_COUNTS = {"val questions": 1_000, "test questions": 5_141}
MATERIALS = (
    Material(
        "MathVista",
        "Lu et al., ICLR 2024",
        "CC BY-SA 4.0; pictures under their data sets' licenses",
    ),
)

_SPLITS = {"testmini": "val", "test": "test"}
_NEEDED = ("pid", "question", "choices", "answer", KIND, ANSWER_TYPE, PRECISION, UNIT, "metadata")
_PICTURE = "decoded_image"
_SPLIT = "split"  # added to an entry, where its file says it


def read_mathvista(folder: Path) -> official.BenchmarkFiles:
    """Reads what there is of testmini, which becomes `val`, and test.

    `Question.category` is the task; `extra` keeps unit, precision, both types and the metadata.
    """
    files = official.OfficialFiles(folder)
    tables = {split: hub_tables(folder, name) for name, split in _SPLITS.items()}
    paths = [path for split_paths in tables.values() for path in split_paths]
    files.read_files += paths
    read = _table_rows(tables) if paths else _json_rows(files)
    questions = official.read_entries(read, _question, "pid").values()
    files.check_questions(
        questions, "MathVista", "testmini.json and images/, or the hub's Parquet files,"
    )
    pictures: ParquetPictures | official.PictureFiles
    if paths:
        pictures = ParquetPictures(paths, "pid", _PICTURE)
    else:
        places = {q.id: tuple(_places(q.extra.get("image"))) for q in questions}
        pictures = official.PictureFiles(folder, places)
    pictured = official.with_present_pictures(questions, pictures)
    if absent := sum(question.image is None for question in pictured):
        files.missing["images/"] = f"{absent:,} questions have no picture file"
    return files.content(pictured, _counts(pictured), PUBLISHED_COUNTS, pictures)


def _table_rows(tables: Mapping[str, Sequence[Path]]) -> Iterator[official.Entry]:
    for split, paths in tables.items():
        for row in parquet_entries(paths, _NEEDED, ("image",)):
            row[_SPLIT] = split
            yield row


def _json_rows(files: official.OfficialFiles) -> Iterator[official.Entry]:
    for name, split in _SPLITS.items():
        path = files.optional(
            f"{name}.json", f"data/{name}.json", without=f"there are no {split} questions"
        )
        data = {} if path is None else read_json(path, unique_keys=True)
        if not isinstance(data, dict):
            raise UserError(f"{path}: {{pid: problem}} was expected; fetch the file again.")
        for pid, problem in data.items():
            row = official.Entry(f"{path}, problem {pid}", problem)
            yield official.Entry(row.where, {"pid": pid, **row, _SPLIT: split})


def _question(problem: official.Entry) -> Question:
    choices, answer = problem.texts("choices"), problem.text("answer", "")
    kind, answer_type = problem.get(KIND), problem.get(ANSWER_TYPE)
    if (
        kind not in (CHOICE, FREE)
        or answer_type not in ANSWER_TYPES
        or (kind == CHOICE) != (answer_type == "text")
        or (kind == CHOICE and len(choices) < 2)
    ):
        raise problem.error(
            f"{KIND} is {kind!r}, {ANSWER_TYPE} {answer_type!r}, with {len(choices)} choices; "
            f"{CHOICE}, text and two choices at least, or {FREE} and a number or list were expected"
        )
    metadata, precision = problem.entry("metadata"), problem.get(PRECISION)
    number = None if precision is None else real_number(precision)
    if answer_type == "float" and number is None:
        raise problem.wrong(PRECISION, "a number")
    extra = {
        **{key: problem[key] for key in (KIND, ANSWER_TYPE, UNIT, "image") if problem.get(key)},
        **({} if number is None else {PRECISION: int(number)}),
        **{key: metadata[key] for key in GROUPS if metadata.get(key)},
    }
    return Question(
        id=problem.text("pid"),
        split=problem[_SPLIT],
        question=problem.text("question"),
        image=problem.text("pid"),
        answers=(answer,) if answer else (),
        category=str(metadata.get("task", "")),
        choices=choices,
        answer_index=choices.index(answer) if answer in choices else None,
        extra=extra,
    )


def _places(image: Any) -> Iterator[str]:
    """Returns the places where the file of `images/1.jpg` may lie."""
    if isinstance(image, str) and image:
        yield from (image, f"data/{image}")


def _counts(questions: Sequence[Question]) -> dict[str, int]:
    kinds = {
        "multiple-choice questions": lambda q: q.choices,
        "pictures found": lambda q: q.image is not None,
        "questions without an answer": lambda q: not q.answers,
    }
    return official.counts_of(questions, _SPLITS.values(), kinds)


OFFICIAL, EMPTY_WRONG = "mathvista/official", "mathvista/empty_wrong"


def score_mathvista(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Accuracy overall and by each of the official script's keys; a missing prediction is wrong."""
    scored = scored_split(questions, predictions, has_answers, "a published answer")

    def extracted(prediction: Prediction, q: Question, *, ignore_empty: bool) -> str | None:
        return normalized(_extraction(prediction, q), q, ignore_empty=ignore_empty)

    per_question = {
        name: scored.values(
            lambda q, p, ignore=ignore: extracted(p, q, ignore_empty=ignore) == q.answers[0]
        )
        for name, ignore in ((OFFICIAL, False), (EMPTY_WRONG, True))
    }
    none = int(scored.values(lambda q, p: extracted(p, q, ignore_empty=True) is None).sum())
    groups = _groups(scored.counted)
    return scored.evaluation(per_question, groups, unparsed=dict.fromkeys(per_question, none))


def _extraction(prediction: Prediction, question: Question) -> str:
    """A prediction's extraction; of one that chose, the letter."""
    chosen = by_choice(prediction, question)
    return LETTERS[prediction.choice] if chosen else prediction.answer


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    groups: dict[str, np.ndarray] = {}
    for key in (KIND, ANSWER_TYPE, *GROUPS):
        title = f"{key}: {{}}"
        groups |= groups_by(questions, lambda q, key=key: q.extra.get(key, ()), title=title)
    return groups


def read_mathvista_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads {pid: problem with `extraction`, or else `response`}, or predictions.jsonl.

    A response without an extraction stands for itself where the rules find none in it. An
    extraction that is no text is read as Python writes it, as calculate_score.py does.
    """
    if path.suffix != ".json":
        return read_own_lines(path, questions)
    expected = (
        "{pid: problem} was expected, with `extraction` in each; give MathVista's result file"
    )
    data = read_object(path, expected)
    known = {question.id: question for question in questions}
    predictions = []
    for pid, problem in data.items():
        values = problem if isinstance(problem, dict) else {}
        answer = values.get("extraction", values.get("response"))
        if isinstance(answer, bool | dict) or not values.keys() & {"extraction", "response"}:
            raise UserError(
                f"{path}, problem {pid}: `extraction` or `response` was expected, as text, number "
                "or list; correct it."
            )
        answer = "" if answer is None and "extraction" not in values else str(answer)
        if "extraction" not in values and pid in known:
            by_rule = extracted_by_rule(answer, known[pid])
            answer = answer if by_rule is None else by_rule
        predictions.append(Prediction(pid, answer))
    return predictions


def write_mathvista_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes what calculate_score.py reads, a problem with its extraction for each question."""
    problems = {}
    for question, prediction in paired(questions, predictions):
        problem = {
            "pid": question.id,
            "question": question.question,
            "choices": list(question.choices) or None,
            **{key: question.extra.get(key) for key in (KIND, ANSWER_TYPE, PRECISION)},
            "metadata": {key: question.extra[key] for key in GROUPS if key in question.extra},
            "extraction": _extraction(prediction, question),
        }
        if question.answers:
            problem["answer"] = question.answers[0]
        problems[question.id] = problem
    write_json(path, problems)


BENCHMARK = Benchmark(
    read=read_mathvista,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="val",
    formats="predictions.jsonl, or {pid: problem with `extraction` or `response`} as JSON",
    read_predictions=read_mathvista_predictions,
    has_reference=has_answers,
    score=score_mathvista,
    headline="mathvista",
    write_submission=write_mathvista_submission,
    split_names={"testmini": "val"},
    boards=read_boards("mathvista"),
)
