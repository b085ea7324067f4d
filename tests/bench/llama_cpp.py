"""llama.cpp's server as a peer of the rows `total_N`, where the package xllamacpp is installed.

The same weights in the same type, prompts and threads; as many slots as our batch, which the server
fills as they become free. This module loads no numerical library at import.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import urllib.request
from pathlib import Path

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.host import threads

TYPES = ("f32", "f16")  # of weights, and of the cache: the names of both in llama.cpp
LEFT_OUT = "llama.cpp is left out: the package xllamacpp, its server, is not installed; install it."
_COLUMNS = 512  # of a slot


def kinds() -> tuple[str, ...]:
    """The types to measure; none where the server is not installed."""
    return TYPES if importlib.util.find_spec("xllamacpp") else ()


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


def answer(model: str, kind: str, prompts: str, out: str, batch: str, new_tokens: str) -> None:
    """Starts the server in this process; writes greedy answers to a file of prompts, one a line, as
    JSON lines.

    Args:
      model: a GGUF file.
      kind: type of the cache, one of TYPES.
      prompts, out: files.
      batch: slots of the server, and requests at a time.

    Raises:
      RunError: the server does not answer.
    """
    import xllamacpp

    slots = int(batch)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.port = 0  # any that is free
    parameters.n_parallel, parameters.n_ctx = slots, slots * _COLUMNS
    cache_type = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind.upper()}")
    parameters.cache_type_k = parameters.cache_type_v = cache_type
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads()
    parameters.warmup, parameters.verbosity = False, -1
    server = xllamacpp.Server(parameters)
    url = server.listening_address
    with concurrent.futures.ThreadPoolExecutor(slots) as pool:
        lines = Path(prompts).read_text().splitlines()
        texts = list(pool.map(lambda line: _complete(url, line, int(new_tokens)), lines))
    Path(out).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _complete(url: str, prompt: str, new_tokens: int) -> str:
    body = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)["content"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"llama.cpp's server: no answer from {url} ({error}).") from error
