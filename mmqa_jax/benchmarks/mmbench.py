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

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats import official, vlmeval
from mmqa_jax.data.formats.coco import with_captions
from mmqa_jax.data.formats.tables import SUFFIXES, write_spreadsheet
from mmqa_jax.data.formats.vlmeval import PREDICTION
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation import multiple_choice as rules
from mmqa_jax.evaluation import scores
from mmqa_jax.evaluation.scores import Row, id_of, json_rows
from mmqa_jax.evaluation.scoring import Evaluation, ScoredSplit

PASS_STEP = 1_000_000
# Keys of Question.extra: the question's index without the pass, the pass, and the ability.
BASE, PASS, L2 = "base_index", "pass", "l2-category"

# The repository's list of downloads; the paper (table 2) counts 2,974 in all.
PUBLISHED_COUNTS = {"val questions": 1_164, "test questions": 1_784}
MATERIALS = (Material("MMBench", "Liu et al., ECCV 2024", "Apache-2.0"),)

_NULLABLE = ("hint", "answer", "category", L2, "split", "image")
_SPLITS = {"dev": "val", "val": "val", "test": "test", "train": "train"}
_READ = {*vlmeval.NEEDED, *vlmeval.LETTERS, "image", "answer", "category", "split", PREDICTION}
_SPREADSHEET = ("index", "question", "hint", *vlmeval.LETTERS, "answer", "category", L2, "split")


def read_mmbench(path: Path) -> official.BenchmarkFiles:
    """Reads all tables in a folder, or one of them; a question per circular pass.

    `Question.id` is the pass's index; `extra` keeps `base_index`, `pass`, `hint`, `l2-category`,
    `caption` and columns of no other use. Tables of several splits may be in the folder, but not
    two of one.
    """
    files = official.OfficialFiles(path, SUFFIXES)
    if files.alone is None:
        files.read_files += vlmeval.tables_in(files.folder, "MMBench", "MMBench_DEV_EN.tsv")
    rows = [row for table in files.read_files for row in vlmeval.rows_of(table, nullable=_NULLABLE)]
    vlmeval.check_indices(rows)
    pictures = vlmeval.TablePictures(rows)
    if not pictures:
        files.missing["image"] = "no table has this column; questions stand without pictures"
    questions = [_question(row, pictures.name_of) for row in rows]
    questions = with_captions(
        files,
        questions,
        lambda q: (q.extra[BASE], q.image or q.extra[BASE]),
        "indices of the table",
    )
    if all(row.number("index") < PASS_STEP and PREDICTION not in row for row in rows):
        questions = [each for question in questions for each in circular_passes(question)]
    counts = _counts(questions, len(questions) - len(rows))
    return files.content(questions, counts, PUBLISHED_COUNTS, pictures)


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


