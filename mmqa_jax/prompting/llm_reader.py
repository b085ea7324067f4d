"""A reader of WebQA's interface that is any language model: it answers from numbered sources.

Sources stand in the prompt as [1] title: text, pictures as pixels for a model that sees and by
their captions for others. The model cites by [n], which is read back into the prediction's
sources; as in ALCE (Gao et al., EMNLP 2023) the numbers are the order of the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from mmqa_jax.core.errors import UserError, check_questions
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, Ranking, says_not_found
from mmqa_jax.decoding.requests import Scores, TooLong, Unanswerable
from mmqa_jax.evaluation.multiple_choice import LETTERS, vlmeval_choice
from mmqa_jax.prompting import backends, few_shot
from mmqa_jax.prompting.backends.cache import Answers, answer_all
from mmqa_jax.prompting.backends.thinking import read_answer, why_empty
from mmqa_jax.prompting.causes import SUPPORT, Answered, Ask, cited_by_cause
from mmqa_jax.prompting.citations import read_citations
from mmqa_jax.prompting.quotes import CONFIDENCE, quote_below

READER = "reader"  # key of this reader's traces: how many sources each question came with
_AT_FIRST = 16  # questions whose answers are scored together, before an engine says its slots
_LEAST_WORDS = 16  # that a source is cut to, at least


@dataclasses.dataclass(frozen=True)
class LLMReaderOptions:
    """How a language model reads sources.

    Attributes:
      template: with the fields $number, $text and $picture of a source, $question, $picture and
        $options of the question; see papers/templates/reader.toml.
      alone: the template where a question has no sources.
      options: the template of the options of a question that has some, with $letter and $choice;
        the answer names one, by letter or text (multiple_choice.vlmeval_choice).
      chat: the prompt is a user's message to a chat model; False: a text that it continues; None: a
        message where the model has a chat template.
      pictures: `pixels` shows them, `captions` says their titles and captions only; `auto` shows
        them to a model in this process that sees, and to no server, which does not say whether it
        sees.
      uncited: what an answer without any [n] cites: no source, or `all` that the model was shown.
      citations: what an answer cites: `asked` the sources that it names by [n], `cause` those
        without which its sentences are less likely (prompting/causes.py), whatever it names.
      support: of `cause`, nats that a sentence loses without a source that it cites.
      tried: of `cause`, sources of an answer that are hidden, and those that it names; 0: all.
      refuse_without_sources: answers NOT_FOUND without asking where a question has no sources, as
        after a threshold that none reached. Off where questions are asked without any on purpose.
      max_new_tokens: of an answer.
    """

    template: str = "reader.cite"
    alone: str = "reader.alone"
    options: str = "reader.options"
    chat: bool | None = None
    pictures: few_shot.Pictures = "auto"
    uncited: Literal["none", "all"] = "none"
    citations: Literal["asked", "cause"] = "asked"
    support: float = SUPPORT
    tried: int = at_least(0, 0)
    refuse_without_sources: bool = False
    max_new_tokens: int = at_least(1, 64)

    def __post_init__(self) -> None:
        for name in (self.template, self.alone, self.options):
            few_shot.load_template(name)  # UserError for an unknown one


class _Prompt(NamedTuple):
    """What is asked about one question.

    Attributes:
      query: None where nothing is asked: it does not fit the model, or is refused.
      text: of the prompt.
      sources: how many of the question's sources are in it, the first ones.
      trace: what was left out, and why.
      is_refused: there are no sources to answer from.
      ask: its text and query with those of its sources in these places alone.
      texts: of its sources, as they are quoted.
      shots: its sources as they stand in it; () where it has pictures.
    """

    query: backends.Query | None
    text: str
    sources: int
    trace: dict[str, Any]
    is_refused: bool = False
    ask: Ask | None = None
    texts: Sequence[str] = ()
    shots: tuple[str, ...] = ()


_Asked = tuple[Question, Ranking, _Prompt]


class LLMReader:
    """Answers questions by a language model, from the sources of a corpus and its questions'
    pictures."""

    def __init__(
        self, corpus: Corpus, llm: backends.Backend, options: LLMReaderOptions | None = None
    ):
        self._corpus, self._llm = corpus, llm
        self.options = options or LLMReaderOptions()
        self._template = few_shot.load_template(self.options.template)
        self._alone = few_shot.load_template(self.options.alone)
        self._options = few_shot.load_template(self.options.options)
        self._shows_pictures = few_shot.shows_pictures(llm, self.options.pictures)
        self._is_chat = few_shot.is_chat(llm, self.options.chat)
        is_server = llm.takes_pictures is None
        if self.options.citations == "cause" and self._is_chat and is_server:
            raise UserError(
                "citations=cause: a server does not tell how likely an answer to a message is; "
                "leave it out, or take a model of this process."
            )

    @property
    def quote_below(self) -> float:
        """The confidence below which a quote of its sources stands before its words."""
        return quote_below(self._llm.parameters)

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """Answers each question from its cited sources, best first: `sources` are those that the
        answer names, `read` all that the model was shown; the trace has the prompt, the output and
        what was dropped. Where no source answers, the answer is NOT_FOUND; where the model gave
        none, it is empty."""
        check_questions(questions, "LLMReader.answer")
        prompts = [
            self._prompt(question, ranking)
            for question, ranking in zip(questions, cited, strict=True)
        ]
        asked = list(zip(questions, cited, prompts, strict=True))
        if self.options.citations == "asked":
            return self._answered(asked)
        predictions: list[Prediction] = []
        while asked:
            # As many at a time as the engine has slots: it still holds their prompts.
            count = (self._llm.sizes() or {}).get("slots", _AT_FIRST)
            predictions += self._with_causes(asked[:count], self._answered(asked[:count]))
            asked = asked[count:]
        return predictions

    def _answered(self, asked: Sequence[_Asked]) -> list[Prediction]:
        queries = [prompt.query for _, _, prompt in asked if prompt.query is not None]
        answers = answer_all(self._llm, queries, "Reading", checked=True)
        return [self._read(*question, answers) for question in asked]

    def _with_causes(
        self, asked: Sequence[_Asked], predictions: Sequence[Prediction]
    ) -> list[Prediction]:
        answered = [
            Answered(
                prediction, ranking.scores[: prompt.sources], prompt.ask, prompt.texts, prompt.shots
            )
            for prediction, (_, ranking, prompt) in zip(predictions, asked, strict=True)
            if prompt.ask is not None and prediction.answer and "not_found" not in prediction.trace
        ]
        options = self.options
        by_cause = cited_by_cause(self._llm, answered, options.support, options.tried)
        by_id = {prediction.question_id: prediction for prediction in by_cause}
        return [by_id.get(prediction.question_id, prediction) for prediction in predictions]

    def prompt(self, question: Question, ranking: Ranking) -> backends.Query:
        """The query by which a question is asked from the sources of its ranking; UserError where
        it does not fit the model."""
        prompt = self._prompt(question, ranking)
        if prompt.query is None:
            raise UserError(f"question {question.id}: its prompt cannot be asked ({prompt.trace}).")
        return prompt.query

    def _read(
        self, question: Question, ranking: Ranking, prompt: _Prompt, answers: Answers
    ) -> Prediction:
        name, read = ranking.question_id, ranking.sources[: prompt.sources]
        trace = {READER: len(ranking.sources), **prompt.trace, "prompts": [prompt.text]}
        if prompt.is_refused:
            return Prediction(name, NOT_FOUND, trace=trace)
        if name in answers.failed:
            trace["failed"] = [answers.failed[name]]
        if name not in answers.by_id:
            return Prediction(name, read=read, trace=trace)
        candidate = answers.by_id[name].candidates[0]
        output = (candidate.text or "").strip()
        trace["outputs"] = [{"text": output}]
        answer = read_answer(candidate, trace)
        if candidate.tokens:  # of a server none are known
            trace[CONFIDENCE] = round(math.exp(candidate.total / len(candidate.tokens)), 4)
        if reason := why_empty(candidate):
            trace["incomplete"] = [reason]
        citations = read_citations(answer, prompt.sources)
        if prompt.sources and says_not_found(citations.text, cited=bool(citations.numbers)):
            trace["not_found"] = True
            return Prediction(name, NOT_FOUND, read=read, trace=trace)
        if citations.wrong:
            trace["wrong_citations"] = citations.wrong
        numbers = citations.numbers
        if prompt.sources and not numbers:
            trace["uncited"] = True
            if self.options.uncited == "all":
                numbers = tuple(range(1, prompt.sources + 1))
        return Prediction(
            name,
            citations.text,
            tuple(read[n - 1] for n in numbers),
            tuple(ranking.scores[n - 1] for n in numbers),
            choice=vlmeval_choice(citations.text, question.choices) if question.choices else None,
            read=read,
            trace=trace,
        )

    def _prompt(self, question: Question, ranking: Ranking) -> _Prompt:
        """Writes the prompt with as much of the sources as the model's context holds."""
        if self.options.refuse_without_sources and not ranking.sources:
            return _Prompt(None, "", 0, {"refused": "no source"}, is_refused=True)
        trace: dict[str, Any] = {}
        own_pictures = few_shot.pictures_of(self._corpus, question) if self._shows_pictures else ()
        if question.image and not own_pictures:
            trace["picture_not_shown"] = True
        rows = [self._corpus.row[name] for name in ranking.sources]
        texts = [few_shot.prompt_text(self._corpus.sources[row]) for row in rows]
        pictures = [
            few_shot.source_picture(self._corpus, row, self._shows_pictures) for row in rows
        ]
        reason = ""
        for quoted, left_out in shortened(texts):
            text, query = self._query(question, quoted, pictures[: len(quoted)], own_pictures)
            try:
                self._llm.check(query)
            except TooLong as error:
                reason = str(error)
            except Unanswerable as error:
                return _Prompt(None, text, 0, {**trace, "failed": [str(error)]})
            else:
                shown = pictures[: len(quoted)]
                ask = functools.partial(self._query, question, quoted, shown, own_pictures)
                shots = () if own_pictures or any(shown) else tuple(self._shots(quoted))
                return _Prompt(
                    query, text, len(quoted), trace | left_out, ask=ask, texts=quoted, shots=shots
                )
        return _Prompt(None, "", 0, {**trace, "too_long": [reason]})

    def _shots(self, texts: Sequence[str]) -> Iterator[str]:
        """Sources without pictures as they stand in a prompt."""
        alone = dataclasses.replace(self._template, head="", query="")
        for place, text in enumerate(texts):
            yield alone.render([_fields(place, text, None)], {})

    def _query(
        self,
        question: Question,
        texts: Sequence[str],
        pictures: Sequence[backends.Picture | None],
        own_pictures: Sequence[backends.Picture],
        which: Sequence[int] | None = None,
    ) -> tuple[str, backends.Chat | backends.Completion]:
        """The prompt's text, `<image>` where pictures are, and the query.

        Args:
          which: places of the sources that are in it, with the numbers that they have among all;
            None: all.
        """
        which = range(len(texts)) if which is None else which
        quoted = [_fields(place, texts[place], pictures[place]) for place in which]
        asked = {
            "question": question.question.replace(few_shot.MARK, " "),
            "picture": few_shot.MARKED if own_pictures else "",
            "options": self._listed(question),
        }
        template = self._template if texts else self._alone
        marked = template.render(quoted, asked).strip("\n")
        shown = [pictures[place] for place in which if pictures[place] is not None]
        attached = [*shown, *own_pictures]
        prompt, images = few_shot.as_prompt(marked, attached, chat=self._is_chat)
        most = self.options.max_new_tokens
        text = marked.replace(few_shot.MARK, few_shot.IMAGE)
        if self._is_chat:
            return text, backends.Chat(question.id, prompt, backends.Decoding(max_new_tokens=most))
        # A base model goes on with another question; a chat model ends its message itself.
        decoding = backends.Decoding(max_new_tokens=most, stop=("\n\n", "\nQuestion:"))
        return text, backends.Completion(question.id, prompt, decoding, images)

    def _listed(self, question: Question) -> str:
        """The options of a question, each with its letter; "" of one without."""
        if not question.choices:
            return ""
        options = zip(LETTERS, question.choices, strict=False)
        lettered = [{"letter": letter, "choice": choice} for letter, choice in options]
        return self._options.render(lettered, {}).rstrip("\n").replace(few_shot.MARK, " ")


