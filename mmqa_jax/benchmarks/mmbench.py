"""MMBench's official tables (https://github.com/open-compass/MMBench), .tsv or .xlsx.

    index       number of the question; row k * 1,000,000 + index is its circular pass k
    image       the picture as base64, or the index of the row that holds it
    hint, question, A, B, C, D, answer (a letter), category, l2-category, split (dev or test)

captions.json, optional, is {index of a question, or of the row that holds its picture: caption};
all passes of a question have its caption.

A pass k shows the choices rotated by k. Where a file holds no passes above 0, they are made here:
N choices, N passes, and choice j stands at place (j + k) mod N, as VLMEvalKit's
`vlmutil circular` does for choices that may be rotated. A table of predictions is taken as it is.

These are its scores.

    mmbench/circular        every circular pass of a question is right (VLMEvalKit, 2025)
    mmbench/vanilla         the first pass is right
    mmbench/circular_2026   the same two by VLMEvalKit's rule since June 2026, which also takes
    mmbench/vanilla_2026    `answer is X` for X

Prediction files are tables (.xlsx, .tsv) with the columns index and prediction, a row per pass, or
a JSON list of such rows: VLMEvalKit's PRED_FORMAT is one of the three. LLaVA's lines with
--all-rounds have `round_id` too.
"""

from __future__ import annotations

import binascii
import dataclasses
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pybase64

from mmqa_jax.benchmarks.benchmark import Benchmark
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats.coco import with_captions
from mmqa_jax.data.formats.official import CAPTION, BenchmarkFiles, OfficialFiles, one_file
from mmqa_jax.data.formats.tables import SUFFIXES, read_table, whole_number, write_spreadsheet
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation import multiple_choice
from mmqa_jax.evaluation import multiple_choice as rules
from mmqa_jax.evaluation.prediction_lines import Row, id_of, json_rows
from mmqa_jax.evaluation.scores import predictions_by_question, questions_that_count, scores_of
from mmqa_jax.evaluation.scoring import Evaluation

PASS_STEP = 1_000_000
# Keys of Question.extra: the question's index without the pass, the pass, and the ability.
BASE, PASS, L2 = "base_index", "pass", "l2-category"
NAN = "nan"  # pandas' missing value, written as text
PREDICTION = "prediction"  # a column of tables that hold a system's answers

# The repository's list of downloads; the paper (table 2) counts 2,974 in all.
PUBLISHED_COUNTS = {"val questions": 1_164, "test questions": 1_784}
MATERIALS = (Material("MMBench", "Liu et al., ECCV 2024", "Apache-2.0"),)

_LETTERS = "ABCDEFGH"
_NEEDED = ("index", "question", "A", "B")
_SPLITS = {"dev": "val", "val": "val", "test": "test", "train": "train"}
_READ = {*_NEEDED, *_LETTERS, "image", "answer", "category", "split", PREDICTION}
# An index has fewer characters, a picture more (VLMEvalKit image_base.py uses the same bound).
_LONGEST_REFERENCE = 64

_SPREADSHEET = ("index", "question", "hint", *"ABCDEFGH", "answer", "category", L2, "split")


class _Row(NamedTuple):
    """A row of a table: one pass of a question."""

    where: str
    index: int
    cells: Mapping[str, str]


