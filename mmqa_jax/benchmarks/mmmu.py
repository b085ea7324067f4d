"""MMMU's Parquet files (https://github.com/MMMU-BenchmarkFiles/MMMU; MMMU/MMMU on the hub).

    {subject}/{dev,validation,test}-*.parquet   of any of the 30 subjects, or the files alone

Columns: id (`validation_Accounting_1`), question, options (a Python list as text), answer,
question_type, explanation, subfield, topic_difficulty, img_type, and image_1 to image_7, which
`<image 1>` to `<image 7>` in the question and its options stand for. Answers of test are `?`.

MMMU's scores and prediction files (MMMU-Benchmark/MMMU, mmmu/utils/eval_utils.py).

    mmmu/official         responses are parsed; where no letter is found one is drawn, with the
                          script's seed (main_parse_and_eval.py)
    mmmu/unparsed_wrong   the same without the draw
    mmmu/letter           answers are parsed already: of a choice the letter alone counts
                          (main_eval_only.py)

An open question is right if one of the numbers and phrases in the response is an answer. Files are
{id: letter or text}, which the leaderboard takes, or a subject's output.json, a list of
{"id", "response"}.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.official import PictureColumns, parquet_entries, parquet_files
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation import multiple_choice
from mmqa_jax.evaluation.multiple_choice import is_open_answer
from mmqa_jax.evaluation.scores import group_of, groups_by, predictions_by_question, read_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers

# Keys of Question.extra: `multiple-choice` or `open`, and the topic's difficulty.
KIND, DIFFICULTY = "question_type", "topic_difficulty"
CHOICE = "multiple-choice"

# Disciplines and their subjects, in the order of the official table.
DISCIPLINES = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        *("Basic_Medical_Science", "Clinical_Medicine"),
        *("Diagnostics_and_Laboratory_Medicine", "Pharmacy", "Public_Health"),
    ),
    "Humanities and Social Science": ("History", "Literature", "Sociology", "Psychology"),
    "Tech and Engineering": (
        *("Agriculture", "Architecture_and_Engineering", "Computer_Science", "Electronics"),
        *("Energy_and_Power", "Materials", "Mechanical_Engineering"),
    ),
}
SUBJECTS = tuple(subject for subjects in DISCIPLINES.values() for subject in subjects)

# The paper, table 1.
PUBLISHED_COUNTS = {"train questions": 150, "val questions": 900, "test questions": 10_500}
MATERIALS = (
    Material("MMMU", "Yue et al., CVPR 2024", "Apache-2.0; pictures under their sources' licenses"),
)

_SPLITS = {"dev": "train", "validation": "val", "test": "test"}
_ID = re.compile(r"(dev|validation|test)_(\w+)_(\d{1,9})")
_NEEDED = ("id", "question", "options", "answer", KIND)
_MORE = ("explanation", "subfield", DIFFICULTY, "img_type")
_PICTURES = tuple(f"image_{number}" for number in range(1, 8))
_HIDDEN = "?"


def read_mmmu(folder: Path) -> official.BenchmarkFiles:
    """Reads all Parquet files in a folder and in the subjects' folders below it.

    `Question.category` is the subject; the splits dev and validation are `train` and `val`. An open
    question has no `choices`, and all `answers` that count.
    """
    files = official.OfficialFiles(folder)
    tables = parquet_files(
        folder,
        remedy="put MMMU's folders of subjects there, such as "
        "Accounting/validation-00000-of-00001.parquet",
        below=True,
    )
    files.read_files += tables
    pictures = PictureColumns(tables, "id", _PICTURES)
    rows = parquet_entries(tables, _NEEDED, _MORE)
    questions = official.read_entries(rows, lambda row: _question(row, pictures), "id")
    ordered = sorted(questions.values(), key=place_of)
    return files.content(ordered, _counts(ordered), PUBLISHED_COUNTS, pictures)


def place_of(question: Question) -> tuple[str, int]:
    """Returns the key by which the official scripts order questions: subject, then number."""
    return question.category, int(question.id.rpartition("_")[2])


def _question(row: official.Entry, pictures: PictureColumns) -> Question:
    named = _ID.fullmatch(str(row["id"]))
    if named is None or named[2] not in SUBJECTS:
        raise row.wrong("id", "SPLIT_SUBJECT_NUMBER of one of MMMU's 30 subjects")
    choices, index, answers = (), None, ()
    answer = row.text("answer", empty=True)
    if row.text(KIND) == CHOICE:
        choices = row.texts("options")
        if len(choices) < 2:
            raise row.error(f"has {len(choices)} options; two at least were expected")
        index = row.letter("answer", len(choices), (None, "", _HIDDEN))
        answers = () if index is None else (choices[index],)
    elif answer and answer != _HIDDEN:
        answers = row.texts("answer") if answer.startswith(("['", '["')) else (answer,)
    names = [f"{named[0]}/{column}" for column in _PICTURES]
    there = [name in pictures for name in names]
    if not all(there[: sum(there)]):  # `<image 3>` would stand for another one
        raise row.error(f"has image_{there.index(True) + 1} and not all before it")
    return Question(
        id=named[0],
        split=_SPLITS[named[1]],
        question=row.text("question"),
        image=names[0] if any(there) else None,
        more_images=tuple(names[1 : sum(there)]),
        answers=answers,
        category=named[2],
        choices=choices,
        answer_index=index,
        rationale=row.text("explanation", ""),
        extra={key: row[key] for key in (KIND, *_MORE[1:]) if row.get(key)},
    )


def _counts(questions: Sequence[Question]) -> dict[str, int]:
    kinds = {
        "multiple-choice questions": lambda q: q.choices,
        "open questions": lambda q: not q.choices,
        "questions with several pictures": lambda q: q.more_images,
        "questions without a picture": lambda q: q.image is None,
        "questions without an answer": lambda q: not q.answers,
    }
    counts = official.counts_of(questions, _SPLITS.values(), {})
    subjects = len({question.category for question in questions})
    return {**counts, "subjects": subjects, **official.counts_of(questions, (), kinds)}


OFFICIAL, STRICT, LETTER = "mmmu/official", "mmmu/unparsed_wrong", "mmmu/letter"
SEED = 42  # of the script's random choices


def score_mmmu(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Accuracy overall, by discipline and subject, by kind of question and by difficulty.

    A missing prediction is wrong; the scripts leave it out.
    """
    scored = scored_split(questions, predictions, has_answers, "a published answer")
    parsed, letters = (
        _choices(scored.counted, scored.by_id, rule)
        for rule in (
            _by_script,
            lambda text, q: multiple_choice.exact_letter_choice(text, len(q.choices)),
        )
    )
    chosen = {OFFICIAL: parsed | _drawn(questions, scored.by_id), STRICT: parsed, LETTER: letters}
    per_question = {
        name: scored.values(
            lambda q, prediction, choices=choices: (
                choices.get(q.id) == q.answer_index
                if q.choices
                else is_open_answer(prediction.answer, q.answers)
            )
        )
        for name, choices in chosen.items()
    }
    answered = [q for q in scored.counted if q.choices and q.id in scored.by_id]
    unparsed = {
        name: sum(question.id not in choices for question in answered)
        for name, choices in {**chosen, OFFICIAL: parsed}.items()
    }
    return scored.evaluation(per_question, _groups(scored.counted), unparsed=unparsed)


