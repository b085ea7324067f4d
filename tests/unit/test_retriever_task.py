"""The task `retriever`: a run from a folder to vectors, mined negatives after kill -9, refusals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from mmqa_jax.core.config import load_config
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.runs.verbs.conversion import export_retrieval_run
from mmqa_jax.tasks.embedder import load_embedder
from mmqa_jax.tasks.registry import check_config, read_task
from mmqa_jax.tasks.retriever import MinedBatches
from mmqa_jax.tasks.run import run_training
from tests import tiny_encoders
from tests.refusals import refuses

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORDS = tiny_encoders.WORDS.split()


def corpus() -> Corpus:
    rng = np.random.default_rng(0)
    sources = [
        Source(f"s{n}", "text", " ".join(rng.choice(WORDS, 6)), f"title {n}") for n in range(12)
    ]
    questions = [
        Question(
            f"q{n}",
            "train" if n < 8 else "val",
            " ".join(rng.choice(WORDS, 4)),
            positives=(f"s{n}",),
            negatives=(f"s{(n + 1) % 12}", f"s{(n + 2) % 12}"),
        )
        for n in range(12)
    ]
    return Corpus(sources, questions, fingerprint="words")


def config_of(folder: Path, **changes):
    config = load_config(f"{ROOT}/configs/openstax/retriever.py:runlocal")
    flat = {
        "init": str(folder),
        "batches.batch_size": 4,
        "batches.query_length": 12,
        "batches.source_lengths": (16,),
        "train.steps": 5,
        "train.checkpoint_every": 2,
        **changes,
    }
    for name, value in flat.items():
        *sections, key = name.split(".")
        section = config
        for part in sections:
            section = section[part]
        section[key] = value
    return config


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tiny_encoders.save_plain("bert", folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_mined_negatives_after_kill_9(encoder, tmp_path):
    """Killed between two minings, a run ends with the same weights and negatives."""
    changes = {"mining.every": 3, "mining.top_k": 4, "train.evaluate_every": 5}
    config = config_of(encoder, **changes)
    run_training(config, tmp_path / "whole", corpus())
    # This file, as a process, kills itself at the fifth batch, after the checkpoint of step 4.
    ended = subprocess.run(
        [sys.executable, __file__, str(encoder), str(tmp_path / "killed"), json.dumps(changes)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model.json").exists()
    run_training(config, tmp_path / "killed", corpus())
    whole, killed = (files_of(tmp_path / run / "negatives") for run in ("whole", "killed"))
    assert sorted(whole) == ["00000000.npy", "00000003.npy"]
    assert whole == killed
    embedders = [load_embedder(tmp_path / run)[0] for run in ("whole", "killed")]
    vectors = [embedder.embed_questions(["which flag has cedar"]) for embedder in embedders]
    np.testing.assert_array_equal(*vectors)
    assert embedders[0].fingerprint == embedders[1].fingerprint  # of the parameters' bits

    out = tmp_path / "exported"
    assert export_retrieval_run(tmp_path / "whole", out, overwrite=False)["model"] == "retriever"
    theirs = SentenceTransformer(str(out), device="cpu").encode(["which flag has cedar"])
    np.testing.assert_allclose(vectors[0], theirs, rtol=0, atol=1e-6)
    refuses("--overwrite", export_retrieval_run, tmp_path / "whole", out, overwrite=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches.query_length": 900}, "batches.query_length: 900 tokens.*3 to 560"),
        ({"batches.source_lengths": (900,)}, "batches.source_lengths: 900"),
        ({"loss.matryoshka": (12, 99)}, "loss.matryoshka.*36 values"),
        ({"model.dim": 99}, "model.dim=99.*36 values"),
        ({"model.prompts": ("query: ",)}, "model.prompts"),
        ({"model.changes": {"hidden": 9}}, "model.changes.hidden"),
        ({"model.lora": {"rank": 2}}, "model.lora"),
        ({"loss.kind": "margin_mse"}, "loss.kind=margin_mse.*data.teacher"),
        ({"data.teacher": "ranked.jsonl"}, "data.teacher=ranked.jsonl"),
        (
            {"loss.kind": "divergence", "data.teacher": "x", "mining.every": 2},
            "mining.every=2.*scores",
        ),
        ({"train.accumulate": 2}, "train.accumulate=2.*tower_parts"),
        ({"init": "/nothing"}, "init=/nothing"),
    ],
)
def test_refused_configs(encoder, changes, message):
    refuses(message, check_config, config_of(encoder, **changes))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"query": "a", "positives": ["s99"]}, "line 1: source 's99' is not in the corpus"),
        ({"query": "a", "positives": []}, "line 1: query must be"),
        ({"query": "a"}, "line 1: an object with query"),
        ({"query": "a", "positives": ["s1"], "scores": [1.0, 2.0]}, "line 1: 1 finite scores"),
    ],
)
def test_refused_examples(encoder, tmp_path, line, message):
    write_jsonl(tmp_path / "examples.jsonl", [line])
    task = read_task(config_of(encoder, **{"data.examples": str(tmp_path / "examples.jsonl")}))
    refuses(message, task.training_questions, corpus())


def test_teacher_of_other_questions(encoder, tmp_path):
    row = {"question_id": "other", "sources": ["s1"], "scores": [1.0]}
    write_jsonl(tmp_path / "teacher.jsonl", [row])
    changes = {"loss.kind": "divergence", "data.teacher": str(tmp_path / "teacher.jsonl")}
    task = read_task(config_of(encoder, **changes))
    refuses("question 'other' is not among", task.training_questions, corpus())


def _killed() -> None:
    draw = MinedBatches.__next__

    def die_at_fifth(batches):
        if batches._step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(batches)

    MinedBatches.__next__ = die_at_fifth
    config = config_of(Path(sys.argv[1]), **json.loads(sys.argv[3]))
    run_training(config, Path(sys.argv[2]), corpus())


if __name__ == "__main__":
    _killed()
