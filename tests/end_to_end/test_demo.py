"""`mmqa demo` as a user runs it: killed and restarted, to its end, again, asked, re-scored.

What is killed are processes of their own, forks of one that has imported the demo. All compile
into one cache: compiling is most of what these runs cost. Trainings start from weights that NumPy
draws.
"""

import base64
import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmqa_jax.cli import main
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.core.store import Store, read_head
from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.runs.corpora import prepare_atlas
from mmqa_jax.serve.run import _of_workdir
from mmqa_jax.serve.systems import Threads
from mmqa_jax.training.attempts import read_attempts
from mmqa_jax.training.loop import CLOCK_COLUMNS
from mmqa_jax.weights.formats.orbax_reader import read_weights, stored_specs
from tests.drawn_weights import drawn_starts
from tests.forks import server

ROOT = Path(__file__).parents[2]
# Sources still have a length above another's; each length is a program of every model that sees it.
CONFIG = (
    f"--config={ROOT}/configs/atlas/demo.py:runlocal",
    "--config.countries=8",
    "--config.evaluate.questions=12",
    "--config.search.dev_questions=6",
    "--config.select.dev_questions=6",
    "--config.contrastive.inference.buckets=(32, 64)",
    "--config.rerank.packing.buckets=((0, 96), (1, 52))",
    "--config.answer.packing.buckets=((2, 144),)",
    "--config.answer.inference.num_beams=2",
    "--config.answer.inference.max_new_tokens=4",
    *(f"--config.{task}.train.steps=2" for task in ("contrastive", "rerank", "answer")),
    *(f"--config.{task}.model.changes.hidden=32" for task in ("rerank", "answer")),
    *(f"--config.{task}.model.changes.mlp=64" for task in ("rerank", "answer")),
    *(f"--config.{task}.model.visual_hidden=(64,)" for task in ("rerank", "answer")),
)
SETTINGS = ("question_only", "oracle", "restricted", "full")
STAGES = (
    "prepare", "contrastive", "embed", "search", "rerank", "tune", "refuse", "select", "answer", "read",
    "score",
)  # fmt: skip


class Demo:
    """A finished demo: its workdir, its corpus, the JSON it printed and what else it said."""

    def __init__(self, workdir: Path, out: str, err: str):
        self.workdir, self.out, self.err = workdir, out, err
        self.result = json.loads(out.splitlines()[-1])
        self.corpus: Corpus = open_corpus(workdir / "data")
        count = json.loads((workdir / "config.json").read_text())["config"]["evaluate"]["questions"]
        self.questions = evenly(self.corpus.questions("test"), count)


@pytest.fixture(scope="module", autouse=True)
def _environment(cli_cache):
    """Of all processes of this file: CPU, one compile cache, no progress."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_CACHE", str(cli_cache))
        patch.setenv("MMQA_PROGRESS", "off")
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


def run_here(*arguments: str | Path) -> tuple[int, str, str]:
    """One `mmqa` in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), drawn_starts():
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def evaluate(demo: Demo, predictions: Path) -> dict:
    """What `mmqa evaluate` says of a file."""
    code, out, err = run_here(
        "evaluate", "atlas", f"--references={demo.workdir / 'data'}",
        f"--predictions={predictions}", "--only_given", "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["dataset"] == "atlas"
    assert result["n"] == len(demo.questions)
    return result


def killed(workdir: Path, stage: str, reached: Callable[[], bool]) -> str:
    """Starts the demo and ends it by kill -9 as soon as it has reached a point of `stage`.

    Returns:
      What it had printed.
    """
    code = (
        "import sys; sys.stdout.reconfigure(line_buffering=True); "
        "from mmqa_jax.cli import main; sys.exit(main())"
    )
    command = ["-c", code, "demo", *CONFIG, f"--workdir={workdir}", "--json"]
    process = server().start(command, os.environ)
    try:
        while not reached():
            assert process.poll() is None, f"the demo ended before stage {stage}"
            time.sleep(0.002)
    finally:
        process.kill()
        said, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    assert not (workdir / "stages" / f"{stage}.json").exists(), f"killed after stage {stage}"
    return said


@pytest.fixture(scope="module")
def atlas(made_once) -> Path:
    """The demo's corpus, made in one go."""
    return made_once("atlas", lambda folder: prepare_atlas(folder / "data", 8)) / "data"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, atlas) -> Path:
    """A run of the demo's dual encoder that nothing disturbs, with all its checkpoints."""
    run = tmp_path_factory.mktemp("encoder") / "run"
    code, _, err = run_here(
        "train", f"--config={ROOT}/configs/atlas/contrastive.py:runlocal",
        f"--config.data.dir={atlas}", "--config.train.steps=2", "--config.train.keep=2",
        "--config.train.checkpoint_every=1", f"--workdir={run}",
    )  # fmt: skip
    assert code == 0, err
    return run


