"""Decoders that the tasks `retriever` and `reranker` train by LoRA, opened by others."""

import numpy as np
import pytest
import test_text_decoders as decoders
import torch
import transformers
from sentence_transformers import SentenceTransformer
from test_text_decoders import embedding_gemma_2  # noqa: F401, a fixture

from mmqa_jax.core.config import load_config
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.runs.verbs.conversion import export_retrieval_run
from mmqa_jax.tasks.embedder import load_embedder
from mmqa_jax.tasks.rerank import open_reranker
from mmqa_jax.tasks.run import run_training
from tests import tiny_encoders

pytestmark = pytest.mark.slow

ROOT = decoders.__file__.partition("/tests/")[0]
LORA = {"rank": 2, "alpha": 4.0, "targets": (), "base": "float32"}
ASKED = tiny_encoders.QUESTIONS


def corpus() -> Corpus:
    sources = [Source(f"s{n}", "text", text) for n, text in enumerate(tiny_encoders.texts(12))]
    questions = [
        Question(f"q{n}", "train", text, positives=(f"s{n}",), negatives=(f"s{n + 1}",))
        for n, text in enumerate(ASKED)
    ]
    return Corpus(sources, questions, fingerprint="few")


def trained(task: str, init, folder, length: int, lora: dict | None = LORA) -> None:
    config = load_config(f"{ROOT}/configs/openstax/{task}.py:runlocal")
    config.init = str(init)
    config.model.lora = lora
    config.batches.batch_size = 2
    config.train.steps = 4
    config.train.optimizer.learning_rate = 0.05
    if task == "retriever":
        config.batches.update({"query_length": length, "source_lengths": (length,)})
    else:
        config.batches.update({"length": length, "num_negatives": 1})
    run_training(config, folder, corpus())


def test_a_retriever_is_exported_with_its_additions(tmp_path):
    prompts = {"query": "Find: ", "document": ""}
    base = decoders.save_sentences(
        transformers.Qwen3Model, tmp_path / "base", ("$A", "<|endoftext|>"), prompts
    )
    trained("retriever", tmp_path / "base", tmp_path / "run", 96)
    assert all(np.isfinite(row["loss"]) for row in read_metrics(tmp_path / "run") if "loss" in row)
    export_retrieval_run(tmp_path / "run", tmp_path / "out", overwrite=False)
    ours = load_embedder(tmp_path / "run")[0]
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for got, encode in (
        (ours.embed_questions(ASKED), theirs.encode_query),
        (ours.embed_passages(ASKED), theirs.encode_document),
    ):
        np.testing.assert_allclose(got, encode(ASKED), rtol=0, atol=1e-5)
    assert np.abs(theirs.encode_query(ASKED) - base.encode_query(ASKED)).max() > 0.01


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "whole"])
def test_an_embedding_gemma_2_is_exported(lora, embedding_gemma_2, tmp_path):  # noqa: F811
    """transformers opens what was trained, and pools its states to the run's vectors."""
    untrained, own, base = embedding_gemma_2
    trained("retriever", base, tmp_path / "run", 96, lora)
    export_retrieval_run(tmp_path / "run", tmp_path / "out", overwrite=False)
    ours = load_embedder(tmp_path / "run")[0]
    tokens = own(ASKED, padding=True, return_tensors="pt")
    mask = tokens["attention_mask"][..., None]
    vectors = []
    for model in (transformers.AutoModel.from_pretrained(tmp_path / "out").eval(), untrained):
        with torch.no_grad():
            states = model(tokens["input_ids"], attention_mask=tokens["attention_mask"])[0]
        mean = (states * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(mean).numpy())
    np.testing.assert_allclose(ours.embed_questions(ASKED), vectors[0], rtol=0, atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01


def test_a_yes_no_reranker_is_exported_with_its_additions(tmp_path):
    base = tmp_path / "base"
    decoders.save(transformers.Qwen3ForCausalLM, base, tie_word_embeddings=True)
    trained("reranker", base, tmp_path / "run", 640)
    export_retrieval_run(tmp_path / "run", tmp_path / "out", overwrite=False)
    pairs = [(question, text) for question in ASKED for text in tiny_encoders.texts(12)]
    rerankers = (
        open_reranker(tmp_path / "run", corpus()),
        open_cross_encoder(tmp_path / "out", corpus()),
        open_cross_encoder(base, corpus()),
    )
    run, exported, untrained = (reranker.relevance(pairs) for reranker in rerankers)
    np.testing.assert_allclose(run, exported, rtol=0, atol=1e-5)
    assert np.abs(run - untrained).max() > 0.01
