"""Boards: the best published systems of a benchmark, beside what was measured of our rows."""

import json
import re

import pytest

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.benchmark import open_benchmark
from mmqa_jax.benchmarks.mbeir import SETS
from mmqa_jax.runs.tables import board_tables, list_rows

BOARDS = [board for name in NAMES for board in open_benchmark(name).boards]


def measured(folder, dataset, row, split, by_category, scorer, mean=0.5):
    """Writes what a run of a row measured."""
    (folder / row).mkdir(parents=True)
    scores = {
        "row": row,
        "dataset": dataset,
        "split": split,
        "n": 32,
        "scores": {scorer: mean},
        "by_category": {name: {scorer: value} for name, value in by_category.items()},
        "n_by_scorer": {scorer: 32},
        "n_by_category": dict.fromkeys(by_category, 2),
    }
    (folder / row / "scores.json").write_text(json.dumps(scores))


def board(dataset, folder):
    return board_tables(list_rows(dataset, folder))[0]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.measure)
def test_systems_are_dated_and_in_order(board):
    figures = [system.percent for system in board.systems]
    assert figures == sorted(figures, reverse=True)
    assert len(figures) == 5
    assert all(0 < figure < 100 for figure in figures)
    assert all(system.source for system in board.systems)
    assert all(re.fullmatch(r"20\d\d(-\d\d){0,2}", system.date) for system in board.systems)


def test_a_row_of_ours_stands_where_its_figure_is(tmp_path):
    measured(tmp_path, "mmmu", "qwen3_vl", "val", {}, "mmmu/official", 0.843)
    rows = board("mmmu", tmp_path).rows
    assert [row[0] for row in rows[1:4]] == [
        "DreamPRM-1.5 (GPT-5-mini)",
        "qwen3_vl",
        "GPT-5, thinking",
    ]
    assert rows[2] == ["qwen3_vl", 0.843, 32, "ours", ""]


def test_sets_that_rows_ran_one_by_one(tmp_path):
    languages = {"vidore_v3_hr, english": 0.9, "vidore_v3_hr, french": 0.5}
    for name, by_category in (
        ("vidore_v3_hr", {"vidore_v3_hr": 0.8, **languages}),
        ("vidore_v3_physics", {"vidore_v3_physics": 0.3}),
    ):
        measured(tmp_path, "vidore", f"bm25_{name}", "test", by_category, "vidore/official")
    # Of another version of ViDoRe.
    other = "esg_reports_v2"
    row = f"qwen3_vl_embedding_{other}"
    measured(tmp_path, "vidore", row, "test", {other: 0.9}, "vidore/official")
    (ours,) = (row for row in board("vidore", tmp_path).rows if row[3].startswith("ours"))
    assert ours == ["bm25", pytest.approx((0.7 + 0.3) / 2), 64, "ours, 2 of 8 sets", ""]


def test_sets_that_one_row_ran_in_one_pool(tmp_path):
    of_sets = {name: number / 100 for number, name in enumerate(SETS)}
    scorer = "mbeir/official"
    measured(tmp_path, "mbeir", "clip_sf_union", "test", of_sets, scorer)
    own_pool = {"webqa_task1": 0.9}
    measured(tmp_path, "mbeir", "clip_sf_webqa_task1", "test", own_pool, scorer)
    (ours,) = (row for row in board("mbeir", tmp_path).rows if row[3].startswith("ours"))
    assert ours == ["clip_sf_union", pytest.approx(0.075), 32, "ours, 16 of 16 sets", ""]


def test_a_board_of_pipelines_and_one_that_no_score_of_ours_measures(tmp_path):
    # Questions in English alone count on the board of pipelines.
    of_set = {"vidore_v3_hr": 0.5, "vidore_v3_hr, english": 0.67, "vidore_v3_hr, french": 0.33}
    measured(tmp_path, "vidore", "bm25_vidore_v3_hr", "test", of_set, "vidore/official")
    models, pipelines = board_tables(list_rows("vidore", tmp_path))
    assert (models.title, pipelines.title) == ("vidore, board", "vidore, board of pipelines")
    assert [row[0] for row in models.rows].index("bm25") == 5
    assert [row[0] for row in pipelines.rows].index("bm25") == 1
    measured(tmp_path, "fvqa", "qwen3_vl", "test", {}, "fvqa/em", 0.9)
    assert not any(row[3].startswith("ours") for row in board("fvqa", tmp_path).rows)
