"""`mmqa bench convert`: most memory that converting, exporting and loading a model hold at once.

A random LLaMA of P parameter bytes is written on the spot; every step runs in a process of its
own, whose peak resident memory the system tells. `of_p` is that peak as a share of P, `added`
the same without what a process holds that has only loaded the libraries. The peer is
transformers: `from_pretrained`, and for the two conversions `save_pretrained` too. The floor is
the libraries alone where a step could stream, and P more where it must hold the model.

This module loads no numerical library at import: what a process holds counts as its children's.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.bench import Options
from mmqa_jax.bench.timing import Child, processor_name, run_child, threads
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.progress import Progress

ROWS = ("convert", "export", "load", "load_mesh")
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
_MESH_DEVICES = 8  # pretended ones, of one CPU
_SHARD_BYTES = 3 << 30  # so that the full size has two shards
_MIB = 1 << 20


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those asked for; size small unless full is asked for."""
    return measure(_SHAPES[options.size or "small"], options)


def measure(shape: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Measures with a LLaMA of the given fields of LlamaConfig; returns what `--json` prints.

    Raises:
      UserError: the disk has no room for the models.
    """
    wanted = options.chosen(ROWS)
    with (
        tempfile.TemporaryDirectory(prefix="mmqa-bench-") as name,
        Progress(
            "Measuring conversion", 3 + 2 * len(wanted) - ("convert" in wanted), "steps"
        ) as progress,
    ):
        folder = Path(name)
        steps = _Steps(folder, progress)
        made = json.loads(
            steps.python("make", folder / "published", json.dumps(dict(shape))).output
        )
        size = made["bytes"]
        free = shutil.disk_usage(folder).free
        if free < 3 * size:
            raise UserError(
                f"{folder}: {3 * size / 2**30:.1f} GiB are to be written there, the disk has "
                f"{free / 2**30:.1f} GiB left; set TMPDIR to a folder on another."
            )
        start = steps.python("start").peak_bytes
        converted = steps.convert("published", "converted")
        measured = {
            "convert": lambda: converted,
            "export": steps.export,
            "load": lambda: steps.load(1),
            "load_mesh": lambda: steps.load(_MESH_DEVICES),
        }
        rows = [_row(steps, name, measured[name](), size, start) for name in wanted]
    return {
        "bench": "convert",
        "device": f"{processor_name()}, {threads()} threads",
        "rows": rows,
        "parameters": made["parameters"],
        "parameter_mib": _mib(size),
        "libraries_mib": _mib(start),
    }


class _Steps:
    """Runs the steps as processes; folders are relative to one of them."""

    def __init__(self, folder: Path, progress: Progress):
        self._folder, self._progress = folder, progress

    def convert(self, source: str, out: str, *flags: str) -> Child:
        """`mmqa convert`, on CPU as always."""
        return self._run(
            ["-m", "mmqa_jax.cli", "convert", "--model=llama"],
            f"--source={self._folder / source}",
            f"--out={self._folder / out}",
            *flags,
        )

    def export(self) -> Child:
        """`mmqa convert --export=hf` of what was converted."""
        return self._cleared("exported", self.convert("converted", "exported", "--export=hf"))

    def load(self, devices: int) -> Child:
        """`load_converted`, spread over so many pretended devices."""
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        return self.python("load", self._folder / "converted", env=flags)

    def transformers(self, *, save: bool) -> Child:
        """transformers' own reading and, if asked for, writing."""
        arguments = [self._folder / "published"]
        if not save:
            return self.python("load_transformers", *arguments)
        child = self.python("load_transformers", *arguments, self._folder / "saved")
        return self._cleared("saved", child)

    def python(self, function: str, *arguments: Any, env: Mapping[str, str] | None = None) -> Child:
        """A function of this module, which gets strings."""
        call = f"import sys; from {__name__} import {function}; {function}(*sys.argv[1:])"
        return self._run(["-c", call], *map(str, arguments), env=env)

    def _run(
        self, program: Sequence[str], *arguments: str, env: Mapping[str, str] | None = None
    ) -> Child:
        cpu = {"JAX_PLATFORMS": "cpu", "MMQA_PROGRESS": "off", **(env or {})}
        child = run_child([sys.executable, *program, *arguments], cpu)
        self._progress.advance()
        return child

    def _cleared(self, folder: str, child: Child) -> Child:
        shutil.rmtree(self._folder / folder)
        return child


def _row(steps: _Steps, name: str, ours: Child, size: int, start: int) -> dict[str, Any]:
    loads = name.startswith("load")
    peer = steps.transformers(save=not loads)
    return {
        "name": name,
        "ours": _mib(ours.peak_bytes),
        "peer": _mib(peer.peak_bytes),
        "ratio": round(peer.peak_bytes / ours.peak_bytes, 2),
        "unit": "MiB",
        "floor": _mib(start + size if loads else start),
        "of_p": round(ours.peak_bytes / size, 2),
        "added": round((ours.peak_bytes - start) / size, 2),
        "peer_of_p": round(peer.peak_bytes / size, 2),
        "seconds": round(ours.seconds, 1),
        "peer_seconds": round(peer.seconds, 1),
    }


def _mib(size: int) -> int:
    return round(size / _MIB)


# What the processes run; each loads what it needs.


def make(folder: str, shape: str) -> None:
    """Writes a random LLaMA as transformers has it, one tensor at a time; prints its size.

    Args:
      folder: to write.
      shape: fields of LlamaConfig, as JSON.
    """
    import numpy as np
    from flax import nnx

    from mmqa_jax.models.llama import Llama
    from mmqa_jax.models.llama_config import LlamaConfig
    from mmqa_jax.weights.exports import publish_llama, write_published

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
    """Loads what `mmqa convert` loads, and nothing more."""
    import jax

    import mmqa_jax.weights.convert

    assert mmqa_jax.weights.convert
    jax.devices()


def load(folder: str) -> None:
    """Loads a converted model, its parameters split over all devices."""
    import jax
    from flax import nnx

    from mmqa_jax.core.mesh import make_mesh
    from mmqa_jax.weights.converted import load_converted

    model = load_converted(folder, mesh=make_mesh({"fsdp": -1}))
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
