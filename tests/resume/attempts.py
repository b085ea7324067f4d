"""Runs attempts of tiny_run.py, each in a fork of this process.

It has imported all that they need and started no JAX backend, which spares most of a start. Lines of
JSON: {"arguments": [...], "environment": {...}} in, {"code": ..., "err": ...} out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

import tiny_run


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                _attempt(asked["arguments"], asked["environment"], said)
            _, status = os.waitpid(child, 0)
            said.seek(0)
            ended = {"code": os.waitstatus_to_exitcode(status), "err": said.read()}
        print(json.dumps(ended), flush=True)


def _attempt(arguments: list[str], environment: dict[str, str], said) -> None:
    """In the child: never returns."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    sys.argv[1:], code = arguments, 0
    try:
        tiny_run.main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
