"""Conversations that teach a language model to search, made of a prepared corpus.

A question's searches are made by BM25 as Search-R1's loop makes them (papers/search_r1.py): first
with the question, then with the title of the gold source that was found and what of the question it
leaves open. A question whose gold sources are all read ends in its answer; others are left out.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.data.formats.chats import MESSAGES, Conversation
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.schema import Question, source_text
from mmqa_jax.data.text_analysis import Analyzer
from mmqa_jax.papers.search_r1 import SearchR1Style
from mmqa_jax.prompting.backends import Chat, Decoding
from mmqa_jax.prompting.search_actions import SearchTexts
from mmqa_jax.prompting.search_loop import Episode, Turn
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever

_WORDS = Analyzer()


@dataclasses.dataclass(frozen=True)
class SearchedOptions:
    """How conversations are made."""

    top_k: int = at_least(1, 3)  # sources of a search
    searches: int = at_least(1, 2)  # that a question may need
    # Of each split as many conversations with each number of searches, evenly over it; or else what
    # is rare is hardly learned.
    balanced: bool = False


def prepare_searched(
    raw: Path, out: Path, options: SearchedOptions, **written: Any
) -> dict[str, Any]:
    """The conversations of the corpus in `raw` to ArrayRecord in `out`.

    The manifest's `origin` counts the questions that are left out.

    `written`: of corpus_records.write_records.
    """
    corpus = open_corpus(raw)
    left_out: Counter[str] = Counter()
    questions = list(_conversations(corpus, options, left_out))
    if options.balanced:
        questions = _balanced(questions)
    if not questions:
        raise UserError(
            f"--raw={raw}: no question has an answer and gold snippets that BM25 finds; prepare a "
            "corpus whose questions have both, or give a larger --top_k."
        )
    return corpus_records.write_records(
        out,
        (),
        questions,
        corpus.read_picture,
        name=f"{corpus.manifest.get('name', raw.resolve().name)} searched",
        materials=tuple(corpus.materials),
        origin={"corpus": str(raw), "left_out": dict(left_out)},
        sourceless=True,
        **written,
    )


def _conversations(
    corpus: Corpus, options: SearchedOptions, left_out: Counter[str]
) -> Iterator[Question]:
    style = SearchR1Style(corpus, Decoding(), True, results_by="user")
    questions = []
    for question in corpus.questions():
        if reason := _unusable(corpus, question):
            left_out[reason] += 1
        else:
            questions.append(question)
    episodes = [Episode(question) for question in questions]
    _search(corpus, episodes, options)
    for episode in episodes:
        question = episode.question
        if not set(question.positives) <= episode.read.keys():
            left_out["gold source not found"] += 1
            continue
        chat = style.query(episode, question.id)
        assert isinstance(chat, Chat)
        messages = [{"role": m.role, "content": m.text} for m in chat.messages]
        thought = f"<think>Doc {_place(episode)} says it.</think>"
        last = f"{thought}\n<answer> {question.answers[0]} </answer>"
        messages.append({"role": "assistant", "content": last})
        yield Conversation(tuple(messages)).as_question(question.id, question.split)


def _balanced(questions: Sequence[Question]) -> list[Question]:
    """As many conversations of each length in a split, in the order of the questions."""
    groups: defaultdict[str, defaultdict[int, list[Question]]]
    groups = defaultdict(lambda: defaultdict(list))
    for question in questions:
        groups[question.split][len(question.extra[MESSAGES])].append(question)
    chosen = {
        question.id
        for by_length in groups.values()
        for group in by_length.values()
        for question in evenly(group, min(map(len, by_length.values())))
    }
    return [question for question in questions if question.id in chosen]


def _unusable(corpus: Corpus, question: Question) -> str:
    if not question.answers:
        return "no answer"
    if not question.positives:
        return "no gold source"
    pictured = (corpus.sources[corpus.row[name]].image for name in question.positives)
    return "a gold source is a picture" if any(pictured) else ""


def _search(corpus: Corpus, episodes: Sequence[Episode], options: SearchedOptions) -> None:
    """Adds the searches to the episodes, all that need another one at once."""
    if not episodes:
        return
    retriever = BM25Retriever(corpus)
    for number in range(options.searches):
        asking = [e for e in episodes if not set(e.question.positives) <= e.read.keys()]
        actions = [_query(corpus, episode) for episode in asking]
        asked = [
            Question(episode.question.id, "", query)
            for episode, (query, _) in zip(asking, actions, strict=True)
        ]
        if not asked:
            return
        rankings = retriever.search(asked, options.top_k)
        for episode, (query, thought), ranking in zip(asking, actions, rankings, strict=True):
            text = f"<think>{thought}</think>\n<search> {query} </search>"
            if len(episode.turns) == number:
                episode.turns.append(Turn(text, SearchTexts(query), ranking))


def _query(corpus: Corpus, episode: Episode) -> tuple[str, str]:
    """Returns the next query, and the thought before it."""
    question = episode.question
    gold = next((name for name in episode.read if name in question.positives), None)
    if gold is None:
        return question.question, "I search for the question."
    known = set(_WORDS.words(source_text(corpus.sources[corpus.row[gold]])))
    words = [w for w in question.question.split() if not set(_WORDS.words(w)) & known]
    title = _title(corpus, gold)
    return f"{title} {' '.join(words)}".strip(), f"It is {title}."


def _place(episode: Episode) -> int:
    """The number, among the last results, of the gold source that only they have."""
    ranking = episode.turns[-1].ranking
    assert ranking is not None
    before = dataclasses.replace(episode, turns=episode.turns[:-1]).read
    wanted = [name for name in episode.question.positives if name not in before]
    return 1 + max(map(ranking.sources.index, wanted))


def _title(corpus: Corpus, name: str) -> str:
    source = corpus.sources[corpus.row[name]]
    return source.title or source.text[:40]
