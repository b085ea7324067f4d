"""InfoSeek's files (https://github.com/open-vision-language/infoseek): questions on entities.

    infoseek_{train,val,test}.jsonl     data_id, image_id, question, answer, answer_eval, data_split
    infoseek_{train,val}_withkb.jsonl   optional: data_id, entity_id, entity_text
    infoseek_val_qtype.jsonl            data_id, question_type: string, numerical or time
    oven_images/                        OVEN's pictures, IMAGE_ID.jpg at any depth

`answer_eval` holds all spellings that count, of a numerical question the range that does. The
questions of val are half on questions, half on entities that train does not have.

InfoSeek's score and its prediction file (edchengg/infoseek_eval, infoseek_eval.py).

    infoseek/official   string and time questions: the answer is one of the spellings that count,
                        normalized as SQuAD's; numerical ones: its number lies in the range, or its
                        range within that or over half of their union

The final score is the harmonic mean of the scores on unseen questions and on unseen entities; it
stands in a note. The file has a line {"data_id", "prediction"} for each question.
"""

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.scores import groups_by, paired, read_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import squad_exact_match

# Keys of Question.extra: what is not in train, the range of a numerical answer, the entity.
UNSEEN, RANGE, ENTITY, ENTITY_NAME = "unseen", "answer_range", "entity_id", "entity_text"
TYPES = ("string", "numerical", "time")

# The paper, table 2.
PUBLISHED_COUNTS = {"train questions": 934_048, "val questions": 73_620, "test questions": 347_980}
MATERIALS = (
    Material("InfoSeek", "Chen et al., EMNLP 2023"),
    Material("OVEN, pictures of several data sets", license="under their own licenses"),
)

_SPLITS = ("train", "val", "test")
_UNSEEN = ("unseen_question", "unseen_entity")
_PICTURES = "oven_images"
_SUFFIXES = (".jpg", ".JPEG", ".jpeg", ".png")


def read_infoseek(folder: Path) -> official.BenchmarkFiles:
    """Reads the questions that there are; `Question.category` is the type of a val question.

    `answers` are the spellings that count, the annotated one first; of a numerical question
    `extra[RANGE]` are the bounds that do.
    """
    files = official.OfficialFiles(folder)
    questions: dict[str, Question] = {}
    for split in _SPLITS:
        path = files.optional(f"infoseek_{split}.jsonl", without=f"there are no {split} questions")
        if path is None:
            continue
        kinds = _kinds(files, split)
        entities = _entities(files, split)

        def question(row: official.Entry, split=split, kinds=kinds, entities=entities) -> Question:
            return _question(row, split, kinds, entities)

        questions |= official.read_entries(official.line_entries(path), question, "data_id")
    files.check_questions(questions, "InfoSeek", "infoseek_val.jsonl and infoseek_val_qtype.jsonl")
    pictures = _pictures(folder, questions)
    pictured = official.with_present_pictures(questions.values(), pictures)
    names = official.picture_names(pictured)
    if not names:
        files.missing[f"{_PICTURES}/"] = "no pictures, without which few can be answered"
    return files.content(pictured, _counts(pictured, len(names)), PUBLISHED_COUNTS, pictures)


def _kinds(files: official.OfficialFiles, split: str) -> dict[str, str]:
    """data_id -> type; only val's are published."""
    path = files.optional(
        f"infoseek_{split}_qtype.jsonl", without=f"the types of {split} questions are not known"
    )
    kinds = {}
    for row in () if path is None else official.line_entries(path):
        kind = row.text("question_type").lower()
        # The script takes all others for strings.
        kinds[row.text("data_id")] = kind if kind in TYPES else "string"
    return kinds


def _entities(files: official.OfficialFiles, split: str) -> dict[str, dict[str, str]]:
    path = files.optional(
        f"infoseek_{split}_withkb.jsonl", without=f"the entities of {split} are not known"
    )
    return {
        row.text("data_id"): {ENTITY: row.text("entity_id"), ENTITY_NAME: row.text("entity_text")}
        for row in (() if path is None else official.line_entries(path))
    }


def _question(
    row: official.Entry,
    split: str,
    kinds: Mapping[str, str],
    entities: Mapping[str, Mapping[str, str]],
) -> Question:
    name = row.text("data_id")
    kind = kinds.get(name, "")
    if kinds and not kind:
        raise row.error(f"infoseek_{split}_qtype.jsonl has no type of {name}")
    extra: dict[str, Any] = {"image_id": row.text("image_id")}
    unseen = str(row.get("data_split", "")).removeprefix(f"{split}_")
    if unseen in _UNSEEN:
        extra[UNSEEN] = unseen
    bounds, annotated = _range(row.get("answer_eval", [])), row.texts("answer")
    if bounds is not None:
        extra[RANGE], counted = bounds, annotated
    elif kind == "numerical":
        raise row.error("answer_eval has no `range` of two numbers")
    else:
        counted = row.texts("answer_eval") or annotated
    return Question(
        id=name,
        split=split,
        question=row.text("question"),
        image=extra["image_id"],
        answers=tuple(sorted(dict.fromkeys(counted), key=lambda answer: answer not in annotated)),
        category=kind,
        extra={**extra, **entities.get(name, {})},
    )


