"""What is compared: a scorer of the package, the official code of the same score, random inputs."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Score = Callable[[Any], Any]  # input -> its score: a number, a text, or dicts and lists of these


class Raised(NamedTuple):
    """What a score is where the code ends with an error: the name of the exception's class."""

    error: str

    def __str__(self) -> str:
        return f"ends with {self.error}"


class Known(NamedTuple):
    """A deviation that the scorer's docstring tells of too.

    Attributes:
      why: why the scorer differs, a sentence.
      applies: whether it explains a difference at an input.
    """

    why: str
    applies: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
      name: on the command line and in the table.
      repository, file: of the official code, OWNER/NAME and a path in it.
      draw: a random input, of dicts, lists, texts and numbers.
      official: reads the official file and returns its score.
      ours: the score of the package.
      rows: how many inputs one input counts for, such as the questions of a whole file.
      tolerance: the largest difference of two equal numbers; 0 where both add up alike.
      at_error: reads the official file and returns what the scorer's docstring says of inputs at
        which the official code ends with an error. None: there is no such input.
      known: deviations; few.
    """

    name: str
    repository: str
    file: str
    draw: Callable[[random.Random], Any]
    official: Callable[[Path], Score]
    ours: Score
    rows: int = 1
    tolerance: float = 0.0
    at_error: Callable[[Path], Score] | None = None
    known: tuple[Known, ...] = ()


def always(score: Any) -> Callable[[Path], Score]:
    """The same score at every error of the official code, as `Case.at_error`."""
    return lambda file: lambda given: score
