"""The response cache: what it keeps, who shares it, and what a kill leaves."""

import contextlib
import dataclasses
import json
import math
import os
import sqlite3
import tempfile
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_stub import Stub, said

from mmqa_jax.cli import main
from mmqa_jax.core.store import Store
from mmqa_jax.decoding.requests import Candidate, Result, Score, Scores
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Decoding, Message, Picture, Usage
from mmqa_jax.prompting.backends import cache as cache_module
from mmqa_jax.prompting.backends.cache import (
    Cached,
    ResponseCache,
    Unkeepable,
    keep,
    request_key,
    restore,
)
from tests.refusals import refuses

numbers = st.floats(allow_nan=False)
candidates = st.builds(
    Candidate,
    text=st.text(),
    tokens=st.lists(st.integers(0, 9)).map(tuple),
    total=st.floats(),
    logprobs=st.none() | st.lists(numbers).map(tuple),
    finish=st.sampled_from(["end", "stop", "length"]),
)
scores = st.builds(
    Score, total=numbers, logprobs=st.lists(numbers, min_size=1).map(tuple), greedy=st.booleans()
)


class Echoing:
    """A backend that answers with what it was asked, and counts."""

    def __init__(self, answers=None, fingerprint="echo"):
        self.asked, self.answers = [], answers or {}
        self.usage, self.failures, self.fingerprint = Usage(), [], fingerprint

    def answer(self, queries):
        for query in queries:
            self.asked.append(query.id)
            yield self.answers.get(query.id) or Result(
                query.id, (Candidate(f"<{query.prompt}>", (), math.nan, None, "end"),), 4, 2
            )


def texts(results):
    return {result.id: result.text for result in results}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(candidates, min_size=1, max_size=3).map(tuple), st.lists(scores, min_size=1).map(tuple)
)
def test_answers_come_back_as_they_were(found, ranked):
    """Every bit of text and numbers; what was reused belongs to the run that did it."""
    answers = {1: Result(1, found, 7, 3), 2: Scores(2, ranked)}
    backend = Echoing(answers)
    completion, choices = Completion(1, "a"), Choices(2, "b", ("c",) * len(ranked))
    with tempfile.TemporaryDirectory() as folder:
        served = Cached(backend, ResponseCache(folder))
        assert [*served.answer([completion, choices])] == [*answers.values()]
        one, two = served.answer([completion, choices])
        served.close()
    assert repr(one) == repr(dataclasses.replace(answers[1], reused_tokens=0))  # nan too
    assert two == answers[2]
    assert backend.asked == [1, 2]
    assert backend.usage.cached == 2


def test_only_what_is_missing_is_asked(tmp_path):
    first = Echoing()
    served = Cached(first, ResponseCache(tmp_path / "cache"))
    half = texts(served.answer(Completion(n, f"prompt {n}") for n in range(0, 20, 2)))
    assert first.asked == list(range(0, 20, 2))
    again = Echoing()
    served = Cached(again, ResponseCache(tmp_path / "cache"))
    whole = texts(served.answer(Completion(f"id {n}", f"prompt {n}") for n in range(20)))
    assert again.asked == [f"id {n}" for n in range(1, 20, 2)]  # other ids, the same prompts
    assert whole == {f"id {n}": f"<prompt {n}>" for n in range(20)}
    assert half == {n: f"<prompt {n}>" for n in range(0, 20, 2)}
    # Another model's answers are another's.
    other = Echoing(fingerprint="other")
    texts(Cached(other, ResponseCache(tmp_path / "cache")).answer([Completion(0, "prompt 0")]))
    assert other.asked == [0]


