"""`python -m tests.bench families`: which presets, whose deviations, and a plan without compiling."""

from __future__ import annotations

import jax
import pytest
from tiny_llm import MODEL

from mmqa_jax.plan import programs
from mmqa_jax.plan.program import compile_program, trace_program
from mmqa_jax.plan.topology import open_topology
from tests.bench import families
from tests.equivalence.deviations import Measured, table

pytestmark = pytest.mark.slow


def test_every_preset_has_its_family():
    found = families.presets_by_family()
    assert {"llama", "qwen3", "gemma3_text", "t5", "llava", "qwen_vl", "siglip"} <= set(found)
    assert found["qwen_vl"].keys() == {
        *("qwen2_vl_7b", "qwen25_vl_7b"),
        *("qwen3_vl_2b", "qwen3_vl_8b", "qwen3_vl_30b_a3b"),
    }
    assert "mt5_small" in found["t5"]
    known = {*programs.PRESETS, *programs.WITH_PICTURES}
    shown = {name for named in found.values() for name in named}
    assert known - shown == {"smollm2_135m"}  # smollm2's second name
    assert families.bfloat16_gib(found["qwen3"]["qwen3_8b"]) == pytest.approx(
        8190735360 * 2 / 2**30  # the model card's 8.2 billion
    )


def test_deviations_are_those_that_the_tests_print():
    file = "tests/equivalence/test_{}.py::test_x[{}-1]"
    printed = table(
        [
            (file.format("decoder_families", "qwen3, windows"), Measured(1e-4, 2e-6, 3.0)),
            (file.format("decoder_families", "qwen3"), Measured(1e-5, 4e-7, 3.0)),
            (file.format("t5", "T5"), Measured(1e-4, 1.5e-6, 3.0)),
        ]
    )
    assert dict(families._largest(printed)) == {"qwen3": 2e-6, "t5": 1.5e-6}


def test_a_traced_program_needs_what_the_compiled_one_does(monkeypatch):
    monkeypatch.setitem(programs.PRESETS, "tiny", lambda: MODEL)
    config = families.load_config(str(families._CONFIG), {"engine.length": 64})
    program = programs.make_program("decode", config, jax.devices()[:1], "tiny")
    traced, compiled = trace_program(program), compile_program(program)
    assert (traced.flops, traced.exchanges) == (compiled.flops, compiled.exchanges)
    assert traced.floor_bytes == compiled.floor_bytes
    assert traced.memory.total <= compiled.memory.total
    monkeypatch.setattr(families, "place", lambda name, config, topology: topology)
    row = families.planned("tiny", open_topology("local"))
    assert row["decode"] > 0
    assert row["decode_tokens"] > 0


def test_a_family_is_named_once():
    row = {"family": "x", "deviation": 1.2e-6, "preset": "a", "gib": 1.0}
    timed = {"mesh": "data=8", "decode": 7.512, "prefill": 70.0}
    timed |= {"decode_tokens": 1024, "prefill_tokens": 8192}
    other = {"family": "y", "deviation": None, "preset": "", "gib": None}
    lines = families.markdown([{**row, **timed}, {**row, "preset": "b", "mesh": "more"}, other])
    assert lines[2:] == [
        "| `x` | 1.2e-06 | `a` | 1 | data=8 | 7.51 ms, 1,024 | 70 ms, 8,192 |",
        "|  |  | `b` | 1 | more | – | – |",
        "| `y` | – | – | – | – | – | – |",
    ]
    together = families.markdown([row, {**row, "preset": "b", "gib": 12.34}])[2]
    assert together == "| `x` | 1.2e-06 | `a` `b` | 1 12.3 | – | – | – |"
