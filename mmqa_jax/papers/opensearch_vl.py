"""OpenSearch-VL (Chen et al., 2026): a Qwen3-VL that crops, searches by pictures and by texts.

  picture, tools, question, turns so far -> its next turn: a thought and a call, or `<response>`

Original: shawn0728/OpenSearch-VL opensearch_vl/opensearch_infer (Apache 2.0), its pipeline.py,
tools.py and search.py. The prompt and the tools that it was trained with are read from a clone. Web
searches are the row's retriever here, and sources stand for summaries of pages; tools that change a
picture or read its text are told to be missing, and crops are of the question's picture alone.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json
from mmqa_jax.core.typed import Count
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting import search_loop
from mmqa_jax.prompting.backends import Backend, Chat, Decoding, Message, Picture
from mmqa_jax.prompting.search_actions import (
    Action,
    Answer,
    Crop,
    Invalid,
    SearchByPicture,
    SearchTexts,
)
from mmqa_jax.prompting.search_loop import Budget, Episode, Turn
from mmqa_jax.retrieval.rankings import Retriever

_OWN, _RULE = "img_1", "=" * 60
_RESPONSE = re.compile(r"<response>(.*?)(?:</response>|$)", re.DOTALL)
_BOXED = re.compile(r"boxed\{([^{}]*)\}")
_TEXTS = ("text_search", "web_search")
# Without the authors' files: any model is told of the same tools in few words.
_PROMPT = (
    "Think within <think></think>, then call one tool as <tool_call>\n"
    '{"name": ..., "arguments": {...}}\n</tool_call>. The picture is img_1. '
    "When you know the answer, write it within <response></response>."
)
_TOOLS = {
    "crop": ("image", "x", "y", "width", "height"),
    "image_search": ("url",),
    "text_search": ("q",),
}


def published_prompt(folder: str) -> tuple[str, str]:
    """The system's message, and the tools as the user's first one shows them.

    Args:
      folder: opensearch_vl/opensearch_infer of the authors' repository, whose prompts.py and
        tools.py are read, not run; "": our own words.
    """
    if not folder:
        return _PROMPT, json.dumps([{"name": n, "arguments": keys} for n, keys in _TOOLS.items()])
    try:
        prompt = _assigned(Path(folder) / "prompts.py", "SYSTEM_PROMPT")
        tools = _assigned(Path(folder) / "tools.py", "tools")
    except (OSError, SyntaxError, ValueError, LookupError) as error:
        raise UserError(
            f"option published={folder}: prompts.py with SYSTEM_PROMPT and tools.py with tools "
            f"were expected ({error!r:.80}); name the folder opensearch_vl/opensearch_infer of a "
            "clone of shawn0728/OpenSearch-VL."
        ) from error
    return str(prompt), json.dumps(tools, indent=2, ensure_ascii=False)


def _assigned(file: Path, name: str) -> Any:
    """The value that a Python file gives to a name; LookupError where it gives none."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


