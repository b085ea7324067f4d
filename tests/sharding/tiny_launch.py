"""Tiny training runs by one of several processes: python tiny_launch.py [WORKDIR OPTIONS]...

One run after another. OPTIONS is JSON:
  mesh    sizes of the mesh axes
  order   of the devices on the mesh; jax.make_mesh orders the chips of some slices in rings
  train   changes to config.train
  start   the workdir of a run whose weights this one starts from
  local   folder with a folder for each slice, which is its own disk; `slices` their numbers, by
          process
  ids     a file, to which each process (behind a dot its number) adds its rows' places in the
          global batch and their examples, batch by batch
  happen  {"what", "process", "batch"}: at that batch of that process of this attempt it gets the
          signal of that name, or `nan` spoils its rows, or `bug` is an exception
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from mmqa_jax.core.hosts import distributed

distributed.start()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "resume"))
import tiny_run  # noqa: E402

from mmqa_jax.core.errors import RunError, UserError  # noqa: E402
from mmqa_jax.core.mesh import local_rows, make_mesh  # noqa: E402
from mmqa_jax.data.batches.feed import FeedConfig, feed_batches  # noqa: E402
from mmqa_jax.data.batches.packing import Bucket  # noqa: E402
from mmqa_jax.weights.folder import load_weights  # noqa: E402


def batches(rows):
    """The rows of shuffled batches of the examples."""

    def sample(epoch):
        return {"example": np.arange(tiny_run.EXAMPLES), "bucket": np.zeros(tiny_run.EXAMPLES, int)}

    def make(planned, table):
        examples = [tiny_run.example(index) for index in table["example"]]
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}

    feed = FeedConfig(tiny_run.BATCH, seed=3, rows=rows)
    return feed_batches(sample, [Bucket(0, 8)], make, feed)


class Noted:
    """The batches, whose rows are written down: their places in the global batch, and examples."""

    def __init__(self, fed, file, rows):
        self._fed, self._file = fed, file
        self._places = list(range(tiny_run.BATCH)) if rows is None else list(rows)
        self.get_state, self.set_state = fed.get_state, fed.set_state

    def __next__(self):
        batch = next(self._fed)
        with self._file.open("a") as file:
            file.write(json.dumps([self._places, batch["index"].tolist()]) + "\n")
        return batch


def happening(what):
    """Something to happen at a batch."""
    if what == "bug":
        return lambda batch: batch["no such entry"]
    if what == "nan":
        return lambda batch: {**batch, "y": batch["y"] * np.float32("nan")}

    def send(_):
        os.kill(os.getpid(), signal.Signals[what])
        time.sleep(2)  # the other host hears of it before these tiny steps are all done

    return send


def loader(folder):
    """Puts the weights of a finished run into a model, each process reading all of them."""

    def load(model):
        named = nnx.eval_shape(lambda: nnx.state(tiny_run.MLP(jax.random.key(0)), nnx.Param))
        nnx.update(model, load_weights(folder, named))

    return load if folder else None


def run(workdir, options):
    """One run; the process ends if it fails."""
    devices = jax.devices()
    devices = [devices[place] for place in options.get("order", range(len(devices)))]
    mesh = make_mesh(options.get("mesh"), devices=devices)
    rows = local_rows(mesh, tiny_run.BATCH)
    fed = batches(rows)
    if "local" in options:
        disk = Path(options["local"]) / str(options["slices"][jax.process_index()])
        os.environ["MMQA_LOCAL_CHECKPOINTS"] = str(disk)
    if "ids" in options:
        fed = Noted(fed, Path(f"{options['ids']}.{jax.process_index()}"), rows)
    happen = options.get("happen")
    if happen and happen["process"] == jax.process_index():
        fed = tiny_run.Watched(fed, happen["batch"], happening(happen["what"]))
    try:
        with distributed.fail_together():
            start = loader(options.get("start"))
            changes = options.get("train", {})
            tiny_run.run(workdir, fed, mesh=mesh, load_pretrained=start, **changes)
    except (UserError, RunError) as error:
        print(error)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    for place, given in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run(Path(place), json.loads(given))
