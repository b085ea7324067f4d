"""`mmqa plan`: programs from shapes alone, memory, verdicts, and what it refuses."""

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from cli_runs import ROOT, mmqa

from mmqa_jax.core.chips import GIB, GPUS, TPUS, chip_of_kind
from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.plan import topology as topologies
from mmqa_jax.plan import verdict as planning
from mmqa_jax.plan.exchange import Exchange
from mmqa_jax.plan.program import (
    Compiled,
    Memory,
    Planned,
    Program,
    compile_program,
    needed_bytes,
    shard_bytes,
)
from mmqa_jax.plan.programs import (
    PRESETS,
    engine_of,
    engine_sizes,
    make_program,
    program_names,
)
from mmqa_jax.plan.topology import Topology, open_topology, read_calibration
from mmqa_jax.plan.verdict import Plan, Remedy, changed
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TINY_LLM = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 4, "mlp": 48, "positions": 64}
needs_libtpu = pytest.mark.skipif(
    sys.platform != "linux", reason="the TPU's compiler is made for Linux alone"
)


def language_model(**lora):
    config = load_config(ROOT / "configs/scienceqa/rmr_finetune.py:runlocal")
    return changed(
        config,
        {
            "model.changes": TINY_LLM,
            "model.lora": None,
            "batches.length": 64,
            "batches.targets": 16,
            "tokenizer": "corpus:300",
            **lora,
        },
    )


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_an_update_of_what_lies_on_the_host_is_planned_too(offload):
    config = changed(language_model(), {"train.offload": offload})
    assert program_names(language_model())[:2] != program_names(config)[:2] == ("train", "update")
    train, update = (make_program(name, config, jax.devices()[:1]) for name in ("train", "update"))
    assert train.host == update.host > update.parameters > 0
    whole = make_program("train", language_model(), jax.devices()[:1])
    held = whole.parameters + whole.optimizer
    assert train.host + train.parameters + train.optimizer == held
    assert (train.parameters < whole.parameters) == (offload == "parameters")
    assert update.optimizer == train.optimizer < 100  # the counts alone


def test_flops_of_a_model_are_those_of_an_independent_count():
    config = language_model()
    program = make_program("train", config, jax.devices()[:1])
    rows, length, targets = config.batches.batch_size, 64, 16
    size, mlp = TINY_LLM["hidden"], TINY_LLM["mlp"]
    of_layer = 2 * rows * length * (4 * size * size + 3 * size * mlp)
    attention = 2 * 2 * rows * length * length * size
    head = 2 * rows * targets * size * 300
    # Backward: the gradient of both factors of every product.
    expected = 3 * (TINY_LLM["layers"] * (of_layer + attention) + head)
    assert program.model_flops() == expected


def test_a_base_that_is_not_here_is_planned_by_its_sizes():
    config = load_config(ROOT / "configs/scienceqa/rmr_finetune.py:pod")
    with pytest.raises(UserError, match=r"init=weights/llama2-7b: .*--model=NAME.*llama2_7b"):
        make_program("train", config, jax.devices()[:1])


def test_a_vision_language_model_is_planned_by_its_sizes():
    """LoRA alone has moments; a picture takes 576 tokens, padded to 768, beside the text's 512."""
    config = load_config(ROOT / "configs/aokvqa/vlm_finetune.py")
    program = make_program("train", config, jax.devices()[:1], model="qwen25_vl_7b")
    # q and out, k and v, gate and up and down of Qwen2.5-7B: in + out of each, of 28 layers.
    widths = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    added = 28 * 16 * widths
    assert program.optimizer - 4 * 2 * added in range(64)  # and counters
    # Published: 8.29 B parameters, in float32 here.
    assert round((program.parameters / 4 - added) / 1e9, 2) == 8.29
    ints = 5 * (512 + 768) + 3 * 256 + 2 * 4 * 768 + 2 + 768
    assert program.input_bytes == 8 * (4 * ints + 4 * 768 * 14 * 14 * 3)
    with pytest.raises(UserError, match=r"--model=llava15_7b: sizes are not known"):
        make_program("train", config, jax.devices()[:1], model="llava15_7b")


