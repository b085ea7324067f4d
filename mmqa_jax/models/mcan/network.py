"""Prophet's improved MCAN (Shao et al. 2023; MILVLG/prophet prophet/stage1/model/mcan.py).

The question comes from BERT-large, the image as a 16 x 16 grid of CLIP RN50x64 features
(models.modified_resnet.network), whose self-attention has two-dimensional rotary positions. It is
Prophet's source of answer candidates (`answer_logits`) and of examples (`latent`).

The original's decoder swaps queries and keys by mistake (its `rope(q, k)` is declared
`forward(k, q)`): `linear_k` makes its queries and `linear_q` its keys. Both are linears of one
shape, so that the key map (weights.mcan) puts each where it is used, and the model is plain.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import Bert, BertConfig, bert_large_uncased
from mmqa_jax.models.common import config_checks
from mmqa_jax.models.common.layers import (
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    dropout,
    normal_init,
    scan_layers,
    split_key,
    stack_layers,
    torch_linear,
    uniform_init,
)

# What both MCANs share (Yu et al. 2019, Deep Modular Co-Attention Networks).
#
# An encoder of self-attention layers over the question, a decoder over the image whose layers
# attend to the image and then to the encoded question, a learned pooling of each, and the norm of
# their sum. Prophet's variant and openvqa's differ in the norm, in the bias of the values and in
# the rotary positions of the image.


_MASKED = -1e9  # the published score of a masked token


class UnbiasedLayerNorm(LayerNorm):
    """openvqa's LayerNorm (openvqa/ops/layer_norm.py): divides by (standard deviation + eps).

    The deviation is the unbiased one, with features - 1 in its denominator.
    """

    def factor(self, x: jax.Array, mean: jax.Array) -> jax.Array:
        """Computes LayerNorm.factor's value: x [..., features], its mean [..., 1] -> [..., 1]."""
        variance = jnp.square(x - mean).sum(-1, keepdims=True) / (x.shape[-1] - 1)
        return 1 / (jnp.sqrt(variance) + self.eps)


