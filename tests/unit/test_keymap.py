"""The weights engine: strict key maps, streamed loading and export, broken files."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import LayerNorm, Linear, stack_layers
from mmqa_jax.models.vlp.keys import fit_types, init_vlp_from_bert, open_vlp, start_vlp, vlp_key_map
from mmqa_jax.models.vlp.network import VLP, vlp_patches
from mmqa_jax.weights import keymap
from mmqa_jax.weights.formats import safetensors
from mmqa_jax.weights.layouts import open_source
from mmqa_jax.weights.published import load_checkpoint
from tests.drawn_weights import drawn
from tests.refusals import refuses

pytestmark = pytest.mark.slow

LAYERS = 3


class Tiny(nnx.Module):
    """One of everything: a stacked linear, a norm, a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = stack_layers(lambda r: Linear(4, 6, ("embed", "mlp"), rngs=r), LAYERS, rngs)
        self.norm = LayerNorm(6, 1e-5, rngs=rngs)
        self.head = Linear(6, 2, ("embed", None), rngs=rngs)


RULES = [
    *keymap.linear_rules("layer.{layer}.dense", "layers"),
    *keymap.norm_rules("norm", "norm"),
    *keymap.linear_rules("head", "head"),
]
MAP = keymap.KeyMap(RULES)


def tensors(seed=0):
    """A checkpoint that fits Tiny, with torch's (out, in) layout."""
    rng = np.random.default_rng(seed)
    shapes = {f"layer.{n}.dense.weight": (6, 4) for n in range(LAYERS)}
    shapes |= {f"layer.{n}.dense.bias": (6,) for n in range(LAYERS)}
    shapes |= {"norm.weight": (6,), "norm.bias": (6,), "head.weight": (2, 6), "head.bias": (2,)}
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


@pytest.fixture(scope="module")
def tiny():
    return nnx.state(drawn(lambda: Tiny(nnx.Rngs())))


def load(state, arrays, key_map=MAP):
    return keymap.load_into(state, key_map, safetensors.ArraySource(arrays, "ckpt"))


def refused(state, arrays, key_map=MAP) -> str:
    with pytest.raises(UserError) as error:
        load(state, arrays, key_map)
    return str(error.value)


def test_every_tensor_lands_in_its_place_and_comes_back(tiny):
    arrays = tensors()
    before = jax.tree.map(np.asarray, tiny)
    state = load(tiny, arrays)
    for n in range(LAYERS):
        np.testing.assert_array_equal(
            state["layers"]["kernel"][...][n], arrays[f"layer.{n}.dense.weight"].T
        )
        np.testing.assert_array_equal(
            state["layers"]["bias"][...][n], arrays[f"layer.{n}.dense.bias"]
        )
    np.testing.assert_array_equal(state["norm"]["scale"][...], arrays["norm.weight"])
    np.testing.assert_array_equal(state["head"]["kernel"][...], arrays["head.weight"].T)
    back = dict(keymap.export(state, MAP))
    assert all(array.flags.c_contiguous for array in back.values())
    assert back.keys() == arrays.keys()
    for key, want in arrays.items():
        np.testing.assert_array_equal(back[key], want)
    # The state that was given is whole still, and names of axes survive.
    jax.tree.map(np.testing.assert_array_equal, before, tiny)
    assert state["layers"]["kernel"].get_metadata()["out_sharding"] == ("layers", "embed", "mlp")


def test_abstract_state_needs_no_initialization():
    abstract = nnx.state(nnx.eval_shape(lambda: Tiny(nnx.Rngs())))
    state = load(abstract, tensors())
    np.testing.assert_array_equal(state["head"]["bias"][...], tensors()["head.bias"])


@dataclasses.dataclass(frozen=True)
class Width:
    outputs: int


