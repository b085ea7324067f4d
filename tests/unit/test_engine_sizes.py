"""Which devices and sizes an engine takes, by model, memory, prompts and kind of device."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest
from tiny_llm import write_folder

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.scanned_cache import layout
from mmqa_jax.decoding.sizes import SIZES, Demand, _Cost, _kv_heads, choose_sizes
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import llama2_7b, llama2_70b, llama31_8b, smollm2_135m
from mmqa_jax.plan.program import tree_bytes
from mmqa_jax.plan.programs import PRESETS
from mmqa_jax.prompting.backends import Choices, Completion, Decoding, local_model
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.prompting.backends.local_model import ModelConfig, open_backend
from tests.refusals import refuses

pytestmark = pytest.mark.slow

GIB = 2**30
V5E = 15.75 * GIB
AUTO = dict.fromkeys(SIZES, "auto")
SEVEN = dataclasses.replace(llama2_7b(), dtype="bfloat16")


def chosen(model, settings=AUTO, mesh=None, count=8, free=V5E, platform="tpu", **demand):
    devices = [SimpleNamespace(platform=platform) for _ in range(count)]
    return choose_sizes(model, settings, mesh or {}, devices, Demand(**demand), free=free)


def shape(sizes):
    return tuple(sizes.shape[axis] for axis in ("data", "fsdp", "tensor"))


def test_a_copy_a_chip_where_a_useful_cache_fits():
    """7B in bfloat16 leaves a v5e no room, in int8 for 8 slots of 1,024 tokens but not of 2,048."""
    assert shape(chosen(SEVEN, AUTO | {"weights": "int8"}, tokens=1000)) == (8, 1, 1)
    assert shape(chosen(SEVEN, AUTO | {"weights": "int8"})) == (4, 1, 2)
    assert shape(chosen(SEVEN)) == (4, 1, 2)
    assert shape(chosen(SEVEN, free=95 * GIB)) == (8, 1, 1)
    assert shape(chosen(SEVEN, free=float("inf"), platform="cpu")) == (8, 1, 1)
    large = dataclasses.replace(llama2_70b(), dtype="bfloat16")
    assert shape(chosen(large)) == (1, 1, 8)
    assert shape(chosen(large, free=95 * GIB)) == (4, 1, 2)


def test_weights_cache_and_steps_fit():
    for free in (V5E, 31 * GIB, 95 * GIB):
        for tokens in (300, 2000, 4096):
            sizes = chosen(SEVEN, free=free, tokens=tokens)
            data, _, tensor = shape(sizes)
            cache = 2 * 32 * 4096 * 2 * sizes.engine.length * sizes.engine.slots
            used = 2 * 6.74e9 / tensor + cache / (data * tensor)
            assert used < 0.95 * free
            assert sizes.engine.slots % data == 0


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_token_takes_the_bytes_of_its_cache(name, tensor):
    """Scanned layers' arrays have whole rows of lanes: a TPU would pad others, and copy them."""
    model = PRESETS[name]()
    if model.kinds or model.heads % tensor:
        return
    cost = _Cost(model, EngineConfig(cache_dtype="int8"), 128, 128, 128, cpu=False, of_rows=True)
    heads = _kv_heads(model, tensor, model.heads)
    cache = layout(dataclasses.replace(model, kv_heads=heads), 1, 128, "int8")
    assert all(x.shape[-1] % 128 == 0 for x in jax.tree.leaves(cache))
    assert tree_bytes(cache) == 128 * tensor * cost.token(tensor)


def test_a_slot_is_as_long_as_the_prompts_need():
    assert chosen(SEVEN, tokens=700).engine.length == 1024
    assert chosen(SEVEN, tokens=300).engine.buckets == (32, 128)
    assert chosen(SEVEN, tokens=300).engine.length == 384
    assert chosen(SEVEN, tokens=4000).engine.length == 4096
    assert chosen(SEVEN).engine.length == 2048
    given = AUTO | {"length": 1000}  # the most that a prompt may have
    assert chosen(SEVEN, given, tokens=100).engine.length == 128
    assert chosen(SEVEN, given, tokens=999).engine.length == 1000
    with pytest.raises(UserError, match=r"engine\.length is 5000: expected at most .* 4096"):
        chosen(SEVEN, AUTO | {"length": 5000})


def test_no_more_slots_than_prompts():
    small = smollm2_135m()
    assert chosen(small, sequences=10**6).engine.slots == 8 * 128
    assert chosen(small, sequences=100).engine.slots == 8 * 16
    assert chosen(small, sequences=1).engine.slots == 8
    on_cpu = {"platform": "cpu", "count": 1, "free": float("inf")}
    assert chosen(small, **on_cpu, sequences=40).engine.slots == 16
    assert chosen(small, **on_cpu, sequences=1000).engine.slots == 32
    assert chosen(small, **on_cpu, sequences=3).engine.slots == 4


