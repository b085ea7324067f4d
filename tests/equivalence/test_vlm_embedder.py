"""Qwen3-VL-Embedding beside transformers' Qwen3VLModel, run by the published recipe, float32."""

import io

import numpy as np
import pytest
import torch
from compare import WHOLE
from PIL import Image
from qwen_vl_prompts import Published, make_published, says, small_pictures, write_json
from safetensors.torch import load_file, save_file
from tiny_encoders import texts

import mmqa_jax as mmqa
from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.documents.pdf import page_pictures
from mmqa_jax.data.pictures.decode import decode_to_pixels
from mmqa_jax.data.pictures.resize import PictureShape
from mmqa_jax.retrieval.vlm_encoder import load_vlm_embedder
from mmqa_jax.tasks.embedder import open_embedder
from tests.pictures import encoded
from tests.refusals import refuses
from tests.unit.document_files import pdf

pytestmark = pytest.mark.slow

DEFAULT = "Represent the user's input."
WIDTH = 48


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Published:
    folder = tmp_path_factory.mktemp("vlm") / "Tiny-VL-Embedding"
    return make_published(folder, "$A", "<|endoftext|>")


@pytest.fixture(scope="module")
def ours(published):
    return load_vlm_embedder(published.folder, batch_size=2)


def vector(published, text=None, picture=None, instruction=DEFAULT) -> np.ndarray:
    """Qwen3VLEmbedder.process of one input: pictures first, the last token, of length 1."""
    content = [] if picture is None else [{"type": "image"}]
    content += [] if text is None else [says(text)]
    conversation = [
        {"role": "system", "content": [says(instruction)]},
        {"role": "user", "content": content},
    ]
    last = published.states(conversation, [] if picture is None else [picture])[-1]
    return torch.nn.functional.normalize(last, dim=0).numpy()


def pixels_of(embedder, picture) -> np.ndarray:
    shape: PictureShape = embedder.resize
    return decode_to_pixels(encoded(picture), embedder.image_size, shape, alpha=embedder.alpha)


# Splits of words at the frame's ends; 500 tokens and more; none.
TEXTS = ["\n\nwhich flag?", " a", "", texts(400)[-1][:700]]


def test_texts(published, ours):
    assert len(ours.tokenizer.encode_batch(TEXTS[-1:])[0]) > 500
    got = ours.embed_passages(TEXTS)
    np.testing.assert_allclose(got, [vector(published, text) for text in TEXTS], **WHOLE)
    np.testing.assert_allclose(ours.embed_questions(TEXTS), got, **WHOLE)
    assert ours.dim == WIDTH


def two_in_a_bucket() -> list[Image.Image]:
    """A picture lying and standing: both by one program."""
    second = small_pictures()[1]
    return [second.transpose(Image.Transpose.ROTATE_90), second]


def test_pictures_of_a_corpus_with_and_without_captions(published, ours):
    shown = [*two_in_a_bucket(), small_pictures()[2]]
    captions = ["", "two pandas", TEXTS[-1]]
    corpus = corpus_of_lists(
        [*captions, "a text"], ["", "Red", "", "Title"], [*map(encoded, shown), None], None
    )
    embedder, store = open_embedder(published.folder, corpus, {"batch_size": 2})
    got = embedder.embed_rows(corpus, store, range(4))
    want = [
        vector(published, None, shown[0]),
        vector(published, "Red two pandas", shown[1]),
        vector(published, captions[2], shown[2]),
        vector(published, "Title a text"),
    ]
    np.testing.assert_allclose(got, want, **WHOLE)
    # Both count: neither the text nor the picture alone has this vector.
    alone = vector(published, None, shown[1])
    assert np.abs(got[1] - alone).max() > 0.01
    assert np.abs(got[1] - vector(published, "Red two pandas")).max() > 0.01


def test_pictures_and_questions_with_pictures(published, ours):
    shown = two_in_a_bucket()
    pixels = [pixels_of(ours, one) for one in shown]
    want = [vector(published, None, one) for one in shown]
    np.testing.assert_allclose(ours.embed_pictures(pixels), want, **WHOLE)
    got = ours.embed_questions(["what is it?", "and this?"], [pixels[1], None])
    want = [vector(published, "what is it?", shown[1]), vector(published, "and this?")]
    np.testing.assert_allclose(got, want, **WHOLE)


