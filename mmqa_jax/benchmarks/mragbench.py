"""MRAG-Bench's files (https://github.com/mragbench/MRAG-Bench; uclanlp/MRAG-Bench on the hub).

    test-*.parquet, here or in data/   id, aspect, scenario, image, question, A to D, answer_choice,
                                       gt_images, retrieved_images (the best five by CLIP), ...
    image_corpus/**                    optional: the pictures to retrieve from, at any depth

Pictures are named by nothing in the Parquet files, so that a source is a picture's bytes: one that
several questions share, or that lies in the corpus's folder too, is one source.

MRAG-Bench's score and prediction file (mragbench/MRAG-Bench, eval/score.py).

    mragbench/rule   MMMU's rule for letters, without its random choice and without contents

Where the rule finds no letter the script asks GPT-3.5; here that is wrong and counted as unparsed.
The file has a line {"qs_id", "output", "gt_choice", "scenario", ...} for each question, which the
script scores by itself.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.official import PictureColumns, hub_tables, parquet_entries
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.schema import Material, Prediction, Question, Source
from mmqa_jax.evaluation import multiple_choice
from mmqa_jax.evaluation.multiple_choice import has_answer
from mmqa_jax.evaluation.scores import groups_by, paired, read_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

# Keys of Question.extra: the paper's two aspects and `Others`, and the given sources, best first.
ASPECT, RETRIEVED = "aspect", "retrieved"
INCOMPLETE = "Incomplete"  # the scenario whose questions have a single gold picture
SCENARIOS = (
    *("Angle", "Partial", "Scope", "Occlusion", "Obstruction"),
    *("Temporal", "Deformation", INCOMPLETE, "Biological", "Others"),
)

# The paper's abstract: pictures of questions and of the corpus together.
PUBLISHED_COUNTS = {"test questions": 1_353}
MATERIALS = (Material("MRAG-Bench", "Hu et al., ICLR 2025", "CC BY 4.0"),)

_CORPUS = "image_corpus"
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_LETTERS = "ABCD"
_NEEDED = ("id", "question", *_LETTERS, "answer_choice", "scenario", ASPECT)
_MORE = ("image_type", "source")
_GOLD, _GIVEN = "gt_images", "retrieved_images"


class _Pictures:
    """Encoded pictures of the tables and of the corpus's folder."""

    def __init__(self, columns: PictureColumns, files: official.PictureFiles, names: Sequence[str]):
        self._columns, self._files, self._names = columns, files, names

    def __call__(self, name: str) -> bytes:
        """Encoded bytes; PictureError where there are none."""
        return self._columns(name) if name in self._columns else self._files(name)

    def signature(self, names: Iterable[str] = ()) -> str:
        """Identifies the files in their present state, whatever the names of pictures."""
        return f"{self._columns.signature()}\n{self._files.signature(self._names)}"


def read_mragbench(folder: Path) -> official.BenchmarkFiles:
    """Reads the questions, and all pictures once, to tell equal ones.

    Questions are of the split `test`. `Question.category` is the scenario, `positives` are the gold
    pictures, `extra["retrieved"]` those that the authors retrieved.
    """
    files = official.OfficialFiles(folder)
    tables = hub_tables(folder, "test")
    if not tables:
        raise UserError(f"{folder}: holds no test-*.parquet; put MRAG-Bench's Parquet files there.")
    files.read_files += tables
    columns = PictureColumns(tables, "id", ("image",), (_GOLD, _GIVEN))
    corpus_paths = sorted(p for p in (folder / _CORPUS).rglob("*") if p.suffix.lower() in _SUFFIXES)
    names = [str(path.relative_to(folder)) for path in corpus_paths]
    if not names:
        files.missing[f"{_CORPUS}/"] = (
            "the pictures that no question names as gold or retrieved are not searched"
        )
    pictures = _Pictures(
        columns, official.PictureFiles(folder, {name: (name,) for name in names}), names
    )
    sources: dict[str, Source] = {}

    def known(name: str) -> str:
        """The id of a picture's source, which may be new."""
        try:
            content = pictures(name)
        except PictureError:  # named as broken when it is written
            content = name.encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        sources.setdefault(digest, Source(digest, "image", "", image=name))
        return digest

    def question(row: official.Entry) -> Question:
        gold, retrieved = (
            tuple(dict.fromkeys(map(known, columns.listed(str(row["id"]), column))))
            for column in (_GOLD, _GIVEN)
        )
        image = f"{row['id']}/image"
        return _question(row, image if image in columns else None, gold, retrieved)

    rows = parquet_entries(tables, _NEEDED, _MORE)
    questions = list(official.read_entries(rows, question, "id").values())
    for name in names:
        known(name)
    # By id: in the files' order, gold before retrieved, ties would favor gold pictures.
    listed = [sources[name] for name in sorted(sources)]
    counts = _counts(questions, len(sources))
    return files.content(questions, counts, PUBLISHED_COUNTS, pictures, listed)


