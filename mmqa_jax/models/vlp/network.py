"""VLP (Zhou et al. 2020) as WebQA uses it: one BERT trunk that selects sources and writes answers.

Sequence (vlp/webqa_loader.py): [CLS], region slots 1..R, source text, [SEP], question, answer,
[SEP]. Original: pytorch_pretrained_bert/modeling.py of WebQnA/WebQA_Baseline (BertForWebqa,
BertForWebqaDecoder).

What is ours overrides single methods: regions of pixels (below), the small reader of Atlas
(atlas_reader.py), sources encoded once for all questions (two_sided.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import platform
from mmqa_jax.core.typed import changes_of
from mmqa_jax.models.attention.masked import Ancestry
from mmqa_jax.models.bert import network
from mmqa_jax.models.common import layers
from mmqa_jax.models.two_towers.config import VisionConfig, clip_vision
from mmqa_jax.models.two_towers.network import VisionTower, blocks_before, normalize_pixels

# Generation with a masked language model, shared by VLP and Oscar.
#
# In every step a [MASK] is appended to each beam and predicted; the token then replaces it. The
# prefix (question and source, or picture) is encoded once and never attends to generated tokens.


@flax.struct.dataclass
class Prefix:
    """The encoded prefix: once per question or picture, not per beam."""

    key: jax.Array  # [layers, B, L, H], the heads side by side
    value: jax.Array  # [layers, B, L, H]
    mask: jax.Array  # [B, L] bool: columns that generated tokens attend to
    next_position: jax.Array  # [B] int: position id of the first generated token


@flax.struct.dataclass
class WrittenCache:
    """Keys and values of the generated tokens ([MASK] is never cached) of K beams a prefix."""

    key: jax.Array  # [layers, B, T * K, H]
    value: jax.Array  # [layers, B, T * K, H]
    ancestry: Ancestry

    def select(self, rows: jax.Array) -> WrittenCache:
        """The cache of beams `rows` [B * K], after the beams were reordered."""
        return WrittenCache(self.key, self.value, self.ancestry.select(rows))

    def write(self, key: jax.Array, value: jax.Array, number: jax.Array) -> WrittenCache:
        """Adds every beam's token `number`: key, value [layers, B, K, H]."""
        column = (0, 0, number * key.shape[2], 0)
        return WrittenCache(
            jax.lax.dynamic_update_slice(self.key, key, column),
            jax.lax.dynamic_update_slice(self.value, value, column),
            self.ancestry.written(number),
        )


def empty_cache(
    config: network.BertConfig, rows: int, beams: int, max_new_tokens: int
) -> WrittenCache:
    """Zeros for `beams` sequences of `max_new_tokens` tokens for each of `rows` prefixes."""
    shape = (config.layers, rows, beams * max_new_tokens, config.hidden)
    zeros = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
    return WrittenCache(*zeros, Ancestry.empty(rows, beams, max_new_tokens))


