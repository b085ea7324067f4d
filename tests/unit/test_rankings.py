"""retrieval/*.jsonl: round trip, and every mistake named with file and line."""

import json

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Ranking
from mmqa_jax.retrieval.rankings import read_rankings, to_rankings, write_rankings
from tests.refusals import refuses

ROWS = [
    {"question_id": "q1", "sources": ["a", "b"], "scores": [0.5, 0.25]},
    {"question_id": "q2", "sources": [], "scores": []},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_round_trip_in_the_order_of_the_questions(tmp_path):
    rankings = [Ranking("q1", ("a", "b"), (0.1, -3e-9)), Ranking("q2", (), ())]
    path = tmp_path / "retrieval" / "bm25.jsonl"
    write_rankings(path, rankings)
    assert json.loads(path.read_text().splitlines()[0]) == {
        "question_id": "q1",
        "sources": ["a", "b"],
        "scores": [0.1, -3e-9],
    }
    assert read_rankings(path) == rankings
    assert read_rankings(path, ["q2", "q1"], {"a", "b"}) == rankings[::-1]


def test_to_rankings_drops_padding():
    rows = np.array([[2, 0], [1, -1]], np.int32)
    scores = np.array([[0.5, 0.25], [1.5, -np.inf]], np.float32)
    assert to_rankings(["x", "y"], rows, scores, ["a", "b", "c"]) == [
        Ranking("x", ("c", "a"), (0.5, 0.25)),
        Ranking("y", ("b",), (1.5,)),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question_id": "q9", "sources": [], "scores": []}, "'q9' is not among the 2"),
        (ROWS[0], "'q1' is ranked twice"),
        ({"question_id": "q2", "sources": ["z"], "scores": [1]}, "'z' is not in the corpus"),
        ({"question_id": "q2", "sources": ["a", "a"], "scores": [1, 0]}, "'a' is ranked twice"),
        ({"question_id": "q2", "sources": ["a"], "scores": [1, 2]}, "1 sources but 2 scores"),
        ({"question_id": "q2", "sources": ["a"], "scores": [float("nan")]}, "finite numbers"),
        ({"question_id": "q2", "sources": ["a"], "scores": [True]}, "finite numbers"),
        ({"question_id": "q2", "sources": [1], "scores": [1]}, "id strings"),
        ({"question_id": 2, "sources": [], "scores": []}, "question_id must be a string"),
        ({"question_id": "q2", "sources": []}, "expected"),
        (["q2"], "expected"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    path = write(tmp_path / "r.jsonl", [ROWS[0], row])
    with pytest.raises(UserError, match=message) as caught:
        read_rankings(path, ["q1", "q2"], {"a", "b"})
    assert f"{path}, line 2: " in str(caught.value)


def test_missing_questions_missing_file_and_bad_json(tmp_path):
    path = write(tmp_path / "r.jsonl", ROWS[:1])
    refuses(r"r\.jsonl: 1 of 2 questions .* 'q2'", read_rankings, path, ["q1", "q2"])
    refuses("no such file", read_rankings, tmp_path / "none.jsonl")
    path.write_text(json.dumps(ROWS[0]) + "\n{")
    refuses("line 2: not valid JSON", read_rankings, path)
