"""`mmqa train` on two processes against one: the same batches, losses and validation."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import ROOT, launch, outcomes

from mmqa_jax.cli import main

RING = [sys.executable, str(Path(__file__).with_name("ring_mmqa.py"))]
CAPITALS = {
    "Arvania": "Pelot", "Borduria": "Szohod", "Cinnabar": "Vermil", "Doriath": "Menegroth",
    "Erewhon": "Colcha", "Florin": "Gilder", "Gondal": "Regina", "Hav": "Medina",
}  # fmt: skip
TINY = {
    "tokenizer": "corpus:200",
    "model.changes": {"hidden": 32, "layers": 1, "heads": 2, "mlp": 32},
    "model.vision": {"width": 32, "layers": 1, "heads": 2, "mlp_width": 32, "embed_dim": 32},
    "batches": {"batch_size": 4, "query_length": 24, "source_lengths": "(24,)"},
    "train": {"steps": 4, "log_every": 1, "checkpoint_every": 2, "evaluate_every": 2},
    "validate": {"split": "train", "questions": 0, "sources": 0, "metric": "mrr"},
}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_PROGRESS", "off")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared corpus of eight snippets and a question about each."""
    place = tmp_path_factory.mktemp("corpus")
    raw, folder = place / "raw", place / "data"
    raw.mkdir()
    write_rows(
        raw / "sources.jsonl",
        [
            {"id": land, "modality": "text", "text": f"The capital of {land} is {city}."}
            for land, city in CAPITALS.items()
        ],
    )
    write_rows(
        raw / "questions.jsonl",
        [
            {
                "id": f"q-{land}",
                "split": "train",
                "question": f"What is the capital of {land}?",
                "answers": [city],
                "positives": [land],
                "negatives": [other for other in CAPITALS if other != land],
            }
            for land, city in CAPITALS.items()
        ],
    )
    assert main(["prepare", "corpus", f"--raw={raw}", f"--out={folder}"]) == 0
    return folder


def train_flags(data: Path, workdir: Path) -> list[str]:
    flags = [f"--config={ROOT}/configs/atlas/contrastive.py:runlocal", f"--workdir={workdir}"]
    flags.append(f"--config.data.dir={data}")
    for key, value in TINY.items():
        section = value if isinstance(value, dict) else {"": value}
        flags += [f"--config.{f'{key}.{name}'.strip('.')}={x}" for name, x in section.items()]
    return flags


def curve(workdir: Path) -> list[dict[str, float]]:
    """What was logged of losses and validation."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4]
    return [{k: v for k, v in row.items() if k == "loss" or "eval/" in k} for row in rows]


def best_step(workdir: Path) -> int:
    return json.loads((workdir / "best" / "model.json").read_text())["step"]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The workdir of a run on one process."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", *train_flags(data, workdir)]) == 0
    return workdir


class OnARing(NamedTuple):
    """The workdirs of two processes' commands; their exit codes and what they printed."""

    workdir: Path
    refused: Path  # of the second command, whose config is another on process 1
    ended: list[tuple[int, str]]


@pytest.fixture(scope="module")
def ring(data, tmp_path_factory):
    """On two processes, which hash strings differently, as users' do: a run, and a refused one.

    Process 0 has the first and the last rows, and each pair that splits the parameters has a device
    of either process: what is fetched is gathered.
    """
    folder = tmp_path_factory.mktemp("two")
    workdir, refused = folder / "run", folder / "refused"
    flags = ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.train.keep=2"]
    command = *RING, "train", *flags, *train_flags(data, workdir)
    command = *command, "then", "train", *train_flags(data, refused)
    differing = ("--config.train.steps=5",)
    found = outcomes(launch(2, *command, devices=2, differing=differing, fresh=True))
    return OnARing(workdir, refused, found)


@pytest.fixture(scope="module")
def on_a_ring(ring):
    """The workdir of the run."""
    assert (ring.workdir / "model.json").exists(), ring.ended
    return ring.workdir


def test_two_processes_train_as_one_does(alone, on_a_ring):
    record = json.loads((on_a_ring / "config.json").read_text())
    assert record["devices"]["processes"] == 2
    for ours, theirs in zip(curve(on_a_ring), curve(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert best_step(on_a_ring) == best_step(alone)


def test_what_two_processes_began_one_ends(data, alone, on_a_ring, tmp_path):
    """On another mesh, saving and logging at other steps, by the same command else."""
    run = tmp_path / "run"
    shutil.copytree(on_a_ring, run)
    sums = (run / "checkpoints" / "2" / "SHA256SUMS").read_text()
    assert "params/ocdbt.process_0/manifest.ocdbt" in sums
    assert "params/ocdbt.process_1/manifest.ocdbt" in sums
    shutil.rmtree(run / "checkpoints" / "4")  # as if both had been killed after step 3
    (run / "model.json").unlink()
    others = ("--config.mesh.data=1", "--config.train.checkpoint_every=3", "--config.train.keep=5")
    assert main(["train", *train_flags(data, run), "--config.mesh.fsdp=1", *others]) == 0
    for ours, theirs in zip(curve(run), curve(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert best_step(run) == best_step(alone)
    assert {"2", "3", "4"} <= {path.name for path in (run / "checkpoints").iterdir()}
    (change,) = json.loads((run / "config.json").read_text())["changes"]
    assert change["step"] == 2
    assert change["changed"] == {
        "mesh.data": [2, 1], "mesh.fsdp": [2, 1], "train.checkpoint_every": [2, 3],
        "train.keep": [2, 5],
    }  # fmt: skip


def test_processes_of_two_configs_are_refused(ring):
    """Both end with exit code 2 and the key, and leave no workdir behind."""
    assert [code for code, _ in ring.ended] == [2, 2], ring.ended
    for _, out in ring.ended:
        assert "config key train.steps is 4 on process 0" in out
        assert "Traceback" not in out
    assert not ring.refused.exists()
