"""How a benchmark is read, scored and submitted; each file beside this one has a BENCHMARK."""

import dataclasses
import functools
import importlib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_text
from mmqa_jax.data.corpus import Corpus, open_corpus, split_questions
from mmqa_jax.data.formats.official import BenchmarkFiles
from mmqa_jax.data.records.corpus_records import MANIFEST
from mmqa_jax.data.schema import Material, Prediction, Question, united
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.evaluation.tables import Table

# Files that no reader of JSON should be asked to read; VLMEvalKit writes its predictions as pickles
# too, which run code where they are loaded.
_NO_JSON = (".xlsx", ".xls", ".csv", ".tsv", ".parquet", ".pkl", ".pickle")


@dataclasses.dataclass(frozen=True)
class Published:
    """A system's published figure."""

    system: str  # its name, as its source has it
    percent: float  # the figure
    source: str  # the page or file that has it
    date: str  # of the source or of its entry, year and month at least


@dataclasses.dataclass(frozen=True)
class Board:
    """The best published systems of a benchmark, which `mmqa tables` prints beside our rows."""

    measure: str  # what the figures measure
    systems: tuple[Published, ...]  # best first
    # Our score that measures the same; "": none does, and our rows do not stand there.
    scorer: str = ""
    # Where figures are means over sets; a row of ours runs one of them (SYSTEM_SET).
    sets: tuple[str, ...] = ()
    one_pool: bool = False  # whether a row of ours runs all sets, in one pool
    language: str = ""  # of the questions that count, where a set has several; "": all
    title: str = "board"  # of the table, where a benchmark has several boards


def read_boards(name: str, sets: Iterable[str] = ()) -> tuple[Board, ...]:
    """The boards of a benchmark, those of boards.toml.

    `sets`: those that the figures of its boards `of_sets` are means over.
    """
    tables = tomllib.loads(read_text(Path(__file__).with_name("boards.toml")))[name]
    boards = []
    for table in tables:
        systems = tuple(Published(*row) for row in table.pop("systems"))
        means_over = tuple(sets) if table.pop("of_sets", False) else ()
        boards.append(Board(**table, systems=systems, sets=means_over))
    return tuple(boards)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """How one benchmark is read, scored and submitted."""

    # Reads the official files: their folder; of A-OKVQA, ScienceQA, MMBench and SEED-Bench also a
    # single file of them that holds whole questions.
    read: Callable[[Path], BenchmarkFiles]
    # What the benchmark is made of, for the credits of every corpus that is made of it.
    materials: tuple[Material, ...]
    split: str  # the split that is scored by default, one whose answers are public
    formats: str  # the prediction files that `read_predictions` knows, for messages
    # (file, questions) -> predictions; the questions are those to score, whose choices may be
    # needed to read an answer.
    read_predictions: Callable[[Path, Sequence[Question]], list[Prediction]]
    has_reference: Callable[[Question], bool]  # whether a question's answer is published
    # (questions, predictions) -> the scores; predictions may be missing, and then count 0.
    score: Callable[[Sequence[Question], Sequence[Prediction]], Evaluation]
    # What the scores that a row's page shows large begin with, beside those of any row.
    headline: str = ""
    # The scorers that tell right from wrong on a row's page, the best first; others: the first that
    # there is.
    verdicts: tuple[str, ...] = ()
    # (questions, predictions, file): writes the leaderboard's format; None: the benchmark has none.
    write_submission: Callable[[Sequence[Question], Sequence[Prediction], Path], None] | None = None
    submission: str = "submission.json"  # the name of that file in a row's workdir
    # Whether a file of predictions holds the questions and answers as well, so that no other
    # references are needed.
    holds_references: Callable[[Path], bool] = lambda path: False
    # Other names of splits -> the names that `mmqa prepare` gives them.
    split_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: Sequence[str] = ()  # suffixes of the tables among the prediction files
    ranks: bool = False  # whether it scores the sources that are found, and no answers
    # (corpus, questions, predictions) -> more tables of `mmqa evaluate`.
    analyze: Callable[[Corpus, Sequence[Question], Sequence[Prediction]], list[Table]] | None = None
    judged: bool = False  # whether `score` takes a third argument, what judges answers (bem.py)
    # Whether `mmqa prepare --raw` may be a file: that of one pool of candidates.
    takes_file: bool = False
    # Whether only their folder tells the files of questions, answers and captions apart.
    reads_folders_alone: bool = False
    boards: tuple[Board, ...] = ()  # tables of the best published systems


