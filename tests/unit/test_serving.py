"""How many examples a call takes, and on which devices: as given, or chosen."""

import dataclasses

import numpy as np
import pytest
import test_embedder
from tiny_corpus import PACKING, make_reader

from mmqa_jax.core.config import auto, load_config
from mmqa_jax.core.mesh import DEFAULT_DEVICE
from mmqa_jax.core.serving import (
    AUTO,
    RowCost,
    Serving,
    chosen_batch_size,
    read_batch_size,
    read_mesh,
    serve,
)
from mmqa_jax.data.batches.packing import Packer
from mmqa_jax.inference.batches import rerank_pairs
from mmqa_jax.tasks.registry import read_task
from tests.refusals import refuses

GIB = 2**30
COST = RowCost("pairs", on_cpu=32, most=128, bytes=GIB / 64)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device that is not there."""

    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    stats: dict | None = None

    def memory_stats(self) -> dict | None:
        return self.stats


@pytest.mark.parametrize(
    ("device", "held", "wanted"),
    [
        (FakeDevice("cpu", "cpu"), None, 32),  # as it was, however many devices
        (FakeDevice(), 1 * GIB, 8 * 128),  # no more than keeps it busy
        (FakeDevice(), 13.75 * GIB, 8 * 64),  # half of 2 GiB is free
        (FakeDevice(), 15.75 * GIB, 8),
        (FakeDevice(stats={"bytes_limit": 16 * GIB, "bytes_in_use": 15 * GIB}), None, 8 * 32),
        (FakeDevice("gpu", "NVIDIA unheard of"), None, 8 * 128),
    ],
)
def test_batches_are_chosen_by_kind_and_memory(device, held, wanted):
    assert chosen_batch_size(COST, 8, device, held) == wanted


def test_costs_follow_the_largest_input():
    """Longer inputs, wider types and more beams cost more; a v5e holds the batches of all."""
    select, qa = "configs/webqa/vlp_select.py", "configs/webqa/vlp_qa.py"
    costs = [
        read_task(load_config(f"{select}:pod")).cost(),
        read_task(load_config(select)).cost(),
        read_task(load_config(qa, {"inference.num_beams": 1})).cost(),
        read_task(load_config(qa)).cost(),
    ]
    assert [cost.bytes for cost in costs] == sorted(cost.bytes for cost in costs)
    for cost in (*costs, read_task(load_config("configs/webqa/contrastive.py")).cost()):
        # By the compiler 31 MiB a pair and 54 a question of one example, estimated a little higher.
        assert cost.bytes < 80 * 2**20
        assert chosen_batch_size(cost, 1, FakeDevice(), 0.5 * GIB) == cost.most


def test_given_numbers_are_kept_and_auto_is_yesterdays_on_a_cpu():
    state = np.zeros(3)
    assert serve(5, COST, state) == Serving(DEFAULT_DEVICE, 5, "pairs")
    assert serve(AUTO, COST, state) == Serving(DEFAULT_DEVICE, 32, "pairs")
    assert serve(AUTO, COST, state, beside_training=True).batch_size == 32
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    assert serve(5, COST, state).to_json() == {"devices": 1, "mesh": one, "batch_size": 5}


def test_auto_and_numbers_replace_each_other():
    file = "configs/atlas/rerank.py"
    assert load_config(file).inference.batch_size == AUTO
    assert load_config(file, ["inference.batch_size=5"]).inference.batch_size == 5
    assert load_config(file, {"inference.batch_size": 5}).inference.batch_size == 5
    config = load_config("configs/webqa/vlp_select.py:runlocal", ["inference.batch_size=auto"])
    assert config.inference.batch_size == AUTO
    config.inference = {"batch_size": auto()}
    config.inference.batch_size = 7  # as config files assign it
    assert config.to_dict()["inference"] == {"batch_size": 7}


@pytest.mark.parametrize("text", ["0", "-1", "all", "1.5", "", "1" * 5000])
def test_other_batch_sizes_are_refused(text):
    refuses(rf"--batch_size={text}: at least 1 .*, or auto; correct", read_batch_size, text)


def test_meshes_are_read():
    assert (read_batch_size("12"), read_batch_size("auto")) == (12, AUTO)
    assert read_mesh("fsdp=4,tensor=2") == {"fsdp": 4, "tensor": 2}
    assert read_mesh("fsdp=-1") == {"fsdp": -1}
    for text in ("fsdp", "model=2", "fsdp=two", "", "fsdp=" + "2" * 5000):
        refuses(rf"--mesh={text}: AXIS=SIZE", read_mesh, text)


SMALLER = Serving(DEFAULT_DEVICE, 16, "pairs", smaller=(4, 8))


def test_what_is_left_of_a_bucket_takes_a_smaller_batch():
    assert [SMALLER.size_for(n) for n in (1, 4, 5, 8, 9, 16)] == [4, 4, 8, 8, 16, 16]
    reader = make_reader()
    packer = Packer(reader.tokenizer, PACKING)
    questions, candidates = ["a b", "c"], [list(range(10)), list(range(9))]
    whole, parts = (
        list(rerank_pairs(reader, packer, questions, candidates, batch_size=16, serving=serving))
        for serving in (None, SMALLER)
    )
    assert {len(batch["index"]) for batch in whole} == {16}
    assert {len(batch["index"]) for batch in parts} >= {4}
    assert len(parts) == len(whole)
    for one, other in zip(whole, parts, strict=True):
        real = int(one["weights"].sum())
        assert real == other["weights"].sum()
        assert len(other["index"]) == SMALLER.size_for(real)
        for name in ("input_ids", "context_mask", "region_features"):
            np.testing.assert_array_equal(one[name][:real], other[name][:real])


def test_an_embedder_takes_smaller_batches_too():
    whole, parts = test_embedder.embedder(), test_embedder.embedder()
    parts.serving = dataclasses.replace(parts.serving, smaller=(10, 12))
    texts = ["x" * (1 + n % 5) for n in range(27)]  # one bucket: 16 and 11
    sizes = [len(ids) for _, ids, _ in parts._text_batches(texts, "")]
    assert sizes == [16, 12]
    np.testing.assert_allclose(
        whole.embed_questions(texts), parts.embed_questions(texts), atol=1e-6
    )