@pytest.fixture(scope="module")
def demo(tmp_path_factory, encoder):
    """The demo on a fresh workdir: killed in two stages, then run to its end."""
    workdir = tmp_path_factory.mktemp("demo") / "workdir"
    run = workdir / "contrastive"
    killed(workdir, "prepare", (workdir / "data" / "raw" / "summary.json").exists)
    said = killed(workdir, "contrastive", (run / "config.json").exists)
    # What another process would have saved before a later kill, after it had traced the step.
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shutil.copytree(encoder / "checkpoints" / "1", run / "checkpoints" / "1")
    code, out, err = run_here("demo", *CONFIG, f"--workdir={workdir}", "--json")
    assert code == 0, err
    return Demo(workdir, said + out, err)


def times(folder: Path) -> dict[str, int]:
    """When every file below a folder was last written; the lock is taken at every start."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def of_row(demo: Demo, name: str) -> dict:
    """scores.json of one of the demo's rows."""
    return json.loads((demo.workdir / "rows" / name / "scores.json").read_text())


# One run


def test_it_prints_every_score_as_one_json_object(demo):
    rows = demo.result["rows"]
    assert rows.keys() >= {*SETTINGS, "constant", "restricted_bm25", "full_vlp", "rrf", "fused"}
    assert demo.result["dataset"] == "atlas"
    assert demo.result["n"] == len(demo.questions) == 12
    assert demo.result == json.loads((demo.workdir / "scores.json").read_text())
    categories = {question.category for question in demo.questions}
    assert len(categories) >= 5
    for name, row in rows.items():
        assert row == {key: of_row(demo, name)[key] for key in row}
        assert categories <= row["by_category"].keys()
        for values in (row["scores"], *row["by_category"].values()):
            assert all(0 <= value <= 1 for value in values.values())
    # Retrieval needs no training to find something: BM25 does, and dense is scored on its own.
    recall = {name: rows[name]["scores"]["recall@20"] for name in ("bm25", "dense")}
    assert recall["bm25"] > 0.5
    assert recall["bm25"] != recall["dense"]


def test_it_says_what_it_did_and_whose_the_material_is(demo):
    assert "CC BY-SA 4.0" in demo.out
    assert "not comparable with WebQA's" in " ".join(demo.err.split())
    for stage in STAGES:
        assert re.search(rf"│ {stage} +│", demo.err), stage
        assert (demo.workdir / "stages" / f"{stage}.json").exists()
    assert "Traceback" not in demo.err
    for task in ("contrastive", "rerank", "answer"):
        losses = [row["loss"] for row in read_metrics(demo.workdir / task) if "loss" in row]
        assert losses
        assert all(map(math.isfinite, losses))


def assert_same_answers(demo: Demo, workdir: Path, result: dict) -> None:
    """The JSON's answer scores are those of `mmqa evaluate` on the prediction files."""
    for setting in SETTINGS:
        found = evaluate(demo, workdir / "rows" / setting / "predictions.jsonl")
        assert found["missing"] == 0
        ours = result["rows"][setting]
        for name in ("webqa_acc/no_lemma", "exact_match/no_lemma"):
            assert ours["scores"][name] == pytest.approx(found["scores"][name], abs=1e-9)
            for category, values in found["by_category"].items():
                value = ours["by_category"][category][name]
                assert value == pytest.approx(values[name], abs=1e-9)


def test_evaluate_finds_the_same_scores_in_the_files(demo, tmp_path):
    scores = {name: row["scores"] for name, row in demo.result["rows"].items()}
    f1 = "source_f1/official"
    assert_same_answers(demo, demo.workdir, demo.result)
    for name in ("restricted", "full"):
        found = evaluate(demo, demo.workdir / "rows" / name / "predictions.jsonl")["scores"]
        assert scores[name][f1] == pytest.approx(found[f1], abs=1e-9)
    for name in ("bm25", "dense", "fused", "fused_second_hop"):
        path = demo.workdir / "rows" / name / "retrieval" / "candidates.jsonl"
        found = evaluate(demo, path)["scores"]
        assert scores[name]["recall@20"] == pytest.approx(found["recall@20"], abs=1e-9)
    # A retriever alone cites its top two of the question's candidates.
    for name in ("bm25", "dense"):
        top = tmp_path / f"{name}.jsonl"
        retrieval = demo.workdir / "rows" / f"restricted_{name}" / "retrieval"
        with open(top, "w") as file:
            for row in read_rankings(retrieval / "candidates.jsonl"):
                cited = {"question_id": row.question_id, "sources": row.sources[:2]}
                file.write(json.dumps(cited) + "\n")
        found = evaluate(demo, top)["scores"]
        assert scores[f"restricted_{name}"][f1] == pytest.approx(found[f1], abs=1e-9)


