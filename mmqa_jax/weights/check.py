"""`mmqa convert --check`: a model beside transformers' on the same weights, layer by layer.

Both sides get the same input in float32: 520 tokens, or as many as the model takes, and a picture
of noise where it sees. Where they differ by more than is usual, transformers in float64 says what
of that is rounding: states of some ten thousand, as many a language model has, leave it in logits.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.bart.network import BartStack
from mmqa_jax.models.common.layers import scan_layers
from mmqa_jax.models.encoders.text_encoders import (
    CONFIG,
    FAMILIES,
    is_classifier,
    load_cross_encoder,
    load_text_encoder,
)
from mmqa_jax.models.llama.network import added
from mmqa_jax.models.llava.network import expand_images
from mmqa_jax.models.modernbert.network import ModernBert
from mmqa_jax.models.mpnet.network import MPNet
from mmqa_jax.models.onevision.tiles import TileBatch, TiledPicture, best_resolution
from mmqa_jax.models.onevision.tiles import lay_out as lay_out_tiles
from mmqa_jax.models.qwen_vl.layout import PatchBatch, bucket_of, grid_of, lay_out
from mmqa_jax.models.qwen_vl.network import expand_pictures
from mmqa_jax.models.qwen_vl.vision import QwenVisionConfig
from mmqa_jax.models.siglip.network import PIXEL_MEAN, PIXEL_STD
from mmqa_jax.models.t5.network import T5Stack
from mmqa_jax.weights.convert import convert
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder
from mmqa_jax.weights.registry import NAMES, architecture, model_of

TOKENS = 520  # short texts hide mistakes in rotary positions
# Rows and columns of a picture of any size, in units or patches: no window divides them.
GRID = (5, 7)
ABSOLUTE, RELATIVE = 1e-4, 1e-5
ROUNDINGS = 4
BOUND = (
    f"{ABSOLUTE:g}, or {RELATIVE:g} of the largest value so far where it exceeds 10; beyond it, "
    f"from transformers in float64 {ROUNDINGS} times as much as transformers in float32 deviates"
)


class Compared(NamedTuple):
    """One layer or output of both sides.

    Attributes:
      name: `layer 3`, `text layer 1`, `logits`.
      deviation: the largest difference of a value.
      size: the largest absolute value of transformers'; of a layer up to there, since what it adds
        to carries the rounding of the layers before it.
      rounding: how far transformers in float32 is from itself in float64, if that is what was
        compared with.
    """

    name: str
    deviation: float
    size: float
    rounding: float = 0.0

    @property
    def allowed(self) -> float:
        """The bound: see BOUND."""
        return max(ABSOLUTE, RELATIVE * self.size, ROUNDINGS * self.rounding)

    @property
    def passed(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.deviation <= self.allowed


class Outputs(NamedTuple):
    """What one side computes.

    Attributes:
      stacks: name of a stack of layers ("" if there is one) -> what goes into each of its layers,
        and what the last gives, [layers + 1, ...].
      ends: name -> what the model gives.
    """

    stacks: Mapping[str, Any]
    ends: Mapping[str, Any]

    def named(self) -> dict[str, np.ndarray]:
        """Every layer and output by its name."""
        found = {}
        for stack, states in self.stacks.items():
            for number, state in enumerate(states):
                layer = f"layer {number}" if number else "embeddings"
                found[f"{stack} {layer}".strip()] = np.asarray(state)
        return found | {name: np.asarray(value) for name, value in self.ends.items()}


def deviation(got: Any, want: Any) -> tuple[float, float]:
    """The largest difference, and the largest absolute value of `want`, in float64."""
    got, want = (np.asarray(x, dtype=np.float64) for x in (got, want))
    return np.abs(got - want).max(initial=0).item(), np.abs(want).max(initial=0).item()


def compare(ours: Outputs, theirs: Outputs) -> list[Compared]:
    """Both sides, name by name.

    Raises:
      ValueError: they have not the same layers and outputs.
    """
    got, want = ours.named(), theirs.named()
    shapes, wanted = ({name: x.shape for name, x in side.items()} for side in (got, want))
    if shapes != wanted:
        raise ValueError(f"ours gives {shapes}, transformers {wanted}")
    rows: list[Compared] = []
    for name in want:
        row = Compared(name, *deviation(got[name], want[name]))
        carries = name not in theirs.ends and not name.endswith("embeddings")
        rows.append(row._replace(size=max(row.size, rows[-1].size)) if carries else row)
    return rows


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How one kind of model is compared.

    Attributes:
      inputs: our model's config -> inputs by their names in `run`, numpy arrays or trees of them.
      run: (model, inputs) -> Outputs of ours.
      stacks: of transformers' model: name in Outputs -> path of the module with the layers.
      given: inputs -> transformers' own, numpy arrays by name.
      ends: transformers' output -> Outputs.ends.
      model: transformers' class.
    """

    model: str
    inputs: Callable[[Any], dict[str, Any]]
    run: Callable[[Any, Mapping[str, Any]], Outputs]
    ends: Callable[[Any], Mapping[str, Any]]
    stacks: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"": ""})
    given: Callable[[Mapping[str, Any]], dict[str, np.ndarray]] = dict