def test_a_model_of_one_config_is_traced_once():
    """Whatever its loaded models become."""
    traced = []

    def build(config, *, rngs):
        traced.append(config.outputs)
        return Linear(4, config.outputs, ("embed", None), rngs=rngs)

    first, again, other = (keymap.traced_model(build, Width(n)) for n in (6, 6, 2))
    assert traced == [6, 2]
    assert again is first
    assert other[1]["kernel"].shape == (4, 2)
    for dtype in ("bfloat16", "float32"):
        model = nnx.merge(*keymap.abstract_of(build, Width(6), param_dtype=dtype))
        assert (model.kernel.shape, model.kernel.dtype) == ((4, 6), dtype)
        model.kernel.set_value(np.zeros((4, 6)))
    assert isinstance(first[1]["kernel"].get_value(), jax.ShapeDtypeStruct)
    assert traced == [6, 2]


def test_reads_one_tensor_at_a_time_and_only_what_is_mapped(tiny):
    arrays = tensors() | {"unused.weight": np.zeros(2, np.float32)}
    reads = []

    class Counting(safetensors.ArraySource):
        def read(self, key):
            reads.append(key)
            return super().read(key)

    keymap.load_into(tiny, keymap.KeyMap(RULES, ignore=[r"^unused\."]), Counting(arrays))
    assert sorted(reads) == sorted(tensors())


