"""Published text encoders and rerankers: what their files say, refusals, and the verbs by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_runs import done, mmqa, rows_of, write_rows
from huggingface_hub import constants
from tiny_encoders import save_plain

import mmqa_jax
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus, corpus_of_lists
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.models.encoders.sentence_pooling import (
    Prompts,
    SentenceRecipe,
    check_logit_prompts,
    read_pair_length,
    read_recipe,
)
from mmqa_jax.models.encoders.text_encoders import (
    load_cross_encoder,
    load_text_encoder,
    published_folder,
)
from mmqa_jax.retrieval.text_encoder import load_minilm_embedder, load_text_embedder
from mmqa_jax.runs import ask_folder, part
from mmqa_jax.tasks.embedder import open_embedder
from mmqa_jax.weights.hub import find_model, is_cached
from tests.refusals import refuses

pytestmark = pytest.mark.slow

PROMPTS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
POOLING = "1_Pooling/config.json"
MODULES = "modules.json"
TEXTS = ["the capital of kenya is nairobi.", "the flag has a green cedar.", "clean the filter."]


def modules(*kinds: str) -> list[dict[str, str]]:
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    name = "sentence_transformers.models"
    return [{"path": places.get(kind, "x"), "type": f"{name}.{kind}"} for kind in kinds]


def write(folder, **files):
    """JSON files by their names, a folder's after `__`: `1_Pooling__config`."""
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def test_a_folder_without_files_is_a_mean(tmp_path):
    assert read_recipe(tmp_path) == SentenceRecipe()


