"""A verb that kills itself (kill -9) at a given moment; see test_inference_killed.py.

python killed_verbs.py KILL_AT VERB...    run in a fork (tests/forks.py)

The moments of a verb are just before and just after each call that changes what is on disk. One that
lives on prints, as a last line of JSON, its moments and what it wrote to stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import traceback

from tests import object_store

# Where the verbs import late what takes long; bm25s is left out, which starts JAX's backend.
IMPORTED = (
    "tests.object_store",
    *("mmqa_jax.runs.run", "mmqa_jax.runs.indexing", "mmqa_jax.tasks.opening"),
    *("mmqa_jax.runs.captioning", "mmqa_jax.runs.candidates"),
    *("mmqa_jax.prompting.run", "mmqa_jax.prompting.backend_engine"),
    *("mmqa_jax.prompting.local_model", "mmqa_jax.retrieval.index", "mmqa_jax.evaluation.fluency"),
)
_CHANGING = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


def main() -> None:
    kill_at, argv = int(sys.argv[1]), sys.argv[2:]
    object_store.install()
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
    print("\n" + json.dumps({"moments": moments, "err": err.getvalue()}), flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