def test_files_round_trip_and_match_the_safetensors_library(tiny, tmp_path):
    state = load(tiny, tensors())
    safetensors.write_sharded(tmp_path, keymap.untied_source(state, MAP))
    theirs = load_file(tmp_path / "model.safetensors")
    assert theirs.keys() == tensors().keys()
    for key, want in tensors().items():
        np.testing.assert_array_equal(theirs[key], want)
    model = drawn(lambda: Tiny(nnx.Rngs()), 1)
    keymap.load_model(model, MAP, safetensors.SafetensorsSource(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)


def test_half_types_are_read_and_widened(tiny, tmp_path):
    arrays = {key: a.astype(ml_dtypes.bfloat16) for key, a in tensors().items()}
    specs = {key: jax.ShapeDtypeStruct(a.shape, a.dtype) for key, a in arrays.items()}
    safetensors.write_safetensors(tmp_path / "half.safetensors", specs, reversed(arrays.items()))
    state = keymap.load_into(
        tiny, MAP, safetensors.SafetensorsSource(tmp_path / "half.safetensors")
    )
    kernel = state["head"]["kernel"][...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, arrays["head.weight"].T.astype(np.float32))


def test_sharded_folder_is_read_through_its_index(tiny, tmp_path):
    arrays = tensors()
    parts = {"a.safetensors": list(arrays)[:4], "b.safetensors": list(arrays)[4:]}
    for name, keys in parts.items():
        save_file({key: arrays[key] for key in keys}, tmp_path / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = keymap.load_into(tiny, MAP, safetensors.SafetensorsSource(tmp_path))
    np.testing.assert_array_equal(state["norm"]["bias"][...], arrays["norm.bias"])
    (tmp_path / "b.safetensors").unlink()
    missing = r"lacks b\.safetensors, which its index names"
    refuses(missing, safetensors.SafetensorsSource, tmp_path)


def test_conv_patches_is_the_convolution():
    import torch

    rng = np.random.default_rng(0)
    weight = rng.normal(size=(5, 3, 4, 4)).astype(np.float32)
    picture = rng.normal(size=(1, 4, 4, 3)).astype(np.float32)
    want = torch.nn.functional.conv2d(
        torch.from_numpy(picture.transpose(0, 3, 1, 2).copy()), torch.from_numpy(weight)
    )
    transform = keymap.conv_patches(4)
    got = picture.reshape(1, -1) @ transform.forward(weight)
    np.testing.assert_allclose(got[0], want[0, :, 0, 0], atol=1e-5)
    np.testing.assert_array_equal(transform.inverse(transform.forward(weight)), weight)


def test_renamed_keys_and_tied_names(tiny):
    key_map = keymap.KeyMap(
        RULES, rename=[(r"^model\.", ""), (r"gamma$", "weight")], tied=[("copy", "head.weight")]
    )
    arrays = {
        f"model.{key}".replace("norm.weight", "norm.gamma"): a for key, a in tensors().items()
    }
    want = load(tiny, tensors())
    check = lambda got: jax.tree.map(np.testing.assert_array_equal, got, want)  # noqa: E731
    check(load(tiny, arrays, key_map))
    both = arrays | {"copy": arrays["model.head.weight"]}
    check(load(tiny, both, key_map))
    alias_only = dict(both)
    del alias_only["model.head.weight"]
    check(load(tiny, alias_only, key_map))
    message = refused(tiny, arrays | {"copy": arrays["model.head.weight"] + 1}, key_map)
    assert "should be equal: copy and model.head.weight" in message
    exported = dict(keymap.export(want, key_map))
    np.testing.assert_array_equal(exported["copy"], exported["head.weight"])


def test_all_offenders_are_listed_in_one_error(tiny):
    arrays = tensors()
    del arrays["layer.1.dense.weight"], arrays["norm.bias"]
    arrays["head.weight"] = arrays["head.weight"].T
    arrays["layer.3.dense.bias"] = np.zeros(6, np.float32)
    arrays |= {f"extra.{n}": np.zeros(1) for n in range(12)}
    message = refused(tiny, arrays)
    assert message.startswith("ckpt: the checkpoint does not fit the model (")
    assert "2 parameters without a tensor: " in message
    assert "layers/kernel, layers [1]" in message
    assert "norm/bias" in message
    assert "head.weight (6, 2) (model: head/kernel (6, 2), here (2, 6))" in message
    assert "1 layers the model lacks: layer.3.dense.bias (model: 3)" in message
    assert "12 keys without a rule: extra.0, extra.1" in message
    assert "extra.9 and 2 more" in message


def test_missing_key_extra_key_and_shape_alone(tiny):
    arrays = tensors()
    bias = arrays.pop("head.bias")
    assert "1 parameters without a tensor: head/bias" in refused(tiny, arrays)
    arrays["head.bias"] = bias
    assert "1 keys without a rule: head.scale" in refused(tiny, arrays | {"head.scale": bias})
    assert "head.bias (3,) (model: head/bias (2,)" in refused(
        tiny, arrays | {"head.bias": np.zeros(3)}
    )
    # A tensor of another rank does not end in a numpy error.
    assert "norm.weight ()" in refused(tiny, arrays | {"norm.weight": np.float32(1)})
    conv = keymap.KeyMap(
        [*RULES[:-2], keymap.Rule("head.weight", "head/kernel", keymap.conv_patches(2)), RULES[-1]]
    )
    assert "here None" in refused(tiny, arrays, conv)


def test_two_rules_two_keys_and_rules_without_parameter(tiny):
    arrays = tensors()
    doubled = keymap.KeyMap([*RULES, keymap.Rule("head.bias", "norm/bias")])
    assert "keys with two rules: head.bias" in refused(tiny, arrays, doubled)
    renaming = keymap.KeyMap(RULES, rename=[(r"^old\.", "")])
    message = refused(tiny, arrays | {"old.head.bias": arrays["head.bias"]}, renaming)
    assert "keys with one meaning: head.bias and old.head.bias" in message
    second = keymap.KeyMap([*RULES, keymap.Rule("other", "head/bias")])
    message = refused(tiny, arrays | {"other": arrays["head.bias"]}, second)
    assert "two keys for one parameter: head.bias and other" in message
    astray = keymap.KeyMap([*RULES, keymap.Rule("other", "tail/bias")])
    assert "other -> tail/bias" in refused(tiny, arrays | {"other": arrays["head.bias"]}, astray)


def test_another_models_checkpoint(tiny):
    arrays = {"transformer.wte.weight": np.zeros((9, 4)), "lm_head.weight": np.zeros((9, 4))}
    message = refused(tiny, arrays)
    assert "2 keys without a rule: transformer.wte.weight, lm_head.weight" in message
    assert "6 parameters without a tensor" in message


def test_fresh_parameters_stay_and_must_be_initialized(tiny):
    arrays = {key: a for key, a in tensors().items() if not key.startswith("head")}
    key_map = keymap.KeyMap(RULES[:-2], fresh=[r"^head/"])
    state = load(tiny, arrays, key_map)
    np.testing.assert_array_equal(state["head"]["kernel"][...], tiny["head"]["kernel"][...])
    abstract = nnx.state(nnx.eval_shape(lambda: Tiny(nnx.Rngs())))
    assert "never initialized: head/bias, head/kernel" in refused(abstract, arrays, key_map)


def test_lossy_layouts_are_not_exported(tiny):
    key_map = keymap.KeyMap(
        [
            *RULES[:-1],
            keymap.Rule("head.bias", "head/bias", keymap.Transform(lambda x: x[:2], None)),
        ]
    )
    with pytest.raises(UserError, match=r"head\.bias: this layout change cannot be undone"):
        list(keymap.export(tiny, key_map))
    assert keymap.IDENTITY.inverse(3) == 3


def test_broken_and_missing_files(tmp_path):
    whole = tmp_path / "whole.safetensors"
    save_file(tensors(), whole)
    data = whole.read_bytes()
    for cut in (0, 5, 40, len(data) - 1):
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(data[:cut])
        refuses(r"broken\.safetensors: not a whole", safetensors.SafetensorsSource, broken)
    absent = tmp_path / "absent.safetensors"
    refuses(r"absent\.safetensors: no such file", safetensors.SafetensorsSource, absent)
    (tmp_path / "empty").mkdir()
    refuses(r"holds neither model\.safetensors", safetensors.SafetensorsSource, tmp_path / "empty")
    header = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    refuses("tensor 'x': type F4 is not supported", safetensors.SafetensorsSource, foreign)


def test_a_failed_write_leaves_no_file(tmp_path):
    specs = {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(AssertionError, match="is not"):
        safetensors.write_safetensors(
            tmp_path / "x.safetensors", specs, [("a", np.zeros(3, np.float32))]
        )
    with pytest.raises(AssertionError, match="no tensor given for a"):
        safetensors.write_safetensors(tmp_path / "x.safetensors", specs, [])
    assert list(tmp_path.iterdir()) == []


TINY_VLP = vlp_patches(2, hidden=8, heads=2, mlp=12, layers=2, vocab_size=11, positions=16)


@pytest.fixture(scope="module")
def vlp_state():
    """VLP parameters, each at random (fresh biases are 0 and would hide a mix-up)."""
    state = nnx.state(nnx.eval_shape(lambda: VLP(TINY_VLP, rngs=nnx.Rngs())))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape).astype(np.float32)), state)


