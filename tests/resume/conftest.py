"""What the tests of resumed runs share."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.training import loop
from mmqa_jax.training.state import Validation
from tests.fake_devices import fake_devices
from tests.forks import server

_TINY_RUN = str(Path(__file__).with_name("tiny_run.py"))


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    said: str


@pytest.fixture(scope="module", autouse=True)
def _quiet(cli_cache):
    """No progress lines, and one compile cache for all attempts, as real runs have."""
    cache = str(cli_cache / "xla")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_PROGRESS", "off")
        for name, value in zip(names, (cache, 0), strict=True):
            patch.setenv(name.upper(), str(value))  # of the processes to be killed
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def _made_once_a_file():
    """Runs of one task with equal optimizers share their step, and what they start from: neither is
    traced again by each attempt of a file. Forks trace their own."""
    make_step, start, steps, starts = loop.make_step, loop.initial_state, {}, {}

    def made_step(objective, model, optimizer, schedule, **options):
        held = model.precision, model.ema, model.offload
        key = objective, optimizer, held, *(v for n, v in options.items() if n != "abstract")
        if key not in steps:
            steps[key] = make_step(objective, model, optimizer, schedule, **options)
        return steps[key]

    def made_start(model, optimizer, seed, abstract):
        key = model.graphdef, optimizer, seed, model.precision, model.ema
        if key not in starts:
            starts[key] = jax.device_get(start(model, optimizer, seed, abstract))
        return jax.device_put(starts[key], jax.tree.map(lambda leaf: leaf.sharding, abstract))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_optimizer", functools.cache(loop.make_optimizer))
        patch.setattr(loop, "make_step", made_step)
        patch.setattr(loop, "initial_state", made_start)
        yield


@pytest.fixture(scope="session")
def attempt(cli_cache) -> Callable[..., Ended]:
    """Runs tiny_run.py with its arguments in a process of its own."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(cli_cache / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(*arguments: object, devices: int = 1) -> Ended:
        fork = server().start(
            [_TINY_RUN, *map(str, arguments)],
            os.environ | fake_devices(devices) | kept | {"MMQA_PROGRESS": "off"},
        )
        said, _ = fork.communicate()
        return Ended(fork.returncode, said)

    return run


@pytest.fixture(scope="session")
def killed_run(attempt) -> Callable[..., None]:
    """One attempt in a process of its own, which kill -9 ends."""

    def run(*arguments: object) -> None:
        ended = attempt(*arguments)
        assert ended.code == -signal.SIGKILL, ended.said

    return run


class Judged(NamedTuple):
    """An uninterrupted run, and the parameters that its validation saw: step -> name -> array."""

    workdir: Path
    seen: dict[int, dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def judged(made_once) -> Judged:
    """A tiny run that keeps its best step, which is 30 of 60. Tests that write take a copy."""
    folder = made_once("judged", _judge)
    steps = (15, 30, 45, 60)
    return Judged(folder / "run", {n: dict(np.load(folder / f"seen{n}.npz")) for n in steps})


@pytest.fixture(scope="session")
def uninterrupted(judged) -> Path:
    """Its workdir."""
    return judged.workdir


def _judge(folder: Path) -> None:
    import tiny_run

    steps, task = iter((15, 30, 45, 60)), tiny_run.Regression()

    def evaluate(model):
        named = flatten_named(nnx.state(model, nnx.Param))
        np.savez(folder / f"seen{next(steps)}.npz", **{k: np.array(v) for k, v in named.items()})
        return tiny_run.evaluate(model)

    validation = Validation(evaluate, "mean")
    tiny_run.run(folder / "run", tiny_run.pipeline(), task=task, validation=validation)
    assert task.traces == 2  # two batch shapes, 60 steps
