"""openvqa's MCAN against a torch restatement of openvqa/models/mcan, float32."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from compare import (
    LAYER,
    WHOLE,
    abstract,
    alone,
    compiled,
    names_its_axes,
    randomize,
    same_gradients,
    same_parameters,
    with_config,
)
from flax import nnx
from mcan_torch import TorchMCAN
from torch import nn

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import torch_linear
from mmqa_jax.models.mcan import network
from mmqa_jax.models.mcan.keys import mcan_openvqa_key_map, open_mcan_openvqa
from mmqa_jax.weights.formats.safetensors import write_sharded
from mmqa_jax.weights.keymap import export, model_source
from mmqa_jax.weights.published import load_checkpoint
from tests.refusals import refuses

# Nothing at its published value.
CONFIG = network.MCANOpenVQAConfig(
    vocab_size=31,
    fusion=network.FusionConfig(
        hidden=24,
        heads=3,
        mlp=40,
        layers=3,
        flat_mlp=20,
        glimpses=2,
        flat_out=36,
        eps=1e-3,
        unroll=1,
    ),
    word_features=14,
    region_features=18,
    answers=13,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(torch model, our model loaded from a training state written on several GPUs)."""
    torch.manual_seed(0)
    theirs = randomize(TorchMCAN(CONFIG), 1)
    path = tmp_path_factory.mktemp("mcan") / "epoch13.pkl"
    parallel = {f"module.{key}": value for key, value in theirs.state_dict().items()}
    optimizer = torch.optim.Adam(theirs.parameters(), 1e-4).state_dict()
    state = {"state_dict": parallel, "optimizer": optimizer, "lr_base": 1e-4, "epoch": 13}
    torch.save(state, path)
    return theirs, loaded(path)


def loaded(path, config: network.MCANOpenVQAConfig = CONFIG) -> network.MCANOpenVQA:
    """A model that was never initialized, filled from a file."""
    return load_checkpoint(network.MCANOpenVQA, open_mcan_openvqa(path), config)


def batch(regions: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Questions of 14, 1 and 6 words; pictures of 7, 2 and 5 regions."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, CONFIG.vocab_size, (3, 14))
    ids[np.arange(14) >= np.array([14, 1, 6])[:, None]] = 0
    features = rng.normal(size=(3, regions, CONFIG.region_features)).astype("f4")
    features[np.arange(regions) >= np.array([7, 2, 5])[:, None]] = 0
    return ids, features


def test_layers_and_logits_equal(pair):
    theirs, ours = pair
    ids, regions = batch()
    open_, image_open = ids != 0, np.abs(regions).sum(-1) > 0
    seen: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"encoder": [], "decoder": []}
    record = lambda name: lambda _, x, y: seen[name].append((x[0].numpy(), y.numpy()))  # noqa: E731
    backbone = theirs.backbone
    hooks = [layer.register_forward_hook(record("encoder")) for layer in backbone.enc_list]
    hooks += [layer.register_forward_hook(record("decoder")) for layer in backbone.dec_list]
    with torch.no_grad():
        logits = theirs(torch.tensor(ids), torch.tensor(regions))
        words, _ = theirs.lstm(theirs.embedding(torch.tensor(ids)))
        question = seen["encoder"][-1][1]
        flat = theirs.attflat_lang(torch.tensor(question), torch.tensor(~open_))
    for hook in hooks:
        hook.remove()

    def run(model):
        fusion = model.fusion
        return {
            "lstm": model.lstm(model.words(ids)),
            "encoder": alone(
                fusion.encoder,
                lambda layer, x: layer(x, open_),
                np.stack([x for x, _ in seen["encoder"]]),
            ),
            "decoder": alone(
                fusion.decoder,
                lambda layer, x: layer(x, image_open, question, open_),
                np.stack([x for x, _ in seen["decoder"]]),
            ),
            "flat": fusion.flatten_question(question, open_),
            "logits": model(ids, regions),
        }

    got = compiled(ours, run)()
    np.testing.assert_allclose(got["lstm"], words, **LAYER)
    for part in ("encoder", "decoder"):
        np.testing.assert_allclose(got[part], np.stack([y for _, y in seen[part]]), **LAYER)
    np.testing.assert_allclose(got["flat"], flat, **LAYER)
    np.testing.assert_allclose(got["logits"], logits, **WHOLE)
    assert logits.std(0).mean() > 0.01  # rows differ by more than the tolerances


def test_gradients_of_the_training_loss_equal(pair):
    """Binary cross entropy, summed (configs/vqa/mcan_large.yml)."""
    theirs, ours = pair
    ids, regions = batch()
    targets = np.random.default_rng(1).choice([0.0, 0.3, 0.6, 0.9, 1.0], (3, 13)).astype("f4")
    theirs.zero_grad()
    loss = nn.BCEWithLogitsLoss(reduction="sum")(
        theirs(torch.tensor(ids), torch.tensor(regions)), torch.tensor(targets)
    )
    loss.backward()
    config = dataclasses.replace(CONFIG, fusion=dataclasses.replace(CONFIG.fusion, remat="full"))
    graphdef, state = nnx.split(with_config(ours, config))

    def bce(state):
        z = nnx.merge(graphdef, state)(ids, regions)
        return -(targets * jax.nn.log_sigmoid(z) + (1 - targets) * jax.nn.log_sigmoid(-z)).sum()

    value, gradients = jax.jit(jax.value_and_grad(bce))(state)
    np.testing.assert_allclose(value, loss.item(), **WHOLE)
    exported = dict(export(gradients, mcan_openvqa_key_map(CONFIG)))
    same_gradients(exported, theirs, zero=r"linear_k\.bias|attflat_\w+\.mlp\.linear\.bias")