def open_benchmark(name: str) -> Benchmark:
    """A benchmark of `NAMES`; its file is imported when it is asked for."""
    return importlib.import_module(f"mmqa_jax.benchmarks.{name}").BENCHMARK


def scorer_of(
    dataset: str, bem: str = "", flag: str = "--bem"
) -> Callable[[Sequence[Question], Sequence[Prediction]], Evaluation]:
    """Returns the function that scores a benchmark's predictions.

    Args:
      bem: folder or ORG/NAME of BEM, for a benchmark whose answers it judges (`check_judged`); "":
        without it.
      flag: that named it, for messages.
    """
    benchmark = open_benchmark(dataset)
    if not bem:
        return benchmark.score
    from mmqa_jax.evaluation.bem import open_bem

    return functools.partial(benchmark.score, judge=open_bem(bem, flag))


def check_judged(dataset: str, flag: str) -> None:
    """UserError if no answers of a data set are judged by BEM."""
    judged = [name for name in NAMES if open_benchmark(name).judged]
    if dataset not in judged:
        raise UserError(
            f"{flag}: BEM judges answers of {', '.join(judged)}; leave it out for {dataset}."
        )


def split_of(dataset: str, split: str | None) -> str:
    """The split that a name stands for; None: the benchmark's own default."""
    benchmark = open_benchmark(dataset)
    return benchmark.split if split is None else benchmark.split_names.get(split, split)


def read_questions(dataset: str, path: Path, split: str | None = None) -> list[Question]:
    """The questions of a benchmark's split; see `read_corpus` and `split_of`."""
    return split_questions(read_corpus(dataset, path), path, split_of(dataset, split))


def read_corpus(dataset: str, path: Path) -> Corpus:
    """A benchmark's questions, and the sources that it has.

    `path`: a folder of `mmqa prepare`, the official files' folder, or one official file; of a
    benchmark of retrieval also a folder of folders of `mmqa prepare`, all of them together.
    """
    benchmark = open_benchmark(dataset)
    if benchmark.ranks and (prepared := sorted(path.glob(f"*/{MANIFEST}"))):
        parts = [read_corpus(dataset, manifest.parent) for manifest in prepared]
        sources = [source for part in parts for source in part.sources]
        questions = [question for part in parts for question in part.questions()]
        return Corpus(sources, questions, materials=united(*(part.materials for part in parts)))
    if (path / MANIFEST).is_file():
        corpus = open_corpus(path)
        name = corpus.manifest.get("name", "a corpus without a name")
        if name != dataset:
            known = name if name in (*NAMES, "webqa", "atlas") else "corpus"
            raise UserError(
                f"--references={path}: was prepared from {name}; evaluate {known} instead of "
                f"{dataset}, or give the references of {dataset}."
            )
        return corpus
    if benchmark.reads_folders_alone and path.is_file():
        raise UserError(
            f"--references={path}: is one file, and {dataset} is read from the folder of its "
            f"official files; give --references={path.parent}."
        )
    official = benchmark.read(path)
    return Corpus(official.sources, official.questions, materials=benchmark.materials)


def read_predictions(dataset: str, path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """A benchmark's predictions; UserError where the file holds none, or none can be in it."""
    benchmark = open_benchmark(dataset)
    suffix = path.suffix.lower()
    if suffix in _NO_JSON and suffix not in benchmark.tables:
        raise UserError(
            f"{path}: predictions of {dataset} are not read from {suffix} files; give "
            f"{benchmark.formats}."
        )
    predictions = benchmark.read_predictions(path, questions)
    if not predictions:
        raise UserError(
            f"{path}: holds no predictions; give {benchmark.formats}, with a prediction per "
            "question."
        )
    return predictions
