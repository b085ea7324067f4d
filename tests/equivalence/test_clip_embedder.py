"""CLIP as a retriever against transformers: tokens, and vectors of texts and pictures."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from ml_collections import ConfigDict
from PIL import Image

from mmqa_jax.cli import main
from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.resize import to_pixels
from mmqa_jax.data.published_tokenizers import END, START, load_clip_tokenizer
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.text_encoder import load_two_towers
from mmqa_jax.tasks.embedder import load_embedder, open_embedder
from mmqa_jax.tasks.run import run_training
from mmqa_jax.weights.convert import convert
from tests.pictures import encoded
from tests.refusals import refuses

SIDE, CONTEXT = 32, 20
TEXTS = [
    "A red flag",
    '"What  COLOR has\tthe dome of St. Mary\'s, built in 1905?"',
    "Côte d'Ivoire &amp;amp; Österreich: naïve façade – 北京 🙂",
    "they're we'll I'd don't it's you've",
    "",
    "a long question about the flag that goes on and on until CLIP has no more room for it " * 3,
]
# Texts of which OpenAI's code makes others first (ftfy, HTML entities), and these.
BROKEN = [
    "“the ﬂag” &lt;red&gt; in theâ€™s sun",
    "It&amp;#39;s  a ﬁne\u00a0flag… ",
    "Ａ ｒｅｄ flag \u2028 e\u0301t &eacute;t",
]
REPAIRED = ['"the flag" <red> in the\'s sun', "it's a fine flag…", "a red flag ét ét"]
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


def peer_texts(peer, published, texts, scale=True):
    vectors = []
    for ids in peer_ids(published, texts):
        with torch.no_grad():
            states = peer.text_model(input_ids=torch.tensor([ids])).pooler_output
            vectors.append(peer.text_projection(states)[0].numpy())
    return unit(np.stack(vectors)) if scale else np.stack(vectors)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_tokens(published, converted, tmp_path):
    ours = load_clip_tokenizer(converted)
    for texts in (TEXTS, BROKEN):
        cut = [ids[: CONTEXT - 2] for ids in ours.encode_batch(texts)]
        assert cut == [ids[1:-1] for ids in peer_ids(published, texts)]
    # The other file that CLIP is published with.
    transformers.CLIPTokenizer.from_pretrained(published).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").unlink(missing_ok=True)
    again = load_clip_tokenizer(tmp_path)
    assert again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)
    assert again.fingerprint == ours.fingerprint
    # A text cannot forge the end of the sequence.
    assert ours.sep_id not in ours.encode_batch([f"flag {END} red"])[0]


def test_texts_are_prepared_as_by_openai(published, converted, tmp_path):
    """openai/CLIP clip/simple_tokenizer.py: ftfy.fix_text, html.unescape twice, strip."""
    ours = load_clip_tokenizer(converted, "openai")
    plain = load_clip_tokenizer(converted)
    assert ours.encode_batch(BROKEN) == plain.encode_batch(REPAIRED)
    assert ours.encode_batch(BROKEN) != plain.encode_batch(BROKEN)
    assert ours.fingerprint != plain.fingerprint
    # What training saves stays what it is.
    for tokenizer in (ours, plain):
        tokenizer.save(tmp_path / "tokenizer.json")
        again = load_clip_tokenizer(tmp_path)
        assert again.preprocessing == tokenizer.preprocessing
        assert again.encode_batch(BROKEN) == tokenizer.encode_batch(BROKEN)
    # The option of a conversion.
    convert("clip", published, tmp_path / "as_openai", preprocessing="openai")
    assert load_clip_tokenizer(tmp_path / "as_openai").preprocessing == "openai"
    assert load_two_towers(tmp_path / "as_openai", "clip").resize == "crop_openai"
    assert load_two_towers(converted, "clip").resize == "crop"
    record = json.loads((converted / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(record | {"layout": "openai"}))
    assert load_clip_tokenizer(tmp_path).preprocessing == "openai"
    (tmp_path / "model.json").write_text(json.dumps(record | {"preprocessing": "other"}))
    refuses("preprocessing is 'other': expected one of openai, tr", load_clip_tokenizer, tmp_path)


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def test_vectors(peer, published, converted, tmp_path):
    embedder = load_two_towers(converted, "clip", batch_size=4)
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

    # As the towers give them, for RMR's mean of both (equation 2).
    longer = embedder.unscaled()
    assert longer.fingerprint != embedder.fingerprint
    texts = peer_texts(peer, published, plain, scale=False)
    assert np.ptp(np.linalg.norm(texts, axis=1)) > 1e-3  # their lengths say something
    np.testing.assert_allclose(longer.embed_questions(plain), texts, atol=1e-5)
    whole = longer.embed_pictures([picture(i) for i in range(3)])
    np.testing.assert_allclose(whole, peer.visual_projection(states).detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(embedder.embed_questions(plain), expected, atol=1e-5)  # unchanged


@pytest.mark.parametrize("size", [(640, 427), (427, 640), (500, 375), (333, 500), (301, 300)])
def test_the_crop_of_each_code(size):
    """torchvision's CenterCrop: int(round((side - crop) / 2)); CLIPImageProcessor: (...) // 2."""
    drawn = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(drawn)
    short = min(size)
    scaled = image.resize([int(224 * side / short) for side in size], Image.Resampling.BICUBIC)
    left, top = (int(round((side - 224) / 2.0)) for side in scaled.size)  # noqa: RUF046
    wanted = np.asarray(scaled.crop((left, top, left + 224, top + 224)))
    np.testing.assert_array_equal(to_pixels(image, 224, "crop_openai"), wanted)
    processor = transformers.CLIPImageProcessorPil(
        do_normalize=False, do_rescale=False, do_resize=False
    )
    theirs = processor(np.asarray(scaled), return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(to_pixels(image, 224, "crop"), theirs.transpose(1, 2, 0))
    odd = (max(scaled.size) - 224) % 4 == 3  # the half pixel is rounded up
    assert (to_pixels(image, 224, "crop") != wanted).any() == odd


class Seen:
    """An index that keeps the queries."""

    def search(self, queries, top_k):
        self.queries = queries
        return np.zeros((len(queries), top_k), np.int32), np.zeros((len(queries), top_k))


def test_webqas_retriever_reads_as_its_authors_did(peer, published, converted):
    """CLIP_img_encodings.py and the notebook: alpha dropped after resizing, raw questions."""
    drawn = np.random.default_rng(0).integers(0, 256, (3 * SIDE, 2 * SIDE, 4), dtype=np.uint8)
    corpus = Corpus([Source("0", "image", "", image="0")], [], lambda name: encoded(drawn))
    embedder, pictures = open_embedder(converted, corpus)
    scaled = Image.fromarray(drawn).resize((SIDE, 3 * SIDE // 2), Image.Resampling.BICUBIC)
    top = SIDE // 4
    wanted = scaled.crop((0, top, SIDE, top + SIDE)).convert("RGB")
    np.testing.assert_array_equal(pictures.pixels(0), np.asarray(wanted))

    quoted, index = '"A red flag in the sun?"', Seen()
    retriever = DenseRetriever(corpus, embedder, index, pictures)
    retriever.search([Question("q", "val", quoted)], 1)
    raw, bare = peer_texts(peer, published, [quoted, quoted.strip('"')])
    np.testing.assert_allclose(index.queries[0], raw, atol=1e-5)
    assert np.abs(raw - bare).max() > 1e-3


def test_questions_ask_by_their_picture_their_text_or_both(peer, published, converted):
    """Entity by picture: the picture's vector is transformers'; without one nothing is found."""
    pixels = {"0": picture(3), "1": picture(4)}

    def read(name):
        return encoded(pixels[name])

    sources = [Source(name, "image", "", image=name) for name in pixels]
    corpus = Corpus(sources, [], read)
    embedder, pictures = open_embedder(converted, corpus)
    asked = [Question("q", "val", TEXTS[0], image="1"), Question("r", "val", TEXTS[0])]
    vectors = embedder.embed_rows(corpus, pictures, [0, 1])
    index = ExactIndex(Embeddings(vectors, embedder.fingerprint, corpus.fingerprint))
    found = DenseRetriever(corpus, embedder, index, pictures, "picture").search(asked, 2)
    assert [ranking.sources for ranking in found] == [("1", "0"), ()]
    assert found[0].scores[0] == pytest.approx(1, abs=1e-5)
    within = [Ranking(q.id, ("0",), (0.0,)) for q in asked]
    by_picture = DenseRetriever(corpus, embedder, index, pictures, "picture")
    assert [r.sources for r in by_picture.search_within(asked, within)] == [("0",), ()]

    text = peer_texts(peer, published, TEXTS[:1])[0]
    (both,) = unit((text + vectors[1])[None])
    for asks, query in (("text", text), ("both", both)):
        (first, _) = DenseRetriever(corpus, embedder, index, pictures, asks).search(asked, 2)
        wanted = dict(zip("01", vectors @ query, strict=True))
        for name, score in zip(first.sources, first.scores, strict=True):
            assert score == pytest.approx(wanted[name], abs=1e-5)
    blind = SimpleNamespace(image_size=0)
    with pytest.raises(UserError, match="asks=picture: the encoder reads texts alone"):
        DenseRetriever(corpus, blind, index, pictures, "picture")


def test_the_verbs_find_the_entity_by_its_picture(converted, tmp_path):
    """Encyclopedic-VQA's questions over infoseek_wiki's articles: the same pixels are nearest."""
    names = ["Lion", "Cat", "Owl"]
    wiki, raw = tmp_path / "wiki", tmp_path / "raw"
    (wiki / "images").mkdir(parents=True)
    entries, rows = {}, ["question,answer,question_type,dataset_name,dataset_image_ids,"
                         "wikipedia_url,wikipedia_title"]  # fmt: skip
    for n, name in enumerate(names):
        Image.fromarray(picture(n)).save(wiki / "images" / f"{name}.png")
        shown = raw / "landmarks" / "0" / "0" / str(n) / f"00{n}.jpg"
        shown.parent.mkdir(parents=True)
        shown.write_bytes((wiki / "images" / f"{name}.png").read_bytes())
        entries[name] = {
            "title": name, "section_titles": [name], "section_texts": ["A red flag."],
            "image_urls": [f"x/{name}.png"], "image_reference_descriptions": [name],
            "image_section_indices": [0],
        }  # fmt: skip
        rows.append(f"A red flag,x,templated,landmarks,00{n},{name},{name}")
    (wiki / "encyclopedic_kb_wiki.json").write_text(json.dumps(entries))
    (raw / "test.csv").write_text("\n".join([*rows, ""]))
    data, sources, index = (tmp_path / folder for folder in ("data", "sources", "index"))
    found = tmp_path / "found.jsonl"
    for verb in (
        ["prepare", "infoseek_wiki", f"--raw={wiki}", f"--out={sources}"],
        ["prepare", "evqa", f"--raw={raw}", f"--out={data}"],
        ["embed", f"--data={sources}", f"--model={converted}", f"--out={index}"],
        ["index", f"--embeddings={index}", "--kind=exact"],
        [
            "search", f"--data={data}", f"--sources={sources}", "--method=dense", "--asks=picture",
            "--modality=image", f"--model={converted}", f"--index={index}", f"--out={found}",
        ],
    ):  # fmt: skip
        assert main(verb) == 0, verb
    ranked = [json.loads(line) for line in found.read_text().splitlines()]
    assert [one["sources"][0] for one in ranked] == [f"{name}#picture1" for name in names]
    assert all(one["scores"][0] == pytest.approx(1, abs=1e-5) for one in ranked)
    assert all(len(one["sources"]) == 3 for one in ranked)  # no passages


def test_fingerprint_and_refusals(published, converted, tmp_path):
    embedder = load_two_towers(converted, "clip")
    assert embedder.fingerprint == load_two_towers(converted, "clip").fingerprint
    refuses("has no tokenizer", load_clip_tokenizer, tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    refuses("is not CLIP's vocabulary", load_clip_tokenizer, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(published, other)
    vocabulary = json.loads((published / "vocab.json").read_text())
    for more in ({END: len(vocabulary)}, {"flags</w>": len(vocabulary)}):
        (other / "vocab.json").write_text(json.dumps(vocabulary | more))
        with pytest.raises(UserError, match=f"do not fit the model's {len(vocabulary)} tokens; "):
            load_two_towers(other, "clip")
    # As transformers publishes it, without a conversion.
    assert load_two_towers(published, "clip").fingerprint == embedder.fingerprint


# Training that goes on from CLIP (configs/webqa/contrastive.py)

SIZES = {"width": 32, "layers": 2, "heads": 2, "mlp_width": 48, "embed_dim": 24}


def start_config(converted, **changes):
    """The published experiment at the tiny CLIP's sizes, one step that moves nothing."""
    config = load_config(Path(__file__).parents[2] / "configs/webqa/contrastive.py")
    config.init = str(converted)
    config.pictures.size = SIDE
    vocabulary = len(json.loads((converted / "vocab.json").read_text()))
    config.model.changes = {**SIZES, "vocab_size": vocabulary, "context": CONTEXT}
    config.model.vision = {**SIZES, "image_size": SIDE, "patch_size": 8}
    config.batches.update(batch_size=2, query_length=12, source_lengths=(CONTEXT,), threads=0)
    config.train.update(steps=1, log_every=1, evaluate_every=0)
    config.train.optimizer.update(learning_rate=1e-30, warmup=0)
    config.inference.buckets = (CONTEXT,)
    config.update_from_flattened_dict(changes)
    return config


@pytest.fixture
def flags_corpus():
    sources = [Source(f"s{i}", "text", text) for i, text in enumerate(TEXTS[:2])]
    questions = [
        Question(f"q{i}", "train", text, positives=(f"s{i}",)) for i, text in enumerate(TEXTS[:2])
    ]
    return Corpus(sources, questions, fingerprint="flags")


def test_training_starts_from_clip(converted, flags_corpus, tmp_path):
    run_training(start_config(converted), tmp_path / "run", flags_corpus)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    clip, trained = load_two_towers(converted, "clip"), load_embedder(tmp_path / "run")[0]
    texts = [text for text in TEXTS if text]
    vectors = trained.embed_questions(texts)
    np.testing.assert_allclose(vectors, clip.embed_questions(texts), atol=1e-5)
    # The loss of the step is that of CLIP's own vectors: each text is its own source.
    cosines = vectors[:2] @ vectors[:2].T
    scale = metrics[0]["temperature"]
    expected = np.mean(np.logaddexp(0, scale * (cosines[[0, 1], [1, 0]] - 1)))
    assert metrics[0]["loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "minilm"}, r"init=minilm: model\.clip=vit_b_16 .*folder of `mmqa con"),
        ({"model.vision.layers": 3}, r"this CLIP has vision\.layers 2 \(config: 3\); set"),
        ({"model.changes.width": 64}, r"this CLIP has text\.width 32 \(config: 64\)"),
        ({"batches.query_length": 21}, r"batches\.query_length: .*the text tower reads at most 20"),
        ({"tower_parts": 3}, r"batch of 2: must be a multiple of 3"),
        ({"train.accumulate": 2}, r"needs its whole batch; leave it out and set tower_parts to 2"),
        (
            {"train.offload": "parameters", "tower_parts": 2},
            r"train\.offload=parameters: .* set it to",
        ),
    ],
)
def test_starts_that_are_refused(changes, message, converted, flags_corpus, tmp_path):
    config = start_config(converted, **changes)
    refuses(message, run_training, config, tmp_path / "run", flags_corpus)
    assert not (tmp_path / "run").exists()


def test_clip_needs_its_own_tokens(converted, flags_corpus, tmp_path):
    config = ConfigDict({**start_config(converted).to_dict(), "tokenizer": "minilm"})
    with pytest.raises(UserError, match=r"tokenizer=minilm: .*name the folder of a converted CLIP"):
        run_training(config, tmp_path / "run", flags_corpus)
