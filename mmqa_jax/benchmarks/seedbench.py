"""SEED-Bench's official files (https://github.com/AILab-CVC/SEED-Bench).

    SEED-Bench.json              {"questions": [...], "question_type": {dimension: number}}
    SEED-Bench-image/{data_id}   pictures of the dimensions 1 to 9
    SEED-Bench-video-image/{question_type_id}_{question_id}.png
                                 a frame of each video of the dimensions 10 to 12, named as by LLaVA
    captions.json                {question_id or, of pictures, data_id: caption}, optional

The videos of three other data sets are not read: a frame stands for one, where it was extracted.

These are its scores.

    seed_bench/likelihood   the choice of least loss is right (eval.py)
    seed_bench/letter       the answer is the correct letter and nothing else (LLaVA)

Prediction files are JSON lines: {"question_id", "prediction": letter}, the leaderboard's; the first
eval.py (July 2023) writes {"q_id", "prediction": letter of the choice of least loss}, the later
ones `question_id`, which are then the leaderboard's lines; or {"question_id", "losses": [of each
choice]}.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmqa_jax.benchmarks.benchmark import Benchmark
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_jsonl
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.coco import with_captions
from mmqa_jax.data.formats.vlmeval import PREDICTION
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation import multiple_choice
from mmqa_jax.evaluation.multiple_choice import has_answer
from mmqa_jax.evaluation.scores import groups_by, paired
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

# Keys of Question.extra: number of the dimension, `image` or `video`, and the picture's name.
DIMENSION, DATA_TYPE, DATA_ID = "question_type_id", "data_type", "data_id"

# The paper's abstract rounds it to 19K.
PUBLISHED_COUNTS = {"test questions": 19_242}
MATERIALS = (
    Material("SEED-Bench", "Li et al., CVPR 2024", "Apache-2.0"),
    Material("CC3M, pictures"),
)

_CHOICES = ("choice_a", "choice_b", "choice_c", "choice_d")
_READ = {"question_id", "question", "answer", *_CHOICES}

_SEED_SCORED = {  # why SEED-Bench's predictions are scored by this scorer
    "seed_bench/likelihood": (
        "the predictions are choices (`choice`, `losses`, or the first eval.py's lines with `q_id`)"
    ),
    "seed_bench/letter": (
        "the predictions are texts; one counts if it is the correct letter, whether a model wrote "
        "it or eval.py chose it by likelihood"
    ),
}


def read_seedbench(path: Path) -> official.BenchmarkFiles:
    """Reads SEED-Bench.json and the pictures beside it, or the file alone.

    All questions are of the split `test`; `Question.category` is the dimension's name; `extra`
    keeps `question_type_id`, `data_type`, `data_id`, `segment` and `caption`.
    """
    files = official.OfficialFiles(path, (".json",))
    source = files.alone or files.required(
        "SEED-Bench.json", remedy="fetch AILab-CVC/SEED-Bench from the hub"
    )
    data = read_json(source)
    names = data.get("question_type") if isinstance(data, dict) else None
    rows = list(official.json_entries(source, "questions"))
    valid = rows and isinstance(names, dict)
    if not valid or any(type(number) is not int for number in names.values()):
        raise UserError(
            f'{source}: {{"questions": [...], "question_type": {{name: number}}}} was expected; '
            "fetch it again."
        )
    dimensions = {number: name for name, number in names.items()}
    read = official.read_entries(rows, lambda row: _question(row, dimensions), "question_id")
    questions = list(read.values())
    places = {question.id: _places(question) for question in questions}
    questions = with_captions(files, questions, _caption_names, "a question_id or a data_id")
    pictures = official.PictureFiles(files.folder, places)
    questions = official.with_present_pictures(questions, pictures)
    if absent := sum(question.image is None for question in questions):
        files.missing["SEED-Bench-image/, SEED-Bench-video-image/"] = (
            f"{absent:,} of {len(questions):,} questions have no picture file"
        )
    return files.content(questions, _counts(questions, dimensions), PUBLISHED_COUNTS, pictures)


def _question(row: official.Entry, dimensions: Mapping[int, str]) -> Question:
    name = row.get("question_id")
    if not isinstance(name, str | int) or name == "":
        raise row.wrong("question_id", "text or a number")
    dimension, kind = row.get(DIMENSION), row.get(DATA_TYPE)
    if type(dimension) is not int or dimension not in dimensions or kind not in ("image", "video"):
        raise row.error(
            f"{DIMENSION} is {dimension!r} and {DATA_TYPE} {kind!r}; a number of question_type, "
            "and `image` or `video`, were expected: SEED-Bench-2 is another benchmark"
        )
    choices = tuple(map(row.text, _CHOICES))
    index = row.letter("answer", len(choices), hidden=(None,))
    return Question(
        id=str(name),
        split="test",
        question=row.text("question"),
        image=str(name),
        answers=() if index is None else (choices[index],),
        category=dimensions[dimension],
        choices=choices,
        answer_index=index,
        extra={key: value for key, value in row.items() if key not in _READ},
    )


def _caption_names(question: Question) -> Sequence[str]:
    """A video's name is none: it is shared by questions on other parts of the video."""
    has_picture = question.extra[DATA_TYPE] == "image" and DATA_ID in question.extra
    return (question.id, str(question.extra[DATA_ID])) if has_picture else (question.id,)


