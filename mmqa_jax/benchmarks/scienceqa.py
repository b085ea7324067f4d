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

These are its scores.

    scienceqa/letter_or_random     `The answer is X.` once, else a random choice (run_gpt3.py)
    scienceqa/letter_or_expected   the same, with 1 / (number of choices) in place of the draw
    scienceqa/letter_or_wrong      LLaVA's rule, which also takes a bare letter; else wrong
    scienceqa/recorded_choice      the choices that the file itself gives (tools/evaluate_acc.py)

Prediction files are {"results": {pid: index}, "outputs": {pid: text}}, either of which may be
absent (models/run_gpt3.py and LLaVA's eval_science_qa.py write both), and LLaVA's lines.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.coco import with_captions
from mmqa_jax.data.formats.official import HAS_HINT, Entry
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.schema import SPLITS, Material, Prediction, Question
from mmqa_jax.evaluation import multiple_choice as rules
from mmqa_jax.evaluation.scores import group_of, groups_by, holds_lines, predictions_by_question
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

_OPTION = re.compile(r"^([A-Z])\. ", re.MULTILINE)


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


def question_entry(row: Entry) -> Entry:
    """The question, choices and answer of one {"conversations": [{"value": prompt}, {"value":
    letter}]}.
    """
    try:
        turns = row["conversations"]
        question, choices = parse_conversation(turns[0]["value"])
        answer = [*"ABCDEFGHIJ"].index(turns[1]["value"])
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        raise row.error(
            "not a conversation of a question with choices `A. `, `B. `, ..., and a letter as the "
            f"answer ({error})"
        ) from error
    has_hint = question.startswith("Context: ")
    values = {"question": question, "choices": [*choices], "answer": answer, HAS_HINT: has_hint}
    return Entry(row.where, values)


# The paper (table 1), and data/scienceqa/pid_splits.json.
PUBLISHED_COUNTS = {"train questions": 12_726, "val questions": 4_241, "test questions": 4_241}
MATERIALS = (Material("ScienceQA", "Lu et al., NeurIPS 2022", "CC BY-NC-SA 4.0"),)

_CONVERSATIONS = "test_questions_all.json"
_PROBLEM = ("question", "choices", "answer")
# Of these ScienceQA's columns are made; with `image`, whose bytes are read on demand.
_GROUPING = ("hint", "subject", "grade")
_MORE = ("task", "topic", "category", "skill", "lecture", "solution")

_HUB_ID = re.compile(r"(train|val|test)-\d+")  # of ScienceQA's questions in the hub's Parquet

_SUBJECTS = {"NAT": "natural science", "SOC": "social science", "LAN": "language science"}
_GRADES = {"G1-6": range(1, 7), "G7-12": range(7, 13)}


def read_scienceqa(path: Path) -> official.BenchmarkFiles:
    """Reads what there is of the official files in a folder, or one of its question files.

    `Question.category` is the subject and `rationale` the solution; `extra` keeps `hint`,
    `lecture`, `grade`, `topic`, `skill`, `caption`, `has_picture` and `has_hint`.
    """
    files = official.OfficialFiles(path, (".json", ".parquet"))
    if files.alone is not None:
        tables = [path] if path.suffix == ".parquet" else []
    else:
        names = () if _problems_file(path) else official.HUB_NAMES.values()
        tables = [table for name in names for table in official.hub_tables(path, name)]
        files.read_files += tables
    pictures: official.ParquetPictures | official.PictureFiles
    if tables:
        pictures = official.ParquetPictures(tables, key=None)
        questions = _of_tables(tables, pictures)
    else:
        questions = _of_folder(files) if files.alone is None else _of_json_file(path)
        names = official.picture_names(questions)
        pictures = official.PictureFiles(files.folder, {name: _places(name) for name in names})
        if names and files.alone is None:
            questions = with_captions(
                files, questions, lambda q: () if q.image is None else (q.id,), "pids"
            )
    pictured = len([question for question in questions if question.image is not None])
    questions = official.with_present_pictures(questions, pictures)
    if absent := pictured - sum(question.image is not None for question in questions):
        files.missing["images/SPLIT/PID/image.png"] = (
            f"{absent:,} of {pictured:,} questions with a picture have no file of it; captions "
            "stand for them where known"
        )
    return files.content(questions, _counts(questions), PUBLISHED_COUNTS, pictures)


def _of_json_file(path: Path) -> list[Question]:
    """The questions of a problems file or of LLaVA's conversations."""
    data = read_json(path, unique_keys=True)
    if not isinstance(data, list):
        return _of_problems(data, path, None)
    return list(official.read_entries(official.json_entries(path), _conversation, "id").values())


def _of_folder(files: official.OfficialFiles) -> list[Question]:
    """The questions of the JSON files in a folder."""
    questions: list[Question] = []
    problems = _problems_file(files.folder)
    if problems is not None:
        files.read_files.append(problems)
        splits = files.optional(
            "pid_splits.json", without="the splits are those that the problems name"
        )
        questions = _of_problems(read_json(problems, unique_keys=True), problems, splits)
    conversations = files.folder / _CONVERSATIONS
    if conversations.is_file():
        files.read_files.append(conversations)
        known = {question.id for question in questions}
        questions += [
            question for question in _of_json_file(conversations) if question.id not in known
        ]
    files.check_questions(
        questions, "ScienceQA", f"problems.json, the hub's Parquet files or {_CONVERSATIONS}"
    )
    return questions


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


def _of_problems(data: Any, path: Path, splits_file: Path | None) -> list[Question]:
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
    questions = []
    for pid, problem in data.items():
        problem = official.Entry(f"{path}, problem {pid}", problem)
        split = splits.get(pid) if splits_file else problem.get("split")
        if split not in SPLITS:
            source = f"{splits_file} does not name it" if splits_file else f"split is {split!r}"
            raise problem.error(f"{source}; one of {', '.join(SPLITS)} was expected")
        image = problem.text("image", "")
        picture = f"{split}/{pid}/{image}" if image else None
        questions.append(_question(problem, pid, split, picture))
    return questions


def _conversation(row: official.Entry) -> Question:
    problem, pid = question_entry(row), row.text("id")
    return _question(problem, pid, "test", f"test/{pid}/image.png" if row.get("image") else None)


def _of_tables(tables: Sequence[Path], pictures: official.ParquetPictures) -> list[Question]:
    """The hub's questions; they have no pid, so their id is split and number, as in `test-17`."""
    questions: list[Question] = []
    counts: Counter[str] = Counter()
    for path in tables:
        split = official.hub_split(path)
        official.require_columns(path, ["image"])  # which says which questions have a picture
        for number, problem in official.parquet_rows(path, (*_PROBLEM, *_GROUPING), _MORE):
            picture = official.row_name(path, number)
            entry = official.Entry(f"{path}, row {number}", problem)
            name = picture if picture in pictures else None
            questions.append(_question(entry, f"{split}-{counts[split]}", split, name))
            counts[split] += 1
    return questions


def _question(problem: official.Entry, pid: str, split: str, picture: str | None) -> Question:
    extra = {k: v for k, v in problem.items() if k not in ("split", "image", *_PROBLEM)}
    for key in (*_GROUPING, *_MORE):
        problem.text(key, "")  # refuses another value
    choices = problem.texts("choices")
    if not choices:
        raise problem.wrong("choices", "a list of texts")
    answer = problem.index("answer", len(choices))
    extra[official.HAS_PICTURE] = picture is not None
    extra.setdefault(official.HAS_HINT, bool(problem.get("hint")))
    return Question(
        id=pid,
        split=split,
        question=problem.text("question"),
        image=picture,
        answers=() if answer is None else (choices[answer],),
        category=problem.get("subject") or "",
        choices=choices,
        answer_index=answer,
        rationale=problem.get("solution") or "",
        extra={key: value for key, value in extra.items() if key != "solution"},
    )


def _places(picture: str) -> tuple[str, ...]:
    """Returns where a picture may lie: ScienceQA's own folders, or LLaVA's, which have no split."""
    without_split = picture.split("/", 1)[1]
    return (*(f"images/{picture}", picture), *(f"images/{without_split}", without_split))


def _splits(path: Path) -> dict[str, str]:
    data = official.Entry(str(path), read_json(path, unique_keys=True))
    split_of: dict[str, str] = {}
    for split in SPLITS:
        for pid in data.texts(split):
            if split_of.setdefault(pid, split) != split:
                raise data.error(f"problem {pid} is in {split_of[pid]} and in {split}")
    return split_of


def _counts(questions: list[Question]) -> dict[str, int]:
    kinds = {
        "questions with a picture": lambda q: q.extra[official.HAS_PICTURE],
        "pictures found": lambda q: q.image is not None,
        "captions": lambda q: official.CAPTION in q.extra,
        "rationales": lambda q: q.rationale,
        "questions with equal choices": lambda q: len(set(q.choices)) < len(q.choices),
    }
    return official.counts_of(questions, SPLITS, kinds)


def read_scienceqa_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads results and outputs, LLaVA's lines or predictions.jsonl."""
    if holds_lines(path):
        predictions = rules.read_choice_lines(path, questions)
    else:
        predictions = rules.read_choice_object(path, {question.id for question in questions})
    _check_pids(path, predictions, questions)
    return predictions


def _check_pids(
    path: Path, predictions: Sequence[Prediction], questions: Sequence[Question]
) -> None:
    """UserError for pids where the questions are the hub's, which have none."""
    if predictions and all(_HUB_ID.fullmatch(question.id) for question in questions):
        name = predictions[0].question_id
        if name.isdecimal():
            raise UserError(
                f"{path}: answers problem {name}, but the hub's Parquet has no pids; give "
                "--references ScienceQA's problems.json."
            )


def write_scienceqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes {"results": {pid: index}} of every question, as tools/evaluate_acc.py reads it.

    The given choice; else the one that the text names by LLaVA's rule; else ScienceQA's random
    choice. -1 where there is no prediction.
    """
    by_id = predictions_by_question(questions, predictions)
    results = {}
    for question in questions:
        prediction, count = by_id.get(question.id), len(question.choices)
        choice: int | None = -1
        if prediction is not None:
            choice = prediction.choice
            if choice is None:
                choice = rules.llava_choice(prediction.answer, count)
            if choice is None:
                choice = rules.random_choice(question.id, count)
        results[question.id] = choice
    write_json(path, {"results": results})


def score_scienceqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """ScienceQA's accuracy overall and in its nine columns, which overlap."""
    scored = scored_split(questions, predictions, rules.has_answer, "a published answer")
    strict, lenient = (
        scored.choices(lambda text, q, rule=rule: rule(text, len(q.choices)))
        for rule in (rules.gpt3_choice, rules.llava_choice)
    )
    chosen = {
        "scienceqa/letter_or_random": strict,
        "scienceqa/letter_or_expected": strict,
        "scienceqa/letter_or_wrong": lenient,
    }
    if any(prediction.choice is not None for prediction in predictions):
        chosen["scienceqa/recorded_choice"] = [p.choice for p in scored.predictions]
    counted = scored.counted
    evaluation = scored.of_choices(chosen, scienceqa_columns(counted))
    per_question = evaluation.scored[0].per_question
    for row, (q, choice) in enumerate(zip(counted, strict, strict=True)):
        if q.id in scored.by_id and choice is None:
            drawn = rules.random_choice(q.id, len(q.choices))
            per_question["scienceqa/letter_or_random"][row] = drawn == q.answer_index
            per_question["scienceqa/letter_or_expected"][row] = 1 / len(q.choices)
    known = sum(bool(question.category) for question in counted)
    if known < len(counted):
        evaluation.notes.append(
            f"subject and grade of {known:,} of {len(counted):,} questions are known: NAT, SOC, "
            "LAN, G1-6 and G7-12 are over these alone; problems.json has all"
        )
    return evaluation


def scienceqa_columns(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """ScienceQA's columns but for the average (tools/evaluate_acc.py:33-68); they overlap.

    NAT, SOC, LAN by subject; TXT with a hint, IMG with a picture, NO with neither; G1-6, G7-12 by
    grade. A picture counts where the benchmark shows one, whether or not the file is there.
    """
    hint = group_of(questions, lambda q: bool(q.extra.get(official.HAS_HINT)))
    picture = group_of(questions, lambda q: bool(q.extra.get(official.HAS_PICTURE)))
    grades = [str(q.extra.get("grade") or "").removeprefix("grade") for q in questions]
    columns = {}
    for name, subject in _SUBJECTS.items():
        columns |= groups_by(questions, lambda q: q.category, [subject], name)
    columns |= {"TXT": hint, "IMG": picture, "NO": ~hint & ~picture}
    return columns | {
        name: np.array([whole_number(grade) in grades_of for grade in grades])
        for name, grades_of in _GRADES.items()
    }


BENCHMARK = Benchmark(
    read=read_scienceqa,
    materials=MATERIALS,
    split="test",
    formats='predictions.jsonl, {"results": {pid: index}} as JSON, or LLaVA\'s lines',
    read_predictions=read_scienceqa_predictions,
    has_reference=rules.has_answer,
    score=score_scienceqa,
    headline="scienceqa",
    verdicts=("scienceqa/letter_or_wrong",),  # letter_or_random draws where there is no letter
    write_submission=write_scienceqa_submission,
)
