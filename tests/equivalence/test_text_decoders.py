"""Decoders that embed and rerank beside sentence-transformers and transformers, float32.

Their layers are compared in test_decoder_families.py.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from compare import WHOLE, abstract, randomize
from tiny_encoders import QUESTIONS, texts

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.models.encoders.text_encoders import read_decoder_config
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.retrieval.text_encoder import load_text_embedder
from tests.refusals import refuses

pytestmark = pytest.mark.slow

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-3},
    **{"num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 40, "rope_theta": 700.0},
    **{"max_position_embeddings": 4096, "initializer_range": 0.2},
}
# The model card of Qwen3-Reranker.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
PREFIX = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ROLE = '{{ messages | selectattr("role", "eq", "%s") | map(attribute="content") | first }}'
TEMPLATE = (
    f"{PREFIX}<Instruct>: {ROLE % 'system'}\n<Query>: {ROLE % 'query'}\n"
    f"<Document>: {ROLE % 'document'}{SUFFIX.strip()}" + '{{ "\\n\\n" }}'
)


def save(kind, folder, around=(), **more):
    """A random decoder of transformers with its tokenizer; returns both."""
    own = byte_tokenizer(*around)
    config = kind.config_class(
        **SIZES
        | {"vocab_size": len(own) + 3, "attn_implementation": "eager"}
        | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        | more
    )
    torch.manual_seed(0)
    model = randomize(kind(config), 0, 0.15)
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return model, own


def save_sentences(kind, folder, around, prompts, truncate_dim=None, **more):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    plain = folder.with_name(f"{folder.name}-plain")
    save(kind, plain, around, **more)
    layers = [Transformer(str(plain), max_seq_length=600), Pooling(32, "lasttoken"), Normalize()]
    model = SentenceTransformer(
        modules=layers, device="cpu", prompts=prompts, truncate_dim=truncate_dim
    )
    model.save(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("kind", "around", "more"),
    [
        (transformers.Qwen3Model, ("$A", "<|endoftext|>"), {}),  # as Qwen3-Embedding
        (transformers.MistralModel, ("<s>", "$A", "</s>"), {"sliding_window": 70}),  # E5-Mistral
        (
            transformers.EuroBertModel,
            ("<s>", "$A", "</s>"),
            {"hidden_act": "gelu", "mask_token_id": 3},
        ),
    ],
    ids=["qwen3", "mistral", "eurobert"],
)
def test_vectors_are_those_of_sentence_transformers(kind, around, more, tmp_path):
    folder = tmp_path / "model"
    prompts = {"query": f"Instruct: {INSTRUCTION}\nQuery:", "document": ""}
    theirs = save_sentences(kind, folder, around, prompts, 20, **more)
    ours = load_text_embedder(folder, batch_size=3)
    given = [text[:2300] for text in texts(400)[1::3]]  # a short one, and the longest
    assert max(len(ids) for ids in ours.tokenizer.encode_batch(given)) > 600  # some are cut
    for got, encode in (
        (ours.embed_questions(given), theirs.encode_query),
        (ours.embed_passages(given), theirs.encode_document),
    ):
        np.testing.assert_allclose(got, encode(given, normalize_embeddings=True), **WHOLE)
    assert ours.dim == 20
    assert np.abs(ours.embed_questions(given) - ours.embed_passages(given)).max() > 0.01


@pytest.fixture(scope="module")
def embedding_gemma(tmp_path_factory):
    """An EmbeddingGemma: tokens see both ways, two linear layers over their mean; as saved twice."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling

    folder = tmp_path_factory.mktemp("gemma") / "model"
    plain = folder.with_name("plain")
    more = {"use_bidirectional_attention": True, "sliding_window": 70, "query_pre_attn_scalar": 20}
    more |= {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    }, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    own = byte_tokenizer("<s>", "$A", "</s>")
    config = transformers.Gemma3TextConfig(
        **sizes | more | {"vocab_size": len(own) + 3, "attn_implementation": "eager"}
    )
    randomize(transformers.Gemma3TextModel(config), 0, 0.15).save_pretrained(plain)
    own.save_pretrained(plain)
    torch.manual_seed(1)
    layers = [
        Transformer(str(plain), max_seq_length=600),
        Pooling(32, "mean"),
        Dense(32, 48, bias=False, activation_function=torch.nn.Identity()),
        Dense(48, 24),
        Normalize(),
    ]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    SentenceTransformer(modules=layers, device="cpu", prompts=prompts).save(str(folder))
    return folder


