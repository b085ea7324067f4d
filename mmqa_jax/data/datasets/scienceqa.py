"""ScienceQA's official files (https://github.com/lupantech/ScienceQA) and the hub's Parquet of it.

    problems.json                          {pid: problem}; a part of it may be named problems_*.json
    pid_splits.json                        {split: [pid]}; without it problems name their split
    captions.json                          {"captions": {pid: text}}
    images/{train,val,test}/{pid}/image.png
    {train,validation,test}-*.parquet      instead of all these, here or in data/; without pids
    test_questions_all.json                LLaVA's conversations of all test questions: no more than
                                           question, choices and answer

Where a folder holds problems and LLaVA's conversations, these add the test questions that the
problems lack.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.datasets.benchmark import (
    CAPTION,
    Benchmark,
    OfficialFiles,
    PictureFiles,
    one_file,
)
from mmqa_jax.data.datasets.parquet import (
    ParquetPictures,
    parquet_columns,
    parquet_rows,
    row_name,
)
from mmqa_jax.data.schema import SPLITS, Material, Question

# The paper (table 1), and data/scienceqa/pid_splits.json.
PUBLISHED_COUNTS = {"train questions": 12_726, "val questions": 4_241, "test questions": 4_241}
MATERIALS = (Material("ScienceQA", "Lu et al., NeurIPS 2022", "CC BY-NC-SA 4.0"),)
# Keys of Question.extra: whether the benchmark shows a picture with the question, which may be
# absent from the disk, and whether it has a hint (part of the question in LLaVA's conversations).
HAS_PICTURE, HAS_HINT = "has_picture", "has_hint"

_CONVERSATIONS = "test_questions_all.json"
_PROBLEM = ("question", "choices", "answer")
# Of these ScienceQA's columns are made; with `image`, whose bytes are read on demand.
_GROUPING = ("hint", "subject", "grade")
_MORE = ("task", "topic", "category", "skill", "lecture", "solution")
_HUB_PREFIX = {"train": "train-", "val": "validation-", "test": "test-"}
_OPTION = re.compile(r"^([A-Z])\. ", re.MULTILINE)


class _Row(NamedTuple):
    """A problem before it is checked."""

    where: str
    id: str
    split: str
    problem: Mapping[str, Any]
    picture: str | None


def read_scienceqa(path: Path) -> Benchmark:
    """Reads what there is of the official files in a folder, or one of its question files.

    `Question.category` is the subject and `rationale` the solution; `extra` keeps `hint`,
    `lecture`, `grade`, `topic`, `skill`, `caption`, `has_picture` and `has_hint`.
    """
    alone = one_file(path, (".json", ".parquet"))
    files = OfficialFiles(path.parent if alone else path)
    if alone:
        files.found.append(path)
        tables = [path] if path.suffix == ".parquet" else []
    else:
        tables = [] if _problems_file(path) else _hub_tables(path)
        files.found += tables
    pictures: ParquetPictures | PictureFiles
    captions: dict[str, str] = {}
    if tables:
        pictures = ParquetPictures(tables, key=None)
        rows = _parquet_rows(tables, pictures)
    else:
        rows = _one_json_file(path) if alone else _folder_rows(files)
        captions = {} if alone else _captions(files)
        places = {row.picture: _picture_places(row.picture) for row in rows if row.picture}
        pictures = PictureFiles(files.folder, places)
    questions = [_question(row, captions, pictures) for row in rows]
    shown = [question for question in questions if question.extra[HAS_PICTURE]]
    names = [question.image for question in shown if question.image is not None]
    if len(names) < len(shown):
        files.missing["images/SPLIT/PID/image.png"] = (
            f"{len(shown) - len(names):,} of {len(shown):,} questions with a picture have no file "
            "of it; captions stand for them where known"
        )
    signature = pictures.signature() if tables else pictures.signature(names)
    return Benchmark(
        name="scienceqa",
        questions=questions,
        counts=_counts(questions),
        published=PUBLISHED_COUNTS,
        files=files.found,
        missing=files.missing,
        read_picture=pictures if names else None,
        inputs=signature if names else None,
    )


def parse_conversation(text: str) -> tuple[str, tuple[str, ...]]:
    """LLaVA's prompt of a question -> (context and question, choices).

    `Context: ` and a hint may come before the question; the choices are the last lines that begin
    with `A. `, `B. `, ...

    Raises:
      ValueError: there are no such lines.
    """
    text = text.removeprefix("<image>\n").removesuffix("\n<image>")
    options = list(_OPTION.finditer(text))
    first = max((n for n, option in enumerate(options) if option[1] == "A"), default=None)
    if first is None:
        raise ValueError("no line that begins with `A. `")
    options = options[first:]
    letters = [option[1] for option in options]
    if letters != [chr(ord("A") + n) for n in range(len(letters))]:
        raise ValueError(f"choices {', '.join(letters)}")
    ends = [option.start() - 1 for option in options[1:]] + [len(text)]
    choices = tuple(text[a.end() : b] for a, b in zip(options, ends, strict=True))
    return text[: options[0].start()].removesuffix("\n"), choices


def _one_json_file(path: Path) -> list[_Row]:
    """The rows of a problems file or of LLaVA's conversations."""
    data = read_json(path, unique_keys=True)
    if isinstance(data, list):
        return _conversation_rows(data, path)
    return _problem_rows(data, path, None)