def vlp(state):
    state = jax.tree.map(lambda x: x, state)  # merge would share the fixture's variables
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: VLP(TINY_VLP, rngs=nnx.Rngs()))), state)


def test_vlp_keys_are_webqa_baselines(vlp_state):
    """Names of WebQA_Baseline's modeling.py, and their torch layouts."""
    got = {key: a.shape for key, a in keymap.export(vlp_state, vlp_key_map(TINY_VLP))}
    layer = {
        f"attention.{part}.{kind}": shape
        for part in ("self.query", "self.key", "self.value", "output.dense")
        for kind, shape in (("weight", (8, 8)), ("bias", (8,)))
    }
    layer |= {
        "intermediate.dense.weight": (12, 8),
        "intermediate.dense.bias": (12,),
        "output.dense.weight": (8, 12),
        "output.dense.bias": (8,),
    }
    for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
        layer |= {f"{norm}.weight": (8,), f"{norm}.bias": (8,)}
    want = {f"bert.encoder.layer.{n}.{k}": s for n in range(2) for k, s in layer.items()}
    want |= {
        "bert.embeddings.word_embeddings.weight": (11, 8),
        "bert.embeddings.position_embeddings.weight": (16, 8),
        "bert.embeddings.token_type_embeddings.weight": (6, 8),
        "bert.embeddings.LayerNorm.weight": (8,),
        "bert.embeddings.LayerNorm.bias": (8,),
        "cls.predictions.bias": (11,),
        "cls.predictions.transform.dense.weight": (8, 8),
        "cls.predictions.transform.dense.bias": (8,),
        "cls.predictions.transform.LayerNorm.weight": (8,),
        "cls.predictions.transform.LayerNorm.bias": (8,),
        "cls.predictions.decoder.weight": (11, 8),
        "vis_embed.0.weight": (8, 12),
        "vis_embed.0.bias": (8,),
        "vis_pe_embed.0.weight": (8, 6),
        "vis_pe_embed.0.bias": (8,),
        "context_classifier.weight": (2, 8),
        "context_classifier.bias": (2,),
    }
    assert got == want


