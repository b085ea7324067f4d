"""The question-answering benchmarks by name: the reader of each one's official files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from mmqa_jax.data.datasets import (
    aokvqa,
    evqa,
    infoseek,
    mathvista,
    mbeir,
    mmbench,
    mmmu,
    mragbench,
    multimodalqa,
    okvqa,
    scienceqa,
    seed_bench,
    vidore,
    vqav2,
)
from mmqa_jax.data.datasets.benchmark import Benchmark
from mmqa_jax.data.schema import Material


@dataclasses.dataclass(frozen=True)
class Reader:
    """How one benchmark's official files are read.

    Attributes:
      read: the folder of official files -> the benchmark; of A-OKVQA, ScienceQA, MMBench and
        SEED-Bench also a single file of them that holds whole questions.
      materials: what it is made of, for the credits of every corpus that is made of it.
      takes_file: whether `mmqa prepare --raw` may be a file: that of one pool of candidates.
    """

    read: Callable[[Path], Benchmark]
    materials: tuple[Material, ...]
    takes_file: bool = False


READERS: dict[str, Reader] = {
    "vqav2": Reader(vqav2.read_vqav2, vqav2.MATERIALS),
    "okvqa": Reader(okvqa.read_okvqa, okvqa.MATERIALS),
    "aokvqa": Reader(aokvqa.read_aokvqa, aokvqa.MATERIALS),
    "scienceqa": Reader(scienceqa.read_scienceqa, scienceqa.MATERIALS),
    "mmbench": Reader(mmbench.read_mmbench, mmbench.MATERIALS),
    "seedbench": Reader(seed_bench.read_seed_bench, seed_bench.MATERIALS),
    "multimodalqa": Reader(multimodalqa.read_multimodalqa, multimodalqa.MATERIALS),
    "infoseek": Reader(infoseek.read_infoseek, infoseek.MATERIALS),
    "evqa": Reader(evqa.read_evqa, evqa.MATERIALS),
    "mbeir": Reader(mbeir.read_mbeir, mbeir.MATERIALS, takes_file=True),
    "vidore": Reader(vidore.read_vidore, vidore.MATERIALS),
    "mmmu": Reader(mmmu.read_mmmu, mmmu.MATERIALS),
    "mragbench": Reader(mragbench.read_mragbench, mragbench.MATERIALS),
    "mathvista": Reader(mathvista.read_mathvista, mathvista.MATERIALS),
}
