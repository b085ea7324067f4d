"""Starts verbs that kill themselves (kill -9) at a given moment; see test_inference_killed.py.

One process imports what the verbs need and forks one child a start, which spares most of the time
of a start. Lines of JSON: {"argv": [...], "kill_at": N} in, {"signal", "code", "moments", "err"}
out. The moments of a verb are just before and just after each call that changes what is on disk.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import traceback

import object_store

# Where the verbs import late what takes long; bm25s is left out, which starts JAX's backend.
_NEEDED = (
    *("mmqa_jax.runs.run", "mmqa_jax.runs.indexing", "mmqa_jax.tasks.opening"),
    *("mmqa_jax.runs.captioning", "mmqa_jax.runs.candidates"),
    *("mmqa_jax.prompting.run", "mmqa_jax.prompting.backend_engine"),
    *("mmqa_jax.prompting.local_model", "mmqa_jax.retrieval.index", "mmqa_jax.evaluation.fluency"),
)
_CHANGING = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


def main() -> None:
    object_store.install()
    for name in _NEEDED:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                _start(asked["argv"], asked["kill_at"], said)
            _, status = os.waitpid(child, 0)
            said.seek(0)
            moments, _, err = said.read().partition("\n")
        ended = {
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "code": os.waitstatus_to_exitcode(status),
            "moments": int(moments or 0),
            "err": err,
        }
        print(json.dumps(ended), flush=True)


def _start(argv: list[str], kill_at: int, said) -> None:
    """In the child: runs the verb; never returns."""
    signal.alarm(600)
    moments = 0

    def moment() -> None:
        nonlocal moments
        moments += 1
        if moments == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(function):
        def call(*arguments, **named):
            moment()
            result = function(*arguments, **named)
            moment()
            return result

        return call

    for name in _CHANGING:
        setattr(os, name, watched(getattr(os, name)))
    code, err = 1, io.StringIO()
    try:
        from mmqa_jax import cli
        from mmqa_jax.prompting.cache import ResponseCache

        ResponseCache.put = watched(ResponseCache.put)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = cli.main(argv)
    except BaseException:
        err.write(traceback.format_exc())
    said.write(f"{moments}\n{err.getvalue()}")
    said.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
