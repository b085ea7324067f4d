"""A flipped byte anywhere in a corpus's records is found when it is read, and named."""

import re
import shutil
from pathlib import Path

import pytest
from cli_runs import mmqa, train_flags

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


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


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "junk": lambda path: path.write_bytes(b"\x93\x00\xff{" * 80),
    "empty": lambda path: path.write_bytes(b""),
    "number": lambda path: path.write_text("5"),
    "list": lambda path: path.write_text("[1, {}]"),
    "gone": Path.unlink,
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_training_refuses_every_damaged_file_of_a_corpus(damage, data, tmp_path, capfd):
    """With one sentence that names the file, or the records that it belongs to, and the remedy."""
    files = sorted(path.relative_to(data) for path in data.rglob("*") if path.is_file())
    files = [file for file in files if "pictures" not in file.parts]  # read when one is needed
    assert len(files) > 5
    for number, file in enumerate(files):
        copy = tmp_path / f"data{number}"
        shutil.copytree(data, copy)
        DAMAGE[damage](copy / file)
        ended = mmqa("train", *train_flags("contrastive", copy, tmp_path / "run"))
        assert ended.code == 2, (file, ended.err)
        assert re.fullmatch(r"mmqa: .+[.]\n", ended.err, re.DOTALL), (file, ended.err)
        assert str(copy) in ended.err
        assert re.search(r"mmqa prepare|fetch the file again|check the path|UTF-8", ended.err), file
        assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("damage", ["cut", "junk", "number", "list", "gone", "folder"])
def test_a_finished_run_with_a_damaged_tokenizer_is_not_called_done(damage, data, models, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(models / "contrastive", run)
    DAMAGE[damage](run / "tokenizer.json")
    ended = mmqa("train", *train_flags("contrastive", data, run))
    assert ended.code == 2, ended.err
    assert re.fullmatch(r"mmqa: \S+/run: tokenizer\.json .+[.]\n", ended.err), ended.err
