"""What JAX does for every program or process, and tests need not pay for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def made_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, called once a thread: of mlir.make_ir_context, which JAX calls for each program."""
    kept = threading.local()

    def make_once() -> Any:
        if not hasattr(kept, "made"):
            kept.made = make()
        return kept.made

    return make_once


def lower_in_one_context() -> None:
    """Programs of this process are lowered in one MLIR context a thread."""
    from jax._src.interpreters import mlir

    mlir.make_ir_context = made_once(mlir.make_ir_context)


def keep_programs_of_every_process() -> None:
    """Of a launch JAX's cache takes what process 0 compiles; on CPU the others' programs differ.

    It writes none of theirs so as not to crowd a file system of many hosts; tests have one host.
    """
    from jax._src import compiler

    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