def check(model: str | None, source: Path, converted: Path | None = None) -> list[Compared]:
    """Compares a checkpoint as it is read here with transformers' reading of it.

    Args:
      model: of a layout that transformers does not read, the registry's name; else it is found.
      source: a folder of transformers (an encoder of texts or a cross-encoder too), a converted
        folder, or any other checkpoint that `mmqa convert` reads. What transformers does not read
        is first exported for it.
      converted: what `mmqa convert` made of `source`, in place of reading it.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--check: {package} is not installed; run `pip install {package}`.")
    if not source.exists():
        raise UserError(f"--source={source}: no such file or folder; name a checkpoint.")
    name = _name_of(source, model)
    if name not in _KINDS:
        raise UserError(
            f"--check: transformers does not have the model {name}, so there is nothing to compare "
            f"with; tests/equivalence/ compares it. Known are {', '.join(_KINDS)}."
        )
    from mmqa_jax.weights import check  # it imports PyTorch

    kind = _KINDS[name]
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
        published = source
        if not _is_published(source):
            published = Path(folder) / "hf"
            convert(name, source, published, export="hf", dtype="float32")
        ours = _load(name, source, converted)
        inputs = kind.inputs(ours.config)
        graphdef, state = nnx.split(ours)

        def read(dtype: str) -> tuple[Any, Any]:
            given = kind.given(inputs)
            return check.outputs(published, kind.model, given, kind.stacks, kind.ends, dtype=dtype)

        run = jax.jit(lambda state, given: tuple(kind.run(nnx.merge(graphdef, state), given)))
        made, theirs = Outputs(*run(state, inputs)), Outputs(*read("float32"))
        rows = compare(made, theirs)
        if all(row.passed for row in rows):
            return rows
        exact = Outputs(*read("float64"))
        return [
            row._replace(rounding=own.deviation)
            for row, own in zip(compare(made, exact), compare(theirs, exact), strict=True)
        ]


def _name_of(source: Path, model: str | None) -> str:
    """The key in _KINDS of what is at a path."""
    if is_weights_folder(source):
        found = read_record(source).architecture.name
    elif _is_published(source):
        kind = read_json(source / CONFIG).get("model_type")
        known = model_of(source)
        if is_classifier(source):
            found = "reranker"
        elif kind in FAMILIES:
            found = "llama" if known == "llama" else "encoder"
        elif known in _KINDS and known != "llama":  # with a tower that is left out
            found = known
        else:
            raise UserError(
                f"{source / CONFIG}: model_type is {kind!r}, which is not known here; use one of "
                f"{', '.join(sorted(_known_types()))}."
            )
    elif model is None:
        raise UserError(
            f"--source={source}: no layout of transformers; add --model={'|'.join(NAMES)}."
        )
    else:
        found = model
    if model is not None and model not in ({"bert", found} if found == "encoder" else {found}):
        raise UserError(
            f"--model={model}: {source} holds no {model} (it is read as: {found}); leave --model "
            "out."
        )
    return found


def _known_types() -> set[str]:
    architectures = (architecture(name) for name in _KINDS if name in NAMES)
    return set(FAMILIES).union(*(entry.known_types for entry in architectures))


def _is_published(source: Path) -> bool:
    if is_weights_folder(source) or not (source / CONFIG).is_file():
        return False
    content = read_json(source / CONFIG)
    return isinstance(content, dict) and "model_type" in content


def _load(name: str, source: Path, converted: Path | None) -> Any:
    if converted is not None:
        return load_converted(converted, param_dtype="float32")
    if is_weights_folder(source):
        return load_converted(source, param_dtype="float32")
    if name == "reranker":
        return load_cross_encoder(source)
    if name == "encoder":
        return load_text_encoder(source)
    return load_published(name, source)


# The inputs.


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _tokens(vocabulary: int, positions: int, tokens: int = TOKENS) -> np.ndarray:
    """int32 [1, L]; without the first few tokens, which are special ones in most models."""
    first = min(5, vocabulary - 1)
    return _rng().integers(first, vocabulary, (1, min(tokens, positions))).astype(np.int32)


def _texts(config: Any) -> dict[str, np.ndarray]:
    return _texts_of(config.vocab_size, config.positions)


def _texts_of(vocabulary: int, positions: int = TOKENS) -> dict[str, np.ndarray]:
    ids = _tokens(vocabulary, positions)
    return {"ids": ids, "mask": np.ones(ids.shape, bool)}


def _picture(vision: Any) -> np.ndarray:
    shape = (1, vision.image_size, vision.image_size, 3)
    return _rng().standard_normal(shape).astype(np.float32)


def _as_texts(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"input_ids": inputs["ids"], "attention_mask": inputs["mask"].astype(np.int64)}


def _channels_first(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _clip_inputs(config: Any) -> dict[str, np.ndarray]:
    ids = _tokens(config.text.vocab_size - 1, config.text.context)
    end = config.text.eos_token_id
    ids[0, -1] = config.text.vocab_size - 1 if end is None else end
    return {"ids": ids, "pixels": _picture(config.vision)}


def _llava_inputs(config: Any) -> dict[str, np.ndarray]:
    row = _around_a_picture(config, config.features)
    return {"ids": expand_images([row], [1], config).input_ids, "pixels": _picture(config.vision)}


def _around_a_picture(config: Any, patches: int) -> list[int]:
    """Words with one placeholder, whose picture will be so many tokens."""
    llama = config.llama
    length = min(max(TOKENS - patches, 64), llama.positions - patches)
    words = _tokens(llama.vocab_size, llama.positions, length)[0]
    words = np.where(words == config.image_token, 0, words)
    return [*words[:9], config.image_token, *words[9:]]


def _onevision_inputs(config: Any) -> dict[str, np.ndarray]:
    """A picture of a tile's size: the tokens of all tiles, which are no padding."""
    side, sizes = config.vision.image_size, config.tiles
    tiles = 1 + math.prod(sizes.grid(best_resolution((side, side), sizes.resolutions)))
    pixels = _rng().integers(0, 256, (tiles, side, side, 3), np.uint8)
    picture = TiledPicture(pixels, (side, side))
    tokens = config.picture_tokens(picture.shape)
    batch = lay_out_tiles([picture], sizes, tiles)
    row = _around_a_picture(config, tokens)
    return {
        "ids": np.repeat(row, np.where(np.equal(row, config.image_token), tokens, 1))[None],
        "pixels": batch.pixels,
        "rows": batch.rows[:, :tokens],
        "weights": batch.weights[:, :tokens],
        "size": np.array([picture.size]),
    }


