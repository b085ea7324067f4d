"""A model that searches by tools (ours): every action of search_actions.py as a function call.

The calls are JSON within `<tool_call>`, as chat models of Qwen's kind learn them of OpenAI's tools.
What comes back is a user's message, whose results are numbered throughout an episode, with their
pictures for a model that sees. A message without a call is the answer; `[n]` in it cites result n.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json
from mmqa_jax.core.typed import Count
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.backends import Backend, Chat, Decoding, Message, Picture
from mmqa_jax.prompting.search_actions import (
    TOOLS,
    Action,
    Answer,
    Invalid,
    OpenPage,
    SearchByPicture,
    SearchPictures,
    Zoom,
    called,
)
from mmqa_jax.prompting.search_loop import Budget, Episode, Turn, run_episodes
from mmqa_jax.retrieval.rankings import Retriever

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
STOP = (_CLOSE,)
_HEAD = (
    "Answer the question at the end. In each turn think first, then call one tool:\n"
    f'{_OPEN}\n{{"name": "search_texts", "arguments": {{"query": "..."}}}}\n{_CLOSE}\n'
    "Results have numbers, by which tools and answers name them. When you know the answer, call "
    "`answer` with a short text that cites the results that it is from, such as "
    '"Lima [2]".\n<tools>\n'
)


@dataclasses.dataclass(frozen=True)
class ToolStyle:
    """Function calls and their results.

    Attributes:
      budget: tools of which it has none are not offered.
      sees: whether results are shown with their pictures.
    """

    corpus: Corpus
    decoding: Decoding
    budget: Budget
    sees: bool
    cites = True

    @property
    def tools(self) -> list[type[Action]]:
        """The tools that the budget has, of pictures only for a model that sees."""
        pictured = (SearchPictures, SearchByPicture, Zoom)
        return [
            tool
            for tool in TOOLS.values()
            if not tool.budget
            or (getattr(self.budget, tool.budget) and (self.sees or tool not in pictured))
        ]

    def query(self, episode: Episode, query_id: Any) -> Chat:
        """The tools and the question, then each turn and what came back."""
        question = episode.question
        tools = "".join(json.dumps(tool.tool()) + "\n" for tool in self.tools)
        data = self.corpus.question_picture(question) if self.sees else None
        own = [] if data is None else ["Picture 0: ", Picture(data, question.image or ""), "\n"]
        head = f"{_HEAD}{tools}</tools>\n"
        messages = [Message("user", (head, *own, f"Question: {question.question}"))]
        numbers: dict[str, int] = {}
        for turn in episode.turns:
            messages.append(Message("assistant", (turn.text,)))
            messages.append(Message("user", tuple(self._returned(turn, numbers))))
        return Chat(query_id, tuple(messages), self.decoding)

    def read(self, text: str, *, stopped: bool) -> tuple[str, Action]:
        """The first call; without one all that is written is the answer."""
        if stopped and _OPEN in text and _CLOSE not in text:
            text += _CLOSE
        before, begun, rest = text.partition(_OPEN)
        if not begun:
            answer = before.rpartition("</think>")[2].strip()
            return text, Answer(answer) if answer else Invalid("nothing was written")
        inside, ended, _ = rest.partition(_CLOSE)
        if not ended:
            return text, Invalid(f"{_OPEN} does not end")
        try:
            call = parse_json(inside.strip(), "the call")
        except UserError:
            call = None
        if not isinstance(call, dict):
            return text, Invalid('the call is no JSON object {"name": ..., "arguments": {...}}')
        action = called(call.get("name"), call.get("arguments", {}))
        if isinstance(action, Invalid) or type(action) in self.tools:
            return text, action
        return text, Invalid(f"{action.kind} is not among the tools")

    def _returned(self, turn: Turn, numbers: dict[str, int]) -> list[str | Picture]:
        """What a turn gave back; `numbers` of results by source, to which new ones are added."""
        parts: list[str | Picture] = ["<tool_response>\n"]
        if turn.picture is not None:
            parts += [Picture(turn.picture, "a part of a picture"), "\n"]
        elif turn.ranking is None:
            assert isinstance(turn.action, Invalid)
            parts.append(f"Error: {turn.action.reason}.\n")
        elif not turn.ranking.sources:
            parts.append("Nothing was found.\n")
        for name in turn.ranking.sources if turn.ranking else ():
            is_new = name not in numbers
            number = numbers.setdefault(name, len(numbers) + 1)
            parts += self._result(name, number, is_new or isinstance(turn.action, OpenPage))
        return [*parts, "</tool_response>"]

    def _result(self, name: str, number: int, whole: bool) -> list[str | Picture]:
        """A result; of one that was shown before only its number and title."""
        row = self.corpus.row[name]
        source = self.corpus.sources[row]
        title = f"[{number}] {source.title}".strip()
        if not whole:
            return [f"{title} (as above)\n"]
        data = self.corpus.picture(row) if self.sees else None
        shown = [] if data is None else [Picture(data, source.image or ""), " "]
        return [f"{title}: ", *shown, f"{source.text}\n"]


def answer_tool_search(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    retriever: Retriever,
    *,
    turns: Count = 6,
    text_searches: Count = 4,
    picture_searches: Count = 2,
    pages: Count = 2,
    zooms: Count = 2,
    top_k: Count = 3,
    tokens: Count = 0,
    max_new_tokens: Count = 512,
    temperature: float = 0.0,
    seed: Count = 0,
) -> list[Prediction]:
    """Lets a chat model search by tools until it answers or gives up.

    Args:
      turns: that the model writes, the last one without a result.
      text_searches, picture_searches, pages, zooms: of a question at most; 0: the tool is not
        offered, nor are those of pictures to a model that reads texts alone.
      top_k: sources of a search.
      tokens: that all turns of a question may have; 0: as many as each one's max_new_tokens.
      max_new_tokens: of a turn.
      temperature, seed: of the model's draws; 0: the likeliest tokens.
    """
    if not llm.takes_messages:
        raise UserError(
            "setting tool_search: the model continues texts alone, and calls of tools are messages "
            "of a conversation; name a chat model as parts.llm.model, or use the setting search_r1."
        )
    decoding = Decoding(max_new_tokens, temperature=temperature, seed=seed, stop=STOP)
    budget = Budget(
        turns=turns,
        text_searches=text_searches,
        picture_searches=picture_searches,
        pages=pages,
        zooms=zooms,
        top_k=top_k,
        tokens=tokens,
    )
    style = ToolStyle(corpus, decoding, budget, llm.takes_pictures is not False)
    episodes = run_episodes(questions, style, llm, retriever, budget)
    return [episode.prediction() for episode in episodes]


SETTINGS = {"tool_search": Setting(answer_tool_search)}