def encode_prefix(
    bert: network.Bert, embedded: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the encoder without dropout and returns its keys and values too.

    embedded [B, L, H], mask bool broadcastable to [B, heads, L, L] -> hidden states [B, L, H],
    keys and values [layers, B, L, H] each.
    """

    def body(layer: network.BertLayer, x, _, __):
        query, key, value = layer.project(x)
        attended = layer.attend(query, key, value, mask)
        return layer.finish(x, attended), (layers.merge_heads(key), layers.merge_heads(value))

    hidden, (key, value) = layers.scan_layers(
        bert.layers, embedded, body, unroll=bert.config.unroll
    )
    return hidden, key, value


def append_mask(
    bert: network.Bert,
    prefix: Prefix,
    cache: WrittenCache,
    generated: jax.Array,
    step: jax.Array,
    *,
    mask_id: int,
    token_type: int,
) -> tuple[jax.Array, WrittenCache]:
    """Feeds [last token, [MASK]] and returns the hidden state at [MASK].

    `generated` [N, T] int are the tokens so far, `step` is their number (the rest is ignored);
    N = B * K, with the K beams of one prefix next to each other. Returns hidden states [N, H] and
    the cache with the last token added.
    """
    prefixes, beams, _ = cache.ancestry.slots.shape
    previous = generated[:, jnp.maximum(step - 1, 0)]
    tokens = jnp.stack([previous, jnp.full_like(previous, mask_id)], axis=1)  # [N, 2]
    start = jnp.repeat(prefix.next_position, beams)[:, None]  # [N, 1]
    positions = jnp.maximum(start + step + jnp.array([-1, 0]), 0)  # [N, 2]
    # All tokens as one sequence, for what works on each alone: [1, 2 N, H].
    tokens, positions = tokens.reshape(1, -1), positions.reshape(1, -1)
    x = bert.embeddings(tokens, positions, jnp.full_like(tokens, token_type))

    # Columns: the beams' tokens before `previous`, then [previous, [MASK]] of every beam.
    earlier = jnp.repeat(cache.ancestry.visible(step - 1), 2, axis=1)  # [B, 2 K, T * K]
    pair = jnp.stack([jnp.array([True, False]), jnp.stack([step > 0, jnp.array(True)])])
    beam = jnp.arange(2 * beams) // 2
    new = jnp.tile(pair, (beams, beams)) & (beam[:, None] == beam)  # [2 K, 2 K]
    new = jnp.broadcast_to(new, (prefixes, *new.shape))
    mask = jnp.concatenate([earlier, new], axis=2)  # [B, 2 K, T * K + 2 K]

    # Layers read the caches; only the new tokens' keys and values come out of the scan and are
    # written in place: carrying the caches through ys would copy them for every token.
    caches = (prefix.key, prefix.value, cache.key, cache.value)  # [layers, B, columns, H] each
    in_kernel = _in_kernel(bert.config, x, caches)

    def attend(query, key, value, past):
        if in_kernel:
            from mmqa_jax.models.attention.fused import fused_prefix_attention

            pairs = (caches[:2], prefix.mask, caches[2:], (key, value))
            return fused_prefix_attention(past, query, *pairs, mask)
        prefix_key, prefix_value, past_key, past_value = (
            layers.split_heads(columns, bert.config.heads) for columns in past
        )
        return layers.prefix_attention(
            query,
            prefix_key,
            prefix_value,
            prefix.mask,
            jnp.concatenate([past_key, key], axis=1),
            jnp.concatenate([past_value, value], axis=1),
            mask=mask[:, None],
        )

    def body(layer: network.BertLayer, x, past, _):
        # The beams of a prefix are rows of one product: [B, 2 K, heads, head_dim].
        projected = layer.project(x)
        query, key, value = (p.reshape(prefixes, -1, *p.shape[2:]) for p in projected)
        attended = attend(query, key, value, past).reshape(projected[0].shape)
        return layer.finish(x, attended), (
            layers.merge_heads(key)[:, ::2],
            layers.merge_heads(value)[:, ::2],
        )

    x, (key, value) = layers.scan_layers(
        bert.layers,
        x,
        body,
        xs=jnp.arange(bert.config.layers) if in_kernel else caches,
        unroll=bert.config.unroll,
    )
    # Step 0 writes token 0, which step 1 overwrites.
    cache = cache.write(key, value, jnp.maximum(step - 1, 0))
    return x.reshape(prefixes * beams, 2, -1)[:, 1], cache


def _in_kernel(config: network.BertConfig, x: jax.Array, caches: tuple[jax.Array, ...]) -> bool:
    """Whether beams attend in the TPU's kernel, which reads the caches of all layers in place."""
    if platform() != "tpu" or x.dtype != jnp.bfloat16 or config.attention != "auto":
        return False
    from mmqa_jax.models.attention.fused import (
        fused_prefix_fits,  # Pallas takes half a second
    )

    columns = caches[0].shape[2] + caches[2].shape[2]
    return fused_prefix_fits(config.heads, config.hidden // config.heads, columns)


@dataclasses.dataclass(frozen=True)
class VLPConfig:
    """The trunk and the visual frontend.

    A region's content vector [region_features] goes through one linear per size in
    `visual_hidden` and a last one to the trunk's width, its position vector [region_positions]
    through one linear; ReLU after each linear, then dropout. Those linears start as torch's
    nn.Linear (modeling.py:1011-1050, after init_bert_weights has run), or with kernels of
    the standard deviations `content_stddev` and `place_stddev` and biases 0.
    """

    bert: network.BertConfig
    region_features: int = 2048
    region_positions: int = 1607
    visual_hidden: tuple[int, ...] = (2048,)
    content_stddev: float | None = None
    place_stddev: float | None = None

    def build(self, *, rngs: nnx.Rngs) -> VLP:
        """A freshly initialized model."""
        return VLP(self, rngs=rngs)

    def make_region_content(self, rngs: nnx.Rngs) -> RegionEncoder:
        """What embeds the regions' content."""
        sizes = (*self.visual_hidden, self.bert.hidden)
        options = {"rngs": rngs, "stddev": self.content_stddev}
        return RegionEncoder(
            self.region_features, sizes, self.bert.dropout, self.bert.dtype, **options
        )


def _vlp_trunk(**changes) -> network.BertConfig:
    return dataclasses.replace(network.BertConfig(types=6, eps=1e-5), **changes)


def vlp_base_x101(**trunk) -> VLPConfig:
    """BERT-base-cased trunk over X101 detector features (WebQA's main model)."""
    return VLPConfig(_vlp_trunk(**trunk))


def vlp_base_vinvl(**trunk) -> VLPConfig:
    """BERT-base-cased trunk over VinVL features (6 box values + 1595 classes)."""
    return VLPConfig(_vlp_trunk(**trunk), region_positions=1601, visual_hidden=())


@flax.struct.dataclass
class VLPInputs:
    """A packed batch; positions 1..R hold regions, R = 0 in a text-only batch."""

    input_ids: jax.Array  # [B, L] int
    token_type_ids: jax.Array  # [B, L] int
    position_ids: jax.Array  # [B, L] int
    context_mask: jax.Array  # [B, L] bool: columns every row sees (source and question)
    answer_mask: jax.Array  # [B, L] bool: answer tokens and last [SEP], causal among themselves
    region_features: jax.Array  # [B, R, F]
    region_positions: jax.Array  # [B, R, P]

    def attention_mask(self) -> jax.Array:
        """Which columns every row sees, bool [B, 1, L, L]."""
        return mixed_mask(self.context_mask, self.answer_mask)


def mixed_mask(context_mask: jax.Array, answer_mask: jax.Array) -> jax.Array:
    """VLP's sequence-to-sequence mask: [B, L] each -> bool [B, 1, L, L] (row, column).

    Every row sees the context; an answer row also sees itself and the answer before it. With no
    answer it is the bidirectional mask of source selection.
    """
    length = context_mask.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    seen = context_mask[:, None, :] | (answer_mask[:, :, None] & answer_mask[:, None, :] & causal)
    return seen[:, None]


class RegionEncoder(nnx.Module):
    """Linear + ReLU, once per size, then dropout: [B, R, in] -> [B, R, sizes[-1]] of `dtype`.

    The linears start with kernels of standard deviation `stddev`; None: as torch's.
    """

    def __init__(
        self,
        in_features: int,
        sizes: tuple[int, ...],
        rate: float,
        dtype: str,
        *,
        rngs: nnx.Rngs,
        stddev: float | None,
    ):
        widths = (in_features, *sizes)
        names = [("patch", "proj")] * (len(sizes) - 1) + [("patch", "embed")]
        make = functools.partial(layers.torch_linear, rngs=rngs)
        if stddev is not None:
            make = functools.partial(
                layers.Linear, rngs=rngs, kernel_init=layers.normal_init(stddev)
            )
        self.linears = nnx.List(make(*widths[i : i + 2], names[i]) for i in range(len(sizes)))
        self.rate, self.dtype = rate, dtype

    def __call__(self, x: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        x = x.astype(self.dtype)
        for linear in self.linears:
            x = jax.nn.relu(linear(x))
        return layers.dropout(x, self.rate, dropout_key)


class VLP(nnx.Module):
    """One model, two heads: `source_logits` on [CLS], `mlm_logits` on any position."""

    def __init__(self, config: VLPConfig, *, rngs: nnx.Rngs):
        bert = config.bert
        self.config = config
        self.bert = network.Bert(bert, rngs=rngs)
        self.region_content = config.make_region_content(rngs)
        self.region_place = RegionEncoder(
            config.region_positions,
            (bert.hidden,),
            bert.dropout,
            bert.dtype,
            rngs=rngs,
            stddev=config.place_stddev,
        )
        self.source_head = layers.torch_linear(bert.hidden, 2, ("embed", None), rngs=rngs)
        self.mlm_head = network.MlmHead(bert, rngs=rngs)

    def _embed_content(self, inputs: VLPInputs, dropout_key: jax.Array | None) -> jax.Array:
        """The regions' content, [B, R, H]."""
        return self.region_content(inputs.region_features, dropout_key=dropout_key)

    def _embed(self, inputs: VLPInputs, dropout_key: jax.Array | None) -> jax.Array:
        content_key, place_key, sum_key = layers.split_key(dropout_key, 3)
        regions = None
        if inputs.region_features.shape[1]:
            content = self._embed_content(inputs, content_key)
            place = self.region_place(inputs.region_positions, dropout_key=place_key)
            regions = content, place  # [B, R, H] each
        return self.bert.embeddings(
            inputs.input_ids,
            inputs.position_ids,
            inputs.token_type_ids,
            regions=regions,
            dropout_key=sum_key,
        )

    def encode(self, inputs: VLPInputs, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Hidden states of the last layer under the mixed mask, [B, L, H]."""
        embed_key, layers_key = layers.split_key(dropout_key, 2)
        x = self._embed(inputs, embed_key)
        return self.bert.encode(x, inputs.attention_mask(), dropout_key=layers_key)

    def source_logits(
        self, inputs: VLPInputs, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Source selection: [B, 2] in float32; class 0 = the source is relevant.

        The head reads [CLS], so that the last layer computes nothing else.
        """
        embed_key, layers_key = layers.split_key(dropout_key, 2)
        x = self._embed(inputs, embed_key)
        mask = inputs.attention_mask()
        first = self.bert.encode_first(x, mask, dropout_key=layers_key)  # [B, H]
        return self.source_head(first).astype(jnp.float32)

    def mlm_logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states at the wanted positions [..., H] -> token logits [..., V], float32."""
        return self.mlm_head(hidden, self.bert.embeddings.word)

    def answer_log_probs(
        self,
        inputs: VLPInputs,
        positions: jax.Array,
        ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities of the tokens `ids` at the columns `positions`, for training.

        positions, ids: [B, P]. Returns [B, P] float32, and bool [B, P]: whether the model can say
        such a token at all; VLP can say every one.
        """
        _, at_masks = self._encode_at(inputs, positions, dropout_key)
        logits = self.mlm_logits(at_masks)
        chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.ones(ids.shape, bool)

    def _encode_at(
        self, inputs: VLPInputs, positions: jax.Array, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states of the last layer, [B, L, H], and those at `positions`, [B, P, H]."""
        hidden = self.encode(inputs, dropout_key=dropout_key)
        return hidden, jnp.take_along_axis(hidden, positions[:, :, None], axis=1)

    def prefill(self, inputs: VLPInputs) -> Prefix:
        """Encodes source and question once; what is in answer positions is never seen."""
        return self._encode_context(inputs)[1]

    def _encode_context(self, inputs: VLPInputs) -> tuple[jax.Array, Prefix]:
        """Hidden states of the last layer, [B, L, H], and what decoding keeps."""
        mask = inputs.context_mask[:, None, None, :]
        hidden, key, value = encode_prefix(self.bert, self._embed(inputs, None), mask)
        last = jnp.max(jnp.where(inputs.context_mask, inputs.position_ids, -1), axis=1)
        return hidden, Prefix(key, value, inputs.context_mask, last + 1)

    def empty_cache(self, rows: int, beams: int, max_new_tokens: int) -> WrittenCache:
        """Zeros for `beams` answers of `max_new_tokens` tokens to each of `rows` questions."""
        return empty_cache(self.config.bert, rows, beams, max_new_tokens)

    def decode_step(
        self,
        prefix: Prefix,
        cache: WrittenCache,
        generated: jax.Array,
        step: jax.Array,
        *,
        mask_id: int,
        token_type: int,
    ) -> tuple[jax.Array, WrittenCache]:
        """One token for every beam; the arguments are those of `mask_appending.append_mask`.

        Returns log-probabilities [N, V] of token number `step`, and the cache with the previous
        token added.
        """
        ids = {"mask_id": mask_id, "token_type": token_type}
        hidden, cache = append_mask(self.bert, prefix, cache, generated, step, **ids)
        return jax.nn.log_softmax(self.mlm_logits(hidden)), cache


# VLP on pictures without a detector (ours): regions are patches of pixels, or CLIP's of them.


# First weights of patches: small ones of the content and larger ones of the position, which has
# few values, so that neither drowns the other, nor a tag.
_PATCH_STDDEVS = {"content_stddev": 0.01, "place_stddev": 0.03}


def vlp_patches(
    patch: int,
    *,
    bert: network.BertConfig | None = None,
    visual_hidden: tuple[int, ...] = (),
    region_positions: int = 6,
    **trunk,
) -> VLPConfig:
    """Regions are square patches of raw pixels: patch * patch * 3 values, 6 or more of position.

    The trunk is MiniLM-L6's shape with VLP's six token types unless `bert` is given; used on the
    Atlas corpus, where no detector runs.
    """
    return VLPConfig(
        dataclasses.replace(bert or network.minilm_l6(types=6), **trunk),
        region_features=patch * patch * 3,
        region_positions=region_positions,
        visual_hidden=tuple(visual_hidden),
        **_PATCH_STDDEVS,
    )


def vlp_clip(
    vision: VisionConfig,
    *,
    bert: network.BertConfig,
    layer: int = -2,
    visual_hidden: tuple[int, ...] = (),
) -> ClipVLPConfig:
    """Regions are CLIP's patch features, made on the fly; positions are the patches' box values."""
    return ClipVLPConfig(
        bert,
        region_features=vision.patch_size**2 * 3,
        region_positions=6,
        visual_hidden=tuple(visual_hidden),
        vision=vision,
        vision_layer=layer,
        **_PATCH_STDDEVS,
    )


@dataclasses.dataclass(frozen=True)
class ClipVLPConfig(VLPConfig):
    """A VLP whose regions are patches of raw pixels, of which a frozen CLIP makes the content."""

    vision: VisionConfig = dataclasses.field(kw_only=True)  # CLIP's tower; see ClipRegionEncoder
    vision_layer: int = -2  # whose features are taken

    def __post_init__(self):
        blocks_before(self.vision_layer, self.vision.layers, "model.vision_layer")

    def make_region_content(self, rngs: nnx.Rngs) -> RegionEncoder:
        sizes = (*self.visual_hidden, self.bert.hidden)
        vision, bert = (self.vision, self.vision_layer), self.bert
        options = {"rngs": rngs, "stddev": self.content_stddev}
        return ClipRegionEncoder(*vision, sizes, bert.dropout, bert.dtype, **options)


class ClipRegionEncoder(RegionEncoder):
    """Patches of raw pixels -> CLIP's patch features -> linears, as RegionEncoder.

    The tower is in front of the model within the same jitted step, not in the input pipeline:
    it then sees whole batches on the accelerator, and a picture travels as its pixels, which the
    host keeps decoded; float features of WebQA's 390,000 pictures would be 200 GB and more, and
    made one by one on the host they would hold up every step. It is frozen, and saved with the
    run, so that a trained model needs no second folder.
    """

    def __init__(
        self, vision: VisionConfig, layer: int, sizes: tuple[int, ...], rate: float, dtype: str,
        *, rngs: nnx.Rngs, stddev: float | None,
    ):  # fmt: skip
        super().__init__(vision.width, sizes, rate, dtype, rngs=rngs, stddev=stddev)
        self.tower, self.layer = VisionTower(vision, rngs=rngs), layer

    def __call__(self, x: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        return super().__call__(self.features(x), dropout_key=dropout_key)

    def features(self, x: jax.Array) -> jax.Array:
        """Patches [B, R, patch * patch * 3], pixels in -1..1 -> features [B, R, width]."""
        vision = self.tower.config
        side, patch = vision.image_size // vision.patch_size, vision.patch_size
        pixels = (x + 1) / 2  # 0..1
        pixels = pixels.reshape(-1, side, side, patch, patch, 3)  # [B * pictures, row, column, ...]
        pixels = pixels.transpose(0, 1, 3, 2, 4, 5)
        pixels = pixels.reshape(-1, vision.image_size, vision.image_size, 3)
        features = self.tower.patch_features(normalize_pixels(pixels), self.layer)
        return jax.lax.stop_gradient(features).reshape(*x.shape[:2], vision.width)


Frontend = Literal["patches", "x101", "vinvl", "clip"]


@dataclasses.dataclass(frozen=True)
class VLPModel:
    """VLP."""

    trunk: str  # a name of TRUNKS
    # What a picture's regions are: `patches` of pixels (ours), a detector's (`x101`, `vinvl`), or
    # the patch features of a CLIP.
    frontend: Frontend
    changes: Mapping[str, Any] = changes_of(network.BertConfig)  # fields of BertConfig that differ
    # clip, vision, vision_layer: of the frontend clip: a name of CLIPS, fields of VisionConfig that
    # differ (unless given its dtype is the trunk's), and the layer whose features are taken (the
    # last but one).
    clip: str = ""
    vision: Mapping[str, Any] = changes_of(VisionConfig)
    vision_layer: int = -2
    patch: int | None = None  # of the frontend patches: their side in pixels
    visual_hidden: tuple[int, ...] = ()  # sizes of further linears between regions and trunk

    def __post_init__(self):
        for frontend, key in (("patches", "patch"), ("clip", "clip")):
            if self.frontend == frontend and not getattr(self, key):
                raise UserError(f"config key model.{key} is missing; add it.")

    def config(self, vocab_size: int, region_positions: int = 6) -> VLPConfig:
        """The model's sizes.

        Args:
          vocab_size: of the tokenizer.
          region_positions: values of a patch's position.
        """
        trunk = network.trunk_config(self.trunk, self.changes, vocab_size, types=6)
        if self.frontend == "patches":
            assert self.patch is not None
            return vlp_patches(
                self.patch,
                bert=trunk,
                visual_hidden=self.visual_hidden,
                region_positions=region_positions,
            )
        if self.frontend == "clip":
            return vlp_clip(
                self.clip_vision(),
                bert=trunk,
                layer=self.vision_layer,
                visual_hidden=self.visual_hidden,
            )
        published = {"x101": vlp_base_x101, "vinvl": vlp_base_vinvl}[self.frontend]()
        return dataclasses.replace(published, bert=trunk)

    def clip_vision(self) -> VisionConfig:
        """The vision tower of the frontend clip."""
        dtype = self.changes.get("dtype", network.BertConfig.dtype)
        return clip_vision(self.clip, {"dtype": dtype, **self.vision})