def _folder_rows(files: OfficialFiles) -> list[_Row]:
    """The rows of the JSON files in a folder."""
    rows: list[_Row] = []
    problems = _problems_file(files.folder)
    if problems is not None:
        files.found.append(problems)
        splits = files.optional(
            "pid_splits.json", without="the splits are those that the problems name"
        )
        rows = _problem_rows(read_json(problems, unique_keys=True), problems, splits)
    conversations = files.folder / _CONVERSATIONS
    if conversations.is_file():
        files.found.append(conversations)
        known = {row.id for row in rows}
        rows += [row for row in _one_json_file(conversations) if row.id not in known]
    if not rows:
        raise UserError(
            f"{files.folder}: holds none of ScienceQA's questions; put problems.json, the hub's "
            f"Parquet files or {_CONVERSATIONS} there."
        )
    return rows


def _hub_tables(folder: Path) -> list[Path]:
    """The hub's Parquet files, in the order of the splits."""
    return [
        path
        for prefix in _HUB_PREFIX.values()
        for path in sorted(folder.glob(f"{prefix}*.parquet"))
        or sorted(folder.glob(f"data/{prefix}*.parquet"))
    ]


def _problems_file(folder: Path) -> Path | None:
    """problems.json, or the one file problems_*.json that holds a part of it."""
    whole = folder / "problems.json"
    if whole.is_file():
        return whole
    parts = sorted(folder.glob("problems_*.json"))
    if len(parts) > 1:
        raise UserError(
            f"{folder}: holds {len(parts)} files problems_*.json ({parts[0].name}, {parts[1].name}"
            "); leave one of them there, or name it problems.json."
        )
    return parts[0] if parts else None


def _problem_rows(data: Any, path: Path, splits_file: Path | None) -> list[_Row]:
    if not isinstance(data, dict) or not data:
        raise UserError(
            f"{path}: {{pid: problem}} was expected, with a problem at least; fetch ScienceQA's "
            "problems.json again."
        )
    if not any(isinstance(problem, dict) and "question" in problem for problem in data.values()):
        raise UserError(
            f"{path}: holds no problem with a question (its first key is {next(iter(data))!r}); "
            "give ScienceQA's problems.json, or the folder of its files."
        )
    splits = {} if splits_file is None else _splits(splits_file)
    rows = []
    for pid, problem in data.items():
        where = f"{path}, problem {pid}"
        if not isinstance(problem, dict):
            raise UserError(f"{where}: is no object; fetch the file again.")
        split = splits.get(pid) if splits_file else problem.get("split")
        if split not in SPLITS:
            source = f"{splits_file} does not name it" if splits_file else f"split is {split!r}"
            raise UserError(
                f"{where}: {source}; expected one of {', '.join(SPLITS)}: fetch both files again."
            )
        image = problem.get("image")
        if image is not None and not isinstance(image, str):
            raise UserError(f"{where}: image is {image!r}; a file name or null was expected.")
        picture = f"{split}/{pid}/{image}" if image else None
        rows.append(_Row(where, pid, split, problem, picture))
    return rows


def _conversation_rows(data: list[Any], path: Path) -> list[_Row]:
    """LLaVA's [{"id", "image", "conversations": [{"value": prompt}, {"value": letter}]}]."""
    rows, seen = [], set()
    for number, item in enumerate(data, start=1):
        where = f"{path}, entry {number}"
        try:
            pid, turns = item["id"], item["conversations"]
            question, choices = parse_conversation(turns[0]["value"])
            answer = [*"ABCDEFGHIJ"].index(turns[1]["value"])
        except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(
                f'{where}: not a conversation of "id", a question with choices `A. `, `B. `, ..., '
                f"and a letter as the answer ({error}); fetch LLaVA's file again."
            ) from error
        if not isinstance(pid, str) or pid in seen:
            raise UserError(f"{where}: id {pid!r} is no text or appears twice; correct it.")
        seen.add(pid)
        problem = {
            "question": question,
            "choices": list(choices),
            "answer": answer,
            HAS_HINT: question.startswith("Context: "),
        }
        picture = f"test/{pid}/image.png" if item.get("image") else None
        rows.append(_Row(where, pid, "test", problem, picture))
    return rows


