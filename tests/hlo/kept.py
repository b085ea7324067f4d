"""Facts of compiled programs, kept under the hash of what was compiled and by which compiler.

A program that has not changed is not compiled again: its facts are read from facts/NAME.json. One
that has is compiled and judged by them. `python -m tests.hlo.refresh` writes the files anew.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from mmqa_jax.core import mesh

FACTS = Path(__file__).with_name("facts")
REFRESH = "MMQA_REFRESH_FACTS"  # in the environment: facts of programs that changed are written
# A lowered kernel holds the places of its code: with files and lines, another checkout's program
# would be another one.
jax.config.update("jax_traceback_in_locations_limit", 0)

_APART = ("bundles.py", "decode_kernel.py")  # in which no fact is read
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")


def facts_of(
    name: str,
    lowered: jax.stages.Lowered,
    measure: Callable[[jax.stages.Compiled], dict[str, Any]],
    source: str,
) -> dict[str, Any]:
    """The facts of a program.

    Args:
      name: of the program, of all that are kept.
      measure: the compiled program -> its facts, as JSON values.
      source: file in which `measure` is; with another content its facts are measured again.
    """
    key = key_of(lowered, source)
    file = FACTS / f"{name}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if kept.get("key") == key:
        return kept["facts"]
    facts = json.loads(json.dumps(measure(lowered.compile())))
    if os.environ.get(REFRESH):
        FACTS.mkdir(exist_ok=True)
        file.write_text(json.dumps({"key": key, "facts": facts}, indent=1) + "\n")
    return facts


def key_of(lowered: jax.stages.Lowered, source: str) -> str:
    """The hash of a program as it goes to the compiler, of the compiler, and of what counts."""
    digest = hashlib.sha256(lowered.as_text().encode())
    here = [file for file in sorted(Path(__file__).parent.glob("*.py")) if file.name not in _APART]
    for file in (Path(source), Path(mesh.__file__), *here):
        digest.update(file.read_bytes())
    digest.update(json.dumps({name: _version(name) for name in _PACKAGES}).encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
