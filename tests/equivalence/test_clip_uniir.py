"""UniIR's CLIP_SF: its checkpoint's names, and the sum of text and picture, against torch."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from clip_torch import TorchCLIP
from compare import randomize
from test_clip_embedder import MERGES, byte_letters, picture
from test_clip_openai import CONFIG

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.published_tokenizers import END, START, load_clip_tokenizer
from mmqa_jax.data.schema import Source
from mmqa_jax.models.two_towers.config import PIXEL_MEAN, PIXEL_STD
from mmqa_jax.retrieval.text_encoder import load_two_towers
from mmqa_jax.weights.convert import convert
from tests.refusals import refuses

TOKENS = 512 + len(MERGES) + 2
SIZES = dataclasses.replace(
    CONFIG,
    vision=dataclasses.replace(CONFIG.vision, image_size=32, patch_size=8),
    text=dataclasses.replace(CONFIG.text, vocab_size=TOKENS, context=20),
)
TEXTS = ["A red flag.", "", "the flag " * 20]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The torch model, and the folder that `mmqa convert` makes of its checkpoint."""
    folder = tmp_path_factory.mktemp("uniir")
    theirs = randomize(TorchCLIP(SIZES), 1, 0.05).eval()
    letters = byte_letters()
    joined = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *joined, START, END]
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    state = {f"clip_model.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"model": state, "epoch": 3}, folder / "clip_sf.pth")
    torch.save({"model": {**state, "t5_layers.x": torch.ones(1)}}, folder / "clip_ff.pth")
    assert convert("clip", folder / "clip_sf.pth", folder / "ours")["layout"] == "uniir"
    return theirs, folder


def fused(theirs, folder, texts, pictures):
    """CLIPScoreFusion.encode_multimodal_input with MBEIRCollatorBase's masks, normalized."""
    tokenizer = load_clip_tokenizer(folder / "ours")
    context = SIZES.text.context
    ids = np.zeros((len(texts), context), np.int64)
    for row, tokens in zip(ids, tokenizer.encode_batch(texts), strict=True):
        whole = [tokenizer.cls_id, *tokens, tokenizer.sep_id][:context]
        row[: len(whole)] = whole
        row[len(whole) - 1] = tokenizer.sep_id  # truncate=True
    shown = [np.zeros((32, 32, 3), "f4") if p is None else p / 255 for p in pictures]
    pixels = (np.stack(shown) - PIXEL_MEAN) / np.array(PIXEL_STD)
    with torch.no_grad():
        text = theirs.encode_text(torch.from_numpy(ids))
        image = theirs.visual(torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype("f4")))
    text *= torch.tensor([[float(bool(one))] for one in texts])
    image *= torch.tensor([[float(one is not None)] for one in pictures])
    return torch.nn.functional.normalize(text + image, dim=-1).numpy()


def test_texts_and_pictures_are_added(made, tmp_path):
    theirs, folder = made
    embedder = load_two_towers(folder / "ours", "clip", batch_size=4)
    assert embedder.resize == "crop_openai"
    texts = [*TEXTS, *TEXTS]
    pictures = [picture(0), picture(1), picture(2), None, None, None]
    texts, pictures = [*texts[:4], texts[5]], [*pictures[:4], None]  # UniIR has no empty query
    expected = fused(theirs, folder, texts, pictures)
    found = embedder.embed_questions(texts, pictures)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found[0] - found[3]).max() > 0.05
    sources = [
        Source(f"s{n}", "text" if shown is None else "image", text, image=str(n))
        for n, (text, shown) in enumerate(zip(texts, pictures, strict=True))
    ]

    class Pixels:
        size = 32

        def pixels(self, row):
            return pictures[row]

    corpus = Corpus(sources, fingerprint="c")
    made = embedder.embed_sources(corpus, Pixels(), tmp_path / "e").vectors
    np.testing.assert_allclose(made, expected, atol=1e-5)


def test_feature_fusion_is_refused(made, tmp_path):
    _, folder = made
    refuses("as CLIP_FF has", convert, "clip", folder / "clip_ff.pth", tmp_path / "out")