def _range(counted: Any) -> list[float] | None:
    """The bounds of a numerical answer: [{"wikidata": x, "range": [low, high]}], or the object."""
    first = counted[0] if isinstance(counted, list) and counted else counted
    bounds = first.get("range") if isinstance(first, dict) else None
    numbers = [real_number(bound) for bound in bounds[:2]] if isinstance(bounds, list) else []
    return numbers if len(numbers) == 2 and None not in numbers else None


def _pictures(folder: Path, questions: Mapping[str, Question]) -> official.PictureFiles:
    """Each picture by its id: below the folder of pictures, whichever part of OVEN it is in."""
    wanted = {question.image for question in questions.values()}
    places: dict[str, list[str]] = {}
    for path in (folder / _PICTURES).rglob("*"):
        if path.suffix in _SUFFIXES and path.stem in wanted:
            places.setdefault(path.stem, []).append(str(path.relative_to(folder)))
    return official.PictureFiles(folder, {name: sorted(paths) for name, paths in places.items()})


def _counts(questions: list[Question], picture_files: int) -> dict[str, int]:
    counts: Counter[str] = Counter(f"{question.split} questions" for question in questions)
    for question in questions:
        if question.category:
            counts[f"{question.split} {question.category} questions"] += 1
        if UNSEEN in question.extra:
            counts[f"{question.split} {question.extra[UNSEEN]}"] += 1
    return {**dict(sorted(counts.items())), "picture files": picture_files}


SCORER = "infoseek/official"
_NUMBER = re.compile(r"[-+]?[.]?\d+(?:,\d\d\d)*\.?\d*(?:[eE][-+]?\d+)?")
_LEAST_OVERLAP = 0.5
_EPS = 1e-12


def has_typed_answer(question: Question) -> bool:
    """Whether a question has an answer, and the type by which it is scored."""
    return bool(question.category) and (bool(question.answers) or RANGE in question.extra)


def is_right(answer: str, question: Question) -> bool:
    """The official judgment of an answer."""
    if question.category == "numerical":
        return numbers_match(numbers_of(answer), question.extra[RANGE])
    return bool(squad_exact_match(answer, question.answers))


def numbers_of(text: str) -> list[float]:
    """The number in a text, or the two of a range: the first two, if they ascend.

    [0, 0] where there is none. A hyphen behind a digit is no sign.
    """
    apart = "".join(
        " - " if sign == "-" and before.isdigit() else sign
        for before, sign in zip(f" {text}", text, strict=False)
    )
    texts = [number.replace(",", "").strip(".") for number in _NUMBER.findall(apart)]
    # At -.2.3 the script stops.
    numbers = [float(number) for number in texts if number.count(".") < 2][:2]
    if not numbers:
        return [0.0, 0.0]
    return numbers if len(numbers) == 2 and numbers[0] <= numbers[1] else numbers[:1]


def numbers_match(numbers: Sequence[float], bounds: Sequence[float]) -> bool:
    """Whether a number lies in the range, or a range within it or over half of their union."""
    low, high = bounds
    if all(low <= number <= high for number in numbers):
        return True
    if len(numbers) == 1:
        return False
    overlap = max(0.0, min(numbers[1], max(bounds)) - max(numbers[0], min(bounds)))
    union = (numbers[1] - numbers[0] + _EPS) + (max(bounds) - min(bounds) + _EPS) - overlap
    return overlap / union >= _LEAST_OVERLAP - _EPS


def harmonic_mean(values: Sequence[float]) -> float:
    """The harmonic mean as the script computes it: a score of 0 counts as 1e-12."""
    return len(values) / sum(1 / (value or _EPS) for value in values)


def score_infoseek(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Scores by what is unseen and by type; a missing prediction is wrong.

    The script leaves questions without a prediction out of its means.
    """
    scored = scored_split(questions, predictions, has_typed_answer, "an answer and a type")
    right = scored.values(lambda q, prediction: is_right(prediction.answer, q))
    evaluation = scored.evaluation({SCORER: right}, _groups(scored.counted))
    (scores,) = evaluation.scored
    halves = [scores.of_category(SCORER, name) for name in ("unseen question", "unseen entity")]
    if all(map(len, halves)):
        final = harmonic_mean([round(100 * float(half.mean()), 2) for half in halves])
        evaluation.notes.append(
            f"final score, the harmonic mean of unseen question and unseen entity: {final:.2f} %"
        )
    return evaluation


read_infoseek_predictions = functools.partial(read_lines, id_key="data_id", text_key="prediction")


def write_infoseek_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the official lines, one for every question."""
    write_jsonl(
        path,
        (
            {"data_id": question.id, "prediction": prediction.answer}
            for question, prediction in paired(questions, predictions)
        ),
    )


def _unseen(question: Question) -> str:
    return question.extra.get(UNSEEN, "").replace("_", " ")


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    return {
        **groups_by(questions, _unseen, ["unseen question", "unseen entity"]),
        **groups_by(questions, lambda q: q.category, TYPES),
    }


BENCHMARK = Benchmark(
    read=read_infoseek,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="val",
    formats='predictions.jsonl, or the official lines {"data_id", "prediction"}',
    read_predictions=read_infoseek_predictions,
    has_reference=has_typed_answer,
    score=score_infoseek,
    headline="infoseek",
    write_submission=write_infoseek_submission,
    boards=read_boards("infoseek"),
)
