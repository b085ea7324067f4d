"""Verbs that use a model, on this process's devices: verbs_on_mesh.py FOLDER NAME VERBS [MESH]

Writes what they make to FOLDER/NAME, and prints in one line of JSON what they say of devices and
batches; and, of the last call of each, the bytes of its arguments on each device and those that its
compiled program takes, beside the same two of what `mmqa plan` compiles for as many devices. Data
and untrained models are made in FOLDER/inputs if they are not there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from cli_runs import QUESTIONS, done, train_flags, write_documents
from test_cli_candidates import whole_run_flags
from vqa_files import write_okvqa

from mmqa_jax.core.mesh import RowPlacement
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.answer_vocabulary import read_vocabulary
from mmqa_jax.data.clip_tokenizer import open_tokenizer
from mmqa_jax.plan.programs import program_in_use
from mmqa_jax.tasks import vqa
from mmqa_jax.tasks.reading import read_task

# Verb -> its model, its data, further flags.
VERBS = {
    "embed": ("contrastive", "data", "--batch_size=8"),
    "rerank": ("rerank", "data"),
    "answer": ("answer", "data", "--sources=oracle"),
    "candidates": ("vqa", "okvqa"),
}


def write_inputs(folder: Path) -> None:
    """Data, and a run of each task that took no step."""
    raw = write_documents(folder / "raw", QUESTIONS)
    done("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")
    raw = write_okvqa(folder / "raw_okvqa")
    done("prepare", "okvqa", f"--raw={raw}", f"--out={folder / 'okvqa'}")
    for task in ("contrastive", "rerank", "answer"):
        done("train", *train_flags(task, folder / "data", folder / task), "--only_start")
    done(*whole_run_flags(folder / "vqa", folder / "okvqa"), "--only_start")


def bytes_on_devices(arguments: Any) -> list[int]:
    """Bytes of the shards of a tree of arrays on each device, in the devices' order."""
    held: Counter[int] = Counter()
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array):
            for shard in leaf.addressable_shards:
                held[shard.device.id] += shard.data.nbytes
    return [held[device.id] for device in jax.local_devices()]


def taken(lowered: jax.stages.Lowered) -> int:
    """Bytes of the arguments on one device that a program needs."""
    return lowered.compile().memory_analysis().argument_size_in_bytes


def planned(name: str, run: Path, said: dict[str, Any]) -> list[float]:
    """Of the planned program: bytes of its arguments on one device, and of those it takes."""
    config = read_config(run)
    with pytest.MonkeyPatch.context() as patch, config.unlocked(), config.ignore_type():
        # What a plan does not know: the sizes of the vocabularies that the run made.
        config.tokenizer = f"corpus:{open_tokenizer(run / 'tokenizer.json').vocab_size}"
        config.inference.update({"batch_size": said["batch_size"], "mesh": said["mesh"]})
        if name == "candidates":
            patch.setattr(vqa, "PLANNED_ANSWERS", len(read_vocabulary(run)))
        program = program_in_use(name, read_task(config), jax.local_devices())
        blocks = program.mesh["data"] * program.mesh["fsdp"]
        held = program.parameters + program.input_bytes / blocks
        return [held, taken(program.trace().lower())]


def main() -> None:
    folder, out, mesh = Path(sys.argv[1]), Path(sys.argv[1], sys.argv[2]), sys.argv[4:]
    inputs = folder / "inputs"
    if not inputs.exists():
        write_inputs(inputs)
    out.mkdir()
    called: list[Any] = []
    call = RowPlacement.call

    def recorded(self: RowPlacement, function: Any, *arguments: Any, **options: Any) -> Any:
        called.append((self, function, arguments, options))
        return call(self, function, *arguments, **options)

    RowPlacement.call = recorded
    found = {}
    for name in sys.argv[3].split(","):
        task, data, *flags = VERBS[name]
        run = inputs / task
        called.clear()
        flags += [f"--mesh={one}" for one in mesh]
        where = f"--data={inputs / data}", "--model", run, f"--out={out / name}"
        said = done(name, *where, *flags)
        placed = {key: said[key] for key in ("devices", "mesh", "batch_size")}
        placement, function, arguments, options = called[-1]
        found[name] = {
            **placed,
            "calls": len(called),
            "held": bytes_on_devices(arguments),
            "taken": taken(call(placement, function.lower, *arguments, **options)),
            "planned": planned(name, run, placed),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
