"""Validation during training: its values are those of the verbs with the weights of that step."""

import re

import jax
import numpy as np
import pytest
from cli_runs import (
    ROOT,
    TINY_OF,
    done,
    mmqa,
    quietly,
    rows_of,
    train_flags,
    tree,
    weights_of,
    write_rows,
)
from flax import nnx

from mmqa_jax.core.config import load_config
from mmqa_jax.core.files import write_json
from mmqa_jax.core.trees import unflatten_named
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Ranking
from mmqa_jax.evaluation.scores import read_answers
from mmqa_jax.evaluation.webqa import score_answers
from mmqa_jax.tasks import answer
from mmqa_jax.tasks.registry import check_config, known_tasks, read_task
from mmqa_jax.training.best_weights import read_best
from mmqa_jax.training.state import split_model
from mmqa_jax.weights.record import read_metadata
from tests.drawn_weights import drawn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

EVERY_STEP = {"train.evaluate_every": 1, "validate.split": "test", "validate.questions": 0}
WHOLE = {
    "contrastive": {"validate.sources": 0},
    "rerank": {},
    "answer": {"validate.num_beams": 2},  # as inference.num_beams
}


@pytest.fixture(scope="module")
def run(data, cli_cache, tmp_path_factory):
    """A validated run of source selection, and what it printed."""
    folder = tmp_path_factory.mktemp("validated") / "run"
    with quietly(cli_cache):
        result = done("train", *train_flags("rerank", data, folder, **EVERY_STEP))
    return folder, result


