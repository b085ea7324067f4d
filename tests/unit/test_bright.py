"""BRIGHT: a task as Parquet, nDCG equal to pytrec_eval's without excluded documents."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_runs import done

from mmqa_jax.benchmarks.bright import SCORER, read_bright, score_bright
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction, Question
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

DOCUMENTS = {
    "id": ["a.txt", "b.txt", "c.txt"],
    "content": ["Mitosis.", "", "Plants turn to light."],
}
EXAMPLES = {
    "id": ["0", "1"],
    "query": ["Why do plants bend?", "How do cells divide?"],
    "gold_ids": [["c.txt", "c.txt"], ["a.txt"]],
    "excluded_ids": [["a.txt"], ["N/A"]],
    "reasoning": ["light", None],
}


def write_task(folder, task="biology", documents=DOCUMENTS, examples=EXAMPLES):
    for name, columns in (("documents", documents), ("examples", examples)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        if columns is not None:
            pq.write_table(pa.table(columns), folder / name / f"{task}-00000-of-00001.parquet")
    return folder / "documents" / f"{task}-00000-of-00001.parquet"


def test_a_task_is_read(tmp_path):
    raw = write_task(tmp_path / "BRIGHT")
    done("prepare", "bright", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    corpus = open_corpus(tmp_path / "out")
    assert [source.id for source in corpus.sources] == [f"biology/{x}.txt" for x in "abc"]
    first, second = corpus.questions("test")
    assert (first.id, first.category, first.positives) == (
        "biology/0", "biology", ("biology/c.txt",),
    )  # fmt: skip
    assert first.extra == {"excluded": ["biology/a.txt"], "reasoning": "light"}
    assert second.extra == {"excluded": []}


def examples(**changes):
    return {**EXAMPLES, **changes}


@pytest.mark.parametrize(
    ("message", "task", "content"),
    [
        ("is no file of a task's documents", "cooking", EXAMPLES),
        ("holds no aops-", "aops", None),
        ("gold_ids names 'biology/d'", "biology", examples(gold_ids=[["d"], ["a.txt"]])),
        ("both name 'biology/a.txt'", "biology", examples(gold_ids=[["a.txt"], ["b.txt"]])),
        ("has no column query", "biology", {"id": ["0"]}),
        ("id 'biology/0' is there twice", "biology", examples(id=["0", "0"])),
    ],
)
def test_refused_files(message, task, content, tmp_path):
    raw = write_task(tmp_path / "BRIGHT", task, examples=content)
    refuses(message, read_bright, raw)


def test_the_folder_is_no_task(tmp_path):
    raw = write_task(tmp_path / "BRIGHT")
    refuses("is no file of a task's documents", read_bright, raw.parents[1])


def test_ndcg_is_that_of_pytrec_eval():
    import pytrec_eval

    random = np.random.default_rng(0)
    names = [f"biology/{n}" for n in range(40)]
    questions, predictions, results, relevant = [], [], {}, {}
    for number in range(60):
        drawn = random.permutation(names).tolist()
        gold, excluded = drawn[: random.integers(1, 6)], drawn[6 : 6 + random.integers(0, 9)]
        found = random.permutation(names)[: random.integers(5, 40)].tolist()
        scores = random.integers(0, 9, len(found)) / 8  # with ties
        order = np.argsort(-scores, kind="stable")
        name, task = f"q{number}", ("biology", "aops")[number % 2]
        question = Question(
            name, "test", "?", category=task, positives=tuple(gold), extra={"excluded": excluded}
        )
        questions.append(question)
        ranked = tuple(found[row] for row in order)
        predictions.append(Prediction(name, "", ranked, tuple(scores[order].tolist())))
        relevant[name] = dict.fromkeys(gold, 1)
        pairs = zip(found, scores.tolist(), strict=True)
        results[name] = {source: score for source, score in pairs if source not in excluded}
    evaluation = score_bright(questions, predictions)
    (scored,) = evaluation.scored
    theirs = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.10"}).evaluate(results)
    expected = np.array([theirs[question.id]["ndcg_cut_10"] for question in questions])
    np.testing.assert_allclose(scored.per_question[SCORER], expected, atol=1e-9)
    assert 0.1 < expected.mean() < 0.9
    average = 100 * (expected[::2].mean() + expected[1::2].mean()) / 2
    assert evaluation.notes == [f"average of 2 of 12 tasks, nDCG@10: {average:.2f} %"]
    (missing,) = score_bright(questions, predictions[1:]).scored
    assert (missing.missing, missing.per_question[SCORER][0]) == (1, 0)
