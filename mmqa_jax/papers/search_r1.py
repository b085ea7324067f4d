"""Search-R1 (Jin et al., COLM 2025) and MMSearch-R1 (Wu et al., 2025): models that search by turns.

  retriever.search(questions, top_k) -> rankings of the queries that the model wrote
  llm.answer(queries)                -> its next turn: a thought and an action

Search-R1's turns are one message, which the model continues behind what the search engine returned;
its last turn may not search. MMSearch-R1 gets results as a user's message, with pictures, and may
search once by the question's picture. Originals: PeterGriffinJin/Search-R1 infer.py and
search_r1/llm_agent/generation.py; EvolvingLMMs-Lab/multimodal-search-r1
mmsearch_r1/workers/multimodal/rollout/vllm_rollout_spmd.py. Their web search is the row's retriever
here; MMSearch-R1's summaries of web pages are the sources themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from mmqa_jax.core.typed import Count
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.multiple_choice import tagged_answer
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting import search_loop
from mmqa_jax.prompting.backends import Backend, Chat, Completion, Decoding, Message, Picture, Query
from mmqa_jax.prompting.few_shot import MARK, load_template
from mmqa_jax.prompting.search_actions import (
    Action,
    Answer,
    Invalid,
    SearchByPicture,
    SearchTexts,
)
from mmqa_jax.prompting.search_loop import Budget, Episode
from mmqa_jax.retrieval.rankings import Retriever

ResultsBy = Literal["message", "user"]

# Search-R1


@dataclasses.dataclass(frozen=True)
class SearchR1Style:
    """Tags: `<think>`, `<search>`, `<information>`, `<answer>`.

    Attributes:
      results_by: what comes back continues the model's own `message`, as in the paper, or is one of
        the `user`, as conversations are that any chat model trains on (ours).
    """

    corpus: Corpus
    decoding: Decoding
    is_chat: bool
    results_by: ResultsBy = "message"

    def query(self, episode: Episode, query_id: Any) -> Query:
        """The prompt and all turns so far, which the model continues."""
        template = load_template("search_r1.question")
        asked = episode.question.question.strip()
        asked += "" if asked.endswith("?") else "?"
        prompt = template.render((), {"question": asked})
        if self.is_chat and self.results_by == "user":
            messages = [Message("user", (prompt,))]
            for turn in episode.turns:
                returned = self._returned(turn).strip()
                messages += [Message("assistant", (turn.text,)), Message("user", (returned,))]
            return Chat(query_id, tuple(messages), self.decoding)
        begun = "".join(turn.text + self._returned(turn) for turn in episode.turns)
        if not self.is_chat:
            return Completion(query_id, prompt + begun, self.decoding)
        return Chat(query_id, (Message("user", (prompt,)),), self.decoding, begun)

    def read(self, text: str, *, stopped: bool) -> tuple[str, Action]:
        """The first of `<search>` and `<answer>` that is whole; an empty query is no action."""
        if stopped and search_loop.first_tag(text, ("search", "answer")) is None:
            text += "</answer>" if text.rfind("<answer>") > text.rfind("<search>") else "</search>"
        match search_loop.first_tag(text, ("search", "answer")):
            case ("search", content):
                return text, SearchTexts(content) if content else Invalid()
            case ("answer", content):
                return text, Answer(content)
        return text, Invalid()

    def _returned(self, turn: search_loop.Turn) -> str:
        """Returns the text behind a turn: results, or that its action is none."""
        if turn.ranking is None:
            return load_template("search_r1.invalid").render((), {})
        template = load_template("search_r1.results")
        return template.render((), {"results": self._results(turn.ranking).strip()})

    def _results(self, ranking: Ranking) -> str:
        template = load_template("search_r1.results")
        sources = (self.corpus.sources[self.corpus.row[name]] for name in ranking.sources)
        return "".join(
            dataclasses.replace(template, query="").render(
                [{"number": str(number), "title": source.title, "text": source.text}], {}
            )
            for number, source in enumerate(sources, start=1)
        )


def answer_search_r1(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    retriever: Retriever,
    *,
    turns: Count = 5,
    top_k: Count = 3,
    max_new_tokens: Count = 500,
    temperature: float = 0.0,
    seed: Count = 0,
    results_by: ResultsBy = "message",
) -> list[Prediction]:
    """Search-R1: the model searches until it answers.

    Args:
      turns: that the model writes, the last one without a search (theirs: 4 searches and a turn).
      top_k: sources of a search.
      max_new_tokens: of a turn.
      temperature, seed: of the model's draws; 0: the likeliest tokens.
      results_by: see SearchR1Style; `user` for a model trained on `mmqa prepare searched`.
    """
    stop = ("</search>", "</answer>")
    decoding = Decoding(max_new_tokens, temperature=temperature, seed=seed, stop=stop)
    style = SearchR1Style(corpus, decoding, bool(llm.takes_messages), results_by)
    budget = Budget(turns=turns, text_searches=turns, top_k=top_k)
    episodes = search_loop.run_episodes(questions, style, llm, retriever, budget)
    return [episode.prediction() for episode in episodes]


# MMSearch-R1


@dataclasses.dataclass(frozen=True)
class MMSearchR1Style:
    """Turns as messages: `<reason>` with `<search><img></search>`, `<text_search>`, `<answer>`."""

    corpus: Corpus
    decoding: Decoding

    def query(self, episode: Episode, query_id: Any) -> Query:
        """The picture and the question, then each turn and what came back."""
        question = episode.question
        head = load_template("search_r1.picture").head
        first = (head, *self._picture(question), f" {question.question}")
        messages = [Message("user", first)]
        for turn in episode.turns:
            messages += [Message("assistant", (turn.text,)), self._returned(question, turn)]
        return Chat(query_id, tuple(messages), self.decoding)

    def read(self, text: str, *, stopped: bool) -> tuple[str, Action]:
        """A search at the end of the turn, or else the last `<answer>`, "" without one."""
        written = text.rstrip()
        if written.endswith("<search><img></search>"):
            return text, SearchByPicture()
        if written.endswith("</text_search>"):
            query = written.removesuffix("</text_search>").rpartition("<text_search>")[2].strip()
            return text, SearchTexts(query) if query else Answer("")
        return text, Answer(tagged_answer(text) or "")

    def _picture(self, question: Question) -> list[Picture]:
        data = self.corpus.question_picture(question)
        return [] if data is None else [Picture(data, question.image or "")]

    def _returned(self, question: Question, turn: search_loop.Turn) -> Message:
        """The sources of a search as a user's message, with their pictures where it was by one."""
        assert turn.ranking is not None
        by_picture = isinstance(turn.action, SearchByPicture)
        template = load_template(f"search_r1.{'after_picture' if by_picture else 'after_texts'}")
        head, _, tail = template.render((), {"question": question.question}).partition(MARK)
        parts: list[str | Picture] = [head]
        for number, name in enumerate(turn.ranking.sources, start=1):
            row = self.corpus.row[name]
            source, data = self.corpus.sources[row], self.corpus.picture(row)
            if by_picture:
                pixels = [] if data is None else [Picture(data, source.image or "")]
                parts += [
                    f"{number}. image: ",
                    *pixels,
                    f"\ntitle: {source.title or source.text}\n",
                ]
            else:
                parts.append(f"{number}. ({source.title or name}) {source.text}\n")
        return Message("user", (*parts, tail))


def answer_mmsearch_r1(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    retriever: Retriever,
    *,
    turns: Count = 3,
    text_searches: Count = 2,
    picture_searches: Count = 1,
    top_k: Count = 5,
    max_new_tokens: Count = 2048,
    temperature: float = 0.0,
    seed: Count = 0,
) -> list[Prediction]:
    """MMSearch-R1: a model that sees searches by the question's picture, by texts, or not at all.

    Args:
      turns: that the model writes, the last one without a search.
      text_searches, picture_searches: of a question at most; one without a picture has none of
        the latter.
      top_k, max_new_tokens, temperature, seed: see `answer_search_r1`.
    """
    search_loop.check_sees(llm, "mmsearch_r1")
    style = MMSearchR1Style(corpus, Decoding(max_new_tokens, temperature=temperature, seed=seed))
    budget = Budget(
        turns=turns, text_searches=text_searches, picture_searches=picture_searches, top_k=top_k
    )
    episodes = search_loop.run_episodes(questions, style, llm, retriever, budget)
    return [episode.prediction() for episode in episodes]


SETTINGS = {
    "search_r1": Setting(answer_search_r1),
    "mmsearch_r1": Setting(answer_mmsearch_r1),
}
