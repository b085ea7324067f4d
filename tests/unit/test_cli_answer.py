"""`mmqa rerank` and `mmqa answer`: sources selected, questions answered from them."""

import re

import pytest
from cli_runs import (
    QUESTIONS,
    TEST,
    done,
    mmqa,
    question,
    rows_of,
    succeeded,
    write_documents,
    write_rows,
)

from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.evaluation.webqa import SELECTIONS, tune_threshold
from mmqa_jax.extensions.similarity import combine, tune_selection
from mmqa_jax.papers import webqa
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.runs.parts import with_similarity
from mmqa_jax.tasks.embedder import open_dense
from mmqa_jax.tasks.rerank import load_reranker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def test_rerank_then_answer_from_what_is_selected(data, models, bm25, tmp_path):
    reranked, answers = tmp_path / "reranked.jsonl", tmp_path / "predictions.jsonl"
    result = done(
        "rerank", f"--data={data}", f"--model={models / 'rerank'}", f"--candidates={bm25}",
        "--top_k=4", f"--out={reranked}",
    )  # fmt: skip
    assert result["questions"] == 5
    found = {row["question_id"]: row["sources"][:4] for row in rows_of(bm25)}
    for row in rows_of(reranked):
        assert sorted(row["sources"]) == sorted(found[row["question_id"]])
        assert row["scores"] == sorted(row["scores"], reverse=True)
        assert all(0 <= score <= 1 for score in row["scores"])
    result = done(
        "answer", f"--data={data}", f"--model={models / 'answer'}", f"--sources={reranked}",
        "--threshold=0.0", f"--out={answers}",
    )  # fmt: skip
    one = {"devices": 1, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}, "batch_size": 4}
    assert result == {"questions": 5, "predictions": str(answers), **one}
    for prediction, row in zip(rows_of(answers), rows_of(reranked), strict=True):
        assert prediction["question_id"] == row["question_id"]
        assert prediction["sources"] == row["sources"][:2]  # above a threshold of 0
        assert len(prediction["beams"]) == 1  # inference.only_best
        assert prediction["answer"] == prediction["beams"][0][0]