def _by_script(text: str, question: Question) -> int | None:
    return multiple_choice.mmmu_choice(text, len(question.choices), question.choices)


def _choices(
    questions: Sequence[Question], by_id: multiple_choice.Given, rule: multiple_choice.Rule
) -> dict[str, int]:
    """Question id -> the choice that its prediction names, where it names one."""
    asked = [question for question in questions if question.choices]
    choices = zip(asked, multiple_choice.chosen_by(asked, by_id, rule), strict=True)
    return {question.id: choice for question, choice in choices if choice is not None}


def _drawn(questions: Sequence[Question], by_id: multiple_choice.Given) -> dict[str, int]:
    """The choices that the script draws where it finds none, subject by subject."""
    draw = random.Random(SEED)
    failed = [q for q in questions if q.choices and q.id in by_id]
    parsed = _choices(failed, by_id, _by_script)
    return {
        question.id: multiple_choice.LETTERS.index(
            draw.choice(multiple_choice.LETTERS[: len(question.choices)])
        )
        for question in sorted(failed, key=place_of)
        if question.id not in parsed
    }


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    groups: dict[str, np.ndarray] = {}
    for discipline, subjects in DISCIPLINES.items():
        members = groups_by(questions, lambda q: q.category, subjects)
        groups |= {f"Overall-{discipline}": np.any([*members.values()], axis=0), **members}
    groups["multiple-choice"] = group_of(questions, lambda q: bool(q.choices))
    groups["open"] = ~groups["multiple-choice"]
    levels = dict.fromkeys(str(question.extra.get(DIFFICULTY, "")) for question in questions)
    return groups | groups_by(
        questions,
        lambda q: str(q.extra.get(DIFFICULTY, "")),
        filter(None, levels),
        "difficulty: {}",
    )


def read_mmmu_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads {id: answer}, a list of {"id", "response"}, or predictions.jsonl."""
    data = read_json(path, unique_keys=True) if path.suffix == ".json" else None
    if not isinstance(data, dict):
        return read_lines(path, questions, id_key="id", text_key="response")
    for name, answer in data.items():
        if not isinstance(answer, str | None):
            raise UserError(f"{path}, {name}: a letter or a text was expected; correct it.")
    return [Prediction(name, answer or "") for name, answer in data.items()]


def write_mmmu_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes {id: letter, or text of an open question} of every question.

    Where no letter is found it is the one that the script draws; "" where there is no prediction.
    """
    by_id = predictions_by_question(questions, predictions)
    chosen = _choices(questions, by_id, _by_script) | _drawn(questions, by_id)
    texts = {q.id: by_id[q.id].answer for q in questions if q.id in by_id and not q.choices}
    letters = {name: multiple_choice.LETTERS[index] for name, index in chosen.items()}
    write_json(path, {q.id: (texts | letters).get(q.id, "") for q in questions})


BENCHMARK = Benchmark(
    read=read_mmmu,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="val",
    formats='predictions.jsonl, {id: answer} as JSON, or a list of {"id", "response"}',
    read_predictions=read_mmmu_predictions,
    has_reference=has_answers,
    score=score_mmmu,
    headline="mmmu",
    verdicts=("mmmu/unparsed_wrong",),
    write_submission=write_mmmu_submission,
    split_names={"dev": "train", "validation": "val"},
    boards=read_boards("mmmu"),
)
