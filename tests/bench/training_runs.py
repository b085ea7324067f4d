"""What the child processes of `python -m tests.bench train` run: `python -c` with a name and JSON arguments.

A VLP scores pairs of random tokens; its batches lie in memory, so that nothing but the step and
the loop around it takes time.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mmqa_jax.models.vlp.network import VLPConfig
    from mmqa_jax.tasks.vlp import RerankObjective

_SEED = 0
_WARM_STEPS = 8  # until the program is compiled and the pipeline of steps is full
_OPTIMIZER = {"name": "adamw", "learning_rate": 1e-3, "schedule": "constant", "warmup": 0.0}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model and its batch.

    Attributes:
      trunk: fields of BertConfig that differ from BERT-base's.
      rows, columns: pairs of a batch, and the tokens of a pair.
      batches: different ones, which are repeated.
    """

    trunk: Mapping[str, Any]
    rows: int
    columns: int
    batches: int = 4


class InMemory:
    """Repeats batches, as an iterator whose state can be saved.

    Attributes:
      times: when each batch was asked for, in seconds.
    """

    def __init__(self, batches: Sequence[Any]):
        self._batches, self._next = batches, 0
        self.times: list[float] = []

    def __next__(self) -> Any:
        self.times.append(time.perf_counter())
        self._next += 1
        return self._batches[(self._next - 1) % len(self._batches)]

    def get_state(self) -> dict[str, int]:
        """JSON values."""
        return {"next": self._next}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continues from a state."""
        self._next = state["next"]

    def seconds_per_step(self) -> float:
        """Mean time between two batches, the first ones left out."""
        times = self.times[_WARM_STEPS:]
        return (times[-1] - times[0]) / (len(times) - 1)


def vlp(sizes: Sizes) -> VLPConfig:
    """The model: text alone, no dropout."""
    from mmqa_jax.models.vlp.network import vlp_base_x101

    return vlp_base_x101(dropout=0.0, attention_dropout=0.0, **sizes.trunk)


def make_batches(sizes: Sizes, mesh: Mesh) -> list[dict[str, Any]]:
    """This process's rows of random batches, which are the same for any mesh."""
    from mmqa_jax.core.mesh import local_rows
    from mmqa_jax.models.vlp.network import VLPInputs

    config, rng = vlp(sizes), np.random.default_rng(_SEED)
    shape, of_host = (sizes.rows, sizes.columns), local_rows(mesh, sizes.rows)
    rows = slice(None) if of_host is None else list(of_host)

    def batch() -> dict[str, Any]:
        inputs = {
            "input_ids": rng.integers(2, config.bert.vocab_size, shape).astype(np.int32),
            "token_type_ids": np.full(shape, 4, np.int32),
            "position_ids": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
            "context_mask": np.ones(shape, bool),
            "answer_mask": np.zeros(shape, bool),
            "region_features": np.zeros((sizes.rows, 0, config.region_features), np.float32),
            "region_positions": np.zeros((sizes.rows, 0, config.region_positions), np.float32),
        }
        labels = rng.integers(0, 2, sizes.rows).astype(np.int32)
        return {
            "inputs": VLPInputs(**{name: array[rows] for name, array in inputs.items()}),
            "labels": labels[rows],
            "weights": np.ones(sizes.rows, np.float32)[rows],
        }

    return [batch() for _ in range(sizes.batches)]


def _task(sizes: Sizes) -> RerankObjective:
    from mmqa_jax.tasks.vlp import RerankObjective

    return RerankObjective(vlp(sizes))


def _config(steps: int, log_every: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "log_every": log_every,
        "checkpoint_every": 0,
        "optimizer": dict(_OPTIMIZER),
    }


