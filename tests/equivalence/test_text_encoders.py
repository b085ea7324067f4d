"""Text encoders and cross-encoders beside transformers and sentence-transformers, float32.

The next family is one entry in tests/tiny_encoders.FAMILIES.
"""

import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import transformers
from compare import LAYER, WHOLE, alone, compiled
from tiny_encoders import FAMILIES, QUESTIONS, save_plain, save_sentences, texts

from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.tokenizers import cut_longest
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.models.bert.rotary import GTE, JINA_V3, NOMIC, rotary_config
from mmqa_jax.models.encoders.text_encoders import load_text_encoder, retrieval_tasks
from mmqa_jax.retrieval.text_encoder import load_text_embedder
from mmqa_jax.weights.bundled import minilm_path
from tests.refusals import refuses

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


ROTARY = ["nomic_bert", "gte", "jina_embeddings_v3"]


@pytest.mark.parametrize("plain", ["xlm-roberta", "mpnet", *ROTARY], indirect=True)
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


@pytest.mark.parametrize("plain", ROTARY, indirect=True)
def test_both_layouts_of_rotary_berts_are_read(plain):
    """transformers writes the authors' names of tensors; its own are in later files."""
    folder, theirs = plain
    ids, mask = np.arange(12).reshape(2, 6) % 7, np.ones((2, 6), bool)
    wanted = load_text_encoder(folder)(ids, mask)
    names = {*safetensors.numpy.load_file(folder / "model.safetensors")}
    own = {key: value.numpy() for key, value in theirs.state_dict().items()}
    assert names != {*own}
    safetensors.numpy.save_file(own, folder / "model.safetensors")
    np.testing.assert_array_equal(load_text_encoder(folder)(ids, mask), wanted)


def test_the_authors_configs_of_rotary_berts():
    nomic = {"n_embd": 36, "n_layer": 2, "n_head": 3, "n_inner": 52, "layer_norm_epsilon": 1e-4}
    nomic |= {"rotary_emb_base": 70, "max_trained_positions": 99, "n_positions": 200}
    nomic |= {"activation_function": "swiglu", "prenorm": False, "rotary_emb_fraction": 1.0}
    ours = rotary_config(NOMIC, nomic, "here")
    sizes = ours.hidden, ours.layers, ours.heads, ours.mlp, ours.eps, ours.positions
    assert sizes == (36, 2, 3, 52, 1e-4, 99)
    assert (ours.rope_theta, ours.activation, ours.gated) == (70, "silu", True)
    shared = {"hidden_size": 36, "num_attention_heads": 3}
    old = shared | {"rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    new = {"rope_type": "linear", "rope_theta": 160000, "factor": 8 ** (2 / 12)}
    old |= {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    assert rotary_config(GTE, old, "") == rotary_config(GTE, shared | {"rope_parameters": new}, "")


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (NOMIC, {"prenorm": True}, "prenorm is True"),
        (NOMIC, {"mlp_fc1_bias": True}, "mlp_fc1_bias is True"),
        (NOMIC, {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor is 2.0"),
        (GTE, {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        (GTE, {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 1.0}}, "'mixed_b'"),
        (JINA_V3, {"emb_pooler": "cls"}, "emb_pooler is 'cls'"),
        (JINA_V3, {"hidden_size": 9, "num_attention_heads": 3}, "an even number"),
    ],
)
def test_rotary_berts_that_are_refused(family, change, message):
    refuses(message, rotary_config, family, change, "config.json")


def with_adapters(folder, rank: int) -> None:
    """The authors' layout of a checkpoint of transformers: additions of two tasks of each matrix."""
    random = np.random.default_rng(3)
    tensors = {}
    for key, x in safetensors.numpy.load_file(folder / "model.safetensors").items():
        key = f"roberta.{key}"
        if x.ndim != 2:
            tensors[key] = x
            continue
        stem = f"{key.removesuffix('.weight')}.parametrizations.weight."
        shapes = [(2, rank, x.shape[1]), (2, x.shape[0], rank)]
        if "embeddings" in key:
            shapes = [(2, x.shape[0], rank), (2, rank, x.shape[1])]
        tensors[f"{stem}original"] = x
        for part, shape in zip("AB", shapes, strict=True):
            tensors[f"{stem}0.lora_{part}"] = random.normal(0, 0.2, shape).astype(np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    prompts = {"retrieval.query": "find: ", "retrieval.passage": "text: "}
    config = json.loads((folder / "config.json").read_text()) | {
        **{"model_type": "xlm-roberta", "position_embedding_type": "rotary"},
        **{"lora_adaptations": [*prompts], "lora_rank": rank, "lora_alpha": 3},
        **{"rotary_emb_base": 30.0, "task_instructions": prompts, "load_trained_adapters": True},
    }
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    types = ("custom_st.Transformer", "sentence_transformers.models.Pooling")
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": kind}
        for n, (kind, path) in enumerate(zip(types, ("", "1_Pooling"), strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))


@pytest.mark.parametrize("plain", ["jina_embeddings_v3"], indirect=True)
def test_jinas_tasks_have_weights_of_their_own(plain):
    """W + alpha / r B A in torch, as the authors' `lora_forward`; of tables A B."""
    folder, theirs = plain
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with_adapters(folder, rank=2)
    ours = load_text_embedder(folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    plain_weights = {key: value.clone() for key, value in theirs.state_dict().items()}
    vectors = []
    for task, prompt in enumerate(("find: ", "text: ")):
        weights = {}
        for key in [key for key in tensors if key.endswith(".original")]:
            stem = key.removesuffix("original")
            a, b = (tensors[f"{stem}0.lora_{part}"][task] for part in "AB")
            added = a @ b if "embeddings" in key else b @ a
            weights[stem.partition(".parametrizations")[0]] = 3 / 2 * added
        moved = adapted_by(theirs, plain_weights, weights)
        given = [prompt + text for text in few()]
        batch = tokenizer(given, padding=True, truncation=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        with torch.no_grad():
            states = moved(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        vectors.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy())
    np.testing.assert_allclose(ours.embed_questions(few()), vectors[0], **WHOLE)
    np.testing.assert_allclose(ours.embed_passages(few()), vectors[1], **WHOLE)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01


def adapted_by(model, weights, additions):
    """transformers' model with additions to its matrices, by their names in the authors' files."""
    names = {"roberta.": "", "emb_ln": "embeddings.LayerNorm", "encoder.layers": "layers"}
    changed = {key: value.clone() for key, value in weights.items()}
    for key, added in additions.items():
        for theirs, name in names.items():
            key = key.replace(theirs, name)
        if key.endswith("mixer.Wqkv"):
            for part, rows in zip("qkv", added.chunk(3), strict=True):
                changed[f"{key.removesuffix('mixer.Wqkv')}self_attn.{part}_proj.weight"] += rows
        else:
            changed[f"{key.replace('mixer.out_proj', 'self_attn.o_proj')}.weight"] += added
    model.load_state_dict(changed)
    return model.eval()


def test_jinas_tasks_must_be_known(tmp_path):
    config = {"model_type": "xlm-roberta", "lora_adaptations": ["text-matching"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses("expected retrieval.query and retrieval.passage", retrieval_tasks, tmp_path)


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
