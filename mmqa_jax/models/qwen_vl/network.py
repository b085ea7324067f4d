"""Qwen2-VL (Wang et al. 2024), Qwen2.5-VL (Bai et al. 2025) and Qwen3-VL: a Qwen that reads
pictures of any size.

A picture becomes one token for each unit of 2 x 2 patches (`qwen_vl_tower`), which takes the place
of a placeholder in the text. Rotary positions are three (M-RoPE): of time, row and column, the
same for text; a picture has one time, and what follows it goes on behind its longer side. Qwen3-VL
adds what its tower's layers hold to the first layers' states at these tokens (deepstack).
Originals: transformers models/qwen2_5_vl/modeling_qwen2_5_vl.py and qwen3_vl/modeling_qwen3_vl.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import gather_columns, on_device
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import check_divides, check_known
from mmqa_jax.models.common.layers import (
    LayerNorm,
    Linear,
    attention,
    keep,
    merge_heads,
    normal_init,
    param,
    scan_layers,
    split_heads,
    stack_layers,
)
from mmqa_jax.models.common.rope import rotate
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llama.norms import RMSNorm
from mmqa_jax.models.two_towers.config import PIXEL_MEAN, PIXEL_STD

if TYPE_CHECKING:
    from jaxtyping import Int32, UInt8


# The config of the vision towers: sizes, switches, and their pictures.


@dataclasses.dataclass(frozen=True)
class TowerFamily:
    """Switches that a family's code sets and no key of a config.json says."""

    gated: bool = False  # RMS norms and gated MLPs, in the place of layer norms and plain MLPs
    patch_bias: bool = True  # the product of a patch has a bias
    biases: bool = True  # attention's output and MLPs have biases
    # How learned positions are resized: "corners" upon corners, or, with the centers of patches,
    # "linear" or "cubic".
    positions: str = "corners"
    # patch_norm, end_norm: a norm before the first, and behind the last layer.
    patch_norm: bool = False
    end_norm: bool = False
    merger: str = "mlp"  # "mlp", or "gated" (`GatedMerger`)
    merger_eps: float = 1e-6  # of the merger's norm
    processor: str = "Qwen2VLImageProcessor"  # transformers' image processor
    # Its least and most pixels, where no file says them; of all frames, if `by_frames`.
    areas: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    by_frames: bool = False
    grown: Callable[[float], int] | None = None  # see `data.pictures.resize.PictureSizes`
    page_prompt: str = ""  # what its authors ask it about a page of text; "": they name none


