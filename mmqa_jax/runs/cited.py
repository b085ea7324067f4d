"""Conversations that teach a language model to cite, made of a prepared corpus.

A question with its gold sources among others becomes the prompt of `mmqa ask` (LLMReader), and its
answer with the numbers of the gold sources the message that is learned.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.formats.chats import Conversation
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.schema import Question, Ranking, is_answerable
from mmqa_jax.prompting.backends import Picture, Query
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from mmqa_jax.retrieval.rankings import read_rankings

_REFUSAL = "Not found."  # what the reader's prompt asks for where no source answers


@dataclasses.dataclass(frozen=True)
class CitedOptions:
    """How conversations are made."""

    # Files of `mmqa search`, one for each split; the gold sources stand where they were found,
    # those that were not take the places of the last ones. (): the sources are a question's own
    # gold and hard negative ones, in an order that is drawn.
    rankings: tuple[Path, ...] = ()
    top_k: int = at_least(1, 5)  # sources of a question
    # Sources and questions show them by `pixels`, or by their `captions`.
    pictures: Literal["captions", "pixels"] = "captions"
    seed: int = 0  # of the order that is drawn


class _AnyPrompt:
    """The part of a Backend that writing prompts needs. It takes every prompt: the task that trains
    on conversations leaves out those that are too long."""

    takes_messages = takes_pictures = True

    def check(self, query: Query) -> None:
        """See Backend."""


def prepare_cited(raw: Path, out: Path, options: CitedOptions, **written: Any) -> dict[str, Any]:
    """The conversations of the corpus in `raw` to ArrayRecord in `out`.

    The manifest's `origin` counts the questions that are left out, since no answer or no gold
    source is known.

    `written`: of corpus_records.write_records.
    """
    corpus = open_corpus(raw)
    rankings = _rankings(corpus, options.rankings)
    left_out: Counter[str] = Counter()
    questions = list(_conversations(corpus, rankings, options, left_out))
    if not questions:
        raise UserError(
            f"--raw={raw}: no question has an answer and gold sources; prepare a corpus whose "
            "questions have both."
        )
    return corpus_records.write_records(
        out,
        (),
        questions,
        corpus.read_picture,
        name=f"{corpus.manifest.get('name', raw.resolve().name)} cited",
        materials=tuple(corpus.materials),
        origin={"corpus": str(raw), "left_out": dict(left_out)},
        sourceless=True,
        **written,
    )


def _rankings(corpus: Corpus, files: Sequence[Path]) -> dict[str, Ranking] | None:
    if not files:
        return None
    lists = [read_rankings(file, source_ids=corpus.row) for file in files]
    return {ranking.question_id: ranking for rankings in lists for ranking in rankings}


def _conversations(
    corpus: Corpus,
    rankings: Mapping[str, Ranking] | None,
    options: CitedOptions,
    left_out: Counter[str],
) -> Iterator[Question]:
    reading = LLMReaderOptions(pictures=options.pictures, chat=True)
    model: Any = _AnyPrompt()
    reader = LLMReader(corpus, model, reading)
    for number, question in enumerate(corpus.questions()):
        refuses = not is_answerable(question)
        if not refuses and not (question.answers and question.positives):
            left_out["no answer" if not question.answers else "no gold source"] += 1
            continue
        ranking = None if rankings is None else rankings.get(question.id)
        if rankings is not None and ranking is None:
            left_out["no ranking"] += 1
            continue
        sources = _sources(question, ranking, options, number)
        if not sources:
            left_out["no source"] += 1
            continue
        chat = reader.prompt(question, Ranking(question.id, sources, (0.0,) * len(sources)))
        gold = [place for place, name in enumerate(sources, 1) if name in question.positives]
        text = _REFUSAL if refuses else _answer(question.answers[0], gold)
        content = [_part(corpus, part) for part in chat.messages[0].content]
        if not chat.messages[0].pictures:
            content = chat.messages[0].text
        messages = {"role": "user", "content": content}, {"role": "assistant", "content": text}
        yield Conversation(messages).as_question(question.id, question.split)


def _sources(
    question: Question, ranking: Ranking | None, options: CitedOptions, number: int
) -> tuple[str, ...]:
    """The sources of a question in the order of its prompt, gold ones always among them."""
    gold = list(question.positives[: options.top_k])
    if ranking is not None:
        best = list(ranking.sources[: options.top_k])
        missing = [name for name in gold if name not in best]
        others = [name for name in best if name not in gold]
        dropped = set(others[len(others) - max(len(best) + len(missing) - options.top_k, 0) :])
        return (*(name for name in best if name not in dropped), *missing)
    names = [*gold, *question.negatives][: options.top_k]
    order = np.random.default_rng((options.seed, number)).permutation(len(names))
    return tuple(names[place] for place in order)


def _answer(text: str, gold: Sequence[int]) -> str:
    """`It is cleaned weekly.` of the sources 1 and 3: `It is cleaned weekly [1][3].`"""
    return f"{text.strip().rstrip('.')} {''.join(f'[{number}]' for number in gold)}."


def _part(corpus: Corpus, part: str | Picture) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    row = corpus.row.get(part.name)  # a source's picture is named by its source
    name = part.name if row is None else corpus.sources[row].image
    return {"type": "image", "image": str(name)}
