"""The families of models/llava/families.py whose pictures are tiles, against transformers: token
ids, pixels, logits, answers, checkpoints.

LLaVA's own are in test_llava.py and test_llava_families.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, forward, randomize, reloaded, same_parameters
from flax import nnx
from PIL import Image
from qwen_vl_pair import encoded
from test_llava_families import EOS, IMAGE, PARTS, TEXT, letters
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.check import check
from mmqa_jax.models.llava.keys import publish_llava
from mmqa_jax.models.llava.network import Llava, expand_images
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Message, Picture
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.picture_format import picture_format, shown
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.config_json import config_from_json, config_to_json
from mmqa_jax.weights.published import load_published, write_published

pytestmark = pytest.mark.slow

NEW = 6
TEXT = TEXT | {"vocab_size": 120, "max_position_embeddings": 700, "rope_theta": 5000.0}
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS]
VISION = {
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 5,
}  # fmt: skip
# Width and height: of nine tiles, wide, tall, thin.
SIZES = [(50, 47), (61, 20), (17, 90), (200, 7)]


class Case(NamedTuple):
    """A config of transformers, and its processor of a tokenizer."""

    config: Callable[[], Any]
    processor: Callable[[Any], Any]


def idefics3(kind: str, vision: dict[str, Any], **both: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")
    return config(
        text_config={"model_type": "llama", **TEXT},
        vision_config=VISION | vision,
        image_token_id=IMAGE,
        attn_implementation="eager",
        **both,
    )


def rows_processor(tokenizer: Any, side: int, longest: int, tokens: int) -> Any:
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": side}
    )
    return transformers.Idefics3Processor(
        pictures, tokenizer, image_seq_len=tokens, chat_template=PARTS
    )


CASES = {
    "smolvlm": Case(
        lambda: idefics3(
            "SmolVLM", {"image_size": 24, "patch_size": 4, "layer_norm_eps": 3e-5}, scale_factor=2
        ),
        lambda tokenizer: rows_processor(tokenizer, 24, 70, 9),
    ),
    "idefics3, a tile": Case(
        lambda: idefics3(
            "Idefics3",
            {"image_size": 28, "patch_size": 3, "hidden_act": "gelu"},
            scale_factor=3,
            tie_word_embeddings=True,
        ),
        lambda tokenizer: rows_processor(tokenizer, 28, 27, 9),
    ),
}


class Pair(NamedTuple):
    """A torch model, ours of its checkpoint, transformers' processor, and the folder."""

    theirs: torch.nn.Module
    ours: Llava
    processor: Any
    folder: Path


@functools.cache
def make_pair(name: str, folder: Path) -> Pair:
    case = CASES[name]
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText
    theirs = randomize(kind.from_config(case.config()), 0, 0.05)
    theirs.save_pretrained(folder)
    tokenizer = letters(bos=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<image>"]
    )
    processor = case.processor(tokenizer)
    processor.save_pretrained(folder)
    return Pair(theirs, load_published("llava", folder, unroll=1), processor, folder)


def folder_of(name: str, tmp_path_factory) -> Path:
    return tmp_path_factory.getbasetemp() / f"vlm_family_{list(CASES).index(name)}"


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, folder_of(request.param, tmp_path_factory))


def pictures() -> list[Image.Image]:
    made = []
    for number, size in enumerate(SIZES):
        noise = np.random.default_rng(number).integers(0, 256, (9, 7, 3), np.uint8)
        made.append(Image.fromarray(noise).resize(size, Image.Resampling.BILINEAR))
    return made


class Prompt(NamedTuple):
    """A prompt with pictures as both sides have it.

    Attributes:
      ids: ours, one placeholder for each tile.
      tiles: uint8 pixels of each.
      given: transformers' own.
    """

    ids: list[int]
    tiles: list[np.ndarray]
    given: dict[str, torch.Tensor]


