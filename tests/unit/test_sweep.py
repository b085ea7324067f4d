"""`mmqa sweep`: cells of one row, what they share, what goes wrong, and what is left of a kill."""

import os
import signal
from pathlib import Path

import pytest
from cli_runs import ROOT, done, mmqa, rows_of
from mavl_team import FULL, team_llm
from vqa_files import prepare_team

from mmqa_jax.core.files import read_json
from mmqa_jax.core.workdir import read_config
from mmqa_jax.evaluation.report import LinePlot
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.prompting.examples.side_files import write_candidates
from mmqa_jax.runs import parts
from mmqa_jax.runs.sweep import parse_axes, sweep_plots
from tests.forks import server
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

IDS = ("25", "26", "35")
OVER = ("--over", "options.shots=0,1", "--over", "options.candidates=0,2")


def by_candidates(prompt: str) -> tuple[str, float]:
    """Another answer with candidates in the prompt."""
    return ("race" if "Candidates:" in prompt.rpartition("=====")[2] else "soup"), -0.5


class Model:
    """Opens a language model of known answers in place of the row's; counts.

    Args:
      stop: called before the query with the number `at`, from 1 on, over all models.
    """

    def __init__(self, at: int = 0, stop=lambda: None):
        self.opened = self.asked = self.calls = 0
        self._at, self._stop = at, stop

    def __call__(self, spec, cache, flag="") -> Cached:
        self.opened += 1
        backend = team_llm(FULL, by_candidates)
        backend.fingerprint = "fake"
        answer = backend.answer

        def counted(queries):
            self.calls += 1
            for query in queries:
                self.asked += 1
                if self.asked == self._at:
                    self._stop()
                yield from answer([query])

        backend.answer = counted
        return Cached(backend, ResponseCache(spec.cache or cache))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = prepare_team(tmp_path_factory.mktemp("sweep"))
    (folder / "llm").mkdir()  # is opened by `Model`
    write_candidates(
        folder / "candidates.json", {name: [("race", 0.6), ("two", 0.2)] for name in IDS}
    )
    return folder


def flags(inputs: Path, workdir: Path, *over: str) -> list[str]:
    values = {
        "data.dir": inputs / "data",
        "parts.llm.model": inputs / "llm",
        "parts.llm.cache": "",
        "parts.heuristics.candidates": inputs / "candidates.json",
        "parts.heuristics.examples": inputs / "examples.json",
        "parts.knowledge.data": inputs / "knowledge",
    }
    config = f"--config={ROOT}/configs/okvqa/tables.py:smollm2_mavl"
    own = [f"--config.{key}={value}" for key, value in values.items()]
    return ["sweep", config, f"--workdir={workdir}", *own, *(over or OVER)]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """An uninterrupted sweep: its folder, result and model."""
    model, folder = Model(), tmp_path_factory.mktemp("whole") / "sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "open_llm", model)
        return folder, done(*flags(inputs, folder)), model


def test_a_grid(whole):
    folder, result, model = whole
    names = [f"shots={s}_candidates={c}" for s in (0, 1) for c in (0, 2)]
    assert [cell["workdir"] for cell in result["cells"]] == names
    assert result["cells"][3]["values"] == {"shots": 1, "candidates": 2}
    assert model.opened == 1  # for all cells
    calls = sum(read_json(folder / name / "scores.json")["llm"]["calls"] for name in names)
    assert model.asked < calls  # plans do not depend on candidates: they are asked once
    for name, cell in zip(names, result["cells"], strict=True):
        scores = read_json(folder / name / "scores.json")
        assert (cell["scores"], cell["questions"]) == (scores["scores"], 3)
        assert read_config(folder / name).options.shots == cell["values"]["shots"]
    assert read_json(folder / "sweep.json")["cells"] == result["cells"]
    table = (folder / "sweep.md").read_text().splitlines()
    assert table[2].startswith("| shots | candidates | n |")
    assert [line.split("|")[1:3] for line in table[4:8]] == [
        [f" {shots} ", f" {candidates} "] for shots in (0, 1) for candidates in (0, 2)
    ]
    page = (folder / "report.html").read_text()
    assert page.count('class="line c') == 2  # a line per number of candidates
    assert "2 candidates" in page
    assert "not finished" not in page
    (folder / "report.html").unlink()
    done("report", f"--workdir={folder}")  # anew
    assert (folder / "report.html").read_text() == page


def test_a_cell_is_what_mmqa_run_gives(whole, inputs, tmp_path, monkeypatch):
    folder, *_ = whole
    monkeypatch.setattr(parts, "open_llm", Model())
    own = flags(
        inputs, tmp_path / "row", "--config.options.shots=1", "--config.options.candidates=2"
    )
    alone = done("run", *own[1:])
    cell = folder / "shots=1_candidates=2"
    assert alone == read_json(cell / "scores.json")
    assert rows_of(tmp_path / "row" / "trace.jsonl") == rows_of(cell / "trace.jsonl")


