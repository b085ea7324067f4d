"""Encoders with a vector for each token beside sentence-transformers' MultiVectorEncoder, float32.

sentence-transformers also reads PyLate's and Stanford's folders; here those are written as these
tools publish them.
"""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import torch
from compare import WHOLE
from tiny_encoders import QUESTIONS, save_plain, texts

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.inference.cross_encoder import LateInteractionReranker, open_cross_encoder
from mmqa_jax.models.encoders.late_interaction import read_late_interaction
from mmqa_jax.retrieval.embeddings import TokenFormat
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.late_interaction import FixedVectors, dense_retriever
from mmqa_jax.tasks.embedder import open_embedder
from tests.refusals import refuses

pytestmark = pytest.mark.slow

PASSAGES = texts(300)
QUERIES = [*QUESTIONS, " ".join(texts(40)[2].split()[:38])]
ENCODER, SETTINGS = "sentence_bert_config.json", "config_sentence_transformers.json"


def native(
    name,
    folder,
    *,
    expansion=None,
    skipped=(),
    prompts=None,
    mean=False,
    residual=False,
    pooling=None,
):
    """A folder of sentence-transformers 6."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import (
        HierarchicalTokenPooling,
        MultiVectorMask,
    )

    plain = folder.with_name(f"{folder.name}-plain")
    # A token that nothing within its window is seen of has no defined state.
    save_plain(name, plain, **({"local_attention": 80} if name == "modernbert" else {}))
    torch.manual_seed(2)
    lengths = {"query_length": 34, "document_length": 200}
    encoder = Transformer(str(plain), max_seq_length=400, query_expansion=expansion, **lengths)
    of_tokens = {"module_input_name": "token_embeddings", "bias": False}
    dense = [Dense(36, 48, activation_function=torch.nn.Identity(), **of_tokens)]
    if residual:
        dense = [
            Dense(36, 24, activation_function=torch.nn.Tanh(), use_residual=True, **of_tokens),
            Dense(24, 24, activation_function=torch.nn.Identity(), use_residual=True, **of_tokens),
        ]
    mask = MultiVectorMask(skiplist_words=list(skipped))
    modules = [encoder, *dense, mask, Normalize(module_input_name="token_embeddings")]
    if pooling is not None:
        modules.append(HierarchicalTokenPooling(**pooling))
    model = MultiVectorEncoder(
        modules=modules,
        device="cpu",
        prompts=prompts,
        similarity_fn_name="meanmaxsim" if mean else None,
    )
    model.save_pretrained(str(folder))


def pylate(folder, **more):
    """PyLate's: settings beside the prompts, a Dense that does not say what it is over."""
    native("modernbert", folder)
    shutil.rmtree(folder / "2_MultiVectorMask", ignore_errors=True)
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": 0,
                    "name": "0",
                    "path": "",
                    "type": "sentence_transformers.models.Transformer",
                },
                {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
            ]
        )
    )
    sizes = {"in_features": 36, "out_features": 48, "bias": False}
    identity = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(
        json.dumps(sizes | {"activation_function": identity})
    )
    (folder / ENCODER).write_text(json.dumps({"max_seq_length": 199, "do_lower_case": False}))
    settings = {"query_prefix": "[unused0]", "document_prefix": "the ", "model_type": "ColBERT"}
    settings |= {"query_length": 32, "document_length": 180, "similarity_fn_name": "MaxSim"}
    settings |= {"attend_to_expansion_tokens": False, "do_query_expansion": True, "prompts": {}}
    (folder / SETTINGS).write_text(json.dumps(settings | more))


