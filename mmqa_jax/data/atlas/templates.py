"""Wordings and names that Atlas is made with: the TOML files of the folder `templates`."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The content of `templates/{name}.toml`; callers must not change it."""
    file = resources.files(__package__).joinpath("templates", f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """How one fact is asked and answered; facts.toml explains the fields."""

    topic: str
    cue: str
    questions: list[str]
    answers: list[str]
    name_like: bool = False
    bridges: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def facts() -> dict[str, Fact]:
    """Fact name (`capital`) -> its wordings."""
    by_name: dict[str, Fact] = {}
    for name, section in load("facts").items():
        for color in section.get("colors", [""]):
            fields = {key: section[key] for key in section if key != "colors"}
            for key in ("questions", "answers"):
                fields[key] = [frame.replace("COLOR", color) for frame in fields[key]]
            by_name[name.replace("COLOR", color)] = Fact(**fields)
    return by_name