def test_padding_changes_nothing_and_bfloat16_little(pair):
    _, ours = pair
    ids, regions = batch()
    more_ids = np.pad(ids, ((0, 0), (0, 3)))
    more_regions = np.pad(regions, ((0, 0), (0, 4), (0, 0)))
    half = dataclasses.replace(CONFIG, fusion=dataclasses.replace(CONFIG.fusion, dtype="bfloat16"))

    def latent(model, ids, regions):
        return model.latent(ids, regions)

    plain, padded = (
        compiled(ours, latent)(*inputs) for inputs in ((ids, regions), (more_ids, more_regions))
    )
    rounded = compiled(with_config(ours, half), latent)(ids, regions)
    np.testing.assert_allclose(padded, plain, **LAYER)
    # Latents have size 1; 8 significant bits, an LSTM of 14 steps and 3 + 3 layers.
    assert rounded.dtype == "float32"
    assert np.abs(rounded - plain).max() < 0.06
    assert np.abs(rounded - plain).mean() < 0.012


def test_unbiased_norm_by_hand():
    norm = network.UnbiasedLayerNorm(4, 0.5, rngs=nnx.Rngs(0))
    x = np.array([1.0, 2.0, 3.0, 6.0], "f4")  # mean 3, squares 4 + 1 + 0 + 9 over 3
    np.testing.assert_allclose(norm(x), (x - 3) / (np.sqrt(14 / 3) + 0.5), rtol=1e-6)


def test_linears_and_lstm_start_as_torchs():
    """torch's Linear: uniform within 1 / sqrt(in); its LSTM: within 1 / sqrt(hidden)."""
    linear = torch_linear(16, 1500, ("embed", "mlp"), rngs=nnx.Rngs(0))
    recurrent = network.LSTM(100, 400, rngs=nnx.Rngs(0)).input
    for layer, bound in ((linear, 0.25), (recurrent, 0.05)):
        for values in (layer.kernel[...], layer.bias[...]):
            assert np.abs(values).max() <= bound
            np.testing.assert_allclose(np.std(values), bound / 3**0.5, rtol=0.05)


def test_export_reloads_in_torch(pair, tmp_path):
    theirs, ours = pair
    key_map = mcan_openvqa_key_map(CONFIG)
    again = TorchMCAN(CONFIG)
    exported = export(nnx.state(ours), key_map)
    again.load_state_dict({key: torch.tensor(tensor) for key, tensor in exported})
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name
    write_sharded(tmp_path, model_source(nnx.state(ours), key_map))
    same_parameters(loaded(tmp_path / "model.safetensors"), ours)


@pytest.mark.parametrize("name", ["img_feat_linear", "frcnfeat_linear"])
def test_older_names_of_the_region_linear(pair, tmp_path, name):
    """MILVLG/mcan-vqa core/model/net.py, and openvqa's first releases."""
    theirs, _ = pair
    tensors = theirs.state_dict()
    for part in ("weight", "bias"):
        tensors[f"{name}.{part}"] = tensors.pop(f"adapter.frcn_linear.{part}")
    torch.save({"state_dict": tensors}, tmp_path / "epoch13.pkl")
    model = loaded(tmp_path / "epoch13.pkl")
    np.testing.assert_array_equal(
        model.region_adapter.kernel[...].T, theirs.adapter.frcn_linear.weight.detach()
    )


@pytest.mark.parametrize("preset", [network.mcan_small, network.mcan_large])
def test_presets_have_the_published_sizes(preset):
    config = preset(20572, dtype="bfloat16")
    model = abstract(network.MCANOpenVQA, config)
    source = model_source(nnx.state(model), mcan_openvqa_key_map(config))
    with torch.device("meta"):
        theirs = TorchMCAN(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert {key: spec.shape for key, spec in source.specs().items()} == wanted
    large = preset is network.mcan_large  # openvqa configs/vqa/mcan_{small,large}.yml
    hidden, inner, out = (1024, 4096, 2048) if large else (512, 2048, 1024)
    for key, shape in {
        "embedding.weight": (20572, 300),
        "lstm.weight_ih_l0": (4 * hidden, 300),
        "adapter.frcn_linear.weight": (hidden, 2048),
        "backbone.dec_list.5.ffn.mlp.fc.linear.weight": (inner, hidden),
        "backbone.enc_list.5.norm2.a_2": (hidden,),
        "attflat_lang.mlp.fc.linear.weight": (512, hidden),
        "proj.weight": (3129, out),
    }.items():
        assert wanted[key] == shape
    fusion = config.fusion
    assert (fusion.heads, fusion.dropout, fusion.eps, fusion.dtype) == (8, 0.1, 1e-6, "bfloat16")
    names_its_axes(model, stacks=("encoder", "decoder"))


def test_mistakes_are_named(pair, tmp_path):
    theirs, ours = pair
    ids, regions = batch()
    refuses("regions of 10 features, the model takes 18", ours, ids, regions[..., :10])
    tensors = theirs.state_dict()
    tensors["adapter.bbox_linear.weight"] = torch.zeros(8, 5)
    torch.save({"state_dict": tensors}, tmp_path / "boxes.pkl")
    refuses(r"boxes\.pkl: .* without a rule: adapter\.bbox_linear", loaded, tmp_path / "boxes.pkl")
    torch.save(theirs.state_dict(), tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"2 shapes that differ: proj\.weight \(13, 36\)"):
        loaded(tmp_path / "other.pth", dataclasses.replace(CONFIG, answers=14))