def stanford(folder):
    """Stanford's: a BERT with the linear layer among its tensors."""
    save_plain("bert", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    file = folder / "model.safetensors"
    tensors = {f"bert.{key}": x for key, x in safetensors.numpy.load_file(file).items()}
    weight = np.random.default_rng(1).normal(size=(20, 36)).astype(np.float32)
    safetensors.numpy.save_file(
        tensors | {"linear.weight": weight}, file, metadata={"format": "pt"}
    )
    settings = {"query_token_id": "[SEP]", "doc_token_id": "of", "query_maxlen": 24}
    settings |= {"doc_maxlen": 150, "attend_to_mask_tokens": True, "mask_punctuation": True}
    (folder / "artifact.metadata").write_text(json.dumps(settings))


FIXED = {"strategy": "fixed", "length": 32, "attend": False}
MINIMUM = {"strategy": "min", "length": 12, "attend": True}
MAKERS = {
    "bert": lambda folder: native("bert", folder, expansion=FIXED, skipped=".,?"),
    "modernbert": lambda folder: native("modernbert", folder, expansion=MINIMUM, residual=True),
    "gte": lambda folder: native(
        "gte", folder, prompts={"query": "which: ", "document": "of "}, mean=True
    ),
    "pooled": lambda folder: native("bert", folder, pooling={"pool_factor": 2.5}),
    "pooled, both sides": lambda folder: native(
        "bert",
        folder,
        skipped=".,",
        pooling={
            **{"pool_factor": 3.0, "num_protected_tokens": 0, "normalize_embeddings": False},
            "tasks": ["query", "document"],
        },
    ),
    "pylate": pylate,
    "pylate_without_expansion": lambda folder: pylate(
        folder, do_query_expansion=False, skiplist_words=["the", "flag"]
    ),
    "stanford": stanford,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_vectors_and_scores_are_those_of_sentence_transformers(
    maker, tmp_path, sentence_transformers
):
    folder = tmp_path / "model"
    MAKERS[maker](folder)
    theirs = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu")
    corpus = corpus_of_lists(PASSAGES, None, None, None)
    ours = open_cross_encoder(folder, corpus, batch_size=3)
    assert isinstance(ours, LateInteractionReranker)
    wanted, embedder = {}, open_embedder(folder, corpus, {"batch_size": 3})[0]
    for name, encode, encoded, given in (
        ("query", theirs.encode_query, ours.encode_questions, QUERIES),
        ("document", theirs.encode_document, ours.encode_sources, PASSAGES),
    ):
        wanted[name] = encode(given)
        for vectors, scored, want in zip(*encoded(given), wanted[name], strict=True):
            assert scored.sum() == len(want)
            np.testing.assert_allclose(vectors[scored], want, **WHOLE)
        for places, _, tokens in embedder.encode_tokens(given, name):
            for place, vectors in zip(places, tokens, strict=True):
                np.testing.assert_allclose(vectors, wanted[name][place], **WHOLE)
    want = theirs.similarity(wanted["query"], wanted["document"]).numpy()
    names = tuple(source.id for source in corpus.sources)
    questions = [Question(str(n), "", text) for n, text in enumerate(QUERIES)]
    candidates = [Ranking(q.id, names[n > 1 :], (0.0,) * len(names[n > 1 :]))
                  for n, q in enumerate(questions)]  # fmt: skip
    for n, ranking in enumerate(ours.score(questions, candidates)):
        rows = [corpus.row[name] for name in ranking.sources]
        assert sorted(rows) == list(range(n > 1, len(names)))
        np.testing.assert_allclose(ranking.scores, want[n][rows], rtol=1e-5, atol=1e-5)
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)


@pytest.mark.parametrize("is_question", [True, False])
def test_fixed_vectors_are_those_of_the_paper(is_question):
    """MUVERA's section 2, cell by cell."""
    fixed = FixedVectors(repetitions=3, planes=2, projected=5, seed=4)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(2, 6, 7)).astype(np.float32)
    scored = np.array([[1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0]], bool)
    got = np.asarray(fixed.of(vectors, scored, is_question))
    draws = np.random.default_rng(4)
    planes = draws.standard_normal((3, 7, 2)).astype(np.float32)
    signs = draws.choice([-1, 1], (3, 7, 5))
    for row, (of_text, used) in enumerate(zip(vectors, scored, strict=True)):
        blocks = []
        for repetition in range(3):
            tokens = [(tuple(x @ planes[repetition] > 0), x @ signs[repetition])
                      for x in of_text[used]]  # fmt: skip
            for number in range(4):
                corner = bool(number & 1), bool(number & 2)
                inside = [projected for cell, projected in tokens if cell == corner]
                if is_question:
                    blocks.append(np.sum(inside, 0) if inside else np.zeros(5))
                elif inside:
                    blocks.append(np.mean(inside, 0))
                else:
                    far = [sum(a != b for a, b in zip(cell, corner, strict=True))
                           for cell, _ in tokens]  # fmt: skip
                    blocks.append(tokens[int(np.argmin(far))][1])
        want = np.concatenate(blocks)
        np.testing.assert_allclose(got[row], want / np.linalg.norm(want), atol=1e-6)


