"""A tiny training run in its own process, to be killed and started again.

python tiny_run.py WORKDIR at_batch N    kill -9 at the N-th batch of this attempt
python tiny_run.py WORKDIR in_save STEP  kill -9 while checkpoint STEP is written
python tiny_run.py WORKDIR on_mesh 0     run to the end on four (fake) devices

With the best step kept (KEEP_BEST):
python tiny_run.py WORKDIR to_end 0          run to the end
and kill -9:
python tiny_run.py WORKDIR in_evaluation N   at the N-th evaluation of this attempt
python tiny_run.py WORKDIR before_best N     before the N-th writing of best/, its checkpoint saved
python tiny_run.py WORKDIR between_renames N while the N-th writing of best/ replaces an older one
python tiny_run.py WORKDIR random N SECONDS  so many seconds after the N-th batch, wherever it is then

Behind them: what changes in config.train, as JSON.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.checkpoints.checkpoint import Checkpoints
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.paths import as_path
from mmqa_jax.training import best_weights
from mmqa_jax.training.loop import Observed, Resuming, train
from mmqa_jax.training.state import Validation
from mmqa_jax.weights import folder
from tests import object_store

FEATURES, HIDDEN, BATCH, EXAMPLES = 5, 16, 8, 96


def train_config(**changes):
    """config.train of the tiny run."""
    config = {
        "steps": 60,
        "log_every": 4,  # does not divide checkpoint_every: a log window spans checkpoints
        "checkpoint_every": 10,
        "evaluate_every": 15,
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "warmup": 0.1, "clip_norm": 1.0},
    }
    config.update(changes)
    return ConfigDict(config)


def example(index):
    """Example `index` of a fixed nonlinear regression."""
    rng = np.random.default_rng(index)
    x = rng.normal(size=FEATURES).astype(np.float32)
    return {"index": np.int32(index), "x": x, "y": np.float32(np.sin(x).sum())}


def pipeline(shapes=2, rows=BATCH):
    """Shuffled, repeated batches that alternate between two static shapes (buckets).

    With one shape a run has one program less; its numbers are the same.
    """
    return iter(
        grain.MapDataset.range(EXAMPLES)
        .seed(3)
        .shuffle()
        .repeat()
        .map(example)
        .batch(rows)
        .map_with_index(
            lambda i, batch: {**batch, "x": np.pad(batch["x"], ((0, 0), (0, 3 * (i % shapes))))}
        )
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16))
    )


def param(value, *names):
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


class Linear(nnx.Module):
    def __init__(self, key, inputs, outputs, *names):
        self.kernel = param(jax.random.normal(key, (inputs, outputs)) / inputs**0.5, *names)
        self.bias = param(jnp.zeros(outputs), names[1])

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...]


class MLP(nnx.Module):
    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first = Linear(one, FEATURES, HIDDEN, "embed", "mlp")
        self.second = Linear(two, HIDDEN, 1, "mlp", None)

    def __call__(self, x, key=None):
        hidden = jax.nn.relu(self.first(x[:, :FEATURES]))
        if key is not None:
            hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape) / 0.9
        return self.second(hidden)[:, 0]


class Regression:
    """Counts its traces: one per batch shape is what the loop may cost."""

    traces = 0

    def init(self, key):
        return MLP(key)

    def loss(self, model, batch, dropout_key):
        self.traces += 1
        error = model(batch["x"], dropout_key) - batch["y"]
        return jnp.mean(error**2), {"absolute": jnp.mean(jnp.abs(error)), "one": jnp.ones(())}


REGRESSION = Regression()  # of all runs that need none of their own
_mean = nnx.jit(lambda model, x: model(x).mean())


def evaluate(model):
    x = np.stack([example(1000 + i)["x"] for i in range(16)])
    return {"mean": _mean(model, x)}


# The mean rises to step 30 and falls after it: the best step is not the last.
KEEP_BEST = Validation(evaluate, "mean")


class Watched:
    """The pipeline's iterator, that lets something happen at the n-th batch of this attempt.

    Attributes:
      count: of the batches that were read.
    """

    def __init__(self, batches, at, happen):
        self._batches, self._at, self._happen, self.count = batches, at, happen, 0
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self):
        batch = next(self._batches)
        self.count += 1
        return (self._happen(batch) or batch) if self.count == self._at else batch


def raise_signal(number):
    """Something to happen: the process gets this signal."""
    return lambda batch: os.kill(os.getpid(), number)


def run(
    workdir, batches, task=None, metadata=None, mesh=None, load_pretrained=None,
    validation=None, observed=None, resuming=None, limits=(), **changes,
):  # fmt: skip
    """One attempt at the tiny run, on one device unless a mesh is given."""
    return train(
        train_config(**changes),
        objective=task or REGRESSION,
        batches=batches,
        mesh=mesh or make_mesh(devices=jax.devices()[:1]),
        workdir=workdir,
        seed=7,
        validation=validation or Validation(evaluate),
        metadata=metadata,
        limits=limits,
        load_pretrained=load_pretrained,
        observed=observed or Observed(),
        resuming=resuming or Resuming(),
    )


def main():
    object_store.install()
    workdir, when, step, *more = sys.argv[1:]
    step, delay = int(step), float(more.pop(0)) if when == "random" else 0.0
    validation, batches, mesh = None, pipeline(), None
    if when in ("to_end", "in_evaluation", "before_best", "between_renames", "random"):
        validation = KEEP_BEST
    if when == "on_mesh":
        mesh = make_mesh({"data": 2, "tensor": 2})
    elif when == "in_evaluation":
        validation = Validation(killed_at(step, evaluate), "mean")
    elif when == "before_best":
        best_weights.replace_trained = killed_at(step, best_weights.replace_trained)
    elif when == "between_renames":
        folder.Path.rename = killed_at(2 * step, folder.Path.rename)  # two for every writing
    elif when == "in_save":
        Checkpoints.save = killed_during(step, Checkpoints.save, workdir)
    elif when == "at_batch":
        batches = Watched(batches, step, raise_signal(signal.SIGKILL))
    elif when == "random":
        batches = Watched(batches, step, kill_after(delay))
    changes = json.loads(more[0]) if more else {}
    params = run(workdir, batches, mesh=mesh, validation=validation, **changes)
    if mesh is not None:
        print(params["first"]["kernel"][...].sharding.spec)


def kill_after(delay):
    """Something to happen: kill -9 that many seconds later, wherever the run is then."""

    def wait():
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    return lambda batch: threading.Thread(target=wait, daemon=True).start()


def killed_at(number, function):
    """The function; its call of that number kills the process instead."""
    calls = itertools.count(1)

    def call(*arguments, **named):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return call


def killed_during(step, save, workdir):
    """`Checkpoints.save`; that of the step kills the process once its folder begins to appear."""
    folder = as_path(workdir) / "checkpoints"

    def kill():
        while not any(folder.glob(f"{step}*")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    def call(self, number, **named):
        if number == step:
            # Not before: a store would do nothing but answer whether it is there.
            threading.Thread(target=kill, daemon=True).start()
        return save(self, number, **named)

    return call


if __name__ == "__main__":
    main()
