"""LLaVA-1.5's prompts, token ids and pictures against the original's and transformers'."""

import dataclasses

import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.resize import PAD_COLOR, llava_pixels, pad_to_square
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llava.config import ORIGINAL_IMAGE_TOKEN, LlavaConfig, llava_1_5_7b
from mmqa_jax.models.llava.network import expand_images
from mmqa_jax.models.two_towers.config import vit_l_14_336
from mmqa_jax.models.two_towers.network import normalize_pixels
from mmqa_jax.prompting.llava_prompt import SYSTEM, conversation, prompt_ids, question

# Older versions of transformers have the Pillow backend under the plain name.
PROCESSOR = getattr(transformers, "LlavaImageProcessorPil", transformers.LlavaImageProcessor)


def small_config(image_token: int) -> LlavaConfig:
    """Four patches per picture."""
    vision = dataclasses.replace(vit_l_14_336().vision, image_size=28)
    return LlavaConfig(vision, LlamaConfig(), image_token=image_token)


def noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def word_tokenizer(*texts: str, bos: bool) -> transformers.PreTrainedTokenizerFast:
    """Every word of the texts is a token; with `bos`, `<s>` is put in front as Vicuna's does."""
    special = ["<s>", "</s>", "<pad>", "<unk>", "<image>"]
    words = pre_tokenizers.Whitespace().pre_tokenize_str(" ".join(texts).replace("<image>", " "))
    vocabulary = dict.fromkeys([*special, *(word for word, _ in words)])
    tokenizer = Tokenizer(
        models.WordLevel({w: n for n, w in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )


def test_prompt_text():
    """haotian-liu/LLaVA conv_vicuna_v1 (separator style TWO)."""
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    assert conversation([(question("What is this?"), None)]) == (
        f"{system} USER: <image>\nWhat is this? ASSISTANT:"
    )
    assert conversation([("Hi", "Hello."), ("And?", None)]) == (
        f"{system} USER: Hi ASSISTANT: Hello.</s>USER: And? ASSISTANT:"
    )
    assert question("Which one?", pictures=2) == "<image>\n<image>\nWhich one?"
    assert question(" Is <image> a tag? ", pictures=0) == "Is  a tag?"
    with pytest.raises(AssertionError, match="only the last"):
        conversation([("Hi", None), ("And?", None)])


def test_prompt_ids_are_the_originals():
    """Vicuna's ids of such a prompt, as public notes on Video-LLaVA list them.

    Its function is the original's `tokenizer_image_token` with -201 for a video. The blank (29871)
    before the line break (13) shows that pieces are texts of their own.
    """
    before = """319 13563 1546 263 12758 1404 322 385 23116 21082 20255 29889 450 20255 4076 8444
        29892 13173 29892 322 1248 568 6089 304 278 1404 29915 29879 5155 29889 3148 1001 29901
        29871"""
    after = "29871 13 5618 338 278 13602 10929 297 278 4863 29973 319 1799 9047 13566 29901"
    before, after = ([int(word) for word in ids.split()] for ids in (before, after))
    text = "What is the evident theme in the video?"
    vicuna = {f"{SYSTEM} USER: ": before, f"\n{text} ASSISTANT:": after}
    got = prompt_ids(
        conversation([(question(text), None)]), vicuna.__getitem__, image_token=ORIGINAL_IMAGE_TOKEN
    )
    assert got == [1, *before, -200, *after]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    "prompt",
    [
        conversation([(question("a dog or a cat", 2), None)]),
        "<image>a dog",
        "a dog<image>",
        "<image><image>",
        "a dog or a cat",
    ],
)
def test_ids_equal_the_originals_function(prompt, bos):
    """llava/mm_utils.py tokenizer_image_token, restated: BOS of each piece is cut but the first."""
    tokenizer = word_tokenizer(prompt, bos=bos)
    pieces = [tokenizer(piece).input_ids for piece in prompt.split("<image>")]
    expected = [*pieces[0]]
    for piece in pieces[1:]:
        expected += [-200, *piece[1 if bos else 0 :]]
    got = prompt_ids(
        prompt,
        lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        image_token=-200,
        bos=tokenizer.bos_token_id if bos else None,
    )
    assert got == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_inputs_equal_the_processors(side):
    """Text, pictures and padding together against transformers' LlavaProcessor."""
    asked = [
        conversation([(question("a dog or a cat"), None)]),
        conversation([(question("", 2), "a cat"), ("or a dog", None)]),
        conversation([("a dog", None)]),
    ]
    tokenizer = word_tokenizer(*asked, bos=True)
    tokenizer.padding_side = side
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    processor = transformers.LlavaProcessor(
        PROCESSOR(do_pad=True, **sizes),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    pictures = [noise(50, 31), noise(20, 77), noise(28, 28)]
    want = processor(images=pictures, text=asked, padding=True, return_tensors="np")
    config = small_config(tokenizer.convert_tokens_to_ids("<image>"))
    rows = [
        prompt_ids(
            prompt,
            lambda text: tokenizer(text, add_special_tokens=False).input_ids,
            image_token=config.image_token,
            bos=tokenizer.bos_token_id,
        )
        for prompt in asked
    ]
    got = expand_images(
        rows, [1, 2, 0], config, pad_token=tokenizer.pad_token_id, pad_left=side == "left"
    )
    np.testing.assert_array_equal(got.input_ids, want["input_ids"])
    np.testing.assert_array_equal(got.mask, want["attention_mask"])
    assert (got.input_ids == config.image_token).sum(axis=1).tolist() == [4, 8, 0]
    pixels = np.stack([normalize_pixels(llava_pixels(picture, 28)) for picture in pictures])
    expected = np.stack(want["pixel_values"]).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(pixels, expected, rtol=0, atol=2e-6)


def test_expansion():
    config = small_config(image_token=7)
    rows = [[1, 7, 2], [3], [7, 7]]
    got = expand_images(rows, [1, 0, 2], config, length=9, pad_token=5)
    assert got.input_ids.tolist() == [
        [1, 7, 7, 7, 7, 2, 5, 5, 5],
        [3, 5, 5, 5, 5, 5, 5, 5, 5],
        [7, 7, 7, 7, 7, 7, 7, 7, 5],
    ]
    assert got.input_ids.dtype == np.int32
    assert got.lengths.tolist() == [6, 1, 8]
    left = expand_images(rows, [1, 0, 2], config, pad_token=5, pad_left=True)
    assert left.input_ids.shape == (3, 8)
    assert left.input_ids[0].tolist() == [5, 5, 1, 7, 7, 7, 7, 2]
    np.testing.assert_array_equal(left.mask.sum(1), got.lengths)
    # LLaVA-1.5: 576 positions per picture.
    (row,) = expand_images([[1, 32000, 2]], [1], llava_1_5_7b()).input_ids
    assert len(row) == 2 + 576


def test_prompts_that_do_not_fit_are_named():
    config = small_config(image_token=7)
    with pytest.raises(UserError, match=r"prompt 1: 1 image placeholders \(token 7\) for 2 pict"):
        expand_images([[1], [7, 2]], [0, 2], config)
    with pytest.raises(UserError, match=r"prompt 0: 1 image placeholders .* for 0 pictures"):
        expand_images([[7, 2]], [0], config)
    with pytest.raises(UserError, match=r"prompt 1: 6 tokens with its pictures \(4 each\), the"):
        expand_images([[1], [1, 7, 2]], [0, 1], config, length=5)
    with pytest.raises(AssertionError, match="pad_token is 7, the placeholder's id"):
        expand_images([[1]], [0], config, pad_token=7)


SHAPES = [(64, 64), (100, 40), (41, 97), (333, 200), (20, 31), (337, 336), (1, 50)]


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_equal_the_processors(shape):
    """Against transformers' LlavaImageProcessor with `do_pad`: pixels equal, floats to 1e-6."""
    image = noise(*shape)
    sizes = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    (expected,) = PROCESSOR(do_pad=True, **sizes)(image, return_tensors="np")["pixel_values"]
    pixels = llava_pixels(image)
    assert pixels.shape == (336, 336, 3)
    np.testing.assert_allclose(
        normalize_pixels(pixels), expected.transpose(1, 2, 0), rtol=0, atol=2e-6
    )


def test_squares_are_padded_with_the_mean_color():
    """haotian-liu/LLaVA llava/conversation.py: background (122, 116, 104)."""
    assert PAD_COLOR == (122, 116, 104)
    image = noise(5, 2)
    square = np.asarray(pad_to_square(image))
    assert square.shape == (5, 5, 3)
    np.testing.assert_array_equal(square[1:3], np.asarray(image))
    assert (square[[0, 3, 4]] == PAD_COLOR).all()
    tall = np.asarray(pad_to_square(noise(2, 5)))
    assert (tall[:, [0, 3, 4]] == PAD_COLOR).all()
