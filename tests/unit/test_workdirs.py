"""`mmqa report` and `mmqa status` of every kind of workdir."""

import json
import shutil
import subprocess
import sys

import pytest
from cli_runs import done, mmqa
from report_pages import cards_of
from row_runs import row_flags

from mmqa_jax.core.workdir import Workdir
from mmqa_jax.runs.status import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module")
def rows(data, models, index, tmp_path_factory):
    """A folder of three finished rows."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("atlas:full", "atlas:bm25", "webqa:bm25_full"):
        paper, row = name.split(":")
        done(*row_flags(name, folder / paper / row, data, models, index))
    return folder


@pytest.mark.parametrize("name", ["atlas/full", "atlas/bm25", "webqa/bm25_full"])
def test_the_report_of_a_row_is_the_one_that_its_run_wrote(name, rows):
    page = rows / name / "report.html"
    written = page.read_text()
    page.unlink()
    assert done("report", f"--workdir={rows / name}") == {"report": str(page)}
    assert page.read_text() == written
    assert len(cards_of(written)) == 5


def test_a_row_whose_data_is_gone(rows, refused, tmp_path):
    (tmp_path / "row").mkdir()
    for name in ("scores.json", "per_question.jsonl", "predictions.jsonl", "config.json"):
        text = (rows / "atlas/bm25" / name).read_text()
        (tmp_path / "row" / name).write_text(text)
    file = tmp_path / "row" / "config.json"
    record = json.loads(file.read_text())
    record["config"]["data"]["dir"] = "nowhere"
    del record["fingerprint"]
    file.write_text(json.dumps(record))
    refused("report", f"--workdir={tmp_path / 'row'}", message="its data is not at nowhere")
    (tmp_path / "row" / "scores.json").unlink()
    refused("report", f"--workdir={tmp_path / 'row'}", message=r"holds no finished run \(no scores")


def test_a_row_whose_data_was_prepared_anew(rows, refused, tmp_path):
    row = tmp_path / "row"
    shutil.copytree(rows / "atlas/bm25", row)
    lines = (row / "predictions.jsonl").read_text()
    (row / "predictions.jsonl").write_text(
        lines.replace('"question_id": "', '"question_id": "old', 1)
    )
    message = r"row: the data at .* has no question 'old.*prepared anew since\); run the row again"
    refused("report", f"--workdir={row}", message=message)


def test_the_report_of_a_folder_of_rows(rows):
    """Rows that answer before those that only find sources; names lead to their reports."""
    done("report", f"--workdir={rows}")
    page = (rows / "report.html").read_text()
    assert page.index(">atlas, test: answer accuracy") < page.index(">atlas, test: source F1")
    for name in ("atlas/full", "atlas/bm25", "webqa/bm25_full"):
        assert f'<a href="./{name}/report.html">{name}</a>' in page
    status = done("status", rows)
    assert status["complete"]
    assert status["complete_rows"] == ["atlas/bm25", "atlas/full", "webqa/bm25_full"]


def test_the_pages_of_two_rows_show_questions_and_sources(rows, tmp_path):
    page = tmp_path / "two.html"
    pair = [rows / "atlas" / name for name in ("full", "bm25")]
    done("compare", *pair, "--metric=source_f1/official", f"--report={page}")
    cards = cards_of(page.read_text())
    assert "What is the capital of Cinnabar?" in {card["question"] for card in cards}
    cited = [place for card in cards for place in card["sources"] if place["cited"]]
    assert "The capital of Cinnabar is Vermil." in {place["text"] for place in cited}


def test_the_status_of_a_row(rows, tmp_path):
    finished = done("status", rows / "atlas/full")
    assert (finished["complete"], finished["row"], finished["questions"]) == (True, "full", 5)
    assert "row full: complete, 5 questions, answer accuracy (WebQA, no" in mmqa(
        "status", rows / "atlas/full"
    ).out.replace("\n", " ")
    with Workdir(tmp_path / "begun") as workdir:
        workdir.claim({"row": "full"})
    begun = done("status", tmp_path / "begun")
    assert (begun["complete"], begun["row"]) == (False, "full")


def test_the_status_of_a_sweep_whose_cells_are_deleted(tmp_path, refused):
    (tmp_path / "sweep.json").write_text('{"cells": []}')
    message = f"{tmp_path}: holds a sweep without a finished cell; start `mmqa sweep` again"
    refused("status", tmp_path, message=message)


def test_the_status_of_a_training(models):
    assert done("status", models / "contrastive")["complete"]


def test_the_status_of_a_demo(tmp_path):
    """Its stages, and the time left once the first is done."""
    from mmqa_jax.core.config import load_config

    with Workdir(tmp_path) as workdir:
        workdir.claim(load_config("configs/atlas/demo.py", []))
        for number, stage in enumerate(STAGES):
            status = done("status", tmp_path)
            assert (status["complete"], status["stage"]) == (False, stage)
            assert status["stages_done"] == number
            assert (status["seconds_left"] is None) == (number == 0)
            with workdir.stage(stage):
                pass
    status = done("status", tmp_path)
    assert (status["complete"], status["stage"], status["seconds_left"]) == (True, None, 0.0)
    assert "demo: complete, 11 stages in 0:00" in mmqa("status", tmp_path).out


def test_the_status_tells_which_process_is_at_work(tmp_path, data):
    code = (
        "import sys, time; from pathlib import Path; from mmqa_jax.core.locks import hold\n"
        "lock = hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    (tmp_path / "config.json").write_text('{"config": {"row": "full"}}')
    idle = mmqa("status", tmp_path)
    assert idle.out.endswith("no process is at work on it.\n"), idle.out
    command = [sys.executable, "-c", code, tmp_path / ".lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        busy = done("status", tmp_path)
        process.kill()
    assert busy["writer"].startswith(f"process {process.pid} on ")
    assert done("status", tmp_path)["writer"] == ""
