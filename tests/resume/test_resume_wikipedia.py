"""`mmqa prepare dpr` killed while it writes: the next call goes on, and writes the same bytes."""

import os
import signal
from pathlib import Path

import pytest

from mmqa_jax.data import disk_sources
from mmqa_jax.data.corpus import open_sources
from mmqa_jax.data.wikipedia.streams import KILTStream
from mmqa_jax.runs.corpora import prepare
from tests.forks import server
from tests.unit.test_wikipedia import KILT, lines

pytestmark = pytest.mark.slow
SHARD = 512
# Prepares with small shards, and is killed when it has written so many batches of 256.
KILLED = """
import os, signal, sys
from pathlib import Path
from mmqa_jax.data import disk_sources
from mmqa_jax.runs.corpora import prepare

disk_sources.SHARD_ROWS = {shard}
write, left = disk_sources.ShardFile.write, [{batches}]

def counted(self, rows):
    write(self, rows)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

disk_sources.ShardFile.write = counted
prepare("kilt", Path(sys.argv[1]), Path(sys.argv[2]), passage_words=3)
"""


def contents(out: Path) -> dict[str, bytes]:
    folder = open_sources(out).sources.folder
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_killed_twice_and_the_same_to_the_byte(tmp_path, monkeypatch):
    raw = tmp_path / "kilt_knowledgesource.json"
    # Articles of 5 passages each, so that shards end within them, and lines that are left out.
    pages = [{**KILT[n % 2], "wikipedia_id": n} for n in range(1000)]
    raw.write_bytes(lines(pages)[:-1] + b"\nbroken\n")
    for batches in (3, 5):  # within the second shard, then within the fourth
        code = KILLED.format(shard=SHARD, batches=batches)
        fork = server().start(["-c", code, str(raw), str(tmp_path / "killed")], os.environ)
        said, _ = fork.communicate()
        assert fork.returncode == -signal.SIGKILL, said
    monkeypatch.setattr(disk_sources, "SHARD_ROWS", SHARD)
    skipped, items = [], KILTStream.items

    def read(self, opened, skip):
        skipped.append(skip)
        return items(self, opened, skip)

    monkeypatch.setattr(KILTStream, "items", read)
    killed = prepare("kilt", raw, tmp_path / "killed", passage_words=3)
    whole = prepare("kilt", raw, tmp_path / "whole", passage_words=3)
    assert skipped[0] > 600  # three shards were there
    assert skipped[1] == 0
    assert killed == whole
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert killed["counts"]["sources"] > 3 * SHARD
    assert killed["origin"]["left_out_items"] == {"without text": 500, "broken": 1}
