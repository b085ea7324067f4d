"""Whether all processes of a launch are the same run: command, code, libraries, data, workdir."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.config import flatten, to_plain_dict
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed

# What decides how a program is compiled, or how a checkpoint is written.
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_SHOWN = 4


def check_same_run(config: Any, further: Mapping[str, Any]) -> None:
    """UserError on every process if they differ, with what differs and where.

    Args:
      config: of the run, a ConfigDict or mapping.
      further: other JSON values that have to be equal, by what a message calls them.
    """
    if distributed.alone():  # nothing can differ; the code need not be read
        return
    facts = {f"config key {key}": value for key, value in flatten(to_plain_dict(config)).items()}
    facts |= further
    facts |= {f"the version of {name}": different for name, different in _versions().items()}
    facts["the code of mmqa_jax"] = _code_fingerprint()
    reports = distributed.gather("facts", {"host": socket.gethostname(), "facts": facts})
    if different := differences([(report["host"], report["facts"]) for report in reports]):
        more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise UserError(
            f"the processes of this launch differ: {'; '.join(different[:_SHOWN])}{more}; start "
            "all of them with the same command, code and environment."
        )


def differences(reports: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Returns a line for each fact that differs among (host, facts) of the processes in order."""
    (first_host, first), absent = reports[0], "absent"
    names = dict.fromkeys(name for _, facts in reports for name in facts)
    lines = []
    for name in names:
        wanted = first.get(name, absent)
        others = [
            (process, host, facts.get(name, absent))
            for process, (host, facts) in enumerate(reports)
            if facts.get(name, absent) != wanted
        ]
        if others:
            process, host, value = others[0]
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            lines.append(
                f"{name} is {wanted!r} on process 0 ({first_host}) and {value!r} on process "
                f"{process} ({host}){more}"
            )
    return lines


def check_shared_folder(folder: Path) -> None:
    """UserError on every process if they do not all see and write process 0's folder."""
    tokens = distributed.gather("token", uuid.uuid4().hex)
    if len(tokens) == 1:
        return
    mark = folder / f".seen.{tokens[0]}.{distributed.process_index()}"
    problem = None
    try:
        mark.write_text(socket.gethostname(), encoding="utf-8")
    except OSError as error:
        problem = error.strerror
    hosts = distributed.gather("marked", [socket.gethostname(), problem])
    try:
        _check_marks(folder, mark, hosts)
    finally:
        distributed.barrier("marks are checked")
        mark.unlink(missing_ok=True)


def _check_marks(folder: Path, mark: Path, hosts: list[Any]) -> None:
    unseen = [
        process
        for process, (_, problem) in enumerate(hosts)
        if problem is None and not mark.with_suffix(f".{process}").exists()
    ]
    apart = distributed.gather("unseen", unseen)[0]  # process 0 writes what all read
    lines = [
        f"cannot be written on process {process} ({host}: {problem})"
        for process, (host, problem) in enumerate(hosts)
        if problem is not None
    ]
    lines += [f"process {process} ({hosts[process][0]}) has another folder" for process in apart]
    if lines:
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise UserError(
            f"--workdir={folder}: {'; '.join(lines[:_SHOWN])}{more}; name a folder on a file "
            "system that all hosts share and can write."
        )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def _code_fingerprint() -> str:
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
