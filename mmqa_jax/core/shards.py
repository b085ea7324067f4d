"""`--shard=I/N`: which share of a job this process does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

from mmqa_jax.core.errors import UserError, decimal_number

# Slurm's of a job array, whose indices may begin above 0 and have a step.
_SLURM = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
# Kubernetes sets the index of an Indexed Job; the manifest has to give the count.
_KUBERNETES = ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")


class Shard(NamedTuple):
    """Share `index`, from 0, of a job that `count` processes share."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard(0, 1)


class PartState(NamedTuple):
    """How far a part of a job is.

    Attributes:
      items: of it.
      ended, began: when it was written and begun (seconds since the epoch); None: it is not there,
        or not known.
      host: that wrote it; "": not known.
    """

    items: int
    ended: float | None
    began: float | None = None
    host: str = ""


class Unfinished(NamedTuple):
    """How far a job is that `count` processes share; `complete`: its results are written."""

    count: int
    parts: list[PartState]
    complete: bool = False

    @property
    def missing(self) -> list[int]:
        """The parts that are not there."""
        return [number for number, part in enumerate(self.parts) if part.ended is None]


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """The value of `--shard`.

    Args:
      text: `I/N`; `auto`: from the variables of a Slurm array or of a Kubernetes Indexed Job;
        `auto/N`: only I from there.
    """
    index, slash, count = text.partition("/")
    if index == "auto":
        shard = _of_environment(text, count if slash else None, environment)
    else:
        numbers = decimal_number(index), decimal_number(count)
        shard = Shard(0, 0) if None in numbers else Shard(*numbers)
    if not shard.index < shard.count:
        source = "" if index != "auto" else f" (the environment says {shard})"
        raise UserError(
            f"--shard={text}: I/N with I from 0 to N - 1 was expected, such as 0/8, or "
            f"auto{source}."
        )
    return shard


def launched_shard() -> Shard:
    """Returns this process's share among the processes that JAX joined to one launch."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return WHOLE
    return Shard(jax.process_index(), jax.process_count())


def _of_environment(text: str, count: str | None, environment: Mapping[str, str]) -> Shard:
    def number(name: str, default: str | None = None) -> int:
        value = environment.get(name) or default
        if value is None or (parsed := decimal_number(value)) is None:
            problem = "is not set" if value is None else f"is {value!r}"
            raise UserError(
                f"--shard={text}: the environment variable {name} {problem}; start the command in "
                "a Slurm job array or a Kubernetes Indexed Job (with JOB_COMPLETIONS set to its "
                "completions), or give --shard=I/N."
            )
        return parsed

    def total(name: str) -> int:
        if count is None:
            return number(name)
        return decimal_number(count) or 0

    if _KUBERNETES[0] in environment and _SLURM[0] not in environment:
        return Shard(number(_KUBERNETES[0]), total(_KUBERNETES[1]))
    task = number(_SLURM[0])
    first, step = number("SLURM_ARRAY_TASK_MIN", "0"), number("SLURM_ARRAY_TASK_STEP", "1")
    return Shard((task - first) // max(step, 1), total(_SLURM[1]))
