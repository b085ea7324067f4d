"""Examples and batches of a Qwen-VL's training: conversations, rows with a picture, broken ones."""

import dataclasses

import numpy as np
import pytest
from PIL import Image
from tiny_llm import END, PICTURED, flag, pictured_letters, qwen_vl_config, text_tokenizer
from transformers.image_utils import load_image

from mmqa_jax.core.errors import RunError
from mmqa_jax.data.batches.packing import Bucket
from mmqa_jax.data.batches.texts import RowSize, TokenExample
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.examples.training import encode_conversation
from mmqa_jax.prompting.picture_format import QwenFormat, Shown
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, TextTokenizer
from mmqa_jax.tasks.vision_language import PicturedRows, TrainingPictures, pictured_shapes
from tests.pictures import encoded
from tests.refusals import refuses

TOKENIZER = TextTokenizer(pictured_letters(), ChatTemplate(PICTURED), (END,))
_CONFIG = qwen_vl_config()
CONFIG = dataclasses.replace(
    _CONFIG, vision=dataclasses.replace(_CONFIG.vision, min_pixels=16, max_pixels=1600)
)
FORMAT = QwenFormat(CONFIG, TOKENIZER)
SIZE = RowSize(70, 9)
# 2 x 3 units; 7 x 10, more than the smallest bucket; a side 201 times the other; no picture at all.
FILES = {
    "small": flag(size=(12, 8)).data,
    "large": flag(size=(40, 28)).data,
    "thin": flag(size=(402, 2)).data,
    "damaged": b"no picture",
}


def asked(*names: str | None) -> list[Question]:
    return [Question(f"q{n}", "train", "What?", image=name) for n, name in enumerate(names)]


def pictures_of(files, questions, max_broken: int | None = None) -> TrainingPictures:
    return TrainingPictures(Corpus([], questions, files.get), FORMAT, CONFIG, max_broken)


def example(question: Question, answer: str = " A sun.", given: str = "") -> TokenExample:
    encode = encode_conversation(TOKENIZER, FORMAT)
    return encode(question, "\nWhat?", given, answer, ended=True)


def text(tokens) -> str:
    return TOKENIZER.decode(tokens)


def test_a_conversation_is_that_of_the_chat_template():
    """As inference asks, one token for the picture; only the answer and its end are learned."""
    with_picture, without = (example(one) for one in asked("small", None))
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    for one, picture in ((with_picture, shown), (without, "")):
        prompt = f"<|im_start|>user\n{picture}\nWhat?<|im_end|>\n<|im_start|>assistant\n"
        assert text(one.tokens[: one.start]) == prompt
        assert text(one.tokens[one.start :]) == "A sun.<|im_end|>"
    assert (with_picture.pictures, without.pictures) == (("small",), ())
    given = example(asked(None)[0], " The sun.", " It is big.")
    assert text(given.tokens[: given.start]).endswith("assistant\nIt is big.")
    assert text(given.tokens[given.start :]) == " The sun.<|im_end|>"
    plain = TextTokenizer(pictured_letters())
    refuses("has no chat template", encode_conversation, plain, QwenFormat(CONFIG, plain))
    message = rf"--tokenizer, or .*: it has no .* \(id {CONFIG.image_token}\); name the model's own"
    refuses(message, QwenFormat, CONFIG, text_tokenizer())


def test_broken_pictures_are_counted_named_and_limited(capsys):
    questions = asked("small", "thin", None, "damaged", "absent", "small")
    found = pictures_of(FILES, questions)
    assert [q.id for q in found.readable(questions)] == ["q0", "q2", "q5"]
    assert found.broken.names == ["thin", "damaged", "absent"]
    said = capsys.readouterr().err
    assert "3 questions are left out" in said
    assert "thin, damaged, absent" in said
    assert "402 x 2 pixels, a side more than 200 times the other" in said
    message = r"2 pictures cannot be read, more than the 1 allowed \(thin, damaged\)"
    with pytest.raises(RunError, match=message) as error:
        pictures_of(FILES, questions, 1).readable(questions)
    assert "raise pictures.max_broken" in str(error.value)


def test_rows_have_their_own_features_and_targets():
    """In the bucket of the larger picture; shapes are those that are planned."""
    questions = asked("small", "large", None)
    pictures = pictures_of(FILES, questions)
    pictures.readable(questions)
    examples = [example(question) for question in questions]
    rows = PicturedRows(SIZE, CONFIG, pictures)
    none, small, large = pictures.buckets(examples)
    assert (none, small) == (Bucket(0, 0), Bucket(1, 64))
    assert (large.pictures, large.text) == (1, 96)
    batch = rows.batch([*examples[:2], None], large)
    wanted = pictured_shapes(3, SIZE, large, CONFIG)
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (x.shape, x.dtype) for name, x in wanted.items()
    }
    for row, (one, units) in enumerate(zip(examples, (6, 70), strict=False)):
        ids = batch["input_ids"][row]
        own = ids == CONFIG.image_token
        assert batch["rows"][row, own].tolist() == list(range(units))
        assert (batch["rows"][row, ~own] == -1).all()
        learned = batch["target_segments"][row] == 1
        assert learned.sum() == one.targets == 7
        at = batch["target_positions"][row, learned]
        assert text(ids[at + 1]) == text(batch["target_ids"][row, learned]) == "A sun.<|im_end|>"
    # After a picture of 7 x 10 units a text goes on behind the longer side.
    assert np.diff(batch["positions"][1, :, 0]).max() == 10
    assert not batch["target_segments"][2].any()
    words = rows.batch([examples[2]], none)
    assert "patches" not in words
    assert words["input_ids"].shape == (1, SIZE.length)


def test_a_picture_that_breaks_later_is_not_learned(capsys):
    files = dict(FILES)
    questions = asked("small", "large")
    pictures = pictures_of(files, questions)
    pictures.readable(questions)
    examples = [example(question) for question in questions]
    bucket = pictures.buckets(examples)[-1]
    files["small"] = files["small"][:20]
    batch = PicturedRows(SIZE, CONFIG, pictures).batch(examples, bucket)
    assert batch["target_segments"].any(axis=1).tolist() == [False, True]
    assert not (batch["input_ids"][0] == CONFIG.image_token).any()
    pictures.warn_missing()
    assert "whose questions were not learned: 1 (small)" in capsys.readouterr().err


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_transformers_turns_them(orientation, tmp_path):
    """As a phone stores a picture: lying, with its orientation in EXIF."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "phone.png", exif=exif)
    packed = encoded(load_image(str(tmp_path / "phone.png")))
    phone, turned = (
        Picture(data, "one") for data in ((tmp_path / "phone.png").read_bytes(), packed)
    )
    assert FORMAT.shape(phone) == FORMAT.shape(turned)
    np.testing.assert_array_equal(FORMAT.read(Shown(phone, True)), FORMAT.read(Shown(turned, True)))
