"""Damages the files that a run or a model is opened from: python -m tests.resume.flips --count=200

Each time one bit of one file is flipped, or a block of 512 bytes is zeroed. Then the folder is
opened, which must end in a refusal that names it, or give the same bits. Prints a table of what
came of it; exit code 1 if anything was WRONG: other bits, or an error that is no refusal.
"""

import argparse
import collections
import contextlib
import io
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mmqa_jax.core.errors import UserError

REFUSED, SAME, WRONG = "refused", "same bits", "WRONG"
BLOCK = 512


class Target(NamedTuple):
    """Something that is written to a folder and opened from it.

    Attributes:
      name: in the table.
      make: writes it into a new folder.
      read: opens a folder; everything that comes out of it, as text (such as a digest). What is
        refused is a UserError. It may write into the folder, which is a copy.
      files: globs of the files in it that are damaged.
      spared: of those, globs of files that are damaged by nobody's account: what a run appends.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], str]
    files: tuple[str, ...] = ("**/*",)
    spared: tuple[str, ...] = ()

    def damaged_files(self, folder: Path) -> list[Path]:
        """The files, relative to the folder, the empty ones aside."""
        spared = {path for glob in self.spared for path in folder.glob(glob)}
        found = {path for glob in self.files for path in folder.glob(glob)} - spared
        return sorted(
            path.relative_to(folder)
            for path in found
            if path.is_file() and path.stat().st_size and path.name != ".lock"
        )


class Damage(NamedTuple):
    """A flipped bit, or with `bit` None a zeroed block of BLOCK bytes that holds the byte."""

    byte: int
    bit: int | None

    def apply(self, file: Path) -> None:
        """Changes the file; its size and time stay."""
        content = bytearray(file.read_bytes())
        if self.bit is None:
            block = slice(self.byte // BLOCK * BLOCK, (self.byte // BLOCK + 1) * BLOCK)
            content[block] = bytes(len(content[block]))
        else:
            content[self.byte] ^= 1 << self.bit
        file.write_bytes(content)

    def __str__(self) -> str:
        return f"byte {self.byte}, " + ("block zeroed" if self.bit is None else f"bit {self.bit}")


class Outcome(NamedTuple):
    """What came of opening a damaged folder; `said`: of a refusal, or what was wrong."""

    kind: str
    said: str


def damaged(target: Target, folder: Path, damages: Mapping[Path, Damage], wanted: str) -> Outcome:
    """Opens a copy of the folder with damaged files.

    Args:
      damages: of each file, relative to the folder.
      wanted: what comes out of the whole folder.
    """
    with tempfile.TemporaryDirectory(prefix="mmqa-flip-") as place:
        copy = Path(place) / folder.name
        shutil.copytree(folder, copy)
        for file, damage in damages.items():
            damage.apply(copy / file)
        try:
            found = target.read(copy)
        except UserError as error:
            said = str(error)
            return Outcome(REFUSED if str(copy) in said else WRONG, said)
        except Exception as error:
            return Outcome(WRONG, f"{type(error).__name__}: {error}")
    return Outcome(SAME, "") if found == wanted else Outcome(WRONG, "other bits")


def each_file(size: int) -> Iterator[Damage]:
    """Damages of one file of that size: a bit of its first, a middle and its last byte, a block."""
    for byte, bit in {0: 0, size // 2: 2, size - 1: 7}.items():
        yield Damage(byte, bit)
    yield Damage(size // 3, None)


@contextlib.contextmanager
def made(targets: list[Target]) -> Iterator[dict[Target, tuple[Path, str]]]:
    """The folder of each target, and what comes out of it."""
    with tempfile.TemporaryDirectory(prefix="mmqa-flips-") as place:
        found = {}
        for target in targets:
            folder = Path(place) / target.name.replace(" ", "-")
            target.make(folder)
            with tempfile.TemporaryDirectory(prefix="mmqa-flip-") as other:
                copy = shutil.copytree(folder, Path(other) / folder.name)
                found[target] = folder, target.read(copy)
        yield found


def main() -> int:
    """The command."""
    from flip_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=[target.name for target in TARGETS], action="append")
    arguments = parser.parse_args()
    targets = [one for one in TARGETS if arguments.target is None or one.name in arguments.target]
    chance, counted = random.Random(arguments.seed), collections.Counter()
    with made(targets) as folders:
        for number in range(arguments.count):
            target = targets[number % len(targets)]
            folder, wanted = folders[target]
            file = chance.choice(target.damaged_files(folder))
            size = (folder / file).stat().st_size
            bit = None if chance.random() < 0.2 else chance.randrange(8)
            damage = Damage(chance.randrange(size), bit)
            with contextlib.redirect_stderr(io.StringIO()):
                outcome = damaged(target, folder, {file: damage}, wanted)
            counted[target.name, outcome.kind] += 1
            if outcome.kind == WRONG:
                print(f"WRONG: {target.name}, {file}, {damage}: {outcome.said!a}", flush=True)
    kinds = (REFUSED, SAME, WRONG)
    print("| target | damaged | " + " | ".join(kinds) + " |\n|---|---:|---:|---:|---:|")
    for name in [*(target.name for target in targets), "all"]:
        counts = [
            sum(n for (one, k), n in counted.items() if k == kind and name in (one, "all"))
            for kind in kinds
        ]
        print(f"| {name} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    return int(any(kind == WRONG for _, kind in counted))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    sys.exit(main())
