"""SigLIP as a retriever against transformers: pictures, and vectors of texts and pictures."""

import io
import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from siglip_pair import TEXT, published, spiece

from mmqa_jax.cli import main
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.decode import decode_to_pixels
from mmqa_jax.data.pictures.resize import NaFlex
from mmqa_jax.data.schema import Source
from mmqa_jax.models.two_towers.config import SiglipVisionConfig
from mmqa_jax.models.two_towers.processor import read_preparation
from mmqa_jax.retrieval.text_encoder import load_two_towers
from mmqa_jax.tasks.embedder import open_embedder
from tests.pictures import encoded
from tests.refusals import refuses

pytestmark = pytest.mark.slow

# Width and height; none gives one column and several rows, of which torch's kernel on CPU is wrong.
SIZES = [(40, 30), (27, 27), (30, 90), (64, 5), (200, 120)]
QUESTIONS = ["A photo of a Cat!", "the quick, brown fox", "flag"]
PROCESSORS = {"siglip": "SiglipImageProcessorPil", "siglip2": "Siglip2ImageProcessorPil"}
OPTIONS = {
    "siglip": {"size": {"height": 27, "width": 27}},
    "siglip2": {"patch_size": 6, "max_num_patches": 14},
}


def png(number, mode="RGB"):
    width, height = SIZES[number]
    rng = np.random.default_rng(number)
    values = rng.integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    return encoded(Image.fromarray(values, mode))


@pytest.fixture(scope="module", params=["siglip", "siglip2"])
def peer(request, tmp_path_factory):
    """(folder as published, torch's model, its image processor)."""
    kind = request.param
    folder = tmp_path_factory.mktemp("published") / kind
    model = published(kind, folder)
    spiece(folder)
    processor = getattr(transformers, PROCESSORS[kind])(**OPTIONS[kind])
    processor.save_pretrained(folder)
    return folder, model, processor


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def their_texts(folder, model, texts):
    tokenizer = transformers.SiglipTokenizer(str(folder / "spiece.model"))
    length = TEXT["max_position_embeddings"]
    ids = tokenizer(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        return unit(model.get_text_features(ids).pooler_output.numpy())


def their_pictures(model, processor, pictures):
    inputs = processor([Image.open(io.BytesIO(data)) for data in pictures], return_tensors="pt")
    with torch.no_grad():
        return unit(model.get_image_features(**inputs).pooler_output.numpy())


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_pixels(peer, mode):
    folder, _, processor = peer
    kind = folder.name
    for number in range(len(SIZES)):
        data = png(number, mode)
        image = Image.open(io.BytesIO(data))
        theirs = processor([image], return_tensors="np", do_convert_rgb=True)
        if kind == "siglip":
            pixels = decode_to_pixels(data, 27, "squash", alpha="white")
            want = theirs["pixel_values"][0].transpose(1, 2, 0)
        else:
            pixels = decode_to_pixels(data, 24, NaFlex(6, 14), alpha="white")
            rows, columns = theirs["spatial_shapes"][0]
            assert pixels.shape == (rows * 6, columns * 6, 3)
            want = theirs["pixel_values"][0][: rows * columns].reshape(rows, columns, 6, 6, 3)
            want = want.transpose(0, 2, 1, 3, 4).reshape(pixels.shape)
        np.testing.assert_array_equal(pixels, np.rint(want * 127.5 + 127.5))


def test_grids_are_transformers():
    from transformers.models.siglip2 import image_processing_pil_siglip2 as theirs

    rng = np.random.default_rng(0)
    for _ in range(200):
        width, height = rng.integers(1, 4000, 2)
        patch, most = int(rng.choice([14, 16, 32])), int(rng.choice([64, 256, 784, 1024]))
        want = theirs.get_image_size_for_max_num_patches(height, width, patch, most)
        columns, rows = NaFlex(patch, most).grid(width, height)
        assert (rows * patch, columns * patch) == want


def test_vectors_by_every_name(peer, tmp_path):
    """The published folder and the converted one give transformers' vectors and ranking."""
    folder, model, processor = peer
    out = tmp_path / "converted"
    assert main(["convert", "--model=siglip", f"--source={folder}", f"--out={out}"]) == 0
    pictures = {f"p{n}.png": png(n) for n in range(len(SIZES))}
    sources = [Source(f"p{n}", "image", "a caption", image=f"p{n}.png") for n in range(len(SIZES))]
    sources.append(Source("t", "text", QUESTIONS[0]))
    corpus = Corpus(sources, [], pictures.get, "c")
    want = np.concatenate([
        their_pictures(model, processor, pictures.values()),
        their_texts(folder, model, QUESTIONS[:1]),
    ])  # fmt: skip
    embedder, store = open_embedder(folder, corpus, {"batch_size": 4})
    texts = embedder.embed_questions(QUESTIONS)
    np.testing.assert_allclose(texts, their_texts(folder, model, QUESTIONS), rtol=0, atol=1e-5)
    vectors = embedder.embed_rows(corpus, store, range(len(sources)))
    np.testing.assert_allclose(vectors, want, rtol=0, atol=1e-5)
    # Pictures of five shapes in two batches, by one program.
    shown = [store.pixels(n) for n in range(len(SIZES))]
    np.testing.assert_allclose(embedder.embed_pictures(shown), want[:-1], rtol=0, atol=1e-5)
    assert embedder._encode_source._cache_size() == embedder._encode_image._cache_size() == 1
    # The fingerprint covers parameters, tokenizer and preparation: the rest is the same, too.
    assert open_embedder(out, corpus, {"batch_size": 4})[0].fingerprint == embedder.fingerprint


def test_a_run_of_another_model_is_refused(peer, tmp_path):
    folder, _, _ = peer
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    refuses(r"model_type is 'clip', expected 'siglip' or", load_two_towers, tmp_path, "siglip")
    assert main(["convert", "--model=clip", f"--source={folder}", f"--out={tmp_path / 'x'}"]) == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("image_mean", [0.4, 0.5, 0.5], r"image_mean is .*, expected \(0.5"),
        ("do_normalize", False, "do_normalize is False, expected True"),
        ("resample", 1, r"resample is 1, expected bicubic \(3\) or bilinear"),
        ("size", {"height": 32, "width": 32}, "expected 27"),
        ("size", {"height": [27]}, "expected 27"),
        ("do_center_crop", True, "do_center_crop is True"),
    ],
)
def test_other_preparations_are_refused_by_name(key, value, message, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(UserError, match=message):
        read_preparation(tmp_path, SiglipVisionConfig(image_size=27, patch_size=6))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("patch_size", 14, "patch_size is 14, expected 6; use a checkpoint"),
        ("max_num_patches", 2.5, "max_num_patches is 2.5, .*at least 1; use"),
        ("max_num_patches", -1, "max_num_patches is -1, expected a whole number"),
        ("resample", [3], r"resample is \[3\], expected bicubic"),
        ("image_std", "0.5", "image_std is '0.5', expected"),
    ],
)
def test_preparations_of_another_naflex_are_refused_by_name(key, value, message, tmp_path):
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({key: value}))
    with pytest.raises(UserError, match=rf"preprocessor_config\.json: {message}"):
        read_preparation(tmp_path, SiglipVisionConfig(patch_size=6, flexible=True))
