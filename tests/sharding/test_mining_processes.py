"""Hard negatives that two processes mine: their file has the bytes of one process's, and is read by
both; a killed pair goes on with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import ROOT, launch, outcomes
from test_two_processes import RING, curve
from test_two_processes import data as corpus  # noqa: F401, a fixture

from mmqa_jax.cli import main
from tests import tiny_encoders

pytestmark = pytest.mark.slow
SETTINGS = {
    "mining": {"every": 2, "top_k": 3},
    "batches": {"batch_size": 4, "query_length": 24, "source_lengths": "(24,)"},
    "train": {"steps": 4, "log_every": 1, "checkpoint_every": 2, "evaluate_every": 2, "keep": 2},
    "validate": {"split": "train", "questions": 0, "sources": 0, "metric": "mrr"},
}


def flags(data: Path, encoder: Path, workdir: Path) -> list[str]:
    made = [f"--config={ROOT}/configs/openstax/retriever.py:runlocal", f"--workdir={workdir}"]
    made += [f"--config.data.dir={data}", f"--config.init={encoder}"]
    for section, values in SETTINGS.items():
        made += [f"--config.{section}.{name}={value}" for name, value in values.items()]
    return made


def negatives(workdir: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (workdir / "negatives").iterdir()}


def test_two_processes_mine_as_one_does(corpus, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    tiny_encoders.save_plain("bert", tmp_path / "encoder")
    alone, two, later = (tmp_path / name for name in ("alone", "two", "later"))
    assert main(["train", *flags(corpus, tmp_path / "encoder", alone)]) == 0
    command = *RING, "train", "--config.mesh.data=2", "--config.mesh.fsdp=2"
    ended = outcomes(
        launch(2, *command, *flags(corpus, tmp_path / "encoder", two), devices=2, fresh=True)
    )
    assert [code for code, _ in ended] == [0, 0], ended
    for ours, theirs in zip(curve(two), curve(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert sorted(negatives(alone)) == ["00000000.npy", "00000002.npy"]
    assert negatives(two) == negatives(alone)

    shutil.copytree(two, later)  # as if both had been killed in step 3
    shutil.rmtree(later / "checkpoints" / "4")
    (later / "model.json").unlink()
    (later / "negatives" / "00000002.npy").unlink()
    assert main(["train", *flags(corpus, tmp_path / "encoder", later)]) == 0
    assert negatives(later) == negatives(alone)
