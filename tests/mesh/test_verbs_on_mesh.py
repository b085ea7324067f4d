"""The verbs that use a model find on eight devices what they find on one.

There are fewer sources, pairs and questions than fit a batch, and last batches that are not full.
What lies on each device is what `mmqa plan` compiles for.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from verbs_on_mesh import run_verbs

from mmqa_jax.core.files import read_json

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
EIGHT = {"data": 8, "fsdp": 1, "tensor": 1}
VERBS = ("rerank", "embed", "answer", "candidates")
SPLIT = {"data": 2, "fsdp": 2, "tensor": 2}


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_same_rankings(one: Path, many: Path) -> None:
    """Both folders hold the same results of `rerank`, up to rounding."""
    for row, other in zip(rows_of(one / "rerank"), rows_of(many / "rerank"), strict=True):
        scores = dict(zip(row["sources"], row["scores"], strict=True))
        assert dict(zip(other["sources"], other["scores"], strict=True)) == pytest.approx(scores)


def check_same(one: Path, many: Path) -> None:
    """Both folders hold the same results of the other verbs, up to rounding."""
    embedded = [np.load(path / "embed/embeddings/embeddings.npy") for path in (one, many)]
    np.testing.assert_allclose(*embedded, atol=1e-6)
    assert len(embedded[0]) == 11
    for row, other in zip(rows_of(one / "answer"), rows_of(many / "answer"), strict=True):
        assert other["answer"] == row["answer"]
        ((text, score),) = row["beams"]
        assert other["beams"] == [[text, pytest.approx(score, abs=1e-5)]]
    found = [read_json(path / "candidates/candidates.json") for path in (one, many)]
    assert found[0].keys() == found[1].keys()
    for question, listed in found[0].items():
        ours, theirs = (
            {c["answer"]: c["confidence"] for c in x} for x in (listed, found[1][question])
        )
        assert theirs == pytest.approx(ours, abs=1e-6)
    nearest = [read_json(path / "candidates/answer_aware_examples.json") for path in (one, many)]
    assert nearest[0] == nearest[1]


def test_eight_devices_find_what_one_does(tmp_path):
    devices = jax.local_devices()
    alone = run_verbs(tmp_path, "one", VERBS, devices[:1], plan=VERBS[:1])
    split = ",".join(f"{axis}={size}" for axis, size in SPLIT.items())
    for name, shape, verbs, flags in (
        ("eight", EIGHT, VERBS, ()),
        ("split", SPLIT, VERBS[:1], (f"--mesh={split}",)),
    ):
        found = run_verbs(tmp_path, name, verbs, devices, *flags)
        assert tuple(found) == verbs
        blocks = shape["data"] * shape["fsdp"]
        for verb, own in found.items():
            before = alone[verb]
            assert "planned" in own
            assert (own["devices"], own["mesh"]) == (8, shape)
            assert (before["devices"], before["mesh"]) == (1, ONE)
            assert own["batch_size"] == -(-before["batch_size"] // blocks) * blocks
            for x in (before, own):
                if "planned" not in x:
                    continue
                held, taken = x["planned"]
                assert x["held"] == [held] * x["devices"]  # each the same
                assert x["taken"] == taken
        assert found["rerank"]["held"][0] < alone["rerank"]["held"][0]  # of the same batch
        check_same_rankings(tmp_path / "one", tmp_path / name)
    check_same(tmp_path / "one", tmp_path / "eight")
