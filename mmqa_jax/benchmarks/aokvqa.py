"""A-OKVQA's official JSON (https://github.com/allenai/aokvqa) and the hub's Parquet of it.

    aokvqa_v1p0_{train,val,test}.json       questions; the test split's answers are hidden
    {train,validation,test}-*.parquet       the same with pictures, here or in data/
    captions_aokvqa.json                    captions of Prophet's authors
    vinvl_captions_{train,val}2014.tsv      VinVL's captions, here or in ../okvqa/
    tags_*.tsv                              object tags, here or in ../okvqa/
    captions_{train,val}20*.json            COCO's captions by people, here or in ../okvqa/
    train2017/ val2017/ test2017/           COCO's pictures

Any of the splits may be absent. Where both formats hold a split, questions are read from the JSON,
which knows COCO's picture numbers, and pictures from the Parquet.

These are its scores.

    a_okvqa_da/official     exact match with n of the ten answers, min(1, n / 3), without the
                            questions marked difficult (allenai/aokvqa, eval_predictions.py)
    a_okvqa_mc/official     the text of the chosen option is that of the correct one (the same)

Prediction files are {question_id: {"direct_answer": text, "multiple_choice": text of an option}},
either of which may be absent (prepare_predictions.py). Null is an empty answer, or no choice.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.benchmarks.benchmark import Benchmark
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_json
from mmqa_jax.data.formats import coco, official
from mmqa_jax.data.schema import SPLITS, Material, Prediction, Question
from mmqa_jax.evaluation import scores
from mmqa_jax.evaluation.multiple_choice import has_answer
from mmqa_jax.evaluation.scores import read_object, read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import direct_answer_accuracy, has_answers

_NEEDED = ("question_id", "question", "choices")
_ANSWERS = ("correct_choice_idx", "direct_answers", official.DIFFICULT, official.RATIONALES)
_FIELDS = {"split", *_NEEDED, "correct_choice_idx", "direct_answers"}  # of Question itself
# The official v1p0 files; the paper (section 3) rounds them to 17.1k, 1.1k and 6.7k.
PUBLISHED_COUNTS = {"train questions": 17_056, "val questions": 1_145, "test questions": 6_702}
MATERIALS = (
    Material("A-OKVQA", "Schwenk et al., ECCV 2022", "Apache-2.0"),
    coco.PICTURES,
    coco.VINVL,
    Material("captions_aokvqa.json", "Prophet's release", "Apache-2.0"),
)

DIRECT, CHOICE = "direct_answer", "multiple_choice"
_LETTER_OR_NUMBER = re.compile(r"\(?([A-Za-z]|\d+)[).:]?")


class _Pictures:
    """Pictures from COCO's folders or else from Parquet.

    Names are COCO's file names, or the question's id for pictures of Parquet.
    """

    def __init__(self, folder: Path, tables: Sequence[Path]):
        self._files = official.PictureFolders(folder, coco.FOLDERS_2017)
        self._tables = official.ParquetPictures(tables, "question_id")

    def name_of(self, question_id: str, image_id: int | None) -> str | None:
        """The name of a question's picture; None where there is no picture."""
        if image_id is not None and coco.picture_2017(image_id) in self._files:
            return coco.picture_2017(image_id)
        return question_id if question_id in self._tables else None

    def __call__(self, name: str) -> bytes:
        return self._files(name) if name in self._files else self._tables(name)

    def signature(self, names: Sequence[str]) -> str:
        """Identifies the picture files in their present state."""
        files = [name for name in names if name in self._files]
        return self._files.signature(files) + self._tables.signature()


def read_aokvqa(path: Path) -> official.BenchmarkFiles:
    """Reads what there is of the official files in a folder, or one of its question files.

    `Question.answers` are the ten direct answers, `rationale` is the first of the rationales;
    `extra` keeps `image_id`, `difficult_direct_answer`, `rationales`, `caption`, `tags` and
    `coco_captions`.
    """
    files = official.OfficialFiles(path, (".json", ".parquet"))
    if files.alone is None:
        rows, tables = _folder_rows(files)
    else:
        tables = [path] if path.suffix == ".parquet" else []
        rows = list(_parquet_rows(path) if tables else _json_rows(path))
    files.check_questions(rows, "A-OKVQA", "aokvqa_v1p0_val.json or the hub's Parquet files")
    described = coco.read_descriptions(files, "captions_aokvqa.json", folders=("", "../okvqa/"))
    pictures = _Pictures(files.folder, tables)
    read = official.read_entries(
        rows, lambda row: _question(row, described, pictures), "question_id"
    )
    questions = list(read.values())
    if not official.picture_names(questions):
        files.missing["train2017/, val2017/, test2017/"] = "no pictures; captions stand for them"
    return files.content(questions, _counts(questions), PUBLISHED_COUNTS, pictures)


def _folder_rows(files: official.OfficialFiles) -> tuple[list[official.Entry], list[Path]]:
    """The questions of a folder, and its Parquet files."""
    rows, tables = [], []
    for split, name in official.HUB_NAMES.items():
        hub_files = official.hub_tables(files.folder, name)
        path = files.optional(f"aokvqa_v1p0_{split}.json", without=f"no {split} questions")
        if path is not None:
            rows += _json_rows(path)
        elif hub_files:
            files.missing.pop(f"aokvqa_v1p0_{split}.json")
            rows += [row for table in hub_files for row in _parquet_rows(table)]
        tables += hub_files
    files.read_files += tables
    return rows, tables


def _json_rows(path: Path) -> Iterator[official.Entry]:
    for row in official.json_entries(path):
        row.choice("split", SPLITS)
        yield row


