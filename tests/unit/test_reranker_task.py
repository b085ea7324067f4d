"""The task `reranker`: validated runs, a language model's judgements as a teacher, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_retriever_task import config_of as retriever_config
from test_retriever_task import corpus

from mmqa_jax.core.config import load_config
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.data.schema import Ranking
from mmqa_jax.retrieval.rankings import write_rankings
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.tasks.rerank import open_reranker
from mmqa_jax.tasks.run import run_training
from tests import tiny_encoders
from tests.refusals import refuses

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tiny_encoders.save_plain("bert", folder)
    return folder


def config_of(folder, **changes):
    config = load_config(f"{ROOT}/configs/openstax/reranker.py:runlocal")
    config.init = str(folder)
    config.batches.update({"batch_size": 4, "length": 32, "num_negatives": 2})
    for name, value in changes.items():
        *sections, key = name.split(".")
        section = config
        for part in sections:
            section = section[part]
        section[key] = value
    return config


def test_the_best_step_is_kept(encoder, tmp_path):
    names = tuple(source.id for source in corpus().sources)
    found = [Ranking(q.id, names, (0.0,) * 12) for q in corpus().questions("val")]
    write_rankings(tmp_path / "val.jsonl", found)
    changes = {
        "train.steps": 6,
        "train.evaluate_every": 2,
        "train.checkpoint_every": 2,
        "train.optimizer.learning_rate": 1e-2,
        "validate.rankings": str(tmp_path / "val.jsonl"),
        "validate.top_k": 12,
    }
    run_training(config_of(encoder, **changes), tmp_path / "run", corpus())
    logged = [row for row in read_metrics(tmp_path / "run") if "eval/mrr" in row]
    assert [row["step"] for row in logged] == [2, 4, 6]
    best = json.loads((tmp_path / "run" / "best" / "model.json").read_text())
    assert best["value"] == max(row["eval/mrr"] for row in logged)
    ranked = open_reranker(tmp_path / "run" / "best", corpus()).score(
        corpus().questions("val"), found
    )
    places = [1 + x.sources.index(f"s{n}") for n, x in enumerate(ranked, 8)]
    assert np.mean([1 / place for place in places]) == pytest.approx(best["value"])


def judged(folder, **row):
    candidates = [{"id": f"q{n}", "similarity": 0.5, "score": -0.1 * n} for n in (1, 2, 3)]
    value = {"question_id": "q0", "alone": None, "candidates": candidates, **row}
    folder.mkdir()
    write_jsonl(folder / "example_scores.jsonl", [value])
    return folder


@pytest.mark.parametrize("loss", ["margin_mse", "divergence"])
def test_what_a_language_model_judged_is_learned(encoder, tmp_path, loss):
    changes = {"data.teacher": str(judged(tmp_path / "judged")), "loss": loss}
    config = config_of(encoder, **changes, **{"batches.batch_size": 1, "train.steps": 8})
    config.train.optimizer.learning_rate = 1e-2
    run_training(config, tmp_path / "run", corpus())
    assert all(np.isfinite(row["loss"]) for row in read_metrics(tmp_path / "run"))
    task = read_task(config)
    (question,) = task.training_questions(corpus())
    assert (question.positives, question.negatives) == (("q1",), ("q2", "q3"))
    assert question.extra["scores"] == {"q1": -0.1, "q2": -0.2, "q3": pytest.approx(-0.3)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question_id": "q99"}, "'q99', which .* does not hold"),
        ({"candidates": [{"id": "s1", "similarity": 0, "score": 0}]}, "'s1', which"),
        ({"candidates": [{"id": "q1"}]}, "line 1: not a line of `mmqa judge`"),
    ],
)
def test_teachers_of_other_ids(encoder, tmp_path, row, message):
    config = config_of(
        encoder, **{"data.teacher": str(judged(tmp_path / "judged", **row)), "loss": "divergence"}
    )
    refuses(message, run_training, config, tmp_path / "run", corpus())


def test_a_teacher_of_other_sources(encoder, tmp_path):
    rows = [{"question_id": f"q{n}", "sources": ["s99"], "scores": [1.0]} for n in range(8)]
    write_jsonl(tmp_path / "teacher.jsonl", rows)
    changes = {"data.teacher": str(tmp_path / "teacher.jsonl")}
    task = read_task(config_of(encoder, loss="margin_mse", **changes))
    refuses("source 's99' is not in the corpus", task.training_questions, corpus())
    changes["loss.kind"] = "margin_mse"
    task = read_task(retriever_config(encoder, **changes))
    refuses("source 's99' is not in the corpus", task.training_questions, corpus())
