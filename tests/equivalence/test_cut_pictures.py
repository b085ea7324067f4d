"""LFM2-VL and Llama 4 with pictures against transformers: token ids, logits, answers, checkpoints.

transformers' processors of both need torchvision, which the tests do without: what they are fed
here are our pixels in their layout, behind their own rules for texts. With torchvision installed,
`test_pieces_are_the_processors` compares sizes and pixels with the processors themselves.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import LAYER, WHOLE, abstract, compiled, randomize, reloaded, same_parameters
from flax import nnx
from PIL import Image
from test_llava_families import EOS, IMAGE, PARTS, TEXT, letters

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.pictures.resize import cut_tiles
from mmqa_jax.decoding.sizes import tower_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.check import check
from mmqa_jax.models.llava.config import PRESETS, LlavaConfig
from mmqa_jax.models.llava.keys import llava_config, llava_key_map, publish_llava
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.llava.processor import with_split
from mmqa_jax.models.llava.tiles import CanvasTiles, UnitSizes, UnitTiles
from mmqa_jax.models.qwen_vl.network import bucket_of, grid_of, lay_out
from mmqa_jax.prompting.backends import Chat, Decoding, Message, Picture
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.picture_format import picture_format, shown_pictures
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.config_json import config_from_json, config_to_json
from mmqa_jax.weights.keymap import untied_source
from mmqa_jax.weights.published import load_published, write_published
from tests.pictures import encoded, smooth
from tests.refusals import refuses

pytestmark = pytest.mark.slow

NEW = 6
PLACES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = [
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|image|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", *PLACES),
]
SIZES = TEXT | {"vocab_size": 120, "max_position_embeddings": 700}
UNITS = {
    "patch_size": 4, "num_patches": 49, "vision_use_head": False, "layer_norm_eps": 3e-5,
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 5,
}  # fmt: skip
PIECES = {
    "encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 24, "max_tiles": 4,
    "min_image_tokens": 4, "max_image_tokens": 12, "max_pixels_tolerance": 1.5,
}  # fmt: skip


def lfm2_vl(**both: Any) -> Any:
    text = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4, "norm_eps": 3e-4}
    sizes = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"}
    return transformers.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **sizes, "num_hidden_layers": 3, **text},
        vision_config={"model_type": "siglip2_vision_model", **UNITS},
        image_token_id=IMAGE,
        attn_implementation="eager",
        **both,
    )


def llama4() -> Any:
    sizes = {
        "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 3, "patch_size": 4,
        "num_attention_heads": 4, "image_size": 24, "projector_input_dim": 56,
        "projector_output_dim": 56, "vision_output_dim": 56,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    }  # fmt: skip
    text = {
        "num_hidden_layers": 4, "head_dim": 12, "num_local_experts": 4, "intermediate_size_mlp": 72,
        "attention_chunk_size": 900, "interleave_moe_layer_step": 2, "rope_theta": 3000.0,
    }  # fmt: skip
    return transformers.Llama4Config(
        text_config=SIZES | text,
        vision_config=sizes,
        image_token_index=IMAGE,
        boi_token_index=93,
        eoi_token_index=94,
        attn_implementation="eager",
    )


CASES = {
    "lfm2_vl": (
        lambda: lfm2_vl(projector_hidden_size=52, projector_hidden_act="gelu_new"),
        {"image_processor_type": "Lfm2VlImageProcessor", **PIECES},
    ),
    "lfm2_vl, without a norm and thumbnails": (
        lambda: lfm2_vl(projector_use_layernorm=False, projector_bias=False),
        {"image_processor_type": "Lfm2VlImageProcessor", **PIECES, "use_thumbnail": False},
    ),
    "llama4": (
        llama4,
        {
            "image_processor_type": "Llama4ImageProcessor",
            "max_patches": 5,
            "size": {"height": 24, "width": 24},
        },
    ),
}
# Width and height: of several tiles, wide, small, thin.
PICTURES = [(50, 47), (61, 20), (9, 9), (90, 7)]


class Pair(NamedTuple):
    """A torch model, ours of its checkpoint, and the folder."""

    theirs: torch.nn.Module
    ours: Llava
    folder: Path


@functools.cache
def make_pair(name: str, folder: Path) -> Pair:
    make, processor = CASES[name]
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText
    theirs = randomize(kind.from_config(make()), 0, 0.05)
    theirs.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer = letters(bos=True)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    place = "<|image|>" if name == "llama4" else "<image>"
    (folder / "chat_template.jinja").write_text(PARTS.replace("<image>", place))
    return Pair(theirs, load_published("llava", folder, unroll=1), folder)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    number = list(CASES).index(request.param)
    return make_pair(request.param, tmp_path_factory.getbasetemp() / f"cut_{number}")


def pictures() -> list[Image.Image]:
    return [smooth(size, number) for number, size in enumerate(PICTURES)]


def text_of(pair: Pair, image: Image.Image) -> str:
    """What transformers' processor writes for a picture."""
    config = pair.ours.config
    cut = config.cut(*image.size)
    if isinstance(config.split, CanvasTiles):
        processor = transformers.Llama4Processor
        text = processor._prompt_split_image(None, (cut.rows, cut.columns), config.features)
        return text.replace("<|patch|>", "<image>")
    names = ("image", "image_start", "image_end", "image_thumbnail")
    tokens = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    named = {f"{name}_token": token for name, token in zip(names, tokens, strict=True)}
    of_piece = [config.picture_tokens((high, wide, 3)) for wide, high in cut.sizes]
    return transformers.Lfm2VlProcessor._build_image_tokens(
        SimpleNamespace(**named),
        *(cut.rows, cut.columns, of_piece[0], of_piece[-1]),
        *(config.split.has_whole, True),
    )