def _parquet_rows(path: Path) -> Iterator[official.Entry]:
    for row in official.parquet_entries([path], _NEEDED, _ANSWERS):
        row["split"] = official.hub_split(path)
        yield row


def _question(row: official.Entry, described: coco.Descriptions, pictures: _Pictures) -> Question:
    for key in ("question_id", "question"):
        if not row.text(key).strip():
            raise row.wrong(key, "text")
    choices, answers = row.texts("choices"), row.texts("direct_answers")
    index = row.index("correct_choice_idx", len(choices))
    image_id = row.get("image_id")
    if image_id is not None and type(image_id) is not int:
        raise row.wrong("image_id", "a whole number")
    if answers and type(row.get(official.DIFFICULT)) is not bool:
        raise row.wrong(
            official.DIFFICULT,
            "true or false, since difficult questions do not count in the score of direct answers,",
        )
    extra = {key: value for key, value in row.items() if key not in _FIELDS}
    return Question(
        id=row["question_id"],
        split=row["split"],
        question=row["question"],
        image=pictures.name_of(row["question_id"], image_id),
        answers=answers,
        choices=choices,
        answer_index=index,
        rationale=next(iter(row.texts(official.RATIONALES)), ""),
        extra={**extra, **described.extra(image_id)},
    )


def _counts(questions: Sequence[Question]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for question in questions:
        split = question.split
        counts[f"{split} questions"] += 1
        counts[f"{split} questions with direct answers"] += bool(question.answers)
        counts[f"{split} questions marked difficult"] += bool(
            question.extra.get(official.DIFFICULT)
        )
        for key in coco.DESCRIPTIONS:
            counts[f"{split} questions with {key}"] += key in question.extra
        counts[f"{split} questions with a picture file"] += question.image is not None
    return counts


def read_aokvqa_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads A-OKVQA's predictions or predictions.jsonl.

    A multiple_choice that is the text of none of its question's options is NO_OPTION, which counts
    0, as in the official evaluation where that is not strict.
    """
    if path.suffix == ".jsonl":
        return read_own_lines(path, questions)
    rows = read_object(
        path,
        f"one object of question_id -> {{{DIRECT}, {CHOICE}}} was expected; give A-OKVQA's format "
        "or predictions.jsonl",
    )
    choices = {question.id: question.choices for question in questions}
    predictions = [_aokvqa_prediction(f"{path}, {k}", k, row, choices) for k, row in rows.items()]
    choice_of = {p.question_id: rows[p.question_id].get(CHOICE) for p in predictions}
    chosen = [p for p in predictions if choice_of[p.question_id] is not None]
    if chosen and all(
        p.choice == scores.NO_OPTION
        and p.question_id in choices
        and _LETTER_OR_NUMBER.fullmatch(choice_of[p.question_id].strip())
        for p in chosen
    ):
        raise UserError(
            f"{path}: every {CHOICE} is a letter or a number, and none is the text of one of its "
            "question's options, as the official format has it; write the options' texts."
        )
    return predictions


def write_aokvqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the leaderboard's file: every question, with its predicted answer or choice."""
    rows: dict[str, dict[str, str]] = {}
    for question, prediction in scores.paired(questions, predictions):
        row = rows.setdefault(question.id, {})
        if prediction.choice is not None:
            row[CHOICE] = question.choices[prediction.choice]
        if prediction.answer:
            row[DIRECT] = prediction.answer
    write_json(path, rows)


def _aokvqa_prediction(
    where: str, name: str, row: Any, choices: dict[str, tuple[str, ...]]
) -> Prediction:
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str | None) for key in (DIRECT, CHOICE)
    ):
        raise UserError(
            f'{where}: {{"{DIRECT}": text, "{CHOICE}": text}} was expected; correct that entry.'
        )
    choice = None
    text = row.get(CHOICE)
    if text is not None:
        options = choices.get(name, ())
        choice = options.index(text) if text in options else scores.NO_OPTION
    return Prediction(name, row.get(DIRECT) or "", choice=choice)


def score_aokvqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Direct answers and multiple choice, whichever of the two the predictions hold."""
    evaluation = Evaluation(has_modalities=False)
    chosen = any(prediction.choice is not None for prediction in predictions)
    if not chosen or any(prediction.answer for prediction in predictions):
        direct = scored_split(
            questions,
            predictions,
            lambda q: bool(q.answers) and not q.extra.get(official.DIFFICULT, False),
            "published direct answers (difficult questions do not count)",
        )
        right = direct.values(lambda q, p: direct_answer_accuracy(p.answer, q.answers))
        evaluation.scored += direct.evaluation({"a_okvqa_da/official": right}, {}).scored
    if chosen:
        split = scored_split(questions, predictions, has_answer, "a published correct option")
        # By text, since two options may read the same.
        right = split.values(
            lambda q, p: p.choice is not None and q.choices[p.choice] == q.choices[q.answer_index]
        )
        evaluation.scored += split.evaluation({"a_okvqa_mc/official": right}, {}).scored
        without = sum(prediction.choice is None for prediction in split.by_id.values())
        evaluation.unparsed["a_okvqa_mc/official"] = without
    return evaluation


BENCHMARK = Benchmark(
    read=read_aokvqa,
    materials=MATERIALS,
    split="val",
    formats="predictions.jsonl, or the official {id: {direct_answer, multiple_choice}} as JSON",
    read_predictions=read_aokvqa_predictions,
    has_reference=has_answers,
    score=score_aokvqa,
    headline="a_okvqa",
    verdicts=("a_okvqa_mc/official", "a_okvqa_da/official"),
    write_submission=write_aokvqa_submission,
)