def overhead(sizes: Sizes, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step in the loop (`ours`) and on its own (`peer`), a reading a round."""
    from mmqa_jax.core.mesh import make_mesh

    mesh = make_mesh()
    batches = make_batches(sizes, mesh)
    sides = {"ours": _in_the_loop, "peer": _alone}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            seconds[name].append(sides[name](sizes, batches, mesh, steps))
    return seconds


def _in_the_loop(sizes: Sizes, batches: list[Any], mesh: Mesh, steps: int) -> float:
    from mmqa_jax.training.loop import train

    feed = InMemory(batches)
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
        config = _config(_WARM_STEPS + steps, log_every=10)
        train(config, objective=_task(sizes), batches=feed, mesh=mesh, workdir=folder, seed=_SEED)
    return feed.seconds_per_step()


def _alone(sizes: Sizes, batches: list[Any], mesh: Mesh, steps: int) -> float:
    """The jitted step, with as many steps in flight as the loop has."""
    from mmqa_jax.core.mesh import DEFAULT_RULES, put_batch
    from mmqa_jax.core.typed import read_typed
    from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
    from mmqa_jax.training.state import abstract_state, initial_state, make_step, split_model

    task, feed = _task(sizes), InMemory(batches)
    optimizer, schedule = make_optimizer(
        read_typed(OptimizerOptions, dict(_OPTIMIZER), "train.optimizer"), steps
    )
    model = split_model(task, _SEED)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        task, model, optimizer, schedule, seed=_SEED, accumulate=1, abstract=abstract, mesh=mesh
    )
    state = initial_state(model, optimizer, _SEED, abstract)
    flying: collections.deque[Any] = collections.deque()
    most = 2 if mesh.devices.flat[0].platform == "cpu" else 8
    for _ in range(_WARM_STEPS + steps):
        state, values = step(state, put_batch(mesh, next(feed)))
        flying.append(values["loss"])
        if len(flying) > most:
            flying.popleft().block_until_ready()
    return feed.seconds_per_step()


def save(mib: int, rounds: int) -> dict[str, Any]:
    """Seconds that saving a state of that size takes out of the loop (`ours`) and in all (`peer`).

    `copy_floor`: of reading and writing that much memory once.
    """
    import jax
    import jax.numpy as jnp

    from mmqa_jax.core.checkpoints.checkpoint import Checkpoints
    from mmqa_jax.core.host import read_bandwidth

    piece = 32  # MiB of an array
    params = {
        f"layer{n}": jax.device_put(np.random.default_rng(n).random(piece << 18, np.float32))
        for n in range(mib // piece)
    }
    jax.block_until_ready(params)
    taken: dict[str, list[float]] = {"ours": [], "peer": []}
    with (
        tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder,
        Checkpoints(folder, fingerprint="bench", keep=1) as checkpoints,
    ):
        for number in range(rounds + 1):
            began = time.perf_counter()
            checkpoints.save(
                number + 1,
                params=params,
                train={"step": jnp.zeros((), jnp.int32)},
                iterator=InMemory([None]),
                meta={},
            )
            copied = time.perf_counter()
            checkpoints.wait()
            if number:  # the first starts Orbax's threads
                taken["ours"].append(copied - began)
                taken["peer"].append(time.perf_counter() - began)
    return {**taken, "copy_floor": 2 * (mib << 20) / read_bandwidth()}


def curve(sizes: Sizes, steps: int, folder: str) -> list[float]:
    """The losses of a run over all devices of all processes, in float32."""
    from mmqa_jax.core.mesh import make_mesh
    from mmqa_jax.core.metrics import read_metrics
    from mmqa_jax.training.loop import train

    mesh = make_mesh()
    feed = InMemory(make_batches(sizes, mesh))
    config = _config(steps, log_every=1)
    train(config, objective=_task(sizes), batches=feed, mesh=mesh, workdir=folder, seed=_SEED)
    return [row["loss"] for row in read_metrics(Path(folder))]


def device() -> dict[str, str]:
    """What jax computes on."""
    from mmqa_jax.core.host import device_name
    from mmqa_jax.core.mesh import platform

    return {"name": device_name(), "platform": platform()}


def median_share(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """By how much mine take longer, the median over the rounds."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True)) - 1


def main(name: str, arguments: str) -> None:
    """Runs one of the above; its result is the last line of stdout."""
    from mmqa_jax.core.hosts import distributed

    distributed.start()
    parsed = json.loads(arguments)
    if "sizes" in parsed:
        parsed["sizes"] = Sizes(**parsed["sizes"])
    work = {"overhead": overhead, "save": save, "curve": curve, "device": device}[name]
    print(json.dumps(work(**parsed)), file=sys.stdout, flush=True)