def test_adafactors_state_is_planned():
    """Of LLaMA-2-7B: rows and columns of every matrix, all of the norms; Adam's is 50 GiB."""
    config = load_config(ROOT / "configs/scienceqa/rmr_finetune.py:pod")
    optimizers = {}
    for name in ("adamw", "adafactor"):
        config.train.optimizer.name = name
        program = make_program("train", config, jax.devices()[:1], model="llama2_7b")
        optimizers[name] = program.optimizer
    assert round(optimizers["adamw"] / 2**30, 1) == 50.2
    layer = 4 * (4096 + 4096) + 3 * (4096 + 11008) + 2 * 4096
    values = 32 * layer + 2 * (32000 + 4096) + 4096
    # Beside them counters, and a zero in place of what a parameter lacks.
    assert 0 < optimizers["adafactor"] - 4 * values < 4096


def test_recomputation_is_no_flops_of_the_model():
    plain, full = language_model(), language_model()
    full.model.changes.remat = "full"
    counted = [make_program("train", c, jax.devices()[:1]).model_flops() for c in (plain, full)]
    assert counted[0] == counted[1] > 0


def test_memory_is_that_of_the_compiled_program():
    weights = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    step = jax.jit(lambda w, x: (w - jnp.tanh(x.T @ jnp.sin(x @ w)), 1.0), donate_argnums=0)
    program = Program(
        name="train",
        trace=lambda: step.trace(weights, x),
        mesh={},
        model_flops=lambda: 2 * 2 * 64 * 256 * 512,
        parameters=shard_bytes(weights),
    )
    planned = compile_program(program)
    stats = step.lower(weights, x).compile().memory_analysis()
    kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert stats.alias_size_in_bytes == 256 * 512 * 4  # donated: one copy of the weights
    memory = planned.memory
    assert memory.parameters == 256 * 512 * 4
    assert memory.total == stats.argument_size_in_bytes + stats.temp_size_in_bytes + kept
    assert memory.temporaries >= 64 * 512 * 4  # the activations
    assert memory.total == memory.parameters + memory.temporaries
    assert planned.flops == {"f32": 2 * 2 * 64 * 256 * 512}
    assert planned.floor_bytes == stats.argument_size_in_bytes + stats.output_size_in_bytes
    assert Planned.of(planned, TPUS["v5e"]).fits


def test_weights_that_a_program_does_not_read_are_there():
    weights = {name: jax.ShapeDtypeStruct((256, 512), jnp.float32) for name in ("layers", "head")}
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    encode = jax.jit(lambda weights, x: x @ weights["layers"])
    program = Program(
        name="prefill",
        trace=lambda: encode.trace(weights, x),
        mesh={},
        model_flops=lambda: 2 * 64 * 256 * 512,
        parameters=shard_bytes(weights),
        arguments=(weights, x),
    )
    memory = compile_program(program).memory
    assert memory.parameters == 2 * 256 * 512 * 4
    assert memory.temporaries >= 64 * 512 * 4  # what it returns
    assert memory.total == memory.parameters + memory.temporaries


def test_a_config_is_planned_without_its_data():
    ended = mmqa(
        "plan",
        f"--config={ROOT}/configs/atlas/modality.py:runlocal",
        "--config.data.dir=nowhere",
        "--config.model.changes.hidden=16",
        "--config.model.changes.layers=1",
        "--config.model.changes.heads=2",
        "--config.model.changes.mlp=16",
        "--config.tokenizer=corpus:100",
        "--only=train",
        "--json",
    )
    assert ended.code == 0, ended.err
    found = ended.value
    assert list(found) == [
        *("topology", "devices", "chip", "programs", "run", "calibration", "verdict")
    ]
    assert found["calibration"] is None
    (train,) = found["programs"]
    keys = (
        *(
            "name",
            "fits",
            "memory_gib",
            "host_gib",
            "hbm_gib",
            "flops",
            "model_flops",
            "floor_bytes",
        ),
        *("bound_ms", "bound_by", "mfu_bound", "collectives_ms", "network_ms", "collectives"),
        "compile_seconds",
    )
    assert set(train) == set(keys)
    memory = ("parameters", "optimizer", "cache", "temporaries", "total")
    assert tuple(train["memory_gib"]) == memory
    assert found["run"]["steps"] == 4
    assert found["run"]["chip_hours_bound"] == found["run"]["hours_bound"] > 0
    assert found["verdict"].startswith("fits: ")
    assert "the host delivers" in ended.out
    assert train["model_flops"] == pytest.approx(train["flops"], rel=0.05)