def test_other_answers_give_other_scores(demo, tmp_path):
    """A reader of a few steps is never right; the answers put into its journal are."""
    workdir = tmp_path / "workdir"
    workdir.mkdir()
    (workdir / "data").symlink_to(demo.workdir / "data")
    for name in ("stages", "retrieval", "journals", "rows"):
        shutil.copytree(demo.workdir / name, workdir / name)
    for name in ("contrastive", "rerank", "answer", "index"):
        (workdir / name).symlink_to(demo.workdir / name)
    for name in ("config.json", "machine.json"):
        shutil.copy(demo.workdir / name, workdir)
    for name in ("read", "score"):
        (workdir / "stages" / f"{name}.json").unlink()
    for name in (*SETTINGS, "constant"):
        shutil.rmtree(workdir / "rows" / name)
    # Of every two questions one is answered rightly, whatever the sources.
    right = {q.id: q.answers[0] for i, q in enumerate(demo.questions) if i % 2 == 0}
    (journal,) = (workdir / "journals").glob("reader-*")
    with Store(journal, read_head(journal)["job"]) as store:
        store.add(
            {
                key: [[right.get(key.rsplit(" ", 1)[0], "no"), beams], seconds]
                for key, ((_, beams), seconds) in ((key, store[key]) for key in store)
            }
        )
    code, out, err = run_here("demo", *CONFIG, f"--workdir={workdir}", "--json")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert_same_answers(demo, workdir, result)
    for setting in SETTINGS:  # half, and what "no" is right for
        for name in ("webqa_acc/no_lemma", "exact_match/no_lemma"):
            assert 0.48 < result["rows"][setting]["scores"][name] < 0.75
    # What was not changed scores as before.
    for name, row in demo.result["rows"].items():
        for scorer, value in row["scores"].items():
            if name not in SETTINGS or scorer.startswith(("recall", "source_f1")):
                assert result["rows"][name]["scores"][scorer] == value


def test_the_report_shows_the_pictures(demo):
    page = (demo.workdir / "report.html").read_text()
    for name in demo.result["rows"]:
        assert f'href="./rows/{name}/report.html"' in page
    html = (demo.workdir / "rows" / "full" / "report.html").read_text()
    shown = []
    for encoded in re.findall(r'"data:image/\w+;base64,([^"]+)"', html):
        image = Image.open(io.BytesIO(base64.b64decode(encoded)))
        shown.append(image.convert("RGB"))
    gold = {
        row
        for question in demo.questions
        for row in demo.corpus.positive_rows(question)
        if demo.corpus.sources[row].modality == "image"
    }
    assert len(gold) >= 3
    for row in gold:
        picture = Image.open(io.BytesIO(demo.corpus.picture(row))).convert("RGB")
        nearest = min(
            np.abs(np.asarray(picture.resize(image.size), float) - np.asarray(image)).mean()
            for image in shown
        )
        assert nearest < 4, demo.corpus.sources[row].title
    for question in demo.questions[:3]:
        assert question.answers[0] in html.replace("&#39;", "'").replace("&#34;", '"')


# Asking it


