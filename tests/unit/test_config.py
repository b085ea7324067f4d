"""Config files, overrides and fingerprints."""

import re

import pytest
from ml_collections import ConfigDict

from mmqa_jax.core.config import config_fingerprint, load_config, to_plain_dict
from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bart.network import BartConfig
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.models.mcan.network import FusionConfig
from tests.refusals import refuses

FILE = """
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

def get_config(mode=""):
    config = ConfigDict()
    config.seed = 3
    config.name = "full"
    config.train = ConfigDict({"steps": 100, "rate": 0.5, "shuffle": True, "clip": placeholder(float)})
    config.model = ConfigDict({"layers": (2, 4), "names": ("a",), "note": None})
    config.warmup = config.train.get_ref("steps") // 10
    if mode == "runlocal":
        config.train.steps = 10
    return config
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return path


def test_mode_behind_the_colon_reaches_get_config(file):
    assert load_config(file).train.steps == 100
    config = load_config(f"{file}:runlocal")
    assert (config.train.steps, config.warmup) == (10, 1)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "500", 500),
        ("train.steps", "1e4", 10000),
        ("train.steps", "-1", -1),
        ("train.rate", "3", 3.0),
        ("train.rate", "1e-4", 1e-4),
        ("train.shuffle", "false", False),
        ("train.shuffle", "True", True),
        ("train.clip", "1", 1.0),
        ("train.clip", "none", None),
        ("name", "none", "none"),
        ("name", "007", "007"),
        ("model.layers", "(1, 2, 3)", (1, 2, 3)),
        ("model.layers", "8,9", (8, 9)),
        ("model.names", "x,y", ("x", "y")),
        ("model.note", "12", 12),
        ("model.note", "words", "words"),
    ],
)
def test_overrides_take_the_type_of_what_they_replace(file, key, text, value):
    changed = load_config(file, {key: text})
    for part in key.split("."):
        changed = changed[part]
    assert changed == value
    assert type(changed) is type(value)


def test_an_override_may_add_a_key(file):
    config = load_config(file, ["train.ema=1e-3", "train.more.name=none", "trian=a"], adds=True)
    assert (config.train.ema, config.train.more.name, config.trian) == (1e-3, None, "a")
    refuses("has no such key", load_config, file, ["train.steps.more=5"], adds=True)


def test_a_section_may_be_taken_out(file):
    """What may be absent (model.lora) is; a task refuses the config without a section it needs."""
    assert load_config(file, ["train=None"]).train is None
    refuses("has no such key", load_config, file, ["train=None", "train.steps=5"])


def test_overrides_as_list_reach_fields_derived_from_them(file):
    config = load_config(file, ["train.steps=500", "name=a=b"])
    assert (config.train.steps, config.warmup, config.name) == (500, 50, "a=b")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.step": "5"}, r"--config\.train\.step: .*no such key; did you mean 'train\.steps'"),
        ({"trian.steps": "5"}, r"did you mean 'train\.steps'\?"),
        ({"steps": "5"}, r"did you mean 'train\.steps'\?"),
        ({"qqq": "5"}, r"the known ones are .*model\.layers"),
        ({"train.steps.more": "5"}, r"has no such key"),
        ({"train.steps": "2.5"}, r"train\.steps=2\.5: .*small\.py has a whole number there"),
        ({"train.steps": "many"}, r"give a whole number"),
        ({"train.steps": True}, r"give a whole number"),
        ({"train.rate": "fast"}, r"give a number"),
        ({"train.shuffle": "maybe"}, r"give true or false"),
        ({"model.layers": "1,b"}, r"give a tuple"),
        ({"model.layers": "(1, 2"}, r"model\.layers=\(1, 2: .*small\.py has a tuple .*; give a"),
        ({"name": 5}, r"give text"),
        ({"train": "5"}, r"is a section, not a value; set one of train\.clip, train\.rate"),
        (["train.steps"], r"KEY=VALUE was expected"),
    ],
)
def test_wrong_overrides_are_named(file, overrides, message):
    refuses(message, load_config, file, overrides)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, r"absent\.py: no such config file"),
        ("demo.yaml", None, "a python file was expected"),
        ("empty.py", "x = 1\n", r"empty\.py: a config file must define get_config"),
        ("broken.py", "def get_config():\n  return (\n", r"broken\.py, line 2: not valid python"),
        ("plain.py", "def get_config():\n  return {}\n", "it returned dict"),
        ("plain.py:runlocal", "def get_config():\n  return {}\n", "takes no mode"),
    ],
)
def test_files_that_are_no_config_are_named(name, text, message, tmp_path):
    if text:
        (tmp_path / name.partition(":")[0]).write_text(text)
    refuses(message, load_config, tmp_path / name)


def test_fingerprint_follows_values_alone():
    config = ConfigDict({"a": 1, "b": {"c": (1, 2), "d": "x"}})
    same = {"b": {"d": "x", "c": [1, 2]}, "a": 1}
    assert config_fingerprint(config) == config_fingerprint(same)
    assert to_plain_dict(config) == same
    assert config_fingerprint(config) != config_fingerprint({**same, "a": 2})
    assert config_fingerprint({"a": 1}) != config_fingerprint({"a": "1"})
    refuses(r"config key b\.f: holds a function", to_plain_dict, {"b": {"f": load_config}})


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (BertConfig, {"heads": 5}, "model.heads is 5: expected a divisor of model.hidden = 768"),
        (BertConfig, {"heads": 0}, "model.heads is 0: expected a divisor of model.hidden = 768"),
        (BertConfig, {"dropout": 1.0}, "model.dropout is 1.0: expected a rate from 0 to below 1"),
        (BertConfig, {"attention_dropout": -0.1}, "model.attention_dropout is -0.1: expected a"),
        (BertConfig, {"activation": "mish"}, "model.activation is 'mish': expected one of gelu"),
        (BartConfig, {"decoder_heads": 7}, "model.decoder_heads is 7: expected a divisor of model"),
        (BartConfig, {"activation_dropout": 2}, "model.activation_dropout is 2: expected a rate"),
        (LlamaConfig, {"heads": 3}, "model.heads is 3: expected a divisor of model.hidden = 4096"),
        (LlamaConfig, {"kv_heads": 5}, "model.kv_heads is 5: expected a divisor of model.heads"),
        (LlamaConfig, {"head_dim": 5}, "model.head_dim is 5: expected an even number"),
        (FusionConfig, {"heads": 7}, "mcan.fusion.heads is 7: expected a divisor of mcan.fusion"),
        (FusionConfig, {"norm": "rms"}, "mcan.fusion.norm is 'rms': expected one of layer, "),
        (FusionConfig, {"dropout": float("nan")}, "mcan.fusion.dropout is nan: expected a rate"),
        (RopeScaling, {"kind": "ntk", "factor": 2.0}, "rope_scaling type is 'ntk': expected one"),
        (RopeScaling, {"kind": "linear", "factor": 0.5}, "expected a factor of at least 1"),
    ],
)
def test_a_model_config_says_what_is_wrong_and_what_to_do(kind, changes, said):
    """One sentence: the key and its value, what was expected, the remedy, a full stop."""
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        kind(**changes)
    assert re.fullmatch(r"[^;]+: expected [^;]+; (change|use|correct) .+\.", str(caught.value))
