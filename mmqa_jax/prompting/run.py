"""Runs `mmqa prompt`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core import distributed
from mmqa_jax.core.chunks import Engine, Job, Part
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.core.shards import WHOLE, Shard
from mmqa_jax.decoding.requests import Candidate, Scores
from mmqa_jax.prompting.backends import Backend, Choices, Decoding
from mmqa_jax.prompting.cache import Cached, ResponseCache, request_key
from mmqa_jax.prompting.open import check_prompt_config, open_backend
from mmqa_jax.prompting.prompts_file import Line, as_message, check_line, read_prompts
from mmqa_jax.prompting.stream import answer_all
from mmqa_jax.prompting.thinking import answer_of
from mmqa_jax.prompting.together import Leading, follow, leads


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
    decoding = Decoding(**config.decoding)
    lines = read_prompts(prompts, decoding)
    served = open_backend(backend, model, tokenizer, config)
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
        "seconds": round(seconds, 3),
        "requests_per_second": round(usage.requests / seconds, 3),
        "engine": served.sizes(),
        "tokens_per_second": {kind: round(rate, 1) for kind, rate in served.rates().items()},
        **waiting,
    }


def _answer(
    job: Job, lines: Sequence[Line], backend: Backend, cache: Path | None, out: Path
) -> dict[str, Any]:
    """Answers this process's share, and writes the file if nothing of the others' is missing.

    Returns:
      What the verb says of a job that waits for others.
    """
    with job, contextlib.ExitStack() as opened:
        served: Backend | Cached = backend
        if cache is not None:
            served = Cached(backend, opened.enter_context(contextlib.closing(ResponseCache(cache))))

        def answer(asked: range) -> Part:
            own = lines[asked.start : asked.stop]
            answers, reasons = answer_all(served, [line.request for line in own])
            return Part([_row(line, answers, reasons) for line in own])

        job.run(lambda: answer)
        rows = job.rows()
        if rows is None:
            return job.waiting()
        write_jsonl(out, rows)
        job.done()
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
        row |= {"answer": answer_of(answer.candidates[0].text or "")}
        row |= _candidate(answer.candidates[0])
        row["prompt_tokens"] = answer.prompt_tokens
        if len(answer.candidates) > 1:
            row["candidates"] = [_candidate(one) for one in answer.candidates]
    if line.meta is not None:
        row["meta"] = line.meta
    return row


def _candidate(candidate: Candidate) -> dict[str, Any]:
    row: dict[str, Any] = {"text": candidate.text, "finish": candidate.finish}
    if not math.isnan(candidate.total):  # NaN: a server reports it only on request
        row["logprob"] = candidate.total
    if candidate.logprobs is not None:
        row["logprobs"] = list(candidate.logprobs)
    return row


def _scored(request: Choices, answer: Scores) -> dict[str, Any]:
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