def evaluations(workdir):
    """Step -> its values."""
    found = {}
    for row in rows_of(workdir / "metrics.jsonl"):
        values = {k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")}
        if values:
            found[row["step"]] = values
    return found


@pytest.fixture(scope="module")
def judge(data, tmp_path_factory):
    """A validation: (config name, changes) -> validation, (seed or folder of weights) -> model."""
    corpus = open_corpus(data)

    def make(name, **changes):
        task = name.partition("_")[0]
        values = {**EVERY_STEP, **WHOLE[task], **changes}
        flags = train_flags(task, data, "unused", **values)
        overrides = [flag.removeprefix("--config.") for flag in flags[2:]]
        config = load_config(f"{ROOT}/configs/atlas/{name}.py:runlocal", overrides)
        described = check_config(config)
        tokenizer = described.make_tokenizer(corpus, tmp_path_factory.mktemp("tokenizer"))
        objective = described.recipe(corpus, tokenizer).objective
        abstract = nnx.eval_shape(objective.outline)

        def model(weights):
            if isinstance(weights, int):
                return drawn(objective.outline, weights)
            split, given = split_model(objective, 0), jax.device_put(weights_of(weights))
            return split.merge(unflatten_named(split.params, given), split.frozen)

        return described.validation(corpus, tokenizer, abstract), model

    return make


def test_recall_is_that_of_search(judge, data, models, index, tmp_path):
    made, model = judge("contrastive")
    values = made.evaluate(model(models / "contrastive"))
    found = done(
        "search", f"--data={data}", f"--model={models / 'contrastive'}", "--method=dense",
        f"--index={index}", f"--out={tmp_path / 'found.jsonl'}",
    )["recall"]  # fmt: skip
    assert found.keys() == {"recall@1", "recall@2", "recall@5", "recall@10"}  # of 11 sources
    assert {name: values[name] for name in found} == pytest.approx(found)
    assert values["recall@20"] == 1.0
    assert 0 < values["mrr"] < 1
    assert made.metric == "recall@10"


@pytest.mark.parametrize("weights", ["last", "best"])
def test_source_f1_is_that_of_rerank(weights, run, data, tmp_path):
    folder = run[0] if weights == "last" else run[0] / "best"
    values = evaluations(run[0])[read_metadata(folder)["step"]]
    flags = (f"--data={data}", f"--model={folder}", f"--out={tmp_path / 'ranked.jsonl'}")
    found = done("rerank", *flags)
    sweep = {row["threshold"]: row["source_f1"] for row in found["sweep"]}
    assert values == pytest.approx(
        {
            "source_f1": found["source_f1"],
            "source_f1@0.2": sweep[0.2],
            "threshold": found["best_threshold"],
        }
    )
    assert values["source_f1"] > 0


def test_answers_are_those_of_answer(judge, data, models, tmp_path, monkeypatch):
    answers = []

    def noted(questions, predictions, **options):
        answers.extend(predictions)
        return score_answers(questions, predictions, **options)

    monkeypatch.setattr(answer, "score_answers", noted)
    made, model = judge("answer")
    values = made.evaluate(model(models / "answer"))
    out, corpus = tmp_path / "predictions.jsonl", f"--data={data}"
    done("answer", corpus, f"--model={models / 'answer'}", "--sources=oracle", f"--out={out}")
    for ours, given in zip(answers, read_answers(out), strict=True):
        assert (ours.question_id, ours.answer) == (given.question_id, given.answer)
        assert ours.beams[0][1] == pytest.approx(given.beams[0][1], abs=1e-5)
    scores = done(
        "evaluate", "corpus", f"--references={data}", f"--predictions={out}", "--lemmatizer=none"
    )["scores"]
    assert values[made.metric] == pytest.approx(scores["webqa_acc/no_lemma"])
    assert made.metric == "webqa_acc/no_lemma"


def test_a_run_says_which_step_was_best(run):
    folder, result = run
    values = evaluations(folder)
    assert list(values) == [1, 2]
    best = result["best"]
    assert best == read_best(folder)
    assert (best["metric"], best["weights"]) == ("source_f1", str(folder / "best"))
    assert best["value"] == max(row["source_f1"] for row in values.values())
    assert best["value"] == values[best["step"]]["source_f1"]
    kept = {path.name for path in (folder / "best").iterdir()}
    assert kept == {"config.json", "model.json", "tokenizer.json", "weights", "SHA256SUMS"}


def test_the_report_of_a_run_shows_its_validation(run):
    run, _ = run
    ended = mmqa("report", f"--workdir={run}", "--json")
    assert ended.code == 0, ended.err
    assert ended.value == {
        "task": "rerank", "report": str(run / "report.html"), "best": read_best(run)
    }  # fmt: skip
    for step, values in evaluations(run).items():
        (line,) = (line for line in ended.out.splitlines() if line.startswith(f"│    {step} │"))
        assert f"{values['source_f1']:.3f}" in line
    page = (run / "report.html").read_text()
    for name in ("source F1", "source F1 at threshold 0.2", "threshold"):
        assert f"validation: {name}<" in page
    assert "loss" in page
    curves = re.findall(r'id="curve-source-selector-(\d+)"', page)
    assert curves
    assert re.findall(r'id="curve-source-selector-(\d+)-best"', page) == curves
    assert "best step" in page
    assert "in steps that count" in page


@pytest.mark.parametrize("task", known_tasks())
def test_every_task_of_training_has_a_report(task, tmp_path):
    config = {"task": task, "train": {"steps": 20}, "data": {"split": "train", "dir": "data/x"}}
    made = {"started": "today", "host": {"cpus": 2, "python": "3.12"}, "versions": {}, "git": None}
    write_json(tmp_path / "config.json", {"config": config, **made})
    write_rows(
        tmp_path / "metrics.jsonl",
        [
            {"step": 10, "loss": 2.5},
            {"step": 20, "loss": 1.5},
            {"step": 20, "eval/accuracy": 0.375},
        ],
    )
    found = done("report", f"--workdir={tmp_path}")
    assert (found["task"], found["best"]) == (task, None)
    page = (tmp_path / "report.html").read_text()
    for text in (f"Training of the {known_tasks()[task].product}", "validation: accuracy", "0.375"):
        assert text in page


def test_the_report_of_something_else_is_refused(refused, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text('{"config": {"row": "vlp"}}')
    message = r"holds no training run .*; name the workdir of `mmqa train` or of `mmqa demo`"
    refused("report", f"--workdir={tmp_path}", message=message)


# Without a run


@pytest.mark.parametrize("name", ["contrastive", "rerank", "rerank_cached", "answer"])
def test_the_second_evaluation_compiles_and_writes_nothing(
    name, judge, data, tmp_path, monkeypatch
):
    made, model = judge(name)
    one, other = model(1), model(2)
    first = made.evaluate(one)
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    monkeypatch.chdir(tmp_path)
    before = tree(data)
    values = made.evaluate(other)
    if name == "contrastive":  # the others' few values may be equal by chance
        assert values["mrr"] != first["mrr"]
    assert made.evaluate(one) == first
    assert compiled == []
    assert tree(data) == before
    assert not list(tmp_path.iterdir())
    jax.jit(lambda x: x * 3 + 1)(np.ones(7)).block_until_ready()
    assert compiled  # the listener does hear of compilations


def test_retrieval_is_judged_on_a_fixed_pool(judge, data):
    """The questions' own sources, and an even sample of all."""
    made, _ = judge("contrastive", **{"validate.questions": 1, "validate.sources": 5})
    corpus = open_corpus(data)
    (question,) = made.evaluate.questions
    own = {*question.positives, *question.negatives}
    sampled = {corpus.sources[row].id for row in (0, 2, 4, 6, 8)}
    assert sampled - own
    assert len(own | sampled) < len(corpus)
    assert {source.id for source in made.evaluate.pool.sources} == own | sampled


class ByName:
    """A reranker that finds gold sources at 0.9, one other source at 0.25."""

    def use(self, model):
        self.used = model

    def score(self, questions, candidates):
        ranked = []
        for question, given in zip(questions, candidates, strict=True):
            others = [name for name in given.sources if name not in question.positives]
            names = (*question.positives, *others)
            scores = [0.9] * len(question.positives) + [0.25] + [0.01] * len(others)
            ranked.append(Ranking(question.id, names, tuple(scores[: len(names)])))
        return ranked


def test_source_f1_is_of_the_best_threshold_and_of_the_papers(judge):
    made, _ = judge("rerank")
    made.evaluate.reranker = ByName()
    values = made.evaluate("a model")
    assert made.evaluate.reranker.used == "a model"
    # One gold source and one other: precision 1/2, recall 1.
    assert values == pytest.approx(
        {"source_f1": 1.0, "source_f1@0.2": 2 / 3, "threshold": 0.3}, abs=1e-4
    )


def test_answers_may_be_searched_with_other_beams_than_at_inference(judge):
    beams = [judge("answer", **{"validate.num_beams": n})[0].evaluate.reader for n in (1, 3)]
    assert [reader.options.num_beams for reader in beams] == [1, 3]
    assert TINY_OF["answer"]["inference.num_beams"] == 2


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "rerank",
            {"validate.split": "val"},
            r"validate\.split=val: .*no such questions with gold sources; .*evaluate_every to 0",
        ),
        ("answer", {"validate.split": "dev"}, r"validate\.split=dev: .* questions with keywords"),
        (
            "contrastive",
            {"validate.metric": "recall@3"},
            r"validate\.metric='recall@3': one of recall@1, .* was expected; did you mean",
        ),
        ("rerank", {"validate.questions": -1}, r"validate\.questions=-1: at least 0 was"),
        ("contrastive", {"validate.sources": -1}, r"validate\.sources=-1: at least 0 was"),
        ("answer", {"validate.num_beams": 0}, r"validate\.num_beams=0: at least 1 was"),
    ],
)
def test_validations_that_cannot_be(task, changes, message, data, refused, tmp_path):
    flags = train_flags(task, data, tmp_path / "run", **{"train.evaluate_every": 1, **changes})
    refused("train", *flags, message=message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("del c.validate", r"key validate is missing, but train\.evaluate_every is 5; add it, or"),
        ("c.validate.splt = 'val'", r"key validate\.splt: unknown; did you mean 'split'"),
        ("del c.validate.split", r"key validate\.split is missing; add it"),
        ("c.validate.sources = 9", r"key validate\.sources: unknown"),
        ("c.validate.select = 'bst'", r"validate\.select='bst': one of .*did you mean 'best'"),
        ("c.validate.cap = 16", r"validate\.cap=16: one of none, webqa was expected"),
    ],
)
def test_sections_with_a_mistake(line, message, data, refused, tmp_path):
    (tmp_path / "own.py").write_text(
        "import runpy\n"
        "def get_config(mode=''):\n"
        f"    c = runpy.run_path({f'{ROOT}/configs/atlas/rerank.py'!r})['get_config']('runlocal')\n"
        "    c.train.evaluate_every = 5\n"
        f"    {line}\n"
        "    return c\n"
    )
    flags = (f"--config={tmp_path / 'own.py'}", f"--config.data.dir={data}")
    refused("train", *flags, f"--workdir={tmp_path / 'run'}", message=message)


@pytest.mark.parametrize("folder", ["atlas", "openstax", "webqa"])
def test_every_training_config_can_be_validated(folder):
    """Atlas's and OpenStax's, whose figures are of the last step, only when asked to."""
    seen = set()
    for file in sorted((ROOT / "configs" / folder).glob("*.py")):
        if file.stem in ("tables", "demo", "vlp", "mcan"):  # mcan: test_cli_vqa.py
            continue
        config = load_config(file)
        if not known_tasks()[config.task].validates():
            assert "validate" not in config
            assert config.train.evaluate_every == 0
            continue
        if folder != "webqa":
            assert config.train.evaluate_every == 0
            config.train.evaluate_every = 10
        assert config.train.evaluate_every > 0
        assert read_task(config).validate.split == "val"
        seen.add(config.task)
    assert seen >= {"contrastive", "rerank"}
    # test_cli_fusion_in_decoder.py, test_retriever_task.py, test_reranker_task.py, test_cli_searcher.py
    assert {*TINY_OF, "fusion_in_decoder", "retriever", "reranker", "searcher"} >= seen