def _question(
    row: official.Entry, image: str | None, gold: tuple[str, ...], retrieved: Sequence[str]
) -> Question:
    choices = tuple(map(row.text, _LETTERS))
    index = row.letter("answer_choice", len(choices), hidden=())
    return Question(
        id=str(row["id"]),
        split="test",
        question=row.text("question"),
        image=image,
        answers=(choices[index],),
        category=row.text("scenario"),
        positives=gold,
        choices=choices,
        answer_index=index,
        extra={
            ASPECT: row.text(ASPECT),
            **{key: row[key] for key in _MORE if row.get(key)},
            RETRIEVED: list(retrieved),
        },
    )


def _counts(questions: Sequence[Question], sources: int) -> dict[str, int]:
    scenarios = Counter(question.category for question in questions)
    kinds = {
        "questions without a picture": lambda q: q.image is None,
        "questions without gold pictures": lambda q: not q.positives,
        "questions with retrieved pictures": lambda q: q.extra[RETRIEVED],
    }
    return {
        "test questions": len(questions),
        "pictures to retrieve from": sources,
        **official.counts_of(questions, (), kinds),
        **{f"{name} questions": scenarios[name] for name in sorted(scenarios)},
    }


SCORER = "mragbench/rule"


def score_mragbench(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Accuracy overall, by scenario and by aspect; a missing prediction is wrong."""
    scored = scored_split(questions, predictions, has_answer, "a published answer")
    chosen = scored.choices(
        lambda text, q: multiple_choice.mmmu_choice(text.strip(), len(q.choices))
    )
    scenarios = dict.fromkeys(question.category for question in scored.counted)
    names = [name for name in dict.fromkeys((*SCENARIOS, *scenarios)) if name in scenarios]
    groups = groups_by(scored.counted, lambda q: q.category, names)
    aspects = groups_by(scored.counted, lambda q: str(q.extra.get(ASPECT, "")), title="aspect: {}")
    return scored.of_choices({SCORER: chosen}, groups | aspects)


def write_mragbench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the lines that score.py reads, one for every question."""
    write_jsonl(
        path,
        (
            {
                "qs_id": question.id,
                "output": prediction.answer,
                "gt_answer": question.choices[question.answer_index],
                "gt_choice": multiple_choice.LETTERS[question.answer_index],
                "scenario": question.category,
                ASPECT: question.extra.get(ASPECT, ""),
            }
            for question, prediction in paired(questions, predictions)
            if question.answer_index is not None
        ),
    )


BENCHMARK = Benchmark(
    read=read_mragbench,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats='predictions.jsonl, or the official lines {"qs_id", "output"}',
    read_predictions=functools.partial(read_lines, id_key="qs_id", text_key="output"),
    has_reference=has_answer,
    score=score_mragbench,
    headline="mragbench",
    write_submission=write_mragbench_submission,
    submission="submission.jsonl",
    boards=read_boards("mragbench"),
)
