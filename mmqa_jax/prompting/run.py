"""Runs `mmqa prompt`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.chunks import WHOLE, Engine, Job, Part, Shard
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl, read_text, write_jsonl
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.typed import nearest
from mmqa_jax.data.pictures.bounds import check_bytes
from mmqa_jax.decoding.requests import Candidate, Result, Scores
from mmqa_jax.prompting import backends
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache, answer_all, request_key
from mmqa_jax.prompting.backends.config import check_prompt_config, open_backend
from mmqa_jax.prompting.backends.json_fields import Fields
from mmqa_jax.prompting.backends.openai_requests import read_chat
from mmqa_jax.prompting.backends.thinking import read_thinking, split_thoughts, thoughts_of
from mmqa_jax.prompting.few_shot import IMAGE, MARK, as_prompt


def run_prompts(
    prompts: Path,
    out: Path,
    config: ConfigDict,
    *,
    model: str,
    backend: str = "engine",
    tokenizer: str | None = None,
    raw: bool = False,
    cache: Path | None = None,
    parts: Path,
    shard: Shard = WHOLE,
    chunk: int = 1024,
    engine: Engine | None = None,
    together: bool = False,
) -> dict[str, Any]:
    """Answers a file of prompts, and writes the answers in the file's order, all or none.

    Args:
      prompts: see prompts_file.
      out: JSON-lines file to write.
      config: as configs/prompt/default.py.
      model: for the engine a path or name (see local_model), for a server its name there.
      backend: `engine` or `openai`.
      tokenizer: for the engine, if the model's folder has none.
      raw: texts are continued as they stand; else a chat model gets them as a user's message.
      cache: folder of the response cache; None disables it.
      parts: where finished chunks are kept until all are there.
      shard, chunk, engine: see core.chunks.Job.
      together: the engine spans the processes of the launch, which all compute all answers;
        process 0 alone has parts, cache and file.

    Returns:
      What the verb prints as JSON: counts, seconds and rates of this process.

    Raises:
      RunError: more requests failed than are allowed.
    """
    began = time.monotonic()
    check_prompt_config(config)
    decoding = backends.Decoding(**config.decoding)
    lines = read_prompts(prompts, decoding)
    served: backends.Backend = open_backend(backend, model, tokenizer, config)
    if room := read_thinking(config.thinking, "config key thinking").room:
        served = backends.WithRoom(served, room)
    if served.takes_messages and not raw:
        lines = [as_message(line) for line in lines]
    waiting: dict[str, Any] = {}
    with distributed.fail_together() if together else contextlib.nullcontext():
        for line in lines:
            check_line(line, served.check)
        what = {
            "verb": "prompt",
            "model": served.fingerprint,
            "prompts": _identity(served.fingerprint, lines),
        }
        job = Job(parts, what, len(lines), chunk=chunk, shard=shard, engine=engine)
        queries = [line.request for line in lines]
        if not together:
            waiting = _answer(job, lines, served, cache, out)
        elif leads(what):
            leading = Leading(served, queries)
            _answer(job, lines, leading, cache, out)
            leading.end()
        else:
            follow(served, queries)
    usage = served.usage
    seconds = time.monotonic() - began
    return {
        "out": str(out),
        "backend": backend,
        "model": model,
        "fingerprint": served.fingerprint,
        "prompts": len(lines),
        "answered": usage.requests,
        "cached": usage.cached,
        "unreadable": usage.unreadable,
        "failed": usage.failures,
        "retries": usage.retries,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "thinking_tokens": usage.thinking_tokens,
        "seconds": round(seconds, 3),
        "requests_per_second": round(usage.requests / seconds, 3),
        "engine": served.sizes(),
        "tokens_per_second": {kind: round(rate, 1) for kind, rate in served.rates().items()},
        **waiting,
    }


def _answer(
    job: Job, lines: Sequence[Line], backend: backends.Backend, cache: Path | None, out: Path
) -> dict[str, Any]:
    """Answers this process's share, and writes the file if nothing of the others' is missing; else
    it returns what the verb says of a job that waits for others."""
    with job, contextlib.ExitStack() as opened:
        served: backends.Backend | Cached = backend
        if cache is not None:
            served = Cached(backend, opened.enter_context(contextlib.closing(ResponseCache(cache))))

        def answer(asked: range) -> Part:
            of_chunk = lines[asked.start : asked.stop]
            answers, reasons, _ = answer_all(
                served, [line.request for line in of_chunk], checked=True, thoughts_apart=False
            )
            return Part([_row(line, answers, reasons) for line in of_chunk])

        job.run(lambda: answer)
        rows = job.rows()
        if rows is None:
            return job.waiting()
        write_jsonl(out, rows)
        job.done()
    cut = [row["id"] for row in rows if row.get("finish") == "length"]
    if cut:
        print(
            f"mmqa: {len(cut):,} of {len(rows):,} answers were cut where their tokens ran out, the "
            f"first {cut[0]!r}; raise max_new_tokens (--config.decoding.max_new_tokens), "
            "or give thoughts room (--thinking=TOKENS).",
            file=sys.stderr,
        )
    return {}


def _identity(fingerprint: str, lines: Sequence[Line]) -> str:
    """16 hex digits of prompts, their ids and notes, and their order."""
    digest = hashlib.sha256()
    for line in lines:
        key = request_key(fingerprint, line.request)
        digest.update(json.dumps([line.request.id, key, line.meta]).encode())
    return digest.hexdigest()[:16]


def _row(line: Line, answers: Mapping[Any, Any], reasons: Mapping[Any, str]) -> dict[str, Any]:
    request = line.request
    row: dict[str, Any] = {"id": request.id}
    answer = answers.get(request.id)
    if answer is None:
        row["error"] = reasons[request.id]
    elif isinstance(answer, Scores):
        row |= _scored(request, answer)
    else:
        row |= {"answer": split_thoughts(answer.candidates[0].text or "")[1]}
        row |= _candidate(answer.candidates[0])
        row["prompt_tokens"] = answer.prompt_tokens
        if len(answer.candidates) > 1:
            row["candidates"] = [_candidate(candidate) for candidate in answer.candidates]
    if line.meta is not None:
        row["meta"] = line.meta
    return row


def _candidate(candidate: Candidate) -> dict[str, Any]:
    row: dict[str, Any] = {"text": candidate.text, "finish": candidate.finish}
    if thoughts := thoughts_of(candidate):
        row["thinking"] = thoughts
    if candidate.thinking_tokens:
        row["thinking_tokens"] = candidate.thinking_tokens
    if not math.isnan(candidate.total):  # NaN: a server reports it only on request
        row["logprob"] = candidate.total
    if candidate.logprobs is not None:
        row["logprobs"] = list(candidate.logprobs)
    return row


def _scored(request: backends.Choices, answer: Scores) -> dict[str, Any]:
    scores = [
        {"text": text, "logprob": score.total, "mean": score.mean, "greedy": score.greedy}
        for text, score in zip(request.continuations, answer.scores, strict=True)
    ]
    indices = range(len(scores))
    best = max(indices, key=lambda n: scores[n]["logprob"])
    return {
        "answer": request.continuations[best].strip(),
        "choice": best,
        "best": best,
        "best_per_token": max(indices, key=lambda n: scores[n]["mean"]),
        "scores": scores,
    }


# An engine over the processes of a launch: all compute what process 0 asks for.
#
# Its mesh has devices of all of them, so that each runs the same programs in the same order. What
# is to be answered only process 0 knows: it alone has the parts that are finished, the response
# cache and the file that is written. It tells the others the queries of each call before it makes
# it.


_NAME = "queries"


def leads(what: Any) -> bool:
    """Whether this is process 0."""
    if any(other != what for other in distributed.gather("what is asked", what)):
        raise UserError(
            "--prompts, --model: the processes of this launch were given different ones, though "
            "model.mesh spans them all; give all the same."
        )
    return distributed.process_index() == 0


class Leading(backends.Around):
    """The backend of process 0, whose calls the others follow (see backends.Backend); `queries` are
    all that may be asked for, the same as the others `follow` with."""

    def __init__(self, backend: backends.Backend, queries: Sequence[backends.Query]):
        super().__init__(backend)
        self._places = {query.id: place for place, query in enumerate(queries)}

    def answer(self, queries: Iterable[backends.Query]) -> Iterator[Result | Scores]:
        """The backend's; to be read to its end, as the others do."""
        queries = list(queries)
        distributed.gather(_NAME, [self._places[query.id] for query in queries])
        yield from self._backend.answer(queries)

    def end(self) -> None:
        """Lets the others go: no more is asked."""
        distributed.gather(_NAME, None)


