"""The question-answering benchmarks by name: the reader of each one's official files."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmqa_jax.data.datasets.benchmark import Benchmark
    from mmqa_jax.data.schema import Material


@dataclasses.dataclass(frozen=True)
class Reader:
    """How one benchmark's official files are read.

    Its module is imported where it is used, because the command line needs the names alone.

    Attributes:
      module: beside this one; it has `read_MODULE` and MATERIALS.
      takes_file: whether `mmqa prepare --raw` may be a file: that of one pool of candidates.
    """

    module: str
    takes_file: bool = False

    def read(self, path: Path) -> Benchmark:
        """Reads the official files.

        Args:
          path: their folder; of A-OKVQA, ScienceQA, MMBench and SEED-Bench also a single file of
            them that holds whole questions.
        """
        return getattr(self._imported, f"read_{self.module}")(path)

    @property
    def materials(self) -> tuple[Material, ...]:
        """What the benchmark is made of, for the credits of every corpus that is made of it."""
        return self._imported.MATERIALS

    @property
    def _imported(self) -> Any:
        return importlib.import_module(f"mmqa_jax.data.datasets.{self.module}")


READERS: dict[str, Reader] = {
    "vqav2": Reader("vqav2"),
    "okvqa": Reader("okvqa"),
    "aokvqa": Reader("aokvqa"),
    "scienceqa": Reader("scienceqa"),
    "mmbench": Reader("mmbench"),
    "seedbench": Reader("seed_bench"),
    "multimodalqa": Reader("multimodalqa"),
    "infoseek": Reader("infoseek"),
    "evqa": Reader("evqa"),
    "mbeir": Reader("mbeir", takes_file=True),
    "vidore": Reader("vidore"),
    "mmmu": Reader("mmmu"),
    "mragbench": Reader("mragbench"),
    "mathvista": Reader("mathvista"),
}