def _parquet_rows(tables: Sequence[Path], pictures: ParquetPictures) -> list[_Row]:
    """The hub's rows; they have no pid, so their id is split and number, as in `test-17`."""
    rows: list[_Row] = []
    counts: Counter[str] = Counter()
    for path in tables:
        split = next((s for s, prefix in _HUB_PREFIX.items() if path.name.startswith(prefix)), None)
        if split is None:
            raise UserError(
                f"{path}: its name says no split; call it {'*, '.join(_HUB_PREFIX.values())}*."
            )
        _require_pictures(path)
        for number, problem in parquet_rows(path, (*_PROBLEM, *_GROUPING), _MORE):
            picture = row_name(path, number)
            pid = f"{split}-{counts[split]}"
            shown = picture if picture in pictures else None
            rows.append(_Row(f"{path}, row {number}", pid, split, problem, shown))
            counts[split] += 1
    return rows


def _require_pictures(path: Path) -> None:
    """UserError where a Parquet file has no column `image`, which says who has a picture."""
    if "image" not in parquet_columns(path):
        raise UserError(
            f"{path}: has no column image, which says which questions have a picture; fetch "
            "ScienceQA's own Parquet files."
        )


def _question(row: _Row, captions: Mapping[str, str], pictures: Container[str]) -> Question:
    where, pid, split, problem, picture = row
    extra = {k: v for k, v in problem.items() if k not in ("split", "image", *_PROBLEM)}
    for key in ("question", *_GROUPING, *_MORE):
        if not isinstance(problem.get(key) or "", str):
            raise UserError(f"{where}: {key} is {problem[key]!r}; text was expected; correct it.")
    choices = problem.get("choices")
    if not isinstance(choices, list) or not choices:
        raise UserError(f"{where}: choices is {choices!r}; a list of texts was expected.")
    if not problem.get("question") or not all(isinstance(choice, str) for choice in choices):
        raise UserError(f"{where}: expected a question and choices that are texts; correct it.")
    answer = problem.get("answer")
    if answer is not None and not (type(answer) is int and 0 <= answer < len(choices)):
        raise UserError(
            f"{where}: answer is {answer!r}; a number from 0 to {len(choices) - 1} was expected; "
            "correct it."
        )
    extra[HAS_PICTURE] = picture is not None
    extra.setdefault(HAS_HINT, bool(problem.get("hint")))
    if pid in captions and picture is not None:
        extra[CAPTION] = captions[pid]
    return Question(
        id=pid,
        split=split,
        question=problem["question"],
        image=picture if picture in pictures else None,
        answers=() if answer is None else (choices[answer],),
        category=problem.get("subject") or "",
        choices=tuple(choices),
        answer_index=answer,
        rationale=problem.get("solution") or "",
        extra={key: value for key, value in extra.items() if key != "solution"},
    )


def _picture_places(picture: str) -> tuple[str, ...]:
    """Where a picture may lie: ScienceQA's own folders, or LLaVA's, which have no split."""
    without_split = picture.split("/", 1)[1]
    return (
        *(f"images/{picture}", picture),
        *(f"images/{without_split}", without_split),
    )


def _splits(path: Path) -> dict[str, str]:
    data = read_json(path, unique_keys=True)
    if not isinstance(data, dict) or not all(isinstance(data.get(s, []), list) for s in SPLITS):
        raise UserError(f"{path}: {{split: [pid]}} was expected; fetch pid_splits.json again.")
    found: dict[str, str] = {}
    for split in SPLITS:
        for pid in data.get(split, []):
            if not isinstance(pid, str):
                raise UserError(
                    f"{path}, {split}: {pid!r:.40} was found and a pid expected, which is text; "
                    "fetch pid_splits.json again."
                )
            if found.setdefault(pid, split) != split:
                raise UserError(
                    f"{path}: problem {pid} is in {found[pid]} and in {split}; fetch it again."
                )
    return found


def _captions(files: OfficialFiles) -> dict[str, str]:
    path = files.optional("captions.json", without="no captions, which stand for absent pictures")
    if path is None:
        return {}
    data = read_json(path, unique_keys=True)
    captions = data.get("captions") if isinstance(data, dict) else None
    if not isinstance(captions, dict) or not all(isinstance(x, str) for x in captions.values()):
        raise UserError(
            f'{path}: {{"captions": {{pid: text}}}} was expected; fetch captions.json again.'
        )
    return captions


def _counts(questions: list[Question]) -> dict[str, int]:
    by_split = Counter(question.split for question in questions)
    shown = [question for question in questions if question.extra[HAS_PICTURE]]
    counts = {f"{split} questions": by_split[split] for split in SPLITS}
    return counts | {
        "questions with a picture": len(shown),
        "pictures found": sum(question.image is not None for question in shown),
        "captions": sum(CAPTION in question.extra for question in questions),
        "rationales": sum(bool(question.rationale) for question in questions),
        "questions with equal choices": sum(
            len(set(question.choices)) < len(question.choices) for question in questions
        ),
    }