def follow(backend: backends.Backend, queries: Sequence[backends.Query]) -> None:
    """Computes what process 0 answers with `Leading`, until it ends; the answers are its own."""
    while (places := distributed.gather(_NAME, None)[0]) is not None:
        for _ in backend.answer([queries[place] for place in places]):
            pass


# The prompt files that `mmqa prompt` reads.
#
# JSON lines, one prompt each:
#
#   {"id": "q1", "prompt": "Question: ...\nAnswer:", "max_new_tokens": 5, "stop": ["\n"]}
#   {"id": "q2", "prompt": "The capital of France is", "choices": [" Paris", " Rome"]}
#   {"id": "q3", "messages": [{"role": "user", "content": "What is this?"}], "images": ["cat.jpg"]}
#   {"custom_id": "q4", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}
#
# The last is a line of OpenAI's batch files; pictures stand in it as `data:` URLs. Any other file
# is plain text: every line is a prompt, and its line number the id.


_CHATS = "/v1/chat/completions"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# What a value must be, and the check.
_INTEGER = ("an integer", _is_integer)
_NUMBER = ("a number", lambda x: _is_integer(x) or isinstance(x, float))
_STRINGS = (
    "a list of strings",
    lambda x: isinstance(x, list) and bool(x) and all(isinstance(y, str) for y in x),
)
_DECODING = {
    "max_new_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "stop": _STRINGS,
    "n": _INTEGER,
    "seed": _INTEGER,
    "logprobs": ("true or false", lambda x: isinstance(x, bool)),
    "beams": _INTEGER,
    "length_penalty": _NUMBER,
}
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "id": ("a string or an integer", lambda x: isinstance(x, str) or _is_integer(x)),
    "prompt": ("a string", lambda x: isinstance(x, str)),
    "messages": ("a list of messages", lambda x: isinstance(x, list) and bool(x)),
    "images": _STRINGS,
    "choices": _STRINGS,
    "meta": ("anything", lambda x: True),
    **_DECODING,
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One prompt of a file: its place for messages, the query, and the line's own notes, which are
    copied to the answer."""

    where: str
    request: backends.Query
    meta: Any = None


def read_prompts(path: str | os.PathLike, decoding: backends.Decoding | None = None) -> list[Line]:
    """Reads a file of prompts, `.jsonl` or plain text, and their images, from paths relative to the
    file. `decoding` is the default for prompts that do not override it."""
    path, decoding = Path(path), decoding or backends.Decoding()
    with _errors_at("config section decoding"):
        decoding.request("the default")  # rejects values out of range, before a model is loaded
    if path.suffix == ".jsonl":
        lines = []
        for number, row in read_jsonl(path):
            where = f"{path}, line {number}"
            with _errors_at(where):
                lines.append(_read_row(where, number, row, decoding, path.parent))
    else:
        texts = enumerate(read_text(path).split("\n"), start=1)
        lines = [
            Line(f"{path}, line {number}", backends.Completion(number, text.rstrip("\r"), decoding))
            for number, text in texts
            if text.strip()
        ]
    if not lines:
        raise UserError(f"{path}: has no prompts; write one per line.")
    seen: dict[str, str] = {}
    for line in lines:
        name = str(line.request.id)
        if name in seen:
            raise UserError(
                f"{line.where}: the id {name!r} repeats that of {seen[name]}; make ids unique."
            )
        seen[name] = line.where.rpartition(", ")[2]
    return lines


def as_message(line: Line) -> Line:
    """A line whose text is to be continued, as the message of a user with its pictures."""
    query = line.request
    if not isinstance(query, backends.Completion):
        return line
    plain = query.prompt.replace(MARK, " ")
    is_placed = plain.count(IMAGE) == len(query.images)
    marked = plain.replace(IMAGE, MARK) if is_placed else MARK * len(query.images) + plain
    messages, _ = as_prompt(marked, query.images, chat=True)
    return dataclasses.replace(line, request=backends.Chat(query.id, messages, query.decoding))


def check_line(line: Line, check: Callable[[backends.Query], None]) -> None:
    """Runs a backend's `check` on a line; errors name file and line."""
    with _errors_at(line.where):
        check(line.request)