def test_what_answers_cost_does_not_depend_on_the_cache(tmp_path):
    drawn = (
        Candidate("t", (1,) * 2, -1.0, None, "stop"),
        Candidate("t", (1,) * 3, -1.0, None, "stop", thinking_tokens=2),
    )
    scored = (Score(-1.0, (-1.0, -0.5), False), Score(-1.0, (-1.0,), True))
    answers = {1: Result(1, drawn, 7, 5), 2: Scores(2, scored, 10)}
    cache = ResponseCache(tmp_path)
    for _ in range(2):  # asked, then kept
        served = Cached(Echoing(answers), cache)
        assert len([*served.answer([Completion(1, "a"), Choices(2, "b", ("c", "d"))])]) == 2
        # Two draws and two continuations, each with its prompt.
        assert vars(served.work) == {
            "calls": 4, "prompt_tokens": 2 * 7 + 2 * 10, "completion_tokens": 2 + 3 + 2 + 1,
            "thinking_tokens": 2,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("total", "finish", "kept"),
    [(-1.0, "stop", False), (-1.0, "end", False), (-1.0, "length", True), (math.nan, "stop", True)],
)
def test_older_answers_are_kept_where_they_are_the_same_today(total, finish, kept, tmp_path):
    """Their totals held the log-probability of an end token or a stop string."""
    cache = ResponseCache(tmp_path)
    old = Result(1, (Candidate("old", (1, 2), total, None, finish),), 3, 0)
    question, new = Completion(1, "a"), Candidate("new", (1, 2), -0.5, None, "stop")
    key = request_key("echo", question, of_text=False)
    cache.put(key, keep(question, old))
    backend = Echoing({1: Result(1, (new,), 3, 0)})
    for _ in range(2):
        (found,) = Cached(backend, cache).answer([question])
        assert found.text == ("old" if kept else "new")
    assert backend.asked == ([] if kept else [1])
    # Continuations' scores have no end: their keys are the same.
    choices = Choices(1, "a", ("b",))
    assert request_key("m", choices) == request_key("m", choices, of_text=False)