def checked(**changes):
    """As device_check.sh writes it."""
    rows = [{"program": name, "over_bound": 2.0} for name in ("decode", "train_rerank")]
    return {
        "device": "NVIDIA H100 80GB HBM3", "calibration": rows, "typical_over_bound": 2.25,
        "typical_error": 0.11, "typical_memory": 1.04,
    } | changes  # fmt: skip


def test_what_was_measured_is_said_of_devices_of_its_kind(tmp_path, monkeypatch):
    path = tmp_path / "device_check" / "device_check.json"
    path.parent.mkdir()
    path.write_text(json.dumps(checked()))
    h100, v5e = (Topology(name, (), (), chip_of_kind(name)) for name in ("h100", "v5e"))
    found = read_calibration(path, h100)
    assert found.sentence == (
        "decode, train_rerank took 2.25 x their bounds on NVIDIA H100 80GB HBM3 and 1.04 x the "
        "planned memory; a bound times that is off by 11 % as a rule"
    )
    refuses(r"NVIDIA H100 .*, the plan is for TPU v5e; run", read_calibration, path, v5e)
    monkeypatch.chdir(tmp_path)  # without the flag, only what is of this kind
    assert read_calibration(None, h100) == found
    assert read_calibration(None, v5e) is None
    monkeypatch.chdir("/")
    assert read_calibration(None, h100) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "check.json: no such file"),
        ("{", "check.json, line 1, column 2: not valid JSON"),
        ("[]", "TypeError"),
        ('{"device": "x"}', "KeyError: 'calibration'"),
        (json.dumps(checked(calibration=[])), "no program whose time was measured"),
        ("[" * 100_000, "check.json, line 1, column 101: lists or objects nested more than 100"),
        (json.dumps(checked(typical_over_bound=10**400)), "OverflowError"),
    ],
)
def test_a_file_that_is_no_check_is_refused(text, message, tmp_path):
    path = tmp_path / "check.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"^--measured=.*check.json: .*{message}"):
        read_calibration(path, Topology("h100:1", (), (), chip_of_kind("h100")))


@needs_libtpu
def test_a_program_is_compiled_for_a_tpu():
    slice_ = open_topology("v5e:2x2")
    assert len(slice_.devices) == 4
    mesh = jax.sharding.Mesh(slice_.devices, "data")
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss(weights, x):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
        return jnp.square(x.astype(jnp.float32)).sum()

    weights = jax.ShapeDtypeStruct((6, 128, 128), jnp.bfloat16, sharding=whole)
    x = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16, sharding=split)
    step = jax.jit(jax.grad(loss), out_shardings=whole)
    flops = 3 * 6 * 2 * 512 * 128 * 128
    program = Program(
        "train",
        lambda: step.trace(weights, x),
        {"data": 4},
        lambda: flops,
        shard_bytes(weights),
        arguments=(weights, x),
        weights=weights,
        trained=weights,
    )
    row = Planned.of(compile_program(program), slice_.chip).row()
    assert row["fits"]
    assert row["flops"] == flops / 4
    gradients = {"kind": "all-reduce", "axis": "data", "bytes": 6 * 128 * 128 * 2, "slices": 1}
    assert row["collectives"] == [gradients]
    assert 0 < row["mfu_bound"] <= 1

    def too_large(x):
        return jnp.sin(x @ x.T)

    x = jax.ShapeDtypeStruct((1 << 18, 128), jnp.float32, sharding=whole)
    refused = Program("embed", lambda: jax.jit(too_large).trace(x), {"data": 4}, lambda: 1.0, 0)
    compiled = compile_program(refused)
    assert compiled.refused
    assert compiled.memory.total > 200 * GIB
    assert not Planned.of(compiled, slice_.chip).fits