def test_what_the_files_say(tmp_path):
    write(
        tmp_path,
        modules=modules("Transformer", "Pooling", "Normalize"),
        sentence_bert_config={"max_seq_length": 300, "do_lower_case": True},
        config_sentence_transformers={
            "__version__": {"pytorch": "2"}, "prompts": {"query": "q: ", "passage": "p: ", "STS": "s"},
            "default_prompt_name": None, "similarity_fn_name": "dot", "truncate_dim": 16,
        },
        **{"1_Pooling__config": {"word_embedding_dimension": 36, "pooling_mode_cls_token": True}},
    )  # fmt: skip
    expected = SentenceRecipe("cls", Prompts("q: ", "p: "), 300, True, 16)
    assert read_recipe(tmp_path) == expected


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (MODULES, modules("Transformer", "Pooling", "CNN"), "holds the layer 'CNN', which is not known"),
        (MODULES, modules("Transformer", "Pooling", "Normalize", "Dense"), "a layer Dense behind Normalize"),
        (MODULES, [{"type": "own.Pooling", "path": ""}], r"holds the layer 'own\.Pooling'"),
        (MODULES, [{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}],
         "the encoder is in its folder '0_Transformer'"),
        (MODULES, {"a": 1}, "is not a list of modules"),
        (POOLING, {"pooling_mode_max_tokens": True}, r"its pooling is \['max'\], which is not known here"),
        (POOLING, {"pooling_mode": ["cls", "mean"]}, r"its pooling is \['cls', 'mean'\]"),
        (POOLING, {"include_prompt": False}, "include_prompt is False"),
        (POOLING, {"pooling_mode_new": True}, "key 'pooling_mode_new'"),
        (POOLING, [], "is no JSON object; fetch the file again"),
        (PROMPTS, [], "is no JSON object; fetch the file again"),
        (PROMPTS, {"similarity_fn_name": "dot"}, "similarity_fn_name is 'dot', but vectors are of length 1"),
        (PROMPTS, {"prompts": {"query": 3}}, "the prompt 'query' is 3, a text was expected"),
        (PROMPTS, {"prompts": {"a": "x: "}, "default_prompt_name": "a"}, "default_prompt_name puts 'x: '"),
        (PROMPTS, {"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder'"),
        (PROMPTS, {"truncate_dim": 0}, "truncate_dim is 0"),
        (PROMPTS, {"something": 1}, "key 'something'"),
        (LENGTH, {"max_seq_length": "long"}, "max_seq_length is 'long'"),
        (LENGTH, {"query_expansion": {"n": 1}}, "query_expansion"),
        (LENGTH, {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(file, content, message, tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / POOLING).write_text("{}")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as caught:
        read_recipe(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / file}: ")


RELU = {"activation_fn": "torch.nn.ReLU"}
NONE_OF_ITS = "default_prompt_name is 'a', which is none of its prompts; correct it"


def check_pairs(file):
    return read_pair_length(file.parent)


@pytest.mark.parametrize(
    ("check", "file", "content", "message"),
    [
        (check_pairs, MODULES, modules("Transformer", "Pooling"), "holds the layer 'Pooling'"),
        (check_pairs, PROMPTS, RELU, "activation_fn is 'torch.nn.ReLU'"),
        (check_pairs, PROMPTS, {"prompts": {"a": "x"}, "default_prompt_name": "a"}, "a prompt before every pair"),
        (check_pairs, PROMPTS, {"prompts": "x"}, "prompts is 'x', expected an object"),
        (check_pairs, PROMPTS, {"default_prompt_name": ["a"]}, "default_prompt_name is .*, expected a"),
        (check_pairs, LENGTH, {"transformer_task": "text-generation"}, "transformer_task is 'text-gen"),
        # Those that are decoders.
        *(
            (check_logit_prompts, PROMPTS, {"prompts": prompts, "default_prompt_name": "a"}, NONE_OF_ITS)
            for prompts in (None, {}, {"b": "Find it"}, {"a": None})
        ),
        (check_logit_prompts, PROMPTS, RELU, "activation_fn is 'torch.nn.ReLU'"),
        (check_logit_prompts, PROMPTS, {"model_type": "SentenceTransformer"}, "model_type is 'SentenceT"),
        (check_logit_prompts, PROMPTS, {"prompts": "x"}, "prompts is 'x', expected an object"),
    ],
)  # fmt: skip
def test_what_a_reranker_does_not_do_is_refused(check, file, content, message, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    refuses(rf"{file}: .*{message}", check, tmp_path / file)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    home = tmp_path_factory.mktemp("published")
    for name in ("bert", "mpnet"):
        save_plain(name, home / name)
    save_plain("xlm-roberta", home / "reranker", classifier=True, num_labels=1)
    return home


def changed(folder, target, **changes):
    shutil.copytree(folder, target)
    content = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(
    ("load", "name", "changes", "message"),
    [
        (load_text_encoder, "bert", {"model_type": "deberta"}, r"is 'deberta'.* bert, xlm-roberta"),
        (load_text_encoder, "reranker", {}, r"holds a reranker.* `mmqa rerank --model`"),
        (load_text_encoder, "mpnet", {"relative_attention_num_buckets": 16}, "num_buckets is 16"),
        (load_cross_encoder, "bert", {}, "holds no reranker"),
        (load_cross_encoder, "mpnet", {}, "holds no reranker"),
        (load_cross_encoder, "reranker", {"id2label": {"0": "no", "1": "yes"}}, "has 2 labels, 1 was"),
        (load_cross_encoder, "reranker", {"sentence_transformers": RELU}, r"goes through 'torch\.nn\.ReLU'"),
        (load_cross_encoder, "reranker", {"pad_token_id": 560}, "is 560, a number from 0 to 558 was expect"),
    ],
)  # fmt: skip
def test_other_models_are_refused_by_name(load, name, changes, message, published, tmp_path):
    folder = changed(published / name, tmp_path / name, **changes)
    refuses(message, load, folder)


def test_sizes_and_functions_of_published_files(published, tmp_path):
    same = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    folder = changed(published / "reranker", tmp_path / "same", **same)
    assert load_cross_encoder(folder).config.types == 1
    short = shutil.copytree(published / "bert", tmp_path / "short")
    write(short, config_sentence_transformers={"truncate_dim": 99})
    refuses("truncate_dim keeps 99 values of vectors of 36", load_text_embedder, short)


@pytest.mark.parametrize(
    ("name", "config", "tokenizer", "message"),
    [
        ("reranker", {"pad_token_id": 0}, {}, "token 0 gets no position.* pads with token 1"),
        ("mpnet", {}, {"pad_token": "<unk>"}, "token 1 gets no position.* pads with token 3"),
    ],
)
def test_a_text_may_not_hold_the_token_without_a_position(
    published, tmp_path, name, config, tokenizer, message
):
    """transformers counts positions without this token, ours count all tokens of a text."""
    folder = changed(published / name, tmp_path / name, **config)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, tokenizer_config=settings | tokenizer)
    corpus = corpus_of_lists(TEXTS, None, None, None)
    opened = {"reranker": lambda: open_cross_encoder(folder, corpus)}
    with pytest.raises(UserError, match=message):
        opened.get(name, lambda: load_text_embedder(folder))()


def test_tokenizers_that_do_not_fit_are_refused(published, tmp_path):
    folder = shutil.copytree(published / "bert", tmp_path / "bert")
    refuses("tokens, the model 9; put the checkpoint's own", load_encoder_tokenizer, folder, 9)
    content = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, tokenizer_config=content | {"truncation_side": "left"})
    refuses("truncation_side 'left'", load_encoder_tokenizer, folder, 999)
    write(folder, tokenizer_config=content)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write(folder, tokenizer=tokenizer | {"post_processor": None})
    refuses(r"its template makes \['a'\] of 'a'", load_encoder_tokenizer, folder, 999)
    (folder / "tokenizer.json").unlink()
    refuses("no such file; save it with transformers", load_encoder_tokenizer, folder, 999)


def test_prompts_and_pooling_make_other_vectors(published, tmp_path):
    """Their fingerprints differ, so that kept vectors are not taken for each other's."""
    made = {}
    for name, files in {
        "plain": {},
        "query": {"config_sentence_transformers": {"prompts": {"query": "which flag "}}},
        "source": {"config_sentence_transformers": {"prompts": {"document": "which flag "}}},
        "cls": {"1_Pooling__config": {"pooling_mode": "cls"}},
        "short": {"config_sentence_transformers": {"truncate_dim": 8}},
        "cut": {"sentence_bert_config": {"max_seq_length": 20}},
    }.items():
        folder = write(shutil.copytree(published / "bert", tmp_path / name), **files)
        made[name] = load_text_embedder(folder, batch_size=2)
    assert len({embedder.fingerprint for embedder in made.values()}) == len(made)
    plain, query = made["plain"], made["query"]
    prompted = [f"which flag {text}" for text in TEXTS]
    np.testing.assert_array_equal(query.embed_questions(TEXTS), plain.embed_texts(prompted))
    np.testing.assert_array_equal(query.embed_passages(TEXTS), plain.embed_texts(TEXTS))
    passages = made["source"].embed_passages(TEXTS)
    np.testing.assert_array_equal(passages, query.embed_questions(TEXTS))
    corpus = mmqa_jax.open_corpus(TEXTS)
    rows = made["source"].embed_rows(corpus, None, range(3))
    np.testing.assert_array_equal(rows, passages)


def test_long_texts_come_in_smaller_batches(published):
    folder = published / "bert"
    longer = load_text_embedder(folder, batch_size=3)
    assert longer.buckets[-2:] == (512, 540)
    texts = ["the " * 530] * 3 + ["the"] * 128  # fewer short ones are padded to the longest
    sizes = {ids.shape for _, ids, _ in longer._text_batches(texts, "")}
    assert sizes == {(3, 16), (2, 540)}


def test_batches_of_pairs_do_not_change_scores(published):
    corpus = mmqa_jax.open_corpus([*TEXTS, "flag " * 600, "a " * 20])
    pairs = [("which flag", source.text) for source in corpus.sources]
    scores = [
        open_cross_encoder(published / "reranker", corpus, batch_size=size).relevance(pairs)
        for size in (1, 4)
    ]
    np.testing.assert_allclose(*scores, atol=1e-6)
    assert np.ptp(scores[0]) > 1e-3


@pytest.fixture
def cached(published, tmp_path, fresh_cache, monkeypatch):
    """The folders in a Hugging Face cache, as org/bert and org/reranker."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MMQA_CACHE", str(fresh_cache))
    for name in ("bert", "reranker"):
        home = tmp_path / "hub" / f"models--org--{name}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("a" * 40)
        shutil.copytree(published / name, home / "snapshots" / ("a" * 40))
    return "org/bert", "org/reranker"


def test_what_depends_on_a_model_sees_its_weights(cached, tmp_path):
    there = [is_cached(name) for name in (cached[0], "org/none", "minilm")]
    assert there == [True, False, False]
    folder = shutil.copytree(find_model(cached[0]), tmp_path / "copy")
    before = part.of_folders(folder)
    assert part.of_folders(cached[0]) == before
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert part.of_folders(folder) != before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_of_a_model_that_lead_nowhere_are_named(tmp_path, name):
    """As in a Hugging Face cache whose blobs were deleted."""
    (tmp_path / name).symlink_to(tmp_path / "blob")
    with pytest.raises(UserError, match=rf"{name}: cannot be read \(No such file or dir.*; check"):
        part.of_folders(tmp_path)


def test_by_name_in_python(cached, monkeypatch):
    encoder, model = cached
    # On a CPU that is faster so, passages' products are rounded to bfloat16.
    monkeypatch.setattr(ask_folder, "_products", lambda: None)
    corpus = mmqa_jax.open_corpus(TEXTS)
    assert published_folder(encoder).name == "a" * 40
    dense = mmqa_jax.open_retriever(corpus, "dense", encoder=encoder)
    found = dense.search("which flag", 3)
    embedder = dense.passages.dense.embedder
    cosines = embedder.embed_passages(TEXTS) @ embedder.embed_questions(["which flag"])[0]
    np.testing.assert_allclose([one.score for one in found], np.sort(cosines)[::-1], atol=1e-6)
    reranked = mmqa_jax.open_retriever(corpus, "bm25", reranker=model).search("the flag", 3)
    scores = mmqa_jax.open_reranker(corpus, model).relevance([("the flag", text) for text in TEXTS])
    best = max(reranked, key=lambda one: one.score)
    assert reranked[0] is best
    assert all(one.score == pytest.approx(scores[int(one.source.id)], abs=1e-6) for one in reranked)
    with pytest.raises(UserError, match=r"org/none: no such file or folder.* `hf download org/n"):
        mmqa_jax.open_retriever(corpus, encoder="org/none")


def test_by_name_in_verbs(cached, tmp_path):
    encoder, model = cached
    sources = [{"id": f"s{n}", "modality": "text", "text": text} for n, text in enumerate(TEXTS)]
    asked = {
        "id": "q",
        "split": "test",
        "question": "which flag",
        "answers": ["green"],
        "positives": ["s1"],
        "negatives": ["s0", "s2"],
    }
    write_rows(tmp_path / "sources.jsonl", sources)
    write_rows(tmp_path / "questions.jsonl", [asked])
    done("prepare", "corpus", f"--raw={tmp_path}", f"--out={tmp_path / 'data'}")
    data, out = f"--data={tmp_path / 'data'}", f"--out={tmp_path / 'index'}"
    assert done("embed", data, f"--model={encoder}", out)["dim"] == 36
    done("index", f"--embeddings={tmp_path / 'index'}", "--kind=exact")
    dense, ranked = tmp_path / "dense.jsonl", tmp_path / "ranked.jsonl"
    search = ("search", data, "--split=test", f"--index={tmp_path / 'index'}", "--top_k=3")
    done(*search, "--method=dense", f"--model={encoder}", f"--out={dense}")
    rerank = ("rerank", data, "--split=test", f"--model={model}")
    done(*rerank, f"--candidates={dense}", f"--out={ranked}")
    (first,), (second,) = rows_of(dense), rows_of(ranked)
    assert sorted(first["sources"]) == sorted(second["sources"]) == ["s0", "s1", "s2"]
    assert all(0 < score < 1 for score in second["scores"])
    refused = mmqa("rerank", data, f"--model={model}", "--candidates=all", f"--out={ranked}")
    assert (refused.code, "computes every pair" in refused.err) == (2, True)
    wrong = mmqa(*rerank[:3], f"--model={encoder}", f"--out={tmp_path / 'x.jsonl'}")
    assert (wrong.code, "holds no reranker" in wrong.err) == (2, True)


def test_minilm_by_name():
    texts = ["What is the capital of Kenya?", "Lima."]
    by_name, _ = open_embedder(Path("minilm"), Corpus([]))
    expected = load_minilm_embedder().embed_questions(texts)
    np.testing.assert_array_equal(by_name.embed_texts(texts), expected)