class TablePictures:
    """Encoded pictures of tables by the index of the row that holds the base64 text."""

    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def __call__(self, name: str) -> bytes:
        """Encoded bytes; PictureError where the text is no base64."""
        check_bytes(len(self._texts[name]) * 3 // 4, f"index {name}")
        try:
            return pybase64.b64decode(self._texts[name], validate=True)
        except (binascii.Error, ValueError) as error:
            raise PictureError(f"index {name}: its image is no base64 ({error}).") from error

    def signature(self, names: Iterable[str] = ()) -> str:
        """Identifies the pictures, whatever their names."""
        digest = hashlib.sha256()
        for name, text in self._texts.items():
            digest.update(f"{name} {len(text)} ".encode() + text[:1024].encode())
        return digest.hexdigest()


def read_mmbench(path: Path) -> BenchmarkFiles:
    """Reads all tables in a folder, or one of them; a question per circular pass.

    `Question.id` is the pass's index; `extra` keeps `base_index`, `pass`, `hint`, `l2-category`,
    `caption` and columns of no other use. Tables of several splits may be in the folder, but not
    two of one.
    """
    alone = one_file(path, SUFFIXES)
    files = OfficialFiles(path.parent if alone else path)
    tables = [path] if alone else _tables(files.folder)
    files.read_files += tables
    rows = [row for table in tables for row in mmbench_rows(table)]
    _require_unique(rows)
    picture_of, texts = _pictures(rows)
    pictures = TablePictures(texts)
    if not texts:
        files.missing["image"] = "no table has this column; questions stand without pictures"
    questions = [_question(row, picture_of.get(row.index)) for row in rows]
    questions = with_captions(files, questions, _caption_names, "indices of the table")
    if all(row.index < PASS_STEP and PREDICTION not in row.cells for row in rows):
        questions = [each for question in questions for each in circular_passes(question)]
    counts = _counts(questions, len(questions) - len(rows))
    return files.content(questions, counts, PUBLISHED_COUNTS, pictures, [*texts])


def circular_passes(question: Question) -> list[Question]:
    """The N passes of a question of N choices, the question itself being the first."""
    choices, count = question.choices, len(question.choices)
    passes = []
    for shift in range(count):
        rotated = tuple(choices[(place - shift) % count] for place in range(count))
        index = question.answer_index
        passes.append(
            dataclasses.replace(
                question,
                id=str(int(question.id) + shift * PASS_STEP),
                choices=rotated,
                answer_index=None if index is None else (index + shift) % count,
                extra={**question.extra, PASS: shift},
            )
        )
    return passes


def mmbench_rows(path: Path, needed: Sequence[str] = _NEEDED) -> list[_Row]:
    """The rows of a table with their indices as numbers."""
    rows = []
    for where, cells in read_table(path, needed):
        index = whole_number(cells["index"])
        if index is None:
            raise UserError(
                f"{where}: index is {cells['index']!r:.60}; a whole number was expected; correct "
                "it."
            )
        rows.append(_Row(where, index, cells))
    empty = {"hint", "answer", "category", L2, "split", "image"}
    if _nan_is_empty([row.cells for row in rows]):
        empty |= {*_LETTERS}
    return [
        row._replace(cells={k: "" if k in empty and v == NAN else v for k, v in row.cells.items()})
        for row in rows
    ]


def _nan_is_empty(rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether `nan` in a choice's column stands for no choice, and is not the choice's text.

    Writers that turn pandas' missing values into text (lmms-lab/MMBench on the hub) write it into
    every empty cell. So it is a text where a cell is truly empty, where it is the choice A or B,
    the answer, or stands before another choice. VLMEvalKit reads tables with pandas' defaults,
    which take the texts `nan`, `NA`, `None` for missing: the choice is not shown, and where it is
    correct the question cannot be answered.
    """
    for cells in rows:
        choices = [cells[letter] for letter in _LETTERS if letter in cells]
        while choices and choices[-1] == NAN:
            choices.pop()
        if NAN in choices or len(choices) < 2 or cells.get(cells.get("answer", "")) == NAN:
            return False
        if not all(cells[key] for key in ("hint", *_LETTERS) if key in cells):
            return False
    return True


def _tables(folder: Path) -> list[Path]:
    tables = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not tables:
        raise UserError(
            f"{folder}: holds no .tsv or .xlsx table; put MMBench's official file there, such as "
            "MMBench_DEV_EN.tsv."
        )
    return tables


def _require_unique(rows: Iterable[_Row]) -> None:
    seen: dict[int, str] = {}
    for row in rows:
        if row.index in seen:
            raise UserError(
                f"{row.where}: index {row.index} is already in {seen[row.index]}; keep one row, or "
                "prepare the two tables apart."
            )
        seen[row.index] = row.where


def _pictures(rows: Sequence[_Row]) -> tuple[dict[int, str], dict[str, str]]:
    """Index -> name of its picture; name -> base64 text."""
    cells = {row.index: row.cells.get("image", "") for row in rows}
    pictures, texts = {}, {}
    for row in rows:
        index, text = row.index, cells[row.index]
        if text and len(text) <= _LONGEST_REFERENCE:
            held_by = whole_number(text)
            index = -1 if held_by is None else held_by
            text = cells.get(index, "")
            if len(text) <= _LONGEST_REFERENCE:
                raise UserError(
                    f"{row.where}: image refers to index {cells[row.index]!r}, and no row of that "
                    "index holds a picture; fetch the file again."
                )
        if text:
            pictures[row.index] = str(index)
            texts[str(index)] = text
    return pictures, texts


def _question(row: _Row, picture: str | None) -> Question:
    where, index, cells = row
    if not cells["question"]:
        raise UserError(f"{where}: question is empty; correct that row.")
    choices = [cells.get(letter, "") for letter in _LETTERS]
    count = next((n for n, text in enumerate(choices) if not text), len(choices))
    if count < 2 or any(choices[count:]):
        raise UserError(
            f"{where}: its choices are {', '.join(c for c in _LETTERS if cells.get(c))}; choices "
            "A, B, ... without a gap were expected; correct that row."
        )
    answer = cells.get("answer", "").strip()
    if answer and answer not in tuple(_LETTERS[:count]):
        raise UserError(
            f"{where}: answer is {answer!r}; a letter from A to {_LETTERS[count - 1]} was "
            "expected; correct that row."
        )
    answer_index = _LETTERS.index(answer) if answer else None
    split = cells.get("split", "").lower() or ("dev" if answer else "test")
    if split not in _SPLITS:
        raise UserError(
            f"{where}: split is {split!r}; expected {' or '.join(_SPLITS)}; correct that row."
        )
    extra = {k: v for k, v in cells.items() if k and v and k not in _READ}
    return Question(
        id=str(index),
        split=_SPLITS[split],
        question=cells["question"],
        image=picture,
        answers=() if answer_index is None else (choices[answer_index],),
        category=cells.get("category", ""),
        choices=tuple(choices[:count]),
        answer_index=answer_index,
        extra={**extra, BASE: str(index % PASS_STEP), PASS: index // PASS_STEP},
    )


def _caption_names(question: Question) -> Sequence[str]:
    base = question.extra[BASE]
    return (base,) if question.image is None else (base, question.image)


def _counts(questions: Sequence[Question], made: int) -> dict[str, int]:
    firsts = [question for question in questions if question.extra[PASS] == 0]
    by_split = Counter(question.split for question in firsts)
    counts: dict[str, int] = {f"{split} questions": by_split[split] for split in ("val", "test")}
    if by_split["train"]:
        counts["train questions"] = by_split["train"]

    def count(accepts: Callable[[Question], bool]) -> int:
        return sum(map(accepts, firsts))

    return counts | {
        "circular passes": len(questions),
        "passes made here": made,
        "questions without a picture": count(lambda q: q.image is None),
        f"questions with {CAPTION}": count(lambda q: CAPTION in q.extra),
        "questions without an answer": count(lambda q: q.answer_index is None),
        "questions with equal choices": count(lambda q: len(set(q.choices)) < len(q.choices)),
    }


def read_mmbench_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads a table or JSON rows with a prediction per pass, LLaVA's lines or predictions.jsonl.

    A table's `nan` is an empty answer, unless it is the text of one of the question's choices.
    """
    if path.suffix.lower() not in SUFFIXES:
        return multiple_choice.choices_of(path, _with_passes(json_rows(path), questions), questions)
    named_nan = {q.id for q in questions if NAN in (choice.lower() for choice in q.choices)}
    predictions = []
    for row in mmbench_rows(path, ("index", PREDICTION)):
        name, answer = str(row.index), row.cells[PREDICTION]
        empty = answer == NAN and name not in named_nan
        predictions.append(Prediction(name, "" if empty else answer))
    return predictions


def _with_passes(
    rows: Iterable[tuple[str, Row]], questions: Sequence[Question]
) -> list[tuple[str, Row]]:
    """Returns the rows; rows of LLaVA's later rounds get the index of their pass as question_id."""
    by_id = {question.id: question for question in questions}
    passes: dict[str, list[Question]] = {}
    for question in questions:
        passes.setdefault(question.extra.get(BASE, question.id), []).append(question)
    named = []
    for where, row in rows:
        if PREDICTION in row and "question_id" not in row:  # VLMEvalKit's
            row = {**row, "question_id": row.get("index"), PREDICTION: _text_of(row[PREDICTION])}
        turn = row.get("round_id", 0)
        question = by_id.get(name := _known_id(row, by_id))
        if question is not None and turn != 0:
            count = len(question.choices)
            if type(turn) is not int or not 0 < turn < count:
                raise UserError(
                    f"{where}: round_id is {turn!r}; question {name} has {count} choices, so that "
                    f"0 to {count - 1} were expected; correct it."
                )
            alike = passes[question.extra.get(BASE, name)]
            row = {**row, "question_id": _pass_of_round(question, turn, alike)}
        named.append((where, row))
    return named


def _text_of(value: Any) -> Any:
    """A cell of VLMEvalKit's rows as text: numbers by `str`, a missing value is NaN there."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return str(value) if type(value) in (int, float) else value


def _known_id(row: Row, known: Container[str]) -> str | None:
    """The row's question_id, where it is one of a question."""
    try:
        return id_of(row.get("question_id"), "", known)
    except UserError:  # named with its line by the reader of all lines
        return None


def _pass_of_round(question: Question, turn: int, passes: Sequence[Question]) -> str:
    """The id of the pass that shows the choices as round `turn` of LLaVA does.

    LLaVA (llava/eval/model_vqa_mmbench.py) rotates the choices to the left by one each round, a
    pass k to the right by k, unless the official table has passes of its own.
    """
    count = len(question.choices)
    rotated = (*question.choices[turn:], *question.choices[:turn])
    expected = str(int(question.id) + (count - turn) * PASS_STEP)
    alike = [candidate.id for candidate in passes if candidate.choices == rotated]
    return expected if expected in alike or not alike else alike[0]


def holds_answers(path: Path) -> bool:
    """Whether a file is a table of MMBench, which holds questions and answers of its own."""
    return path.suffix.lower() in SUFFIXES


def write_mmbench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the spreadsheet that VLMEvalKit and the leaderboard read, a row per pass.

    A choice without text is written as its letter.
    """
    if path.suffix.lower() != ".xlsx":
        raise UserError(f"--submission={path}: a spreadsheet is written; name a file .xlsx.")
    by_id = predictions_by_question(questions, predictions)
    widest = max(len(question.choices) for question in questions)
    columns = [c for c in _SPREADSHEET if c not in rules.LETTERS[max(widest, 4) :]]
    rows = []
    for question in questions:
        answer = question.answer_index
        cells: dict[str, Any] = {
            **question.extra,
            **dict(zip(rules.LETTERS, question.choices, strict=False)),
            "index": int(question.id),
            "question": question.question,
            "answer": None if answer is None else rules.LETTERS[answer],
            "category": question.category,
            "split": {"val": "dev"}.get(question.split, question.split),
        }
        label = multiple_choice.shown_answer(by_id[question.id]) if question.id in by_id else None
        rows.append([*(cells.get(column) for column in columns), label])
    write_spreadsheet(path, [*columns, PREDICTION], rows)


def score_mmbench(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """MMBench's accuracy overall, by L2 category and by category, as VLMEvalKit's report_acc.

    Letters are inferred as VLMEvalKit does without a judge model. A question counts once: circular
    if all passes among `questions` are right, one without a prediction being wrong. Passes whose
    first pass is not among `questions` are left out, as in VLMEvalKit.
    """
    by_id = predictions_by_question(questions, predictions)
    firsts = [question for question in questions if question.extra.get(PASS, 0) == 0]
    if not firsts:
        raise UserError(
            f"all {len(questions):,} questions are rotated passes (index 1,000,000 and above), but "
            "a question is scored with its first pass; give the first passes too."
        )
    scored = questions_that_count(firsts, multiple_choice.has_answer, "a published answer")
    passes = [question for question in questions if multiple_choice.has_answer(question)]
    rotated = any(q.extra.get(PASS, 0) > 0 and q.id in by_id for q in passes)
    per_question: dict[str, np.ndarray] = {}
    unparsed: dict[str, int] = {}
    firsts_of = [question for question in passes if not question.extra.get(PASS, 0)]
    for year, answer_is in (("", False), ("_2026", True)):
        rule = functools.partial(_vlmeval, answer_is=answer_is)
        chosen = multiple_choice.chosen_by(passes, by_id, rule)
        hits = multiple_choice.right_choices(passes, chosen)  # [pass]
        if rotated:
            per_question[f"mmbench/circular{year}"] = _circular(passes, hits, scored)
            unparsed[f"mmbench/circular{year}"] = multiple_choice.unparsed_choices(
                passes, by_id, chosen
            )
        of_pass = dict(zip((question.id for question in passes), hits, strict=True))
        per_question[f"mmbench/vanilla{year}"] = np.array([of_pass[q.id] for q in scored])
        unparsed[f"mmbench/vanilla{year}"] = multiple_choice.unparsed_choices(
            firsts_of,
            by_id,
            [c for q, c in zip(passes, chosen, strict=True) if not q.extra.get(PASS, 0)],
        )
    notes = []
    if not rotated:
        notes.append("no prediction for any rotated pass, so mmbench/circular is not scored")
    groups = {
        f"{key}: {name}": np.array([_ability(q, key) == name for q in scored])
        for key in (L2, "category")
        for name in sorted({_ability(q, key) for q in scored} - {""})
    }
    scores = scores_of(firsts, scored, by_id, per_question, groups)
    return Evaluation([scores], notes=notes, unparsed=unparsed, has_modalities=False)


def _vlmeval(text: str, question: Question, *, answer_is: bool) -> int | None:
    return rules.vlmeval_choice(text, question.choices, answer_is=answer_is)


def _circular(
    passes: Sequence[Question], hits: np.ndarray, scored: Sequence[Question]
) -> np.ndarray:
    """1.0 for each of `scored` whose passes are all right; `hits` is [pass]."""
    all_right: dict[str, float] = {}
    for question, hit in zip(passes, hits, strict=True):
        base = question.extra.get(BASE, question.id)
        all_right[base] = min(all_right.get(base, 1.0), float(hit))
    return np.array([all_right[q.extra.get(BASE, q.id)] for q in scored])


def _ability(question: Question, key: str) -> str:
    return question.category if key == "category" else question.extra.get(key, "")


BENCHMARK = Benchmark(
    read=read_mmbench,
    materials=MATERIALS,
    split="val",
    formats="predictions.jsonl, a .xlsx, .tsv or .json with `index` and `prediction`, or LLaVA's "
    "lines",
    read_predictions=read_mmbench_predictions,
    has_reference=multiple_choice.has_answer,
    score=score_mmbench,
    headline="mmbench",
    verdicts=("mmbench/vanilla",),  # circular: of all passes, of which one is shown
    write_submission=write_mmbench_submission,
    submission="submission.xlsx",
    holds_references=holds_answers,
    split_names={"dev": "val"},
    tables=SUFFIXES,
)