def test_sizes_of_a_bucket_have_one_program(ours):
    sizes = [(40, 48), (48, 40), (56, 24), (24, 64)]  # of one bucket of patches and of lengths
    noise = np.random.default_rng(0)
    made = [noise.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    ours.embed_pictures(made[:2])
    programs = ours._encode_prompts._cache_size()
    ours.embed_pictures(made)
    ours.embed_pictures(made[2:3])
    assert ours._encode_prompts._cache_size() == programs


def test_files_of_sentence_transformers(published, tmp_path):
    """Instructions, a Matryoshka size, a shorter length; and weights saved without their head."""
    folder = tmp_path / "model"
    published.model.model.save_pretrained(folder)
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((published.folder / name).read_bytes())
    (folder / "chat_template.jinja").write_bytes(
        (published.folder / "chat_template.jinja").read_bytes()
    )
    (folder / "config.json").write_bytes((published.folder / "config.json").read_bytes())
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": n, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    pooling = {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken", "include_prompt": True}
    write_json(folder / "1_Pooling/config.json", pooling)
    encoder = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    write_json(folder / "sentence_bert_config.json", encoder | {"max_seq_length": 3000})
    prompts = {"prompts": {"query": "Find flags.", "document": ""}, "truncate_dim": 20}
    write_json(folder / "config_sentence_transformers.json", prompts)
    # As transformers 4 saves a Qwen3VLModel.
    file = folder / "model.safetensors"
    tensors = {key.removeprefix("model."): value for key, value in load_file(file).items()}
    assert not any(key.startswith("lm_head") for key in tensors)
    save_file(tensors, file)
    ours = load_vlm_embedder(folder, batch_size=2)
    asked = vector(published, "which?", None, "Find flags.")[:20]
    np.testing.assert_allclose(
        ours.embed_questions(["which?"])[0], asked / np.linalg.norm(asked), **WHOLE
    )
    source = vector(published, "which?")[:20]
    np.testing.assert_allclose(
        ours.embed_passages(["which?"])[0], source / np.linalg.norm(source), **WHOLE
    )
    assert ours.buckets[-1] == 3000
    write_json(folder / "1_Pooling/config.json", pooling | {"pooling_mode": "mean"})
    refuses(r"pooling 'mean'.*the last token's state alone", load_vlm_embedder, folder)
    write_json(folder / "1_Pooling/config.json", pooling)
    write_json(folder / "config_sentence_transformers.json", prompts | {"truncate_dim": 49})
    refuses("truncate_dim keeps 49 values of vectors of 48; correct", load_vlm_embedder, folder)
    write_json(folder / "config_sentence_transformers.json", prompts)
    write_json(folder / "sentence_bert_config.json", encoder | {"max_seq_length": 1000})
    refuses("prompts of 1000 tokens, and a picture may have 1800", load_vlm_embedder, folder)


def test_a_longer_text_loses_its_end(published, tmp_path):
    """Never what follows it, of which the vector is made."""
    ours = load_vlm_embedder(published.folder, batch_size=1)
    long = "flag " * 2000
    (prompt,) = ours._prompts([long], [None], DEFAULT)
    (short,) = ours._prompts(["flag"], [None], DEFAULT)
    assert len(prompt.tokens) == ours.buckets[-1] == 4096
    assert list(prompt.tokens[-8:]) == list(short.tokens[-8:])


def test_texts_and_pages_share_an_index(published, tmp_path, fresh_cache, monkeypatch):
    """`mmqa ask --data --pages=both`, from Python: a page is found by its pixels, and cited."""
    monkeypatch.setenv("MMQA_CACHE", str(fresh_cache))
    # On a CPU passages' products may be rounded to bfloat16.
    monkeypatch.setattr("mmqa_jax.runs.ask_folder._products", lambda: "highest")
    lines = [(20, 700, "Filters"), (10, 660, "Wash the filter.")]
    data = pdf([lines, []], box="60 655 160 725")
    (tmp_path / "manuals").mkdir()
    (tmp_path / "manuals" / "manual.pdf").write_bytes(data)
    corpus = mmqa.open_corpus(tmp_path / "manuals", pages="both")
    retriever = mmqa.open_retriever(corpus, "dense", encoder=published.folder)
    found = {one.source.id: one for one in retriever.search("Which filter?", 10)}
    asked = vector(published, "Which filter?")
    shown = [Image.open(io.BytesIO(page.picture)) for page in page_pictures(data)]
    want = {
        "manual.pdf#1": vector(published, "Filters Wash the filter."),
        "manual.pdf#page1": vector(published, "Filters", shown[0]),
        "manual.pdf#page2": vector(published, "manual", shown[1]),
    }
    assert {*found} == {*want}
    for name, of_source in want.items():
        np.testing.assert_allclose(found[name].score, asked @ of_source, **WHOLE)
    extra = found["manual.pdf#page2"].source.extra
    assert (extra["file"], extra["page"]) == ("manual.pdf", 2)


def test_what_is_refused(published, ours, tmp_path):
    corpus = corpus_of_lists(["a"], None, None, None)
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in published.folder.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    refuses(r"without modules\.json, and its path does not say", open_embedder, plain, corpus)
    named = tmp_path / "plain-Embedding"
    plain.rename(named)
    (named / "chat_template.jinja").write_text("{{ messages[1].content[0].text }}")
    embedder, _ = open_embedder(named, corpus)
    assert embedder.fingerprint != ours.fingerprint  # only the template is another
    refuses("does not put the instruction, each text and", embedder.embed_texts, ["a"])
    (named / "chat_template.jinja").unlink()
    refuses("has no chat template", open_embedder, named, corpus)
    config = (named / "config.json").read_text()
    (named / "config.json").write_text(config.replace('"qwen3_vl"', '"qwen2_vl"'))
    refuses("holds a qwen2_vl, which GME and others", open_embedder, named, corpus)
