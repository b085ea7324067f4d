"""The question-answering benchmarks: how each one's predictions are read, scored and submitted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.datasets.readers import READERS
from mmqa_jax.data.records import MANIFEST
from mmqa_jax.data.schema import Prediction, Question, united
from mmqa_jax.data.splits import split_questions
from mmqa_jax.data.table_files import SUFFIXES
from mmqa_jax.evaluation import (
    choice_formats,
    choice_scores,
    evqa,
    found_sources,
    infoseek,
    mathvista,
    mbeir,
    mmmu,
    mragbench,
    multimodalqa,
    vidore,
    vqa,
    vqa_formats,
)
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.evaluation.tables import Table


@dataclasses.dataclass(frozen=True)
class BenchmarkScoring:
    """How one benchmark is scored.

    Attributes:
      split: the split that is scored by default, one whose answers are public.
      formats: the prediction files that `read_predictions` knows, for messages.
      read_predictions: (file, questions) -> predictions; the questions are those to score, whose
        choices may be needed to read an answer.
      has_reference: whether a question's answer is published.
      score: (questions, predictions) -> the scores; predictions may be missing, and then count 0.
      write_submission: (questions, predictions, file): writes the leaderboard's format; None: the
        benchmark has none.
      submission: the name of that file in a row's workdir.
      holds_references: whether a file of predictions holds the questions and answers as well, so
        that no other references are needed.
      split_names: other names of splits -> the names that `mmqa prepare` gives them.
      tables: suffixes of the tables among the prediction files.
      ranks: whether it scores the sources that are found, and no answers.
      analyze: (corpus, questions, predictions) -> more tables of `mmqa evaluate`.
      judged: whether `score` takes a third argument, what judges answers (bem.py).
    """

    split: str
    formats: str
    read_predictions: Callable[[Path, Sequence[Question]], list[Prediction]]
    has_reference: Callable[[Question], bool]
    score: Callable[[Sequence[Question], Sequence[Prediction]], Evaluation]
    write_submission: Callable[[Sequence[Question], Sequence[Prediction], Path], None] | None = None
    submission: str = "submission.json"
    holds_references: Callable[[Path], bool] = lambda path: False
    split_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: Sequence[str] = ()
    ranks: bool = False
    analyze: Callable[[Corpus, Sequence[Question], Sequence[Prediction]], list[Table]] | None = None
    judged: bool = False


# Benchmarks whose questions, answers and captions are in files that only their folder tells apart.
_FOLDERS_ALONE = (
    *("vqav2", "okvqa", "multimodalqa", "infoseek", "evqa"),
    *("mmmu", "mragbench", "mathvista"),
)
# Files that no reader of JSON should be asked to read; VLMEvalKit writes its predictions as pickles
# too, which run code where they are loaded.
_NO_JSON = (".xlsx", ".xls", ".csv", ".tsv", ".parquet", ".pkl", ".pickle")
_OPEN_ANSWERS = BenchmarkScoring(
    split="test",
    formats="predictions.jsonl, or the official list of {question_id, answer} as JSON",
    read_predictions=vqa_formats.read_okvqa_predictions,
    has_reference=vqa.has_answers,
    score=vqa.score_okvqa,
    write_submission=vqa_formats.write_okvqa_submission,
)
BENCHMARKS: dict[str, BenchmarkScoring] = {
    "vqav2": dataclasses.replace(_OPEN_ANSWERS, split="val"),
    "okvqa": _OPEN_ANSWERS,
    "aokvqa": BenchmarkScoring(
        split="val",
        formats="predictions.jsonl, or the official {id: {direct_answer, multiple_choice}} as JSON",
        read_predictions=vqa_formats.read_aokvqa_predictions,
        has_reference=vqa.has_answers,
        score=vqa.score_aokvqa,
        write_submission=vqa_formats.write_aokvqa_submission,
    ),
    "scienceqa": BenchmarkScoring(
        split="test",
        formats='predictions.jsonl, {"results": {pid: index}} as JSON, or LLaVA\'s lines',
        read_predictions=choice_formats.read_scienceqa_predictions,
        has_reference=choice_scores.has_answer,
        score=choice_scores.score_scienceqa,
        write_submission=choice_formats.write_scienceqa_submission,
    ),
    "mmbench": BenchmarkScoring(
        split="val",
        formats=(
            "predictions.jsonl, a .xlsx, .tsv or .json with `index` and `prediction`, or LLaVA's "
            "lines"
        ),
        read_predictions=choice_formats.read_mmbench_predictions,
        has_reference=choice_scores.has_answer,
        score=choice_scores.score_mmbench,
        write_submission=choice_formats.write_mmbench_submission,
        submission="submission.xlsx",
        holds_references=choice_formats.holds_answers,
        split_names={"dev": "val"},
        tables=SUFFIXES,
    ),
    "seedbench": BenchmarkScoring(
        split="test",
        formats="predictions.jsonl, or lines of {question_id, prediction} as JSON",
        read_predictions=choice_formats.read_seed_bench_predictions,
        has_reference=choice_scores.has_answer,
        score=choice_scores.score_seed_bench,
        write_submission=choice_formats.write_seed_bench_submission,
        submission="submission.jsonl",
    ),
    "multimodalqa": BenchmarkScoring(
        split="val",
        formats="predictions.jsonl, or the official {qid: answer, or list of answers} as JSON",
        read_predictions=multimodalqa.read_multimodalqa_predictions,
        has_reference=multimodalqa.has_answer_list,
        score=multimodalqa.score_multimodalqa,
        write_submission=multimodalqa.write_multimodalqa_submission,
        split_names={"dev": "val"},
    ),
    "infoseek": BenchmarkScoring(
        split="val",
        formats='predictions.jsonl, or the official lines {"data_id", "prediction"}',
        read_predictions=infoseek.read_infoseek_predictions,
        has_reference=infoseek.has_typed_answer,
        score=infoseek.score_infoseek,
        write_submission=infoseek.write_infoseek_submission,
    ),
    "evqa": BenchmarkScoring(
        split="test",
        formats="predictions.jsonl",
        read_predictions=evqa.read_evqa_predictions,
        has_reference=evqa.has_answers,
        score=evqa.score_evqa,
        judged=True,
    ),
    "mbeir": BenchmarkScoring(
        split="test",
        formats=found_sources.FORMATS,
        read_predictions=mbeir.read_mbeir_runs,
        has_reference=found_sources.has_positives,
        score=mbeir.score_mbeir,
        write_submission=mbeir.write_mbeir_run,
        submission="mbeir_run.txt",
        ranks=True,
        analyze=mbeir.first_errors,
    ),
    "vidore": BenchmarkScoring(
        split="test",
        formats=found_sources.FORMATS,
        read_predictions=found_sources.read_found,
        has_reference=found_sources.has_positives,
        score=vidore.score_vidore,
        write_submission=vidore.write_vidore_results,
        ranks=True,
    ),
    "mmmu": BenchmarkScoring(
        split="val",
        formats='predictions.jsonl, {id: answer} as JSON, or a list of {"id", "response"}',
        read_predictions=mmmu.read_mmmu_predictions,
        has_reference=mmmu.has_answer,
        score=mmmu.score_mmmu,
        write_submission=mmmu.write_mmmu_submission,
        split_names={"dev": "train", "validation": "val"},
    ),
    "mragbench": BenchmarkScoring(
        split="test",
        formats='predictions.jsonl, or the official lines {"qs_id", "output"}',
        read_predictions=mragbench.read_mragbench_predictions,
        has_reference=choice_scores.has_answer,
        score=mragbench.score_mragbench,
        write_submission=mragbench.write_mragbench_submission,
        submission="submission.jsonl",
    ),
    "mathvista": BenchmarkScoring(
        split="val",
        formats="predictions.jsonl, or {pid: problem with `extraction` or `response`} as JSON",
        read_predictions=mathvista.read_mathvista_predictions,
        has_reference=mathvista.has_answer,
        score=mathvista.score_mathvista,
        write_submission=mathvista.write_mathvista_submission,
        split_names={"testmini": "val"},
    ),
}


def scorer_of(
    dataset: str, bem: str = "", flag: str = "--bem"
) -> Callable[[Sequence[Question], Sequence[Prediction]], Evaluation]:
    """What scores a benchmark's predictions.

    Args:
      bem: folder or ORG/NAME of BEM, for a benchmark whose answers it judges (`check_judged`); "":
        without it.
      flag: that named it, for messages.
    """
    scoring = BENCHMARKS[dataset]
    if not bem:
        return scoring.score
    from mmqa_jax.evaluation.bem import open_bem

    return functools.partial(scoring.score, judge=open_bem(bem, flag))


def check_judged(dataset: str, flag: str) -> None:
    """UserError if no answers of a data set are judged by BEM."""
    judged = [name for name, scoring in BENCHMARKS.items() if scoring.judged]
    if dataset not in judged:
        raise UserError(
            f"{flag}: BEM judges answers of {', '.join(judged)}; leave it out for {dataset}."
        )


def split_of(dataset: str, split: str | None) -> str:
    """The split that a name stands for; None: the benchmark's own default."""
    scoring = BENCHMARKS[dataset]
    return scoring.split if split is None else scoring.split_names.get(split, split)


