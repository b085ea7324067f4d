"""Runs official code from its own file: the definitions that a score needs, or a whole script."""

import ast
import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PRINT_OF_PYTHON_2 = re.compile(r'^(\s*)print (".*")$', re.MULTILINE)


def definitions(file: Path, *names: str, asserts: bool = True, **given: Any) -> SimpleNamespace:
    """What a file defines under these names, without running the rest of it.

    What they name in turn is run too, imports among it, so that packages of other parts of the
    file need not be installed. A function within another one can be named where it uses no variable
    of the outer one.

    Args:
      asserts: False leaves the file's assertions out.
      given: stands in for what the file defines or imports under these names.

    Raises:
      KeyError: the file does not define a name.
    """
    tree = ast.parse(_PRINT_OF_PYTHON_2.sub(r"\1print(\2)", file.read_text(encoding="utf-8")))
    bound = {name: one for one in tree.body for name in _bound(one)}
    inner = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    # How annotations are read.
    needed = [one for one in tree.body if getattr(one, "module", "") == "__future__"]
    waiting = [bound[name] if name in bound else inner[name] for name in names]
    while waiting:
        statement = waiting.pop()
        if statement in needed:
            continue
        needed.append(statement)
        used = {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)} - given.keys()
        waiting += [bound[name] for name in used if name in bound]
    needed.sort(key=lambda statement: statement.lineno)
    module = ast.Module(needed, type_ignores=[])
    space = {"__name__": file.stem, **given}
    exec(compile(module, str(file), "exec", optimize=0 if asserts else 1), space)
    space.update(given)
    return SimpleNamespace(**{name: space[name] for name in names})


def run_script(file: Path, *arguments: str) -> str:
    """What a script prints; it imports its neighbours anew, so that it begins as in a process."""
    printed, before = io.StringIO(), set(sys.modules)
    with _arguments(file, arguments), contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            for name in set(sys.modules) - before:
                if _lies_in(sys.modules[name], file.parent):
                    del sys.modules[name]
    return printed.getvalue()


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement of a file defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(one.asname or one.name).partition(".")[0] for one in statement.names]
    if isinstance(statement, ast.Assign):
        return [one.id for one in statement.targets if isinstance(one, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


@contextlib.contextmanager
def _arguments(file: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _lies_in(module: Any, folder: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(place and Path(place).is_relative_to(folder) for place in places)
