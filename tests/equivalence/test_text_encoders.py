"""Text encoders and cross-encoders beside transformers and sentence-transformers, float32.

The next family is one entry in tests/tiny_encoders.FAMILIES.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from compare import LAYER, WHOLE, alone, compiled
from tiny_encoders import FAMILIES, QUESTIONS, save_plain, save_sentences, texts

from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.tokenizers import cut_longest
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.models.encoders.text_encoders import load_text_encoder
from mmqa_jax.retrieval.text_encoder import load_text_embedder
from mmqa_jax.weights.bundled import minilm_path

CLASSIFIERS = [name for name, family in FAMILIES.items() if family.classifier]
PROMPTS = {"query": "which flag: ", "document": "of kenya: "}


def few(longest: int = 500) -> list[str]:
    """A short text and the longest, which is cut."""
    made = texts(longest)
    return [made[1], made[-1]]


@pytest.fixture(params=FAMILIES)
def plain(request, tmp_path):
    """(folder, transformers' model) of each family."""
    return tmp_path, save_plain(request.param, tmp_path)


@pytest.mark.parametrize("plain", ["xlm-roberta", "mpnet"], indirect=True)
def test_each_layer(plain):
    """BERT's own, and ModernBERT's, are in their files."""
    folder, theirs = plain
    ours = load_text_encoder(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(few(), padding=True, truncation=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    assert batch["input_ids"].shape[1] > 500
    with torch.no_grad():
        states = theirs(**batch, output_hidden_states=True).hidden_states
    states = np.stack([state.numpy() for state in states])  # [layers + 1, B, L, H]
    ids, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy().astype(bool)

    def run(model, ids, mask, states):
        if hasattr(model, "bias"):
            embedded, columns = model.embeddings(ids), mask
            seen = model.bias(mask)
        else:
            positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            embedded = model.embeddings(ids, positions, np.zeros(ids.shape, int))
            columns = seen = mask[:, None, None, :]
        each = alone(model.layers, lambda layer, x: layer(x, seen), states[:-1])
        return embedded, each, model.layer_outputs(embedded, columns), model(ids, mask)

    embedded, each, stacked, last = compiled(ours, run)(ids, mask, states)
    np.testing.assert_allclose(embedded[mask], states[0][mask], **LAYER)
    np.testing.assert_allclose(each[:, mask], states[1:, mask], **LAYER)
    np.testing.assert_allclose(stacked[:, mask], states[1:, mask], **WHOLE)
    np.testing.assert_allclose(last[mask], states[-1][mask], **WHOLE)


def test_tokens(plain):
    folder, theirs = plain
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_encoder_tokenizer(folder, theirs.config.vocab_size)
    given = [*texts(40), "Ünïcode  and\ttabs", "", "UPPER kenya"]
    wanted = tokenizer(given)["input_ids"]
    got = [[ours.cls_id, *ids, ours.sep_id] for ids in ours.encode_batch(given)]
    assert got == wanted
    assert (ours.pad_id, ours.max_tokens) == (tokenizer.pad_token_id, 540)
    for length in (20, 21, 60):
        pairs = tokenizer(
            given[:4], given[3::-1], truncation="longest_first", max_length=length,
            return_token_type_ids=True,
        )  # fmt: skip
        split = ours.encode_batch(given[:4])
        for n, second in enumerate(split[::-1]):
            ids, types = ours.pair(split[n], second, length)
            assert ids == pairs["input_ids"][n]
            assert types == pairs["token_type_ids"][n]


@pytest.mark.parametrize(
    ("name", "pooling", "longest", "options"),
    [  # every family; every pooling, of states whose padding has other ids and positions
        *((name, "mean", 500, {}) for name in FAMILIES),
        ("bert", "cls", 40, {"prompts": PROMPTS}),
        ("xlm-roberta", "lasttoken", 40, {"prompts": {"query": "which: "}, "truncate_dim": 20}),
    ],
)
def test_vectors_are_those_of_sentence_transformers(
    name, pooling, longest, options, tmp_path, sentence_transformers
):
    folder = tmp_path / "model"
    save_sentences(name, folder, pooling, **options)
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours = load_text_embedder(folder, batch_size=2)
    given = few(longest)
    for got, encode in (
        (ours.embed_questions(given), theirs.encode_query),
        (ours.embed_passages(given), theirs.encode_document),
    ):
        np.testing.assert_allclose(got, encode(given, normalize_embeddings=True), **WHOLE)
    assert ours.dim == options.get("truncate_dim", 36)
    differ = np.abs(ours.embed_questions(given) - ours.embed_passages(given)).max()
    assert (differ > 0.01) == ("prompts" in options)


def test_minilm_is_the_one_of_the_package(sentence_transformers):
    from mmqa_jax.retrieval.text_encoder import load_minilm_embedder

    given = ["The capital of Kenya is Nairobi. " + "bread " * 400]  # is cut
    ours = load_text_embedder(minilm_path(), batch_size=1)
    theirs = sentence_transformers.SentenceTransformer(str(minilm_path()), device="cpu")
    vectors = ours.embed_questions(given)
    np.testing.assert_allclose(vectors, theirs.encode(given), **WHOLE)
    np.testing.assert_array_equal(vectors, load_minilm_embedder(1).embed_questions(given))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_those_of_the_cross_encoder(name, tmp_path, sentence_transformers):
    save_plain(name, tmp_path, classifier=True, num_labels=1)
    theirs = sentence_transformers.CrossEncoder(
        str(tmp_path), device="cpu", activation_fn=torch.nn.Sigmoid()
    )
    given = [*few(), few(480)[-1]]
    corpus = corpus_of_lists(given, None, None, None)
    ours = open_cross_encoder(tmp_path, corpus, batch_size=4)
    questions = [Question(str(n), "", text) for n, text in enumerate(QUESTIONS)]
    names = tuple(source.id for source in corpus.sources)
    candidates = [
        Ranking(question.id, names[n > 0 :], (0.0,) * len(names[n > 0 :]))
        for n, question in enumerate(questions)
    ]
    for question, given_to, ranking in zip(
        questions, candidates, ours.score(questions, candidates), strict=True
    ):
        assert sorted(ranking.sources) == sorted(given_to.sources)
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)
        pairs = [
            (question.question, corpus.sources[corpus.row[name]].text) for name in ranking.sources
        ]
        np.testing.assert_allclose(ranking.scores, theirs.predict(pairs), **LAYER)
        assert np.ptp(ranking.scores) > 1e-3  # what is compared differs by more than is allowed


def test_the_longer_text_is_cut_first():
    long, short = list(range(10)), list(range(3))
    assert [len(part) for part in cut_longest(long, short, 9)] == [6, 3]
    assert [len(part) for part in cut_longest(short, long, 9)] == [3, 6]
    assert [len(part) for part in cut_longest(long, long, 9)] == [4, 5]


def test_older_files_say_the_same(tmp_path, sentence_transformers):
    """The switches of sentence-transformers before version 6, and texts in lower case."""
    save_plain("bert", tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    for file, content in {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 36, **pooling},
        "sentence_bert_config.json": {"max_seq_length": 30, "do_lower_case": True},
        "config_sentence_transformers.json": {"__version__": {"pytorch": "1"}, "prompts": PROMPTS},
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    }.items():
        (tmp_path / file).write_text(json.dumps(content))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    ours = load_text_embedder(tmp_path, batch_size=2)
    given = [*few(), "KENYA Is"]
    np.testing.assert_allclose(ours.embed_questions(given), theirs.encode_query(given), **WHOLE)
    assert ours.buckets[-1] == 30
