"""The question-answering benchmarks by name: the reader of each one's official files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmqa_jax.data.datasets.aokvqa import read_aokvqa
from mmqa_jax.data.datasets.benchmark import Benchmark
from mmqa_jax.data.datasets.evqa import read_evqa
from mmqa_jax.data.datasets.infoseek import read_infoseek
from mmqa_jax.data.datasets.mathvista import read_mathvista
from mmqa_jax.data.datasets.mbeir import read_mbeir
from mmqa_jax.data.datasets.mmbench import read_mmbench
from mmqa_jax.data.datasets.mmmu import read_mmmu
from mmqa_jax.data.datasets.mragbench import read_mragbench
from mmqa_jax.data.datasets.multimodalqa import read_multimodalqa
from mmqa_jax.data.datasets.okvqa import read_okvqa
from mmqa_jax.data.datasets.scienceqa import read_scienceqa
from mmqa_jax.data.datasets.seed_bench import read_seed_bench
from mmqa_jax.data.datasets.vidore import read_vidore
from mmqa_jax.data.datasets.vqav2 import read_vqav2

# Each takes the folder of official files; those of A-OKVQA, ScienceQA, MMBench and SEED-Bench also
# a single file of them that holds whole questions, of M-BEIR one that holds a pool of candidates.
READERS: dict[str, Callable[[Path], Benchmark]] = {
    "vqav2": read_vqav2,
    "okvqa": read_okvqa,
    "aokvqa": read_aokvqa,
    "scienceqa": read_scienceqa,
    "mmbench": read_mmbench,
    "seedbench": read_seed_bench,
    "multimodalqa": read_multimodalqa,
    "infoseek": read_infoseek,
    "evqa": read_evqa,
    "mbeir": read_mbeir,
    "vidore": read_vidore,
    "mmmu": read_mmmu,
    "mragbench": read_mragbench,
    "mathvista": read_mathvista,
}
# Those of which `--raw` may be a file.
POOLS = ("mbeir",)
