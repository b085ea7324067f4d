"""`mmqa evaluate`: scores by hand, every format it reads, and files it refuses."""

from __future__ import annotations

import json

import pytest
from cli_runs import TEST, done, rows_of, write_rows

pytestmark = pytest.mark.usefixtures("quick_and_quiet")


def gold() -> list[dict]:
    return [
        {"question_id": row["id"], "answer": row["answers"][0], "sources": row["positives"]}
        for row in TEST
    ]


def test_evaluate_scores_predictions_by_hand(data, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}")
    path = write_rows(tmp_path / "gold.jsonl", gold())
    result = done(*flags, f"--predictions={path}")
    assert (result["dataset"], result["n"], result["missing"]) == ("corpus", 5, 0)
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert result["scores"]["source_f1/notebook"] == pytest.approx(1.0, abs=1e-4)
    # One answer is missing, one wrong, one source too much.
    rows = gold()[1:]
    rows[0]["answer"] = "The capital of Doriath is unknown."
    rows[1]["sources"] = ["s-Erewhon", "s-Hav"]
    result = done(*flags, f"--predictions={write_rows(tmp_path / 'some.jsonl', rows)}")
    assert result["missing"] == 1
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(3 / 5, abs=1e-4)
    assert result["scores"]["source_f1/notebook"] == pytest.approx(
        (0 + 1 + 2 / 3 + 1) / 4, abs=1e-4
    )
    assert result["by_category"]["color"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert result["by_category"]["text"]["webqa_acc/no_lemma"] == pytest.approx(2 / 4, abs=1e-4)
    # Of what was answered alone.
    result = done(*flags, f"--predictions={tmp_path / 'some.jsonl'}", "--only_given")
    assert (result["n"], result["missing"]) == (4, 0)
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(3 / 4, abs=1e-4)


def test_evaluate_reads_the_leaderboards_format_and_rankings(data, bm25, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}")
    submission = {
        row["question_id"]: {"sources": row["sources"], "answer": row["answer"]} for row in gold()
    }
    (tmp_path / "submission.json").write_text(json.dumps(submission))
    result = done(*flags, f"--predictions={tmp_path / 'submission.json'}")
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    result = done(*flags, f"--predictions={bm25}")
    assert result["n"] == 4  # test4 has no gold sources
    assert result["scores"]["recall@1"] == 1.0
    assert result["scores"]["mrr"] == 1.0
    some = write_rows(tmp_path / "some.jsonl", rows_of(bm25)[1:])
    assert done(*flags, f"--predictions={some}", "--only_given")["n"] == 3


def test_only_given_of_a_file_of_other_questions(data, bm25, refused, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}", "--split=val", "--only_given")
    path = write_rows(tmp_path / "gold.jsonl", gold())
    for file in (path, bm25):
        message = rf"--only_given: {file} holds none of the 3 questions of this split; name another"
        refused(*flags, f"--predictions={file}", message=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question_id": "other"}, r"no question has the id 'other'"),
        ({"question_id": "test0"}, r"question 'test0' is answered twice"),
        ({"question_id": 7}, r"bad\.jsonl, line 2: expected an object with a text \"question_id\""),
        ({"answer": 7}, r"bad\.jsonl, line 2: \"answer\" must be text"),
        ({"sources": "s-Hav"}, r"bad\.jsonl, line 2: \"sources\" must be a list of id strings"),
        ({"sources": [3]}, r"bad\.jsonl, line 2: \"sources\" must be a list of id strings"),
        (
            {"sources": ["s-Nowhere"]},
            r"bad\.jsonl, line 2: source 's-Nowhere' is not in the corpus",
        ),
        ("{oops", r"bad\.jsonl, line 2: not valid JSON"),
        ("[]", r"bad\.jsonl, line 2: expected an object"),
    ],
)
def test_broken_predictions(change, message, data, refused, tmp_path):
    lines = [json.dumps(row) for row in gold()]
    lines[1] = change if isinstance(change, str) else json.dumps({**gold()[1], **change})
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    flags = ("evaluate", "corpus", f"--references={data}")
    refused(*flags, f"--predictions={tmp_path / 'bad.jsonl'}", message=message)


def test_broken_submission(data, refused, tmp_path):
    path = tmp_path / "submission.json"
    flags = ("evaluate", "webqa", f"--references={data}", f"--predictions={path}")
    path.write_text('{"test0":\n {"answer": "a",\n "sources": oops}}')
    refused(*flags, message=r"submission\.json, line 3, column 13: not valid JSON")
    path.write_text('{"test0": {"answer": "a"}}')
    refused(*flags, message=r"submission\.json, Guid test0: sources must be a list")
    path.write_text('{"other": {"answer": "a", "sources": []}}')
    refused(*flags, message=r"no question has the id 'other'")