def test_fixed_vectors_of_an_encoder_are_those_of_its_tokens(folder):
    """Whatever the batch."""
    corpus = corpus_of_lists([*PASSAGES, *(QUERIES * 2)], None, None, None)
    ours = open_cross_encoder(folder, corpus, batch_size=3)
    embedder, _ = open_embedder(folder, corpus, {"batch_size": 2})
    fixed, given = FixedVectors(), [source.text for source in corpus.sources]
    for got, (vectors, scored), is_question in (
        (embedder.embed_questions(QUERIES), ours.encode_questions(QUERIES), True),
        (embedder.embed_passages(given), ours.encode_sources(given), False),
    ):
        assert got.shape == (len(vectors), embedder.dim) == (len(vectors), 20 * 16 * 16)
        np.testing.assert_allclose(got, fixed.of(vectors, scored, is_question), **WHOLE)


@pytest.mark.parametrize("stored", [True, False])
def test_search_ranks_by_max_sim(folder, stored, tmp_path, sentence_transformers):
    """Tokens that were stored as float16, or are encoded when they are candidates."""
    theirs = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu")
    want = theirs.similarity(theirs.encode_query(QUERIES), theirs.encode_document(PASSAGES)).numpy()
    corpus = corpus_of_lists(PASSAGES, None, None, None)
    embedder, pictures = open_embedder(folder, corpus, {"batch_size": 4})
    if stored:
        embedder.store_tokens(TokenFormat("float16"))
    embeddings = embedder.embed_sources(corpus, pictures, tmp_path)
    assert (embeddings.tokens is not None) == stored
    retriever = dense_retriever(corpus, embedder, ExactIndex(embeddings), pictures)
    questions = [Question(str(n), "", text) for n, text in enumerate(QUERIES)]
    names = [source.id for source in corpus.sources]
    for row, ranking in enumerate(retriever.search(questions, len(PASSAGES))):
        scores = want[row][[names.index(name) for name in ranking.sources]]
        np.testing.assert_allclose(ranking.scores, scores, atol=2e-3)
        assert len(set(ranking.sources)) == len(PASSAGES)
    own = [Ranking(question.id, (names[3], names[1]), (0.0, 0.0)) for question in questions]
    for row, ranking in enumerate(retriever.search_within(questions, own)):
        np.testing.assert_allclose(ranking.scores, np.sort(want[row][[1, 3]])[::-1], atol=2e-3)


REFUSED = [
    ("4_HierarchicalTokenPooling/config.json", {"pool_factor": 0.5}, "a pool_factor of 1 or more"),
    (SETTINGS, {"similarity_fn_name": "maxsim", "default_prompt_name": "query"}, "default_prompt"),
    (ENCODER, {"query_expansion": {"strategy": "all", "length": 3}}, "'fixed' or 'min'"),
    (ENCODER, {"query_expansion": {**FIXED, "times": 2}}, "'times'"),
    ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids"),
    ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name"),
    ("1_Dense/config.json", {"in_features": 33}, "in_features is 33, but vectors have 36"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late") / "model"
    native("bert", folder, expansion=FIXED, pooling={"pool_factor": 1.0})
    return folder


@pytest.mark.parametrize(("file", "change", "message"), REFUSED)
def test_folders_that_are_refused(folder, file, change, message, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=message):
        open_cross_encoder(copy, corpus_of_lists(["a"], None, None, None))


def test_stanford_files_that_are_refused(tmp_path):
    folder = tmp_path / "model"
    stanford(folder)
    corpus = corpus_of_lists(["a"], None, None, None)
    content = json.loads((folder / "artifact.metadata").read_text())
    (folder / "artifact.metadata").write_text(json.dumps(content | {"query_maxlen": "32"}))
    refuses(r"artifact\.metadata: query_maxlen is '32'", open_cross_encoder, folder, corpus)
    (folder / "artifact.metadata").write_text(json.dumps(content))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    del tensors["linear.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    refuses(r"lacks linear\.weight", open_cross_encoder, folder, corpus)


def test_questions_without_candidates_have_no_scores(folder):
    ours = open_cross_encoder(folder, corpus_of_lists(["a"], None, None, None))
    assert ours.score([], []) == []
    assert ours.score([Question("0", "", "which flag?")], [Ranking("0", (), ())])[0].sources == ()


def test_layers_that_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    modules = json.loads((copy / "modules.json").read_text())
    pooling = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalPooling"
    modules.append({"idx": 9, "name": "9", "path": "9_Pooling", "type": pooling})
    (copy / "modules.json").write_text(json.dumps(modules))
    refuses("holds the layer 'HierarchicalPooling'", read_late_interaction, copy)