@pytest.mark.parametrize("with_picture", [False, True])
def test_an_answer_cites_sources_of_the_corpus(demo, with_picture, tmp_path):
    arguments = ["ask", f"--workdir={demo.workdir}", "--json"]
    if with_picture:
        row = demo.corpus.modality_rows("image")[0]
        (tmp_path / "flag.png").write_bytes(demo.corpus.picture(row))
        arguments += [f"--image={tmp_path / 'flag.png'}", "Which country has this flag?"]
    else:
        arguments += ["What is the capital of Kenya?", "Which flag is red?"]
    code, out, err = run_here(*arguments)
    assert code == 0, err
    answers = json.loads(out.splitlines()[-1])["answers"]
    assert len(answers) == (1 if with_picture else 2)
    for answer in answers:
        assert answer["question"] in err
        assert answer["answer"] in err
        # About a picture of one's own the collection need not say anything.
        assert (0 if with_picture else 1) <= len(answer["sources"]) <= 2
        assert answer["found"] or not with_picture
        for cited in answer["sources"]:
            source = demo.corpus.sources[demo.corpus.row[cited["id"]]]
            assert (cited["title"], cited["text"]) == (source.title, source.text)
            assert 0 <= cited["score"] <= 1


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_an_answer_is_read_only_from_sources_above_the_threshold(demo, threshold, tmp_path):
    workdir = tmp_path / "workdir"
    (workdir / "retrieval").mkdir(parents=True)
    for name in ("config.json", "data", "contrastive", "index", "rerank", "answer"):
        (workdir / name).symlink_to(demo.workdir / name)
    selection = json.loads((demo.workdir / "retrieval/selection.json").read_text())
    changed = json.dumps(selection | {"threshold": threshold})
    (workdir / "retrieval/selection.json").write_text(changed)
    code, out, err = run_here("ask", f"--workdir={workdir}", "--json", "Which flag is red?")
    assert code == 0, err
    (answer,) = json.loads(out.splitlines()[-1])["answers"]
    assert answer["found"] == (threshold == 0.0)
    if answer["found"]:
        raw = "".join(answer["raw_answer"].split())
        assert "".join(answer["answer"].lower().split()).removesuffix(".") == raw.removesuffix(".")
    else:
        assert answer["answer"] == "Not found in the sources."
        assert len(answer["sources"]) == 1
        assert "nearest source" in err


def test_a_server_asks_the_rows_that_read_a_question(demo):
    _, _, systems = _of_workdir(demo.workdir, Threads(1))
    names = {system.name for system in systems}
    assert names >= {*SETTINGS}
    assert "constant" not in names


def test_questions_that_cannot_be_asked(demo):
    question = "What is the capital of " * 20 + "Kenya?"
    code, out, err = run_here("ask", f"--workdir={demo.workdir}", question)
    assert (code, out) == (2, "")
    assert re.search(r"mmqa: .* tokens more than the \d+ .* shorten it\.", err)
    code, _, err = run_here("ask", f"--workdir={demo.workdir}", "  ")
    assert (code, err) == (2, "mmqa: the question is empty; write one in quotes.\n")


# Starting it again


def test_a_second_start_runs_nothing_again(demo):
    before = times(demo.workdir)
    code, out, err = run_here("demo", *CONFIG, f"--workdir={demo.workdir}", "--json")
    assert code == 0, err
    assert "continuing where the last run stopped" in " ".join(err.split())
    assert json.loads(out.splitlines()[-1]) == demo.result
    after = times(demo.workdir)
    assert {name for name in after if after[name] != before.get(name)} <= {"report.html"}
    assert after.keys() == before.keys()
    code, out, _ = run_here("report", f"--workdir={demo.workdir}", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == demo.result


def test_another_config_is_refused_on_its_workdir(demo):
    before = times(demo.workdir)
    code, out, err = run_here("demo", *CONFIG, f"--workdir={demo.workdir}", "--config.seed=1")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"mmqa: .*another config: seed \(0 there, 1 now\).*\n", err)
    assert times(demo.workdir) == before


def curve(run: Path) -> list[dict]:
    """The rows of metrics.jsonl without what a clock gave."""
    clock = ("time", *CLOCK_COLUMNS)
    return [{k: v for k, v in row.items() if k not in clock} for row in read_metrics(run)]


def files(folder: Path) -> dict[str, bytes]:
    """What every file below a folder holds, with the folder's name left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(bytes(folder), b"")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_kill_9_in_two_stages_changes_no_score(demo, atlas, encoder):
    """What the killed stages leave is what the same verbs write that nothing kills; all scores
    come from these files, and `test_other_answers_give_other_scores` finds them again."""
    ours, theirs = files(demo.workdir / "data"), files(atlas)
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == set()
    attempts = read_attempts(demo.workdir / "contrastive")
    assert [row["step"] for row in attempts if row["event"] == "start"][-1] == 1  # it went on
    found, wanted = (
        read_weights(folder / "weights", stored_specs(folder / "weights"))
        for folder in (demo.workdir / "contrastive", encoder)
    )
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert curve(demo.workdir / "contrastive") == curve(encoder)
    attempts = {
        stage: json.loads((demo.workdir / "stages" / f"{stage}.json").read_text())["attempts"]
        for stage in STAGES
    }
    assert attempts == {stage: 1 + (stage in ("prepare", "contrastive")) for stage in STAGES}