def inputs_of(pair: Pair, text: str, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """transformers' inputs of a prompt."""
    place = "<|image|>" if isinstance(pair.ours.config.split, CanvasTiles) else "<image>"
    words = text.split(place)
    whole = words[0] + "".join(
        text_of(pair, image) + piece for image, piece in zip(images, words[1:], strict=True)
    )
    ids = torch.tensor([open_text_tokenizer(pair.folder).encode(whole)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not images:
        return inputs
    pieces = tokens_of(pair, text, images)[1]
    vision = pair.ours.config.vision
    if isinstance(pair.ours.config.split, CanvasTiles):
        pixels = np.array(vision_of(pair).normalize(np.stack(pieces))).transpose(0, 3, 1, 2)
        return inputs | {"pixel_values": torch.from_numpy(pixels.copy())}
    patch, longest = vision.patch_size, max(piece.size for piece in pieces) // (3 * 16)
    grids = [[side // patch for side in piece.shape[:2]] for piece in pieces]
    pixels = np.zeros((len(pieces), longest, patch * patch * 3), np.float32)
    for piece, (rows, columns), row in zip(pieces, grids, pixels, strict=True):
        cut = piece.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
        row[: rows * columns] = cut.reshape(rows * columns, -1) / 127.5 - 1
    counts = np.prod(grids, axis=1)
    return inputs | {
        "pixel_values": torch.from_numpy(pixels),
        "spatial_shapes": torch.tensor(grids),
        "pixel_attention_mask": torch.from_numpy(np.arange(longest) < counts[:, None]).int(),
    }


def vision_of(pair: Pair) -> nnx.Module:
    return pair.ours.vision


def tokens_of(pair: Pair, text: str, images: list[Image.Image]) -> tuple[np.ndarray, list]:
    """Our ids with a placeholder for each token of a piece, and the pieces."""
    config = pair.ours.config
    form = picture_format(config, open_text_tokenizer(pair.folder))
    files = shown_pictures([Picture(encoded(image), "one") for image in images])
    pieces = [piece for file in files for piece in form.read_all(file)]
    counts = [config.picture_tokens(piece.shape) for piece in pieces]
    assert sum(map(form.tokens, files)) == sum(counts)
    assert sum(map(form.places, files)) == len(pieces)
    ids, waiting = form.encode(text, files), iter(counts)
    wide = [t for token in ids for t in [token] * (next(waiting) if token == IMAGE else 1)]
    return np.array([wide]), pieces


def prompt_of(pair: Pair, *texts: str) -> str:
    place = "<|image|>" if isinstance(pair.ours.config.split, CanvasTiles) else "<image>"
    return place.join(texts)


@pytest.mark.parametrize("used", [[0], [1, 2], [3, 1]])
def test_tokens_are_the_processors(pair, used):
    images = [pictures()[n] for n in used]
    text = prompt_of(pair, *["ab", "cd", "ef"][: len(used) + 1])
    ids, _ = tokens_of(pair, text, images)
    np.testing.assert_array_equal(inputs_of(pair, text, images)["input_ids"].numpy(), ids)


def features_of(model: Llava, batch: Any) -> jax.Array:
    return model.encode_images(model.vision.normalize(batch))


def logits(
    model: Llava,
    ids: jax.Array,
    features: jax.Array,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    embedded = model.embed(ids, features)
    return model.llama.logits(model.llama.encode(embedded, None, positions, segments=segments))


def laid_out(config: LlavaConfig, pieces: list[np.ndarray]) -> Any:
    """What the tower takes of pieces."""
    if not config.is_sized:
        return np.stack(pieces)
    buckets = [bucket_of(grid_of(piece.shape, config.units), config.units) for piece in pieces]
    return lay_out(pieces, config.units, max(buckets))


def without_padding(config: LlavaConfig, features: Any, pieces: list[np.ndarray]) -> jax.Array:
    """[pieces, features, H] of the tower -> [1, all their tokens, H]."""
    counts = [config.picture_tokens(piece.shape) for piece in pieces]
    real = [rows[:count] for rows, count in zip(features, counts, strict=True)]
    return jnp.concatenate(real)[None]


def test_logits_equal(pair):
    """Two pictures amid more than 500 tokens, one of several pieces."""
    words = "".join(np.random.default_rng(1).choice(list("abcdefg hi"), 500))
    text, images = prompt_of(pair, words[:17], words[17:200], words[200:]), pictures()[:2]
    ids, pieces = tokens_of(pair, text, images)
    assert ids.size > 500
    assert len(pieces) > 2
    with torch.no_grad():
        want = pair.theirs(**inputs_of(pair, text, images)).logits.numpy()
    config = pair.ours.config
    features = compiled(pair.ours, features_of)(laid_out(config, pieces))
    got = compiled(pair.ours, logits)(ids, without_padding(config, features, pieces))
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1


def test_packed_rows_are_texts_alone(pair):
    """Two texts in a row, with a picture of their own each, do not see each other."""
    words = "".join(np.random.default_rng(2).choice(list("abcdefg hi"), 450))
    texts = [prompt_of(pair, words[:90], words[90:200]), prompt_of(pair, words[200:230], words)]
    images, config = pictures()[:2], pair.ours.config
    made = [tokens_of(pair, text, [image]) for text, image in zip(texts, images, strict=True)]
    lengths, pieces = [ids.size for ids, _ in made], [piece for _, both in made for piece in both]
    assert sum(lengths) > 500
    features = compiled(pair.ours, features_of)(laid_out(config, pieces))
    got = compiled(pair.ours, logits)(
        np.concatenate([ids for ids, _ in made], axis=1),
        without_padding(config, features, pieces),
        np.repeat(np.arange(2, dtype=np.int32), lengths)[None],
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])[None],
    )
    for text, image, at in zip(
        texts, images, (slice(lengths[0]), slice(lengths[0], None)), strict=True
    ):
        with torch.no_grad():
            want = pair.theirs(**inputs_of(pair, text, [image])).logits.numpy()
        np.testing.assert_allclose(got[:, at], want, **WHOLE)


def test_three_training_steps_are_torchs(pair, tmp_path):
    """Plain gradient descent of the tower, the connector and the decoder."""
    theirs = type(pair.theirs).from_pretrained(pair.folder, attn_implementation="eager").train()
    words = "".join(np.random.default_rng(3).choice(list("abcdefg hi"), 60))
    text, images = prompt_of(pair, words[:17], words[17:31], words[31:]), pictures()[:2]
    ids, pieces = tokens_of(pair, text, images)
    config, inputs = pair.ours.config, inputs_of(pair, text, images)
    batch, is_word = laid_out(config, pieces), ids[0, 1:] != IMAGE
    targets, rate = np.where(is_word, ids[0, 1:], 0), 0.1
    graphdef, state = nnx.split(pair.ours)

    @jax.jit
    def step(state: nnx.State) -> tuple[jax.Array, nnx.State]:
        def loss(state: nnx.State) -> jax.Array:
            model = nnx.merge(graphdef, state)
            features = without_padding(config, features_of(model, batch), pieces)
            logs = jax.nn.log_softmax(logits(model, ids, features)[0, :-1])
            picked = jnp.take_along_axis(logs, targets[:, None], axis=1)[:, 0]
            return -picked.mean(where=is_word)

        value, gradient = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda x, dx: x - rate * dx, state, gradient)

    labels = torch.from_numpy(np.where(is_word, ids[0, 1:], -100)).long()
    for _ in range(3):
        got, state = step(state)
        want = torch.nn.functional.cross_entropy(theirs(**inputs).logits[0, :-1], labels)
        theirs.zero_grad()
        want.backward()
        np.testing.assert_allclose(got, want.item(), **LAYER)
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    write_published(tmp_path / "out", publish_llava(config, state))
    again = reloaded(type(theirs), tmp_path / "out")
    trained = dict(theirs.named_parameters())
    for name, parameter in again.named_parameters():
        np.testing.assert_allclose(
            parameter.detach(), trained[name].detach(), **WHOLE, err_msg=name
        )
    moved = theirs.get_input_embeddings().weight - pair.theirs.get_input_embeddings().weight
    assert moved.abs().max() > 1e-3


def test_answers_equal_generate(pair):
    """Pictures of several sizes in conversations."""
    images = pictures()
    asked = {"two": [1, 2], "one": [0], "none": []}
    sizes = EngineConfig(slots=2, length=260, buckets=(32,), prefill_tokens=64)
    backend = open_backend(pair.folder, engine=sizes)
    chats = []
    for name, used in asked.items():
        files = [Picture(encoded(images[n]), "one") for n in used]
        chats.append(Chat(name, (Message("user", [*files, "Why?"]),), Decoding(NEW)))
        backend.check(chats[-1])
    answers = {result.id: result for result in backend.answer(chats)}
    for name, used in asked.items():
        text = prompt_of(pair, "[user] ", *["\n"] * len(used))
        inputs = inputs_of(pair, f"{text}Why?[a] ", [images[n] for n in used])
        with torch.no_grad():
            want = pair.theirs.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=EOS
            )
        count = inputs["input_ids"].shape[1]
        assert answers[name].prompt_tokens == count, name
        assert list(answers[name].candidates[0].tokens) == want[0, count:].tolist(), name


def test_checkpoints_go_both_ways(pair, tmp_path):
    """Ours, exported, is transformers' and ours again; and its record is read back."""
    theirs, ours, _ = pair
    write_published(tmp_path / "out", publish_llava(ours.config, nnx.state(ours)))
    again = reloaded(transformers.AutoModelForImageTextToText, tmp_path / "out")
    for (name, want), got in zip(theirs.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(got, want), name
    back = load_published("llava", tmp_path / "out", unroll=1)
    assert back.config == ours.config
    same_parameters(back, ours)
    record = json.loads(json.dumps(config_to_json(ours.config)))
    assert config_from_json(type(ours.config), record, "model.json") == ours.config


def test_the_check_compares_all_layers(pair):
    """`mmqa convert --check`."""
    rows = check(None, pair.folder)
    assert all(row.passed for row in rows), rows
    assert {"picture layer 3", "layer 2", "logits"} <= {row.name for row in rows}


def test_what_a_plan_compiles(pair):
    """The tower's programs as shapes: those that the engine runs."""
    config, mesh = pair.ours.config, make_mesh({"data": 1}, devices=jax.devices()[:1])
    programs = tower_programs(config, EngineConfig(slots=3, length=256, buckets=(32,)), mesh)
    with jax.set_mesh(mesh):
        for program in programs.values():
            program.function.lower(*program.arguments)


@pytest.mark.parametrize("name", ["lfm2_vl", "llama4"])
def test_pieces_are_the_processors(name):
    """Sizes and pixels beside the processors themselves, for pictures of the published models.

    torchvision rounds its weights to fewer bits than Pillow: a pixel may differ by one level.
    """
    pytest.importorskip("torchvision")
    kind = {"lfm2_vl": "Lfm2VlImageProcessor", "llama4": "Llama4ImageProcessor"}[name]
    processor = getattr(transformers, kind)()
    split = UnitTiles() if name == "lfm2_vl" else CanvasTiles()
    units = UnitSizes(16, 2) if name == "lfm2_vl" else UnitSizes(14, 2, side=336)
    random = np.random.default_rng(0)
    sides = [(640, 480), (100, 90), (1700, 2200), (3000, 400), (33, 700), (1024, 1024), (517, 211)]
    for wide, high in sides:
        image = Image.fromarray(random.integers(0, 256, (high, wide, 3), np.uint8))
        pieces = cut_tiles(
            image, split.cut(wide, high, units), split.resample, whole_of_canvas=False
        )
        made = processor([image], return_tensors="pt")
        if name == "lfm2_vl":
            grids = made["spatial_shapes"].tolist()
            assert grids == [[side // 16 for side in piece.shape[:2]] for piece in pieces]
            patches = zip(made["pixel_values"].numpy(), grids, strict=True)
            theirs = [
                rows[: high * wide]
                .reshape(high, wide, 16, 16, 3)
                .swapaxes(1, 2)
                .reshape(high * 16, wide * 16, 3)
                for rows, (high, wide) in patches
            ]
        else:
            pixels = made["pixel_values"].float().numpy()
            theirs = list(pixels.reshape(-1, 3, 336, 336).transpose(0, 2, 3, 1))
        for ours, want in zip(pieces, theirs, strict=True):
            levels = (want + 1) * 127.5
            tolerance = 1.01 if name == "lfm2_vl" else 2.01  # whose numbers are bfloat16's
            np.testing.assert_allclose(ours, levels, rtol=0, atol=tolerance)


SCOUT = {
    "model_type": "llama4", "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0,
        "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [],
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "use_qk_norm": True, "vocab_size": 202048,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "vision_config": {
        "attention_dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1408, "image_size": 336,
        "intermediate_size": 5632, "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False, "norm_eps": 1e-05, "num_attention_heads": 16,
        "num_channels": 3, "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5,
        "projector_dropout": 0.0, "projector_input_dim": 4096, "projector_output_dim": 4096,
        "rope_theta": 10000, "vision_feature_select_strategy": "default",
        "vision_output_dim": 4096,
    },
}  # fmt: skip


def test_a_preset_has_the_published_sizes():
    """Every parameter's shape is that of transformers' model of the published config.json."""
    config = PRESETS["llama4_scout_vl"]()
    assert llava_config(SCOUT) == config
    values = {key: value for key, value in SCOUT.items() if key != "model_type"}
    with torch.device("meta"):
        theirs = transformers.Llama4ForConditionalGeneration(transformers.Llama4Config(**values))
    specs = untied_source(nnx.state(abstract(Llava, config)), llava_key_map(config)).specs()
    of_tower = sorted(spec.shape for key, spec in specs.items() if "language_model" not in key)
    want = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert of_tower == sorted(shape for name, shape in want.items() if "language_model" not in name)


LFM2 = {"model_type": "lfm2_vl", "text_config": {}, "vision_config": {}}
REFUSED = [
    (SCOUT, {"vision_config": {"pixel_shuffle_ratio": 0.25}}, r"pixel_shuffle_ratio is 0\.25"),
    (SCOUT, {"vision_config": {"vision_output_dim": 7}}, r"\[4096, 4096, 7\], expected one number"),
    (SCOUT, {"vision_config": {"hidden_act": "silu"}}, "hidden_act is 'silu'"),
    (SCOUT, {"vision_config": {"num_attention_heads": 704}}, "heads is 704"),
    (SCOUT, {"vision_config": {"sights": 1}}, "key 'sights'"),
    (SCOUT, {"sights": 1}, "key 'sights'"),
    (LFM2, {"downsample_factor": 0}, "downsample_factor is 0"),
    (LFM2, {"image_token_index": 7}, "image_token_index is 7"),
    (LFM2, {"vision_config": {"num_patches": 250}}, "num_patches is 250"),
    (LFM2, {"vision_config": {"model_type": "siglip_vision_model"}}, "expected 'siglip2_vision_mo"),
    (LFM2, {"text_config": {"model_type": "mamba"}}, "model_type is 'mamba'"),
]


@pytest.mark.parametrize(("whole", "changes", "match"), REFUSED)
def test_a_bad_config_is_refused_by_name(whole, changes, match):
    published = dict(whole)
    for key, value in changes.items():
        published[key] = published[key] | value if isinstance(value, dict) else value
    refuses(match, llava_config, published)


FILES = [
    (LFM2, {"encoder_patch_size": 14}, "encoder_patch_size is 14"),
    (LFM2, {"min_tiles": 9, "max_tiles": 4}, "least and most are 9 and 4"),
    (LFM2, {"min_image_tokens": 300}, "least_tokens, most_tokens and side are 300, 256 and 512"),
    (LFM2, {"resample": 3}, "resample is 3"),
    (LFM2, {"use_image_special_tokens": False}, "use_image_special_tokens is False"),
    (SCOUT, {"resize_to_max_canvas": True}, "resize_to_max_canvas is True"),
    (SCOUT, {"max_patches": 99}, "tiles is 99: expected 1 to 64"),
    (SCOUT, {"size": {"height": 336, "width": 224}}, "expected height and width of 336"),
]


@pytest.mark.parametrize(("whole", "file", "match"), FILES)
def test_a_bad_processor_is_refused_by_name(tmp_path, whole, file, match):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    refuses(match, with_split, tmp_path, llava_config(whole))
