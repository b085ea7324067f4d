"""Checkpoints of a whole run, and the final weights, with Orbax.

A checkpoint holds four items that are committed together or not at all: `params`, `train`
(step and optimizer state), `iterator` (the data iterator's state, per process) and `meta`
(config fingerprint, seed, what else the loop needs). Arrays are stored under plain names
(`encoder/layers/query/kernel`), so that inference reads `params` alone, on any mesh.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.trees import flatten_named, nest, unflatten_named, unnest


class Restored(NamedTuple):
    """What `Checkpoints.restore_latest` found."""

    params: Any
    train: Any
    meta: dict[str, Any]
    step: int


class Checkpoints:
    """The checkpoints of one run, in the folder `checkpoints` of its workdir.

    Args:
      folder: where they lie; made if absent.
      fingerprint: of the run's config; a checkpoint of another config is refused.
      keep: how many to keep, the latest ones.
    """

    def __init__(self, folder: str | os.PathLike, *, fingerprint: str, keep: int = 2):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self.folder = Path(folder).absolute()
        self._fingerprint = fingerprint
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                # The loop decides when; Orbax would also skip some at its own discretion.
                save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
                cleanup_tmp_directories=True,  # what a kill in the middle of a save left
                enable_async_checkpointing=True,
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def reached_preemption(self, step: int) -> bool:
        """Whether all hosts agreed to stop at this step, since one of them got SIGTERM."""
        return self._manager.reached_preemption(step)

    def save(
        self, step: int, *, params: Any, train: Any, iterator: Any, meta: Mapping[str, Any]
    ) -> None:
        """Starts to save; returns once the arrays are copied, so that they may be donated.

        Args:
          step: name of the checkpoint.
          params, train: pytrees of arrays.
          iterator: Grain iterator; its state is taken now, that is, after the batch of `step`.
          meta: JSON values.
        """
        args = self._ocp.args
        self._manager.save(
            step,
            args=args.Composite(
                params=args.StandardSave(nest(flatten_named(params))),
                train=args.StandardSave(nest(flatten_named(train))),
                iterator=args.JsonSave(_iterator_states(iterator)),
                meta=args.JsonSave({**meta, "fingerprint": self._fingerprint}),
            ),
            force=True,
        )

    def restore_latest(self, *, params: Any, train: Any, iterator: Any) -> Restored | None:
        """Restores the newest complete checkpoint, None if there is none.

        Args:
          params, train: the abstract pytrees: jax.ShapeDtypeStructs with the shardings that
            the arrays shall have, which may be of another mesh than the saved ones.
          iterator: Grain iterator, which is set to the saved state.

        Raises:
          UserError: a checkpoint of another config or model, with path and keys; a damaged one.
        """
        step = self.latest_step()
        if step is None:
            return None
        args = self._ocp.args
        place = self.folder / str(step)
        remedy = "delete that folder to go on without it"
        with _damage_named(place, remedy):
            light = self._manager.restore(
                step, args=args.Composite(iterator=args.JsonRestore(), meta=args.JsonRestore())
            )
        meta = light["meta"]
        if meta["fingerprint"] != self._fingerprint:
            raise UserError(
                f"{place}: is a checkpoint of another config (fingerprint {meta['fingerprint']}, "
                f"this run has {self._fingerprint}); name a new --workdir or use that run's config."
            )
        targets = {"params": flatten_named(params), "train": flatten_named(train)}
        restored = {item: args.StandardRestore(nest(target)) for item, target in targets.items()}
        with _damage_named(place, remedy):
            for item, target in targets.items():
                _check_same_arrays(place / item, target)
            arrays = self._manager.restore(step, args=args.Composite(**restored))
        _set_iterator_state(iterator, light["iterator"], place)
        return Restored(
            unflatten_named(params, unnest(arrays["params"], targets["params"])),
            unflatten_named(train, unnest(arrays["train"], targets["train"])),
            meta,
            step,
        )

    def wait(self) -> None:
        """Waits until the last save is committed; raises what went wrong with it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and frees the manager's threads."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def save_params(folder: str | os.PathLike, params: Any, metadata: Mapping[str, Any]) -> None:
    """Writes final weights: `weights/` (arrays by name) and, last, `model.json`.

    Args:
      folder: gets the two; older ones in it are replaced.
      params: pytree of arrays.
      metadata: JSON values that say which model it is; `shapes` is added.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    primary = jax.process_index() == 0
    if primary:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.json").unlink(missing_ok=True)
    named = flatten_named(params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "weights", nest(named), force=True)
    if primary:
        shapes = {name: [*leaf.shape] for name, leaf in named.items()}
        write_json(folder / "model.json", {**metadata, "shapes": shapes})


def load_metadata(folder: str | os.PathLike) -> dict[str, Any]:
    """The metadata that `save_params` wrote.

    Raises:
      UserError: the folder holds no finished weights, or model.json is of another kind.
    """
    file = Path(folder) / "model.json"
    if not file.exists():
        raise UserError(
            f"{folder}: holds no trained weights (no model.json); run the training to its end "
            "or name its workdir."
        )
    metadata = read_json(file)
    if not isinstance(metadata, dict):
        raise UserError(
            f"{file}: is not what a training run writes; copy the run anew or train it again in a "
            "new --workdir."
        )
    return metadata


def load_params(path: str | os.PathLike, abstract_params: Any) -> Any:
    """Reads parameters alone (no optimizer state comes into memory).

    Args:
      path: a folder of `save_params`, or a run's workdir or `checkpoints` folder: the newest
        checkpoint in it.
      abstract_params: pytree of jax.ShapeDtypeStructs or arrays; a leaf's sharding is where
        the array goes (the default device where it has none).

    Raises:
      UserError: nothing there, the weights of another model, with path and keys, or damaged ones.
    """
    import orbax.checkpoint as ocp

    place = _params_folder(Path(path).absolute())
    target = flatten_named(abstract_params)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default
        )
        for name, leaf in target.items()
    }
    remedy = "copy the run anew or train it again in a new --workdir"
    with _damage_named(place, remedy), ocp.StandardCheckpointer() as checkpointer:
        _check_same_arrays(place, target)
        restored = checkpointer.restore(place, nest(target))
    return unflatten_named(abstract_params, unnest(restored, target))


def _params_folder(path: Path) -> Path:
    import orbax.checkpoint as ocp

    if (path / "model.json").exists():
        return path / "weights"
    for folder in (path / "checkpoints", path):
        if folder.is_dir():  # half-written checkpoints are passed over
            names = ocp.path.step.standard_name_format()
            latest = ocp.path.step.latest_step_metadata(folder, names)
            if latest is not None:
                return Path(latest.path) / "params"
    raise UserError(
        f"{path}: holds neither weights (model.json) nor checkpoints; name the workdir of a run."
    )


def _check_same_arrays(place: Path, target: Mapping[str, Any]) -> None:
    """Raises UserError naming the keys if stored arrays differ from the wanted ones."""
    import orbax.checkpoint as ocp

    try:
        tree = ocp.StandardCheckpointHandler().metadata(place).tree
    except FileNotFoundError as error:
        raise UserError(
            f"{place}: is not a complete checkpoint; name the workdir of a run."
        ) from error
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
            f"{place}: is a checkpoint of another model: {'; '.join(problems[:3])}{more}; "
            "use the config that it was trained with."
        )


@contextlib.contextmanager
def _damage_named(place: Path, remedy: str) -> Iterator[None]:
    """Turns what Orbax raises for cut or damaged files into a UserError."""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # not the files' fault, or said already
    except Exception as error:  # Orbax and TensorStore have no common error
        raise UserError(f"{place}: files in it are cut or damaged; {remedy}.") from error


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


def _set_iterator_state(iterator: Any, states: Mapping[str, str], place: Path) -> None:
    if len(states) != jax.process_count() and len(set(states.values())) > 1:
        raise UserError(
            f"{place}: was written by {len(states)} processes whose data iterators stood at "
            f"different places; go on with {len(states)} processes, not {jax.process_count()}."
        )
    text = states.get(str(jax.process_index()), states["0"])
    if text.startswith("json:"):
        iterator.set_state(json.loads(text.removeprefix("json:")))
    else:
        iterator.set_state(text.encode())
