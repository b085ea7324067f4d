"""VLP against a plain torch restatement of the published layers (BertForWebqa), float32."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import LAYER, WHOLE, abstract, compiled, names_its_axes
from flax import nnx
from torch import nn

from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.layers import attention, dropout, prefix_attention
from mmqa_jax.models.vlp import (
    VLP,
    VLPConfig,
    VLPInputs,
    mixed_mask,
    vlp_base_vinvl,
    vlp_base_x101,
    vlp_patches,
)

TRUNK = BertConfig(
    vocab_size=61, hidden=24, layers=2, heads=4, mlp=40, positions=48, types=6, eps=1e-5
)
CONFIGS = {
    "x101": VLPConfig(TRUNK, 20, 17, visual_hidden=(20,)),
    "vinvl": VLPConfig(TRUNK, 20, 11, visual_hidden=()),
}


class TorchVLP(nn.Module):
    """The published layers, in the published state-dict layout (reference.md 2.1 and 2.5)."""

    def __init__(self, config: VLPConfig):
        super().__init__()
        c = config.bert
        norm = lambda: nn.LayerNorm(c.hidden, eps=c.eps)  # noqa: E731
        self.config = config
        self.word = nn.Embedding(c.vocab_size, c.hidden)
        self.position = nn.Embedding(c.positions, c.hidden)
        self.token_type = nn.Embedding(c.types, c.hidden)
        self.norm = norm()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "query": nn.Linear(c.hidden, c.hidden),
                    "key": nn.Linear(c.hidden, c.hidden),
                    "value": nn.Linear(c.hidden, c.hidden),
                    "out": nn.Linear(c.hidden, c.hidden),
                    "attention_norm": norm(),
                    "up": nn.Linear(c.hidden, c.mlp),
                    "down": nn.Linear(c.mlp, c.hidden),
                    "mlp_norm": norm(),
                }
            )
            for _ in range(c.layers)
        )
        widths = (config.region_features, *config.visual_hidden, c.hidden)
        vis = []
        for a, b in itertools.pairwise(widths):
            vis += [nn.Linear(a, b), nn.ReLU()]
        self.vis_embed = nn.Sequential(*vis)
        self.vis_pe_embed = nn.Sequential(nn.Linear(config.region_positions, c.hidden), nn.ReLU())
        self.context_classifier = nn.Linear(c.hidden, 2)
        self.transform = nn.Linear(c.hidden, c.hidden)
        self.transform_norm = norm()
        self.decoder_bias = nn.Parameter(torch.zeros(c.vocab_size))

    def forward(self, x: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        words, places = self.word(x["input_ids"]), self.position(x["position_ids"])
        regions = x["region_features"].shape[1]
        if regions:  # overwritten in place, as the original does
            words[:, 1 : regions + 1] = self.vis_embed(x["region_features"])
            places[:, 1 : regions + 1] = self.vis_pe_embed(x["region_positions"])
        h = self.norm(words + places + self.token_type(x["token_type_ids"]))
        additive = (1.0 - mask.float())[:, None] * -10000.0
        b, n, size = h.shape
        heads = self.config.bert.heads
        for layer in self.layers:
            q, k, v = (
                layer[name](h).view(b, n, heads, size // heads).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            scores = q @ k.transpose(-1, -2) / math.sqrt(size // heads) + additive
            attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, size)
            h = layer["attention_norm"](layer["out"](attended) + h)
            up = layer["up"](h)
            up = up * 0.5 * (1.0 + torch.erf(up / math.sqrt(2.0)))
            h = layer["mlp_norm"](layer["down"](up) + h)
        return h

    def mlm(self, h):
        h = self.transform(h)
        h = self.transform_norm(h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))))
        return h @ self.word.weight.T + self.decoder_bias


def array(t: torch.Tensor) -> jax.Array:
    return jnp.asarray(t.detach().numpy())


def copy(theirs: TorchVLP, ours: VLP) -> None:
    def linear(target, source):
        target.kernel[...], target.bias[...] = array(source.weight.T), array(source.bias)

    def norm(target, source):
        target.scale[...], target.bias[...] = array(source.weight), array(source.bias)

    embeddings = ours.bert.embeddings
    embeddings.word.table[...] = array(theirs.word.weight)
    embeddings.position.table[...] = array(theirs.position.weight)
    embeddings.token_type.table[...] = array(theirs.token_type.weight)
    norm(embeddings.norm, theirs.norm)
    for name, source in theirs.layers[0].items():
        target = getattr(ours.bert.layers, name)
        stack = lambda get, name=name: jnp.stack(  # noqa: E731
            [array(get(layer[name])) for layer in theirs.layers]
        )
        if isinstance(source, nn.Linear):
            target.kernel[...] = stack(lambda m: m.weight.T)
        else:
            target.scale[...] = stack(lambda m: m.weight)
        target.bias[...] = stack(lambda m: m.bias)
    linears = [m for m in theirs.vis_embed if isinstance(m, nn.Linear)]
    for target, source in zip(ours.region_content.linears, linears, strict=True):
        linear(target, source)
    linear(ours.region_place.linears[0], theirs.vis_pe_embed[0])
    linear(ours.source_head, theirs.context_classifier)
    linear(ours.mlm_head.dense, theirs.transform)
    norm(ours.mlm_head.norm, theirs.transform_norm)
    ours.mlm_head.bias[...] = array(theirs.decoder_bias)


@functools.cache
def make_pair(name: str) -> tuple[VLP, TorchVLP]:
    config = CONFIGS[name]
    torch.manual_seed(0)
    theirs = TorchVLP(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(0.25 * torch.randn(p.shape) + (1.0 if p.ndim == 1 else 0.0))
    ours = VLP(config, rngs=nnx.Rngs(0))
    copy(theirs, ours)
    return ours, theirs


def batch(config: VLPConfig, regions: int, rows=3, length=30) -> dict[str, np.ndarray]:
    """Rows of different lengths; in image rows some region slots are closed."""
    rng = np.random.default_rng(regions)
    columns = np.arange(length)[None]
    question_end = np.array([18, 12, 21])[:rows, None]
    answer_end = np.array([24, 13, 30])[:rows, None]
    open_regions = np.array([2, regions, 1])[:rows, None]
    closed_slot = (columns > open_regions) & (columns <= regions)
    return {
        "input_ids": rng.integers(0, config.bert.vocab_size, (rows, length)),
        "token_type_ids": np.where(columns < 9, 4, np.where(columns < answer_end, 5, 0)),
        "position_ids": np.where(columns < answer_end, columns, 0),
        "context_mask": (columns < question_end) & ~closed_slot,
        "answer_mask": (columns >= question_end) & (columns < answer_end),
        "region_features": rng.normal(size=(rows, regions, config.region_features)).astype("f4"),
        "region_positions": rng.normal(size=(rows, regions, config.region_positions)).astype("f4"),
    }


def loop_mask(x: dict[str, np.ndarray]) -> np.ndarray:
    """The published mask, entry by entry: [B, row, column]."""
    rows, length = x["input_ids"].shape
    mask = np.zeros((rows, length, length), bool)
    for b in range(rows):
        for i in range(length):
            for j in range(length):
                both = x["answer_mask"][b, i] and x["answer_mask"][b, j]
                mask[b, i, j] = x["context_mask"][b, j] or (both and j <= i)
    return mask


@pytest.mark.parametrize("regions", [0, 5])
@pytest.mark.parametrize("frontend", ["x101", "vinvl"])
def test_hidden_states_and_both_heads(frontend, regions):
    ours, theirs = make_pair(frontend)
    x = batch(CONFIGS[frontend], regions)
    tensors = {k: torch.tensor(v) for k, v in x.items()}
    with torch.no_grad():
        h = theirs(tensors, torch.tensor(loop_mask(x)))
        source, words = theirs.context_classifier(h[:, 0]), theirs.mlm(h)
    inputs = VLPInputs(**{k: jnp.asarray(v) for k, v in x.items()})

    def run(model, inputs):
        hidden = model.encode(inputs)
        return hidden, model.source_logits(inputs), model.mlm_logits(hidden)

    hidden, source_logits, mlm_logits = compiled(ours, run)(inputs)
    used = x["context_mask"] | x["answer_mask"]
    np.testing.assert_allclose(hidden[used], h.numpy()[used], **WHOLE)
    np.testing.assert_allclose(source_logits, source.numpy(), **WHOLE)
    np.testing.assert_allclose(mlm_logits[used], words.numpy()[used], **WHOLE)


@pytest.mark.parametrize("frontend", ["x101", "vinvl"])
def test_region_frontend_alone(frontend):
    ours, theirs = make_pair(frontend)
    x = batch(CONFIGS[frontend], 5)
    features, positions = x["region_features"], x["region_positions"]
    with torch.no_grad():
        content = theirs.vis_embed(torch.tensor(features)).numpy()
        place = theirs.vis_pe_embed(torch.tensor(positions)).numpy()
    np.testing.assert_allclose(ours.region_content(jnp.asarray(features)), content, **LAYER)
    np.testing.assert_allclose(ours.region_place(jnp.asarray(positions)), place, **LAYER)


def test_mixed_mask_entry_by_entry():
    x = batch(CONFIGS["x101"], 5)
    mask = mixed_mask(jnp.asarray(x["context_mask"]), jnp.asarray(x["answer_mask"]))
    np.testing.assert_array_equal(mask[:, 0], loop_mask(x))


def test_source_score_does_not_depend_on_answer_padding_or_closed_slots():
    ours, _ = make_pair("x101")
    x = batch(CONFIGS["x101"], 5)
    run = compiled(ours, VLP.source_logits)
    logits = lambda x: run(VLPInputs(**x))  # noqa: E731
    before = logits(x)
    changed = dict(x)
    changed["input_ids"] = np.where(x["context_mask"], x["input_ids"], 7)
    slots = ~x["context_mask"][:, 1:6, None]
    changed["region_features"] = np.where(slots, 9.0, x["region_features"]).astype("f4")
    np.testing.assert_allclose(before, logits(changed), atol=1e-6)
    changed["region_features"] = changed["region_features"] + 1.0  # open slots: it must matter
    assert np.abs(np.asarray(before - logits(changed))).min() > 1e-3


def test_presets_are_the_published_shapes():
    x101 = abstract(VLP, vlp_base_x101(layers=1))
    shapes = [linear.kernel.shape for linear in x101.region_content.linears]
    assert shapes == [(2048, 2048), (2048, 768)]
    assert x101.region_place.linears[0].kernel.shape == (1607, 768)
    assert x101.bert.embeddings.token_type.table.shape == (6, 768)
    assert x101.config.bert.eps == 1e-5
    vinvl = abstract(VLP, vlp_base_vinvl(layers=1))
    assert [linear.kernel.shape for linear in vinvl.region_content.linears] == [(2048, 768)]
    assert vinvl.region_place.linears[0].kernel.shape == (1601, 768)
    atlas = abstract(VLP, vlp_patches(8, layers=2))
    assert atlas.region_content.linears[0].kernel.shape == (192, 384)
    assert atlas.region_place.linears[0].kernel.shape == (6, 384)


def test_every_parameter_names_its_axes():
    names_its_axes(make_pair("x101")[0])


@pytest.mark.parametrize("beams", [1, 3])
def test_prefix_attention_is_attention_over_the_concatenation(beams):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    b, n, h, d = 3, 3 * beams, 2, 8
    q, k, v = draw(n, 2, h, d), draw(n, 4, h, d), draw(n, 4, h, d)
    pk, pv = draw(b, 7, h, d), draw(b, 7, h, d)
    prefix_mask = jnp.arange(7)[None] < jnp.array([7, 3, 5])[:, None]
    mask = jnp.asarray(rng.random((1, 1, 2, 4)) < 0.6)
    out = prefix_attention(q, pk, pv, prefix_mask, k, v, mask=mask)
    each = lambda x: jnp.repeat(x, beams, axis=0)  # noqa: E731
    whole = jnp.concatenate(
        [
            jnp.broadcast_to(each(prefix_mask)[:, None, None], (n, 1, 2, 7)),
            jnp.broadcast_to(mask, (n, 1, 2, 4)),
        ],
        axis=-1,
    )
    expected = attention(
        q, jnp.concatenate([each(pk), k], 1), jnp.concatenate([each(pv), v], 1), mask=whole
    )
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_dropout_drops_its_rate_and_keeps_the_mean():
    x = jnp.ones((400, 1000))
    y = np.asarray(dropout(x, 0.1, jax.random.key(0)))
    assert abs((y == 0).mean() - 0.1) < 0.003  # 6 sigma
    np.testing.assert_allclose(y[y > 0], 1 / 0.9, rtol=1e-4)
    for rate, key in ((0.1, None), (0.0, jax.random.key(0)), (1e-9, jax.random.key(0))):
        np.testing.assert_array_equal(dropout(x, rate, key), x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_against_torch_and_closed_rows(is_causal):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(3, 6, 2, 8)).astype("f4") for _ in range(3))
    mask = rng.random((3, 1, 6, 6)) < 0.7
    mask[:, :, :, 0] = True
    whole = mask & np.tril(np.ones((6, 6), bool)) if is_causal else mask
    expected = nn.functional.scaled_dot_product_attention(
        *(torch.tensor(t).transpose(1, 2) for t in (q, k, v)), attn_mask=torch.tensor(whole)
    ).transpose(1, 2)
    args = {"mask": jnp.asarray(mask), "is_causal": is_causal}
    np.testing.assert_allclose(attention(q, k, v, **args), expected, atol=1e-5)
    keys = jax.random.split(jax.random.key(0), 2000)
    dropped = jax.vmap(lambda key: attention(q, k, v, **args, dropout_rate=0.3, dropout_key=key))(
        keys
    )
    assert np.abs(dropped[0] - expected.numpy()).max() > 0.1
    np.testing.assert_allclose(dropped.mean(0), expected, atol=0.15)  # unbiased
    closed = attention(q, k, v, mask=jnp.zeros((3, 1, 6, 6), bool))
    np.testing.assert_allclose(
        closed, np.broadcast_to(v.mean(1, keepdims=True), v.shape), atol=1e-5
    )
