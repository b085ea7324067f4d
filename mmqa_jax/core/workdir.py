"""The folder of one run: its config, its lock, and its completed stages."""

import contextlib
import functools
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_record, differences, plain_fingerprint
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import no_empty_folders, read_json, write_json
from mmqa_jax.core.host import device_facts, host_facts, peak_rss_mib
from mmqa_jax.core.locks import LOCK, Busy, alone, hold, nobody_else
from mmqa_jax.core.paths import as_path, check_store, remove_tree

_PACKAGES = (
    *("mmqa-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"),
    *("grain", "tensorflow-datasets", "array-record", "ml_collections"),
    *("scann", "bm25s", "tokenizers"),
)

# How often a running stage saves its time: a kill -9 loses at most this much of it.
_HEARTBEAT_SECONDS = 5.0


class Workdir:
    """The folder that holds everything a run writes; it belongs to one config.

    Call `claim` first: it locks the folder against other processes and refuses one that belongs
    to another config. With several hosts only process 0 locks it and writes to it. `close`, leaving
    the context manager and the end of the process, however it ends, release the lock.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = as_path(path)
        self._lock: Any = None
        self._claimed: dict[str, Any] = {}
        self._record: dict[str, Any] | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str | os.PathLike) -> Path:
        return self.path / name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def claim(
        self, config: Any, *, shared: bool = False, free: Collection[str] = frozenset()
    ) -> bool:
        """Locks the folder and writes config.json, or checks that it is this config's.

        Args:
          config: ConfigDict or mapping.
          shared: other processes with this config may write into it too.
          free: keys, or sections, that may differ from those of config.json, since they change no
            result; see `record_changes`.

        Returns:
          True if the folder already belonged to this config: the run resumes.
        """
        if _process_index() > 0 and not shared:
            return False
        self._take_lock(shared)
        self._claimed = config_record(config)
        file = self.path / "config.json"
        if file.exists():
            self._check_same(file, free)
            return True
        self._record = {
            **self._claimed,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "git": _git_commit(Path(__file__).parent),
            "host": host_facts(),
            "devices": device_facts(),
        }
        with alone(self.path / ".claim") if shared else contextlib.nullcontext():
            if not file.exists():
                write_json(file, self._record)
        if shared:
            self._check_same(file, free)
        return False

    def recorded_config(self) -> dict[str, Any]:
        """The config that the folder's config.json had when it was claimed."""
        if self._record is None:  # another process claimed it
            self._record = _read_record(self.path / "config.json")
        return self._record["config"]

    def record_changes(self, step: int) -> None:
        """Makes config.json hold the values of the claim, with which the run goes on.

        What they replace is kept in its list `changes`: date, step and {key: [old, new]}.

        `step`: after which the new values hold.
        """
        if self._lock is None:
            return  # another process writes it
        stored = self._record
        if changed := differences(stored["config"], self._claimed["config"]):
            entry = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "step": step,
                "changed": {key: list(values) for key, values in changed.items()},
            }
            changes = [*stored.get("changes", []), entry]
            self._record = {**stored, **self._claimed, "changes": changes}
            write_json(self.path / "config.json", self._record)

    def check_there(self) -> None:
        """RunError if the folder that this process has claimed was deleted since."""
        if self._lock is not None and not (file := self.path / "config.json").exists():
            raise _gone(file)

    def is_its_only_writer(self) -> bool:
        """Whether this process has locked the folder, and no other."""
        return self._lock is not None and nobody_else(self._lock)

    def done(self, name: str) -> bool:
        """Whether stage `name` is complete."""
        return self._file(name).exists()

    def stages(self) -> dict[str, dict[str, Any]]:
        """The completed stages in order of completion: name -> its record."""
        records = [_read_stage(file) for file in (self.path / "stages").glob("[!.]*.json")]
        return {record["stage"]: record for record in sorted(records, key=lambda r: r["finished"])}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[bool]:
        """Runs a stage once: `with workdir.stage("index") as todo: if todo: ...`

        Yields False if the stage is complete. Otherwise yields True and, if the block ends
        without an error, writes stages/NAME.json: `seconds` (of all attempts, killed ones too,
        to within 5 s each), `attempts` and `peak_rss_mib` (of the process so far, the largest of
        the attempts).
        """
        if self.done(name):
            yield False
            return
        with _Clock(self.path / "stages" / f".{name}.running.json") as clock:
            yield True
            if not clock.file.exists():
                raise _gone(clock.file)
            record = {"stage": name, **clock.note(), "finished": time.time()}
            write_json(self._file(name), record)
        clock.file.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.path / "stages" / f"{name}.json"

    def _take_lock(self, shared: bool) -> None:
        if self._lock is not None:
            return
        check_store(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.path / LOCK, shared=shared)
        except Busy as owner:
            raise UserError(
                f"--workdir={self.path}: {owner} is writing into it; wait until that run ends, "
                "or name another workdir."
            ) from owner
        except OSError as error:
            raise UserError(
                f"--workdir={self.path}: cannot be written ({error.strerror}); "
                "name a folder that can."
            ) from error

    def _check_same(self, file: Path, free: Collection[str]) -> None:
        self._record = _read_record(file)
        changed = [
            f"{key} ({old!r} there, {new!r} now)"
            for key, (old, new) in differences(
                self._record["config"], self._claimed["config"]
            ).items()
            if not is_free(key, free)
        ]
        if not changed:
            return
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"--workdir={self.path}: holds a run of another config: {', '.join(changed[:3])}{more} "
            "differ; name a new --workdir, or set the values back to resume that run."
        )


