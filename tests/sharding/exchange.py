"""Two processes that tell each other things outside jit: python exchange.py FOLDER

Each has a folder of its own besides. Prints JSON: what every exchange gave this process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.hosts import distributed


def refused(function, *arguments):
    """The message with which a function refuses its arguments, or None."""
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return None


def main():
    from jax._src import xla_bridge

    distributed.start()
    me, folder = distributed.process_index(), Path(sys.argv[1])
    found = {"gathered": [distributed.gather("name", [me, turn]) for turn in range(2)]}
    found["proxies"] = [os.environ[name] for name in ("http_proxy", "HTTPS_PROXY")]

    same = {"train": {"steps": 5}, "seed": 1}
    found["same"] = refused(distributed.check_same_run, same, {})
    versions = distributed._versions()
    distributed._versions = lambda: versions | ({"jax": "0.0.1"} if me else {})
    differing = {"train": {"steps": 5 + me}, "seed": 1}
    found["differing"] = refused(distributed.check_same_run, differing, {"--workdir": "w"})

    own = folder / f"host{me}"
    own.mkdir()
    found["shared"] = refused(distributed.check_shared_folder, folder)
    found["not_shared"] = refused(distributed.check_shared_folder, own)
    found["unwritable"] = refused(
        distributed.check_shared_folder, folder if me == 0 else folder / "absent"
    )
    distributed.barrier("the marks are removed")
    found["left"] = sorted(path.name for path in folder.glob("**/.*"))
    assert not xla_bridge.backends_are_initialized()  # versions are compared before devices are
    try:
        with distributed.fail_together():
            if me == 1:
                raise RunError("the picture p.jpg cannot be read.")
            distributed.barrier("all have read")
    except RunError as error:
        found["failed"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
