"""Prophet's MCAN against a torch restatement of prophet/stage1/model, float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
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
from mcan_torch import MLP, AttFlat, MHAtt, Projections
from torch import nn

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.mcan import network
from mmqa_jax.models.mcan.keys import check_rotation, mcan_key_map, publish_mcan
from mmqa_jax.weights.formats.safetensors import write_sharded
from mmqa_jax.weights.layouts import Checkpoint, open_source
from mmqa_jax.weights.published import load_checkpoint
from tests.refusals import refuses

# Nothing at its published value. 23 x 23 cells: rotary positions past 500 tokens.
CONFIG = network.MCANConfig(
    text=BertConfig(
        vocab_size=53,
        hidden=28,
        layers=2,
        heads=2,
        mlp=36,
        positions=20,
        eps=1e-3,
        pooler=True,
        unroll=1,
    ),
    fusion=network.FusionConfig(
        hidden=48,
        heads=3,
        mlp=56,
        layers=2,
        flat_mlp=20,
        glimpses=2,
        flat_out=40,
        value_bias=False,
        norm="layer",
        eps=1e-3,
        unroll=1,
    ),
    image_features=24,
    grid=23,
    rope_base=15.0,
    answers=11,
    new_answers=4,
)
STACKS = ("layers", "encoder", "decoder")


class RoPE2d(nn.Module):
    """Buffers as rope2d.py builds them; turns by complex multiplication instead."""

    def __init__(self, head_dim: int, side: int, base: float):
        super().__init__()
        half = head_dim // 2
        frequency = 1.0 / (base ** (torch.arange(0, half, 2).float() / half))
        angle = torch.arange(side).float()[:, None] * frequency  # [side, half / 2]
        row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        angles = torch.cat([angle[column.flatten()], angle[row.flatten()]], -1)
        signs = torch.tensor([-1.0, 1.0]).repeat(half)
        self.register_buffer("sin", angles.sin().repeat_interleave(2, -1) * signs)
        self.register_buffer("cos", angles.cos().repeat_interleave(2, -1))

    def turn(self, x):  # [B, heads, tokens, head_dim]
        turning = torch.complex(self.cos[:, ::2], self.sin[:, 1::2])
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turning).flatten(-2)

    def forward(self, k, q):  # in this order, and called with (q, k)
        q, k = self.turn(q), self.turn(k)
        return q, k


class SA(nn.Module):
    def __init__(self, c: network.FusionConfig):
        super().__init__()
        self.mhatt = MHAtt(c.hidden, c.heads, value_bias=False)
        self.norm1 = nn.LayerNorm(c.hidden, c.eps)

    def forward(self, x, _, closed):
        return self.norm1(x + self.mhatt(x, x, closed))


class SAv(Projections):
    def __init__(self, c: network.FusionConfig, grid: int, base: float):
        super().__init__(c.hidden, c.heads, value_bias=False)
        self.norm1 = nn.LayerNorm(c.hidden, c.eps)
        self.rope = RoPE2d(c.hidden // c.heads, grid, base)

    def forward(self, x, _, __):
        q, k, v = (self.split(f(x)) for f in (self.linear_q, self.linear_k, self.linear_v))
        q, k = self.rope(q, k)
        return self.norm1(x + self.attend(q, k, v, None))


class GA(nn.Module):
    def __init__(self, c: network.FusionConfig):
        super().__init__()
        self.mhatt1 = MHAtt(c.hidden, c.heads, value_bias=False)
        self.norm1 = nn.LayerNorm(c.hidden, c.eps)

    def forward(self, x, question, closed):
        return self.norm1(x + self.mhatt1(x, question, closed))


class FFN(nn.Module):
    def __init__(self, c: network.FusionConfig):
        super().__init__()
        self.mlp = MLP(c.hidden, c.mlp, c.hidden)
        self.norm1 = nn.LayerNorm(c.hidden, c.eps)

    def forward(self, x, _, __):
        return self.norm1(x + self.mlp(x))


class Backbone(nn.Module):
    def __init__(self, config: network.MCANConfig):
        super().__init__()
        c = config.fusion
        self.enc_list, self.dec_list = nn.ModuleList(), nn.ModuleList()
        for _ in range(c.layers):
            self.enc_list.extend([SA(c), FFN(c)])
            self.dec_list.extend([SAv(c, config.grid, config.rope_base), GA(c), FFN(c)])


class TorchMCAN(nn.Module):
    """MCANForFinetune."""

    def __init__(self, config: network.MCANConfig):
        super().__init__()
        c, t = config.fusion, config.text
        self.bert = transformers.BertModel(
            transformers.BertConfig(
                vocab_size=t.vocab_size,
                hidden_size=t.hidden,
                num_hidden_layers=t.layers,
                num_attention_heads=t.heads,
                intermediate_size=t.mlp,
                max_position_embeddings=t.positions,
                layer_norm_eps=t.eps,
                pad_token_id=None,  # torch drops the gradient of a padding row
            ),
            add_pooling_layer=t.pooler,
        )
        self.img_feat_linear = nn.Sequential(nn.Linear(config.image_features, c.hidden, bias=False))
        self.lang_adapt = nn.Sequential(nn.Linear(t.hidden, c.hidden), nn.Tanh())
        self.backbone = Backbone(config)
        flat = (c.hidden, c.flat_mlp, c.glimpses, c.flat_out)
        self.attflat_img, self.attflat_lang = AttFlat(*flat), AttFlat(*flat)
        self.proj_norm = nn.LayerNorm(c.flat_out, c.eps)
        self.proj = nn.Linear(c.flat_out, config.answers)
        if config.new_answers:
            self.proj1 = nn.Linear(c.flat_out, config.new_answers)

    def forward(self, ids, image):
        closed = ids == 0
        x = self.lang_adapt(self.bert(ids, attention_mask=(~closed).long())[0])
        y = self.img_feat_linear(image)
        for layer in self.backbone.enc_list:
            x = layer(x, None, closed)
        for layer in self.backbone.dec_list:
            y = layer(y, x, closed)
        latent = self.proj_norm(self.attflat_lang(x, closed) + self.attflat_img(y, None))
        return torch.cat([self.proj(latent), self.proj1(latent)], 1), latent


def training_state(model: nn.Module) -> dict:
    """What Prophet writes after an epoch, with a buffer of transformers' old versions."""
    positions = torch.arange(CONFIG.text.positions)[None]
    return {
        "state_dict": model.state_dict() | {"bert.embeddings.position_ids": positions},
        "optimizer": torch.optim.Adam(model.parameters(), 1e-3).state_dict(),
        "warmup_lr_scale": 1.0,
        "decay_lr_scale": 0.2,
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(torch model, our model loaded from its training state, the state's file)."""
    torch.manual_seed(0)
    theirs = randomize(TorchMCAN(CONFIG), 1)
    path = tmp_path_factory.mktemp("mcan") / "epoch6.pkl"
    torch.save(training_state(theirs), path)
    return theirs, loaded(path), path


def loaded(path, config=CONFIG) -> network.MCAN:
    """A model that was never initialized, filled from a file."""
    source = open_source(path)
    checkpoint = Checkpoint(config, mcan_key_map, source, "prophet", check_rotation)
    return load_checkpoint(network.MCAN, checkpoint, config)


def batch(rows: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Questions of different lengths, and grids."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, CONFIG.text.vocab_size, (rows, 13))
    ids[np.arange(13) >= np.array([13, 5, 2])[:rows, None]] = 0
    image = rng.normal(size=(rows, CONFIG.grid**2, CONFIG.image_features))
    return ids, image.astype("f4")


def test_layers_latent_and_logits_equal(pair):
    theirs, ours, _ = pair
    ids, image = batch()
    open_ = ids != 0
    seen: dict[str, list[tuple[list[np.ndarray], np.ndarray]]] = {}

    def record(name, module):
        arrays = lambda xs: [x.numpy() for x in xs if isinstance(x, torch.Tensor)]  # noqa: E731
        return module.register_forward_hook(
            lambda _, x, y: seen.setdefault(name, []).append((arrays(x), y.numpy()))
        )

    backbone = theirs.backbone
    hooks = [record("encoder", layer) for layer in backbone.enc_list]
    hooks += [record("decoder", layer) for layer in backbone.dec_list]
    hooks += [record(n, getattr(theirs, n)) for n in ("attflat_img", "attflat_lang", "lang_adapt")]
    with torch.no_grad():
        logits, latent = theirs(torch.tensor(ids), torch.tensor(image))
    for hook in hooks:
        hook.remove()
    encoder, decoder = seen["encoder"], seen["decoder"]
    question = encoder[-1][1]
    rotation = network.grid_rotation(CONFIG.grid, CONFIG.head_dim, CONFIG.rope_base)

    def run(model):
        fusion = model.fusion
        text = model.bert(ids, open_)
        return {
            "adapter": jnp.tanh(model.text_adapter(text)),
            "encoder": alone(
                fusion.encoder,
                lambda layer, x: layer(x, open_),
                np.stack([x[0] for x, _ in encoder[::2]]),
            ),
            "decoder": alone(
                fusion.decoder,
                lambda layer, x: layer(x, None, question, open_, rotation=rotation),
                np.stack([x[0] for x, _ in decoder[::3]]),
            ),
            "flat image": fusion.flatten_image(decoder[-1][1], None),
            "flat question": fusion.flatten_question(question, open_),
            "latent": model.latent(ids, image),
            "logits": model(ids, image),
        }

    got = compiled(ours, run)()
    np.testing.assert_allclose(got["adapter"][open_], seen["lang_adapt"][0][1][open_], **LAYER)
    np.testing.assert_allclose(got["encoder"], np.stack([y for _, y in encoder[1::2]]), **LAYER)
    np.testing.assert_allclose(got["decoder"], np.stack([y for _, y in decoder[2::3]]), **LAYER)
    np.testing.assert_allclose(got["flat image"], seen["attflat_img"][0][1], **LAYER)
    np.testing.assert_allclose(got["flat question"], seen["attflat_lang"][0][1], **LAYER)
    np.testing.assert_allclose(got["latent"], latent, **WHOLE)
    assert got["logits"].shape == (3, 15)
    np.testing.assert_allclose(got["logits"], logits, **WHOLE)
    assert logits.std(0).mean() > 0.01  # rows differ by more than the tolerances


def test_gradients_of_the_training_loss_equal(pair):
    """Binary cross entropy, summed, as Prophet trains."""
    theirs, ours, _ = pair
    ids, image = batch()
    targets = np.random.default_rng(1).choice([0.0, 0.3, 0.6, 1.0], (3, 15)).astype("f4")
    theirs.zero_grad()
    logits, _ = theirs(torch.tensor(ids), torch.tensor(image))
    loss = nn.BCEWithLogitsLoss(reduction="sum")(logits, torch.tensor(targets))
    loss.backward()
    graphdef, state = nnx.split(ours)

    def bce(state):
        z = nnx.merge(graphdef, state)(ids, image)
        return -(targets * jax.nn.log_sigmoid(z) + (1 - targets) * jax.nn.log_sigmoid(-z)).sum()

    value, gradients = jax.jit(jax.value_and_grad(bce))(state)
    np.testing.assert_allclose(value, loss.item(), **WHOLE)
    source = publish_mcan(CONFIG, gradients).source
    got = {key: source.read(key) for key in source.specs() if ".rope." not in key}
    assert {name for name, p in theirs.named_parameters() if p.grad is None} == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
    }
    same_gradients(got, theirs, zero=r"key\.bias|linear_k\.bias|attflat_\w+\.mlp\.linear\.bias")


def test_queries_and_keys_of_the_grid_are_swapped(pair):
    """linear_k makes queries where there are rotary positions, and nowhere else."""
    theirs, ours, _ = pair
    layers, state = ours.fusion.decoder, theirs.state_dict()
    for n in range(2):
        prefix = f"backbone.dec_list.{3 * n}"
        np.testing.assert_array_equal(
            layers.attention.query.kernel[n].T, state[f"{prefix}.linear_k.weight"]
        )
        np.testing.assert_array_equal(
            layers.attention.key.bias[n], state[f"{prefix}.linear_q.bias"]
        )
        guided = f"backbone.dec_list.{3 * n + 1}.mhatt1.linear_q.bias"
        np.testing.assert_array_equal(layers.guided.query.bias[n], state[guided])


@pytest.mark.parametrize(("grid", "base"), [(16, 40.0), (23, 15.0)])
def test_rotary_positions(grid, base):
    theirs = RoPE2d(128, grid, base)
    ours = network.grid_rotation(grid, 128, base)
    np.testing.assert_allclose(ours.cos, theirs.cos, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.sin, theirs.sin, rtol=0, atol=1e-6)
    x = np.random.default_rng(0).normal(size=(2, grid**2, 3, 128)).astype("f4")
    want = theirs.turn(torch.tensor(x).transpose(1, 2)).transpose(1, 2)
    np.testing.assert_allclose(network.rotate_pairs(jnp.asarray(x), ours), want, rtol=0, atol=1e-5)
    # Prophet's net.py: the first half turns with the column, 40^(-2i/64) per pair.
    cell = 3 * grid + 7
    np.testing.assert_allclose(ours.cos[cell, 10], np.cos(7 * base ** (-10 / 64)), atol=1e-6)
    np.testing.assert_allclose(ours.sin[cell, 74], -np.sin(3 * base ** (-10 / 64)), atol=1e-6)


def test_bfloat16_stays_near_float32(pair):
    theirs, ours, _ = pair
    ids, image = batch()
    half = dataclasses.replace(
        CONFIG,
        text=dataclasses.replace(CONFIG.text, dtype="bfloat16"),
        fusion=dataclasses.replace(CONFIG.fusion, dtype="bfloat16"),
    )
    got = compiled(with_config(ours, half), lambda model: model.latent(ids, image))()
    assert got.dtype == "float32"
    with torch.no_grad():
        error = np.abs(got - theirs(torch.tensor(ids), torch.tensor(image))[1].numpy())
    # Latents have size 1; 8 significant bits, 2 + 2 + 2 layers.
    assert error.max() < 0.06
    assert error.mean() < 0.012


def test_dropout_follows_its_key(pair):
    _, ours, _ = pair
    ids, image = batch()
    small = dataclasses.replace(CONFIG, grid=3)
    run = compiled(
        with_config(ours, small), lambda model, key: model(ids, image[:, :9], dropout_key=key)
    )
    keys = [jax.random.key(seed, impl="unsafe_rbg") for seed in (0, 0, 1)]  # quick to compile
    first, again, other = map(run, keys)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


def test_export_reloads_in_torch(pair, tmp_path):
    theirs, ours, _ = pair
    source = publish_mcan(CONFIG, nnx.state(ours)).source
    again = TorchMCAN(CONFIG)
    again.load_state_dict({key: torch.tensor(source.read(key)) for key in source.specs()})
    for name, want in theirs.state_dict().items():
        if ".rope." in name:  # ours are computed
            torch.testing.assert_close(again.state_dict()[name], want, rtol=0, atol=1e-6)
        else:
            assert torch.equal(again.state_dict()[name], want), name
    write_sharded(tmp_path, source)
    same_parameters(loaded(tmp_path / "model.safetensors"), ours)


def test_preset_has_the_published_sizes():
    config = network.mcan_prophet(new_answers=7, dtype="bfloat16")
    assert (config.text.dtype, config.fusion.dtype) == ("bfloat16", "bfloat16")
    assert (config.rope_base, config.fusion.eps, config.fusion.dropout) == (40.0, 1e-5, 0.1)
    assert (config.fusion.heads, config.text.heads, config.text.eps) == (8, 16, 1e-12)
    model = abstract(network.MCAN, config)
    source = publish_mcan(config, nnx.state(model)).source
    with torch.device("meta"):
        theirs = TorchMCAN(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert {key: spec.shape for key, spec in source.specs().items()} == wanted
    for key, shape in {  # MILVLG/prophet stage1/model
        "bert.embeddings.word_embeddings.weight": (30522, 1024),
        "img_feat_linear.0.weight": (1024, 4096),
        "backbone.dec_list.15.rope.sin": (256, 128),
        "backbone.dec_list.17.mlp.fc.linear.weight": (4096, 1024),
        "backbone.enc_list.11.norm1.weight": (1024,),
        "attflat_img.mlp.linear.weight": (1, 1024),
        "proj.weight": (3129, 2048),
        "proj1.weight": (7, 2048),
    }.items():
        assert wanted[key] == shape
    assert "backbone.dec_list.0.linear_v.bias" not in wanted
    names_its_axes(model, stacks=STACKS)


def test_mistakes_are_named(pair, tmp_path):
    _, ours, path = pair
    ids, image = batch()
    refuses(r"model takes \(529, 24\), a grid of 23 x 23", ours, ids, image[:, :100])
    with pytest.raises(UserError, match="heads of 14; two-dimensional"):
        dataclasses.replace(CONFIG, fusion=dataclasses.replace(CONFIG.fusion, hidden=42))
    with pytest.raises(UserError, match=r"fusion\.heads is 3: .*of mcan\.fusion\.hidden = 50"):
        dataclasses.replace(CONFIG.fusion, hidden=50)
    with pytest.raises(UserError, match=r"mcan\.fusion\.norm is 'rms': .*layer, unbiased"):
        dataclasses.replace(CONFIG.fusion, norm="rms")
    with pytest.raises(UserError, match=r"mcan\.fusion\.dropout is 1\.0: expected a rate"):
        dataclasses.replace(CONFIG.fusion, dropout=1.0)
    for change in ({"grid": 16}, {"rope_base": 40.0}):
        other = dataclasses.replace(CONFIG, **change)
        refuses(r"epoch6\.pkl, backbone\.dec_list\.\d\.rope\.\w+: rot", loaded, path, other)
    checkpoint = torch.load(path)
    tensors = checkpoint["state_dict"]
    tensors["backbone.dec_list.4.norm2.bias"] = tensors.pop("backbone.dec_list.4.norm1.bias")
    torch.save(checkpoint, tmp_path / "odd.pkl")
    message = (
        r"without a rule: backbone\.dec_list\.4\.norm2\.bias; .*guided_norm/bias, layers \[1\]"
    )
    refuses(message, loaded, tmp_path / "odd.pkl")
    torch.save({"weights": tensors}, tmp_path / "nested.pkl")
    refuses(r"nested\.pkl: not a state dict", loaded, tmp_path / "nested.pkl")
    torch.save({"state_dict": tensors, "config": CONFIG}, tmp_path / "code.pkl")
    refuses(r"code\.pkl: not a torch file of plain tensors", loaded, tmp_path / "code.pkl")
    (tmp_path / "cut.pkl").write_bytes(path.read_bytes()[:5000])
    refuses(r"cut\.pkl: not a torch file of plain tensors", loaded, tmp_path / "cut.pkl")
    refuses(r"absent\.pkl: no such file", loaded, tmp_path / "absent.pkl")
