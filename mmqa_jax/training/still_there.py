"""A workdir that is deleted or moved while its run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import jax

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.metrics import METRICS
from mmqa_jax.core.paths import in_store
from mmqa_jax.weights.folder import RUN_FILES

_NAMES = ("config.json", METRICS, *RUN_FILES)


class StillThere:
    """Tells whether the files that a run began with are still in its workdir; on process 0.

    Nearly all that a run writes makes the folder anew, and a run that went on would end without
    the files that it wrote at its start. As a context manager it also explains the errors of what
    fails since the folder is gone.

    Args:
      folder: the workdir; the run's first files are in it when the context is entered.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: list[Path] = []

    def __enter__(self) -> Self:
        names = _NAMES if jax.process_index() == 0 else ()
        self._files = [file for name in names if (file := self._folder / name).exists()]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            self.check()

    def check(self, *, often: bool = False) -> None:
        """Call it before anything is written.

        Args:
          often: called so often that objects in a store are not asked for.

        Raises:
          RunError: a file is gone.
        """
        if often and in_store(self._folder):
            return
        gone = next((file for file in self._files if not file.exists()), None)
        if gone is not None:
            raise RunError(
                f"{gone}: is gone, deleted or moved while the run went on, which ends here; put "
                "the workdir back and start the same command again, or train anew."
            )
