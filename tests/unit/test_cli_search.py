"""`mmqa embed`, `index` and `search` over the tiny corpus."""

from __future__ import annotations

import shutil

import pytest
from cli_runs import QUESTIONS, TEST, done, question, rows_of, write_documents

from mmqa_jax.data.corpus import open_corpus

pytestmark = pytest.mark.usefixtures("quick_and_quiet")


@pytest.mark.parametrize("flags", [["dense"], ["dense", "--two_pass"], ["fused"]])
def test_dense_search_ranks_every_question(data, models, index, bm25, tmp_path, flags):
    path = tmp_path / "found.jsonl"
    result = done(
        "search", f"--data={data}", f"--method={flags[0]}", *flags[1:], "--top_k=7",
        f"--model={models / 'contrastive'}", f"--index={index}", f"--out={path}",
    )  # fmt: skip
    corpus = open_corpus(data)
    rows = rows_of(path)
    assert [row["question_id"] for row in rows] == [row["id"] for row in TEST]
    for row in rows:
        assert len(set(row["sources"])) == 7
        assert set(row["sources"]) <= set(corpus.row)
        assert row["scores"] == sorted(row["scores"], reverse=True)
    # What it prints is what `mmqa evaluate` finds in the file.
    scores = done("evaluate", "corpus", f"--references={data}", f"--predictions={path}")["scores"]
    assert {k: scores[k] for k in result["recall"]} == pytest.approx(result["recall"])


def test_dense_search_needs_a_model_and_an_index(wrong, data, refused, tmp_path):
    flags = ["search", f"--data={data}", f"--out={tmp_path / 'out'}"]
    for method in ("dense", "fused"):
        message = rf"--method={method} needs --model and --index"
        refused(*flags, f"--method={method}", message=message)
        refused(*flags, f"--method={method}", "--index=somewhere", message=message)


def test_embeddings_of_another_corpus_are_refused(wrong, models, index, refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS[:3])
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'other'}")
    other = f"--data={tmp_path / 'other'}"
    shutil.copytree(index, tmp_path / "index")
    flags = (*wrong["embed"], other, f"--out={tmp_path / 'index'}")
    refused(*flags, message=r"corpus_fingerprint .*; name another --out or give --overwrite")
    refused(*wrong["search"], other, "--split=train", message=r"embeddings.*corpus")
    assert done(*flags, "--overwrite")["sources"] == 11


@pytest.mark.parametrize("out", ["file", "file/out", "folder"])
def test_embeddings_that_cannot_be_written(out, wrong, refused, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "embeddings").write_text("")
    flags = (*wrong["embed"], "--model=nowhere")  # seen before the model is
    refused(*flags, f"--out={tmp_path / out}", message=r"(file|embeddings) is no folder.*name ano")


def test_dense_search_reads_the_beginning_of_a_long_question(models, tmp_path):
    """As CLIP's `tokenize(truncate=True)`: two questions that differ behind it find the same."""
    beginning = "What is the capital of Hav, " * 9
    rows = [
        question(0, "test", "Hav", question=beginning + "please?"),
        question(1, "test", "Florin", question=beginning + "or rather that of Florin?"),
        question(2, "test", "Gondal"),
    ]
    corpus = f"--data={tmp_path / 'data'}"
    raw = write_documents(tmp_path / "raw", rows)
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    model, index = f"--model={models / 'contrastive'}", tmp_path / "index"
    done("embed", corpus, model, f"--out={index}")
    done("index", f"--embeddings={index}", "--kind=exact")
    out = tmp_path / "found.jsonl"
    done("search", corpus, "--method=dense", model, f"--index={index}", f"--out={out}")
    long, longer, other = (row["scores"] for row in rows_of(out))
    assert long == pytest.approx(longer, abs=1e-6)
    assert long != pytest.approx(other, abs=1e-3)