def compiled(total_gib, *, refused=False, name="train", flops=0.0, moved=0.0, sent=0.0):
    program = Program(name, lambda: None, {"data": 8}, lambda: 8e12, GIB, examples=64)
    memory = Memory(GIB, 0, 0, None if refused else (total_gib - 1) * GIB, total_gib * GIB)
    exchanges = (Exchange("all-gather", "data", 8, sent),)
    done = None if refused else {"bf16": flops}
    return Compiled(program, memory, done, exchanges, max(moved, GIB), 1.0)


def a_plan(one, *remedies):
    chip = TPUS["v5e"]
    tried = tuple(Remedy(changes, Planned.of(c, chip)) for changes, c in remedies)
    slice_ = Topology("v5e:2x4", (None,) * 8, (0,) * 8, chip)
    return Plan(slice_, (Planned.of(one, chip),), {"train": tried})


def test_the_verdict_names_what_would_help():
    found = a_plan(
        compiled(20.3, refused=True),
        ({"model.changes.remat": "dots"}, compiled(6.5)),
        ({"batches.batch_size": 512}, compiled(10.2)),
    )
    assert found.verdict == (
        "train needs 20.3 of 15.8 GiB: model.changes.remat=dots needs 6.5, batches.batch_size=512 "
        "needs 10.2."
    )
    row = found.to_json()["programs"][0]
    assert row["fits"] is False
    assert row["memory_gib"]["temporaries"] is row["flops"] is row["bound_ms"] is None
    assert found.to_json()["run"] == {"steps": None, "hours_bound": None, "chip_hours_bound": None}


@pytest.fixture
def compiled_by_rule(monkeypatch):
    """Programs whose memory is 1 GiB and .2 a pair, half with dots, a quarter with full; on `fsdp`
    all is shared by the devices. Recomputation takes time. Returns what was compiled."""
    asked, made = [], {}

    def make_program(name, config, devices, model):
        del devices, model
        pairs, remat = config.batches.batch_size, config.model.changes.get("remat", "none")
        share = 8 if config.mesh.fsdp != 1 else 1
        kept = {"none": 1, "dots": 0.5, "full": 0.25}[remat]
        work = {"none": 3, "dots": 3.5, "full": 4}[remat]
        total = (1 + 0.2 * pairs * kept) / share
        one = compiled(total, name=name, flops=work * 1e9 * pairs, sent=1e9 * share)
        setting = (pairs, remat, config.mesh.fsdp)
        made[setting] = one
        return dataclasses.replace(one.program, examples=pairs, arguments=setting)

    def compile_program(program, placement):
        asked.append(program.arguments)
        return trace_program(program, placement)

    def trace_program(program, placement):
        del placement
        return dataclasses.replace(made[program.arguments], program=program)

    for function in (make_program, compile_program, trace_program):
        monkeypatch.setattr(planning, function.__name__, function)
    return asked


def a_rerank_config(pairs, remat="none"):
    config = load_config(ROOT / "configs/webqa/vlp_select.py")
    return changed(config, {"batches.batch_size": pairs, "model.changes.remat": remat})


class _Device(NamedTuple):
    coords: tuple[int, int]


