"""VLP's training against BertForWebqa's: losses with their gradients, dropout, first weights."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import LAYER, WHOLE, random_model, same_gradients, with_config
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from torch import nn
from updates import (
    EPS,
    RATE,
    at_one_rate,
    optimizer_section,
    our_updates,
    same_updates,
    their_updates,
)
from vlp_pair import CONFIGS, TRUNK, Pair, batch, make_pair, run_torch
from vlp_torch import TorchVLP

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.bert import network as bert
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.layers import dropout
from mmqa_jax.models.vlp.keys import start_vlp, vlp_key_map
from mmqa_jax.models.vlp.network import VLP, VLPInputs
from mmqa_jax.tasks.vlp import AnswerObjective, RerankObjective
from mmqa_jax.training.state import Objective
from mmqa_jax.weights.keymap import export

NO_GRADIENT = r"attention\.self\.key\.bias"  # nothing but rounding


@pytest.fixture(scope="module")
def x101(tmp_path_factory) -> Pair:
    return make_pair("x101", tmp_path_factory.mktemp("x101"))


def mean_over(task: Objective, pair: Pair, batches: list[dict]) -> tuple[float, dict]:
    """Loss and gradient of an update: the means over its parts (`train.accumulate`)."""
    graphdef = nnx.graphdef(nnx.eval_shape(task.outline))

    @jax.jit
    def step(state, batches):
        def loss(state, data):
            return task.loss(nnx.merge(graphdef, state), data, None)[0]

        found = jax.lax.map(lambda data: jax.value_and_grad(loss)(state, data), batches)
        return jax.tree.map(lambda x: x.mean(axis=0), found)

    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    value, gradients = step(nnx.state(pair.ours), stacked)
    once = dataclasses.replace(vlp_key_map(pair.config), tied=())
    return value, dict(export(gradients, once))


# Losses


def original_selection_loss(logits, labels, logit_mask):
    """modeling.py l.1088-1105: [questions, choices, 2], labels alike, [questions, choices]."""
    log_probs = (logits.log_softmax(-1) * labels).sum(-1) * logit_mask
    return (-log_probs.sum(1) / (logit_mask.sum(1) + 1e-8)).mean()


def test_selection_loss_is_the_originals_however_its_pairs_are_mixed(x101):
    """Three questions of 4, 1 and 3 choices: padded to 4 there, shuffled over two batches here."""
    x = batch(x101.config, 5, rows=12)
    relevant = np.array([[1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]])
    valid = np.arange(4) < np.array([4, 1, 3])[:, None]
    labels = np.stack([relevant, 1 - relevant], axis=-1) * valid[..., None]  # padding: [0, 0]
    x101.theirs.zero_grad()
    logits = x101.theirs.source(run_torch(x101.theirs, x)[-1]).view(3, 4, 2)
    wanted = original_selection_loss(logits, *map(torch.tensor, (labels, valid.astype("f4"))))
    wanted.backward()

    # 1 in the mean over all pairs.
    weights = 4 * valid / valid.sum(1, keepdims=True)
    order = np.random.default_rng(3).permutation(12)
    task = RerankObjective(x101.config)
    batches = [
        {
            "inputs": VLPInputs(**{name: array[rows] for name, array in x.items()}),
            "labels": relevant.reshape(-1)[rows],
            "weights": weights.reshape(-1)[rows].astype(np.float32),
        }
        for rows in (order[:6], order[6:])
    ]
    value, gradients = mean_over(task, x101, batches)
    np.testing.assert_allclose(value, wanted.item(), **LAYER)
    same_gradients(gradients, x101.theirs, zero=NO_GRADIENT)


def original_answer_loss(losses, weights):
    """mlmloss_mask_and_normalize without dropped questions, modeling.py l.1162-1190: [B, P] each."""
    return (losses * weights).sum() / (weights.sum() + 1e-5)


@pytest.mark.parametrize("together", [2, None])
def test_answer_loss_is_the_originals_in_its_micro_batches(x101, together):
    """Six questions of 0 to 5 masked tokens, in micro-batches of two, or all in one.

    One micro-batch has none, and one token's weight is 4, as a keyword's may be.
    """
    rng = np.random.default_rng(4)
    x, most = batch(x101.config, 5, rows=6), 5
    counts = np.array([3, 5, 0, 0, 1, 4])
    real = np.arange(most) < counts[:, None]
    weights = real.astype(np.float32)
    weights[1, 2] = 4
    ends = np.resize([18, 12, 21], 6)[:, None]
    positions = np.where(real, ends + np.arange(most), 0)
    words = np.where(real, rng.integers(0, TRUNK.vocab_size, (6, most)), 0)
    x101.theirs.zero_grad()
    hidden = run_torch(x101.theirs, x)[-1]
    asked = x101.theirs.words(hidden[np.arange(6)[:, None], positions])  # [6, most, V]
    losses = nn.functional.cross_entropy(
        asked.transpose(1, 2), torch.tensor(words), reduction="none"
    )
    groups = [slice(i, i + (together or 6)) for i in range(0, 6, together or 6)]
    micro = [original_answer_loss(losses[g], torch.tensor(weights[g])) for g in groups]
    wanted = torch.stack(micro).mean()
    wanted.backward()

    task = AnswerObjective(x101.config, together)
    data = {
        "inputs": VLPInputs(**x),
        "masked_positions": positions,
        "masked_ids": words,
        "masked_weights": weights,
    }
    value, gradients = mean_over(task, x101, [data])
    np.testing.assert_allclose(value, wanted.item(), **LAYER)
    same_gradients(gradients, x101.theirs, zero=NO_GRADIENT)


@pytest.mark.parametrize("config", ["vlp_select", "vlp_qa"])
def test_updates_are_the_originals(x101, config):
    """run_webqa.py:503, 571-645: torch's Adam without decay or clipping, of either loss."""
    theirs, sizes = copy.deepcopy(x101.theirs), x101.config
    rng, batches = np.random.default_rng(6), []
    for regions in (5, 4):
        data = {"inputs": batch(sizes, regions, rows=6)}
        if config == "vlp_select":  # two questions of three choices
            labels, weights = rng.integers(0, 2, 6), np.ones(6, np.float32)
            data |= {"labels": labels, "weights": weights}
        else:
            real = np.arange(3) < np.array([3, 1, 0, 2, 3, 1])[:, None]
            positions = np.resize([18, 12, 21], 6)[:, None] + np.arange(3)
            data |= {"masked_positions": np.where(real, positions, 0),
                     "masked_ids": np.where(real, rng.integers(0, TRUNK.vocab_size, (6, 3)), 0),
                     "masked_weights": real.astype(np.float32)}  # fmt: skip
        batches.append(data)

    def loss_of(data):
        hidden = run_torch(theirs, data["inputs"])[-1]
        if config == "vlp_select":
            relevant = torch.tensor(data["labels"]).view(2, 3)
            logits = theirs.source(hidden).view(2, 3, 2)
            labels = torch.stack([relevant, 1 - relevant], dim=-1)
            return original_selection_loss(logits, labels, torch.ones(2, 3))
        asked = theirs.words(hidden[np.arange(6)[:, None], data["masked_positions"]])
        words = torch.tensor(data["masked_ids"])
        losses = nn.functional.cross_entropy(asked.transpose(1, 2), words, reduction="none")
        return original_answer_loss(losses, torch.tensor(data["masked_weights"]))

    adam = torch.optim.Adam(theirs.parameters(), RATE, eps=1e-8 * EPS)
    wanted = their_updates(theirs, adam, [[data] for data in batches], loss_of)
    task = (RerankObjective if config == "vlp_select" else AnswerObjective)(sizes)
    got = our_updates(
        task,
        x101.ours,
        at_one_rate(optimizer_section(f"webqa/{config}.py")),
        [{**data, "inputs": VLPInputs(**data["inputs"])} for data in batches],
        lambda state: export(state, dataclasses.replace(vlp_key_map(sizes), tied=())),
    )
    same_updates(got, wanted, zero=NO_GRADIENT)


