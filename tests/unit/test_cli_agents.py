"""`mmqa run` of Prophet's and MAVL's rows, with a tiny language model on OK-VQA's official files."""

import pytest
from cli_runs import done, flags_with, of_engine, rows_of, succeeded
from tiny_llm import LETTERS, llama_config, write_folder
from vqa_files import prepare_team, write_aokvqa

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.prompting.examples.side_files import write_candidates
from mmqa_jax.runs.parts import FinishedSpec
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.run import open_parts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

IDS = ("25", "26", "35")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = prepare_team(tmp_path_factory.mktemp("agents"))
    write_folder(folder / "llm")
    known = {name: [("race", 0.6), ("two", 0.2)] for name in IDS[:2]}
    write_candidates(folder / "candidates.json", known)
    return folder


def flags(inputs, row, workdir, **changes):
    values = {"data.dir": inputs / "data"}
    if row.startswith("smollm2") and "finished" not in str(changes):
        values |= {
            "parts.llm.model": inputs / "llm",
            "parts.llm.cache": inputs / "responses.sqlite",
            "parts.heuristics.candidates": inputs / "candidates.json",
            "parts.heuristics.examples": inputs / "examples.json",
            "options.shots": 0,
        }
        values |= of_engine()
        if "mavl" in row:
            values["parts.knowledge.data"] = inputs / "knowledge"
    return flags_with("run", f"okvqa/tables.py:{row}", workdir, values | changes)


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """MAVL's workdir and result; planners and knowledge do not fit 192 letters."""
    workdir = tmp_path_factory.mktemp("run") / "mavl"
    changes = {"options.max_new_tokens": 4, "options.plans": "all"}
    return workdir, done(*flags(inputs, "smollm2_mavl", workdir, **changes))


def test_mavl(finished):
    workdir, result = finished
    manager = result["agents"]["manager"]
    assert manager["planned"] == {"1": 3, "2": 3, "3": 3}
    assert manager["used"]["1"] == 2  # one question has no candidates
    assert manager["used"]["3"] == 0
    assert result["prompts"]["failed"] == 3
    assert result["prompts"]["without_candidates"] == 1
    traces = rows_of(workdir / "trace.jsonl")
    assert all("more than engine.length" in trace["failed"][0] for trace in traces)
    cost = result["llm"]
    assert cost["calls"] == sum(len(trace["outputs"]) for trace in traces) >= 3
    assert cost["calls_per_question"] == pytest.approx(cost["calls"] / 3)
    assert cost["prompt_tokens"] > 3 * 60
    page = (workdir / "report.html").read_text()
    assert "Language model" in page
    assert "Decides: without the agent" in page
    assert "Prompts" in page
    assert "questions without candidates" in page
    done("report", f"--workdir={workdir}")  # the same page anew
    assert (workdir / "report.html").read_text() == page


def test_what_the_prompts_lacked_is_on_the_terminal(inputs, tmp_path):
    changes = {"options.max_new_tokens": 4, "options.plans": "none", "options.shots": 2}
    ended = succeeded(*flags(inputs, "smollm2_mavl", tmp_path / "run", **changes))
    counts = read_json(tmp_path / "run" / "scores.json")["prompts"]
    table = ended.out.partition("Prompts")[2]
    rows = [line for line in table.splitlines() if "questions without candidates" in line]
    assert [line.split()[-2] for line in rows] == [str(counts["without_candidates"])] == ["1"]
    assert counts["repeated_choices"] == 0
    assert "same choice twice" not in table


OTHERS = {"parts.heuristics.candidates": "other.json"}


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ("smollm2_mavl", {"options.votes": "1,2"}, r"options\.votes=\(1\.0, 2\.0\)"),
        ("smollm2_mavl", {"options.agents": "senior,junior"}, r"options\.agents"),
        ("smollm2_prophet", OTHERS, r"heuristics\.candidates: no candidates for any of the 3"),
        ("smollm2_mavl_fitted", {"parts.finished.run": "."}, r"run=.*: has no trace\.jsonl"),
        (
            "smollm2_mavl_planner",
            {"parts.planner.model": "no_model", "options.plans": "all"},
            r"parts\.planner: has no effect with options\.plans=all",
        ),
    ],
)
def test_a_wrong_row_is_refused_before_a_model_is_loaded(
    inputs, tmp_path, refused, row, changes, message
):
    """The model's folder is none of a model: loading it would fail first."""
    write_candidates(tmp_path / "other.json", {"999": [("race", 0.6)]})
    changes = {k: tmp_path / v if k.startswith("parts") else v for k, v in changes.items()}
    (tmp_path / "no_model").mkdir()
    if "fitted" not in row:
        changes["parts.llm.model"] = tmp_path / "no_model"
    refused(*flags(inputs, row, tmp_path / "run", **changes), message=message)


def test_a_rerun_costs_the_same_and_asks_nothing(inputs, finished, tmp_path):
    _, result = finished
    changes = {"options.max_new_tokens": 4, "options.plans": "all"}
    again = done(*flags(inputs, "smollm2_mavl", tmp_path / "run", **changes))
    # Nothing was computed, so that no devices and sizes are named.
    assert result["engine"]["slots"] == 4
    assert again == {key: value for key, value in result.items() if key != "engine"}


@pytest.mark.parametrize("row", ["smollm2_mavl_fitted", "smollm2_mavl_probability"])
def test_another_vote_on_a_finished_run(inputs, finished, tmp_path, row):
    workdir, _ = finished
    run = flags(inputs, row, tmp_path / "run", **{"parts.finished.run": workdir})
    result = done(*run)
    assert result["questions"] == 3
    assert "llm" not in result
    assert any("another vote on the answers of a finished run" in n for n in result["notes"])
    compared = done("compare", workdir, tmp_path / "run")
    assert [one["n"] for one in compared["runs"]] == [3, 3]