def _question(row: official.Entry, picture_of: Mapping[int, str]) -> Question:
    index, choices = row.number("index"), vlmeval.choices_of(row)
    answer = row.get("answer", "").strip()
    answer_index = official.Entry(row.where, {"answer": answer}).letter("answer", len(choices))
    named = row.get("split", "").lower() or ("dev" if answer else "test")
    split = official.Entry(row.where, {"split": named}).choice("split", _SPLITS)
    extra = {k: v for k, v in row.items() if k and v and k not in _READ}
    return Question(
        id=str(index),
        split=_SPLITS[split],
        question=row.text("question"),
        image=picture_of.get(index),
        answers=() if answer_index is None else (choices[answer_index],),
        category=row.get("category", ""),
        choices=choices,
        answer_index=answer_index,
        extra={**extra, BASE: str(index % PASS_STEP), PASS: index // PASS_STEP},
    )


def _counts(questions: Sequence[Question], made: int) -> dict[str, int]:
    firsts = [question for question in questions if question.extra[PASS] == 0]
    kinds = {
        "questions without a picture": lambda q: q.image is None,
        f"questions with {official.CAPTION}": lambda q: official.CAPTION in q.extra,
        "questions without an answer": lambda q: q.answer_index is None,
        "questions with equal choices": lambda q: len(set(q.choices)) < len(q.choices),
    }
    in_train = ["train"] if any(question.split == "train" for question in firsts) else []
    counts = official.counts_of(firsts, ("val", "test", *in_train), {})
    counts |= {"circular passes": len(questions), "passes made here": made}
    return counts | official.counts_of(firsts, (), kinds)


def read_mmbench_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads a table or JSON rows with a prediction per pass, LLaVA's lines or predictions.jsonl.

    A table's `nan` is an empty answer, unless it is the text of one of the question's choices.
    """
    if path.suffix.lower() not in SUFFIXES:
        return rules.choices_of(path, _with_passes(json_rows(path), questions), questions)
    return vlmeval.read_predictions(path, questions)


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
        row = vlmeval.named_row(row)
        turn = row.get("round_id", 0)
        name = None
        with contextlib.suppress(UserError):  # named with its line by the reader of all lines
            name = id_of(row.get("question_id"), "", by_id)
        question = by_id.get(name)
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


def write_mmbench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the spreadsheet that VLMEvalKit and the leaderboard read, a row per pass.

    A choice without text is written as its letter.
    """
    if path.suffix.lower() != ".xlsx":
        raise UserError(f"--submission={path}: a spreadsheet is written; name a file .xlsx.")
    widest = max(len(question.choices) for question in questions)
    columns = [c for c in _SPREADSHEET if c not in vlmeval.LETTERS[max(widest, 4) :]]
    answered = {prediction.question_id for prediction in predictions}
    rows = []
    for question, prediction in scores.paired(questions, predictions):
        answer = question.answer_index
        cells: dict[str, Any] = {
            **question.extra,
            **dict(zip(vlmeval.LETTERS, question.choices, strict=False)),
            "index": int(question.id),
            "question": question.question,
            "answer": None if answer is None else vlmeval.LETTERS[answer],
            "category": question.category,
            "split": {"val": "dev"}.get(question.split, question.split),
        }
        label = rules.shown_answer(prediction) if question.id in answered else None
        rows.append([*(cells.get(column) for column in columns), label])
    write_spreadsheet(path, [*columns, PREDICTION], rows)


def score_mmbench(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """MMBench's accuracy overall, by L2 category and by category, as VLMEvalKit's report_acc.

    Letters are inferred as VLMEvalKit does without a judge model. A question counts once: circular
    if all passes among `questions` are right, one without a prediction being wrong. Passes whose
    first pass is not among `questions` are left out, as in VLMEvalKit.
    """
    by_id = scores.predictions_by_question(questions, predictions)
    firsts = [question for question in questions if question.extra.get(PASS, 0) == 0]
    if not firsts:
        raise UserError(
            f"all {len(questions):,} questions are rotated passes (index 1,000,000 and above), but "
            "a question is scored with its first pass; give the first passes too."
        )
    scored = ScoredSplit(
        firsts, scores.questions_that_count(firsts, rules.has_answer, "a published answer"), by_id
    )
    passes = [question for question in questions if rules.has_answer(question)]
    first_passes = [question for question in passes if not question.extra.get(PASS, 0)]
    rotated = any(q.extra.get(PASS, 0) > 0 and q.id in by_id for q in passes)
    per_question: dict[str, np.ndarray] = {}
    unparsed: dict[str, int] = {}
    for year, answer_is in (("", False), ("_2026", True)):
        chosen = rules.chosen_by(
            passes,
            by_id,
            lambda text, q, kind=answer_is: rules.vlmeval_choice(text, q.choices, answer_is=kind),
        )
        choice_of = dict(zip((question.id for question in passes), chosen, strict=True))
        for name, scored_passes, score in (
            ("circular", passes, _circular(passes, choice_of, scored.counted)),
            ("vanilla", first_passes, _circular(first_passes, choice_of, scored.counted)),
        ):
            if name == "vanilla" or rotated:
                per_question[f"mmbench/{name}{year}"] = score
                unparsed[f"mmbench/{name}{year}"] = rules.unparsed_choices(
                    scored_passes, by_id, [choice_of[question.id] for question in scored_passes]
                )
    notes = []
    if not rotated:
        notes.append("no prediction for any rotated pass, so mmbench/circular is not scored")
    groups = {
        **scores.groups_by(scored.counted, lambda q: q.extra.get(L2, ""), title=f"{L2}: {{}}"),
        **scores.groups_by(scored.counted, lambda q: q.category, title="category: {}"),
    }
    return scored.evaluation(per_question, groups, notes=notes, unparsed=unparsed)


def _circular(
    passes: Sequence[Question], choice_of: Mapping[str, int | None], firsts: Sequence[Question]
) -> np.ndarray:
    """1.0 for each of `firsts` whose passes are all right; float64 [question]."""
    wrong = {
        question.extra.get(BASE, question.id)
        for question in passes
        if choice_of[question.id] != question.answer_index
    }
    return np.array([float(q.extra.get(BASE, q.id) not in wrong) for q in firsts])


BENCHMARK = Benchmark(
    read=read_mmbench,
    materials=MATERIALS,
    split="val",
    formats="predictions.jsonl, a .xlsx, .tsv or .json with `index` and `prediction`, or LLaVA's "
    "lines",
    read_predictions=read_mmbench_predictions,
    has_reference=rules.has_answer,
    score=score_mmbench,
    headline="mmbench",
    verdicts=("mmbench/vanilla",),  # circular: of all passes, of which one is shown
    write_submission=write_mmbench_submission,
    submission="submission.xlsx",
    holds_references=lambda path: path.suffix.lower() in SUFFIXES,
    split_names={"dev": "val"},
    tables=SUFFIXES,
)
