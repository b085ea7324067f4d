"""A reranker that is any language model which is scored: P(yes) that a source helps to answer.

The source follows the question in the prompt, so that all sources of a question share their
beginning, which the engine computes once (decoding/prefix_cache.py); sources recur far less often
over the questions of a benchmark than a question does over its own sources.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from mmqa_jax.core.errors import check_questions
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.decoding.requests import Scores, Unanswerable
from mmqa_jax.prompting.backends import Backend, Choices
from mmqa_jax.prompting.backends.stream import answer_all
from mmqa_jax.prompting.few_shot import pictures_of
from mmqa_jax.prompting.source_prompts import (
    MARK,
    MARKED,
    Pictures,
    as_prompt,
    is_chat,
    mark_of,
    prompt_text,
    shows_pictures,
    source_picture,
)
from mmqa_jax.prompting.templates import load_template


@dataclasses.dataclass(frozen=True)
class LLMRerankerOptions:
    """How a language model judges sources.

    Attributes:
      template: with the fields $question, $picture, $text and $source_picture.
      chat: as LLMReaderOptions.
      pictures: as LLMReaderOptions.
      calibrated: less what the model says of an empty source, a model's liking for yes or no
        (Zhao et al. 2021).
    """

    template: str = "reader.relevance"
    chat: bool | None = None
    pictures: Pictures = "auto"
    calibrated: bool = False

    def __post_init__(self) -> None:
        load_template(self.template)  # UserError for an unknown one


class LLMReranker:
    """Scores each question's candidates by a language model.

    Args:
      corpus: of the sources and of the questions' pictures.
      llm: a backend that scores continuations.

    Attributes:
      unscored: question id -> its sources, so far, that got no score and count as 0.
    """

    def __init__(self, corpus: Corpus, llm: Backend, options: LLMRerankerOptions | None = None):
        self._corpus, self._llm = corpus, llm
        self.options = options or LLMRerankerOptions()
        self._template = load_template(self.options.template)
        self._shows_pictures = shows_pictures(llm, self.options.pictures)
        self._is_chat = is_chat(llm, self.options.chat)
        self.unscored: Counter[str] = Counter()

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """The candidates by P(yes), in [0, 1], best first; of equal ones the earlier first."""
        check_questions(questions, "LLMReranker.score")
        queries: dict[tuple[str, str], Choices] = {}
        for question, ranking in zip(questions, candidates, strict=True):
            names = [*ranking.sources, *([""] if self.options.calibrated else [])]
            for name in names:
                query = self._query(question, name)
                try:
                    self._llm.check(query)
                except Unanswerable:  # too long among them
                    self.unscored[question.id] += bool(name)
                else:
                    queries[question.id, name] = query
        answers = answer_all(self._llm, list(queries.values()), "Judging")
        for question_id, name in answers.failed:
            self.unscored[question_id] += bool(name)
        log_odds = {pair: _log_odds(scores) for pair, scores in answers.by_id.items()}
        return [
            self._ranked(question, ranking, log_odds)
            for question, ranking in zip(questions, candidates, strict=True)
        ]

    def _ranked(
        self, question: Question, ranking: Ranking, log_odds: dict[tuple[str, str], float]
    ) -> Ranking:
        prior = log_odds.get((question.id, ""), 0.0)
        scores = {
            name: _logistic(log_odds[question.id, name] - prior)
            if (question.id, name) in log_odds
            else 0.0
            for name in ranking.sources
        }
        order = sorted(ranking.sources, key=lambda name: -scores[name])
        return Ranking(question.id, tuple(order), tuple(scores[name] for name in order))

    def _query(self, question: Question, name: str) -> Choices:
        """Makes the query for a source by its id; "" is an empty source."""
        own_pictures = pictures_of(self._corpus, question) if self._shows_pictures else ()
        text, picture = "(empty)", None
        if name:
            row = self._corpus.row[name]
            text = prompt_text(self._corpus.sources[row])
            picture = source_picture(self._corpus, row, self._shows_pictures)
        fields = {
            "question": question.question.replace(MARK, " "),
            "picture": MARKED if own_pictures else "",
            "text": text,
            "source_picture": mark_of(picture),
        }
        marked = self._template.render([], fields).strip("\n")
        shown = [*own_pictures, *([] if picture is None else [picture])]
        prompt, images = as_prompt(marked, shown, chat=self._is_chat)
        words = ("Yes", "No") if self._is_chat else (" yes", " no")
        return Choices((question.id, name), prompt, words, images)


def _log_odds(scores: Scores) -> float:
    """Log-probability of yes less that of no."""
    yes, no = scores.scores
    return yes.total - no.total


def _logistic(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
