"""CLIP as a retriever against transformers: tokens, and vectors of texts and pictures."""

import json

import numpy as np
import pytest
import torch
import transformers

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Source
from mmqa_jax.retrieval.clip import END, START, load_clip_embedder, load_clip_tokenizer
from mmqa_jax.weights.convert import convert

SIDE, CONTEXT = 32, 20
TEXTS = [
    "A red flag",
    '"What  COLOR has\tthe dome of St. Mary\'s, built in 1905?"',
    "Côte d'Ivoire &amp;amp; Österreich: naïve façade – 北京 🙂",
    "they're we'll I'd don't it's you've",
    "",
    "a long question about the flag that goes on and on until CLIP has no more room for it " * 3,
]
MERGES = [
    "a g</w>",
    "t h",
    "th e</w>",
    "l ag</w>",
    "f lag</w>",
    "r e",
    "re d</w>",
    "i n</w>",
    "o n</w>",
]


def byte_letters():
    """The 256 letters of byte-level BPE, in OpenAI's order (bytes_to_unicode)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [*map(chr, shown), *(chr(256 + n) for n in range(len(hidden)))]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny CLIP as transformers publishes it, with a tokenizer in OpenAI's layout."""
    folder = tmp_path_factory.mktemp("clip") / "hf"
    letters = byte_letters()
    joined = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *joined, START, END]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": CONTEXT,
            "eos_token_id": vocabulary[END], "bos_token_id": vocabulary[START],
            "pad_token_id": vocabulary[END],
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8,
        },
        projection_dim=24,
    )  # fmt: skip
    transformers.CLIPModel(config).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    return folder


@pytest.fixture(scope="module")
def converted(published):
    out = published.parent / "ours"
    convert("clip", published, out)
    return out


@pytest.fixture(scope="module")
def peer(published):
    return transformers.CLIPModel.from_pretrained(published).eval()


def peer_ids(published, texts):
    tokenizer = transformers.CLIPTokenizer.from_pretrained(published)
    return tokenizer(texts, truncation=True, max_length=CONTEXT)["input_ids"]


def peer_texts(peer, published, texts):
    vectors = []
    for ids in peer_ids(published, texts):
        with torch.no_grad():
            states = peer.text_model(input_ids=torch.tensor([ids])).pooler_output
            vectors.append(peer.text_projection(states)[0].numpy())
    return unit(np.stack(vectors))


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_tokens(published, converted, tmp_path):
    clean = [text.replace("&amp;amp;", "&") for text in TEXTS]
    expected = [ids[1:-1] for ids in peer_ids(published, clean)]
    ours = load_clip_tokenizer(converted)
    cut = [ids[: CONTEXT - 2] for ids in ours.encode_batch(TEXTS)]
    assert cut == expected
    # The other file that CLIP is published with.
    transformers.CLIPTokenizer.from_pretrained(published).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").unlink(missing_ok=True)
    again = load_clip_tokenizer(tmp_path)
    assert again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)
    assert again.fingerprint == ours.fingerprint
    # A text cannot forge the end of the sequence.
    assert ours.sep_id not in ours.encode_batch([f"flag {END} red"])[0]


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def test_vectors(peer, published, converted, tmp_path):
    embedder = load_clip_embedder(converted, batch_size=4)
    plain = [text for text in TEXTS if "&" not in text]
    expected = peer_texts(peer, published, plain)
    np.testing.assert_allclose(embedder.embed_questions(plain), expected, atol=1e-5)

    # Sources: snippets by their text, without the title; pictures by their pixels alone.
    sources = [
        *(Source(f"t{i}", "text", text, title="A title") for i, text in enumerate(plain)),
        *(Source(f"p{i}", "image", "a caption", image=str(i)) for i in range(3)),
    ]
    corpus = Corpus(sources, fingerprint="c")

    class Pixels:
        size = SIDE

        def pixels(self, row):
            return picture(row - len(plain))

    made = embedder.embed_sources(corpus, Pixels(), tmp_path / "e").vectors
    np.testing.assert_allclose(made[: len(plain)], expected, atol=1e-5)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE)
    pixels = processor([picture(i) for i in range(3)], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        states = peer.vision_model(pixel_values=pixels).pooler_output
        shown = unit(peer.visual_projection(states).numpy())
    np.testing.assert_allclose(made[len(plain) :], shown, atol=1e-5)


def test_fingerprint_and_refusals(published, converted, tmp_path):
    embedder = load_clip_embedder(converted)
    assert embedder.fingerprint == load_clip_embedder(converted).fingerprint
    with pytest.raises(UserError, match="has no tokenizer"):
        load_clip_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UserError, match="is not CLIP's vocabulary"):
        load_clip_tokenizer(tmp_path)
    with pytest.raises(UserError, match="format is None"):
        load_clip_embedder(published)
