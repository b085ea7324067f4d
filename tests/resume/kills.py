"""A tiny run that is killed again and again: python kills.py WORKDIR SEED KILLS STEPS

Every attempt is a fork of this process, which has imported all but started no JAX backend. It gets
kill -9 at a random moment after a random batch; the attempt after the last kill runs to the end.
Prints {"kills": how many attempts died, "from": the checkpoint that each resumed from}.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import tiny_run

SETTINGS = {"log_every": 4, "checkpoint_every": 3, "evaluate_every": 15}


def attempt(workdir, steps, batch=None, delay=0.0):
    """Runs, in a fork; returns its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    batches = tiny_run.pipeline()
    if batch is not None:
        batches = tiny_run.Watched(batches, batch, kill_after(delay))
    tiny_run.run(workdir, batches, steps=steps, validation=tiny_run.KEEP_BEST, **SETTINGS)
    os._exit(0)


def kill_after(delay):
    """Something to happen: kill -9 that many seconds later, wherever the run is then."""

    def wait():
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    return lambda batch: threading.Thread(target=wait, daemon=True).start()


def newest(workdir):
    """The latest complete checkpoint, 0 without one."""
    names = [folder.name for folder in Path(workdir, "checkpoints").glob("*")]
    return max([0, *(int(name) for name in names if name.isdigit())])


def main():
    workdir, seed, kills, steps = sys.argv[1], *map(int, sys.argv[2:])
    chance, died, origins = random.Random(seed), 0, []
    while died < kills:
        origins.append(newest(workdir))
        status = attempt(workdir, steps, chance.randint(1, 12), chance.uniform(0, 0.25))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break  # it was done before it could be killed
        assert os.WTERMSIG(status) == signal.SIGKILL
        died += 1
    assert attempt(workdir, steps) == 0
    print(json.dumps({"kills": died, "from": origins}))


if __name__ == "__main__":
    main()
