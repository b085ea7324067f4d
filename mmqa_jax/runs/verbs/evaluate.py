"""`mmqa evaluate`: scores predictions or rankings against references, each of any format."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.benchmarks import NAMES, benchmark
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out, write_json
from mmqa_jax.data.corpus import Corpus, open_corpus, open_sources, split_questions
from mmqa_jax.data.formats.webqa import has_keywords, read_release, submission_rows
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation import retrieval, webqa
from mmqa_jax.evaluation.compare import compare_scores, comparison_table
from mmqa_jax.evaluation.scores import count_empty, predictions_by_question, read_answers
from mmqa_jax.evaluation.scoring import Evaluation, notes_of_counts, score_predictions
from mmqa_jax.evaluation.tables import Table, answer_table, show
from mmqa_jax.retrieval.rankings import (
    gold_of,
    holds_rankings,
    is_qrels,
    is_run,
    read_qrels,
    read_rankings,
)

# Benchmarks whose questions name the articles that answer them.
_WITH_ARTICLES = ("infoseek", "evqa")


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """The flags of `mmqa evaluate`, which its help explains."""

    dataset: str
    predictions: str
    references: str | None = None
    split: str | None = None
    only_given: bool = False
    lemmatizer: str | None = None
    bem: str = ""
    bart: str | None = None
    sources: str = ""
    submission: str | None = None
    against: str | None = None
    markdown: bool = False


def evaluate(options: EvaluateOptions) -> dict[str, Any]:
    """Scores predictions (answers and cited sources) or rankings; prints the tables."""
    if options.submission:
        check_out(Path(options.submission), flag="--submission")
    path = Path(options.predictions)
    is_benchmark = options.dataset in NAMES
    # A benchmark of retrieval reads rankings itself, also those of a folder or pattern.
    reads_rankings = is_benchmark and benchmark.open_benchmark(options.dataset).ranks
    is_ranked = not reads_rankings and (
        is_run(path) or (path.suffix == ".jsonl" and holds_rankings(path))
    )
    if is_ranked:
        for flag in ("submission", "against", "bem", "bart"):
            if getattr(options, flag):
                raise UserError(
                    f"--{flag}: {path} holds rankings; give a file with answers, as `mmqa answer` "
                    "writes it."
                )
        if options.dataset in _WITH_ARTICLES:
            return _evaluate_articles(options, path)
    if options.sources:
        raise UserError(
            f"--sources={options.sources}: tells the articles of ranked sources, for "
            f"{' and '.join(_WITH_ARTICLES)}; leave it out."
        )
    if options.bem:
        benchmark.check_judged(options.dataset, "--bem")
    if is_benchmark:
        return _evaluate_benchmark(options, path)
    webqa.check_installed(options.lemmatizer, "--lemmatizer")
    references = Path(options.references) if options.references else None
    if references is not None and is_qrels(references):
        if not is_ranked:
            raise UserError(
                f"--references={references}: qrels tell which sources are relevant, and {path} "
                "holds no rankings; give a file of `mmqa search`, or a run that ends in .trec."
            )
        return _evaluate_by_qrels(options, references, path)
    questions, corpus = read_references(references, path, options.split or "test")
    if is_ranked:
        return _evaluate_rankings(options, questions, corpus, path)
    return _evaluate_webqa(options, questions, corpus, path)


# Answers.


@dataclasses.dataclass(frozen=True)
class _Answers:
    """Predictions, and how they are scored."""

    title: str  # of the tables
    result: dict[str, Any]  # what --json prints first
    predictions: list[Prediction]
    read: Callable[[Path], list[Prediction]]  # file -> predictions
    # (predictions, their file) -> their scores.
    score: Callable[[list[Prediction], Path], Evaluation]
    has_reference: Callable[[Question], bool]  # whether a question's answer is published
    submit: Callable[[], None]  # writes the leaderboard's file
    counted: Sequence[Prediction]  # the predictions that are answers
    # What it prints besides where nothing is scored, since the answers are hidden.
    unscored: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    more_notes: Sequence[str] = ()  # of the evaluation, behind the others
    analyze: Callable[[], list[Table]] | None = None  # gives more tables


def _evaluate_answers(
    options: EvaluateOptions, path: Path, questions: Sequence[Question], answers: _Answers
) -> dict[str, Any]:
    """Scores answers; a submission is written when nothing is refused any more."""
    predictions, result = answers.predictions, answers.result
    missing = len(questions) - len(predictions_by_question(questions, predictions, path))
    notes = list(answers.notes)  # printed only after nothing can fail any more
    if missing:
        count = f"{missing:,} of {len(questions):,}"
        notes.insert(0, f"{count} questions have no prediction and count 0")
    result |= {"n": 0, "missing": missing, "empty": count_empty(answers.counted)}
    if options.submission:
        result["submission"] = options.submission
        if not any(map(answers.has_reference, questions)):
            answers.submit()
            notes += notes_of_counts(Evaluation(), answers.counted)
            notes.append(
                f"written {options.submission}; the answers of this split are hidden, nothing was "
                "scored"
            )
            _warn(notes)
            empty = {"notes": notes, "scores": {}, "by_category": {}}
            return {**result, **empty, **answers.unscored}
    evaluation = answers.score(predictions, path)
    tables = evaluation.tables(answers.title)
    against = {}
    if options.against:
        other_path = Path(options.against)
        others = answers.read(other_path)
        predictions_by_question(questions, others, other_path)
        other_scored = answers.score(others, other_path).scored
        against = {"against": compare_scores(evaluation.scored, other_scored)}
        title = f"{answers.title}, against {options.against}"
        tables.append(comparison_table(title, against["against"]))
    if options.submission:
        answers.submit()
    tables += answers.analyze() if answers.analyze else []
    notes += evaluation.notes + notes_of_counts(evaluation, answers.counted)
    notes += answers.more_notes
    _warn(notes)
    for table in tables:
        show(table, markdown=options.markdown)
    bart = {} if evaluation.bart is None else {"bart": evaluation.bart}
    return {**result, "notes": notes, **bart, **against, **evaluation.summary()}


def _evaluate_benchmark(options: EvaluateOptions, path: Path) -> dict[str, Any]:
    """Scores the answers of a benchmark as its file in benchmarks/ says."""
    dataset = options.dataset
    scoring = benchmark.open_benchmark(dataset)
    if not options.references and not scoring.holds_references(path):
        raise UserError(
            f"--references: is missing; name the folder of `mmqa prepare {dataset}`, or of its "
            "official files."
        )
    for flag in ("lemmatizer", "bart"):
        if getattr(options, flag):
            raise UserError(f"--{flag}: is part of WebQA's scores; leave it out for {dataset}.")
    if options.submission and scoring.write_submission is None:
        raise UserError(f"--submission: {dataset} has no leaderboard format; leave it out.")
    split = benchmark.split_of(dataset, options.split)
    references = Path(options.references or path)
    corpus = benchmark.read_corpus(dataset, references)
    questions = split_questions(corpus, references, split)
    predictions = benchmark.read_predictions(dataset, path, questions)
    if options.only_given:
        questions = _among(questions, predictions, path)
    score = benchmark.scorer_of(dataset, options.bem)

    answers = _Answers(
        title=f"{dataset}, {split}",
        result={"dataset": dataset, "split": split},
        predictions=predictions,
        read=lambda file: benchmark.read_predictions(dataset, file, questions),
        score=lambda predictions, _: score(questions, predictions),
        has_reference=scoring.has_reference,
        submit=lambda: scoring.write_submission(questions, predictions, Path(options.submission)),
        counted=[] if scoring.ranks else predictions,
        analyze=scoring.analyze and (lambda: scoring.analyze(corpus, questions, predictions)),
    )
    return _evaluate_answers(options, path, questions, answers)


def _evaluate_webqa(
    options: EvaluateOptions, questions: list[Question], corpus: Corpus | None, path: Path
) -> dict[str, Any]:
    """Scores answers as WebQA does, also to Atlas and to a corpus of one's own."""
    predictions = _read(path, corpus)
    if options.only_given:
        questions = _among(questions, predictions, path)
    notes, more_notes = [], []
    result: dict[str, Any] = {"dataset": options.dataset, "n": 0, "missing": 0, "empty": 0}
    if corpus is not None:
        unknown = webqa.unknown_sources(predictions, corpus)
        result["unknown_sources"] = len(unknown)
        if unknown:
            name, source = unknown[0]
            notes.append(
                f"{len(unknown):,} cited sources of {len({q for q, _ in unknown}):,} questions are "
                f"not in {options.references} (such as {source!r} of question {name}): they count "
                "as wrong"
            )
    if options.submission and corpus is None:
        raise UserError(
            "--submission: the references hold no sources to cite; give --references a folder of "
            "`mmqa prepare` or WebQA's own JSON."
        )
    rows = submission_rows(predictions, corpus) if options.submission else {}
    if options.dataset == "webqa" and not options.bart:
        more_notes = ["no fluency (webqa_fl): give --bart the folder of BARTScore's weights"]

    def score(predictions: list[Prediction], file: Path) -> Evaluation:
        return score_predictions(
            options.dataset,
            questions,
            predictions,
            lemmatizer=options.lemmatizer,
            bart=Path(options.bart) if options.bart and file is path else None,
            sources=not webqa.is_output_tsv(file),
        )

    subset = (options.split or "test") if options.references else path.name
    answers = _Answers(
        title=f"{options.dataset}, {subset}",
        result=result,
        predictions=predictions,
        read=lambda file: _read(file, corpus),
        score=score,
        has_reference=lambda question: bool(question.answers or has_keywords(question)),
        submit=lambda: write_json(options.submission, rows),
        counted=predictions,
        unscored={"by_modality": {}},
        notes=notes,
        more_notes=more_notes,
    )
    return _evaluate_answers(options, path, questions, answers)


