"""`mmqa sweep` over trainings: its runs, what is left of a stop, and what it refuses."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cli_runs import done, mmqa, rows_of, train_flags, tree, weights_of

from mmqa_jax.core.files import read_json
from mmqa_jax.core.workdir import read_config
from mmqa_jax.evaluation import report
from mmqa_jax.evaluation.tables import Table
from mmqa_jax.runs import sweep as sweeps
from mmqa_jax.training.loop import StopSignals
from tests.drawn_weights import drawn_starts
from tests.forks import server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

RATE = "train.optimizer.learning_rate"
OVER = ("--over", f"{RATE}=1e-3,1e-2", "--over", "seed=0,1")
NAMES = [f"learning_rate={rate}_seed={seed}" for rate in ("1e-3", "1e-2") for seed in (0, 1)]
SMALL = {"train.steps": 4, "train.evaluate_every": 2, "validate.split": "train"}


def flags(data: Path, workdir: Path, *over: str, **values) -> list[str]:
    return ["sweep", *train_flags("rerank", data, workdir, **SMALL, **values), *(over or OVER)]


def sweep(*words: str):
    """The sweep, whose runs start from weights that NumPy draws."""
    with drawn_starts():
        return mmqa(*words, "--json")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted sweep: its folder and result."""
    folder = tmp_path_factory.mktemp("whole") / "sweep"
    ended = sweep(*flags(data, folder))
    assert ended.code == 0, ended.err
    return folder, ended.value


def same_runs(one: Path, other: Path) -> None:
    """Bit-equal weights, and equal losses and validations by step."""
    for name in NAMES:
        got, want = weights_of(one / name), weights_of(other / name)
        assert got.keys() == want.keys()
        for key in want:
            np.testing.assert_array_equal(got[key], want[key])
        kept = [
            [
                (row["step"], row[key])
                for row in rows_of(folder / name / "metrics.jsonl")
                if key in row
            ]
            for folder in (one, other)
            for key in ("loss", "eval/source_f1")
        ]
        assert kept[:2] == kept[2:]


def test_a_grid(whole):
    folder, result = whole
    cells = result["cells"]
    assert sorted(cell["workdir"] for cell in cells) == sorted(NAMES)
    best = [cell["best"]["value"] for cell in cells]
    assert best == sorted(best, reverse=True)
    for cell in cells:
        place = folder / cell["workdir"]
        config = read_config(place)
        assert cell["values"] == {
            "learning_rate": config.train.optimizer.learning_rate,
            "seed": config.seed,
        }
        logged = rows_of(place / "metrics.jsonl")
        assert cell["loss"] == [row["loss"] for row in logged if "loss" in row][-1]
        measured = [row["eval/source_f1"] for row in logged if "eval/source_f1" in row]
        assert cell["best"]["value"] == max(measured)
        assert (cell["step"], cell["complete"]) == (4, True)
        assert 0 < cell["goodput"]["share"] < 1
        assert (place / "report.html").exists()
    table = (folder / "sweep.md").read_text().splitlines()
    assert table[2].startswith("| learning_rate | seed | best source F1 | best at step | last loss")
    assert [line.split("|")[2].strip() for line in table[4:8]] == [
        str(cell["values"]["seed"]) for cell in cells
    ]
    page = (folder / "report.html").read_text()
    assert "<h3>loss</h3>" in page
    assert "<h3>validation: source F1</h3>" in page
    assert page.count('data-label="learning_rate 0.001, seed 1"') == page.count("<h3>") - 1
    assert "not finished" not in page
    (folder / "report.html").unlink()
    done("report", f"--workdir={folder}")
    assert (folder / "report.html").read_text() == page
    status = done("status", folder)
    assert (status["complete"], status["runs_complete"]) == (True, 4)


def test_a_run_is_what_mmqa_train_gives(whole, data, tmp_path):
    folder, _ = whole
    values = {**SMALL, RATE: 1e-2, "seed": 1}
    done("train", *train_flags("rerank", data, tmp_path / "run", **values))
    want, got = weights_of(tmp_path / "run"), weights_of(folder / NAMES[3])
    for key in want:
        np.testing.assert_array_equal(got[key], want[key])


def test_finished_runs_are_left_alone(whole, data):
    folder, result = whole
    before = {name: tree(folder / name) for name in NAMES}
    assert sweep(*flags(data, folder)).value == result
    assert {name: tree(folder / name) for name in NAMES} == before


def run_until_killed(words: list[str]) -> None:
    """In a process of its own: kill -9 at the third run's second step."""
    train = sweeps.run_training

    def kill_in_third(config, folder):
        if folder.name == NAMES[2]:
            from mmqa_jax.core.checkpoints.checkpoint import Checkpoints

            save = Checkpoints.save

            def saved(self, step, **state):
                save(self, step, **state)
                if step == 2:
                    self.wait()
                    os.kill(os.getpid(), signal.SIGKILL)

            Checkpoints.save = saved
        return train(config, folder)

    sweeps.run_training = kill_in_third
    sweep(*words)


