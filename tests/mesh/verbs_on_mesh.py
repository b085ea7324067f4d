"""Verbs that use a model, on devices of this process, for test_verbs_on_mesh.py."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from cli_runs import QUESTIONS, done, train_flags, write_documents
from test_cli_candidates import whole_run_flags
from vqa_files import write_okvqa

from mmqa_jax.core.mesh import RowPlacement
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.answers import read_vocabulary
from mmqa_jax.data.published_tokenizers import open_tokenizer
from mmqa_jax.plan.programs import program_in_use
from mmqa_jax.tasks import vqa
from mmqa_jax.tasks.registry import read_task

# Verb -> its model, its data, further flags.
VERBS = {
    "embed": ("contrastive", "data", "--batch_size=8"),
    "rerank": ("rerank", "data"),
    "answer": ("answer", "data", "--sources=oracle"),
    "candidates": ("vqa", "okvqa"),
}

ALL = {"batches.batch_size": 8}  # a training batch of all devices


def write_inputs(folder: Path) -> None:
    """Data, and a run of each task that took no step."""
    raw = write_documents(folder / "raw", QUESTIONS)
    done("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")
    raw = write_okvqa(folder / "raw_okvqa")
    done("prepare", "okvqa", f"--raw={raw}", f"--out={folder / 'okvqa'}")
    for task in ("contrastive", "rerank", "answer"):
        flags = train_flags(task, folder / "data", folder / task, **ALL)
        done("train", *flags, "--only_start")
    size = f"--config.batches.batch_size={ALL['batches.batch_size']}"
    done(*whole_run_flags(folder / "vqa", folder / "okvqa"), size, "--only_start")


def bytes_on(devices: Sequence[jax.Device], arguments: Any) -> list[int]:
    """Bytes of the shards of a tree of arrays on each device."""
    held: Counter[jax.Device] = Counter()
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array):
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
    return [held[device] for device in devices]


def taken(lowered: jax.stages.Lowered) -> int:
    """Bytes of the arguments on one device that a program needs."""
    return lowered.compile().memory_analysis().argument_size_in_bytes


def planned(
    name: str, run: Path, said: dict[str, Any], devices: Sequence[jax.Device]
) -> list[float]:
    """Of the planned program: bytes of its arguments on one device, and of those it takes."""
    config = read_config(run)
    with pytest.MonkeyPatch.context() as patch, config.unlocked(), config.ignore_type():
        # What a plan does not know: the sizes of the vocabularies that the run made.
        config.tokenizer = f"corpus:{open_tokenizer(run / 'tokenizer.json').vocab_size}"
        config.inference.update({"batch_size": said["batch_size"], "mesh": said["mesh"]})
        if name == "candidates":
            patch.setattr(vqa, "PLANNED_ANSWERS", len(read_vocabulary(run)))
        program = program_in_use(name, read_task(config), list(devices))
        blocks = program.mesh["data"] * program.mesh["fsdp"]
        held = program.parameters + program.input_bytes / blocks
        return [held, taken(program.trace().lower())]


@contextlib.contextmanager
def on_devices(devices: Sequence[jax.Device]) -> Iterator[pytest.MonkeyPatch]:
    """As if the process had no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: list(devices))
        patch.setattr(jax, "devices", lambda: list(devices))
        yield patch


def run_verbs(
    folder: Path,
    name: str,
    verbs: Sequence[str],
    devices: Sequence[jax.Device],
    *flags: str,
    plan: Sequence[str] = tuple(VERBS),
) -> dict[str, dict[str, Any]]:
    """Runs verbs on devices; writes what they make to FOLDER/NAME, inputs are in FOLDER/inputs.

    Args:
      plan: the verbs whose programs are compiled once more, as planned and as called.

    Returns:
      Verb -> what it says of devices and batches; `held`, the bytes of its last call's arguments on
      each device; with a plan `taken`, those that its compiled program takes, and `planned`, the
      same two of what `mmqa plan` compiles for as many devices.
    """
    inputs, out = folder / "inputs", folder / name
    if not inputs.exists():
        with on_devices(jax.devices()[:1]):
            write_inputs(inputs)
    out.mkdir()
    calls: list[Any] = []
    call = RowPlacement.call

    def recorded(self: RowPlacement, function: Any, *arguments: Any, **options: Any) -> Any:
        calls.append((self, function, arguments, options))
        return call(self, function, *arguments, **options)

    results = {}
    for verb in verbs:
        task, data, *own = VERBS[verb]
        run = inputs / task
        calls.clear()
        where = f"--data={inputs / data}", "--model", run, f"--out={out / verb}"
        with on_devices(devices) as patch:
            patch.setattr(RowPlacement, "call", recorded)
            said = done(verb, *where, *own, *flags)
        placed = {key: said[key] for key in ("devices", "mesh", "batch_size")}
        placement, function, arguments, options = calls[-1]
        results[verb] = {**placed, "held": bytes_on(devices, arguments)}
        if verb in plan:
            results[verb] |= {
                "taken": taken(call(placement, function.lower, *arguments, **options)),
                "planned": planned(verb, run, placed, devices),
            }
    return results
