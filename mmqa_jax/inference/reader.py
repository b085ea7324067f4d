"""Answering at inference: VLP's beam search with an appended [MASK] (WebQA section 5.2).

The reader's vocabulary is uncased and its text has spaces around all punctuation: `nairobi is the
capital of kenya .`. For display, what was copied gets back the spelling of the source it was
copied from. Metrics take the reader's own text.
"""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError, check_questions
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import ServedModel
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality, Prediction, Question, Ranking, category_modality
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.inference.batches import answer_inputs, coin_ids, vlp_inputs, warn_truncated
from mmqa_jax.models.vlp.network import VLP

_TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")  # BERT's words and punctuation marks
_OPENING, _CLOSING = set("([{$£€¿¡#"), set(",.;:!?%)]}…")
_JOINING = set("-/'’–@")  # no space on either side
_SENTENCE_ENDS = set(".!?:;•")


class _Word(NamedTuple):
    """A token of a source: its normalized form, its place, whether a sentence starts with it."""

    form: str
    start: int
    end: int
    first: bool


def as_written(raw: str, sources: Sequence[str], names: Sequence[str] = ()) -> str:
    """The answer with capital letters, accents, spaces and a final period.

    The longest runs of tokens that a source has too are copied from it, letter by letter. A
    capital letter that only starts a sentence there does not count as the word's spelling.

    Args:
      raw: tokens joined by spaces, as `WordPiece.decode` gives them.
      sources: texts that the answer may have copied from, in order of preference: cited sources,
        the question.
      names: texts in which every capital letter counts, such as titles.
    """
    tokens = raw.split()
    if not tokens:
        return ""
    texts = [(text, _words(text, starts=False)) for text in names]
    texts += [(text, _words(text)) for text in sources]
    spellings = _spellings(texts)
    written, position = "", 0
    quotes = 0
    while position < len(tokens):
        length, words = _longest_run(tokens, position, texts)
        for i, token in enumerate(tokens[position : position + max(length, 1)]):
            if 0 < i < length:  # the source's own space
                gap = " " if words[i - 1].end < words[i].start else ""
            else:
                gap = _gap(written, token, quotes)
            quotes += token == '"'
            written += gap + spellings.get(_form(token), token)
        position += max(length, 1)
    written = written[0].upper() + written[1:]
    return written if written[-1] in ".!?" else written + "."


def _form(text: str) -> str:
    """Lower case without accents, as the uncased tokenizer sees a word."""
    parts = unicodedata.normalize("NFD", text.lower())
    return "".join(letter for letter in parts if unicodedata.category(letter) != "Mn")


def _words(text: str, *, starts: bool = True) -> list[_Word]:
    words, first = [], starts
    for match in _TOKEN.finditer(text):
        words.append(_Word(_form(match[0]), match.start(), match.end(), first))
        # A quotation mark or bracket does not end the start of a sentence.
        if match[0] in _SENTENCE_ENDS or match[0].isalnum():
            first = starts and match[0] in _SENTENCE_ENDS
    # Two capitalized words at the start of a sentence are a name: New Delhi is ...
    return [
        word._replace(first=word.first and not text[after.start].isupper())
        for word, after in itertools.pairwise(words)
    ] + words[-1:]


def _spellings(texts: Iterable[tuple[str, list[_Word]]]) -> dict[str, str]:
    """Normalized word -> its most frequent spelling; words that start sentences count less."""
    counts: dict[str, Counter[tuple[bool, str]]] = {}
    for text, words in texts:
        for word in words:
            spelling = text[word.start : word.end]
            if word.first and spelling[1:] == spelling[1:].lower():
                spelling = spelling.lower()
            counts.setdefault(word.form, Counter())[not word.first, spelling] += 1
    return {
        form: max(count.items(), key=lambda item: (item[0][0], item[1]))[0][1]
        for form, count in counts.items()
    }


def _longest_run(
    tokens: Sequence[str], position: int, texts: Iterable[tuple[str, list[_Word]]]
) -> tuple[int, list[_Word]]:
    """Tokens from `position` on that follow each other in a text: how many, and its words."""
    best: tuple[int, list[_Word]] = (0, [])
    for _, words in texts:
        for i, word in enumerate(words):
            if word.form != _form(tokens[position]):
                continue
            pairs = zip(tokens[position:], words[i:], strict=False)
            length = next(
                (n for n, (token, other) in enumerate(pairs) if _form(token) != other.form),
                min(len(tokens) - position, len(words) - i),
            )
            if length > best[0]:
                best = length, words[i : i + length]
    return best


def _gap(before: str, token: str, quotes: int) -> str:
    """Returns the space before the next token, after so many quotation marks."""
    if not before:
        return ""
    last = before[-1]
    if token in _CLOSING or last in _OPENING or token in _JOINING or last in _JOINING:
        return ""
    if token == '"':
        return "" if quotes % 2 else " "
    if last == '"':
        return "" if quotes % 2 else " "
    number = len(before) > 1 and before[-2].isdigit() and token[0].isdigit()
    return "" if number and last in ",." else " "


