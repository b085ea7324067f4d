"""`mmqa train` on two processes against one: the same batches, losses and validation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MMQA = [sys.executable, "-c", "import sys; from mmqa_jax.cli import main; sys.exit(main())"]
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
    finish(start("prepare", "corpus", f"--raw={raw}", f"--out={folder}"))
    return folder


def start(*arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*MMQA, *arguments],
        cwd=ROOT,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen) -> None:
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs


def train_flags(data: Path, workdir: Path) -> list[str]:
    flags = [f"--config={ROOT}/configs/atlas/contrastive.py:runlocal", f"--workdir={workdir}"]
    flags.append(f"--config.data.dir={data}")
    for key, value in TINY.items():
        section = value if isinstance(value, dict) else {"": value}
        flags += [f"--config.{f'{key}.{name}'.strip('.')}={x}" for name, x in section.items()]
    return flags


def split_over(axis: str) -> list[str]:
    """Flags of a mesh of two devices: batches, or batches and parameters, are split."""
    sizes = {"data": 1, "fsdp": 1, axis: 2}
    return [f"--config.mesh.{name}={size}" for name, size in sizes.items()]


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
    finish(start("train", *train_flags(data, workdir)))
    return workdir


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_two_processes_train_as_one_does(data, alone, tmp_path, axis):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    finish(
        *(
            start(
                "train",
                *train_flags(data, tmp_path / "two"),
                *split_over(axis),
                JAX_COORDINATOR_ADDRESS=address,
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(process),
            )
            for process in range(2)
        )
    )
    record = json.loads((tmp_path / "two" / "config.json").read_text())
    assert record["devices"]["processes"] == 2
    # With the parameters split over the processes, what is fetched is gathered.
    for two, one in zip(curve(tmp_path / "two"), curve(alone), strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    assert best_step(tmp_path / "two") == best_step(alone)
