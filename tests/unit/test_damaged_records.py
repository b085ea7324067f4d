"""A flipped byte anywhere in a corpus's records is found when it is read, and named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cli_runs import mmqa, train_flags

pytestmark = pytest.mark.usefixtures("quiet")


def damaged(data: Path, kind: str, share: float, copy: Path) -> Path:
    """A copy of the corpus, in which a byte of one file is flipped, that far into its contents."""
    shutil.copytree(data, copy)
    (file,) = copy.rglob(f"{kind}*array_record*")
    content = bytearray(file.read_bytes())
    used = [place for place, byte in enumerate(content) if byte]  # the rest is padding
    content[used[int(share * (len(used) - 1))]] ^= 0xFF
    file.write_bytes(content)
    return copy


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("kind", ["questions-train", "sources-corpus"])
def test_training_names_the_records(kind, share, data, tmp_path):
    bad = damaged(data, kind, share, tmp_path / "data")
    ended = mmqa("train", *train_flags("contrastive", bad, tmp_path / "run"))
    assert ended.code == 2
    folder, split = kind.split("-")
    assert re.fullmatch(
        rf"mmqa: .*/{folder}: its {split} records cannot be read \(.*mmqa prepare` again\.\n",
        ended.err,
        re.DOTALL,
    ), ended.err
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_embedding_names_the_pictures(share, data, models, tmp_path):
    bad = damaged(data, "pictures-corpus", share, tmp_path / "data")
    model = f"--model={models / 'contrastive'}"
    ended = mmqa("embed", f"--data={bad}", model, f"--out={tmp_path / 'index'}")
    assert ended.code == 2
    assert "/pictures: its corpus records cannot be read (" in ended.err
    assert not (tmp_path / "index" / "embeddings" / "embeddings.npy").exists()
