"""The weights folder that `mmqa convert` and training share."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.two_towers.config import TextConfig, VisionConfig
from mmqa_jax.models.vlp.atlas_reader import AtlasVLPConfig
from mmqa_jax.models.vlp.network import ClipVLPConfig, VLPConfig
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides
from mmqa_jax.weights.convert import convert
from mmqa_jax.weights.folder import describe_model, load_converted, read_record, save_trained
from mmqa_jax.weights.layouts import read_own_config
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_converted, is_weights_folder
from mmqa_jax.weights.registry import architecture
from tests.drawn_weights import drawn
from tests.refusals import refuses

pytestmark = pytest.mark.slow

BERT = BertConfig(vocab_size=30, hidden=12, layers=2, heads=3, mlp=16, positions=9, types=6)
VLP = VLPConfig(BERT, 7, 5, (9,))
VISION = VisionConfig(16, 8, width=8, layers=2, heads=2, mlp_width=12, embed_dim=12)
TEXT = TextConfig(20, 6, width=10, layers=2, heads=2, mlp_width=12, embed_dim=12)


def trained(folder, model):
    """A training run's final weights, as the loop writes them."""
    (folder / "config.json").write_text(json.dumps({"config": {"task": "answer"}}))  # the run's
    params = nnx.state(model, nnx.Param)
    save_trained(folder, model, params, {"task": "answer", "step": 3})
    return params


def same(one, other):
    one, other = flatten_named(one), flatten_named(other)
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize(
    "config",
    [
        VLP,
        AtlasVLPConfig(**vars(VLP), region_tags=True, copy_head=True, written_words=9),
        ClipVLPConfig(**vars(VLP), vision=VISION, vision_layer=0),
        DualEncoderConfig(dataclasses.replace(BERT, types=2), VISION),
        DualEncoderConfig(TEXT, VISION, fusion="image"),
    ],
    ids=["vlp", "atlas", "vlp_clip", "minilm", "clip"],
)
def test_one_loader_opens_a_training_run(config, tmp_path):
    is_vlp = isinstance(config, VLPConfig)
    build = config.build if is_vlp else functools.partial(DualEncoder, config)
    made = drawn(lambda: build(rngs=nnx.Rngs()))
    params = trained(tmp_path, made)
    assert is_weights_folder(tmp_path)
    assert not is_converted(tmp_path)
    found = read_record(tmp_path)
    assert (found.config, found.dtype, found.record["step"]) == (config, "float32", 3)
    model = load_converted(tmp_path)
    assert type(model) is type(made)
    same(nnx.state(model), params)
    if is_vlp:  # as from when all VLPs had one config
        record = json.loads((tmp_path / "model.json").read_text())
        off = {"region_tags": False, "copy_head": False, "written_words": None}
        record["config"] = {**off, "vision": None, "vision_layer": -2, **record["config"]}
        (tmp_path / "SHA256SUMS").unlink()
        (tmp_path / "model.json").write_text(json.dumps(record))
        assert load_converted(tmp_path).config == config


def test_a_trained_vlp_is_exported(tmp_path):
    model = drawn(lambda: TwoSidedVLP(VLP, TwoSides(1), rngs=nnx.Rngs()))
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    params = trained(run, model)
    assert read_record(run).architecture.name == "vlp"  # the parameters are VLP's
    done = convert("vlp", run, out, export="hf")
    assert done["parameters"] == sum(x.size for x in jax.tree.leaves(params))
    same(nnx.state(load_published("vlp", out)), params)


def test_what_the_original_does_not_have_is_not_exported(tmp_path):
    (tmp_path / "vlp").mkdir()
    (tmp_path / "clip").mkdir()
    copying = AtlasVLPConfig(**vars(VLP), copy_head=True)
    trained(tmp_path / "vlp", drawn(lambda: copying.build(rngs=nnx.Rngs())))
    with pytest.raises(UserError, match=r"layout does not have: copy_head/.*; it cannot be exp"):
        convert("vlp", tmp_path / "vlp", tmp_path / "out", export="hf")
    dual = DualEncoderConfig(TEXT, VISION)
    trained(tmp_path / "clip", drawn(lambda: DualEncoder(dual, rngs=nnx.Rngs())))
    with pytest.raises(UserError, match=r"holds a dual_encoder; that has no published layout"):
        convert("clip", tmp_path / "clip", tmp_path / "out", export="hf")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_an_older_convert_is_read(tmp_path):
    trained(tmp_path, drawn(lambda: VLP.build(rngs=nnx.Rngs())))
    record = json.loads((tmp_path / "model.json").read_text())
    del record["task"]
    (tmp_path / "model.json").unlink()
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert is_converted(tmp_path)
    assert load_converted(tmp_path).config == VLP


ENCODER = dataclasses.asdict(BERT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, r": dtype is 'float16', .* convert the model aga"),
        ({"model": "brt"}, r": model=brt: unknown; use one of clip, .*, caption_mcan, "),
        ({"config": ENCODER | {"hidden_size": 12}}, r", key config: unknown field 'hidden_size'"),
        ({"model": "vlp", "config": {"region_features": 7}}, r", key config: lacks bert; add it"),
        ({"config": None}, r", key config is None: expected BertConfig; correct it"),
        ({"config": ENCODER | {"heads": "3"}}, r", key config\.heads is '3': .*int; correct"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_key(changes, message, tmp_path):
    record = describe_model(architecture("bert"), BERT, "float32") | changes
    (tmp_path / "model.json").write_text(json.dumps(record))
    refuses(rf"model\.json{message}", read_record, tmp_path)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("brt", {}, "--model=brt: unknown; use one of clip, .*, detector.$"),
        ("bert", {"dtype": "float16"}, "--dtype=float16: unknown; use one of bfloat16, float32"),
        ("bert", {"export": "onnx"}, "--export=onnx: unknown; use hf"),
        ("clip", {"preprocessing": "own"}, "--preprocessing=own: unknown; use one of openai, tra"),
        ("bert", {"preprocessing": "openai"}, "--preprocessing: is kept with a CLIP's .*; leave"),
        ("clip", {"preprocessing": "openai", "export": "hf"}, "--preprocessing: .*; leave it out"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(model, options, message, tmp_path):
    refuses(message, convert, model, tmp_path / "absent", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (3, r": mmqa_jax is 3, expected an object; export it again"),
        ({}, r", key mmqa_jax\.config is None: expected BertConfig; correct it"),
        ({"config": {"head": 3}}, r", key mmqa_jax\.config: unknown field 'head'; .*vocab_"),
    ],
)
def test_an_exports_config_that_does_not_fit_is_refused(stated, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"mmqa_jax": stated}))
    refuses(rf"config\.json{message}", read_own_config, BertConfig, tmp_path)