SLICE = Topology(
    "v5e:2x4", tuple(_Device((n // 4, n % 4)) for n in range(8)), (0,) * 8, TPUS["v5e"]
)


def test_remedies_are_compiled_until_each_kind_fits(compiled_by_rule):
    found = planning.plan(a_rerank_config(128), SLICE, only=["train"])
    tried = [(*one.changes.items(), one.planned.fits) for one in found.remedies["train"]]
    assert tried == [
        (("model.changes.remat", "dots"), True),
        (("mesh.data", 1), ("mesh.fsdp", -1), True),
        (("batches.batch_size", 64), True),
    ]
    assert compiled_by_rule == [
        (128, "none", 1), (128, "dots", 1), (128, "none", -1), (64, "none", 1)
    ]  # fmt: skip
    assert found.verdict.startswith(
        "train needs 26.6 of 15.8 GiB: model.changes.remat=dots needs 13.8"
    )
    fitting = planning.plan(a_rerank_config(32), SLICE, only=["train"])
    assert fitting.remedies == {}
    assert fitting.verdict.startswith("fits: 7.4 of 15.8 GiB; train is bound by ")


def test_a_search_compiles_what_can_be_the_fastest(compiled_by_rule, capsys):
    config = a_rerank_config(64)
    settings = planning._settings("train", config, 8)
    every = []
    for changes in settings:
        program = planning.make_program("train", changed(config, changes), (), None)
        planned = Planned.of(planning.trace_program(program, None), SLICE.chip)
        every.append(planning.Found(changes, planned))
    found = planning.best_settings(config, SLICE)
    assert found[0].changes == max(every, key=lambda setting: setting.rate).changes
    rates = [setting.rate for setting in found]
    assert rates == sorted(rates, reverse=True)
    assert all(setting.rate == 0 for setting in found if not setting.planned.fits)
    # What is exchanged bounds them, so that large batches are the fastest: the first that fits.
    assert compiled_by_rule == [
        (256, "none", 1), (256, "none", 1), (256, "dots", 1), (256, "dots", 1), (256, "full", 1)
    ]  # fmt: skip
    said = capsys.readouterr().err.splitlines()
    assert said[1].startswith("tracing 2 of 27: mesh.data=8 mesh.fsdp=1 mesh.tensor=1 ")
    assert said[1].endswith("=none batches.batch_size=128")
    most = [int(line.split()[3]) for line in said[27:] if line.startswith("compiling ")]
    assert most == [27, 26, 26, 25, 25]
    row = found[0].to_json()
    assert {"changes", "examples_per_second_bound", "fits", "memory_gib"} <= row.keys()


@pytest.mark.parametrize("name", ["contrastive", "vlp_select"])
def test_a_trace_tells_of_all_splits_of_rows_and_weights(name):
    """What a search reads of one mesh's jaxpr is what the others' say."""
    slice_, config = (
        open_topology("v5e:2x2"),
        load_config(f"{ROOT}/configs/webqa/{name}.py:runlocal"),
    )
    first, *others = (
        make_program("train", changed(config, {"mesh.data": 4 // fsdp, "mesh.fsdp": fsdp}),
                     slice_.devices)
        for fsdp in (1, 2, 4)
    )  # fmt: skip
    for program in others:
        alike = dataclasses.replace(program, trace=first.trace)
        placement = slice_.placement(program.placed)
        traced, shared = (planning.trace_program(each, placement) for each in (program, alike))
        assert shared.flops == traced.flops
        assert shared.exchanges == traced.exchanges
        assert shared.floor_bytes == traced.floor_bytes
        assert {"fsdp"} <= {exchange.axis for exchange in shared.exchanges}


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ("webqa/contrastive.py:runlocal", None),
        ("webqa/vlp_select.py:runlocal", None),
        ("prompt/default.py:runlocal", "stories260k"),
    ],
)
def test_a_search_of_small_configs_finds_the_best_of_all(config, model, monkeypatch):
    monkeypatch.setattr(planning, "_FACTORS", (1, 2))
    config = load_config(f"{ROOT}/configs/{config}")
    devices, hosts = tuple(jax.devices()[:1]), (0,)
    place = Topology("local", devices, hosts, GPUS["h100"])
    (name, *_) = planning.chosen(config, (), model)
    config = planning.settled(name, config, devices, model)
    settings = planning._settings(name, config, 1)
    every = [
        planning._planned(name, changed(config, changes), place, model) for changes in settings
    ]
    totals = sorted(planned.compiled.memory.total for planned in every)
    chip = dataclasses.replace(place.chip, hbm_bytes=totals[len(totals) // 2])  # half fit
    rates = [planning.Found({}, dataclasses.replace(one, chip=chip)).rate for one in every]
    found = planning.best_settings(config, Topology("local", devices, hosts, chip), model=model)
    assert found[0].changes == settings[rates.index(max(rates))]
    assert found[0].rate == max(rates) > 0


@pytest.mark.parametrize("seed", range(30))
def test_a_search_finds_the_best_of_all_settings(seed, monkeypatch):
    """Memory of a state and of rows, bounds that a compiled program may miss, many equal."""

    def make_program(name, config, devices, model):
        del devices, model
        pairs, remat, mesh = config.batches.batch_size, config.model.changes.remat, config.mesh
        split = f"{seed} {mesh.data} {mesh.fsdp} {mesh.tensor}"
        state = random.Random(split).uniform(0, 1)  # of the 1 GiB of parameters
        rows = random.Random(f"{seed} {mesh.tensor} {remat}").uniform(2, 16)
        total = state + rows * (pairs / 64) ** 0.5
        chance = random.Random(f"{split} {remat} {pairs}")
        least = pairs * chance.randint(3, 9) * GIB
        missed = dataclasses.replace(
            compiled(total), floor_bytes=least * chance.choice((1, 1.5, 2))
        )
        return dataclasses.replace(
            missed.program, examples=pairs, trace=lambda: missed, floor_bytes=least
        )

    def compile_program(program, placement):
        count.append(placement)
        return dataclasses.replace(program.trace(), program=program)

    def trace_program(program, placement):
        del placement
        return dataclasses.replace(program.trace(), floor_bytes=program.floor_bytes)

    count = []
    for function in (make_program, compile_program, trace_program):
        monkeypatch.setattr(planning, function.__name__, function)
    config = a_rerank_config(64)
    settings = planning._settings("train", config, 8)
    rates = [
        planning.Found(changes, planning._planned("train", tried, SLICE, None)).rate
        for changes in settings
        for tried in [changed(config, changes)]
    ]
    every = len(count)
    found = planning.best_settings(config, SLICE)
    assert found[0].changes == settings[rates.index(max(rates))]
    assert len(count) - every == len(found) < every / 2


@pytest.mark.parametrize(
    ("work", "by", "seconds"),
    [
        ({"flops": 1.97e12}, "compute", 0.01),
        ({"moved": 819e9}, "hbm", 1.0),
        ({"sent": 8 / 7 * 200e9}, "interconnect", 1.0),
    ],
)
def test_the_slowest_part_bounds(work, by, seconds):
    bound = Planned.of(compiled(4, **work), TPUS["v5e"]).bound
    assert bound.by == by
    assert bound.seconds == pytest.approx(seconds)
    assert bound.mfu == pytest.approx(1e12 / (197e12 * seconds))


def test_hosts_are_joined_by_a_slower_network():
    """Of eight GPUs four are a host: each sends half of its quarter to the other host."""
    near = compiled(4, sent=8 / 7 * 50e9)
    far = dataclasses.replace(near, exchanges=(near.exchanges[0]._replace(slices=2),))
    bounds = [Planned.of(one, GPUS["h100"]).bound for one in (near, far)]
    assert [one.network for one in bounds] == pytest.approx([0, 8 / 7 / 4 / 2])
    assert [one.interconnect for one in bounds] == pytest.approx([50 / 450, 6 / 7 * 50 / 450])
    assert [one.by for one in bounds] == ["interconnect", "network"]
    assert bounds[1].seconds == bounds[1].network


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (258.00G) exceeds available HBM (15.75G).",
            258,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.30G of 15.75G hbm. "
            "Exceeded hbm capacity by 4.55G.",
            20.3,
        ),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.", 4),
        ("INVALID_ARGUMENT: Mosaic failed to compile TPU kernel", None),
    ],
)
def test_messages_of_programs_that_do_not_fit(message, gib):
    found = needed_bytes(message)
    assert found is None if gib is None else found == pytest.approx(gib * GIB)


def test_a_program_that_the_compiler_refuses_is_one_sentence():
    def trace():
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such kernel\nmore\nlines")

    with pytest.raises(Exception, match=r"^train: the compiler .*no such kernel\);") as said:
        compile_program(Program("train", trace, {}, lambda: 0.0, 0))
    assert type(said.value).__name__ == "UserError"


SELECT = f"--config={ROOT}/configs/webqa/vlp_select.py:runlocal"
PROMPT = f"--config={ROOT}/configs/prompt/default.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SELECT, "--topology=v9:2x4"], r"--topology=v9:2x4: unknown; .*v5e:AxB.*h100:N"),
        ([SELECT, "--topology=v5e:2x4x2"], r"--topology=v5e:2x4x2: unknown; "),
        ([SELECT, "--topology=v5p-7"], r"--topology=v5p-7: unknown; .*v7x:AxBxC.*b200:N"),
        ([SELECT, "--topology=0x h100:8"], r"--topology=0x h100:8: unknown; "),
        ([SELECT, "--topology=0xv5e:4x4"], r"--topology=0xv5e:4x4: unknown; .*2xv5e:4x4"),
        ([SELECT, "--config.mesh.fsdp=3"], r"mesh: .*fsdp=3.* does not fit \d+ devices"),
        ([SELECT, "--model=llama2_7b"], r"--model=llama2_7b: .*leave it out"),
        ([SELECT, "--only=decode"], r"--only=decode: the config has the programs train, rerank"),
        ([SELECT, "--config.model.frontend=x102"], r"model\.frontend='x102': one of patches"),
        ([PROMPT], r"--model is missing: .*llama2_7b"),
        ([PROMPT, "--model=llama2_8b"], r"--model=llama2_8b: .*did you mean 'llama.*_.*b'"),
        ([PROMPT, "--model=smollm2", "--config.engine.length=100000"], r"engine\.length is 100000"),
        (
            [PROMPT, "--model=smollm2", "--config.model.mesh.data=2", "--config.engine.slots=3"],
            r"engine\.slots is 3: expected a multiple of 2, .* data=2; set it to 4",
        ),
    ],
)
def test_bad_input(arguments, message, refused):
    refused("plan", *arguments, message=message)