def test_embedding_gemma_is_that_of_sentence_transformers(embedding_gemma, sentence_transformers):
    theirs = sentence_transformers.SentenceTransformer(str(embedding_gemma), device="cpu")
    assert theirs[0].auto_model.config.sliding_window == 36  # of each side
    ours = load_text_embedder(embedding_gemma, batch_size=3)
    given = [text[:2300] for text in texts(400)[1::3]]  # a short one, and the longest
    for got, encode in (
        (ours.embed_questions(given), theirs.encode_query),
        (ours.embed_passages(given), theirs.encode_document),
    ):
        np.testing.assert_allclose(got, encode(given, normalize_embeddings=True), **WHOLE)
    assert ours.dim == 24


def test_embedding_gemma_writes_no_texts(embedding_gemma):
    config = read_decoder_config(embedding_gemma)
    assert config.windows == (36, 0)
    assert LlamaConfig.from_hf(config.to_hf(), "here").windows == (36, 0)
    with pytest.raises(UserError, match="use it as an encoder of texts"):
        Engine(abstract(Llama, config))


EMBEDDING_GEMMA_2 = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 12},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 20},
    **{"num_global_key_value_heads": 1, "sliding_window": 36, "rms_norm_eps": 1e-3},
    **{"hidden_size_per_layer_input": 10, "embedding_dim": 24, "max_position_embeddings": 900},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
}


@pytest.fixture(scope="module")
def embedding_gemma_2(tmp_path_factory):
    """An EmbeddingGemma 2 without towers; the model of transformers, its tokenizer, its folder."""
    folder = tmp_path_factory.mktemp("gemma2")
    own = byte_tokenizer("<s>", "$A", "</s>")
    config = transformers.EmbeddingGemma2Config(
        text_config=EMBEDDING_GEMMA_2 | {"vocab_size": len(own) + 3},
        vision_config=None,
        audio_config=None,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = randomize(transformers.EmbeddingGemma2Model(config), 0, 0.15).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.add_(0.3 * torch.rand(buffer.shape))
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    module, layers = "sentence_transformers.models.", {"": "Transformer", "1_Pooling": "Pooling"}
    layers["2_Normalize"] = "Normalize"
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{module}{name}"}
        for number, (path, name) in enumerate(layers.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 600}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return model, own, folder


def test_embedding_gemma_2_is_that_of_transformers(embedding_gemma_2):
    """The mean of the tokens of texts that are shorter and longer than a window; some are cut."""
    theirs, own, folder = embedding_gemma_2
    ours = load_text_embedder(folder, batch_size=3)
    questions = [text[:2300] for text in texts(400)[1::3]]
    tokens = own(questions, padding=True, truncation=True, max_length=600, return_tensors="pt")
    assert tokens["attention_mask"].sum(1).max() == 600
    with torch.no_grad():
        states = theirs(tokens["input_ids"], attention_mask=tokens["attention_mask"])[0]
    mask = tokens["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    want = torch.nn.functional.normalize(mean).numpy()
    np.testing.assert_allclose(ours.embed_questions(questions), want, **WHOLE)
    assert ours.dim == 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"embedding_dim": "a"}, "embedding_dim is 'a'"),
        ({"num_kv_shared_layers": 1}, "layers that borrow keys"),
        ({"sights": 1}, "key 'sights'"),
    ],
)
def test_a_bad_embedding_gemma_2_is_refused(embedding_gemma_2, change, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(embedding_gemma_2[2], folder)
    content = json.loads((folder / "config.json").read_text())
    content["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(content))
    refuses(message, load_text_embedder, folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "2_Dense/config.json",
            {"in_features": 33},
            "in_features is 33, but vectors have 32 values",
        ),
        (
            "2_Dense/config.json",
            {"activation_function": "torch.nn.modules.activation.ReLU"},
            "activation_function of",
        ),
        ("2_Dense/config.json", {"module_output_name": "other"}, "module_output_name"),
        ("3_Dense/config.json", {"bias": False}, r"its tensors are .*linear\.bias"),
    ],
)
def test_linear_layers_that_are_refused(embedding_gemma, file, change, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(embedding_gemma, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change))
    refuses(message, load_text_embedder, folder)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A Qwen3-Reranker as it was first published: a language model and nothing else."""
    folder = tmp_path_factory.mktemp("reranker")
    return folder, *save(transformers.Qwen3ForCausalLM, folder, tie_word_embeddings=True)


CORPUS = corpus_of_lists(["a"], None, None, None)
PAIRS = [(question, text) for question in QUESTIONS for text in texts(120)[1::3]]


def test_scores_are_those_of_the_model_card(reranker):
    folder, theirs, own = reranker
    ends = [own.convert_tokens_to_ids(word) for word in ("no", "yes")]
    first, last = (own.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    wanted, longest = [], 0
    for question, text in PAIRS:
        content = f"<Instruct>: {INSTRUCTION}\n<Query>: {question}\n<Document>: {text}"
        ids = [*first, *own(content)["input_ids"], *last]
        longest = max(longest, len(ids))
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0, -1, ends]
        wanted.append(torch.softmax(logits, 0)[1].item())
    assert longest > 500
    ours = open_cross_encoder(folder, CORPUS, batch_size=3)
    got = ours.relevance(PAIRS)
    np.testing.assert_allclose(got, wanted, **WHOLE)
    assert np.ptp(got) > 0.01


def test_scores_are_those_of_sentence_transformers(reranker, tmp_path):
    """Its chat template with roles, another instruction, another pair of tokens, long texts cut."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    plain = shutil.copytree(reranker[0], tmp_path / "plain")
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    encoder = Transformer(str(plain), transformer_task="text-generation", max_seq_length=900)
    layers = [encoder, LogitScore(encoder.tokenizer.convert_tokens_to_ids("the"), 7)]
    prompts = {"flags": "Find flags."}
    model = CrossEncoder(modules=layers, device="cpu", prompts=prompts, default_prompt_name="flags")
    folder = tmp_path / "model"
    model.save(str(folder))
    theirs = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Sigmoid())
    pairs = [*PAIRS[:6], ("which\nflag", " ".join(texts(300)))]
    ours = open_cross_encoder(folder, CORPUS, batch_size=3)
    got = ours.relevance(pairs)
    np.testing.assert_allclose(got, theirs.predict(pairs), **WHOLE)
    assert np.ptp(got) > 0.01
    cut = ours.tokenizer.pair(ours.tokenizer.encode_pairs(pairs[-1:])[0][0], 900)[0]
    assert (len(cut), cut[-4:]) == (900, ours.tokenizer.pair([], 900)[0][-4:])


