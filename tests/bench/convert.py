"""`python -m tests.bench convert`: peak memory of converting, exporting and loading a model.

A random LLaMA of P parameter bytes is written first; every step runs in a process of its own,
whose peak resident memory the system reports. `of_p` is that peak as a share of P, `added` the
same without what a process holds that has only loaded the libraries. The peer is transformers:
`from_pretrained`, and for the two conversions `save_pretrained` too. The floor is the libraries
alone where a step could stream, and P more where it must hold the model.

This module loads no numerical library at import: what a process holds counts as its children's.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import host_name
from tests.bench import Options
from tests.bench.runner import Case, measure
from tests.bench.timing import Child, run_child
from tests.fake_devices import fake_devices

ROWS = ("convert", "export", "load", "load_mesh", "read", "read_mesh")
_LOADS = ROWS[2:]  # the model is in memory at the end: of a converted folder, of a published one
# Fields of LlamaConfig: SmolLM2-135M's sizes, and LLaMA-3.2-1B's.
_SHAPES = {
    "small": {
        "vocab_size": 49152, "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3,
        "mlp": 1536, "tied": True,
    },
    "full": {
        "vocab_size": 128256, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8,
        "mlp": 8192, "tied": True, "rope_theta": 500000.0,
    },
}  # fmt: skip
_MESH_DEVICES = 8  # simulated on one CPU
_SHARD_BYTES = 3 << 30  # so that the full size has two shards
_MIB = 1 << 20


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected; size small unless full is given."""
    return run_shape(_SHAPES[options.size or "small"], options)