def _tiles_as_theirs(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    mean, std = np.float32(PIXEL_MEAN), np.float32(PIXEL_STD)
    pixels = (inputs["pixels"][0].astype(np.float32) / 255 - mean) / std
    return {
        "input_ids": inputs["ids"],
        "pixel_values": _channels_first(pixels)[None],
        "image_sizes": inputs["size"],
    }


def _siglip_inputs(config: Any) -> dict[str, Any]:
    ids = _tokens(config.text.vocab_size, config.text.length)
    if not config.vision.flexible:
        return {"ids": ids, "pixels": _picture(config.vision)}
    shapes = np.array([GRID], np.int32)
    size = (1, shapes.prod(), config.vision.patch_size**2 * 3)
    return {"ids": ids, "pixels": (_rng().standard_normal(size).astype(np.float32), shapes)}


def _as_siglip(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    ids, pixels = inputs["ids"], inputs["pixels"]
    if not isinstance(pixels, tuple):
        return {"input_ids": ids, "pixel_values": _channels_first(pixels)}
    patches, shapes = pixels
    return {
        "input_ids": ids,
        "pixel_values": patches,
        "spatial_shapes": shapes,
        "pixel_attention_mask": np.ones(patches.shape[:2], np.int64),
    }


def _qwen_vl_inputs(config: Any) -> dict[str, Any]:
    vision, llama = config.vision, config.llama
    picture = _rng().integers(0, 256, (*(n * vision.unit for n in GRID), 3)).astype(np.uint8)
    grid = grid_of(picture.shape, vision)
    pictures = lay_out([picture], vision, bucket_of(grid, vision))
    length = min(max(TOKENS - grid.units, 64), llama.positions - grid.units)
    words = _tokens(llama.vocab_size, llama.positions, length)[0]
    special = (config.image_token, config.video_token)
    special += (config.vision_start_token, config.vision_end_token)
    words = np.where(np.isin(words, special), 0, words)
    row = [*words[:9], config.image_token, *words[9:]]
    made = expand_pictures([row], [[picture.shape]], config)
    return {
        "ids": made.input_ids,
        "rows": made.rows,
        "positions": made.positions,
        "pictures": pictures,
        "real": np.flatnonzero(pictures.places[0, :, 0] >= 0),
        "is picture": (made.input_ids == config.image_token).astype(np.int32),
        "patches": _patches_of_transformers(pictures, grid.units, vision),
        "grid": np.array([[1, *pictures.grid[0]]]),
    }


def _patches_of_transformers(
    pictures: PatchBatch, units: int, vision: QwenVisionConfig
) -> np.ndarray:
    """Normalized, unit by unit in the picture's order: [N, 3 * frames * patch * patch]."""
    side = vision.patch
    patches = pictures.patches[0].reshape(-1, vision.merge**2, side, side, 3)
    patches = patches[pictures.order[0, :units]].reshape(-1, side, side, 3)
    patches = (patches / 255.0 - vision.pixel_mean) / vision.pixel_std
    frames = np.repeat(patches.transpose(0, 3, 1, 2)[:, :, None], vision.temporal, axis=2)
    return frames.reshape(len(frames), -1).astype(np.float32)


def _as_qwen_vl(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        "input_ids": inputs["ids"],
        "attention_mask": np.ones(inputs["ids"].shape, np.int64),
        "mm_token_type_ids": inputs["is picture"],
        "pixel_values": inputs["patches"],
        "image_grid_thw": inputs["grid"],
    }


# Our side.


def _decoded(model: Any, inputs: Mapping[str, jax.Array]) -> Outputs:
    embedded = model.embed(inputs["ids"])
    layers = model.layer_outputs(embedded)
    logits = model.logits(model.norm(layers[-1]))
    return Outputs({"": jnp.concatenate([embedded[None], layers])}, {"logits": logits})


def _states(model: Any, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An encoder's embeddings and layers [N + 1, B, L, H], and its output."""
    if isinstance(model, ModernBert):
        embedded = model.embed(ids)
        layers = model.layer_outputs(embedded, mask)
        return jnp.concatenate([embedded[None], layers]), model.norm(layers[-1])
    if isinstance(model, MPNet):
        embedded = model.embeddings(ids)
        layers = model.layer_outputs(embedded, mask)
    else:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        embedded = model.embeddings(ids, positions, jnp.zeros_like(ids))
        layers = model.layer_outputs(embedded, mask[:, None, None, :])
    return jnp.concatenate([embedded[None], layers]), layers[-1]


def _encoded(model: Any, inputs: Mapping[str, jax.Array]) -> Outputs:
    states, output = _states(model, inputs["ids"], inputs["mask"])
    return Outputs({"": states}, {"output": output})


def _ranked(model: Any, inputs: Mapping[str, jax.Array]) -> Outputs:
    ids, mask = inputs["ids"], inputs["mask"]
    states, _ = _states(model.bert, ids, mask)
    return Outputs({"": states}, {"logit": model(ids, mask, jnp.zeros_like(ids))})


def _seen(model: Any, inputs: Mapping[str, Any]) -> Outputs:
    ids, pixels = inputs["ids"], inputs["pixels"]
    stacks = {
        "text": model.text.hidden_states(ids),
        "picture": model.vision.hidden_states(pixels),
    }
    ends = {"text vector": model.encode_text(ids), "picture vector": model.encode_image(pixels)}
    return Outputs(stacks, ends)


def _described(model: Any, inputs: Mapping[str, jax.Array]) -> Outputs:
    embedded = model.embed(inputs["ids"], model.encode_images(inputs["pixels"]))
    layers = model.llama.layer_outputs(embedded)
    stacks = {
        "picture": model.vision.hidden_states(inputs["pixels"]),
        "": jnp.concatenate([embedded[None], layers]),
    }
    return Outputs(stacks, {"logits": model.llama.logits(model.llama.norm(layers[-1]))})


def _described_in_tiles(model: Any, inputs: Mapping[str, jax.Array]) -> Outputs:
    batch = TileBatch(inputs["pixels"], inputs["rows"], inputs["weights"])
    embedded = model.embed(inputs["ids"], model.encode_images(batch))
    layers = model.llama.layer_outputs(embedded)
    stacks = {
        "picture": model.vision.hidden_states(model.vision.normalize(batch.pixels[0])),
        "": jnp.concatenate([embedded[None], layers]),
    }
    return Outputs(stacks, {"logits": model.llama.logits(model.llama.norm(layers[-1]))})


def _translated(model: Any, inputs: Mapping[str, jax.Array]) -> Outputs:
    ids, columns = inputs["ids"], inputs["mask"][:, None, None, :]

    def run(stack: BartStack, *given: Any) -> jax.Array:
        def body(layer: Any, x: jax.Array, _: Any, key: Any):
            x = layer(x, *given)
            return x, x

        embedded = stack.embed(model.embed(ids))
        return jnp.concatenate([embedded[None], scan_layers(stack.layers, embedded, body)[1]])

    encoder = run(model.encoder, columns)
    decoder = run(model.decoder, None, encoder[-1], columns)
    return Outputs({"encoder": encoder, "decoder": decoder}, {"logits": model.logits(decoder[-1])})


def _transferred(model: Any, inputs: Mapping[str, Any]) -> Outputs:
    """T5: the same tokens as source and as what the decoder has so far."""
    ids, mask = inputs["ids"], inputs["mask"]

    def run(stack: T5Stack, *source: Any) -> jax.Array:
        bias, seen = stack.bias(ids.shape[1]), stack.seen(mask, ids.shape[1])

        def body(layer: Any, x: jax.Array, _: Any, key: Any):
            x = layer(x, bias, seen, *source)
            return x, x

        embedded = model.embed(ids)
        return jnp.concatenate([embedded[None], scan_layers(stack.layers, embedded, body)[1]])

    encoder = run(model.encoder)
    source = model.encoder.norm(encoder[-1])
    decoder = run(model.decoder, source, mask[:, None, None, :])
    logits = model.logits(model.decoder.norm(decoder[-1]))
    stacks = {"encoder": encoder, "decoder": decoder}
    return Outputs(stacks, {"encoder output": source, "logits": logits})


def _looked_at(model: Any, inputs: Mapping[str, Any]) -> Outputs:
    """Qwen-VL: the patches that are no padding, window by window as in transformers."""
    pictures, llama = inputs["pictures"], model.llama
    embedded, deepstack = model.embed(inputs["ids"], model.encode_images(pictures), inputs["rows"])
    # transformers adds to a layer's output after it, which is seen as the next layer's input.
    last = llama.config.layers - 1
    seen = deepstack[:last] if deepstack is not None and last else None
    layers = llama.layer_outputs(embedded, positions=inputs["positions"], deepstack=seen)
    hidden = added(layers[-1], deepstack, last)
    patches = model.vision.embed(pictures)[None]
    patches = jnp.concatenate([patches, model.vision.layer_outputs(pictures)])
    stacks = {
        "picture": patches[:, 0, inputs["real"]],
        "": jnp.concatenate([embedded[None], layers]),
    }
    return Outputs(stacks, {"logits": llama.logits(llama.norm(hidden))})


_TEXTS = {"inputs": _texts, "given": _as_texts}
_KINDS: Mapping[str, _Kind] = {
    "llama": _Kind(
        "AutoModelForCausalLM", run=_decoded, ends=lambda out: {"logits": out.logits}, **_TEXTS
    ),
    "bert": _Kind(
        "AutoModel", run=_encoded, ends=lambda out: {"output": out.last_hidden_state}, **_TEXTS
    ),
    "encoder": _Kind(
        "AutoModel", run=_encoded, ends=lambda out: {"output": out.last_hidden_state}, **_TEXTS
    ),
    "reranker": _Kind(
        "AutoModelForSequenceClassification",
        run=_ranked,
        ends=lambda out: {"logit": out.logits[:, 0]},
        **_TEXTS,
    ),
    "clip": _Kind(
        "CLIPModel",
        _clip_inputs,
        _seen,
        lambda out: {"text vector": out.text_embeds, "picture vector": out.image_embeds},
        {"text": "text_model", "picture": "vision_model"},
        lambda x: {"input_ids": x["ids"], "pixel_values": _channels_first(x["pixels"])},
    ),
    "llava": _Kind(
        "LlavaForConditionalGeneration",
        _llava_inputs,
        _described,
        lambda out: {"logits": out.logits},
        {"picture": "model.vision_tower", "": "model.language_model"},
        lambda x: {"input_ids": x["ids"], "pixel_values": _channels_first(x["pixels"])},
    ),
    "onevision": _Kind(
        "LlavaOnevisionForConditionalGeneration",
        _onevision_inputs,
        _described_in_tiles,
        lambda out: {"logits": out.logits},
        {"picture": "model.vision_tower", "": "model.language_model"},
        _tiles_as_theirs,
    ),
    "bart": _Kind(
        "BartForConditionalGeneration",
        _texts,
        _translated,
        lambda out: {"logits": out.logits},
        {"encoder": "model.encoder", "decoder": "model.decoder"},
        lambda x: {**_as_texts(x), "decoder_input_ids": x["ids"]},
    ),
    "siglip": _Kind(
        "AutoModel",
        _siglip_inputs,
        _seen,
        lambda out: {"text vector": out.text_embeds, "picture vector": out.image_embeds},
        {"text": "text_model", "picture": "vision_model"},
        _as_siglip,
    ),
    "t5": _Kind(
        "AutoModelForSeq2SeqLM",
        lambda config: _texts_of(config.vocab_size),
        _transferred,
        lambda out: {"encoder output": out.encoder_last_hidden_state, "logits": out.logits},
        {"encoder": "encoder", "decoder": "decoder"},
        lambda x: {**_as_texts(x), "decoder_input_ids": x["ids"]},
    ),
    "qwen_vl": _Kind(
        "AutoModelForImageTextToText",
        _qwen_vl_inputs,
        _looked_at,
        lambda out: {"logits": out.logits},
        {"picture": "model.visual", "": "model.language_model"},
        _as_qwen_vl,
    ),
}


# transformers' side of check.py: the layers and outputs of its model of a folder.


_STACKS = ("layer", "layers", "block", "blocks")  # names of a stack of layers


def outputs(
    folder: Path,
    kind: str,
    given: Mapping[str, np.ndarray],
    stacks: Mapping[str, str],
    ends: Callable[[Any], Mapping[str, Any]],
    *,
    dtype: str = "float32",
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loads a folder's model, runs it and forgets it.

    Args:
      kind: transformers' class.
      given: its inputs.
      stacks: name -> path of the module that holds a stack of layers; "" is the whole model.
      ends: its output -> what is compared of it.
      dtype: of parameters and arithmetic; norms and rotary angles are float32 in any case.

    Returns:
      Of each stack what goes into each layer (Qwen3-VL adds to what the one before gave), and what
      the last gives, [layers + 1, ...]; and `ends` of the output.
    """
    kind_of_model = getattr(transformers, kind)
    model = kind_of_model.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
    ).eval()
    found: dict[str, list[np.ndarray]] = {name: [] for name in stacks}
    for name, path in stacks.items():
        layers = _layers(model.get_submodule(path))
        for layer in layers:
            layer.register_forward_pre_hook(_entering(found[name]), with_kwargs=True)
        layers[-1].register_forward_hook(_leaving(found[name]))
    inputs = {
        name: torch.from_numpy(value.astype(np.int64 if value.dtype.kind == "i" else dtype))
        for name, value in given.items()
    }
    with torch.no_grad():
        ended = {name: value.numpy() for name, value in ends(model(**inputs)).items()}
    return {name: np.stack(states) for name, states in found.items()}, ended


def _layers(module: Any) -> Any:
    """The first stack of layers in a module."""
    for name, child in module.named_modules():
        if name.rpartition(".")[2] in _STACKS and isinstance(child, torch.nn.ModuleList):
            return child
    raise ValueError(f"{type(module).__name__} has no stack of layers")


def _entering(states: list[np.ndarray]) -> Callable[..., None]:
    def hook(module: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        entered = positional[0] if positional else named["hidden_states"]
        states.append(entered.numpy().copy())

    return hook


def _leaving(states: list[np.ndarray]) -> Callable[..., None]:
    def hook(module: Any, positional: tuple[Any, ...], left: Any) -> None:
        states.append((left[0] if isinstance(left, tuple) else left).numpy().copy())

    return hook