def test_what_is_no_embedder_or_reranker_is_refused(reranker, tmp_path):
    folder = reranker[0]
    refuses(r"holds a language model without modules\.json", load_text_embedder, folder)
    other = tmp_path / "llama"
    save(transformers.LlamaForCausalLM, other)
    refuses(r"a language model \(llama\) that is no reranker", open_cross_encoder, other, CORPUS)
    names = ["LogitScore", "Transformer", "Dense"]
    kinds = {name: {"type": f"sentence_transformers.models.{name}", "path": ""} for name in names}
    modules = [kinds["Transformer"], kinds["LogitScore"] | {"path": "1_LogitScore"}]
    made = shutil.copytree(folder, tmp_path / "made")
    (made / "modules.json").write_text(json.dumps(modules))
    score = made / "1_LogitScore" / "config.json"
    score.parent.mkdir()
    for content, message in (
        ({"true_token_id": 1}, "true_token_id and false_token_id are .1, None., two tokens"),
        ({"true_token_id": 1, "false_token_id": 2, "scale": 3}, "the key 'scale'"),
        ({"true_token_id": 1, "false_token_id": 2}, "has no chat template"),
    ):
        score.write_text(json.dumps(content))
        refuses(message, open_cross_encoder, made, CORPUS)
    (made / "chat_template.jinja").write_text("{{ messages[0].content }}")
    refuses("does not put a `query` and then a `document`", open_cross_encoder, made, CORPUS)
    (made / "modules.json").write_text(json.dumps([*modules, kinds["Dense"]]))
    refuses("holds the layer 'Dense'", open_cross_encoder, made, CORPUS)
