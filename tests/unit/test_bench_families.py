"""`python -m tests.bench families`: which presets, whose deviations, and a plan without compiling."""

import jax
import pytest
from tiny_llm import MODEL

from mmqa_jax.plan import programs
from mmqa_jax.plan.program import compile_program, trace_program
from mmqa_jax.plan.topology import open_topology
from tests.bench import families

pytestmark = pytest.mark.slow


def test_every_preset_has_its_family():
    found = families.presets_by_family()
    assert {"llama", "qwen3", "gemma3_text", "t5", "llava", "qwen_vl", "siglip"} <= set(found)
    assert {"qwen25_vl_7b", "qwen3_vl_30b_a3b", "glm41v_9b"} <= found["qwen_vl"].keys()
    assert "mt5_small" in found["t5"]
    known = {*programs.PRESETS, *programs.WITH_PICTURES}
    shown = {name for named in found.values() for name in named}
    assert known - shown == {"smollm2_135m"}  # smollm2's second name
    assert families.bfloat16_gib(found["qwen3"]["qwen3_8b"]) == pytest.approx(
        8190735360 * 2 / 2**30  # the model card's 8.2 billion
    )


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
