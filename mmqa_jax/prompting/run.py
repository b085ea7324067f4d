"""Runs `mmqa prompt`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.config import check_section, spec_of
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.core.progress import Progress
from mmqa_jax.decoding.requests import Candidate, Result, Scores
from mmqa_jax.prompting.backend_http import OpenAIBackend, ServerConfig
from mmqa_jax.prompting.backends import Backend, Choices, Decoding
from mmqa_jax.prompting.cache import Cached, ResponseCache
from mmqa_jax.prompting.prompts_file import Line, check_line, read_prompts

BACKENDS = ("engine", "openai")


def run_prompts(
    prompts: Path,
    out: Path,
    config: ConfigDict,
    *,
    model: str,
    backend: str = "engine",
    tokenizer: str | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Answers a file of prompts, and writes the answers in the file's order, all or none.

    Args:
      prompts: see prompts_file.
      out: JSON-lines file to write.
      config: as configs/prompt/default.py.
      model: for the engine a path or name (see local_model), for a server its name there.
      backend: one of BACKENDS.
      tokenizer: for the engine, if the model's folder has none.
      cache: file of the response cache; None disables it.

    Returns:
      What the verb prints as JSON: counts, seconds and rates.

    Raises:
      UserError: a mistake in prompts, config or model; nothing is written.
      RunError: more requests failed than are allowed.
    """
    began = time.monotonic()
    decoding = _sections(config)
    lines = read_prompts(prompts, decoding)
    served = _open(backend, model, tokenizer, config)
    for line in lines:
        check_line(line, served.check)
    stored = None
    if cache is not None:
        stored = ResponseCache(cache)
        served = Cached(served, stored)
    try:
        answers = _answer(served, lines)
    finally:
        if stored is not None:
            stored.close()
    reasons = {failure.id: failure.reason for failure in served.failures}
    write_jsonl(out, (_row(line, answers, reasons) for line in lines))
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
        "failed": usage.failures,
        "retries": usage.retries,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "seconds": round(seconds, 3),
        "requests_per_second": round(usage.requests / seconds, 3),
        "tokens_per_second": {kind: round(rate, 1) for kind, rate in served.rates().items()},
    }


def _answer(served: Backend | Cached, lines: list[Line]) -> dict[Any, Result | Scores]:
    """Results by id; those of failed requests are missing."""
    answers: dict[Any, Result | Scores] = {}
    if isinstance(served, Cached):
        for line in lines:
            if (found := served.find(line.request)) is not None:
                answers[line.request.id] = found
    missing = [line.request for line in lines if line.request.id not in answers]
    if not missing:
        return answers
    with Progress("Answering", len(lines), "requests", start=len(answers)) as progress:
        failed = 0
        for result in served.answer(missing):
            answers[result.id] = result
            rates = {kind: f"{rate:.0f} tokens/s" for kind, rate in served.rates().items()}
            fresh, failed = served.usage.failures - failed, served.usage.failures
            progress.advance(1 + fresh, **rates, **({"failed": failed} if failed else {}))
    return answers


def _open(backend: str, model: str, tokenizer: str | None, config: ConfigDict) -> Backend:
    if backend == "openai":
        if tokenizer is not None:
            raise UserError("--tokenizer: a server has its own; leave the flag out.")
        return OpenAIBackend(model, ServerConfig(**config.server))
    from mmqa_jax.core import distributed
    from mmqa_jax.decoding.slot_runner import EngineConfig
    from mmqa_jax.prompting.local_model import ModelConfig, open_backend

    check_section(config.engine, "engine", spec_of(EngineConfig))
    check_section(config.model, "model", spec_of(ModelConfig))
    distributed.start()
    return open_backend(
        model,
        tokenizer=tokenizer,
        config=ModelConfig(**config.model),
        engine=EngineConfig(**config.engine),
    )


def _sections(config: ConfigDict) -> Decoding:
    """Checks the config's sections; the engine's are checked where they are used."""
    spec = {"decoding": spec_of(Decoding), "server": spec_of(ServerConfig)}
    check_section(config, "", {**spec, "engine": dict, "model": dict})
    return Decoding(**config.decoding)


def _row(line: Line, answers: Mapping[Any, Any], reasons: Mapping[Any, str]) -> dict[str, Any]:
    request = line.request
    row: dict[str, Any] = {"id": request.id}
    answer = answers.get(request.id)
    if answer is None:
        row["error"] = reasons[request.id]
    elif isinstance(answer, Scores):
        row |= _scored(request, answer)
    else:
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
    return {
        "best": max(indices, key=lambda n: scores[n]["logprob"]),
        "best_per_token": max(indices, key=lambda n: scores[n]["mean"]),
        "scores": scores,
    }