def test_a_config_of_neither_kind(refused, tmp_path):
    file = tmp_path / "other.py"
    file.write_text(
        "from ml_collections import ConfigDict\ndef get_config(mode=''):\n    return ConfigDict({'x': 1})\n"
    )
    refused("plan", f"--config={file}", message=r"--config.* neither a `task`")


def test_missing_compilers(monkeypatch, refused):
    real = importlib.util.find_spec

    def without(name, *rest):
        hidden = ("libtpu", "jax_cuda12_plugin")
        return None if name in hidden else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    refused("plan", SELECT, "--topology=v5e:2x4", message=r"libtpu, is not installed; .*\[plan\]")
    for name in ("h100:8", "a100:8", "h200:8", "2x h100:8"):
        refused("plan", SELECT, f"--topology={name}", message=r"CUDA plugin, .*\[cuda12\]")


def test_a_cuda_plugin_that_does_not_compile(monkeypatch, refused):
    def broken(*_, **__):
        raise RuntimeError("the plugin is of another jaxlib\nand more")

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: name == "jax_cuda12_plugin" or found(name, *_)
    )
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", broken)
    message = (
        r"--topology=h100:8: JAX's .* \(the plugin is of another jaxlib\); install .*\[cuda12\]"
    )
    refused("plan", SELECT, "--topology=h100:8", message=message)


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="the GPU's compiler comes with the extra `cuda12`",
)
@pytest.mark.parametrize("name", ["h100:1", "h200:1"])
def test_a_gpu_multiplies_in_fp8(name):
    """Where its target names no runtime, cuBLAS gets the operands widened."""
    place = jax.sharding.SingleDeviceSharding(open_topology(name).devices[0])
    x = jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn, sharding=place)
    product = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32)).lower(x, x)
    text = product.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    assert "__cublas$lt$matmul$f8" in text