def test_kill_9_and_again(whole, data, tmp_path):
    folder, _ = whole
    run = tmp_path / "run"
    words = flags(data, run)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        f"import test_training_sweep; test_training_sweep.run_until_killed({words!r})"
    )
    fork = server().start(["-c", code], os.environ)
    said, _ = fork.communicate(300)
    assert fork.returncode == -signal.SIGKILL, said
    status = done("status", run)
    assert (status["complete"], status["runs_complete"]) == (False, 2)
    steps = {cell["workdir"]: cell["status"] for cell in status["cells"]}
    assert steps[NAMES[3]] is None
    done("report", f"--workdir={run}")
    assert "2 of 4 runs are not finished." in (run / "report.html").read_text()
    before = [tree(run / name) for name in NAMES[:2]]
    assert sweep(*words).code == 0
    assert [tree(run / name) for name in NAMES[:2]] == before
    assert (
        len([row for row in rows_of(run / NAMES[2] / "attempts.jsonl") if row["event"] == "start"])
        == 2
    )
    same_runs(run, folder)


def test_ctrl_c(data, tmp_path, monkeypatch):
    """In the second run, which is saved; the page is written, and the third never begins."""
    received = StopSignals.received

    def interrupted(self, checkpoints, step):
        if (tmp_path / "run" / NAMES[1]).exists():
            os.kill(os.getpid(), signal.SIGINT)
        return received(self, checkpoints, step)

    monkeypatch.setattr(StopSignals, "received", interrupted)
    ended = sweep(*flags(data, tmp_path / "run"))
    assert ended.code == 130
    status = done("status", tmp_path / "run")
    of_runs = [cell["status"] and cell["status"]["saved"] for cell in status["cells"]]
    assert [bool(saved) for saved in of_runs] == [True, True, False, False]
    assert not (tmp_path / "run" / NAMES[2]).exists()
    assert "3 of 4 runs are not finished." in (tmp_path / "run" / "report.html").read_text()


def test_a_run_that_diverges_does_not_end_the_others(data, tmp_path):
    over = ("--over", f"{RATE}=1e30,1e-3")
    ended = sweep(*flags(data, tmp_path / "run", *over, **{"train.optimizer.warmup": 0.0}))
    assert ended.code == 1
    assert "1 of 2 runs ended early, the first of them learning_rate=1e30: step" in ended.err
    last, first = read_json(tmp_path / "run" / "sweep.json")["cells"]
    assert "is nan" in last["failed"] or "is inf" in last["failed"]
    assert "failed" not in first
    assert "learning_rate=1e30: step" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["train.stps=1,2"], r"cell train\.stps=1: config key train\.stps: unknown; .*'steps'"),
        (["seed="], r"--over=seed=: KEY=VALUE,VALUE"),
        ([f"{RATE}=1e-3,0.001"], r"--over: learning_rate=1e-3 and .*0\.001 are the same run"),
        (
            ["train.steps=2,0"],
            r"--over, cell train\.steps=0: config key train\.steps=0: at least 1",
        ),
        (["seed=0,one"], r"cell seed=one: .*a whole number"),
        (["model.trunk=minilm_l6,huge"], r"cell model\.trunk=huge: .*model\.trunk=huge: unknown"),
        (["data.split=dev,tset"], r"config key data\.split=dev: .*no such questions"),
    ],
)
def test_wrong_sweeps(data, tmp_path, refused, over, message):
    """Refused before any run begins, and nothing is written."""
    given = [word for value in over for word in ("--over", value)]
    refused(*flags(data, tmp_path / "run", *given), message=message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--split=val", "--limit=3", "--chunk=9"])
def test_flags_of_rows(data, tmp_path, refused, flag):
    refused(
        *flags(data, tmp_path / "run"), flag, message=rf"{flag.split('=')[0]}: is of a sweep over"
    )


def test_a_folder_of_a_training(whole, data, refused):
    refused(*flags(data, whole[0] / NAMES[0]), message=r"holds another kind of run \(training\)")


def test_a_damaged_sweep(tmp_path, refused):
    (tmp_path / "sweep.json").write_text('{"task": "rerank", "cells": [{"values": 3}]}')
    for words in (["report", f"--workdir={tmp_path}"], ["status", tmp_path]):
        refused(*words, message=r"sweep\.json: is damaged; start `mmqa sweep`")


def test_long_lines_lie_over_each_other():
    """A few round ticks and a running mean on top; styles recur after all colors and dashes."""
    lines = {"none yet": (), "run": [(step, step % 7) for step in range(200)]}
    plot = report.LinePlot("loss", "step", lines, steps=True)
    drawn = plot.svg()
    assert drawn.count("data-points") == 1
    assert drawn.count('class="line c1') == 2
    page = report.render_report(
        report.ReportData("title", line_plots=[plot], tables=[Table("runs", ["a"], [[1]])])
    )
    assert page.index("<h3>runs") < page.index("<h3>loss")
    assert '<li class="c1"><span>run' in page
    assert "none yet" not in page
    assert drawn.count("<text") < 15
    styles = [report.line_style(number) for number in range(report.COLORS * report.DASHES + 1)]
    assert len(set(styles)) == report.COLORS * report.DASHES
    assert styles[-1] == styles[0]