@contextlib.contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Puts file and line in front of errors."""
    try:
        yield
    except UserError as error:
        sentence = str(error)
        raise UserError(
            sentence if sentence.startswith(where) else f"{where}: {sentence}"
        ) from error


def _read_row(where: str, number: int, row: Any, decoding: backends.Decoding, folder: Path) -> Line:
    if not isinstance(row, dict):
        raise UserError("not a JSON object; write {...} with `prompt` or `messages`.")
    if "custom_id" in row:
        return Line(where, _batch_row(row, decoding))
    for key, value in row.items():
        if key not in _KEYS:
            raise UserError(
                f"key {key!r} is unknown; {nearest(key, _KEYS)} Notes of your own go under `meta`."
            )
        expected, fits = _KEYS[key]
        if not fits(value):
            raise UserError(f"{key} is {json.dumps(value)[:80]}, expected {expected}.")
    if ("prompt" in row) == ("messages" in row):
        which = "both" if "prompt" in row else "neither"
        raise UserError(f"has {which} of `prompt` and `messages`; give one of them.")
    request_id = row.get("id", number)
    changes = {key: value for key, value in row.items() if key in _DECODING}
    if changes and "choices" in row:
        raise UserError(
            f"{next(iter(changes))} has no effect with `choices`, which are scored; leave it out."
        )
    decoding = dataclasses.replace(decoding, **changes)
    decoding.request(request_id)  # rejects values out of range
    images = tuple(_read_picture(folder / name) for name in row.get("images", ()))
    query: backends.Query
    if "choices" in row:
        choices = tuple(row["choices"])
        if "messages" in row:
            query = backends.Choices(
                request_id, _messages(row["messages"], images, folder), choices
            )
        else:
            query = backends.Choices(request_id, row["prompt"], choices, images)
    elif "messages" in row:
        query = backends.Chat(request_id, _messages(row["messages"], images, folder), decoding)
    else:
        query = backends.Completion(request_id, row["prompt"], decoding, images)
    return Line(where, query, row.get("meta"))


def _batch_row(row: Mapping[str, Any], default: backends.Decoding) -> backends.Query:
    """A line of an OpenAI batch file. Its model is that of --model, whatever it names."""
    fields = Fields(row)
    name = fields.take("custom_id", str)
    fields.only("method", "POST")
    fields.only("url", _CHATS, why=f"is not {_CHATS}, which alone is answered here")
    body = Fields({"model": "", **fields.take("body", dict)})
    fields.end()
    asked = read_chat(body, default)
    if asked.form.stream:
        raise UserError("stream has no meaning in a file; leave it out.")
    most = default.max_new_tokens if asked.most is None else asked.most
    decoding = dataclasses.replace(asked.decoding, max_new_tokens=most)
    return backends.Chat(name, asked.messages, decoding, thinking=asked.thinking)


def _messages(
    rows: list[Any], images: tuple[backends.Picture, ...], folder: Path
) -> tuple[backends.Message, ...]:
    """Messages of a row; its `images` go to the front of the last one."""
    messages = []
    for row in rows:
        if not isinstance(row, dict) or row.keys() != {"role", "content"}:
            raise UserError("a message has exactly the keys `role` and `content`.")
        content = row["content"]
        parts = [content] if isinstance(content, str) else content
        if not isinstance(parts, list) or not isinstance(row["role"], str):
            raise UserError(
                "a message's role must be a string, its content a string or a list of parts."
            )
        messages.append(backends.Message(row["role"], tuple(_part(part, folder) for part in parts)))
    if images:
        last = messages[-1]
        messages[-1] = backends.Message(last.role, (*images, *last.content))
    return tuple(messages)


def _part(part: Any, folder: Path) -> str | backends.Picture:
    """A text, {"type": "text", "text": ...} or {"type": "image", "image": path}."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    value = part.get(kind) if kind in ("text", "image") else None
    if not isinstance(value, str):
        raise UserError(
            'a part of a message is {"type": "text", "text": ...} or {"type": '
            '"image", "image": PATH}; write one of them.'
        )
    return value if kind == "text" else _read_picture(folder / value)


def _read_picture(path: Path) -> backends.Picture:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # /dev/zero has no end, a pipe perhaps no beginning
            raise UserError(f"image {path}: is no file; name a picture's file.")
        check_bytes(status.st_size, str(path))
        return backends.Picture(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(
            f"image {path}: cannot be read ({error.strerror}); paths are relative to the prompts "
            "file."
        ) from error