def test_what_is_given_is_kept():
    given = {"slots": 24, "length": 512, "buckets": (32, 64), "prefill_tokens": 320}
    sizes = chosen(SEVEN, given, {"data": 2, "fsdp": 2, "tensor": 2}, tokens=512)
    assert {name: getattr(sizes.engine, name) for name in given} == given
    assert shape(sizes) == (2, 2, 2)
    assert shape(chosen(SEVEN, mesh={"tensor": 4})) == (2, 1, 4)
    assert shape(chosen(SEVEN, mesh={"data": 1, "fsdp": 1, "tensor": 1})) == (1, 1, 1)
    assert shape(chosen(SEVEN, mesh={"data": -1, "fsdp": 1, "tensor": 2})) == (4, 1, 2)


def test_slots_as_given_are_split_over_the_devices():
    """What a mesh does not divide would be whole, and computed, on every device."""
    for slots, count, data in ((4, 8, 4), (100, 8, 4), (24, 8, 8), (7, 8, 1), (16, 6, 2)):
        sizes = chosen(smollm2_135m(), AUTO | {"slots": slots}, count=count)
        assert (sizes.engine.slots, *shape(sizes)) == (slots, data, 1, 1)
        assert len(sizes.devices) == data
    assert shape(chosen(SEVEN, AUTO | {"slots": 6})) == (2, 1, 2)
    assert shape(chosen(SEVEN, AUTO | {"slots": 8}, {"fsdp": 4})) == (2, 4, 1)
    given = {"data": 4, "fsdp": 1, "tensor": 2}
    assert shape(chosen(SEVEN, AUTO | {"slots": 12}, given)) == (4, 1, 2)
    for slots, mesh, message in (
        (6, given, r"engine\.slots is 6: expected a multiple of 4, .* data=4; set it to 8, "),
        (1, {"data": 2, "fsdp": 2}, r"is 1: expected a multiple of 4, .* data=2 fsdp=2; .* to 4,"),
        (99, {"data": -1}, r"is 99: expected a multiple of 8, .* data=8; set it to 96, "),
        (6, {"fsdp": 4}, r"is 6: expected a multiple of 8, .* data=2 fsdp=4; set it to 8, "),
    ):
        refuses(message, chosen, SEVEN, AUTO | {"slots": slots}, mesh)


LARGE = dataclasses.replace(llama2_70b(), dtype="bfloat16")
INT8 = AUTO | {"weights": "int8"}


@pytest.mark.parametrize(
    ("model", "options", "lacking"),
    [
        (LARGE, {}, r"need 16\.1 GiB of each of 8 devices \(tensor=8\), where 15\.8 GiB are free"),
        (LARGE, {"count": 1}, r"need 128 GiB of the device, .*; use more devices, .*smaller model"),
        (LARGE, {"settings": INT8}, r"need 18\.2 GiB .* to be loaded and rounded to int8, where"),
        (LARGE, {"count": 16}, ""),
        (SEVEN, {"count": 1}, ""),
        (SEVEN, {"count": 1, "tokens": 4096, "free": 14 * GIB}, r"a sequence of 4,096 .* 2 GiB .*"),
        (SEVEN, {"count": 1, "free": 12 * GIB}, r"need 12\.6 GiB of the device, where 12 GiB are"),
        (SEVEN, {"mesh": {"data": 8}, "free": 12 * GIB}, r"; leave model\.mesh at auto.* tensor=4"),
        (SEVEN, {"mesh": {"fsdp": 8}, "free": 12 * GIB}, ""),
        (LARGE, {"count": 1, "free": float("inf")}, ""),
        (LARGE, {"count": 1, "free": float("inf"), "platform": "cpu"}, ""),
    ],
)
def test_weights_that_fit_no_mesh(model, options, lacking):
    """`mmqa plan` takes these sizes all the same, and compiles what does not fit."""
    sizes = chosen(model, **options)
    assert re.search(lacking, sizes.lacking) if lacking else sizes.lacking == ""
    assert sizes.engine.slots >= 1


def test_int8_weights_are_loaded_before_they_are_rounded():
    """The layout leaves room for both: 8B on a chip of 15.75 GiB, though in int8 it needs 8.5."""
    eight = dataclasses.replace(llama31_8b(), dtype="bfloat16")
    assert shape(chosen(eight, INT8, tokens=1000)) == (4, 1, 2)
    assert shape(chosen(eight, INT8, tokens=1000, free=17 * GIB)) == (8, 1, 1)