@dataclasses.dataclass(frozen=True)
class OpenSearchStyle:
    """Calls of tools as JSON within `<tool_call>`, results within `<observation>`."""

    corpus: Corpus
    decoding: Decoding
    published: str = ""

    @functools.cached_property
    def _prompts(self) -> tuple[str, str]:
        return published_prompt(self.published)

    def query(self, episode: Episode, query_id: Any) -> Chat:
        """The prompt, the picture, tools and question, then each turn and what came back."""
        system, tools = self._prompts
        question = episode.question
        asked = f"<tools>\n{tools}\n</tools>\n\n{question.question}"
        first = Message("user", (*self._picture(question), asked))
        messages, crops = [Message("system", (system,)), first], 1
        for turn in episode.turns:
            crops += turn.picture is not None
            returned = f"<observation>\n{self._returned(turn, crops)}\n</observation>"
            shown = [] if turn.picture is None else [Picture(turn.picture, f"img_{crops}")]
            messages.append(Message("assistant", (turn.text,)))
            messages.append(Message("user", (returned, *shown)))
        return Chat(query_id, tuple(messages), self.decoding)

    def read(self, text: str, *, stopped: bool) -> tuple[str, Action]:
        """The response, what is boxed in it where it has that; or else the first call."""
        if response := _RESPONSE.search(text):
            boxed = _BOXED.findall(response[1])
            return text, Answer((boxed[-1] if boxed else response[1]).strip())
        tagged = [part.partition("</tool_call>") for part in text.split("<tool_call>")[1:]]
        closed = [call.strip() for call, end, _ in tagged if end]
        calls = [call for call in closed if call[:1] == "{" and call[-1:] == "}"]
        if not calls:
            return text, Answer("")  # as theirs, which ends here
        try:
            named = parse_json(calls[0], "the call")
        except UserError:
            return text, Invalid("Invalid tool call payload")
        arguments = named.get("arguments", named.get("parameters"))
        return text, _action(named.get("name"), arguments if isinstance(arguments, dict) else {})

    def _picture(self, question: Question) -> list[Picture]:
        data = self.corpus.question_picture(question)
        return [] if data is None else [Picture(data, question.image or "")]

    def _returned(self, turn: Turn, crops: int) -> str:
        if turn.picture is not None:
            return f"Image cropped successfully. New image ID: img_{crops}."
        if turn.ranking is None:
            reason = turn.action.reason if isinstance(turn.action, Invalid) else "no result"
            return f"Tool execution error:\n{reason}"
        sources = [self.corpus.sources[self.corpus.row[name]] for name in turn.ranking.sources]
        if isinstance(turn.action, SearchByPicture):
            rows = [{"title": s.title or s.text, "source": s.id} for s in sources]
            return f"Tool execution result:\n{json.dumps(rows, indent=2, ensure_ascii=False)}"
        passages = [
            f"[Passage {number}]\nTitle: {source.title}\nURL: {source.id}\nSummary:\n{source.text}"
            for number, source in enumerate(sources, start=1)
        ]
        none = "No relevant web pages found for the query."
        return "Tool execution result:\n" + (f"\n\n{_RULE}\n\n".join(passages) or none)


def _action(name: Any, arguments: Mapping[str, Any]) -> Action:
    """The action of a call; Invalid, with a reason, where it is none."""
    if name in _TEXTS:
        query = str(arguments.get("q") or arguments.get("query") or "").strip()
        return SearchTexts(query) if query else Invalid("'q' is required for text_search.")
    picture = arguments.get("url" if name == "image_search" else "image")
    if name in ("image_search", "crop") and picture != _OWN:
        return Invalid(f"Image reference {picture!r:.40} not found. Available: ['{_OWN}']")
    if name == "image_search":
        return SearchByPicture()
    if name != "crop":
        return Invalid(f"Unknown tool: {name!r:.40}")
    x, y, width, height = (arguments.get(key) for key in ("x", "y", "width", "height"))
    if not all(type(value) is int for value in (x, y, width, height)):
        return Invalid("x, y, width and height must be integers.")
    try:
        return Crop(0, (x, y, x + width, y + height))
    except ValueError as error:
        return Invalid(str(error))


def answer_opensearch_vl(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    retriever: Retriever,
    *,
    published: str = "",
    turns: Count = 10,
    text_searches: Count = 8,
    picture_searches: Count = 4,
    crops: Count = 4,
    top_k: Count = 5,
    max_new_tokens: Count = 2048,
    temperature: float = 0.0,
    seed: Count = 0,
) -> list[Prediction]:
    """OpenSearch-VL: a model that sees crops, searches by the picture and by texts, and responds.

    Args:
      published: see `published_prompt`.
      turns: that the model writes, the last one without a result (theirs: 50).
      text_searches, picture_searches, crops: of a question at most; one more ends it.
      top_k: sources of a search.
      max_new_tokens, temperature, seed: see papers/search_r1.py:answer_search_r1.
    """
    search_loop.check_sees(llm, "opensearch_vl")
    decoding = Decoding(max_new_tokens, temperature=temperature, seed=seed)
    budget = Budget(
        turns=turns,
        text_searches=text_searches,
        picture_searches=picture_searches,
        zooms=crops,
        top_k=top_k,
    )
    style = OpenSearchStyle(corpus, decoding, published)
    episodes = search_loop.run_episodes(questions, style, llm, retriever, budget)
    return [episode.prediction() for episode in episodes]


SETTINGS = {"opensearch_vl": Setting(answer_opensearch_vl)}