def prompt(pair: Pair, text: str, images: list[Image.Image]) -> Prompt:
    form = picture_format(pair.ours.config, open_text_tokenizer(pair.folder))
    files = shown([Picture(encoded(one), "one") for one in images])
    tiles = [tile for one in files for tile in form.read_all(one)]
    given = pair.processor(images=images, text=text, return_tensors="pt", add_special_tokens=False)
    assert sum(map(form.tokens, files)) == len(tiles) * pair.ours.config.features
    assert sum(map(form.places, files)) == len(tiles)
    return Prompt(form.encode(text, files), tiles, dict(given))


PROMPTS = [("a<image>b", [0]), ("<image>and<image>\nc", [1, 2]), ("<image><image>d", [3, 1])]


@pytest.mark.parametrize(("text", "used"), PROMPTS)
def test_tokens_and_pixels_are_the_processors(pair, text, used):
    """One picture, and two of odd sizes; the pixels are Pillow's, byte by byte."""
    made = prompt(pair, text, [pictures()[n] for n in used])
    config = pair.ours.config
    (ids,) = expand_images([made.ids], [len(made.tiles)], config).input_ids
    assert ids.tolist() == made.given["input_ids"][0].tolist()
    vision = config.vision
    pixels = (np.stack(made.tiles) / 255.0 - vision.pixel_mean) / vision.pixel_std
    want = made.given["pixel_values"].numpy().reshape(-1, 3, *pixels.shape[1:3])
    np.testing.assert_allclose(pixels, want.transpose(0, 2, 3, 1), rtol=0, atol=1e-5)


def test_logits_equal(pair):
    """A picture amid more than 500 tokens."""
    words = "".join(np.random.default_rng(1).choice(list("abcdefg hi"), 505))
    made = prompt(pair, f"{words[:17]}<image>{words[17:]}", [pictures()[0]])
    with torch.no_grad():
        want = pair.theirs(**made.given).logits.numpy()
    prompts = expand_images([made.ids], [len(made.tiles)], pair.ours.config)
    assert prompts.mask.sum() > 500
    pixels = np.asarray(pair.ours.vision.normalize(np.stack(made.tiles)))
    got = compiled(pair.ours, forward)(prompts.input_ids, pixels)
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1


def test_answers_equal_generate(pair):
    """Pictures within conversations: pixels, template and tokens are the processor's."""
    theirs, _, processor, folder = pair
    images = pictures()
    asked = {"two": [images[1], images[2], "Is one?"], "one": [images[0], "What?"], "none": ["W?"]}
    sizes = EngineConfig(  # one segment: a program of each kind
        slots=2, length=260, buckets=(32,), prefill_tokens=64
    )
    backend = open_backend(folder, engine=sizes)
    chats = []
    for name, parts in asked.items():
        files = [one if isinstance(one, str) else Picture(encoded(one), "one") for one in parts]
        chats.append(Chat(name, (Message("user", files),), Decoding(max_new_tokens=NEW)))
        backend.check(chats[-1])
    answers = {result.id: result for result in backend.answer(chats)}
    for name, parts in asked.items():
        content = [
            {"type": "text", "text": one} if isinstance(one, str) else {"type": "image"}
            for one in parts
        ]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        given = processor(
            images=[one for one in parts if not isinstance(one, str)] or None,
            text=text,
            return_tensors="pt",
            add_special_tokens=False,
        )
        with torch.no_grad():
            want = theirs.generate(
                **given, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=EOS
            )
        count = given["input_ids"].shape[1]
        assert answers[name].prompt_tokens == count, name
        assert backend.prompt_tokens(chats[list(asked).index(name)]) == count, name
        assert list(answers[name].candidates[0].tokens) == want[0, count:].tolist(), name
    broken = Completion("a", "<image>", Decoding(NEW), (Picture(b"GIF89a", "broken.gif"),))
    with pytest.raises(UserError, match=r"broken\.gif"):
        backend.check(broken)


def test_checkpoints_go_both_ways(pair, tmp_path):
    """Ours, exported, is transformers' and ours again; and its record is read back."""
    theirs, ours, _, _ = pair
    published = publish_llava(ours.config, nnx.state(ours))
    write_published(tmp_path / "out", published)
    again = reloaded(transformers.AutoModelForImageTextToText, tmp_path / "out")
    assert type(again) is type(theirs)
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