def test_the_key_holds_all_that_an_answer_depends_on():
    red, blue = Picture(b"\x89PNG red", "a.png"), Picture(b"\x89PNG blue", "a.png")
    drawn = Decoding(temperature=1.0)
    changed = {"max_new_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "stop": ("x",)}
    changed |= {"n": 2, "seed": 5, "logprobs": True, "length_penalty": 0.5}
    different = [
        Completion(0, "a", drawn),
        *(Completion(0, "a", dataclasses.replace(drawn, **{k: v})) for k, v in changed.items()),
        Completion(0, "a"),
        Completion(0, "b", drawn),
        Completion(0, "a", drawn, (red,)),
        Completion(0, "a", drawn, (blue,)),
        Completion(0, "a", drawn, (red, blue)),
        Chat(0, (Message("user", ("a",)),), drawn),
        Chat(0, (Message("system", ("a",)),), drawn),
        Chat(0, (Message("user", (red, "a")),), drawn),
        Chat(0, (Message("user", ("a", red)),), drawn),
        Chat(0, (Message("user", ("a",)), Message("assistant", ("b",))), drawn),
        Choices(0, "a", ("b", "c")),
        Choices(0, "a", ("c", "b")),
        Choices(0, "a", ("bc",)),
        Choices(0, (Message("user", ("a",)),), ("b", "c")),
    ]
    keys = [request_key("model", request) for request in different]
    assert len(set(keys)) == len(keys)
    assert request_key("other", different[0]) != keys[0]
    # Neither id nor file name, nor the seed where nothing is drawn.
    same = [
        (Completion(0, "a", drawn, (red,)), Completion(1, "a", drawn, (Picture(red.data, "b"),))),
        (Completion(0, "a"), Completion(0, "a", Decoding(seed=5, top_k=3, top_p=0.5))),
        (Completion(0, "a", Decoding(stop=["x"])), Completion(0, "a", Decoding(stop=("x",)))),
    ]
    for one, other in same:
        assert request_key("model", one) == request_key("model", other)


def older_cache(path, answers):
    """The SQLite file of an older version: key -> text."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        connection.execute("PRAGMA application_id = 0x6D6D7161")
        connection.execute("PRAGMA user_version = 1")
        connection.execute("BEGIN")  # else every row is a transaction of its own
        connection.executemany("INSERT INTO answers VALUES (?, ?)", answers.items())
        connection.execute("COMMIT")


def older_text(key, value):
    """As an older version kept a value, with its checksum."""
    return json.dumps(value | {"crc32": zlib.crc32(f"{key} {json.dumps(value)}".encode())})


@pytest.mark.parametrize(
    ("name", "kept_in"), [("answers.sqlite", "answers.sqlite.answers"), ("answers", "answers")]
)
def test_the_file_of_an_older_version_is_read(name, kept_in, tmp_path):
    """Named itself, or beside the folder that has its place today; it is left as it is."""
    path, queries = tmp_path / "answers.sqlite", [Completion(n, f"prompt {n}") for n in range(3)]
    keys = [request_key("echo", query) for query in queries]
    value = {"candidates": [GOOD], "prompt_tokens": 4}
    texts_of = {keys[0]: older_text(keys[0], value), keys[1]: json.dumps(value)}
    older_cache(path, texts_of)
    before = path.read_bytes()
    for asked in ([2], []):
        backend = Echoing()
        served = Cached(backend, ResponseCache(tmp_path / name))
        assert texts(served.answer(queries)) == {0: "a", 1: "a", 2: "<prompt 2>"}
        assert backend.asked == asked
        served.close()
    assert path.read_bytes() == before
    assert len(Store(tmp_path / kept_in, cache_module._WHAT)) == 1


def test_a_damaged_file_of_an_older_version_is_named_with_the_remedy(tmp_path):
    path = tmp_path / "cache"
    path.write_bytes(b"not a database at all, and long enough to be looked at " * 100)
    refuses(rf"{path}: the response cache is damaged .*; delete this", ResponseCache, path)

    path.unlink()
    older_cache(path, {f"key {n}": "x" * 100 for n in range(2000)})
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)  # all pages but the first
    path.write_bytes(data)
    refuses(r"the response cache is damaged .*; delete this", ResponseCache(path).get, "key 77")


GOOD = {"text": "a", "tokens": [], "total": -1.0, "logprobs": None, "finish": "end"}
POISON = {
    "other keys": {"candidates": [{"words": 1}], "prompt_tokens": 4},
    "more keys": {"candidates": [GOOD], "prompt_tokens": 4, "more": 1},
    "no candidates": {"candidates": [], "prompt_tokens": 4},
    "a text that is none": {"candidates": [GOOD | {"text": ["a"]}], "prompt_tokens": 4},
    "a total that is none": {"candidates": [GOOD | {"total": "-1"}], "prompt_tokens": 4},
    "tokens that are none": {"candidates": [GOOD | {"tokens": [1.5]}], "prompt_tokens": 4},
    "log-probabilities": {"candidates": [GOOD | {"logprobs": [None]}], "prompt_tokens": 4},
    "no count": {"candidates": [GOOD], "prompt_tokens": None},
    "half a character": {"candidates": [GOOD | {"text": "\ud83d"}], "prompt_tokens": 4},
    "a number": 7,
    "a list": [GOOD],
    "another's answer": {"scores": [], "prompt_tokens": 4},
}
ROWS = {
    **{name: json.dumps(value) for name, value in POISON.items()},
    "another checksum": json.dumps({"candidates": [GOOD], "prompt_tokens": 4, "crc32": 1}),
    "deep": '{"candidates": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "cut": '{"candidates": [{"te',
    "empty": "",
    "no UTF-8": b"\xff\xfe{}",
    "a huge integer": '{"candidates": [], "prompt_tokens": ' + "1" * 5000 + "}",
    "no text": 7,
    "bytes of zeros": bytes(300),
}


NO_JSON = ("half a character", "no UTF-8", "bytes of zeros")  # which a store would not take
CASES = {f"{name}, older": (kept, True) for name, kept in (POISON | ROWS).items()} | {
    name: (kept, False) for name, kept in (ROWS | POISON).items() if name not in NO_JSON
}


@pytest.mark.parametrize(("kept", "older"), CASES.values(), ids=CASES.keys())
def test_an_entry_that_cannot_be_read_is_asked_for_again(kept, older, tmp_path):
    """Counted, and replaced, so that the next run reads it."""
    path, query = tmp_path / "cache", Completion(0, "a")
    key = request_key("echo", query)
    if older:
        older_cache(path, {key: kept if isinstance(kept, str | bytes) else json.dumps(kept)})
    else:
        ResponseCache(path).put(key, kept)
    first = Echoing()
    (result,) = Cached(first, ResponseCache(path)).answer([query])
    assert (result.text, first.asked) == ("<a>", [0])
    assert (first.usage.unreadable, first.usage.cached) == (1, 0)
    again = Echoing()
    (result,) = Cached(again, ResponseCache(path)).answer([query])
    assert (result.text, again.asked) == ("<a>", [])
    assert (again.usage.unreadable, again.usage.cached) == (0, 1)


def test_every_flipped_bit_of_an_older_entry_is_seen(tmp_path):
    """Another text of the same form would be another answer."""
    query = Choices(0, "a", ("b",))
    answer = Scores(0, (Score(-1.5, (-1.0, -0.5), True),), 4)
    key = request_key("echo", query)
    text, seen = older_text(key, keep(query, answer)).encode(), 0
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert restore(key, query, bytes(flipped)) == answer
        except Unkeepable:
            seen += 1
    assert seen > 8 * len(text) - 16


def test_the_older_answer_of_another_key_is_asked_for_again(tmp_path):
    """A damaged index of the database leads to another row."""
    path, queries = tmp_path / "cache", [Completion(n, f"prompt {n}") for n in range(2)]
    one, other = (request_key("echo", query) for query in queries)
    value = {"candidates": [GOOD], "prompt_tokens": 4}
    older_cache(path, {one: older_text(other, value), other: older_text(one, value)})
    backend = Echoing()
    found = texts(Cached(backend, ResponseCache(path)).answer(queries))
    assert found == {0: "<prompt 0>", 1: "<prompt 1>"}
    assert (backend.asked, backend.usage.unreadable) == ([0, 1], 2)


def test_a_damaged_answer_is_asked_for_again(tmp_path):
    path, queries = tmp_path / "cache", [Completion(n, f"prompt {n}") for n in range(9)]
    texts(Cached(Echoing(), ResponseCache(path)).answer(queries))
    (file,) = path.glob("[0-9]*.jsonl")
    file.write_bytes(file.read_bytes().replace(b"<prompt 4>", b"<prompt 5>"))
    backend = Echoing()
    found = texts(Cached(backend, ResponseCache(path)).answer(queries))
    assert found == {n: f"<prompt {n}>" for n in range(9)}
    assert (backend.asked, backend.usage.unreadable) == ([4], 1)


@pytest.mark.parametrize(
    "answer",
    [
        Result(0, (Candidate("half \ud83d", (), math.nan, None, "end"),), 4, 0),
        Result(0, (Candidate(b"bytes", (), math.nan, None, "end"),), 4, 0),
        Result(0, (), 4, 0),
        Result(0, (Candidate("a", (), math.nan, (math.nan, "b"), "end"),), 4, 0),
    ],
)
def test_what_cannot_be_written_is_a_failure_and_is_not_kept(answer, tmp_path):
    """The other answers come and are kept; a rerun asks for this one alone."""
    path = tmp_path / "cache"
    queries = [Completion(0, "a"), Completion(1, "b")]
    backend = Echoing({0: answer})
    served = Cached(backend, ResponseCache(path))
    assert [result.id for result in served.answer(queries)] == [1]
    (failure,) = served.failures
    assert failure.id == 0
    assert failure.reason.startswith("its answer cannot be written (")
    assert backend.usage.failures == 1
    assert len(ResponseCache(path)) == 1
    again = Echoing()
    assert len([*Cached(again, ResponseCache(path)).answer(queries)]) == 2
    assert again.asked == [0]


@pytest.mark.parametrize("prefix", [b"not a database" * 400, b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_cache_ends_the_verb_by_name(prefix, tmp_path, capsys):
    """Exit code 2, before anything is asked."""
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "a"}\n')
    (tmp_path / "cache").write_bytes(prefix)
    flags = [f"--prompts={tmp_path / 'prompts.jsonl'}", f"--out={tmp_path / 'out.jsonl'}"]
    with Stub(lambda body: said("x")).serving() as stub:
        code = main(
            ["prompt", "--backend=openai", "--model=tiny", f"--cache={tmp_path / 'cache'}", *flags]
        )
    assert code == 2
    said_of = capsys.readouterr().err
    assert f"mmqa: {tmp_path / 'cache'}: the response cache is damaged" in said_of
    assert "delete this file" in said_of
    assert stub.asked == []


def test_the_folder_is_made_by_the_first_answer(tmp_path):
    """Nothing stays of a run that gets none; what another process has put since is found."""
    path = tmp_path / "folder" / "cache"
    one, other = ResponseCache(path), ResponseCache(path)
    assert (one.get("key"), len(one)) == (None, 0)
    assert list(path.parent.iterdir()) == []
    other.put("key", {"text": 1})
    assert path.exists()
    assert (one.get("key"), len(one)) == ({"text": 1}, 1)
    unused = ResponseCache(tmp_path / "unused")
    unused.close()
    assert not unused.path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    tmp_path.chmod(0o500)
    refuses(r"cannot be created there .*--cache .*parts\.llm", ResponseCache, tmp_path / "cache")


def test_a_folder_that_denies_writing_is_named(tmp_path, monkeypatch):
    """As the one above, also for root."""
    monkeypatch.setattr("mmqa_jax.prompting.backends.cache.os.access", lambda *arguments: False)
    message = (
        r"cache: the response cache cannot be created there \(Permission denied\); name another"
    )
    refuses(message, ResponseCache, tmp_path / "cache")


def test_what_is_no_cache_is_left_alone(tmp_path):
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = foreign.read_bytes()
    Store(tmp_path / "journal", {"part": "reader"}).add({"q": 1})
    for place in (foreign, tmp_path, tmp_path / "journal"):
        refuses("not a response cache of this version; name another", ResponseCache, place)
    (tmp_path / "journal" / "job.json").unlink()
    refuses(r"jsonl: is a part of another run, or of another", ResponseCache, tmp_path / "journal")
    assert foreign.read_bytes() == before
    refuses(r"the response cache cannot be \w+ there", ResponseCache, foreign / "cache")
