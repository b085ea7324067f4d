"""Plain text, which every library reads alike: the measure of the runner itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]


def SAMPLES() -> dict[str, bytes]:
    """The repository's own pages, as text."""
    return {f"{path.stem}.txt": path.read_bytes() for path in sorted(ROOT.glob("*.md"))}


CANDIDATES: Mapping[str, Callable[[bytes], str]] = {"decoded": lambda data: data.decode()}