def test_one_plan_for_all_questions(inputs, tmp_path):
    done(*flags(inputs, "smollm2_mavl_oracle", tmp_path / "every", **{"options.max_new_tokens": 4}))
    changes = {"parts.finished.run": tmp_path / "every"}
    result = done(*flags(inputs, "smollm2_mavl_one_plan", tmp_path / "run", **changes))
    assert result["questions"] == 3
    assert "llm" not in result
    assert "the one that earned most on the other parts' questions" in result["notes"][-1]
    traces = rows_of(tmp_path / "run" / "trace.jsonl")
    assert [list(trace["plans"]) for trace in traces] == [["junior", "senior", "manager"]] * 3
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("line", ["[]", '{"question": "?"}', '{"question_id": 25}'])
def test_a_trace_of_another_shape(tmp_path, line):
    (tmp_path / "trace.jsonl").write_text(f'{{"question_id": "24"}}\n{line}\n')
    with pytest.raises(UserError, match=r"trace\.jsonl, line 2: expected an object .*; run that"):
        FinishedSpec(str(tmp_path)).open(None)


def test_a_planner_of_its_own(inputs, tmp_path):
    write_folder(tmp_path / "planner", llama_config(len(LETTERS) + 2, positions=640))
    changes = {
        "parts.planner.model": tmp_path / "planner", "parts.planner.cache": tmp_path / "plans",
        **of_engine(part="planner"),
        "parts.planner.engine.length": 640,
        "options.max_new_tokens": 4, "options.plan_tokens": 4,
        "data.folds": 1, "data.fold": 0,
    }  # fmt: skip
    workdir = tmp_path / "run"
    result = done(*flags(inputs, "smollm2_mavl_planner", workdir, **changes))
    traces = rows_of(workdir / "trace.jsonl")
    assert [len(trace["planner_prompts"]) for trace in traces] == [3, 3, 3]
    assert not any("planner" in str(trace.get("failed", "")) for trace in traces)
    answers = sum(len(trace["outputs"]) for trace in traces)
    assert result["llm"]["calls"] == answers + 9
    assert result["llm"]["prompt_tokens"] > 9 * 300


def test_prophet_and_draws(inputs, tmp_path):
    run = flags(inputs, "smollm2_draws", tmp_path / "draws", **{"options.draws": 3})
    result = done(*run)
    assert result["llm"]["calls"] == 9
    workdir = tmp_path / "alone"
    values = {"parts.heuristics.candidates": inputs / "candidates.json",
              "parts.heuristics.examples": inputs / "examples.json"}  # fmt: skip
    done(*flags(inputs, "vqa_model_alone", workdir, **values))
    assert [p["answer"] for p in rows_of(workdir / "predictions.jsonl")] == ["race", "race", ""]
    assert not (workdir / "trace.jsonl").exists()
    assert "llm" not in read_json(workdir / "scores.json")


def test_a_hidden_split_gives_the_leaderboards_file(tmp_path):
    """A-OKVQA's test split: no answers, so that nothing is scored."""
    write_aokvqa(tmp_path / "raw")
    done("prepare", "aokvqa", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    write_candidates(tmp_path / "candidates.json", {"t1": [("moon", 0.6)], "q1": [("sun", 0.5)]})
    workdir = tmp_path / "rows" / "vqa_model_alone"
    values = {"data.dir": tmp_path / "data",
              "parts.heuristics.candidates": tmp_path / "candidates.json",
              "parts.heuristics.examples": ""}  # fmt: skip
    config = "aokvqa/tables.py:vqa_model_alone"
    result = done(*flags_with("run", config, workdir, values), "--split=test")
    assert result["scores"] == {}
    assert "nothing is scored; submission.json is the leaderboard's file" in result["notes"][0]
    assert read_json(workdir / "submission.json") == {"t1": {"direct_answer": "moon"}}
    official = done(
        *("evaluate", "aokvqa", f"--references={tmp_path / 'data'}", "--split=test"),
        f"--predictions={workdir / 'predictions.jsonl'}",
        f"--submission={tmp_path / 'by_evaluate.json'}",
    )
    assert official["scores"] == {}
    assert read_json(tmp_path / "by_evaluate.json") == read_json(workdir / "submission.json")
    listed = done("tables", "aokvqa", f"--workdir={tmp_path / 'rows'}")["rows"]
    (row,) = (row for row in listed if row["config_row"] == "vqa_model_alone")
    assert row["status"] == "leaderboard"
    done(*flags_with("run", config, tmp_path / "val", values))  # answers are published
    assert not (tmp_path / "val" / "submission.json").exists()


def test_a_served_row_answers_its_questions_and_shows_its_agents(finished):
    workdir, _ = finished
    parts = open_parts(None, "", ServeOptions(), workdir=workdir)
    (system,) = parts.systems.values()
    wanted = {row["question"]: row["answer"] for row in rows_of(workdir / "trace.jsonl")}
    for question in system.examples:
        row = system.ask(question.upper(), None, lambda kind, value: None).future.result(300)
        assert row["answer"] == wanted[question]
        steps = [step["who"].partition(":")[0] for step in row["steps"]]
        assert steps == ["junior", "senior", "manager", "vote"]
        assert row["steps"][2]["steps"][0]["who"].startswith("plan: ")
    with pytest.raises(UserError, match="the questions of its data alone"):
        system.ask("Which question is none of them?", None, lambda kind, value: None)
    parts.close()
