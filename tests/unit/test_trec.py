"""Runs and qrels of TREC: round trip, every mistake by its line, scores beside ir-measures."""

import ir_measures
import numpy as np
import pytest
from ir_measures import RR, R, nDCG

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.retrieval.rankings import (
    gold_of,
    holds_rankings,
    is_qrels,
    read_qrels,
    read_rankings,
    write_qrels,
    write_rankings,
)
from tests.refusals import refuses

KS = (1, 2, 5, 10, 100)
RUN = "q1 Q0 a 1 0.5 bm25\nq1 Q0 b 2 0.25 bm25\n"


def test_a_ranking_written_and_read_is_the_same(tmp_path):
    rankings = [
        Ranking("q1", ("b", "a", "é-1"), (0.1, 0.1, -3e-9)),  # a tie keeps its order
        Ranking("q2", (), ()),
        Ranking("q3", ("a",), (float(np.float32(1 / 3)),)),
    ]
    path = tmp_path / "retrieval" / "bm25.trec"
    write_rankings(path, rankings)
    assert path.read_text("utf-8").splitlines()[0] == "q1 Q0 b 1 0.1 mmqa_jax"
    assert read_rankings(path, ["q1", "q2", "q3"], {"a", "b", "é-1"}) == rankings
    assert read_rankings(path) == [rankings[0], rankings[2]]  # no line, no question
    assert holds_rankings(path)


