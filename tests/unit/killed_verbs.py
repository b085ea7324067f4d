"""A verb that kills itself (kill -9) at a given moment; see test_inference_killed.py.

python killed_verbs.py KILL_AT VERB...    run in a fork (tests/forks.py)

The moments of a verb are just before and just after each call that changes what is on disk. One that
lives on prints what it wrote to stderr.
"""

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator

from tests import object_store

# Where the verbs import late what takes long; bm25s is left out, which starts JAX's backend.
_CHANGING = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


class Moments:
    """Counts the moments of a verb that runs while they are `watched`.

    Args:
      kill_at: the number of the one at which this process is killed; -1: it lives on.

    Attributes:
      count: of those that have been.
    """

    def __init__(self, kill_at: int = -1):
        self._kill_at, self.count = kill_at, 0

    def _pass(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _around(self, function):
        def call(*arguments, **named):
            self._pass()
            result = function(*arguments, **named)
            self._pass()
            return result

        return call

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        from mmqa_jax.prompting.backends.cache import ResponseCache

        places = [*((os, name) for name in _CHANGING), (ResponseCache, "put")]
        before = [getattr(owner, name) for owner, name in places]
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, self._around(function))
        try:
            yield
        finally:
            for (owner, name), function in zip(places, before, strict=True):
                setattr(owner, name, function)


def main() -> None:
    kill_at, argv = int(sys.argv[1]), sys.argv[2:]
    object_store.install()
    signal.alarm(600)
    code, err = 1, io.StringIO()
    try:
        from mmqa_jax import cli

        with (
            Moments(kill_at).watched(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(err),
        ):
            code = cli.main(argv)
    except BaseException:
        err.write(traceback.format_exc())
    print(err.getvalue(), flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
