"""Who imports whom: no circles, dependencies point down, light rooms stay light.

Read from the source, so that imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mmqa_jax

PACKAGE = Path(mmqa_jax.__file__).parent
# What a bare accelerator image lacks.
HEAVY = {"grain", "scann", "tensorflow_datasets"}


class Import(NamedTuple):
    """An import statement.

    Attributes:
      target: the module; one of ours, or the top-level name of a foreign package.
      at_load: whether it runs when the module is imported.
    """

    target: str
    at_load: bool


@functools.cache
def modules() -> dict[str, Path]:
    """Name -> file of every module of ours."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ("mmqa_jax", *file.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@functools.cache
def imports() -> dict[str, list[Import]]:
    """Module -> its imports."""
    return {name: list(imports_of(name, file)) for name, file in modules().items()}


def imports_of(name: str, file: Path) -> Iterator[Import]:
    """The imports of a file; with a submodule, the __init__ of every package above it."""
    for node, at_load in statements(ast.parse(file.read_text(encoding="utf-8")), True):
        for target in targets(node, name, file.name == "__init__.py"):
            if not target.startswith("mmqa_jax"):
                yield Import(target.partition(".")[0], at_load)
                continue
            parts = target.split(".")
            above = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
            for one in sorted((above & modules().keys()) - {name}):
                # The packages that `name` is in are loaded before it in any case.
                if one == target or not name.startswith(f"{one}."):
                    yield Import(one, at_load)


def statements(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # no statement lies in an expression
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_load
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        )
        yield from statements(child, at_load and not inside)


def targets(node: ast.stmt, name: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        parts = name.split(".")
        kept = len(parts) - node.level + is_package
        base = ".".join([*parts[:kept], *filter(None, [node.module])])
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        yield whole if whole in modules() else base


@functools.cache
def reachable(start: str, *, at_load: bool) -> dict[str, tuple[str, ...]]:
    """Everything that a module imports, foreign packages too -> by which chain."""
    found: dict[str, tuple[str, ...]] = {start: (start,)}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        for one in imports().get(name, []):
            if one.target not in found and (one.at_load or not at_load):
                found[one.target] = (*found[name], one.target)
                waiting.append(one.target)
    return found


def room(name: str) -> str:
    """The folder of a module below mmqa_jax; `cli` of cli.py."""
    return name.split(".")[1] if "." in name else ""


def offending(rooms: set[str], forbidden: set[str]) -> list[str]:
    """`importer -> imported` from rooms to rooms."""
    return [
        f"{name} -> {one.target}"
        for name, found in imports().items()
        if room(name) in rooms
        for one in found
        if one.target.startswith("mmqa_jax.") and room(one.target) in forbidden
    ]


def ours() -> set[str]:
    return {room(name) for name in modules()} - {""}


def test_the_imports_are_found():
    """The tests below would pass on an empty graph."""
    assert len(modules()) > 150
    assert Import("mmqa_jax.papers.setting", True) in imports()["mmqa_jax.runs.row"]
    # Inside a function, relative to nothing, a module by `from package import module`.
    assert Import("mmqa_jax.runs.verbs.one_stage", False) in imports()["mmqa_jax.commands.search"]
    assert "mmqa_jax.papers.webqa" in reachable("mmqa_jax.commands.search", at_load=False)
    assert "mmqa_jax.papers.webqa" not in reachable("mmqa_jax.commands.search", at_load=True)
    assert "jax" in reachable("mmqa_jax.models.vlp.network", at_load=True)


def test_no_import_circles():
    circles = [
        " -> ".join((name, *chain))
        for name in modules()
        for one in imports()[name]
        for chain in [reachable(one.target, at_load=False).get(name)]
        if chain is not None
    ]
    assert circles == []


def rooms_from_the_top() -> list[str]:
    """The rooms of the page's table, in its order."""
    table = PACKAGE.joinpath("README.md").read_text("utf-8").split("| room | what |")[1]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in first_cells for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)]


def test_dependencies_point_down():
    """A room uses those after it in the page's table, and none before."""
    rooms = rooms_from_the_top()
    assert set(rooms) == ours()
    for place, name in enumerate(rooms):
        assert offending({name}, set(rooms[:place])) == []


@pytest.mark.parametrize(
    ("start", "families"),
    [
        ("runs.run", ""),
        ("tasks.contrastive", "bert two_towers"),
        ("tasks.rerank", "bert two_towers vlp"),
        ("tasks.answer", "bert two_towers vlp oscar"),
        ("tasks.vqa", "bert two_towers mcan"),
        ("tasks.language_model", "bert llama"),
        ("tasks.seq2seq", "bert llama t5"),
    ],
)
def test_a_row_and_a_task_load_their_own_models_alone(start, families):
    names = reachable(f"mmqa_jax.{start}", at_load=True)
    parts = [name.split(".") for name in names if name.startswith("mmqa_jax.models.")]
    assert {part[2] for part in parts if part[3:] == ["network"]} <= {*families.split()}


def test_inference_needs_nothing_of_training():
    """Not even through another room."""
    for name in modules():
        if room(name) == "inference":
            chains = reachable(name, at_load=False)
            assert [c for n, c in chains.items() if n.startswith("mmqa_jax.training")] == []


def test_only_commands_and_the_cli_import_commands():
    assert offending(ours() - {"commands", "cli"}, {"commands", "cli"}) == []
    assert offending({"commands"}, {"cli"}) == []


@pytest.mark.parametrize("name", ["models", "weights", "decoding", "plan"])
def test_what_runs_on_a_bare_accelerator_image(name):
    for module in modules():
        if room(module) == name:
            chains = reachable(module, at_load=True)
            assert [" -> ".join(chains[heavy]) for heavy in HEAVY & chains.keys()] == []


# What needs an extra as soon as it is imported: the page of `mmqa serve`, and readers that are
# imported where the first file of their kind is read.
OF_EXTRAS = ("mmqa_jax.serve", "mmqa_jax.data.documents.pdf", "mmqa_jax.data.documents.tex")
IMPORTS_ALL = """
import importlib, sys
names, modules = (text.split() for text in sys.argv[1:])
sys.modules |= dict.fromkeys(names)  # as if they were not installed
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"{module} imports {error.name}")
"""


def of_extras_alone() -> set[str]:
    """Top-level modules of distributions that extras name, and a plain installation lacks."""
    waiting, plain, extras = ["mmqa-jax"], set(), set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in plain:
            continue
        plain.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            for requirement in map(Requirement, metadata.requires(name) or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    waiting.append(requirement.name)
                elif name == "mmqa-jax":
                    extras.add(canonicalize_name(requirement.name))
    owners = metadata.packages_distributions().items()
    return {
        module
        for module, names in owners
        if {canonicalize_name(name) for name in names} <= extras - plain
    }


@pytest.mark.slow
def test_a_plain_installation_imports_every_module():
    absent = of_extras_alone() | {"pyarrow"}  # which launch/setup.sh takes out again
    assert {"torch", "pypdfium2", "starlette"} <= absent
    assert not {"jax", "numpy", "transformers"} & absent
    names = [name for name in modules() if not name.startswith(OF_EXTRAS)]
    command = [sys.executable, "-c", IMPORTS_ALL, " ".join(absent), " ".join(names)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == ""
