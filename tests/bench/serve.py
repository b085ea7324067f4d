"""`python -m tests.bench serve`: 20 and 80 users of `mmqa serve` at once, beside one by one.

A server of SmolLM2 in a process of its own; each user asks one question after the other, by HTTP.
`ours` and `peer` are answered requests per second of all users and of one; p50 and p95 are seconds
of a request of theirs; lost are requests without an answer, and differ those whose answer is not the
one user's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from mmqa_jax.core.host import device_name, matmul_rates
from tests.bench import Options

ROWS = ("short", "long", "crowd")
_USERS = {"short": 20, "long": 20, "crowd": 80}
_ASKED = {"short": 3, "long": 2, "crowd": 1}  # requests of each user
_ALONE = 10  # requests that are asked one by one
_NEW_TOKENS = 32
_LIMITS = httpx.Limits(max_connections=100)
_START_SECONDS = 300
_THINGS = ("a lamp", "the sea", "bread", "a violin", "the moon", "ice", "a bridge", "rain", "gold")
_ABOUT = "Here is what is known. " + "The archive keeps the letters of the town in order. " * 25


def run(options: Options) -> dict[str, Any]:
    """Requests per second and seconds of a request."""
    with _server() as (address, model), httpx.Client(timeout=600, limits=_LIMITS) as client:
        rows = [_measure(client, address, model, name) for name in options.chosen(ROWS)]
    rates = {kind: round(rate, 1) for kind, rate in matmul_rates().items()}
    return {"bench": "serve", "device": device_name(), "matmul_gflops": rates, "rows": rows}


def _measure(client: httpx.Client, address: str, model: str, name: str) -> dict[str, Any]:
    users = _USERS[name]
    questions = [_question(name, n) for n in range(users * _ASKED[name])]

    def ask(question: str) -> tuple[float, str]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": _NEW_TOKENS,
            "temperature": 0,
        }
        began = time.perf_counter()
        reply = client.post(f"{address}/v1/chat/completions", json=body)
        text = reply.json()["choices"][0]["message"]["content"] if reply.is_success else ""
        return time.perf_counter() - began, text

    ask(_question(name, -1))  # what compiles
    began = time.perf_counter()
    alone = [ask(question)[1] for question in questions[:_ALONE]]
    one_by_one = _ALONE / (time.perf_counter() - began)

    def user(number: int) -> list[tuple[float, str]]:
        return [ask(question) for question in questions[number::users]]

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(users) as pool:
        of_users = list(pool.map(user, range(users)))
    elapsed = time.perf_counter() - began
    seconds = [second for answers in of_users for second, _ in answers]
    texts = {
        n + users * i: text
        for n, of_user in enumerate(of_users)
        for i, (_, text) in enumerate(of_user)
    }
    lost = sum(not text for text in texts.values())
    together = (len(questions) - lost) / elapsed
    return {
        "name": name,
        "ours": round(together, 3),
        "peer": round(one_by_one, 3),
        "ratio": round(together / one_by_one, 2),
        "unit": "requests/s",
        "floor": None,
        "p50_seconds": round(float(np.quantile(seconds, 0.5)), 2),
        "p95_seconds": round(float(np.quantile(seconds, 0.95)), 2),
        "lost": lost,
        "differ": sum(texts[n] != text for n, text in enumerate(alone)),
    }


def _question(name: str, number: int) -> str:
    """Each another; a long one has a beginning of its own, so that no prefix is shared."""
    thing = _THINGS[number % len(_THINGS)]
    about = f"Note {number}. {_ABOUT}" if name == "long" else ""
    return f"{about}Question {number}: tell me about {thing}."


@contextlib.contextmanager
def _server() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "said.txt"
        command = [sys.executable, "-m", "mmqa_jax.cli", "serve", "--model=smollm2", "--port=0"]
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file, env=dict(os.environ))
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not (address := re.search(r"http://[\d.]+:\d+", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server does not start: {log.read_text()[-500:]}")
                time.sleep(0.1)
            yield address[0], "smollm2"
        finally:
            process.terminate()
            process.wait()
