"""LLaVA-OneVision against transformers: pixels, tokens of pictures, logits, answers, checkpoints."""

import json
import re

import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, abstract, compiled, forward, randomize
from flax import nnx
from PIL import Image
from test_llava_families import PARTS, TEXT, VISION, letters
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from vlm_checks import Pair, answers_as_generate, export_is_read_by_both, lower_tower

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.requests import Request, TooLong
from mmqa_jax.decoding.sizes import feature_bytes, tower_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.onevision import network
from mmqa_jax.models.onevision import network as onevision
from mmqa_jax.models.onevision.keys import (
    onevision_config,
    onevision_key_map,
    open_onevision,
    publish_onevision,
)
from mmqa_jax.prompting.backends import Completion, Decoding, Picture
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.picture_format import Shown, picture_format
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.keymap import untied_source
from mmqa_jax.weights.published import load_published
from tests.pictures import encoded, smooth
from tests.refusals import refuses

pytestmark = pytest.mark.slow

IMAGE, VIDEO, END = 92, 93, 91
SIDE = 27  # pixels of a tile, of 4 x 4 patches; three pixels belong to none
# 3 x 3 tiles, 1 x 4 and what lies between; of 2 tiles a picture's states may be.
GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (3, 2), (3, 3)]
RESOLUTIONS = [[SIDE * rows, SIDE * columns] for rows, columns in GRIDS]
# Width and height: of one tile, wide, tall, of nine tiles, thin.
SIZES = [(20, 20), (60, 21), (31, 50), (95, 83), (200, 7), (29, 71)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("onevision")
    torch.manual_seed(0)
    config = transformers.LlavaOnevisionConfig(
        vision_config=VISION["siglip"] | {"vision_use_head": False},
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=RESOLUTIONS,
        vision_aspect_ratio="anyres_max_2",
        projector_hidden_act="gelu_new",
        attn_implementation="eager",
    )
    theirs = randomize(transformers.LlavaOnevisionForConditionalGeneration(config), 0, 0.05)
    theirs.save_pretrained(folder)
    half = [0.5, 0.5, 0.5]
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=RESOLUTIONS,
        image_mean=half,
        image_std=half,
    )
    processor.save_pretrained(folder)
    tokenizer = letters(bos=False)
    tokenizer.add_special_tokens(["<video>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(PARTS)
    return Pair(theirs, load_published("onevision", folder, unroll=1), processor, folder)


def pictures() -> list[Image.Image]:
    return [smooth(size, number) for number, size in enumerate(SIZES)]


def torch_pictures(pair: Pair, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Of one prompt."""
    return dict(pair.processor(images=[images], return_tensors="pt"))


@pytest.fixture(scope="module")
def tiled(pair) -> list[network.TiledPicture]:
    """Each picture alone in a prompt, then two of one prompt."""
    form = picture_format(pair.ours.config, open_text_tokenizer(pair.folder))
    files = [Picture(encoded(image), "picture") for image in pictures()]
    alone = [form.read(Shown(file, True)) for file in files]
    return alone + [form.read(Shown(file, False)) for file in files[1:3]]


@pytest.fixture(scope="module")
def torch_prompts(pair) -> list[dict[str, torch.Tensor]]:
    """The same prompts of transformers."""
    return [torch_pictures(pair, [image]) for image in pictures()] + [
        torch_pictures(pair, pictures()[1:3])
    ]


def test_pixels(pair, tiled, torch_prompts):
    for ours, theirs in zip(tiled, torch_prompts, strict=False):
        pixels = (ours.pixels / 255.0 - 0.5) / 0.5
        want = theirs["pixel_values"][0].numpy().transpose(0, 2, 3, 1)
        if len(theirs["pixel_values"]) == 1:
            np.testing.assert_allclose(pixels, want, rtol=0, atol=1e-6)
            assert ours.size == tuple(theirs["image_sizes"][0].tolist())
    for ours, want in zip(tiled[-2:], torch_prompts[-1]["pixel_values"].numpy(), strict=True):
        pixels = (ours.pixels / 255.0 - 0.5) / 0.5
        np.testing.assert_allclose(pixels, want.transpose(0, 2, 3, 1), rtol=0, atol=1e-6)
    assert sorted({len(picture.pixels) for picture in tiled}) == [1, 2, 5, 7, 10]


def test_pictures_are_turned_as_exif_says(pair):
    form = picture_format(pair.ours.config, open_text_tokenizer(pair.folder))
    upright = pictures()[1]
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its left side
    turned = encoded(upright.transpose(Image.Transpose.ROTATE_90), exif=exif)
    phone, plain = Picture(turned, "phone"), Picture(encoded(upright), "plain")
    for alone in (True, False):
        ours, want = form.read(Shown(phone, alone)), form.read(Shown(plain, alone))
        np.testing.assert_array_equal(ours.pixels, want.pixels)
        assert ours.size == want.size
        assert form.tokens(Shown(phone, alone)) == form.tokens(Shown(plain, alone))


def torch_features(pair: Pair, theirs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    with torch.no_grad():
        output = pair.theirs.model.get_image_features(**theirs, return_dict=True)
    return [rows.numpy() for rows in output.pooler_output]


def test_every_token_of_a_picture(pair, tiled, torch_prompts):
    """Padding left out, newlines, and those of nine tiles resized to two; all in one bucket."""
    sizes = pair.ours.config.tiles
    want = [rows for theirs in torch_prompts for rows in torch_features(pair, theirs)]
    run = compiled(pair.ours, lambda model, batch: model.encode_images(batch))
    features = np.asarray(run(network.lay_out(tiled, sizes, network.buckets(sizes)[-1])))
    for picture, got, theirs in zip(tiled, features, want, strict=True):
        assert network.tokens_of(picture.shape, sizes) == len(theirs)
        np.testing.assert_allclose(got[: len(theirs)], theirs, **WHOLE)
        assert not got[len(theirs) :].any()
        bucket = network.bucket_of(len(picture.pixels), sizes)
        assert len(theirs) <= network.most_tokens(bucket, sizes)


def test_logits(pair, tiled, torch_prompts):
    """A picture of nine tiles amid more than 500 words, beside transformers' own merging."""
    words = np.random.default_rng(1).integers(1, 90, 520).tolist()
    (features,) = torch_features(pair, torch_prompts[3])
    row = [*words[:17], *[IMAGE] * len(features), *words[17:]]
    with torch.no_grad():
        want = pair.theirs(input_ids=torch.tensor([row]), **torch_prompts[3]).logits.numpy()
    got = compiled(pair.ours, forward)(np.array([row]), features[None])
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1


@pytest.mark.parametrize("height", [1, 13, 100, 384, 385, 700, 1999])
def test_resolutions_and_tokens_of_any_size(height):
    """Of the published sizes (0.5B and 7B): as transformers' processor counts."""
    config = transformers.LlavaOnevisionConfig()
    counts = transformers.LlavaOnevisionProcessor._get_number_of_features
    processor = transformers.LlavaOnevisionProcessor.__new__(transformers.LlavaOnevisionProcessor)
    processor.image_processor = LlavaOnevisionImageProcessorPil()
    processor.num_image_tokens, processor.vision_aspect_ratio = 729, "anyres_max_9"
    sizes = open_config(config.to_dict()).tiles
    for width in (1, 37, 384, 500, 768, 1024, 3001):
        best = network.best_resolution((height, width), sizes.resolutions)
        rows, columns = sizes.grid(best)
        want = counts(processor, height, width, 384, 384)
        assert network.tokens_of((1 + rows * columns, height, width, 3), sizes) == want
        assert want <= network.most_tokens(network.bucket_of(1 + rows * columns, sizes), sizes)


def open_config(published):
    keys = ("model_type", "image_grid_pinpoints", "vision_aspect_ratio")
    small = {"model_type": "qwen2", **{k: v for k, v in TEXT.items() if "token" not in k}}
    return onevision_config({**{key: published[key] for key in keys}, "text_config": small})


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("onevision_05b", (152000, 896, 4864, 24, 14, 2, True)),
        ("onevision_7b", (152128, 3584, 18944, 28, 28, 4, False)),
    ],
)
def test_presets_have_the_published_sizes(name, sizes):
    """Every parameter's shape is that of transformers' model; of Qwen2's sizes as published."""
    keys = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "tie_word_embeddings",
    )  # fmt: skip
    values = dict(zip(keys, sizes, strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e6}
    text = transformers.Qwen2Config(**values, max_position_embeddings=32768, rope_parameters=rope)
    published = transformers.LlavaOnevisionConfig(text_config=text)
    with torch.device("meta"):
        theirs = transformers.LlavaOnevisionForConditionalGeneration(published)
    config = getattr(onevision, name)()
    model = abstract(network.Onevision, config)
    specs = untied_source(nnx.state(model), onevision_key_map(config)).specs()
    wanted = {}
    for key, parameter in theirs.named_parameters():
        for pattern, replacement in onevision_key_map(config).rename:
            key = re.sub(pattern, replacement, key)
        wanted[key] = tuple(parameter.shape)
    assert {key: spec.shape for key, spec in specs.items()} == wanted
    assert onevision_config(published.to_dict()) == config


@pytest.fixture(scope="module")
def backend(pair, torch_prompts) -> EngineBackend:
    """Of the folder, after answers about a picture of one tile, of nine, two, and none."""
    tokenizer, messages = open_text_tokenizer(pair.folder), {}
    for numbers in ([0], [3], [4], [2], [5], [1, 2], []):
        theirs = (
            {}
            if not numbers
            else torch_prompts[-1]
            if len(numbers) == 2
            else torch_prompts[numbers[0]]
        )
        counts = iter([len(rows) for rows in torch_features(pair, theirs)] if numbers else [])
        text = "[user] " + "<image>\n" * len(numbers) + "Why?[a] "
        ids = [
            token
            for word in tokenizer.encode_plain(text)
            for token in ([IMAGE] * next(counts) if word == IMAGE else [word])
        ]
        inputs = {"input_ids": torch.tensor([ids]), **theirs}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        messages[str(numbers)] = [*(pictures()[n] for n in numbers), "Why?"], inputs
    return answers_as_generate(pair, messages, END)


def test_answers_equal_generate(backend):
    """No program is compiled for a size."""
    programs = backend.engine._pictures._programs
    assert programs.encode._cache_size() == 5  # of two pictures with 1 + 3 * 2 tiles the same


def test_what_a_plan_compiles(pair):
    config, sizes = pair.ours.config, EngineConfig(slots=3, length=256, buckets=(32,))
    mesh = lower_tower(config, sizes)
    assert sorted(tower_programs(config, sizes, mesh)) == ["gather", "tower"]
    tokens = network.most_tokens(5, config.tiles)  # of 2 x 2 tiles
    of_picture = tokens * 4 * config.llama.hidden
    assert feature_bytes(config, sizes, mesh, pictures=2) == (3 * 2 + 1) * of_picture


def test_what_does_not_fit_is_refused_by_name(backend):
    decoding = Decoding(max_new_tokens=4)
    red = Picture(encoded(Image.new("RGB", (95, 83), "red")), "red.png")
    for query, error, match in [
        (Completion("a", "<video>", decoding), UserError, "'a': its text has <video>"),
        (Completion("a", "<image>", decoding, (red, red)), UserError, "1 <image> placeholders for"),
        (Completion("a", "a" * 220, decoding, (red,)), TooLong, "tokens plus 4 new"),
    ]:
        refuses(match, backend.check, query, error=error)
    plain = Request("a", [IMAGE], images=[np.zeros((9, 9, 3))])
    with pytest.raises(UserError, match=r"expected a models\.onevision\.network\.TiledPicture"):
        list(backend.engine.generate([plain]))


def test_checkpoints_go_both_ways(pair, tmp_path):
    published = publish_onevision(pair.ours.config, nnx.state(pair.ours))
    again = export_is_read_by_both(pair, "onevision", published, tmp_path / "out")
    assert again.config.image_grid_pinpoints == RESOLUTIONS


def test_unknown_values_are_refused_by_name(pair, tmp_path):
    published = json.loads((pair.folder / "config.json").read_text())
    for number, (changes, match) in enumerate(
        [
            ({"vision_aspect_ratio": "pad"}, "vision_aspect_ratio is 'pad'"),
            ({"vision_feature_select_strategy": "default"}, "model.select: expected a SigLIP"),
            ({"image_grid_pinpoints": [[27]]}, r"image_grid_pinpoints is \[\[27\]\]"),
            ({"image_grid_pinpoints": [[27, 30]]}, "multiples of model.vision.image_size = 27"),
            ({"vision_config": {"model_type": "clip_vision_model"}}, "expected a SigLIP"),
            ({"use_image_newline_parameter": False}, "use_image_newline_parameter is False"),
            ({"spatial_pool_mode": "bilinear"}, "the key 'spatial_pool_mode'"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(published | changes))
        refuses(match, open_onevision, folder)
    for number, (values, match) in enumerate(
        [
            ({"image_grid_pinpoints": [[27, 27]]}, "image_grid_pinpoints are not those of config"),
            ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean is"),
            ({"vision_aspect_ratio": "anyres_max_9"}, "vision_aspect_ratio is 'anyres_max_9'"),
            ({"resample": 2}, "resample is bilinear"),
        ]
    ):
        folder = tmp_path / f"processor {number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(published))
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
        refuses(match, open_onevision, folder)
