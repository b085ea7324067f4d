"""`mmqa run` and `ask` of a row that searches by tools: its turns in report, answer and page; a tiny
model that sees is shown what it finds."""

import html
import itertools

import pytest
from cli_runs import TEST, done, flags_with, of_engine, rows_of, succeeded
from fake_llm import FakeLLM
from tiny_llm import write_qwen_vl

from mmqa_jax.extensions import tool_search
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.prompting.search_actions import Answer, SearchPictures, Zoom
from mmqa_jax.runs import parts
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.ask_row import open_row
from mmqa_jax.serve.systems import RowSystem, Threads

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]
CALL = '<tool_call>{"name": "search_texts", "arguments": {"query": "capital Arvania"}}'


@pytest.fixture
def llm(monkeypatch):
    """Searches once, and answers from the first result."""
    made = FakeLLM(
        lambda prompt: ("Pelot [1]." if prompt.startswith("<tool_response>") else CALL, -1.0)
    )
    made.fingerprint = "fake"
    monkeypatch.setattr(
        parts, "open_llm", lambda spec, cache, flag: Cached(made, ResponseCache(cache))
    )
    return made


def test_a_row_that_is_asked_and_served(data, llm, tmp_path):
    row = tmp_path / "row"
    values = {"data.dir": data, "options.top_k": 2}
    scores = done(*flags_with("run", "corpus.py:tool_search", row, values))
    assert (scores["prompts"]["searches"], scores["prompts"]["unanswered"]) == (len(TEST), 0)
    for one in rows_of(row / "predictions.jsonl"):
        assert (one["answer"], one["sources"]) == ("Pelot.", one["read"][:1])
    turns = "turn 1, search texts: capital Arvania", "turn 2, answer: Pelot [1]."
    report = html.unescape((row / "report.html").read_text())
    assert all(turn in report for turn in turns)

    ended = succeeded("ask", f"--workdir={row}", "Which city is it?", "--json")
    (answer,) = ended.value["answers"]
    assert (answer["answer"], answer["found"]) == ("Pelot.", True)
    assert [source["cited"] for source in answer["sources"]] == [1]
    assert [step["who"] for step in answer["steps"]] == list(turns)

    answerer = open_row(row)
    assert isinstance(answerer.corpus, AskedCorpus)
    threads = Threads(1)
    try:
        system = RowSystem(answerer, threads)
        shown = system.ask("Which city is it?", None, lambda kind, value: None).future.result()
    finally:
        threads.close()
    assert [step["who"] for step in shown["steps"]] == list(turns)
    assert shown["marked"] == "Pelot. [1]"


def test_a_model_that_sees_is_shown_what_it_finds(data, tmp_path, monkeypatch):
    """What a random model writes is no call: its actions are told, its prompts are its own."""
    actions = itertools.cycle(
        [SearchPictures("flag"), Zoom(1, (0, 0, 500, 500)), Answer("red [1]")]
    )
    monkeypatch.setattr(tool_search, "_HEAD", "")
    monkeypatch.setattr(tool_search.ToolStyle, "tools", [])
    monkeypatch.setattr(
        tool_search.ToolStyle, "read", lambda self, text, *, stopped: (text, next(actions))
    )
    seen = []
    query = tool_search.ToolStyle.query
    monkeypatch.setattr(
        tool_search.ToolStyle,
        "query",
        lambda *arguments: seen.append(query(*arguments)) or seen[-1],
    )
    values = {
        "data.dir": data, "data.questions": 1, "parts.llm.model": write_qwen_vl(tmp_path / "llm"),
        "options.max_new_tokens": 4, "options.top_k": 2, "options.turns": 3,
    }  # fmt: skip
    values |= of_engine({"slots": 2, "buckets": (32,), "prefill_tokens": 64, "length": 512})
    scores = done(*flags_with("run", "corpus.py:tool_search", tmp_path / "row", values))
    assert (scores["prompts"]["failed"], scores["prompts"]["too_long"]) == (0, 0)
    (answered,) = rows_of(tmp_path / "row" / "predictions.jsonl")
    assert answered["answer"] == "red"
    pictures = [sum(len(message.pictures) for message in chat.messages) for chat in seen[-3:]]
    own = pictures[0]
    assert pictures == [own, own + len(answered["read"]), own + len(answered["read"]) + 1]
    assert answered["read"]