def test_vlp_files_old_names_and_two_token_types(vlp_state, tmp_path):
    import torch

    arrays = dict(keymap.export(vlp_state, vlp_key_map(TINY_VLP)))
    old = {}
    for key, array in arrays.items():
        if "LayerNorm" in key:
            key = key.replace(".weight", ".gamma").replace(".bias", ".beta")
        old[key] = torch.from_numpy(np.array(array))
    old["bert.pooler.dense.weight"] = torch.zeros(8, 8)
    torch.save(old, tmp_path / "model.11.bin")
    zeros = jax.tree.map(jnp.zeros_like, vlp_state)
    model = load_checkpoint(VLP, open_vlp(tmp_path / "model.11.bin"), TINY_VLP)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), vlp_state)

    # VLP's pretraining checkpoints: no source head; here with BERT's two token types.
    types = "bert.embeddings.token_type_embeddings.weight"
    two = {k: np.array(a) for k, a in arrays.items() if not k.startswith("context_classifier")}
    two[types] = two[types][:2]
    save_file(two, tmp_path / "two.safetensors")
    model = vlp(zeros)
    key_map = fit_types(vlp_key_map(TINY_VLP), 2, 6)
    with pytest.raises(UserError, match="without a tensor: source_head/bias, source_head/kernel"):
        keymap.load_model(model, key_map, open_source(tmp_path / "two.safetensors"))
    start_vlp(tmp_path / "two.safetensors", model)
    np.testing.assert_array_equal(
        model.bert.embeddings.token_type.table[...], two[types][[0, 1, 0, 0, 0, 1]]
    )
    assert not model.source_head.kernel[...].any()

    # VinVL: tensors of the region embeddings that have other sizes are left out.
    for key, shape in (("vis_embed.0.weight", (8, 13)), ("vis_pe_embed.0.weight", (8, 9))):
        two[key] = np.ones(shape, np.float32)
    save_file(two, tmp_path / "vinvl.safetensors")
    model = vlp(zeros)
    start_vlp(tmp_path / "vinvl.safetensors", model)
    for part in ("region_content", "region_place"):
        (linear,) = getattr(model, part).linears
        assert not linear.kernel[...].any()
        np.testing.assert_array_equal(linear.bias[...], vlp_state[part]["linears"][0]["bias"][...])
    np.testing.assert_array_equal(
        model.bert.layers.up.kernel[...], vlp_state["bert"]["layers"]["up"]["kernel"][...]
    )


def test_vlp_takes_the_masked_lm_head_where_bert_has_one(vlp_state, tmp_path):
    arrays = {
        key: np.array(a)
        for key, a in keymap.export(vlp_state, vlp_key_map(TINY_VLP))
        if key.startswith(("bert.", "cls."))
    }
    arrays["cls.seq_relationship.weight"] = np.zeros((2, 8), np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    config = {
        "model_type": "bert",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "type_vocab_size": 6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = vlp(jax.tree.map(jnp.zeros_like, vlp_state))
    init_vlp_from_bert(model, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model)["mlm_head"], vlp_state["mlm_head"])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model)["bert"], vlp_state["bert"])
    assert not model.region_content.linears[0].kernel[...].any()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    refuses("heads is 2, the checkpoint's 4", init_vlp_from_bert, model, tmp_path)


def test_torch_files_that_are_not_plain_tensors(vlp_state, tmp_path):
    import torch

    model = vlp(vlp_state)
    refuses(r"absent\.bin: no such file", start_vlp, tmp_path / "absent.bin", model)
    (tmp_path / "noise.bin").write_bytes(b"not a torch file")
    refuses(r"noise\.bin: not a torch file of plain", start_vlp, tmp_path / "noise.bin", model)
    torch.save({"model": object}, tmp_path / "code.bin")
    refuses(r"code\.bin: not a torch file of plain", start_vlp, tmp_path / "code.bin", model)
    torch.save({"step": 3}, tmp_path / "run.bin")
    refuses(r"run\.bin: not a state dict", start_vlp, tmp_path / "run.bin", model)