def test_agents_over_shots(inputs, tmp_path, monkeypatch):
    """Figure 7: a line per agent, and the team's."""
    monkeypatch.setattr(parts, "open_llm", Model())
    result = done(*flags(inputs, tmp_path / "run", "--over", "options.shots=0,1"))
    (plot,) = sweep_plots(result["cells"])
    assert list(plot.lines) == ["all", "junior alone", "senior alone", "manager alone"]
    assert [x for x, _ in plot.lines["manager alone"]] == [0.0, 1.0]
    agents = read_json(tmp_path / "run" / "shots=1" / "scores.json")["agents"]
    assert plot.lines["junior alone"][1][1] == agents["junior"]["accuracy"]


def interrupt():
    raise KeyboardInterrupt


def test_ctrl_c_and_again(whole, inputs, tmp_path, monkeypatch):
    _, result, model = whole
    first, again = Model(model.asked - 1, interrupt), Model()
    monkeypatch.setattr(parts, "open_llm", first)
    ended = mmqa(*flags(inputs, tmp_path / "run"))
    assert ended.code == 130
    assert len(read_json(tmp_path / "run" / "sweep.json")["cells"]) == 3
    assert "1 of 4 cells are not finished." in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.setattr(parts, "open_llm", again)
    assert done(*flags(inputs, tmp_path / "run")) == result
    assert first.asked - 1 + again.asked == model.asked  # nothing is asked twice


def run_until_killed(words: list[str], at: int) -> None:
    """In a process of its own: kill -9 in the middle of a sweep."""
    parts.open_llm = Model(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    mmqa(*words)


def test_kill_9_and_again(whole, inputs, tmp_path, monkeypatch):
    _, result, model = whole
    words = flags(inputs, tmp_path / "run")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_sweep; "
        f"test_sweep.run_until_killed({words!r}, {model.asked // 2})"
    )
    fork = server().start(["-c", code], os.environ)
    said, _ = fork.communicate(300)
    assert fork.returncode == -signal.SIGKILL, said
    again = Model()
    monkeypatch.setattr(parts, "open_llm", again)
    assert done(*flags(inputs, tmp_path / "run")) == result
    assert again.asked == model.asked - model.asked // 2 + 1


def test_more_values_later(whole, inputs, monkeypatch):
    """Finished cells are kept: nothing of them is asked."""
    folder, result, model = whole
    again = Model()
    monkeypatch.setattr(parts, "open_llm", again)
    more = ("--over", "options.shots=0,1", "--over", "options.candidates=0,1,2")
    cells = done(*flags(inputs, folder, *more))["cells"]
    assert [cells[i] for i in (0, 2, 3, 5)] == result["cells"]
    assert 0 < again.asked < model.asked


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            ["options.shot=0,1"],
            r"cell options\.shot=0: config key options\.shot: unknown; did you mean 'shots'",
        ),
        (["options.shots"], r"--over=options\.shots: KEY=VALUE,VALUE"),
        (["options.shots=0,"], r"--over=options\.shots=0,: KEY=VALUE,VALUE"),
        (
            ["options.shots=0", "options.shots=1"],
            r"--over=options\.shots=1: .*has an --over already",
        ),
        (
            ["options.shots=0,many"],
            r"cell options\.shots=many: .*options\.shots=many.*whole number",
        ),
        (["options.votes=1,2"], r"--over=options\.votes: holds a list"),
        (["options.plans=planned,none,some"], r"cell options\.plans=some: .*plans"),
        (
            ["parts.knowledge.data=here/x,here-x"],
            r"--over: two cells would share the folder data=here-x; leave one to another sweep",
        ),
        (["parts.knowledge.data=here,nowhere/x"], r"inputs are missing: .*here"),
    ],
)
def test_wrong_sweeps(inputs, tmp_path, refused, over, message):
    """Refused before any cell runs."""
    given = [word for value in over for word in ("--over", value)]
    refused(*flags(inputs, tmp_path / "run", *given), message=message)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_sweep(whole, inputs, refused):
    folder, *_ = whole
    words = flags(inputs, folder)
    refused(*words, "--config.options.max_new_tokens=3", message=r"max_new_tokens")


def test_a_damaged_sweep(tmp_path, refused):
    (tmp_path / "sweep.json").write_text('{"cells": []}')
    refused(
        "report", f"--workdir={tmp_path}", message=r"sweep\.json: is damaged; start `mmqa sweep`"
    )


def test_axes():
    (axis,) = parse_axes(["options.shots=4, 4,1"])
    assert axis.values == ("4", "1")
    refuses("KEY=VALUE", parse_axes, ["=1"])


def test_no_plot_without_numbers():
    cell = {"scores": {"a": 0.5}, "agents": {}}
    assert sweep_plots([{**cell, "values": {"plans": x}} for x in ("all", "none")]) == []
    assert sweep_plots([{**cell, "values": {"shots": 1}}]) == []


def test_the_points_of_a_plot():
    drawn = LinePlot("accuracy", "shots", {"a & b": [(0, 0.1), (8, 0.3)]}).svg()
    assert 'data-label="a &amp; b"' in drawn
    assert drawn.count("<circle") == 2
    assert 'data-x="shots"' in drawn
