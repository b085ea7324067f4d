"""A reader of WebQA's interface that is any language model: it answers from numbered sources.

Sources stand in the prompt as [1] title: text, pictures as pixels for a model that sees and by
their captions for others. The model cites by [n], which is read back into the prediction's
sources; as in ALCE (Gao et al., EMNLP 2023) the numbers are the order of the prompt.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, Ranking, Source
from mmqa_jax.decoding.requests import Result, TooLong, Unanswerable
from mmqa_jax.prompting.backends import (
    Backend,
    Chat,
    Completion,
    Decoding,
    Message,
    Picture,
    Query,
)
from mmqa_jax.prompting.few_shot import pictures_of
from mmqa_jax.prompting.stream import answer_all
from mmqa_jax.prompting.templates import PromptTemplate, load_template

MARK = "\ufffc"  # the object replacement character marks where a picture goes
_CITED = re.compile(r"\s*\[(\d+(?:\s*[,;]\s*\d+)*)\]")
_LEAST_WORDS = 16  # that a source is cut to, at least
Pictures = Literal["auto", "pixels", "captions"]


@dataclasses.dataclass(frozen=True)
class LLMReaderOptions:
    """How a language model reads sources.

    Attributes:
      template: with the fields $number, $text and $picture of a source, $question and $picture of
        the question; see papers/templates/reader.toml.
      alone: the template where a question has no sources.
      chat: the prompt is a user's message to a chat model; False: a text that it continues.
      pictures: `pixels` shows them, `captions` says their titles and captions only; `auto` shows
        them to a model in this process that sees, and to no server, which does not say whether it
        sees.
      uncited: what an answer without any [n] cites: no source, or `all` that the model was shown.
      refuse_without_sources: answers NOT_FOUND without asking where a question has no sources, as
        after a threshold that none reached. Off where questions are asked without any on purpose.
      max_new_tokens: of an answer.
    """

    template: str = "reader.cite"
    alone: str = "reader.alone"
    chat: bool = True
    pictures: Pictures = "auto"
    uncited: Literal["none", "all"] = "none"
    refuse_without_sources: bool = False
    max_new_tokens: int = at_least(1, 64)


class Citations(NamedTuple):
    """What an answer cites.

    Attributes:
      text: the answer without its markers.
      numbers: of the sources that it names, from 1, in the order in which it names them first.
      wrong: markers that name no source.
    """

    text: str
    numbers: tuple[int, ...]
    wrong: int


def read_citations(text: str, sources: int) -> Citations:
    """Reads `[1]`, `[1][2]` and `[1, 2]` out of an answer to that many sources."""
    named = [int(n) for found in _CITED.findall(text) for n in re.findall(r"\d+", found)]
    right = dict.fromkeys(n for n in named if 1 <= n <= sources)
    wrong = sum(not 1 <= n <= sources for n in named)
    return Citations(_CITED.sub("", text).strip(), tuple(right), wrong)


def says_not_found(text: str) -> bool:
    """Whether an answer says in the words of the prompt that no source answers the question."""
    return bool(re.match(r"\W*not found\b", text, re.IGNORECASE))


class _Prompt(NamedTuple):
    """What is asked about one question; `query` is None where nothing fits the model."""

    query: Query | None
    text: str
    shown: int  # sources in it, the first ones
    trace: dict[str, Any]


class LLMReader:
    """Answers questions from sources by a language model.

    Args:
      corpus: of the sources and of the questions' pictures.
      llm: any backend.
    """

    def __init__(self, corpus: Corpus, llm: Backend, options: LLMReaderOptions | None = None):
        self._corpus, self._llm = corpus, llm
        self.options = options or LLMReaderOptions()
        self._template = load_template(self.options.template)
        self._alone = load_template(self.options.alone)
        self._sees = shows_pixels(llm, self.options.pictures)

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """One Prediction per question.

        Args:
          cited: the sources that each question is answered from, best first.

        Returns:
          `sources` are those that the answer names, `read` all that the model was shown; the trace
          has the prompt, the output and what was dropped. Where no source answers, the answer is
          NOT_FOUND; where the model gave none, it is empty.
        """
        asked = [
            None if self.options.refuse_without_sources and not ranking.sources else prompt
            for ranking, prompt in zip(cited, map(self._prompt, questions, cited), strict=True)
        ]
        queries = [one.query for one in asked if one is not None and one.query is not None]
        answers = answer_all(self._llm, queries, "Reading")
        return [
            Prediction(question.id, NOT_FOUND, trace={"refused": "no source"})
            if prompt is None
            else self._read(
                question, ranking, prompt, answers.by_id.get(question.id),
                answers.failed.get(question.id),
            )
            for question, ranking, prompt in zip(questions, cited, asked, strict=True)
        ]  # fmt: skip

    def _read(
        self,
        question: Question,
        ranking: Ranking,
        prompt: _Prompt,
        result: Result | None,
        failed: str | None,
    ) -> Prediction:
        read, trace = ranking.sources[: prompt.shown], dict(prompt.trace)
        trace["prompts"] = [prompt.text]
        if failed is not None:
            trace["failed"] = [failed]
        if result is None:
            return Prediction(question.id, read=read, trace=trace)
        said = (result.candidates[0].text or "").strip()
        trace["outputs"] = [{"text": said}]
        found = read_citations(said, prompt.shown)
        if prompt.shown and says_not_found(found.text):
            return Prediction(question.id, NOT_FOUND, read=read, trace=trace)
        if found.wrong:
            trace["wrong_citations"] = found.wrong
        numbers = found.numbers
        if prompt.shown and not numbers:
            trace["uncited"] = True
            if self.options.uncited == "all":
                numbers = tuple(range(1, prompt.shown + 1))
        return Prediction(
            question.id,
            found.text,
            tuple(read[n - 1] for n in numbers),
            tuple(ranking.scores[n - 1] for n in numbers),
            read=read,
            trace=trace,
        )

    def _prompt(self, question: Question, ranking: Ranking) -> _Prompt:
        """With as many of the sources as the model's context holds, the last ones dropped first."""
        trace: dict[str, Any] = {}
        own = pictures_of(self._corpus, question) if self._sees else ()
        if question.image and not own:
            trace["picture_not_shown"] = True
        texts, pictures = [], []
        for name in ranking.sources:
            row = self._corpus.row[name]
            texts.append(prompt_text(self._corpus.sources[row]))
            data = self._corpus.picture(row) if self._sees else None
            pictures.append(None if data is None else Picture(data, name))
        reason = ""
        for shown in range(len(texts), -1, -1):
            words = len(texts[0].split()) if shown == 1 else 0
            while True:
                cut = [" ".join(texts[0].split()[:words])] if shown == 1 else texts[:shown]
                text, parts = self._parts(question, cut, pictures[:shown], own)
                query = ask(question.id, parts, self._decoding(), chat=self.options.chat)
                try:
                    self._llm.check(query)
                except TooLong as error:
                    reason = str(error)
                    if words <= _LEAST_WORDS:
                        break
                    words = max(words // 2, _LEAST_WORDS)
                    trace["cut_to_words"] = words
                except Unanswerable as error:
                    return _Prompt(None, text, 0, {**trace, "failed": [str(error)]})
                else:
                    if shown < len(texts):
                        trace["dropped_sources"] = len(texts) - shown
                    return _Prompt(query, text, shown, trace)
            trace.pop("cut_to_words", None)
        return _Prompt(None, "", 0, {**trace, "too_long": [reason]})

    def _decoding(self) -> Decoding:
        # A base model goes on with another question; a chat model ends its message itself.
        stop = () if self.options.chat else ("\n\n", "\nQuestion:")
        return Decoding(max_new_tokens=self.options.max_new_tokens, stop=stop)

    def _parts(
        self,
        question: Question,
        texts: Sequence[str],
        pictures: Sequence[Picture | None],
        own: Sequence[Picture],
    ) -> tuple[str, list[str | Picture]]:
        """The prompt as text, and with its pictures."""
        marks = ["" if picture is None else f" {MARK}" for picture in pictures]
        solved = [
            {"number": str(number), "text": text, "picture": mark}
            for number, (text, mark) in enumerate(zip(texts, marks, strict=True), start=1)
        ]
        asked = {"question": question.question, "picture": f" {MARK}" if own else ""}
        template: PromptTemplate = self._template if texts else self._alone
        text = template.render(solved, asked).strip("\n")
        shown = [*(picture for picture in pictures if picture is not None), *own]
        return text.replace(MARK, "<picture>"), with_pictures(text, shown)


def prompt_text(source: Source) -> str:
    """A source as prompts quote it: its title, then its text or caption."""
    return ": ".join(filter(None, (source.title, source.text))).replace(MARK, " ")


def shows_pixels(llm: Backend, pictures: Pictures) -> bool:
    """Whether prompts show pictures; see LLMReaderOptions."""
    return pictures == "pixels" or (pictures == "auto" and llm.takes_pictures is True)


def with_pictures(text: str, pictures: Sequence[Picture]) -> list[str | Picture]:
    """Texts and pictures in order: a picture for each mark in the text."""
    first, *rest = text.split(MARK)
    parts: list[str | Picture] = [first]
    for picture, part in zip(pictures, rest, strict=True):
        parts += [picture, part]
    return [part for part in parts if part != ""]


def ask(name: Any, parts: Sequence[str | Picture], decoding: Decoding, *, chat: bool) -> Query:
    """The query of a prompt: a user's message, or a text with `<image>` where pictures go."""
    if chat:
        return Chat(name, (Message("user", tuple(parts)),), decoding)
    text = "".join(part if isinstance(part, str) else "<image>" for part in parts)
    pictures = tuple(part for part in parts if isinstance(part, Picture))
    return Completion(name, text, decoding, pictures)