def run_shape(shape: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Measures with a LLaMA of the given fields of LlamaConfig; returns what `--json` prints.

    Raises:
      UserError: the disk has no room for the models.
    """
    wanted = options.chosen(ROWS)
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as name:
        steps = _Steps(Path(name))
        output = steps.python("make", Path(name) / "published", json.dumps(dict(shape))).output
        made = json.loads(output)
        size = made["bytes"]
        free = shutil.disk_usage(name).free
        if free < 3 * size:
            raise UserError(
                f"{name}: {3 * size / 2**30:.1f} GiB will be written there, the disk has "
                f"{free / 2**30:.1f} GiB left; set TMPDIR to a folder on another disk."
            )
        start = steps.python("start").peak_bytes
        return measure(
            "convert",
            _cases(steps, wanted, size, start),
            wanted,
            1,
            device=host_name(),
            parameters=made["parameters"],
            parameter_mib=_mib(size),
            libraries_mib=_mib(start),
        )


def _cases(steps: _Steps, wanted: tuple[str, ...], size: int, start: int) -> Iterator[Case]:
    """The rows `wanted`, of a model of `size` bytes; the libraries alone take `start`."""
    converted = steps.convert("published", "converted")
    measured = {
        "convert": lambda: converted,
        "export": lambda: steps.convert("converted", "exported", "--export=hf"),
        "load": lambda: steps.load(1),
        "load_mesh": lambda: steps.load(_MESH_DEVICES),
        "read": lambda: steps.read(1),
        "read_mesh": lambda: steps.read(_MESH_DEVICES),
    }
    for name in wanted:
        loads, ours = name in _LOADS, measured[name]()
        peer = steps.transformers(save=not loads)
        steps.clear("exported", "saved")
        yield Case(
            name,
            "MiB",
            _mib(ours.peak_bytes),
            _mib(peer.peak_bytes),
            floor=_mib(start + size if loads else start),
            notes={
                "of_p": ours.peak_bytes / size,
                "added": (ours.peak_bytes - start) / size,
                "peer_of_p": peer.peak_bytes / size,
                "seconds": ours.seconds,
                "peer_seconds": peer.seconds,
            },
        )


class _Steps:
    """Runs the steps as processes, in one folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def convert(self, source: str, out: str, *flags: str) -> Child:
        """`mmqa convert`, which always runs on the CPU."""
        return self._run(
            ["-m", "mmqa_jax.cli", "convert", "--model=llama"],
            f"--source={self._folder / source}",
            f"--out={self._folder / out}",
            *flags,
        )

    def load(self, devices: int) -> Child:
        """`load_converted`, sharded over so many simulated devices."""
        return self.python("load", self._folder / "converted", env=fake_devices(devices))

    def read(self, devices: int) -> Child:
        """`load_published`, sharded over so many simulated devices."""
        return self.python("read", self._folder / "published", env=fake_devices(devices))

    def transformers(self, *, save: bool) -> Child:
        """Reading and, with `save`, writing by transformers."""
        folders = [self._folder / "published", self._folder / "saved"]
        return self.python("load_transformers", *folders[: 1 + save])

    def python(self, function: str, *arguments: Any, env: Mapping[str, str] | None = None) -> Child:
        """A function of this module, called with strings."""
        call = f"import sys; from {__name__} import {function}; {function}(*sys.argv[1:])"
        return self._run(["-c", call], *map(str, arguments), env=env)

    def clear(self, *folders: str) -> None:
        """Removes what the last row has written."""
        for folder in folders:
            shutil.rmtree(self._folder / folder, ignore_errors=True)

    def _run(
        self, program: Sequence[str], *arguments: str, env: Mapping[str, str] | None = None
    ) -> Child:
        cpu = {"JAX_PLATFORMS": "cpu", "MMQA_PROGRESS": "off", **(env or {})}
        return run_child([sys.executable, *program, *arguments], cpu)


def _mib(size: int) -> int:
    return round(size / _MIB)


# What the processes run; each loads what it needs.


def make(folder: str, shape: str) -> None:
    """Writes a random LLaMA in transformers' format, one tensor at a time; prints its size.

    Args:
      folder: where it goes.
      shape: fields of LlamaConfig, as JSON.
    """
    import numpy as np
    from flax import nnx

    from mmqa_jax.models.llama.config import LlamaConfig
    from mmqa_jax.models.llama.keys import publish_llama
    from mmqa_jax.models.llama.network import Llama
    from mmqa_jax.weights.published import write_published

    config = LlamaConfig(**json.loads(shape))
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    published = publish_llama(config, nnx.state(abstract))
    specs = published.source.specs()
    rng = np.random.default_rng(0)

    source = types.SimpleNamespace(
        name="a random LLaMA",
        specs=lambda: specs,
        read=lambda key: rng.random(specs[key].shape, np.float32) * 0.04 - 0.02,
    )
    write_published(folder, published._replace(source=source), shard_bytes=_SHARD_BYTES)
    parameters = sum(math.prod(spec.shape) for spec in specs.values())
    print(json.dumps({"parameters": parameters, "bytes": 4 * parameters}))


def start() -> None:
    """Loads the libraries of `mmqa convert`, and nothing more."""
    import jax

    import mmqa_jax.weights.convert

    assert mmqa_jax.weights.convert
    jax.devices()


def load(folder: str) -> None:
    """Loads a converted model, its parameters split over all devices."""
    import jax
    from flax import nnx

    from mmqa_jax.core.mesh import make_mesh
    from mmqa_jax.weights.folder import load_converted

    model = load_converted(folder, mesh=make_mesh({"fsdp": -1}))
    jax.block_until_ready(nnx.state(model))


def read(folder: str) -> None:
    """Loads a published model, its parameters split over all devices."""
    import jax
    from flax import nnx

    from mmqa_jax.core.mesh import make_mesh
    from mmqa_jax.weights.published import load_published

    model = load_published("llama", folder, mesh=make_mesh({"fsdp": -1}))
    jax.block_until_ready(nnx.state(model))


def load_transformers(folder: str, out: str | None = None) -> None:
    """Loads a published model with transformers and, if `out` is given, writes it there."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        parameter.sum()  # a mapped file is in memory once it is read
    if out is not None:
        model.save_pretrained(out)