def read_references(
    references: Path | None, predictions: Path, split: str
) -> tuple[list[Question], Corpus | None]:
    """The questions to score, in whatever format they come, and their corpus if it is known.

    The references are a folder of `mmqa prepare`, one of WebQA's own JSON files, or an output TSV,
    all lines of which are used. None: `predictions`, which must be an output TSV.
    """
    if references is None:
        if not webqa.is_output_tsv(predictions):
            raise UserError(
                f"--references: {predictions} holds predictions alone; give the folder of `mmqa "
                "prepare`, WebQA's own JSON or an official output TSV."
            )
        references = predictions
    if webqa.is_output_tsv(references):
        return webqa.read_output_tsv(references).questions, None
    if references.suffix == ".json" and references.is_file():
        release = read_release([references])
        corpus = Corpus(release.sources, release.questions)
    else:
        corpus = open_corpus(references)
    return split_questions(corpus, references, split), corpus


def _read(predictions: Path, corpus: Corpus | None) -> list[Prediction]:
    if predictions.suffix == ".jsonl":
        return read_answers(predictions, None if corpus is None else corpus.row)
    if webqa.is_output_tsv(predictions):
        return webqa.read_output_tsv(predictions).predictions
    return webqa.read_prediction_json(predictions, corpus)


# Rankings.