def is_free(key: str, free: Collection[str]) -> bool:
    """Whether a key of a config is one of these keys, or in one of these sections."""
    return any(f"{key}.".startswith(f"{free_key}.") for free_key in free)


class _Clock:
    """Keeps a stage's time in a file while it runs, so that killed attempts count."""

    def __init__(self, file: Path):
        self.file = file
        before = read_json(file) if file.exists() else {}
        self._before = before if isinstance(before, dict) else {}
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._rewrite()

    def note(self) -> dict[str, Any]:
        seconds = self._before.get("seconds", 0.0) + time.monotonic() - self._started
        return {
            "seconds": round(seconds, 2),
            "attempts": self._before.get("attempts", 0) + 1,
            "peak_rss_mib": max(self._before.get("peak_rss_mib", 0), peak_rss_mib()),
        }

    def _write(self) -> None:
        write_json(self.file, self.note())

    def _beat(self) -> None:
        while not self._stop.wait(_HEARTBEAT_SECONDS):
            self._rewrite()

    def _rewrite(self) -> None:
        if self.file.exists():  # else the folder was deleted, and is not made anew
            self._write()


def _read_stage(file: Path) -> dict[str, Any]:
    record = read_json(file)
    numbers = ("finished", "seconds", "attempts", "peak_rss_mib")
    if (
        not isinstance(record, dict)
        or record.get("stage") != file.stem
        or not all(type(record.get(key)) in (int, float) for key in numbers)
    ):
        raise UserError(
            f"{file}: is not the record of a stage; delete it, and the stage runs again."
        )
    return record


def _gone(file: Path) -> RunError:
    return RunError(
        f"{file}: is gone, the workdir was deleted or moved while the run went on; put it back and "
        "start the same command again, or start anew."
    )


def _process_index() -> int:
    jax = sys.modules.get("jax")  # imported already where several processes were joined
    return jax.process_index() if jax is not None and jax.distributed.is_initialized() else 0


@functools.cache
def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@functools.cache
def _git_commit(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout this package runs from, and whether files differ from it.

    Asked once: what a process imported stays, whatever is committed or changed later.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "workdir.py")  # else: installed inside another checkout
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


@contextlib.contextmanager
def claim_workdir(
    folder: Path,
    config: ConfigDict,
    work: Collection[str],
    *,
    shared: bool = False,
    free: Collection[str] = frozenset(),
    undone_by: tuple[type[Exception], ...] = (UserError,),
) -> Iterator[tuple[Workdir, bool]]:
    """Claims a run's workdir; yields it, and whether the run resumes.

    If a new run's input is refused, everything it wrote is removed: otherwise the workdir would
    refuse the corrected config as another one.

    Args:
      work: globs of the files that make a run worth keeping; if there is one, nothing is removed.
      shared: see `Workdir.claim`; nothing is removed while another process is at work there.
      free: see `Workdir.claim`.
      undone_by: errors after which a new run without such files is removed.
    """
    with no_empty_folders(folder), Workdir(folder) as workdir:
        resumed = workdir.claim(config, shared=shared, free=free)
        before = set(folder.iterdir()) if folder.exists() else set()
        written = {workdir / name for name in ("config.json", LOCK, ".claim")}
        try:
            yield workdir, resumed
            workdir.check_there()
        except undone_by:
            has_work = any(path for glob in work for path in folder.glob(glob))
            if not resumed and workdir.is_its_only_writer() and not has_work:
                for path in written | (set(folder.iterdir()) - before):
                    remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
            raise


def read_config(folder: Path) -> ConfigDict:
    """The config of the run in `folder`; UserError if its config.json is not one."""
    return ConfigDict(_read_record(folder / "config.json")["config"])


def _read_record(file: Path) -> dict[str, Any]:
    """The content of a run's config.json."""
    record, remedy = read_json(file), "copy the run again or start it in a new --workdir"
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise UserError(f"{file}: is not a run's config.json; {remedy}.")
    if record.get("fingerprint") not in (None, plain_fingerprint(record["config"])):
        raise UserError(
            f"{file}: is damaged (its values are not those of its key fingerprint); {remedy} (who "
            "changed them on purpose deletes that key)."
        )
    return record


def steps_in(folder: Path) -> list[int]:
    """The steps whose folders stand there, in order; neither unfinished nor damaged ones."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isdecimal())
