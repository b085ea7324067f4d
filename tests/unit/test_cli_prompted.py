"""`mmqa run` of prompted rows, with a tiny language model on OK-VQA's official files."""

import json

import jax
import pytest
from cli_runs import done, flags_with, of_engine, rows_of
from report_pages import cards_of
from tiny_llm import write_folder
from vqa_files import write_okvqa

from mmqa_jax.core.chunks import Shard
from mmqa_jax.core.files import read_json
from mmqa_jax.prompting.backends import config as backend_config
from mmqa_jax.runs.parts import LLMSpec, open_llm
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompted")
    write_okvqa(folder / "raw")
    done("prepare", "okvqa", f"--raw={folder / 'raw'}", f"--out={folder / 'data'}")
    write_folder(folder / "llm")
    return folder


def flags(inputs, row, workdir, **options):
    values = {"data.dir": inputs / "data", "parts.library.text_model": ""}
    if row.startswith("smollm2"):
        values["parts.llm.model"] = inputs / "llm"
        values |= of_engine()
    values |= {f"options.{key}": value for key, value in options.items()}
    return flags_with("run", f"okvqa/tables.py:{row}", workdir, values)


def test_a_prompted_row(inputs, tmp_path):
    """Every question has a trace; dropped shots are counted; a rerun asks the model nothing."""
    run = flags(inputs, "smollm2_random", tmp_path / "run", shots=2, max_new_tokens=3)
    result = done(*run)
    assert (result["dataset"], result["row"], result["questions"]) == ("okvqa", "smollm2_random", 3)
    assert set(result["scores"]) == {
        f"vqa_accuracy/{name}" for name in ("official", "paper", "prophet", "kat")
    }
    traces = rows_of(tmp_path / "run" / "trace.jsonl")
    predictions = rows_of(tmp_path / "run" / "predictions.jsonl")
    assert [t["question_id"] for t in traces] == [p["question_id"] for p in predictions]
    assert all("trace" not in p for p in predictions)
    for trace in traces:
        (prompt,), (shots,) = trace["prompts"], trace["shots"]
        assert prompt.count("Q:") == len(shots) + 1
        assert prompt.endswith(f"Q: {trace['question']}\nA:")
        assert len(shots) + trace["dropped_shots"] <= 2
        assert len(trace["outputs"]) == 1
    counts = result["prompts"]
    assert counts["dropped_shots"] == sum(t["dropped_shots"] for t in traces) > 0
    assert (counts["failed"], counts["too_long"]) == (0, 0)
    page = (tmp_path / "run" / "report.html").read_text()
    shown = {card["id"]: dict(card["details"])["prompt"] for card in cards_of(page)}
    assert shown == {trace["question_id"]: trace["prompts"][0] for trace in traces}
    done("report", f"--workdir={tmp_path / 'run'}")  # the same page anew
    assert (tmp_path / "run" / "report.html").read_text() == page
    assert (tmp_path / "run" / "journals" / "responses").exists()

    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("trace.jsonl", "scores.json")}
    for name in kept:
        (tmp_path / "run" / name).unlink()
    # Sizes of an engine may be others in the same workdir. None was needed: all answers are kept.
    again = done(*run, "--config.parts.llm.engine.slots=2", "--config.parts.llm.mesh.data=1")
    result.pop("engine")
    assert again == result
    assert (tmp_path / "run" / "trace.jsonl").read_bytes() == kept["trace.jsonl"]
    scores = json.loads(kept["scores.json"])
    scores.pop("engine")
    assert json.loads((tmp_path / "run" / "scores.json").read_bytes()) == scores


def test_shards_of_a_row_whose_engines_have_other_sizes(inputs, tmp_path, refused):
    cache = f"--config.parts.llm.cache={tmp_path / 'responses.sqlite'}"
    run = [*flags(inputs, "smollm2_zero_shot", tmp_path / "run", max_new_tokens=2), cache]
    run.append("--chunk=2")
    result = done(*run, "--shard=0/2")
    assert result["waiting_for_other_shards"]
    other = [*run, "--shard=1/2", "--config.parts.llm.engine.prefill_tokens=32"]
    message = r"parts\.llm\.engine\.length \(192 there, 128 now\) differ; name a new"
    refused(*other, "--config.parts.llm.engine.length=128", message=message)
    result = done(*other)
    assert (result["questions"], result["engine"]["prefill_tokens"]) == (3, 32)  # the last part's


