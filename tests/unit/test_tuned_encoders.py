"""tests.bench.tuned_encoders: a reranker's weight is chosen on val, and what is kept is compared."""

import pytest

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.evaluation.compare import compare_runs, read_run
from tests.bench.tuned_encoders import Sample, keep, reciprocal_ranks, scored_run

COUNT = 6


@pytest.fixture
def corpus():
    sources = [Source(f"s{n}", "text", f"text {n}") for n in range(COUNT)]
    asked = [
        Question(f"{split}{n}", split, "which?", positives=(f"s{n}",))
        for split in ("val", "test")
        for n in range(COUNT)
    ]
    return Corpus(sources, asked)


def sample(corpus: Corpus, split: str, trusts: str) -> Sample:
    """A split whose gold source is second by the encoder and the reranker alike, but by `trusts`."""
    made = Sample(corpus, split, COUNT, 0, 2)
    for number, question in enumerate(made.questions):
        gold, other = f"s{number}", f"s{(number + 1) % COUNT}"
        last = f"s{(number + 2) % COUNT}"
        first = (gold, other) if trusts == "encoder" else (other, gold)
        ranking = Ranking(question.id, (*first, last), (0.9, 0.8, 0.1))
        made.found_by.setdefault("encoder", []).append(ranking)
        judged = {gold: 0.6, other: 0.4} if trusts == "reranker" else {gold: 0.4, other: 0.6}
        judgement = Ranking(question.id, tuple(judged), tuple(judged.values()))
        made.judged_by.setdefault(("encoder", "reranker"), []).append(judgement)
    return made


@pytest.mark.parametrize("trusts", ["encoder", "reranker"])
def test_the_weight_is_chosen_on_val(corpus, trusts, capsys):
    val, test = sample(corpus, "val", trusts), sample(corpus, "test", trusts)
    values = reciprocal_ranks("encoder+reranker", test, val)
    assert values == {f"test{n}": 1.0 for n in range(COUNT)}
    assert "by weight 0: " in capsys.readouterr().out
    misled = reciprocal_ranks("encoder+reranker", sample(corpus, "test", "neither"), val)
    assert set(misled.values()) == {0.5}
    given = "encoder+reranker+64" if trusts == "reranker" else "encoder+reranker+0"
    assert set(reciprocal_ranks(given, test, val).values()) == {0.5}


def test_sources_behind_the_reranked_ones_stay_behind(corpus):
    test = sample(corpus, "test", "reranker")
    ranked = test.reordered("encoder", "reranker", 0.0)
    assert ranked[0].sources == ("s0", "s1", "s2")
    assert sorted(test.found("encoder")[0].sources) == sorted(ranked[0].sources)


def test_what_is_kept_is_compared(corpus, tmp_path):
    test = sample(corpus, "test", "reranker")
    for name, model in (("alone", "encoder"), ("reranked", "encoder+reranker+0")):
        keep(scored_run(name, "data", "test", reciprocal_ranks(model, test, test)), tmp_path / name)
    compared = compare_runs([read_run(tmp_path / name) for name in ("alone", "reranked")], "mrr")
    assert [run["score"] for run in compared["runs"]] == [0.5, 1.0]
