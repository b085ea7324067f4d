"""A job in chunks whose rows are squares, for tests and for processes that share it.

python squares_job.py FOLDER I N KILL_AT    shard I of N; kills itself at that chunk (-1: never, -2:
never, and each chunk waits for a character of stdin)
"""

import os
import signal
import sys
from pathlib import Path

from mmqa_jax.core.chunks import WHOLE, Job, Part, Shard

WHAT = {"verb": "test", "model": "m1"}


def square(chunk: range) -> Part:
    return Part([{"item": n, "square": n * n} for n in chunk], {"sum": sum(chunk)})


def job(folder: Path, shard: Shard = WHOLE, **changes) -> Job:
    values = {"chunk": 5, "items": 23} | {
        k: changes.pop(k) for k in ("chunk", "items") if k in changes
    }
    return Job(folder, {**WHAT, **changes}, values["items"], chunk=values["chunk"], shard=shard)


def run(folder: Path, shard: Shard = WHOLE, compute=square, **changes):
    """The rows, or None; the job is marked as done."""
    with job(folder, shard, **changes) as one:
        one.run(lambda: compute)
        rows = one.rows()
        if rows is not None:
            one.done()
        return rows


def main() -> None:
    index, count, kill_at = map(int, sys.argv[2:])

    def compute(chunk: range) -> Part:
        print(chunk.start // 5, flush=True)
        if chunk.start // 5 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if kill_at == -2:
            sys.stdin.read(1)  # stays at work
        return square(chunk)

    rows = run(Path(sys.argv[1]), Shard(index, count), compute)
    print("waits" if rows is None else "done")


if __name__ == "__main__":
    main()