FAMILIES: Mapping[str, TowerFamily] = {
    "qwen2_vl": TowerFamily(patch_bias=False),
    "qwen2_5_vl": TowerFamily(gated=True, patch_bias=False),
    "qwen3_vl": TowerFamily(),
    "glm4v": TowerFamily(
        gated=True,
        biases=False,
        positions="cubic",
        patch_norm=True,
        end_norm=True,
        merger="gated",
        merger_eps=1e-5,
        processor="Glm4vImageProcessor",
        areas=(112 * 112, 28 * 28 * 15000),
        by_frames=True,
        grown=int,
    ),
    "paddleocr_vl": TowerFamily(
        positions="linear",
        end_norm=True,
        merger_eps=1e-5,
        processor="PaddleOCRVLImageProcessor",
        areas=(384 * 384, 1536 * 1536),
        grown=round,
        page_prompt="OCR:",
    ),
}


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig:
    """Sizes and switches of a tower; the defaults are Qwen2.5-VL 7B's."""

    family: str = "qwen2_5_vl"  # of `FAMILIES`
    # width, layers, heads, mlp: of the transformer.
    width: int = 1280
    layers: int = 32
    heads: int = 16
    mlp: int = 3420
    out: int = 3584  # width of the vectors that the language model gets
    patch: int = 14  # side of a patch in pixels
    temporal: int = 2  # frames that a patch spans
    merge: int = 2  # patches along each side of a unit, which becomes one vector
    # Side of an attention window in pixels; 0: every layer attends to the whole picture.
    window: int = 112
    full_layers: tuple[int, ...] = (7, 15, 23, 31)  # the layers that do so where there are windows
    positions: int = 0  # side of the grid of learned positions; 0: none
    deepstack: tuple[int, ...] = ()  # the layers after which states are given beside the last one's
    activation: str = "silu"  # of the MLP
    rope_theta: float = 10000.0  # base of the rotary frequencies
    # pixel_mean, pixel_std: of each channel, of pixels 0..1.
    pixel_mean: tuple[float, float, float] = PIXEL_MEAN
    pixel_std: tuple[float, float, float] = PIXEL_STD
    # min_pixels, max_pixels: area that pictures are resized to where theirs is beyond.
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    # init_stddev, dtype, attention, remat, unroll: as LlamaConfig's.
    init_stddev: float = 0.02
    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    unroll: int | bool | None = None
    eps: float = 1e-6  # of the norms of layers, and of those before and behind them
    qkv_bias: bool = True  # queries, keys and values have biases
    merger_mlp: int | None = None  # width of the MLP of a gated merger

    def __post_init__(self):
        check_known("vision.family", self.family, FAMILIES)
        check_known("vision.activation", self.activation, ACTIVATIONS)
        check_divides("vision.heads", self.heads, "vision.width", self.width)
        if self.width // self.heads % 4:
            raise UserError(
                f"vision.heads is {self.heads}: a head of {self.width // self.heads} numbers, "
                "expected a multiple of 4 for rotary positions of rows and columns; change it."
            )
        for name in ("full_layers", "deepstack"):
            numbers = tuple(getattr(self, name))
            object.__setattr__(self, name, numbers)
            if list(numbers) != sorted({n for n in numbers if 0 <= n < self.layers}):
                raise UserError(
                    f"vision.{name} is {numbers}: expected ascending numbers of layers, 0 to "
                    f"{self.layers - 1}; correct it."
                )
        if self.window % self.unit:
            raise UserError(
                f"vision.window is {self.window}: expected a multiple of {self.unit}, patch times "
                "merge; change it."
            )
        if not 0 < self.min_pixels <= self.max_pixels:
            raise UserError(
                f"vision.min_pixels and max_pixels are {self.min_pixels} and {self.max_pixels}: "
                "expected numbers above 0, the first at most the second; correct them."
            )

    @property
    def switches(self) -> TowerFamily:
        """Returns the switches of the tower's family."""
        return FAMILIES[self.family]

    @property
    def unit(self) -> int:
        """Side in pixels of what becomes one vector."""
        return self.patch * self.merge

    @property
    def window_units(self) -> int:
        """Side of a window in units; 1 without windows."""
        return max(self.window // self.unit, 1)

    @property
    def most_units(self) -> int:
        """Units of the largest picture."""
        return self.max_pixels // self.unit**2

    @property
    def features(self) -> int:
        """Width of all that a unit gives: the vector, and one of each layer of `deepstack`."""
        return self.out * (1 + len(self.deepstack))


@dataclasses.dataclass(frozen=True)
class QwenVLConfig:
    """Tower and language model."""

    vision: QwenVisionConfig  # the tower; its `out` is the language model's width
    llama: LlamaConfig  # the language model, with `mrope`
    # Id of a picture's placeholder; one stands for each token of a picture.
    image_token: int = 151655
    # video_token, vision_start_token, vision_end_token: ids that prompts have around pictures, and
    # of videos, which are not read here.
    video_token: int = 151656
    vision_start_token: int = 151652
    vision_end_token: int = 151653

    def __post_init__(self):
        if self.vision.out != self.llama.hidden:
            raise UserError(
                f"model.vision.out is {self.vision.out}: expected model.llama.hidden = "
                f"{self.llama.hidden}; make them equal."
            )
        if not self.llama.mrope:
            raise UserError("model.llama.mrope is (): expected three numbers; give them.")
        if len(self.vision.deepstack) > self.llama.layers:
            raise UserError(
                f"model.vision.deepstack is {self.vision.deepstack}: expected at most as many as "
                f"model.llama.layers = {self.llama.layers}; shorten it."
            )

    @property
    def picture_kind(self) -> Literal["units"]:
        """See PictureConfig."""
        return "units"

    @property
    def page_prompt(self) -> str:
        """Returns the prompt by which its authors read a page's text; "": they name none."""
        return self.vision.switches.page_prompt

    @property
    def expected_pixels(self) -> str:
        """See PictureConfig."""
        unit = self.vision.unit
        return f"uint8 [H, W, 3], multiples of {unit}; use data.pictures.resize.qwen_pixels"

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """One for each unit of pixels [H, W, 3] whose sides are whole units; 0 for others."""
        fits = len(shape) == 3 and shape[2] == 3 and min(shape) > 0
        fits = fits and shape[0] % self.vision.unit == shape[1] % self.vision.unit == 0
        return grid_of(shape, self.vision).units if fits else 0

    def position_shifts(
        self, tokens: Sequence[int], shapes: Sequence[Sequence[int]]
    ) -> Int32[np.ndarray, "L+1 3"]:
        """M-RoPE's positions less the columns; see PictureConfig."""
        grids = [grid_of(shape, self.vision) for shape in shapes]
        positions = token_positions(tokens, grids, self.image_token)
        columns = np.arange(len(positions), dtype=np.int32)
        return positions - columns[:, None]


def token_positions(
    tokens: Sequence[int], grids: Sequence[Grid], image_token: int
) -> Int32[np.ndarray, "L+1 3"]:
    """Time, row and column of each token of a prompt whose pictures have one placeholder each.

    The last row is that of the token after the prompt.
    """
    parts, now, waiting = [], 0, iter(grids)
    for token in tokens:
        if token != image_token:
            parts.append(np.full((1, 3), now, np.int32))
            now += 1
            continue
        grid = next(waiting)
        places = np.zeros((grid.units, 3), np.int32)
        places[:, 1:] = np.stack(np.indices(grid), axis=-1).reshape(-1, 2)
        parts.append(places + now)
        now += max(grid)
    return np.concatenate([*parts, np.full((1, 3), now, np.int32)])


class QwenVL(nnx.Module):
    """Tower and language model."""

    def __init__(self, config: QwenVLConfig, *, rngs: nnx.Rngs):
        self.vision = QwenVision(config.vision, rngs=rngs)
        self.llama = Llama(config.llama, rngs=rngs)
        self.config = config

    def tower(self) -> nnx.Dict:
        """What is computed of a picture."""
        return nnx.Dict(vision=self.vision)

    def encode_images(self, pictures: PatchBatch) -> jax.Array:
        """Pictures -> [B, U, features] in the language model's compute dtype."""
        return self.vision(pictures).astype(self.config.llama.dtype)

    def embed(
        self, input_ids: jax.Array, features: jax.Array | None, rows: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Token embeddings with the pictures' in their places, and what deepstack adds.

        Args:
          input_ids: int [B, L].
          features: [..., features] of `encode_images`; None if no row has a picture.
          rows: int [B, L], which of the features' rows a token takes; -1: none.

        Returns:
          [B, L, H], and [n, B, L, H] or None.
        """
        picture = input_ids == self.config.image_token
        tokens = self.llama.embed(jnp.where(picture, 0, input_ids))
        if features is None:
            return jnp.where(picture[..., None], jnp.nan, tokens), None
        flat = features.reshape(-1, features.shape[-1]).astype(tokens.dtype)
        states = flat.at[jnp.where(rows < 0, len(flat), rows)].get(mode="fill", fill_value=jnp.nan)
        return spread(tokens, states, picture)

    def __call__(
        self,
        input_ids: jax.Array,
        features: jax.Array | None = None,
        rows: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token at every position, [B, L, V] float32.

        Args:
          input_ids, features, rows: see `embed`, and `expand_pictures`.
          attention_mask, positions, dropout_key: see `Llama.encode`; positions [B, L, 3].
        """
        embedded, deepstack = self.embed(input_ids, features, rows)
        hidden = self.llama.encode(
            embedded, attention_mask, positions, deepstack=deepstack, dropout_key=dropout_key
        )
        return self.llama.logits(hidden)


def spread(
    tokens: jax.Array, features: jax.Array, picture: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The first layer's input and what is added to the next ones'.

    Args:
      tokens: [B, L, H], embeddings.
      features: [B, L, (1 + n) * H], of the pictures' tokens.
      picture: bool [B, L], which those are.

    Returns:
      [B, L, H] and [n, B, L, H], zeros where there is no picture; None where n is 0.
    """
    if features.shape == tokens.shape:
        return jnp.where(picture[..., None], features.astype(tokens.dtype), tokens), None
    parts = jnp.stack(jnp.split(features, features.shape[-1] // tokens.shape[-1], axis=-1))
    embedded = jnp.where(picture[..., None], parts[0].astype(tokens.dtype), tokens)
    return embedded, jnp.where(picture[..., None], parts[1:], 0)


class Prompts(NamedTuple):
    """A padded batch of prompts."""

    input_ids: np.ndarray  # int32 [B, L], one placeholder for each token of a picture
    mask: np.ndarray  # bool [B, L], true at real tokens
    positions: np.ndarray  # int32 [B, L, 3]
    rows: np.ndarray  # int32 [B, L], see `QwenVL.embed`


def expand_pictures(
    rows: Sequence[Sequence[int]],
    pictures: Sequence[Sequence[Sequence[int]]],
    config: Any,
    sizes: Any = None,
    *,
    first_rows: Iterator[int] | None = None,
    length: int | None = None,
    pad_token: int = 0,
) -> Prompts:
    """Repeats every placeholder once for each token of its picture, and pads the rows.

    Args:
      rows: token ids of each prompt, with one `config.image_token` per picture.
      pictures: of each prompt, the shapes [H, W, 3] of its pictures.
      config: of the model.
      sizes: of its patches and units; None: the tower's.
      first_rows: where each picture's features begin, in order; None: one behind the other.
      length: of the padded rows; None is the longest one's.
      pad_token: any id but the placeholder's.
    """
    expanded, begin = [], 0
    for number, (row, shapes) in enumerate(zip(rows, pictures, strict=True)):
        ids = np.asarray(row, np.int32)
        placeholder = ids == config.image_token
        if placeholder.sum() != len(shapes):
            raise UserError(
                f"prompt {number}: {placeholder.sum()} image placeholders (token "
                f"{config.image_token}) for {len(shapes)} pictures; put exactly one into the "
                "prompt for each picture."
            )
        counts = np.ones(len(ids), np.int64)
        counts[placeholder] = [config.picture_tokens(shape) for shape in shapes]
        taken = np.full(counts.sum(), -1, np.int32)
        starts = np.cumsum(counts) - counts
        for start, count in zip(starts[placeholder], counts[placeholder], strict=True):
            first = begin if first_rows is None else next(first_rows)
            taken[start : start + count] = np.arange(first, first + count)
            begin += count
        grids = [grid_of(shape, sizes or config.vision) for shape in shapes]
        positions = token_positions(ids, grids, config.image_token)[:-1]
        expanded.append((np.repeat(ids, counts), positions, taken))
    length = max(len(ids) for ids, _, _ in expanded) if length is None else length
    made = Prompts(
        np.full((len(expanded), length), pad_token, np.int32),
        np.zeros((len(expanded), length), bool),
        np.zeros((len(expanded), length, 3), np.int32),
        np.full((len(expanded), length), -1, np.int32),
    )
    for number, (ids, positions, taken) in enumerate(expanded):
        if len(ids) > length:
            raise UserError(
                f"prompt {number}: {len(ids)} tokens with its pictures, the batch holds {length}; "
                "shorten the prompt or use longer batches."
            )
        real = slice(len(ids))
        made.input_ids[number, real], made.mask[number, real] = ids, True
        made.positions[number, real], made.rows[number, real] = positions, taken
    return made


# The vision towers of Qwen2.5-VL (Bai et al. 2025) and Qwen3-VL.
#
# Both are transformers over the patches of a picture of any size with rotary positions in two
# dimensions, after which a merger makes one vector of 2 x 2 patches. Videos are pairs of frames;
# a picture is such a pair twice the same. Qwen2.5-VL attends within windows but in a few layers,
# with RMS norms and gated MLPs; Qwen2-VL and Qwen3-VL attend to all, and the latter adds learned
# positions interpolated to the picture's size, and gives what some of its layers hold as well
# (deepstack). Originals: transformers modeling_qwen2_vl.py, modeling_qwen2_5_vl.py and
# modeling_qwen3_vl.py.
#
# GLM-4.xV's is Qwen2.5-VL's without windows and most biases: learned positions, norms at both ends,
# and a merger with a gated MLP (modeling_glm4v.py). PaddleOCR-VL's is Qwen3-VL's without
# deepstack, with a norm behind its layers (modeling_paddleocr_vl.py).


def _norm(
    config: QwenVisionConfig, size: int, rngs: nnx.Rngs, eps: float | None = None
) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.switches.gated else LayerNorm
    return kind(size, config.eps if eps is None else eps, rngs=rngs)


class QwenVisionLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: QwenVisionConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        width, hidden = config.width, config.mlp
        self.norm_1 = _norm(config, width, rngs)
        self.qkv = linear(width, 3 * width, ("embed", "heads"), use_bias=config.qkv_bias)
        linear = functools.partial(linear, use_bias=config.switches.biases)
        self.out = linear(width, width, ("heads", "embed"))
        self.norm_2 = _norm(config, width, rngs)
        if config.switches.gated:
            self.gate = linear(width, hidden, ("embed", "mlp"))
        self.up = linear(width, hidden, ("embed", "mlp"))
        self.down = linear(hidden, width, ("mlp", "embed"))
        self.config = config

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, real: jax.Array, whole: jax.Array | bool
    ) -> jax.Array:
        """x [B, N, width]; cos, sin [B, N, 1, D / 2]; real bool [B, N]; whole: no windows."""
        q, k, v = jnp.split(self.qkv(self.norm_1(x)), 3, axis=-1)
        q, k, v = (split_heads(part, self.config.heads) for part in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.config.window:
            attended = jax.lax.cond(whole, self._attend, self._attend_in_windows, q, k, v, real)
        else:
            attended = self._attend(q, k, v, real)
        x = x + self.out(keep(merge_heads(attended)))
        y = self.norm_2(x)
        activation = ACTIVATIONS[self.config.activation]
        if self.config.switches.gated:
            return x + self.down(activation(self.gate(y)) * self.up(y))
        return x + self.down(activation(self.up(y)))

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array) -> jax.Array:
        mask = real[:, None, None]
        return attention(q, k, v, mask=mask, implementation=self.config.attention)

    def _attend_in_windows(
        self, q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array
    ) -> jax.Array:
        size = (self.config.window_units * self.config.merge) ** 2

        def apart(x: jax.Array) -> jax.Array:  # [B, N, ...] -> [B * windows, size, ...]
            return x.reshape(-1, size, *x.shape[2:])

        return self._attend(*map(apart, (q, k, v, real))).reshape(q.shape)


class Merger(nnx.Module):
    """norm, linear, GELU, linear: the patches of a unit become one vector.

    whole: the norm is over a unit, not over each patch.
    """

    def __init__(self, config: QwenVisionConfig, *, whole: bool, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        joined = config.width * config.merge**2
        size = joined if whole else config.width
        self.norm = _norm(config, size, rngs, config.switches.merger_eps)
        self.linear_1 = linear(joined, joined, ("embed", "mlp"))
        self.linear_2 = linear(joined, config.out, ("mlp", "embed"))
        self.joined, self.whole = joined, whole

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, N, width] -> [B, U, out]
        if self.whole:
            x = self.norm(x.reshape(len(x), -1, self.joined))
        else:
            x = self.norm(x).reshape(len(x), -1, self.joined)
        return self.linear_2(ACTIVATIONS["gelu"](self.linear_1(x)))


class GatedMerger(nnx.Module):
    """GLM-4.xV's: a linear makes one vector of a unit's patches; another, a norm, GELU, and a gated
    MLP follow."""

    def __init__(self, config: QwenVisionConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        out, mlp, self.joined = config.out, config.merger_mlp, config.width * config.merge**2
        self.join = linear(self.joined, out, ("mlp", "embed"))
        linear = functools.partial(linear, use_bias=False)
        self.linear = linear(out, out, ("embed", None))
        self.norm = LayerNorm(out, config.switches.merger_eps, rngs=rngs)
        self.gate = linear(out, mlp, ("embed", "mlp"))
        self.up = linear(out, mlp, ("embed", "mlp"))
        self.down = linear(mlp, out, ("mlp", "embed"))
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, N, width] -> [B, U, out]
        x = self.linear(self.join(x.reshape(len(x), -1, self.joined)))
        x = ACTIVATIONS["gelu"](self.norm(x))
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


def _taps(share: jax.Array, *, cubic: bool) -> list[tuple[int, jax.Array]]:
    """The learned positions around a place, as steps from the one below, and their weights.

    share: how far the place is from that towards the next. cubic: Keys' kernel, a = -0.75.
    """
    if not cubic:
        return [(0, 1 - share), (1, share)]

    def near(x: jax.Array) -> jax.Array:
        return (1.25 * x - 2.25) * x * x + 1

    def far(x: jax.Array) -> jax.Array:
        return ((-0.75 * x + 3.75) * x - 6) * x + 3

    return [(-1, far(share + 1)), (0, near(share)), (1, near(1 - share)), (2, far(2 - share))]


class QwenVision(nnx.Module):
    """A tower with its mergers."""

    def __init__(self, config: QwenVisionConfig, *, rngs: nnx.Rngs):
        init = normal_init(config.init_stddev)
        self.patch = Linear(
            config.temporal * config.patch**2 * 3,
            config.width,
            ("patch", "embed"),
            rngs=rngs,
            use_bias=config.switches.patch_bias,
            kernel_init=init,
        )
        if config.switches.patch_norm:
            self.patch_norm = _norm(config, config.width, rngs)
        if config.positions:
            shape = (config.positions**2, config.width)
            self.positions = param(rngs, init, shape, ("positions", "embed"))
        self.layers = stack_layers(lambda r: QwenVisionLayer(config, rngs=r), config.layers, rngs)
        if config.switches.end_norm:
            self.end_norm = _norm(config, config.width, rngs)
        if config.switches.merger == "gated":
            self.merger = GatedMerger(config, rngs=rngs)
        else:
            self.merger = Merger(config, whole=False, rngs=rngs)
        if config.deepstack:
            self.deepstack = stack_layers(
                lambda r: Merger(config, whole=True, rngs=r), len(config.deepstack), rngs
            )
        self.config = config

    def embed(self, pictures: PatchBatch) -> jax.Array:
        """The layers' input, [B, N, width] in the compute dtype."""
        config = self.config
        pixels = pictures.patches.astype(jnp.float32).reshape(*pictures.patches.shape[:2], -1, 3)
        pixels = (pixels / 255.0 - jnp.array(config.pixel_mean)) / jnp.array(config.pixel_std)
        pixels = pixels.reshape(*pixels.shape[:2], -1).astype(config.dtype)
        kernel = self.patch.kernel[...].astype(jnp.float32)
        kernel = kernel.reshape(config.temporal, -1, config.width).sum(0)  # all frames are the same
        x = jnp.einsum("bnp,pw->bnw", pixels, kernel.astype(pixels.dtype))
        if self.patch.bias is not None:
            x = x + self.patch.bias[...].astype(x.dtype)
        if config.switches.patch_norm:
            x = self.patch_norm(x)
        if config.positions:
            x = x + self._interpolated(pictures).astype(x.dtype)
        return x

    def _interpolated(self, pictures: PatchBatch) -> jax.Array:
        """Learned positions at the patches' places: [B, N, width] float32."""
        side, table = self.config.positions, self.positions[...].astype(jnp.float32)
        kind = self.config.switches.positions
        places = jnp.maximum(pictures.places, 0).astype(jnp.float32)
        if kind == "corners":
            at = places * (side - 1) / jnp.maximum(pictures.grid - 1, 1)[:, None]  # [B, N, 2]
        else:
            at = (places + 0.5) * side / pictures.grid[:, None] - 0.5
        low = jnp.floor(at)
        taps = _taps(at - low, cubic=kind == "cubic")
        low = low.astype(jnp.int32)
        total = jnp.zeros((), jnp.float32)
        for down, of_rows in taps:
            for right, of_columns in taps:
                near = jnp.clip(low + jnp.array([down, right]), 0, side - 1)
                weight = of_rows[..., 0] * of_columns[..., 1]
                total += table[near[..., 0] * side + near[..., 1]] * weight[..., None]
        return total

    def _angles(self, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of rows and columns, [B, N, 1, D / 2] each."""
        half = self.config.width // self.config.heads // 2
        exponents = (np.arange(0, half, 2) / half).astype(np.float32)
        turning = np.float32(1) / (self.config.rope_theta**exponents).astype(np.float32)
        angles = places[..., None].astype(jnp.float32) * turning  # [B, N, 2, D / 4]
        angles = angles.reshape(*places.shape[:2], 1, half)
        return jnp.cos(angles), jnp.sin(angles)

    def __call__(self, pictures: PatchBatch) -> jax.Array:
        """Pictures -> [B, U, features], a picture's units row by row; behind them anything.

        The first `out` of each are the merged vector, then those of `deepstack`.
        """
        config, x = self.config, self.embed(pictures)
        (cos, sin), real = self._angles(pictures.places), pictures.places[..., 0] >= 0
        taken = jnp.zeros((*x.shape[:2], len(config.deepstack), x.shape[2]), x.dtype)

        def body(layer: QwenVisionLayer, carry, of_layer, _):
            (x, taken), (whole, place) = carry, of_layer
            x = layer(x, cos, sin, real, whole)
            if config.deepstack:  # a place behind the last is not written
                taken = taken.at[:, :, place].set(x, mode="drop")
            return (x, taken), None

        options = {"remat": config.remat, "unroll": config.unroll}
        (x, taken), _ = scan_layers(self.layers, (x, taken), body, xs=self._of_layers(), **options)
        merged = [self.merger(self.end_norm(x) if config.switches.end_norm else x)]
        if config.deepstack:
            graphdef, params = nnx.split(self.deepstack)
            params = on_device(params)
            for number in range(len(config.deepstack)):
                layer_params = jax.tree.map(lambda p, n=number: p[n], params)
                merged.append(nnx.merge(graphdef, layer_params)(taken[:, :, number]))
        features = gather_columns(jnp.concatenate(merged, axis=-1))
        return jnp.take_along_axis(features, pictures.order[..., None], axis=1)

    def _of_layers(self) -> tuple[np.ndarray, np.ndarray]:
        """Tells which layers attend to the whole picture, and their places in deepstack."""
        numbers = range(self.config.layers)
        count = len(self.config.deepstack)
        whole = np.array([number in self.config.full_layers for number in numbers])
        places = dict(zip(self.config.deepstack, range(count), strict=True))
        return whole, np.array([places.get(number, count) for number in numbers], np.int32)

    def layer_outputs(self, pictures: PatchBatch) -> jax.Array:
        """Every layer's output, [layers, B, N, width]."""
        (cos, sin), real = self._angles(pictures.places), pictures.places[..., 0] >= 0

        def body(layer: QwenVisionLayer, x, of_layer, _):
            x = layer(x, cos, sin, real, of_layer[0])
            return x, x

        return scan_layers(self.layers, self.embed(pictures), body, xs=self._of_layers())[1]


# A picture of any size as its patches in one of a few sizes, for Qwen's vision towers.
#
# A picture's sides are multiples of `unit` pixels; a unit is what becomes one token of the
# language model: 2 x 2 patches. Units lie window by window (Qwen2.5-VL: 4 x 4 units, fewer at the
# right and the bottom), each window padded to its whole size, and the whole padded to a bucket: a
# tower has one program for each bucket, whatever pictures come.


_LEAST = 64  # units of the smallest bucket; each next one is a third to a half larger


@flax.struct.dataclass
class PatchBatch:
    """Pictures of one bucket of U units, with N = U * merge^2 patches; padding is at -1."""

    patches: np.ndarray | jax.Array  # uint8 [B, N, patch * patch * 3], as (row, column, channel)
    places: np.ndarray | jax.Array  # int32 [B, N, 2], row and column of each patch
    grid: np.ndarray | jax.Array  # int32 [B, 2], rows and columns of patches
    order: np.ndarray | jax.Array  # int32 [B, U]: where the units lie, row by row of the picture


class Grid(NamedTuple):
    """Rows and columns of units of a picture."""

    rows: int
    columns: int

    @property
    def units(self) -> int:
        """Tokens of the language model."""
        return self.rows * self.columns


def grid_of(shape: Sequence[int], config: QwenVisionConfig) -> Grid:
    """The grid of pixels [H, W, 3] whose sides are multiples of `config.unit`."""
    height, width = shape[:2]
    assert height % config.unit == width % config.unit == 0, (height, width, config.unit)
    return Grid(height // config.unit, width // config.unit)


def bucket_of(grid: Grid, config: QwenVisionConfig) -> int:
    """Units of the smallest bucket that holds a picture with the padding of its windows."""
    side = config.window_units
    window = side**2
    needed = -(-grid.rows // side) * -(-grid.columns // side) * window
    size = _LEAST
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return -(-size // window) * window


def unit_order(grid: Grid, config: QwenVisionConfig) -> Int32[np.ndarray, " n"]:
    """Numbers of the units (row by row of the picture) window by window; -1 is padding."""
    side = config.window_units
    rows, columns = (-(-count // side) * side for count in grid)
    numbers = np.full((rows, columns), -1, np.int32)
    numbers[: grid.rows, : grid.columns] = np.arange(grid.units).reshape(grid)
    windows = numbers.reshape(rows // side, side, columns // side, side)
    return windows.swapaxes(1, 2).reshape(-1)


def lay_out(
    pictures: Sequence[UInt8[np.ndarray, "H W 3"]], config: QwenVisionConfig, bucket: int
) -> PatchBatch:
    """Pictures, of which none has more than `bucket` units (`bucket_of`), as a batch of one."""
    made = [_one(picture, config, bucket) for picture in pictures]
    return PatchBatch(*(np.stack(arrays) for arrays in zip(*made, strict=True)))


def _one(picture: np.ndarray, config: QwenVisionConfig, bucket: int) -> tuple[np.ndarray, ...]:
    grid, merge, patch = grid_of(picture.shape, config), config.merge, config.patch
    units = unit_order(grid, config)
    units = np.pad(units, (0, bucket - len(units)), constant_values=-1)  # [U]
    real = units >= 0

    def by_unit(x: np.ndarray) -> np.ndarray:  # [rows, columns, ...] of patches -> [U, m * m, ...]
        x = x.reshape(grid.rows, merge, grid.columns, merge, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(grid.units, merge**2, *x.shape[4:])[units]

    rows, columns = grid.rows * merge, grid.columns * merge
    patches = picture.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    patches = by_unit(patches.reshape(rows, columns, -1))
    patches[~real] = 0
    places = by_unit(np.stack(np.indices((rows, columns), np.int32), axis=-1))
    places[~real] = -1
    order = np.zeros(bucket, np.int32)
    order[units[real]] = np.flatnonzero(real)
    return (
        patches.reshape(bucket * merge**2, -1),
        places.reshape(-1, 2),
        np.array([rows, columns], np.int32),
        order,
    )
