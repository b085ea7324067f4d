"""Checkpoints of a training run, with Orbax: the latest ones, and the best one.

A checkpoint holds four items that are committed together or not at all: `params`, `train`
(step and optimizer state), `iterator` (the data iterator's state, per process) and `meta`
(config fingerprint, seed, what else the loop needs). Arrays are stored under plain names
(`encoder/layers/query/kernel`). The score of a checkpoint that was evaluated is Orbax's `metrics`
of it. SHA256SUMS tells whether the files are those that were saved. Between them there may be
checkpoints on the hosts' own disks, with the same content; see core.checkpoints.local_checkpoints.
"""

import asyncio
import contextlib
import copy
import json
import math
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from mmqa_jax.core import paths
from mmqa_jax.core.checkpoints.checksums import files_below, find_damage, write_sums
from mmqa_jax.core.checkpoints.local_checkpoints import LocalCheckpoints
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.progress import announce
from mmqa_jax.core.trees import flatten_named, nest, unflatten_named, unnest
from mmqa_jax.core.workdir import steps_in

_DELETED = "deleted"  # folder beside the steps
_RUN = "run.json"  # beside the steps: the name of the run's folder on the hosts' own disks


class Restored(NamedTuple):
    """The result of `Checkpoints.restore_latest`."""

    params: Any
    train: Any
    meta: dict[str, Any]
    step: int


class Best(NamedTuple):
    """The checkpoint with the highest score; of equal ones the first."""

    step: int
    score: float