@needs_libtpu
def test_a_search_without_a_mesh_that_fits():
    message = (
        r"^--search: the config fits no mesh of v5e:8x8; of the first: batch of 3: must be a m"
    )
    with pytest.raises(UserError, match=message):
        planning.best_settings(a_rerank_config(3), open_topology("v5e:8x8"))


@needs_libtpu
def test_libtpu_of_another_jax(monkeypatch, refused):
    monkeypatch.setattr(topologies, "_installed", lambda name: "0.0.1")
    refused("plan", SELECT, "--topology=v5e:2x4", message=r"libtpu 0\.0\.1 is installed, but jax")


@needs_libtpu
def test_a_slice_that_does_not_exist(refused):
    refused("plan", SELECT, "--topology=v5e:3x5", message=r"v5e:3x5: libtpu knows no such slice")


@needs_libtpu
def test_an_axis_that_cannot_cross_the_slices(refused):
    flags = [SELECT, "--topology=2xv5e:2x2", "--config.mesh.data=1", "--config.mesh.tensor=8"]
    refused(
        "plan", *flags, message=r"mesh: fsdp=1 cannot be split over 2 slices of 4 devices; only"
    )
    flags = [*flags[:2], "--config.mesh.dcn_data=4"]
    refused("plan", *flags, message=r"mesh: dcn_data=4 does not fit 2 slices: ")


