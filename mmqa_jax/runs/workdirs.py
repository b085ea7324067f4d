"""What a workdir holds, as far as `mmqa report` and `mmqa status` have to know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.files import read_json
from mmqa_jax.core.metrics import METRICS
from mmqa_jax.core.workdir import read_config
from mmqa_jax.training.attempts import FILE

Kind = Literal["training", "row", "demo", "sweep", "trainings", "rows", ""]
SWEEP = "sweep.json"  # of `mmqa sweep`, in its workdir
_DEPTH = 3  # how deep rows lie in a folder of several: DATASET/ROW, or a demo's rows/ROW


def kind_of(folder: Path) -> Kind:
    """What the workdir is of; "": nothing known.

    `sweep` is one over rows, `trainings` one over trainings, and `rows` a folder with finished rows
    below it.
    """
    if (folder / FILE).is_file() or (folder / METRICS).is_file():
        return "training"
    if (folder / "config.json").is_file():
        config = read_config(folder)
        if "row" in config:
            return "row"
        return "demo" if "contrastive" in config and "evaluate" in config else ""
    if (folder / SWEEP).is_file():
        content = read_json(folder / SWEEP)
        return "trainings" if isinstance(content, Mapping) and "task" in content else "sweep"
    return "rows" if finished_rows(folder) else ""


def finished_rows(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Path of a finished row below `folder`, relative to it -> its scores.json."""
    found = {}
    for depth in range(1, _DEPTH + 1):
        for file in sorted(folder.glob("/".join(["*"] * depth) + "/scores.json")):
            scores = read_json(file)
            if isinstance(scores, Mapping) and {"row", "dataset", "scores"} <= scores.keys():
                found[file.parent.relative_to(folder).as_posix()] = scores
    return found
