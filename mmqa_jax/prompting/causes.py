"""Citations by cause: which sources the sentences of a language model's answer rest on.

ContextCite (Cohen-Wang et al., NeurIPS 2024) asks what an answer's log-probability loses when a
source is taken away. Tried are all sources, or those that share most words with the answer
(`suspects`) and those that it names. A model that `hides` scores each sentence behind the prompt as
it was read, with each of them hidden in turn, so that what follows the last one that is tried, the
question and the answer, is read anew: what later sources have taken from a hidden one stays. Of
others, and where pictures are shown, prompts are read that lack a source.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmqa_jax.data.documents.chunks import sentence_ends
from mmqa_jax.data.schema import Prediction
from mmqa_jax.decoding.requests import Scores
from mmqa_jax.prompting.backends import Backend, Chat, Choices, Completion
from mmqa_jax.prompting.backends.cache import answer_all

SUPPORT = 0.5  # nats; not chosen on val yet: `python -m tests.bench citations` tries others
SENTENCES = "sentences"  # key of a trace: of each sentence `text`, `sources` and `losses`


Ask = Callable[[Sequence[int]], tuple[str, Chat | Completion]]


class Answered(NamedTuple):
    """An answer whose citations are to be found.

    Attributes:
      prediction: with all that the model `read`.
      scores: of each source that it read.
      ask: places of sources -> text and query of the prompt with these alone.
      texts: of the sources, as they are quoted.
      shots: the sources as they stand in the prompt; () where it has pictures.
    """

    prediction: Prediction
    scores: Sequence[float]
    ask: Ask
    texts: Sequence[str]
    shots: Sequence[str]


def cited_by_cause(
    llm: Backend, answered: Sequence[Answered], support: float, tried: int
) -> Iterator[Prediction]:
    """Predictions that cite what their sentences rest on; what could not be scored stays.

    The trace has SENTENCES, whose `sources` are numbers from 1, the one that is needed most first,
    () where none supports the sentence, and whose `losses` are nats, a source each, None of those
    that were not tried; and `unfounded`, the numbers of asked citations that support no sentence.

    Args:
      support: nats that a sentence loses without a source that it cites.
      tried: sources of an answer that are taken away, beside those that it names; 0: all.
    """
    hidden = [suspects(a.prediction, a.texts, tried) for a in answered]
    queries = {
        a.prediction.question_id: _queries(llm, a, places)
        for a, places in zip(answered, hidden, strict=True)
    }
    scores = answer_all(llm, list(itertools.chain(*queries.values())), "Citing").by_id
    for (prediction, of_sources, *_), places in zip(answered, hidden, strict=True):
        answers = [scores.get(query.id) for query in queries[prediction.question_id]]
        if all(isinstance(answer, Scores) for answer in answers):
            totals = [score.total for answer in answers for score in answer.scores]
            count = len(totals) // (1 + len(places))  # of sentences
            whole, *rest = (
                _of_sentences(totals[first : first + count])
                for first in range(0, len(totals), count)
            )
            yield _cited(
                prediction, of_sources, whole, dict(zip(places, rest, strict=True)), support
            )


def suspects(prediction: Prediction, texts: Sequence[str], most: int) -> list[int]:
    """Places of the sources that may be an answer's cause, in their order.

    They are the ones that it names, and the `most` that have most of its words, each by the share
    of the sources that lack it; of equal ones the first. `most` of 0 means all.
    """
    asked = set(_words(prediction.answer))
    has = [asked.intersection(_words(text)) for text in texts]
    count = Counter(word for words in has for word in words)
    weights = [sum(math.log(len(texts) / count[word]) for word in sorted(words)) for words in has]
    likely = sorted(range(len(texts)), key=lambda place: -weights[place])[: most or None]
    return sorted({*likely, *(prediction.read.index(name) for name in prediction.sources)})


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _queries(llm: Backend, answered: Answered, hidden: Sequence[int]) -> list[Choices]:
    """The queries that score the sentences with all sources, then without each that is hidden."""
    prediction, _, ask, _, shots = answered
    sentences = sentences_of(prediction.answer)
    # The longest first: those with which it begins have no branch of their own.
    texts = tuple(itertools.accumulate(sentences, lambda a, b: f"{a} {b}"))[::-1]
    every = range(len(prediction.read))
    name, (_, query) = prediction.question_id, ask(every)
    if llm.hides and shots:
        return [_scored((name, None), query, texts, tuple(shots[place] for place in hidden))]
    return [
        _scored((name, without), ask([place for place in every if place != without])[1], texts)
        for without in (None, *hidden)
    ]


def sentences_of(answer: str) -> list[str]:
    """The sentences of an answer, without the white space around them."""
    ends = itertools.pairwise([0, *sentence_ends(answer)])
    return [text for begin, end in ends if (text := answer[begin:end].strip())]


def _scored(
    key: tuple[str, int | None],
    query: Chat | Completion,
    texts: tuple[str, ...],
    hidden: tuple[str, ...] = (),
) -> Choices:
    if isinstance(query, Chat):
        return Choices(key, query.messages, texts, hidden=hidden)
    return Choices(key, query.prompt, tuple(f" {text}" for text in texts), query.images, hidden)


def _of_sentences(totals: Sequence[float]) -> list[float]:
    """The log-probability of each sentence behind those before it, by those of ever fewer ones."""
    return [after - before for before, after in itertools.pairwise([0.0, *totals[::-1]])]


def _cited(
    prediction: Prediction,
    of_sources: Sequence[float],
    whole: Sequence[float],
    rest: Mapping[int, Sequence[float]],
    support: float,
) -> Prediction:
    """The prediction with its causes.

    Args:
      whole: of each sentence its log-probability with all sources.
      rest: the same without the source in a place.
    """
    sentences = []
    for place, text in enumerate(sentences_of(prediction.answer)):
        losses = {number: whole[place] - without[place] for number, without in rest.items()}
        order = sorted(losses, key=lambda number: -losses[number])
        numbers = [number + 1 for number in order if losses[number] >= support]
        rounded = [
            round(losses[number], 3) if number in losses else None
            for number in range(len(prediction.read))
        ]
        sentences.append({"text": text, "sources": numbers, "losses": rounded})
    named = list(dict.fromkeys(n for sentence in sentences for n in sentence["sources"]))
    unfounded = [
        number
        for number, name in enumerate(prediction.read, start=1)
        if name in prediction.sources and number not in named
    ]
    return dataclasses.replace(
        prediction,
        sources=tuple(prediction.read[number - 1] for number in named),
        source_scores=tuple(of_sources[number - 1] for number in named),
        trace={**prediction.trace, SENTENCES: sentences, "unfounded": unfounded},
    )


def marked(sentences: Sequence[Mapping[str, Any]]) -> str:
    """An answer of SENTENCES with its numbers behind each sentence."""
    return " ".join(
        sentence["text"] + "".join(f" [{number}]" for number in sentence["sources"])
        for sentence in sentences
    )
