"""llama.cpp's server as a peer of the rows `total_40` and `total_400`, where it is installed.

The same weights in the same type, prompts and threads; as many slots as our batch, which the server
fills as they become free. This module loads no numerical library at import.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.host import threads

PROGRAM = "llama-server"
TYPES = ("f32", "f16")  # of weights, and of the cache: the names of both in llama.cpp
LEFT_OUT = f"llama.cpp is left out: {PROGRAM} is not on the PATH; build it, and add it there."
_COLUMNS = 512  # of a slot
_PATIENCE = 120  # seconds until the server is ready
_POLL = 0.02


def kinds() -> tuple[str, ...]:
    """The types to measure; none where the server is not installed."""
    return TYPES if shutil.which(PROGRAM) else ()


def write_gguf(source: Path, out: Path, kind: str) -> None:
    """Writes a GGUF file once more with its tensors dequantized to float32, or rounded to float16.

    Args:
      source: the file, in any type that the package gguf dequantizes.
      out: the new file.
      kind: one of TYPES; vectors stay float32, as in llama.cpp's own files.
    """
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    written = ("GGUF.", "general.architecture", "general.file_type")  # by the writer
    for name, field in reader.fields.items():
        if not name.startswith(written):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32", "f16": "MOSTLY_F16"}[kind]])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        dtype = np.float16 if kind == "f16" and values.ndim > 1 else np.float32
        writer.add_tensor(tensor.name, values.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answer(model: Path, kind: str, prompts: Path, out: Path, batch: int, new_tokens: int) -> float:
    """Starts the server and writes greedy answers to a file of prompts, one a line, as JSON lines.

    Returns:
      Seconds from its start to the last answer.

    Raises:
      RunError: it does not start, or does not answer.
    """
    lines = prompts.read_text().splitlines()
    began = time.perf_counter()
    with _server(model, kind, batch) as url, concurrent.futures.ThreadPoolExecutor(batch) as pool:
        texts = list(pool.map(lambda line: _complete(url, line, new_tokens), lines))
        out.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return time.perf_counter() - began


@contextlib.contextmanager
def _server(model: Path, kind: str, slots: int) -> Iterator[str]:
    """A running server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [PROGRAM, "--model", str(model), "--host", "127.0.0.1", "--port", port]
    command += ["--threads", str(threads()), "--parallel", str(slots)]
    command += ["--ctx-size", str(slots * _COLUMNS), "--n-gpu-layers", "0"]
    command += ["--cache-type-k", kind, "--cache-type-v", kind]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + _PATIENCE
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RunError(f"{' '.join(command)}: did not start; run it by hand.")
                time.sleep(_POLL)
            yield url
        finally:
            process.terminate()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_PATIENCE) as reply:
            return reply.status == 200
    except (urllib.error.URLError, ConnectionError):  # not yet listening, or still loading: 503
        return False


def _complete(url: str, prompt: str, new_tokens: int) -> str:
    body = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)["content"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{PROGRAM}: no answer from {url} ({error}); run it by hand.") from error