def test_a_prompt_that_never_fits_is_counted(inputs, tmp_path):
    run = flags(inputs, "smollm2_zero_shot", tmp_path / "run", max_new_tokens=150)
    result = done(*run)
    assert result["prompts"]["too_long"] == 3
    assert result["prompts"]["empty_answers"] == 3
    assert result["scores"]["vqa_accuracy/official"] == 0


def test_a_baseline_without_a_model(inputs, tmp_path):
    run = flags(inputs, "copy_nearest", tmp_path / "run", similarity="random")
    assert done(*run)["questions"] == 3
    assert not (tmp_path / "run" / "trace.jsonl").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("similarity=nearby", r"config key options\.similarity='nearby'"),
        ("shots=-1", r"config key options\.shots=-1: at least 0"),
        ("template=pica.none", r"option template=pica\.none: no such prompt template; use one of"),
        ("similarity=image", r"options\.similarity=image: the library has no embedder"),
        ("similarity=question", r"options\.similarity=question: the library has no embedder"),
    ],
)
def test_wrong_options(inputs, tmp_path, refused, option, message):
    name, value = option.split("=")
    refused(*flags(inputs, "smollm2_random", tmp_path / "run", **{name: value}), message=message)


def test_slots_that_the_mesh_does_not_divide(inputs, tmp_path, refused):
    run = flags(inputs, "smollm2_zero_shot", tmp_path / "run")
    run.append("--config.parts.llm.mesh.data=3")
    refused(*run, message=r"engine\.slots is 4: expected a multiple of 3, .* set it to 3,")


def test_a_mesh_over_the_processes_of_a_launch_is_refused(inputs, tmp_path, monkeypatch):
    """Each process answers questions of its own."""
    monkeypatch.setattr(backend_config, "launched_shard", lambda: Shard(1, 2))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    spec = LLMSpec(str(inputs / "llm"), mesh={"data": jax.device_count()})
    said = r"config key parts\.llm\.mesh: spans the processes of this launch.*; leave it at auto"
    refuses(said, open_llm, spec, tmp_path)
    assert not list(tmp_path.iterdir())


def promptcap(inputs, workdir, captions):
    """The paper's row of PromptCap with the tiny model and a file of captions."""
    captions_file = workdir.parent / "captions.json"
    captions_file.write_text(json.dumps(captions))
    run = flags(inputs, "promptcap", workdir, shots=1, similarity="random", max_new_tokens=2)
    values = {
        "parts.llm.backend": "engine",
        "parts.llm.model": inputs / "llm",
        "parts.library.vectors": "",
        "parts.captions.captions": captions_file,
        **of_engine(),
    }
    return [*run, *(f"--config.{key}={value}" for key, value in values.items())]


def test_questions_that_a_file_of_captions_lacks(inputs, tmp_path):
    """Each is counted; a file of no known question is refused, before the model is loaded."""
    result = done(*promptcap(inputs, tmp_path / "run", {"25": "a race", "26": "a wheel"}))
    assert result["prompts"]["questions_with_own_caption"] == 1
    assert "parts.captions lacks" in (tmp_path / "run" / "report.html").read_text()


def test_a_file_of_captions_of_other_questions(inputs, tmp_path, refused):
    run = promptcap(inputs, tmp_path / "run", {"999": "a race"})
    (tmp_path / "no_model").mkdir()
    run.append(f"--config.parts.llm.model={tmp_path / 'no_model'}")
    refused(*run, message=r"parts\.captions\.captions: no caption for any of the 3 questions")


def test_the_split_is_recorded(inputs, tmp_path):
    run = flags(inputs, "copy_nearest", tmp_path / "run", similarity="random")
    done(*run, "--limit=2")
    scores = read_json(tmp_path / "run" / "scores.json")
    assert (scores["limit"], scores["questions"], scores["split"]) == (2, 2, "test")
    assert json.loads((tmp_path / "run" / "config.json").read_text())