def read_questions(dataset: str, path: Path, split: str | None = None) -> list[Question]:
    """The questions of a benchmark's split.

    Args:
      path: as of `read_corpus`.
      split: see `split_of`.
    """
    return split_questions(read_corpus(dataset, path), path, split_of(dataset, split))


def read_corpus(dataset: str, path: Path) -> Corpus:
    """A benchmark's questions, and the sources that it has.

    Args:
      path: a folder of `mmqa prepare`, the official files' folder, or one official file; of a
        benchmark of retrieval also a folder of folders of `mmqa prepare`, all of them together.
    """
    if BENCHMARKS[dataset].ranks and (prepared := sorted(path.glob(f"*/{MANIFEST}"))):
        parts = [read_corpus(dataset, one.parent) for one in prepared]
        sources = [source for part in parts for source in part.sources]
        questions = [question for part in parts for question in part.questions()]
        return Corpus(sources, questions, materials=united(*(part.materials for part in parts)))
    if (path / MANIFEST).is_file():
        corpus = open_corpus(path)
        name = corpus.manifest.get("name", "a corpus without a name")
        if name != dataset:
            own = name if name in (*READERS, "webqa", "atlas") else "corpus"
            raise UserError(
                f"--references={path}: was prepared from {name}; evaluate {own} instead of "
                f"{dataset}, or give the references of {dataset}."
            )
        return corpus
    if dataset in _FOLDERS_ALONE and path.is_file():
        raise UserError(
            f"--references={path}: is one file, and {dataset} is read from the folder of its "
            f"official files; give --references={path.parent}."
        )
    found = READERS[dataset].read(path)
    return Corpus(found.sources, found.questions, materials=READERS[dataset].materials)


def read_predictions(dataset: str, path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """A benchmark's predictions; UserError where the file holds none, or none can be in it."""
    scoring = BENCHMARKS[dataset]
    suffix = path.suffix.lower()
    if suffix in _NO_JSON and suffix not in scoring.tables:
        raise UserError(
            f"{path}: predictions of {dataset} are not read from {suffix} files; give "
            f"{scoring.formats}."
        )
    given = scoring.read_predictions(path, questions)
    if not given:
        raise UserError(
            f"{path}: holds no predictions; give {scoring.formats}, with a prediction per question."
        )
    return given