@needs_libtpu
def test_a_mesh_may_split_an_axis_of_the_slice():
    """Eight of 4x4x4 chips are one axis of the chips and half of another."""
    mesh = make_mesh({"data": -1, "fsdp": 8}, open_topology("v5p:4x4x4").devices)
    assert dict(mesh.shape) == {"data": 8, "fsdp": 8, "tensor": 1}


@pytest.mark.parametrize("share", [".8x", "0", "nan", "1.5", "-1"])
def test_a_share_of_memory_that_is_none(share):
    code = "import mmqa_jax.core.chips"
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": share}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    message = f"UserError: environment: XLA_PYTHON_CLIENT_MEM_FRACTION={share}: a number above 0"
    assert message in done.stderr


def test_chips_by_the_names_that_jax_gives_them():
    names = {
        "TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v5p": "TPU v5p", "TPU v4": "TPU v4 core",
        "TPU v6 lite": "TPU v6e", "NVIDIA H100 80GB HBM3": "NVIDIA H100",
        "NVIDIA A100-SXM4-80GB": "NVIDIA A100", "NVIDIA H200": "NVIDIA H200",
    }  # fmt: skip
    assert {kind: chip_of_kind(kind).name for kind in names} == names
    assert chip_of_kind("cpu") is None


def test_a_language_model_is_planned_without_a_config():
    devices, config = jax.devices()[:1], load_config(f"{ROOT}/configs/prompt/default.py", [])
    assert engine_of("smollm2").engine.length == "auto"
    assert engine_sizes(engine_of("smollm2"), devices, "smollm2") == engine_sizes(
        config, devices, "smollm2"
    )
    assert program_names(engine_of("smollm2"), "smollm2") == program_names(config, "smollm2")
    assert not engine_of("bge_m3")


def test_the_engine_is_planned_without_weights():
    config = changed(
        load_config(f"{ROOT}/configs/prompt/default.py:runlocal"),
        {"engine.length": 64, "engine.buckets": (32,), "engine.slots": 2},
    )
    program = make_program("decode", config, jax.devices()[:1], "stories260k")
    sizes = PRESETS["stories260k"]()
    head = sizes.vocab_size * sizes.hidden
    of_layer = sizes.hidden * (2 * sizes.hidden + 2 * sizes.kv_heads * sizes.head_size)
    of_layer += 3 * sizes.hidden * sizes.mlp
    norms = sizes.hidden * (2 * sizes.layers + 1)
    assert program.parameters == 4 * (head + sizes.layers * of_layer + norms)
    page = 2 * 32 * sizes.kv_heads * sizes.head_size * sizes.layers * 4
    assert program.cache == (2 * 2 + 1) * page  # two a slot, and one that is nobody's
    assert program.floor_bytes == program.parameters + 4 * page
    products = 2 * 2 * (head + sizes.layers * of_layer)
    # Of one page, since data say how many there are; on a CPU products have 64 columns at least.
    attention = 2 * 2 * sizes.layers * (sizes.hidden * 64 + 32 * sizes.heads * 64)
    assert program.model_flops() == pytest.approx(products + attention, rel=0.01)
    assert json.dumps(Planned.of(compile_program(program), TPUS["v5e"]).row())
