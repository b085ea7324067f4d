"""A family's entry: all that it names is there, and fits what asks for it."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import mmqa_jax
from mmqa_jax.models.common.comparison import Check
from mmqa_jax.weights import registry

ENTRIES = registry.architectures(trained=True)
entries = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


@entries
def test_what_an_entry_names_is_there(entry):
    config = registry._load(entry.config)
    assert dataclasses.is_dataclass(config)
    assert callable(registry._load(entry.model))
    for verb in ("open", "publish") if entry.layouts else ():
        assert callable(entry._keys(verb))
    assert isinstance(entry.part("check"), Check | None)
    assert isinstance(entry.part("base"), registry.Base | None)
    assert all(isinstance(made(), config) for made in (entry.part("presets") or {}).values())
    assert not entry.layers_apart or callable(entry.part("layers_apart"))
    assert not entry.lora or callable(entry.additions.merged)
    assert not entry.peft or entry.additions.peft_linears()["q_proj"] == "q"


@entries
def test_what_writes_has_a_noun_and_presets(entry):
    assert bool(entry.writes) == bool(entry.noun)
    assert not entry.writes or entry.part("presets")
    assert not entry.sees or {"llama", "vision"} <= set(
        vars(next(iter(entry.part("presets").values()))())
    )
    assert not entry.lora or entry.writes


def test_every_folder_of_a_family_is_listed():
    folders = Path(mmqa_jax.__file__).parent.joinpath("models").glob("*/__init__.py")
    declaring = {file.parent.name for file in folders if "FAMILIES" in file.read_text("utf-8")}
    assert declaring == set(registry.FOLDERS)


def test_the_entries_need_no_numerical_library():
    code = "from mmqa_jax.weights.registry import describe; describe(); import sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"jax", "flax", "numpy", "torch"} & set(loaded.stdout.split())


def test_nouns_are_said_in_one_list():
    assert registry.nouns("writes") == "LLaMA, LLaVA, LLaVA-OneVision, Mistral 3, Qwen-VL or T5"
    assert registry.nouns("lora") == "LLaMA or Qwen-VL"