def _evaluate_rankings(
    options: EvaluateOptions, questions: list[Question], corpus: Corpus | None, path: Path
) -> dict[str, Any]:
    if options.only_given:
        questions = _among(questions, read_rankings(path), path)
    if corpus is None:
        raise UserError(
            f"--references: an output TSV has no gold sources to score {path} by; give a folder of "
            "`mmqa prepare` or WebQA's own JSON."
        )
    rankings = read_rankings(path, [question.id for question in questions], corpus.row)
    gold = [set(question.positives) for question in questions]
    overall = retrieval.score_rankings(gold, [ranking.sources for ranking in rankings])
    scored = retrieval.score_retrieval(corpus, questions, rankings)
    retrieval.show_retrieval(path.stem, scored, markdown=options.markdown)
    return {
        "dataset": options.dataset,
        "n": overall.n,
        "scores": overall.scores,
        "by_category": {},
        "by_modality": scored["by_modality"],
    }


def _evaluate_articles(options: EvaluateOptions, path: Path) -> dict[str, Any]:
    """Scores rankings of sources by the articles that they are of."""
    dataset = options.dataset
    if not options.references:
        raise UserError(f"--references: is missing; name the folder of `mmqa prepare {dataset}`.")
    split = benchmark.split_of(dataset, options.split)
    references = Path(options.references)
    questions = benchmark.read_questions(dataset, references, split)
    if options.only_given:
        questions = _among(questions, read_rankings(path), path)
    if not retrieval.know_articles(questions):
        raise UserError(
            f"--references={references}: the articles of these questions are not known; give "
            "files that tell them, infoseek_val_withkb.jsonl for infoseek."
        )
    corpus = open_sources(options.sources or references)
    rankings = read_rankings(path, [question.id for question in questions], corpus.row)
    scored = retrieval.score_articles(corpus.articles, questions, rankings)
    show(answer_table(f"{dataset}, {split}: articles", scored), markdown=options.markdown)
    about = {"dataset": dataset, "split": split, "n": scored.n}
    return {**about, "scores": scored.scores, "by_category": scored.by_category}


def _evaluate_by_qrels(options: EvaluateOptions, qrels: Path, path: Path) -> dict[str, Any]:
    """Scores rankings by the judgments of a file, which no corpus need be there for."""
    gold = {name: sources for name, sources in gold_of(read_qrels(qrels)).items() if sources}
    if not gold:
        raise UserError(f"{qrels}: judges no source relevant; give other qrels.")
    ranked = {ranking.question_id: ranking.sources for ranking in read_rankings(path)}
    if not gold.keys() & ranked.keys():
        raise UserError(
            f"{path}: ranks none of the {len(gold):,} questions that {qrels} has relevant sources "
            "for; name the run of the same questions."
        )
    missing, unjudged = len(gold.keys() - ranked.keys()), len(ranked.keys() - gold.keys())
    if options.only_given:
        gold = {name: sources for name, sources in gold.items() if name in ranked}
    elif missing:
        _warn([f"{missing:,} of {len(gold):,} questions have no ranking and count 0"])
    if unjudged:
        _warn([f"{unjudged:,} questions have no relevant source in {qrels} and are left out"])
    sources = [ranked.get(name, ()) for name in gold]
    scored = retrieval.score_rankings([*gold.values()], sources)
    retrieval.show_rankings(path.stem, scored, markdown=options.markdown)
    counts = {"n": scored.n, "missing": missing, "unjudged": unjudged}
    return {"dataset": options.dataset, **counts, "scores": scored.scores, "by_category": {}}


def _among(questions: Sequence[Question], rows: Sequence[Any], path: Path) -> list[Question]:
    """The questions that the file `path` answers or ranks; UserError if there are none."""
    ids = {row.question_id for row in rows}
    present = [question for question in questions if question.id in ids]
    if not present:
        raise UserError(
            f"--only_given: {path} holds none of the {len(questions)} questions of this split; "
            "name another file or --split."
        )
    return present


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)