def test_a_run_of_other_tools(tmp_path):
    """Tabs, ranks from 0, lines in any order: scores alone decide, as in trec_eval."""
    path = tmp_path / "lucene.trec"
    path.write_text(
        "q2\t0\tz\t0\t7\tAnserini\nq1 Q0 b 1 .25 x\nq1 Q0 a 0 2.5e-1 x\n\nq1 Q0 c 9 3 x"
    )
    assert read_rankings(path) == [
        Ranking("q2", ("z",), (7.0,)),
        Ranking("q1", ("c", "b", "a"), (3.0, 0.25, 0.25)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q1 Q0 c 3 0.1", "has 5 columns, 6 were expected"),
        ("q1 Q0 c d 3 0.1 x", "has 7 columns"),
        ("q1 Q0 c 3 nan x", "score is 'nan', a finite number"),
        ("q1 Q0 c 3 1e999 x", "score is '1e999', a finite number"),
        ("q1 Q0 c 3 1_0 x", "score is '1_0', a finite number"),
        ("q1 Q0 c third 0.1 x", "rank is 'third', a whole number"),
        ("q1 Q0 a 3 0.1 x", "source 'a' is ranked twice for question 'q1'"),
        ("q9 Q0 a 1 0.1 x", "question 'q9' is not among the 1"),
    ],
)
def test_bad_lines_of_a_run_are_named(tmp_path, line, message):
    path = tmp_path / "r.trec"
    path.write_text(RUN + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        read_rankings(path, ["q1"], {"a", "b", "c"})
    assert str(caught.value).startswith(f"{path}, line 3: ")


def test_runs_that_are_no_runs(tmp_path):
    path = tmp_path / "r.trec"
    path.write_text("\n \n")
    refuses("holds no rankings", read_rankings, path)
    path.write_text(RUN)
    refuses(r"r\.trec, line 1: source 'b' is not in the corpus", read_rankings, path, ["q1"], {"a"})
    refuses("no such file", read_rankings, tmp_path / "none.trec")


@pytest.mark.parametrize(
    ("ranking", "message"),
    [
        (Ranking("q 1", ("a",), (1.0,)), "question 'q 1' is empty or has a space"),
        (Ranking("q1", ("red panda.png",), (1.0,)), "'red panda.png' is empty or has a space"),
        (Ranking("q1", ("",), (1.0,)), "source '' is empty"),
        (Ranking("q1", ("a", "b"), (1.0, 2.0)), "'b' at rank 2 has a higher score"),
        (Ranking("q1", ("a",), (float("nan"),)), "source 'a' is nan"),
    ],
)
def test_what_a_run_cannot_hold(tmp_path, ranking, message):
    path = tmp_path / "r.trec"
    refuses(message, write_rankings, path, [Ranking("q0", ("a",), (1.0,)), ranking])
    assert not path.exists()


def test_qrels_written_and_read(tmp_path):
    path = tmp_path / "val.qrels"
    asked = [Question("q1", "val", "?", positives=("a", "b")), Question("q2", "val", "?")]
    write_qrels(path, asked)
    assert path.read_text() == "q1 0 a 1\nq1 0 b 1\n"
    assert read_qrels(path) == {"q1": {"a": 1, "b": 1}}
    path.write_text("q1 0 a 0\nq1 0 b 3\nq2 0 a -1")
    assert gold_of(read_qrels(path)) == {"q1": {"b": 3}, "q2": {}}
    refuses("none of the 1 questions has gold sources", write_qrels, path, asked[1:])
    path.write_text("\n")
    refuses(r"val\.qrels: holds no judgments; write", read_qrels, path)
    assert [is_qrels(tmp_path / name) for name in ("2019qrels-pass.txt", "run.trec")] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q1 0 b", "has 3 columns, 4 were expected"),
        ("q1 0 b yes", "relevance is 'yes', a whole number"),
        ("q1 0 b 0.5", "relevance is '0.5', a whole number"),
        ("q1 0 a 0", "source 'a' is judged twice for question 'q1'"),
    ],
)
def test_bad_lines_of_qrels_are_named(tmp_path, line, message):
    path = tmp_path / "qrels.txt"
    path.write_text(f"q1 0 a 1\n{line}\n")
    with pytest.raises(UserError, match=message) as caught:
        read_qrels(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")


@pytest.mark.parametrize("largest", [1, 3], ids=["binary", "graded"])
def test_scores_are_those_of_ir_measures(tmp_path, largest):
    """Which runs trec_eval's own code, over the files that we write."""
    rng = np.random.default_rng(largest)
    names = [f"s{i}" for i in range(300)]
    lines, rankings = [], []
    for number in range(40):
        gold = rng.choice(names, rng.integers(1, 12), replace=False)
        ranked = rng.permutation(np.union1d(gold[: len(gold) // 2], rng.choice(names, 120)))
        if number == 7:
            ranked = ranked[:0]  # nothing was found: counts 0
        scores = np.sort(rng.permutation(10_000)[: len(ranked)])[::-1] / 7  # trec_eval breaks ties
        lines += [f"q{number} 0 {name} {rng.integers(1, largest + 1)}" for name in gold]
        lines += [f"q{number} 0 {name} 0" for name in set(names[:20]) - set(gold)]
        rankings.append(Ranking(f"q{number}", tuple(ranked.tolist()), tuple(scores.tolist())))
    (tmp_path / "x.qrels").write_text("\n".join(lines))
    write_rankings(tmp_path / "x.trec", rankings)

    gold = gold_of(read_qrels(tmp_path / "x.qrels"))
    read = read_rankings(tmp_path / "x.trec", list(gold))
    per = score_rankings([*gold.values()], [ranking.sources for ranking in read], KS).per_question
    ours = {"mrr": RR} | {f"recall@{k}": R @ k for k in KS} | {f"ndcg@{k}": nDCG @ k for k in KS}
    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "x.qrels")))
    run = list(ir_measures.read_trec_run(str(tmp_path / "x.trec")))
    theirs = {
        (m.measure, m.query_id): m.value for m in ir_measures.iter_calc(ours.values(), qrels, run)
    }
    assert len(theirs) == 40 * len(ours)
    for name, measure in ours.items():
        expected = [theirs[measure, question] for question in gold]
        np.testing.assert_allclose(per[name], expected, atol=1e-9, err_msg=name)
    assert 0 < per["ndcg@10"].mean() < 1