def _fields(place: int, text: str, picture: backends.Picture | None) -> dict[str, str]:
    """Returns what a template's shot says of the source in a place."""
    return {"number": str(place + 1), "text": text, "picture": few_shot.mark_of(picture)}


def shortened(texts: Sequence[str]) -> Iterator[tuple[Sequence[str], dict[str, int]]]:
    """Yields ever less of the sources' texts, the last ones dropped first, the first one cut at the
    end, and what a trace says of what is left out. Never nothing of some sources: the model would
    answer by itself."""
    yield texts, {}
    dropped = {"dropped_sources": len(texts) - 1} if len(texts) > 1 else {}
    for count in range(len(texts) - 1, 0, -1):
        yield texts[:count], {"dropped_sources": len(texts) - count}
    words = texts[0].split() if texts else []
    while len(words) >= 2 * _LEAST_WORDS:
        words = words[: len(words) // 2]
        yield [" ".join(words)], {**dropped, "cut_to_words": len(words)}


# A reranker that is any language model which is scored: P(yes) that a source helps to answer.
#
# The source follows the question in the prompt, so that all sources of a question share their
# beginning, which the engine computes once (decoding/page_pool.py); sources recur far less
# often over the questions of a benchmark than a question does over its own sources.


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
    pictures: few_shot.Pictures = "auto"
    calibrated: bool = False

    def __post_init__(self) -> None:
        few_shot.load_template(self.template)  # UserError for an unknown one


class LLMReranker:
    """Scores each question's candidates by a language model. `unscored` counts, by question, its
    sources that got no score and count as 0."""

    def __init__(
        self, corpus: Corpus, llm: backends.Backend, options: LLMRerankerOptions | None = None
    ):
        self._corpus, self._llm = corpus, llm
        self.options = options or LLMRerankerOptions()
        self._template = few_shot.load_template(self.options.template)
        self._shows_pictures = few_shot.shows_pictures(llm, self.options.pictures)
        self._is_chat = few_shot.is_chat(llm, self.options.chat)
        self.unscored: Counter[str] = Counter()

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """The candidates by P(yes), in [0, 1], best first; of equal ones the earlier first."""
        check_questions(questions, "LLMReranker.score")
        prior = [""] if self.options.calibrated else []
        queries = [
            self._query(question, name)
            for question, ranking in zip(questions, candidates, strict=True)
            for name in (*ranking.sources, *prior)
        ]
        answers = answer_all(self._llm, queries, "Judging")
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

    def _query(self, question: Question, name: str) -> backends.Choices:
        """Makes the query for a source by its id; "" is an empty source."""
        own_pictures = few_shot.pictures_of(self._corpus, question) if self._shows_pictures else ()
        text, picture = "(empty)", None
        if name:
            row = self._corpus.row[name]
            text = few_shot.prompt_text(self._corpus.sources[row])
            picture = few_shot.source_picture(self._corpus, row, self._shows_pictures)
        fields = {
            "question": question.question.replace(few_shot.MARK, " "),
            "picture": few_shot.MARKED if own_pictures else "",
            "text": text,
            "source_picture": few_shot.mark_of(picture),
        }
        marked = self._template.render([], fields).strip("\n")
        attached = [*own_pictures, *([] if picture is None else [picture])]
        prompt, images = few_shot.as_prompt(marked, attached, chat=self._is_chat)
        words = ("Yes", "No") if self._is_chat else (" yes", " no")
        return backends.Choices((question.id, name), prompt, words, images)


def _log_odds(scores: Scores) -> float:
    """Log-probability of yes less that of no."""
    yes, no = scores.scores
    return yes.total - no.total


def _logistic(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