def test_rerank_with_a_retriever_is_the_demos_selection(data, models, index, tmp_path):
    """Both hops, relevance and similarity: SecondHopReranker, as the demo's stage `select`."""
    path, contrastive = tmp_path / "selected.jsonl", models / "contrastive"
    flags = (f"--data={data}", f"--model={models / 'rerank'}", f"--out={path}")
    ended = mmqa(
        "rerank", *flags, f"--retriever={contrastive}", f"--index={index}",
        "--similarity_weight=25", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    corpus = open_corpus(data)
    questions = corpus.questions("test")
    dense = open_dense(corpus, str(contrastive), str(index))
    reranker = with_similarity(load_reranker(models / "rerank", corpus), dense, corpus, 25.0)
    hops = reranker.read(questions, webqa.restricted_candidates(questions, corpus))
    expected = combine(hops, 25.0)
    found = read_rankings(path)
    assert [r.sources for r in found] == [r.sources for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-6)
    # The sweep tells what any weight and threshold would select, 25 among them.
    sweep = tune_selection(questions, hops, SELECTIONS["best"]).sweep
    assert re.search(r"┃ +20 ┃ +25 ┃ +30 ┃", ended.out)
    told = {(r["similarity_weight"], r["threshold"]): r["source_f1"] for r in ended.value["sweep"]}
    assert {key: told[key] for key in sweep} == pytest.approx(sweep)
    assert ended.value["best"]["source_f1"] == max(told.values())
    own = {t: f1 for (weight, t), f1 in told.items() if weight == 25}
    assert ended.value["source_f1"] == own[ended.value["best_threshold"]] == max(own.values())


def test_questions_without_sources_are_ranked_answered_and_scored(data, models, tmp_path):
    restricted, answers = tmp_path / "restricted.jsonl", tmp_path / "predictions.jsonl"
    done("rerank", f"--data={data}", f"--model={models / 'rerank'}", f"--out={restricted}")
    rows = {row["question_id"]: row for row in rows_of(restricted)}
    assert rows["test4"] == {"question_id": "test4", "sources": [], "scores": []}
    assert len(rows["test0"]["sources"]) == 8
    model = f"--model={models / 'answer'}"
    done("answer", f"--data={data}", model, f"--sources={restricted}", f"--out={answers}")
    assert rows_of(answers)[4]["sources"] == []
    done("answer", f"--data={data}", model, "--sources=oracle", f"--out={answers}")
    assert [row["sources"] for row in rows_of(answers)] == [r["positives"] for r in TEST]
    oracle = rows_of(answers)[4]
    done("answer", f"--data={data}", model, "--sources=none", f"--out={answers}")
    assert all(row["sources"] == [] for row in rows_of(answers))
    assert rows_of(answers)[4]["answer"] == oracle["answer"]
    result = done("evaluate", "corpus", f"--references={data}", f"--predictions={answers}")
    assert result["n"] == 5
    assert result["scores"]["source_f1/official"] == 0.0


def test_rankings_without_any_source_are_reranked_answered_and_scored(data, models, tmp_path):
    none = write_rows(
        tmp_path / "none.jsonl",
        [{"question_id": row["id"], "sources": [], "scores": []} for row in TEST],
    )
    reranked, answers = tmp_path / "reranked.jsonl", tmp_path / "predictions.jsonl"
    flags = (f"--data={data}", f"--model={models / 'rerank'}", f"--candidates={none}")
    result = done("rerank", *flags, f"--out={reranked}")
    assert (result["questions"], result["source_f1"]) == (5, 0.0)
    assert [row["sources"] for row in rows_of(reranked)] == [[]] * 5
    model = f"--model={models / 'answer'}"
    done("answer", f"--data={data}", model, f"--sources={reranked}", f"--out={answers}")
    assert [row["sources"] for row in rows_of(answers)] == [[]] * 5
    scored = done("evaluate", "corpus", f"--references={data}", f"--predictions={none}")
    assert scored["scores"]["recall@1"] == scored["scores"]["mrr"] == 0.0


def test_hidden_gold_sources_stop_neither_search_nor_evaluate(data, models, tmp_path):
    flags = (f"--data={data}", "--split=val")
    found, restricted = tmp_path / "found.jsonl", tmp_path / "restricted.jsonl"
    result = done("search", *flags, "--method=bm25", f"--out={found}")
    assert result == {"questions": 3, "recall": {}}
    assert len(rows_of(found)) == 3
    done("rerank", *flags, f"--model={models / 'rerank'}", f"--out={restricted}")
    assert [len(row["sources"]) for row in rows_of(restricted)] == [2, 2, 2]
    answers = [
        {"question_id": row["id"], "answer": row["answers"][0]}
        for row in QUESTIONS
        if row["split"] == "val"
    ]
    path = write_rows(tmp_path / "answers.jsonl", answers)
    flags = (f"--references={data}", "--split=val", f"--predictions={path}")
    scores = done("evaluate", "corpus", *flags)["scores"]
    assert scores["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert not [name for name in scores if name.startswith("source_f1")]


def test_gold_sources_that_are_hidden_are_asked_for(data, models, refused, tmp_path):
    """The oracle needs them; a cap would drop some of them, so that it is not applied."""
    reader = f"--model={models / 'answer'}"
    flags = (f"--data={data}", "--split=val", f"--out={tmp_path / 'out.jsonl'}")
    message = (
        r"oracle sources: the gold sources of all 3 questions .* hidden; choose .* such as val"
    )
    refused("answer", *flags, reader, "--sources=oracle", message=message)
    refused("answer", *flags, "--model=nowhere", message=message)  # before the model is opened
    ended = succeeded("rerank", *flags, f"--model={models / 'rerank'}", "--cap=webqa", "--json")
    one = {"devices": 1, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}, "batch_size": 8}
    assert ended.value == {"questions": 3, **one}
    assert "cap=webqa: 3 of 3 questions hide their gold sources, so all of their" in ended.err
    assert (
        "--split=val: gold sources are hidden, so nothing is scored and no threshold" in ended.err
    )


def test_threshold_printed_by_rerank_is_the_best_on_its_questions(data, models, tmp_path):
    path = tmp_path / "restricted.jsonl"
    result = done(
        "rerank", f"--data={data}", f"--model={models / 'rerank'}", "--split=train",
        f"--out={path}",
    )  # fmt: skip
    questions = open_corpus(data).questions("train")
    best, sweep = tune_threshold(questions, read_rankings(path), SELECTIONS["best"])
    assert (result["best_threshold"], result["source_f1"]) == (best, pytest.approx(sweep[best]))


def test_a_question_longer_than_the_model_takes_is_cut_and_named(models, tmp_path):
    long = question(0, "test", "Hav", question="What is the capital of Hav, " * 9 + "please?")
    raw = write_documents(tmp_path / "raw", [*QUESTIONS, {**long, "id": "long"}])
    corpus = f"--data={tmp_path / 'data'}"
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    expected = "1 of 6 questions are longer than the 20 tokens that the model takes and are truncated: long."
    found, answers = tmp_path / "found.jsonl", tmp_path / "answers.jsonl"
    ended = succeeded("rerank", corpus, f"--model={models / 'rerank'}", f"--out={found}")
    assert expected in ended.err
    flags = (f"--model={models / 'answer'}", "--sources=none", f"--out={answers}")
    ended = succeeded("answer", corpus, *flags)
    assert expected in ended.err
    assert [row["question_id"] for row in rows_of(answers)][-1] == "long"


def test_a_split_whose_questions_list_no_sources(bare_data, models, refused, tmp_path):
    data, model = f"--data={bare_data}", f"--model={models / 'answer'}"
    restricted, answers = tmp_path / "restricted.jsonl", tmp_path / "predictions.jsonl"
    done("rerank", data, f"--model={models / 'rerank'}", f"--out={restricted}")
    assert [row["sources"] for row in rows_of(restricted)] == [[]] * 8
    found = []
    for sources in (restricted, "none"):
        done("answer", data, model, f"--sources={sources}", f"--out={answers}")
        found.append(rows_of(answers))
    assert found[0] == found[1]
    message = r"oracle sources: the gold sources of all 8 questions .* are hidden"
    refused("answer", data, model, f"--out={answers}", message=message)
    flags = ("evaluate", "corpus", f"--references={bare_data}")
    message = r"none of the 8 questions has gold"
    refused(*flags, f"--predictions={restricted}", message=message)
    message = r"none of the 8 questions has keyword"
    refused(*flags, f"--predictions={answers}", message=message)