class Reader(ServedModel):
    """Answers questions in words from cited sources (`task`: tasks.answer.Answer, of the run)."""

    def __init__(self, task: Any, corpus: Corpus, tokenizer: Tokenizer, model: VLP):
        self.corpus, self.tokenizer, self.options = corpus, tokenizer, task.inference
        # Of the sources it was trained on, if only one (VLP_I, VLP_T), else None.
        self.modality: Modality | None = task.data.modality
        self._by_category: bool = task.data.route_by_category
        self._packer = task.packer(tokenizer, inference=True)
        # The most pictures that it takes at once.
        self.max_pictures = self._packer.config.max_pictures
        self._reader = task.source_reader(corpus, tokenizer, on_demand=True)
        super().__init__(model, self.options.batch_size, task.cost())

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """Answers every question from its cited sources, or from the question alone if none.

        A picture that belongs to the question (`Question.image`) comes before the sources.
        Cited sources that the reader leaves out (see `readable`) stay cited.
        """
        check_questions(questions, "Reader.answer")
        answers: list[Prediction | None] = [None] * len(questions)
        for batch in self.answer_batches(questions, cited):
            for index, prediction in batch:
                answers[index] = prediction
        return answers

    def answer_batches(
        self, questions: Sequence[Question], cited: Sequence[Ranking]
    ) -> Iterator[list[tuple[int, Prediction]]]:
        """Yields (index of the question, its prediction) batch by batch."""
        warn_truncated(questions, self._packer)
        pictures = self._reader.pictures  # None: the model takes a detector's regions
        pixels = (
            [pictures.question_pixels(question) for question in questions]
            if pictures is not None
            else None
        )
        wanted = [self._wanted(question) for question in questions]
        readable = [self.readable(*pair) for pair in zip(questions, cited, strict=True)]
        placement, batch_size = self.serving.placement, self.serving.batch_size
        batches = answer_inputs(
            self._reader,
            self._packer,
            [question.question for question in questions],
            readable,
            batch_size=batch_size,
            question_pixels=pixels,
            about_pictures=[modality == "image" for modality in wanted],
            coin_ids=coin_ids(questions, self.options),
            serving=self.serving,
        )
        with Progress("Answering", len(questions), "questions") as progress:
            for batch in batches:
                result = placement.call(
                    beam_search,
                    self._graphdef,
                    self._state,
                    vlp_inputs(batch, placement),
                    mask_id=self.tokenizer.mask_id,
                    sep_id=self.tokenizer.sep_id,
                    num_beams=self.options.num_beams,
                    max_new_tokens=self.options.max_new_tokens,
                    token_type=self._packer.config.segments[1],
                    length_penalty=self.options.length_penalty,
                    no_repeat_ngram=self.options.no_repeat_ngram,
                    only_best=self.options.only_best,
                )
                tokens, scores = fetch((result.tokens, result.scores))
                real = np.flatnonzero(batch["weights"] > 0)
                indices = batch["index"][real].tolist()
                yield [
                    (i, self._prediction(cited[i], tokens[row], scores[row]))
                    for i, row in zip(indices, real, strict=True)
                ]
                progress.advance(len(real))
        self._reader.warn_missing()

    def readable(self, question: Question, cited: Ranking) -> list[int]:
        """Rows of the cited sources that VLP takes: see SourceReader.readable.

        Sources of a modality that the reader was not trained on, or that the question does not
        ask for, are left out.
        """
        rows = [self.corpus.row[name] for name in cited.sources]
        for modality in (self.modality, self._wanted(question)):
            rows = self._reader.readable(rows, self.max_pictures, modality)
        return rows

    def _wanted(self, question: Question) -> Modality | None:
        """The modality that the question is answered from; None: any."""
        return category_modality(question.category) if self._by_category else None

    def check_length(self, question: str) -> None:
        """Raises UserError if the question has more tokens than the model takes."""
        if excess := self._packer.excess(question):
            raise UserError(
                f"the question has {excess} tokens more than the "
                f"{self._packer.config.max_question_tokens} that the model takes; shorten it."
            )

    def _prediction(self, cited: Ranking, tokens: np.ndarray, scores: np.ndarray) -> Prediction:
        """tokens int[K, T], scores float[K], best first -> the answer with its beams."""
        if self.options.only_best:
            tokens, scores = tokens[:1], scores[:1]  # the others are not exact
        texts = [self.tokenizer.decode(_until_end(beam, self.tokenizer)) for beam in tokens]
        beams = tuple((text, float(score)) for text, score in zip(texts, scores, strict=True))
        sources = cited.sources  # VLP does not say which of those it read it answered from
        return Prediction(cited.question_id, texts[0], sources, cited.scores, beams, read=sources)


def _until_end(tokens: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Tokens before the first [SEP] or [PAD]."""
    before = []
    for token in tokens.tolist():
        if token in (tokenizer.sep_id, tokenizer.pad_id):
            break
        before.append(token)
    return before