NORMS = {"layer": LayerNorm, "unbiased": UnbiasedLayerNorm}


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """Sizes of encoder, decoder and pooling; the defaults are openvqa's mcan_small."""

    # hidden, heads, mlp, layers: of encoder and decoder each.
    hidden: int = 512
    heads: int = 8
    mlp: int = 2048
    layers: int = 6
    # flat_mlp, glimpses, flat_out: inner width and number of poolings, size of the latent.
    flat_mlp: int = 512
    glimpses: int = 1
    flat_out: int = 1024
    value_bias: bool = True  # whether the values have a bias (openvqa: yes, Prophet: no)
    norm: str = "unbiased"  # `unbiased` (openvqa's own) or `layer`
    eps: float = 1e-6  # of the norms
    dropout: float = 0.1  # on attention weights, on the residual branches and inside the MLPs
    dtype: str = "float32"  # compute type; norms, softmax and the latent stay float32
    attention: str = "xla"  # see layers.attention
    # remat, unroll: see layers.scan_layers.
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        config_checks.check_layers(self, "mcan.fusion", "layers")
        config_checks.check_divides(
            "mcan.fusion.heads", self.heads, "mcan.fusion.hidden", self.hidden
        )
        config_checks.check_known("mcan.fusion.norm", self.norm, NORMS)
        config_checks.check_rate("mcan.fusion.dropout", self.dropout)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and signed sines [tokens, head_dim] that turn queries and keys, float32."""

    cos: np.ndarray
    sin: np.ndarray


def grid_rotation(grid: int, head_dim: int, base: float) -> Rotation:
    """Two-dimensional rotary positions of a grid x grid picture, row by row.

    prophet/stage1/model/rope2d.py: the first half of a head turns with the column, the second
    with the row; 2n and 2n + 1 are a pair, with angle position * base^(-2n / (head_dim / 2)).
    sin is negative at even indices, so that a pair (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    half = head_dim // 2
    exponents = (np.arange(0, half, 2) / half).astype(np.float32)
    # The power in float64, the rest in float32: the bits of torch's float32 table.
    frequencies = np.float32(1) / (base ** exponents.astype(np.float64)).astype(np.float32)
    angles = np.arange(grid, dtype=np.float32)[:, None] * frequencies  # [grid, half / 2]
    cos = np.repeat(np.cos(angles), 2, axis=1)  # [grid, half]
    sin = np.stack([-np.sin(angles), np.sin(angles)], axis=-1).reshape(grid, half)

    def over_grid(x: np.ndarray) -> np.ndarray:
        by_column = np.broadcast_to(x[None], (grid, grid, half))
        by_row = np.broadcast_to(x[:, None], (grid, grid, half))
        return np.concatenate([by_column, by_row], axis=-1).reshape(grid * grid, head_dim)

    return Rotation(over_grid(cos), over_grid(sin))


def rotate_pairs(x: jax.Array, rotation: Rotation) -> jax.Array:
    """x [B, tokens, heads, head_dim], turned in float32."""
    x32 = x.astype(jnp.float32)
    partner = x32.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    turned = x32 * rotation.cos[:, None] + partner * rotation.sin[:, None]
    return turned.astype(x.dtype)


class FeedForward(nnx.Module):
    """Linear, ReLU, dropout, linear: [..., in] -> [..., out]."""

    def __init__(
        self,
        in_features: int,
        inner: int,
        out_features: int,
        rate: float,
        *,
        rngs: nnx.Rngs,
        out_name: str | None = "embed",
    ):
        self.up = torch_linear(in_features, inner, ("embed", "mlp"), rngs=rngs)
        self.down = torch_linear(inner, out_features, ("mlp", out_name), rngs=rngs)
        self.rate = rate

    def __call__(self, x: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        return self.down(dropout(jax.nn.relu(self.up(x)), self.rate, dropout_key))


class MCANLayer(nnx.Module):
    """Post-norm layer: self-attention, if `guided` attention to the question, then an MLP."""

    def __init__(self, config: FusionConfig, *, guided: bool, rngs: nnx.Rngs):
        norm = functools.partial(NORMS[config.norm], config.hidden, config.eps, rngs=rngs)
        init = uniform_init(config.hidden**-0.5)  # torch's
        attention = functools.partial(
            Attention,
            config.hidden,
            config.heads,
            rngs=rngs,
            kernel_init=init,
            bias_init=init,
            value_bias=config.value_bias,
            dropout_rate=config.dropout,
            implementation=config.attention,
        )
        self.attention = attention()
        self.attention_norm = norm()
        self.guided = attention() if guided else None
        self.guided_norm = norm() if guided else None
        self.ffn = FeedForward(config.hidden, config.mlp, config.hidden, config.dropout, rngs=rngs)
        self.ffn_norm = norm()
        self.rate = config.dropout

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        question: jax.Array | None = None,
        question_mask: jax.Array | None = None,
        *,
        rotation: Rotation | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """One layer.

        Args:
          x: [B, L, H].
          mask: bool [B, L], or None (nothing masked).
          question, question_mask: what is attended to, [B, Q, H] and bool [B, Q]; if guided.
          rotation: positions of the self-attention.

        Returns:
          [B, L, H].
        """
        keys = split_key(dropout_key, 6)
        rotate = None if rotation is None else functools.partial(rotate_pairs, rotation=rotation)
        y = self.attention(x, x, _columns(mask), rotate=rotate, dropout_key=keys[0])
        x = self.attention_norm(x + dropout(y, self.rate, keys[1]))
        if self.guided is not None:
            y = self.guided(x, question, _columns(question_mask), dropout_key=keys[2])
            x = self.guided_norm(x + dropout(y, self.rate, keys[3]))
        y = self.ffn(x, keys[4])
        return self.ffn_norm(x + dropout(y, self.rate, keys[5]))


def _columns(mask: jax.Array | None) -> jax.Array | None:
    """bool [B, L] of visible columns -> [B, 1, 1, L]."""
    return None if mask is None else mask[:, None, None]


class AttentionFlatten(nnx.Module):
    """AttFlat: an MLP weighs the tokens, once per glimpse; their weighted sums are projected."""

    def __init__(self, config: FusionConfig, *, rngs: nnx.Rngs):
        self.mlp = FeedForward(
            config.hidden,
            config.flat_mlp,
            config.glimpses,
            config.dropout,
            rngs=rngs,
            out_name=None,
        )
        self.merge = torch_linear(
            config.hidden * config.glimpses, config.flat_out, ("embed", "proj"), rngs=rngs
        )

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """x [B, L, H], mask bool [B, L] or None -> [B, flat_out]."""
        scores = self.mlp(x, dropout_key).astype(jnp.float32)  # [B, L, glimpses]
        if mask is not None:
            scores = jnp.where(mask[:, :, None], scores, _MASKED)
        weights = jax.nn.softmax(scores, axis=1).astype(x.dtype)
        pooled = jnp.einsum("blg,blh->bgh", weights, x)
        return self.merge(pooled.reshape(x.shape[0], -1))


class Fusion(nnx.Module):
    """Question and image features to one latent vector."""

    def __init__(self, config: FusionConfig, *, rngs: nnx.Rngs):
        layer = functools.partial(MCANLayer, config)
        self.encoder = stack_layers(lambda r: layer(guided=False, rngs=r), config.layers, rngs)
        self.decoder = stack_layers(lambda r: layer(guided=True, rngs=r), config.layers, rngs)
        self.flatten_question = AttentionFlatten(config, rngs=rngs)
        self.flatten_image = AttentionFlatten(config, rngs=rngs)
        self.norm = NORMS[config.norm](config.flat_out, config.eps, rngs=rngs, name="proj")
        self.config = config

    def __call__(
        self,
        question: jax.Array,
        image: jax.Array,
        question_mask: jax.Array,
        image_mask: jax.Array | None,
        *,
        rotation: Rotation | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The latent that answers and similar questions are read from.

        question [B, L, H], image [B, R, H]; masks bool [B, L] and [B, R], True = a real token,
        None = all are. Returns [B, flat_out] float32.
        """
        keys = split_key(dropout_key, 4)
        run = functools.partial(scan_layers, remat=self.config.remat, unroll=self.config.unroll)

        def encode(layer: MCANLayer, x, _, key):
            return layer(x, question_mask, dropout_key=key), None

        encoded, _ = run(self.encoder, question, encode, dropout_key=keys[0])

        def decode(layer: MCANLayer, x, _, key):
            x = layer(x, image_mask, encoded, question_mask, rotation=rotation, dropout_key=key)
            return x, None

        image, _ = run(self.decoder, image, decode, dropout_key=keys[1])
        fused = self.flatten_question(encoded, question_mask, keys[2])
        fused = fused + self.flatten_image(image, image_mask, keys[3])
        return self.norm(fused.astype(jnp.float32))


PAD = 0  # BERT's


@dataclasses.dataclass(frozen=True)
class MCANConfig:
    """Question encoder, fusion, image and answers; `mcan_prophet` has the published sizes."""

    text: BertConfig  # the question encoder; it has compute options of its own
    fusion: FusionConfig  # encoder, decoder, pooling
    image_features: int = 4096  # size of a grid cell's features
    grid: int = 16  # cells per side of the grid
    rope_base: float = 40.0  # of the grid's rotary positions
    answers: int = 3129  # size of the pretraining vocabulary
    # Answers of the benchmark that are not among those; the head of finetuning
    # (mcan_for_finetune.py) appends them.
    new_answers: int = 0

    def __post_init__(self):
        if self.head_dim % 4:
            raise UserError(
                f"mcan: fusion.hidden {self.fusion.hidden} over {self.fusion.heads} heads gives "
                f"heads of {self.head_dim}; two-dimensional rotary positions need a multiple of 4."
            )

    @property
    def head_dim(self) -> int:
        """Size of an attention head of the fusion."""
        return self.fusion.hidden // self.fusion.heads


def mcan_prophet(*, new_answers: int = 0, **both) -> MCANConfig:
    """Prophet's published sizes (configs/pretrain.yml, finetune.yml).

    Args:
      new_answers: answers that finetuning appends to VQAv2's 3,129.
      both: fields that BERT and the fusion have both: dropout, dtype, attention, remat, unroll.
    """
    fusion = FusionConfig(
        hidden=1024,
        heads=8,
        mlp=4096,
        layers=6,
        flat_mlp=1024,
        flat_out=2048,
        value_bias=False,
        norm="layer",
        eps=1e-5,
    )
    return MCANConfig(
        text=bert_large_uncased(**both),
        fusion=dataclasses.replace(fusion, **both),
        new_answers=new_answers,
    )


class MCAN(nnx.Module):
    """Answers a question on a grid of image features by classification."""

    def __init__(self, config: MCANConfig, *, rngs: nnx.Rngs):
        fusion = config.fusion
        self.bert = Bert(config.text, rngs=rngs)
        self.text_adapter = torch_linear(
            config.text.hidden, fusion.hidden, ("proj", "embed"), rngs=rngs
        )
        self.image_adapter = torch_linear(
            config.image_features, fusion.hidden, ("patch", "embed"), rngs=rngs, use_bias=False
        )
        self.fusion = Fusion(fusion, rngs=rngs)
        self.head = torch_linear(fusion.flat_out, config.answers, ("proj", "vocab"), rngs=rngs)
        self.new_head = (
            torch_linear(fusion.flat_out, config.new_answers, ("proj", "vocab"), rngs=rngs)
            if config.new_answers
            else None
        )
        self.config = config

    def latent(
        self,
        question_ids: jax.Array,
        image: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The fused feature; Prophet picks examples by its cosine similarity.

        question_ids [B, L] int, WordPieces with [CLS] and [SEP], 0 = padding; image
        [B, grid * grid, image_features], the grid row by row. Returns [B, flat_out] float32.
        """
        config = self.config
        wanted = (config.grid**2, config.image_features)
        if image.shape[1:] != wanted:
            raise UserError(
                f"mcan: image features of shape {image.shape[1:]}, the model takes {wanted}, a "
                f"grid of {config.grid} x {config.grid}; extract them again or set mcan.grid."
            )
        text_key, fusion_key = split_key(dropout_key, 2)
        mask = question_ids != PAD
        question = self.bert(question_ids, mask, dropout_key=text_key)  # [B, L, bert hidden]
        dtype = config.fusion.dtype
        return self.fusion(
            jnp.tanh(self.text_adapter(question.astype(dtype))),
            self.image_adapter(image.astype(dtype)),
            mask,
            None,
            rotation=grid_rotation(config.grid, config.head_dim, config.rope_base),
            dropout_key=fusion_key,
        )

    def answer_logits(self, latent: jax.Array) -> jax.Array:
        """latent [B, flat_out] -> [B, answers + new_answers] float32; a sigmoid gives scores."""
        logits = self.head(latent)
        if self.new_head is None:
            return logits
        return jnp.concatenate([logits, self.new_head(latent)], axis=-1)

    def __call__(
        self,
        question_ids: jax.Array,
        image: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """`answer_logits` of `latent`: [B, answers + new_answers] float32."""
        return self.answer_logits(self.latent(question_ids, image, dropout_key=dropout_key))


# The original MCAN (Yu et al. 2019; MILVLG/openvqa openvqa/models/mcan).
#
# GloVe words and an LSTM on the question, detector regions as the image, openvqa's own LayerNorm.


@dataclasses.dataclass(frozen=True)
class MCANOpenVQAConfig:
    """Word table, regions, fusion and answers."""

    # Rows of the embedding table; 0 is padding, 1 the unknown token. It depends on the questions
    # that the vocabulary was built from.
    vocab_size: int
    fusion: FusionConfig  # encoder, decoder, pooling; its `hidden` is the LSTM's too
    word_features: int = 300  # size of a word vector (GloVe: 300)
    region_features: int = 2048  # size of a region's feature vector
    answers: int = 3129  # size of the answer vocabulary


def mcan_small(vocab_size: int, **changes) -> MCANOpenVQAConfig:
    """configs/vqa/mcan_small.yml; `changes` are fields of FusionConfig."""
    return MCANOpenVQAConfig(vocab_size, FusionConfig(**changes))


def mcan_large(vocab_size: int, **changes) -> MCANOpenVQAConfig:
    """configs/vqa/mcan_large.yml; `changes` are fields of FusionConfig."""
    large = FusionConfig(hidden=1024, mlp=4096, flat_mlp=512, flat_out=2048)
    return MCANOpenVQAConfig(vocab_size, dataclasses.replace(large, **changes))


class LSTM(nnx.Module):
    """One layer, from left to right, as torch.nn.LSTM: gates input, forget, cell, output.

    The cell state is kept in float32.
    """

    def __init__(self, in_features: int, hidden: int, *, rngs: nnx.Rngs):
        init = uniform_init(hidden**-0.5)
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init, bias_init=init)
        self.input = linear(in_features, 4 * hidden, ("patch", "mlp"))
        self.recurrent = linear(hidden, 4 * hidden, ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, L, in] -> [B, L, hidden]
        projected = self.input(x).swapaxes(0, 1)  # [L, B, 4 * hidden]

        def step(carry, now):
            hidden, cell = carry
            gates = (now + self.recurrent(hidden)).astype(jnp.float32)
            write, keep, new, read = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(new)
            hidden = (jax.nn.sigmoid(read) * jnp.tanh(cell)).astype(x.dtype)
            return (hidden, cell), hidden

        start = jnp.zeros((x.shape[0], projected.shape[-1] // 4))
        _, states = jax.lax.scan(step, (start.astype(x.dtype), start), projected)
        return states.swapaxes(0, 1)


class MCANOpenVQA(nnx.Module):
    """Answers a question on a set of regions by classification."""

    def __init__(self, config: MCANOpenVQAConfig, *, rngs: nnx.Rngs):
        fusion = config.fusion
        self.words = Embedding(
            config.vocab_size,
            config.word_features,
            ("vocab", "patch"),
            rngs=rngs,
            init=normal_init(1.0),
        )
        self.lstm = LSTM(config.word_features, fusion.hidden, rngs=rngs)
        self.region_adapter = torch_linear(
            config.region_features, fusion.hidden, ("patch", "embed"), rngs=rngs
        )
        self.fusion = Fusion(fusion, rngs=rngs)
        self.head = torch_linear(fusion.flat_out, config.answers, ("proj", "vocab"), rngs=rngs)
        self.config = config

    def latent(
        self,
        question_ids: jax.Array,
        regions: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """question_ids [B, L] int, 0 = padding (at the end); regions [B, R, region_features],
        wholly zero = padding -> fused feature [B, flat_out] float32.
        """
        config = self.config
        if regions.shape[-1] != config.region_features:
            raise UserError(
                f"mcan: regions of {regions.shape[-1]} features, the model takes "
                f"{config.region_features}; give the features it was trained on or set "
                "mcan.region_features."
            )
        dtype = config.fusion.dtype
        question = self.lstm(self.words(question_ids).astype(dtype))  # [B, L, hidden]
        return self.fusion(
            question,
            self.region_adapter(regions.astype(dtype)),  # [B, R, hidden]
            question_ids != PAD,
            jnp.any(regions != 0, axis=-1),
            dropout_key=dropout_key,
        )

    def answer_logits(self, latent: jax.Array) -> jax.Array:
        """latent [B, flat_out] -> [B, answers] float32; a sigmoid gives scores."""
        return self.head(latent)

    def __call__(
        self,
        question_ids: jax.Array,
        regions: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """`answer_logits` of `latent`: [B, answers] float32."""
        return self.answer_logits(self.latent(question_ids, regions, dropout_key=dropout_key))
