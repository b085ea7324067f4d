"""The files of a run's checkpoints: their checksums, and what becomes of damaged ones.

A checkpoint gets its SHA256SUMS from process 0, when the files of all processes are there and
before it is committed. Whoever opens the checkpoints reads the newest whole, each process its share
of the files, and of the others the scores, by which Orbax knows the best one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import jax

from mmqa_jax.core import distributed
from mmqa_jax.core.checksums import files_below, find_damage, write_sums
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.paths import filesystem, in_store, listing, named_errors, remove_tree
from mmqa_jax.core.progress import announce

_UNCOMMITTED = ".orbax-checkpoint-tmp"  # behind the name of a folder that Orbax has not committed
_WRITTEN_LATER = ("_CHECKPOINT_METADATA",)  # gets the time of the commit; no result depends on it
_SCORE = "metrics/metrics"
_DAMAGED = "damaged"


def write_step_sums(folder: Path, step: int) -> None:
    """Writes the checksums of a checkpoint whose files are all there, before it is committed.

    Args:
      folder: of all checkpoints.
    """
    begun = folder / str(step)
    if not in_store(folder):  # a store cannot rename: its objects have their names from the start
        begun = begun.with_name(begun.name + _UNCOMMITTED)
    write_sums(begun, [name for name in files_below(begun) if name not in _WRITTEN_LATER])


def find_damage_together(folder: Path, names: Collection[str] | None = None) -> str | None:
    """`find_damage` of a folder that all processes see; all call it and share the reading."""
    part = (jax.process_index(), jax.process_count())
    problems = distributed.gather("checksums", find_damage(folder, names, part=part))
    return next((problem for problem in problems if problem is not None), None)


def check_steps(folder: Path, *, skip_damaged: bool) -> None:
    """Checks the committed checkpoints; all processes call it.

    Args:
      folder: of all checkpoints, without uncommitted ones.
      skip_damaged: sets damaged ones aside, as STEP.damaged, if an earlier one is whole.

    Raises:
      UserError: a damaged one, with its file and what to do.
    """
    while steps := distributed.gather("checkpoints", steps_in(folder))[0]:
        newest = steps[-1]
        read = {step: None if step == newest else [_SCORE] for step in reversed(steps)}
        step, problem = _first_damage(folder, read)
        if problem is None:
            return
        place = folder / str(step)
        others = [one for one in reversed(steps) if one < newest] if step == newest else [newest]
        if (kept := _first_whole(folder, others)) is None:
            raise UserError(
                f"{place}: {problem}, and no earlier checkpoint is whole; copy that folder again, "
                f"or delete {folder} to train from the start."
            )
        if not skip_damaged:
            raise UserError(
                f"{place}: {problem}; checkpoint {kept} is whole: add --skip_damaged to set this "
                f"one aside (as {place.name}.{_DAMAGED}) and go on from {kept}."
            )
        if jax.process_index() == 0:
            aside = _set_aside(place)
            announce(f"{place}: {problem}; set aside as {aside.name}, going on from step {kept}.")
        distributed.barrier("a damaged checkpoint is set aside")


def _first_damage(
    folder: Path, read: Mapping[int, Collection[str] | None]
) -> tuple[int, str] | tuple[None, None]:
    """The first of the steps whose files, those to be read of it, are damaged, and what is."""
    for step, names in read.items():
        if (problem := find_damage_together(folder / str(step), names)) is not None:
            return step, problem
    return None, None


def _first_whole(folder: Path, steps: Iterable[int]) -> int | None:
    damage = ((step, find_damage_together(folder / str(step))) for step in steps)
    return next((step for step, problem in damage if problem is None), None)


def steps_in(folder: Path) -> list[int]:
    """The steps whose folders stand there, in order; neither unfinished nor damaged ones."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isdecimal())


def _set_aside(place: Path) -> Path:
    aside, number = place.with_name(f"{place.name}.{_DAMAGED}"), 1
    while aside.exists():
        number += 1
        aside = place.with_name(f"{place.name}.{_DAMAGED}{number}")
    if not in_store(place):
        place.rename(aside)
        return aside
    name = os.fspath(place)
    with named_errors(name, RunError):
        for key in listing(name):
            filesystem(name).cp_file(f"{name}/{key}", f"{aside}/{key}")
    remove_tree(place)
    return aside