class Checkpoints:
    """The checkpoints of one run, in the folder `checkpoints` of its workdir.

    Args:
      folder: where they are; made if absent.
      fingerprint: of the run's config; a checkpoint of another config is refused.
      former: further fingerprints of the same experiment, as older checkpoints have them.
      keep: how many of the latest ones to keep. The best one is kept besides.
      skip_damaged: whether damaged ones are set aside; see `check_steps`.
      local: folder on this host's own disk for `save_local`; None: there is none.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        fingerprint: str,
        former: Collection[str] = (),
        keep: int = 2,
        skip_damaged: bool = False,
        local: Path | None = None,
    ):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self.folder = paths.absolute(folder)
        if paths.scheme_of(self.folder) == "s3":
            paths.teach_orbax_s3()
        self._fingerprint, self._former = fingerprint, former
        self._saving = 0  # the step that was saved last
        _remove_uncommitted(self.folder)
        self._remove_deleted()
        self._local = _open_local(self.folder, local)
        check_steps(self.folder, skip_damaged=skip_damaged)
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(
                    [
                        ocp.checkpoint_managers.LatestN(keep),
                        ocp.checkpoint_managers.BestN(
                            get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False
                        ),
                    ]
                ),
                best_fn=_rank,
                # A step that is no longer kept leaves its place at once, and not file by file: what
                # a kill left of it would look like damage. Objects in a store cannot be renamed.
                todelete_subdir=None if paths.in_store(self.folder) else _DELETED,
                # The loop decides when; Orbax would also skip some at its own discretion.
                save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
                enable_async_checkpointing=True,
                # Called by process 0, in the background, between the last file and the commit.
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=lambda: write_step_sums(self.folder, self._saving)
                ),
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def committed_step(self) -> int | None:
        """The newest step that is complete now, whatever is being saved.

        A local one counts if this process has all of it: a part may be lost with another host.
        """
        steps = set(self._ocp.utils.checkpoint_steps(self._manager.directory))
        if self._local is not None:
            steps.add(self._local.committed_step() or 0)
        return max(steps, default=0) or None

    def best(self) -> Best | None:
        """The best checkpoint of those with a score, None if there is none.

        Right after `save` it may be one that is not committed yet; see `wait`.
        """
        step = self._manager.best_step()
        metrics = None if step is None else self._manager.metrics(step)
        if not metrics or metrics["score"] is None:
            return None
        return Best(metrics["step"], metrics["score"])

    def reached_preemption(self, step: int) -> bool:
        """Whether all hosts agreed to stop at this step, because one of them got SIGTERM."""
        return self._manager.reached_preemption(step)

    def save(
        self,
        step: int,
        *,
        params: Any,
        train: Any,
        iterator: Any,
        meta: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts to save; returns once all is copied, so that the arrays may be donated.

        Args:
          step: name of the checkpoint.
          params, train: pytrees of arrays.
          iterator: Grain iterator; its state is taken now, that is, after the batch of `step`.
          meta: JSON values.
          score: of an evaluation at this step, the higher the better; None: not evaluated.
        """
        args = self._ocp.args
        meta = self._described(meta)
        self.wait()  # the save before it still needs its number
        self._saving = step
        self._manager.save(
            step,
            args=args.Composite(
                params=args.StandardSave(nest(flatten_named(params))),
                train=args.StandardSave(nest(flatten_named(train))),
                iterator=args.JsonSave(_iterator_states(iterator)),
                meta=args.JsonSave(meta),
            ),
            metrics={"step": step, "score": score},
            force=True,
        )

    def save_local(
        self, step: int, *, params: Any, train: Any, iterator: Any, meta: Mapping[str, Any]
    ) -> None:
        """Starts to save on the hosts' own disks; arguments as of `save`."""
        assert self._local is not None, "there is no local folder"
        record = {"iterator": _iterator_states(iterator), "meta": self._described(meta)}
        self._local.save(step, _named_items(params, train), record)

    def _described(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        # A copy: it is written later, when the caller may have changed what is in it.
        return copy.deepcopy({**meta, "fingerprint": self._fingerprint})

    def restore_latest(self, *, params: Any, train: Any, iterator: Any) -> Restored | None:
        """Restores the newest complete checkpoint, local or not; None if there is none.

        Args:
          params, train: the abstract pytrees: jax.ShapeDtypeStructs with the shardings that
            the arrays shall have, which may be of another mesh than the saved ones.
          iterator: Grain iterator, which is set to the saved state.
        """
        step = self.latest_step()
        if self._local is not None:
            named = _named_items(params, train)
            held = self._local.newest(after=step or 0, wanted=named)
            if held is not None:
                meta = held.record["meta"]
                self._check_fingerprint(meta["fingerprint"], self._local.folder)
                arrays = self._local.restore(held, named)
                _set_iterator_state(iterator, held.record["iterator"], self._local.folder)
                return Restored(
                    unflatten_named(params, _item(arrays, "params")),
                    unflatten_named(train, _item(arrays, "train")),
                    meta,
                    held.step,
                )
        return None if step is None else self.restore(step, params, train, iterator)

    def restore(self, step: int, params: Any, train: Any, iterator: Any) -> Restored:
        """Restores the checkpoint of a step that is there; arguments as of `restore_latest`."""
        args = self._ocp.args
        folder = self.folder / str(step)
        remedy = "delete that folder to continue without it"
        with _report_damage(folder, remedy):
            light = self._manager.restore(
                step, args=args.Composite(iterator=args.JsonRestore(), meta=args.JsonRestore())
            )
            meta, states = light["meta"], light["iterator"]
            fingerprint, _ = meta["fingerprint"], states["0"]  # there, or damaged
        self._check_fingerprint(fingerprint, folder)
        targets = {"params": flatten_named(params), "train": flatten_named(train)}
        restored = {item: args.StandardRestore(nest(target)) for item, target in targets.items()}
        with _report_damage(folder, remedy):
            for item, target in targets.items():
                _check_same_arrays(folder / item, target)
            arrays = self._manager.restore(step, args=args.Composite(**restored))
        _set_iterator_state(iterator, states, folder)
        return Restored(
            unflatten_named(params, unnest(arrays["params"], targets["params"])),
            unflatten_named(train, unnest(arrays["train"], targets["train"])),
            meta,
            step,
        )

    def _check_fingerprint(self, fingerprint: str, folder: Path) -> None:
        if fingerprint not in (self._fingerprint, *self._former):
            raise UserError(
                f"{folder}: is a checkpoint of another config (fingerprint {fingerprint}, "
                f"this run has {self._fingerprint}); name a new --workdir or use that run's config."
            )

    def restore_params(self, step: int, params: Any) -> Any:
        """The parameters of one checkpoint.

        Args:
          step: of a checkpoint that is there.
          params: the abstract pytree, as `restore_latest` takes it.
        """
        args, target = self._ocp.args, flatten_named(params)
        folder, remedy = self.folder / str(step), "delete that folder to continue without it"
        if (problem := find_damage_together(folder)) is not None:
            raise UserError(f"{folder}: {problem}; {remedy}.")
        with _report_damage(folder, remedy):
            _check_same_arrays(folder / "params", target)
            restored = self._manager.restore(
                step, args=args.Composite(params=args.StandardRestore(nest(target)))
            )
        return unflatten_named(params, unnest(restored["params"], target))

    def wait(self) -> None:
        """Waits until the last save is committed; raises what went wrong with it."""
        self._manager.wait_until_finished()
        self._remove_deleted()

    def remove_local(self) -> None:
        """Removes the local checkpoints of a run that has ended."""
        if self._local is not None:
            self._local.remove()

    def close(self) -> None:
        """Waits for the last save and frees the manager's threads."""
        try:
            self._manager.close()
            if self._local is not None:
                self._local.close()
        finally:
            self._remove_deleted()

    def _remove_deleted(self) -> None:
        """Removes the steps that are no longer kept, which stand beside the others."""
        if jax.process_index() == 0 and not paths.in_store(self.folder):
            shutil.rmtree(Path(self.folder) / _DELETED, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        # A save that failed was reported by `save` or `wait`, or something else is at fault.
        with contextlib.suppress(*() if kind is None else (Exception,)):
            self.close()
        if kind is not None and jax.process_count() == 1:  # a full disk's unfinished step
            with contextlib.suppress(Exception):
                _remove_uncommitted(self.folder)
            self._remove_made_again()

    def _remove_made_again(self) -> None:
        """Removes the empty folders that a save under way made again in a workdir that is gone."""
        if not paths.in_store(self.folder):
            with contextlib.suppress(OSError):  # not empty, as they are where nothing was deleted
                Path(self.folder).rmdir()
                Path(self.folder).parent.rmdir()


def _open_local(folder: Path, local: Path | None) -> LocalCheckpoints | None:
    """The local checkpoints of the run whose others are in `folder`; all processes call it.

    The run's name is a random one in that folder: a run that begins anew finds no older copies.
    """
    has = distributed.gather("local folders", local is not None)
    if not any(has):
        return None
    if not all(has):
        raise UserError(
            f"environment: process {has.index(False)} has no MMQA_LOCAL_CHECKPOINTS and others "
            "have; set it on every host."
        )
    name, file = None, folder / _RUN
    if jax.process_index() == 0:
        if not file.exists():
            write_json(file, {"run": secrets.token_hex(8)})
        name = read_json(file)["run"]
    return LocalCheckpoints(local, distributed.gather("run", name)[0])


def _named_items(params: Any, train: Any) -> dict[str, Any]:
    """The leaves of both, under `params/` and `train/`."""
    return flatten_named({"params": params, "train": train})


def _item(arrays: Mapping[str, Any], item: str) -> dict[str, Any]:
    start = f"{item}/"
    return {n.removeprefix(start): array for n, array in arrays.items() if n.startswith(start)}


def _remove_uncommitted(folder: str | os.PathLike) -> None:
    """Removes what a kill in the middle of a save left, and returns once it is gone.

    Orbax's own option `cleanup_tmp_directories` does so in a thread that only `save` waits for: a
    run that restores and ends may leave the folder, and an error in it goes unseen.
    """
    from orbax.checkpoint._src.path.temporary_paths import cleanup_temporary_paths

    # In a thread, since a notebook's main thread has an event loop that is running.
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(lambda: asyncio.run(cleanup_temporary_paths(folder))).result()


def _rank(metrics: Mapping[str, Any]) -> tuple[float, int]:
    """Orders checkpoints by score; without one, the latest is the best."""
    step, score = metrics["step"], metrics["score"]
    return (-math.inf, step) if score is None else (score, -step)


def _check_same_arrays(folder: Path, target: Mapping[str, Any]) -> None:
    """Raises UserError naming the keys if stored arrays differ from the wanted ones."""
    import orbax.checkpoint as ocp

    tree = ocp.StandardCheckpointHandler().metadata(folder).tree
    stored = {name: tuple(leaf.shape) for name, leaf in flatten_named(dict(tree)).items()}
    wanted = {name: tuple(leaf.shape) for name, leaf in target.items()}
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is not in this model" for name in stored if name not in wanted]
    problems += [
        f"{name} is {list(stored[name])}, this model has {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"{folder}: is a checkpoint of another model: {'; '.join(problems[:3])}{more}; "
            "use the config that it was trained with."
        )


@contextlib.contextmanager
def _report_damage(folder: Path, remedy: str) -> Iterator[None]:
    """Turns what Orbax raises for missing or damaged files into a UserError."""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # the files are not at fault, or it is reported already
    except Exception as error:  # Orbax and TensorStore have no common error
        raise UserError(
            f"{folder}: files in it are missing, truncated or damaged; {remedy}."
        ) from error


def _iterator_states(iterator: Any) -> dict[str, str]:
    """State of the data iterator of every process, as text: {"0": ..., "1": ...}."""
    state = iterator.get_state()
    text = state.decode() if isinstance(state, bytes) else "json:" + json.dumps(state)
    if jax.process_count() == 1:
        return {"0": text}
    from jax.experimental import multihost_utils

    mine = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.process_allgather(np.int32(mine.size)).max())
    padded = np.zeros(length, np.uint8)
    padded[: mine.size] = mine
    everyone = multihost_utils.process_allgather(padded)
    return {str(i): row.tobytes().rstrip(b"\0").decode() for i, row in enumerate(everyone)}


def _set_iterator_state(iterator: Any, states: Mapping[str, str], folder: Path) -> None:
    if len(states) != jax.process_count() and len(set(states.values())) > 1:
        raise UserError(
            f"{folder}: was written by {len(states)} processes whose data iterators were at "
            f"different positions; continue with {len(states)} processes, not "
            f"{jax.process_count()}."
        )
    text = states.get(str(jax.process_index()), states["0"])
    if text.startswith("json:"):
        iterator.set_state(json.loads(text.removeprefix("json:")))
    else:
        iterator.set_state(text.encode())


# The files of a run's checkpoints: their checksums, and what becomes of damaged ones.
#
# A checkpoint gets its SHA256SUMS from process 0, when the files of all processes are there and
# before it is committed. Whoever opens the checkpoints reads the newest whole, each process its
# share of the files, and of the others the scores, by which Orbax knows the best one.

_UNCOMMITTED = ".orbax-checkpoint-tmp"  # behind the name of a folder that Orbax has not committed
_WRITTEN_LATER = ("_CHECKPOINT_METADATA",)  # gets the time of the commit; no result depends on it
_SCORE = "metrics/metrics"
_DAMAGED = "damaged"


def write_step_sums(folder: Path, step: int) -> None:
    """Writes the checksums of a checkpoint of `folder` whose files are all there, before its
    commit.
    """
    begun = folder / str(step)
    if not paths.in_store(
        folder
    ):  # a store cannot rename: its objects have their names from the start
        begun = begun.with_name(begun.name + _UNCOMMITTED)
    write_sums(begun, [name for name in files_below(begun) if name not in _WRITTEN_LATER])


def find_damage_together(folder: Path, names: Collection[str] | None = None) -> str | None:
    """`find_damage` of a folder that all processes see; all call it and share the reading."""
    part = (jax.process_index(), jax.process_count())
    problems = distributed.gather("checksums", find_damage(folder, names, part=part))
    return next((problem for problem in problems if problem is not None), None)


def check_steps(folder: Path, *, skip_damaged: bool) -> None:
    """Checks the committed checkpoints; all processes call it.

    Args:
      folder: of all checkpoints, without uncommitted ones.
      skip_damaged: sets damaged ones aside, as STEP.damaged, if an earlier one is whole.
    """
    while steps := distributed.gather("checkpoints", steps_in(folder))[0]:
        newest = steps[-1]
        read = {step: None if step == newest else [_SCORE] for step in reversed(steps)}
        step, problem = _first_damage(folder, read)
        if problem is None:
            return
        place = folder / str(step)
        others = (
            [other for other in reversed(steps) if other < newest] if step == newest else [newest]
        )
        if (whole := _first_whole(folder, others)) is None:
            raise UserError(
                f"{place}: {problem}, and no earlier checkpoint is whole; copy that folder again, "
                f"or delete {folder} to train from the start."
            )
        if not skip_damaged:
            raise UserError(
                f"{place}: {problem}; checkpoint {whole} is whole: add --skip_damaged to set this "
                f"one aside (as {place.name}.{_DAMAGED}) and go on from {whole}."
            )
        if jax.process_index() == 0:
            aside = _set_aside(place)
            announce(f"{place}: {problem}; set aside as {aside.name}, going on from step {whole}.")
        distributed.barrier("a damaged checkpoint is set aside")


def _first_damage(
    folder: Path, read: Mapping[int, Collection[str] | None]
) -> tuple[int, str] | tuple[None, None]:
    """Returns the first step whose needed files are damaged, and the damage."""
    for step, names in read.items():
        if (problem := find_damage_together(folder / str(step), names)) is not None:
            return step, problem
    return None, None


def _first_whole(folder: Path, steps: Iterable[int]) -> int | None:
    damage = ((step, find_damage_together(folder / str(step))) for step in steps)
    return next((step for step, problem in damage if problem is None), None)


def _set_aside(place: Path) -> Path:
    aside, number = place.with_name(f"{place.name}.{_DAMAGED}"), 1
    while aside.exists():
        number += 1
        aside = place.with_name(f"{place.name}.{_DAMAGED}{number}")
    if not paths.in_store(place):
        place.rename(aside)
        return aside
    name = os.fspath(place)
    with paths.named_errors(name, RunError):
        for key in paths.listing(name):
            paths.filesystem(name).cp_file(f"{name}/{key}", f"{aside}/{key}")
    paths.remove_tree(place)
    return aside