def test_weights_that_do_not_fit_are_refused_unread(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model")
    monkeypatch.setattr(local_model, "free_bytes", lambda device: 1e4)
    monkeypatch.setattr(local_model, "weights_hash", None)
    message = r"parts\.llm\.model=.*model: the weights need .* GiB of the device, where .*\.$"
    refuses(message, open_backend, folder, flag="config key parts.llm.model")


def test_weights_split_over_fsdp_leave_room_for_slots():
    whole, split = (chosen(SEVEN, mesh={"data": 8 // n, "fsdp": n, "tensor": 1}) for n in (1, 8))
    assert whole.engine.slots == 8  # 13.5 GB on each: one slot a device
    cache = 2 * 32 * 4096 * 2 * split.engine.length * split.engine.slots / 8
    assert split.engine.slots == 8 * 8
    assert 2 * 6.74e9 / 8 + cache < V5E


def test_a_long_prompt_takes_pages_from_the_others_and_not_slots():
    known = {"sequences": 1000, "prompt_tokens": 900_000, "new_tokens": 64_000}
    short = chosen(SEVEN, tokens=1000, **known)
    long = chosen(SEVEN, tokens=4000, **known)
    unknown = chosen(SEVEN, tokens=4000, sequences=1000)
    assert (short.engine.pages, unknown.engine.pages) == (0, 0)
    assert long.engine.slots == short.engine.slots >= 3 * unknown.engine.slots
    assert long.engine.slots * 7 < long.engine.pages < long.engine.slots * 32
    assert f"of up to 4,096 tokens, {long.engine.pages:,} pages of 128, prompts" in str(long)
    cache = 2 * 32 * 4096 * 2 * 128 * (long.engine.pages + long.shape["data"])
    assert 2 * 6.74e9 / long.shape["tensor"] + cache / len(long.devices) < 0.95 * V5E
    given = AUTO | {"pages": 100, "page": 256}
    assert chosen(SEVEN, given, tokens=4000, **known).engine.pages == 100


def test_sizes_say_what_they_are():
    sizes = chosen(SEVEN, sequences=100, tokens=700)
    assert str(sizes) == (
        "8 devices (data=4 tensor=2), 96 slots of 1,024 tokens, prompts 8,192 tokens at a time in "
        "chunks of 128 or 512"
    )
    assert sizes.to_json() == {
        "devices": 8,
        "mesh": {"data": 4, "fsdp": 1, "tensor": 2},
        "slots": 96,
        "length": 1024,
        "prefill_tokens": 8192,
        "buckets": [128, 512],
    }


def test_later_prompts_may_be_longer_and_more(tmp_path, capsys, monkeypatch):
    """An agent's next step: its prompts hold the answers of the step before."""
    # Each layer was read into the arrays that stay: no stack of layers is copied.
    monkeypatch.setattr("mmqa_jax.decoding.engine.unstack_layers", None)
    folder = write_folder(tmp_path / "model")
    given = {"buckets": (32,)}
    engine = AUTO | given
    backend = open_backend(folder, config=ModelConfig(), engine=engine)
    # The other's before it grows: their programs are the same until then.
    fixed = given | {"slots": 4, "length": 192, "prefill_tokens": 256}
    whole = open_backend(folder, config=ModelConfig(), engine=fixed)
    assert backend.fingerprint == whole.fingerprint
    decoding = Decoding(max_new_tokens=4, logprobs=True)
    steps = [
        [Completion(n, f"ab{n * 'c'}", decoding) for n in range(3)],
        [Completion(n, f"ab{n * 'c'} {'d' * 150}", decoding) for n in range(9)],
        [Choices(n, "ab", ("cc", "d" * 20)) for n in range(40)],
    ]
    assert backend.sizes() is None
    found = []
    for queries in steps:
        for query in queries:
            backend.check(query)
        got, want = (answer_all(one, queries, checked=True).by_id for one in (backend, whole))
        for query in queries[:9]:
            if isinstance(query, Choices):
                totals = [[score.total for score in one[query.id].scores] for one in (got, want)]
            else:
                assert got[query.id].text == want[query.id].text
                totals = [one[query.id].candidates[0].logprobs for one in (got, want)]
            assert totals[0] == pytest.approx(totals[1], abs=1e-4)
        found.append((backend.sizes()["slots"], backend.sizes()["length"]))
    assert found == [(4, 32), (16, 192), (16, 192)]
    assert whole.sizes()["slots"] == 4
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("model: ")]
    assert len(said) == 4  # twice each: `length` is the most, not what a slot has from the start