# Dropout


class DropsAtOneSite:
    """In the place of layers.dropout: notes the mask of every site, and uses that of one."""

    def __init__(self, site: jax.Array):
        self.site, self.rates, self.masks = site, [], []

    def __call__(self, x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
        number = len(self.masks)
        self.rates.append(rate)
        self.masks.append(dropout(jnp.ones(x.shape), rate, key))
        return jnp.where(self.site == number, x * self.masks[-1], x)


class Masked(nn.Module):
    """Dropout with a given mask, of the first rows where ours computes no others."""

    def __init__(self, mask: np.ndarray):
        super().__init__()
        self.mask = torch.tensor(mask)

    def forward(self, x):
        rows = self.mask.shape[-2]
        return torch.cat([x[..., :rows, :] * self.mask, x[..., rows:, :]], dim=-2)


def encode(model: VLP, x: dict, key: jax.Array) -> jax.Array:
    return model.encode(VLPInputs(**x), dropout_key=key)


def select(model: VLP, x: dict, key: jax.Array) -> jax.Array:
    return model.source_logits(VLPInputs(**x), dropout_key=key)


@pytest.mark.parametrize("run", [encode, select])
def test_every_dropout_site_is_the_originals(x101, monkeypatch, run):
    """Each site by itself, with the same mask on both sides."""
    trunk = dataclasses.replace(TRUNK, dropout=0.3, attention_dropout=0.4, unroll=None)
    config = dataclasses.replace(x101.config, bert=trunk)
    theirs = TorchVLP(config).eval()
    theirs.load_state_dict(x101.theirs.state_dict())
    ours, x = with_config(x101.ours, config), batch(config, 5)
    rates = []

    def one_site(x: dict, key: jax.Array, site: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        spy = DropsAtOneSite(site)
        for module in (layers, bert):
            monkeypatch.setattr(module, "dropout", spy)
        found = run(ours, x, key)
        rates[:] = spy.rates
        return found, spy.masks

    key = jax.random.key(5)
    with jax.disable_jit():  # the layers' loop is unrolled, so that the spy sees every layer's
        whole = jax.make_jaxpr(one_site)(x, key, 0)
    program = jax.jit(jaxpr_as_fun(whole))

    def run_ours(site: int) -> tuple[np.ndarray, list[np.ndarray]]:
        found, *masks = map(np.asarray, program(*jax.tree.leaves((x, key, site))))
        return found, masks

    def run_theirs() -> np.ndarray:
        with torch.no_grad():
            last = run_torch(theirs, x)[-1]
            return (theirs.source(last) if run is select else last).numpy()

    # In the order in which ours meets them.
    sites = ["vis_embed.4", "vis_pe_embed.2", "bert.embeddings.dropout"]
    for layer in range(trunk.layers):
        at = f"bert.encoder.layer.{layer}"
        sites += [
            f"{at}.{part}.dropout" for part in ("attention.self", "attention.output", "output")
        ]
    modules = dict(theirs.named_modules())
    named = {name for name, module in modules.items() if isinstance(module, nn.Dropout)}
    assert set(sites) == named

    assert rates == [modules[name].p for name in sites]
    plain = run_theirs()
    for number, site in enumerate(sites):
        got, masks = run_ours(number)
        parent, _, name = site.rpartition(".")
        holder = theirs.get_submodule(parent)
        holder._modules[name] = Masked(masks[number])
        wanted = run_theirs()
        holder._modules[name] = modules[site]
        np.testing.assert_allclose(got, wanted, **WHOLE, err_msg=site)
        assert np.abs(wanted - plain).max() > 1e-2, site
    # No two sites share a key.
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert one.shape != other.shape or (one != other).any()


# First weights


def torch_bounds(config, names) -> dict[str, float]:
    """1 / sqrt(fan in), of weight and bias, of the layers that come after init_bert_weights."""
    fan_in = {
        "region_content/linears/0": config.region_features,
        "region_content/linears/1": config.visual_hidden[0],
        "region_place/linears/0": config.region_positions,
        "source_head": config.bert.hidden,
    }
    found = {}
    for name in names:
        layer = name.rpartition("/")[0]
        if layer in fan_in:
            found[name] = fan_in[layer] ** -0.5
    return found


def test_new_linears_start_as_torchs_and_the_trunk_as_berts():
    """BertForWebqa makes regions' linears and the source head after it initialized the rest."""
    wide = {"region_features": 90, "region_positions": 70}
    trunk = dataclasses.replace(TRUNK, hidden=160, mlp=64, layers=1)
    config = dataclasses.replace(CONFIGS["x101"], bert=trunk, visual_hidden=(120,), **wide)
    task = RerankObjective(config)
    started = jax.jit(lambda key: nnx.state(task.init(key)))(jax.random.key(0))
    started = flatten_named(started)
    bounds = torch_bounds(config, started)
    assert len(bounds) == 8
    for name, values in started.items():
        values = np.asarray(values)
        if name in bounds:
            units = values / bounds[name]
            assert np.abs(units).max() <= 1, name
            assert units.any(), name
            # Uniform in -1..1: x has the mean 0, x^2 1/3; 5 sigma of as many values.
            sigma = values.size**-0.5
            np.testing.assert_allclose(units.mean(), 0, atol=5 * 0.58 * sigma, err_msg=name)
            mean_square = np.square(units).mean()
            np.testing.assert_allclose(mean_square, 1 / 3, atol=5 * 0.3 * sigma, err_msg=name)
        elif name.endswith("bias"):
            assert not values.any(), name
        elif name.endswith("scale"):
            assert (values == 1).all(), name
        else:
            np.testing.assert_allclose(values.std(), 0.02, rtol=0.1, err_msg=name)


def load_as_the_original(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """PreTrainedBertModel.from_pretrained (modeling.py l.763-773): what does not fit is skipped."""

    def load(module: nn.Module, prefix: str) -> None:
        module._load_from_state_dict(state, prefix, {}, True, [], [], [])
        for name, child in module._modules.items():
            load(child, f"{prefix}{name}.")

    load(model, "")


def test_vinvl_starts_from_vlps_checkpoint_as_the_original(x101, tmp_path):
    """Its regions have other sizes: all but the bias of the positions stay newly initialized."""
    pretrained = {
        name: tensor
        for name, tensor in x101.theirs.state_dict().items()
        if not name.startswith("context_classifier")  # VLP's checkpoint has none
    }
    torch.save(pretrained, tmp_path / "model.30.bin")
    config = CONFIGS["vinvl"]
    theirs = TorchVLP(config)
    ours = random_model(VLP, config)
    new = {
        name: torch.tensor(np.array(array))
        for name, array in export(nnx.state(ours), vlp_key_map(config))
    }
    theirs.load_state_dict(new, strict=False)
    load_as_the_original(theirs, pretrained)
    start_vlp(tmp_path / "model.30.bin", ours)
    started = dict(export(nnx.state(ours), vlp_key_map(config)))
    for name, array in started.items():
        np.testing.assert_array_equal(array, theirs.state_dict()[name].numpy(), err_msg=name)
    kept = {name for name, array in started.items() if np.array_equal(array, new[name].numpy())}
    assert kept == {
        *("vis_embed.0.weight", "vis_embed.0.bias", "vis_pe_embed.0.weight"),
        *("context_classifier.weight", "context_classifier.bias"),
    }