def _places(question: Question) -> tuple[str, ...]:
    if question.extra[DATA_TYPE] == "video":
        return (f"SEED-Bench-video-image/{question.extra[DIMENSION]}_{question.id}.png",)
    name = question.extra.get(DATA_ID)
    return tuple(
        f"{folder}/{name}{suffix}"
        for folder in ("SEED-Bench-image", "seed_bench_image")
        for suffix in ("", ".jpg", ".png")
    )


def _counts(questions: Sequence[Question], dimensions: Mapping[int, str]) -> dict[str, int]:
    per_dimension = Counter(question.extra[DIMENSION] for question in questions)
    kinds = {
        "questions on a picture": lambda q: q.extra[DATA_TYPE] == "image",
        "questions on a video": lambda q: q.extra[DATA_TYPE] == "video",
        "pictures found": lambda q: q.image is not None,
        f"questions with {official.CAPTION}": lambda q: official.CAPTION in q.extra,
    }
    return official.counts_of(questions, ["test"], kinds) | {
        f"{n} {dimensions[n]}": per_dimension[n] for n in sorted(per_dimension)
    }


def write_seed_bench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the leaderboard's lines {"question_id", "prediction": letter}.

    A missing prediction is an empty text.
    """
    rows = [
        {
            "question_id": question.id,
            PREDICTION: prediction.answer
            if prediction.choice is None
            else multiple_choice.LETTERS[prediction.choice],
        }
        for question, prediction in paired(questions, predictions)
    ]
    write_jsonl(path, rows)


def score_seed_bench(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> Evaluation:
    """SEED-Bench's accuracy overall, by dimension, on pictures (1-9) and on videos (10-12).

    Choices count as those of least loss, texts as letters; both are scored where a file has both,
    and the notes say which it has.
    """
    scored = scored_split(questions, predictions, has_answer, "a published answer")
    counted, by_id = scored.counted, scored.by_id
    chosen: dict[str, list[int | None]] = {}
    if any(prediction.choice is not None for prediction in predictions):
        chosen["seed_bench/likelihood"] = [prediction.choice for prediction in scored.predictions]
    answered = [q for q in counted if q.id in by_id and by_id[q.id].answer]
    if not chosen or not all(multiple_choice.by_choice(by_id[q.id], q) for q in answered):
        chosen["seed_bench/letter"] = [
            multiple_choice.exact_letter_choice(prediction.answer, len(question.choices))
            for question, prediction in zip(counted, scored.predictions, strict=True)
        ]
    numbered = {q.extra[DIMENSION]: f"{q.extra[DIMENSION]} {q.category}" for q in counted}
    groups = groups_by(
        counted,
        lambda q: f"{q.extra[DIMENSION]} {q.category}",
        [numbered[number] for number in sorted(numbered)],
    )
    for name, kind in (("pictures, 1-9", "image"), ("videos, 10-12", "video")):
        groups |= groups_by(counted, lambda q: q.extra[DATA_TYPE], [kind], name)
    notes = [f"{name}: {_SEED_SCORED[name]}" for name in chosen]
    return scored.of_choices(chosen, groups, notes=notes)


BENCHMARK = Benchmark(
    read=read_seedbench,
    materials=MATERIALS,
    split="test",
    formats="predictions.jsonl, or lines of {question_id, prediction} as JSON",
    read_predictions=multiple_choice.read_choice_lines,
    has_reference=has_answer,
    score=score_seed_bench,
    headline="seed_bench",
    verdicts=("seed_bench/likelihood", "seed_bench/letter"),
    write_submission=write_seed_bench_submission,
    submission="submission.jsonl",
)
