"""Runs of the tasks `retriever` and `reranker` on models that see pictures: killed and resumed,
exported and opened again, refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from qwen_vl_prompts import make_published, small_pictures
from test_clip_embedder import published as clip  # noqa: F401, a fixture

from mmqa_jax.core.config import load_config
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.inference.cross_encoder import Side
from mmqa_jax.runs.verbs.conversion import export_retrieval_run
from mmqa_jax.tasks.embedder import open_embedder
from mmqa_jax.tasks.registry import check_config, read_task
from mmqa_jax.tasks.rerank import open_reranker
from mmqa_jax.tasks.retriever import MinedBatches
from mmqa_jax.tasks.run import run_training
from tests.pictures import encoded
from tests.refusals import refuses

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LORA = {"rank": 2, "alpha": 4.0, "targets": (), "base": "float32"}


def corpus() -> Corpus:
    shown = [picture.convert("RGB") for picture in small_pictures()]
    pictures = {f"{n}.png": encoded(picture) for n, picture in enumerate(shown)}
    texts = ["two red flags", "of cedar", "a", "a b"]
    sources = [Source(f"s{n}", "text", text) for n, text in enumerate(texts)]
    sources += [Source(f"p{n}", "image", "seen", image=f"{n}.png") for n in range(3)]
    questions = [
        Question(f"q{n}", "train", text, positives=(f"p{n % 3}",), negatives=(f"s{n}",))
        for n, text in enumerate(["which flag?", "is it red", "the third", "the first"])
    ]
    return Corpus(sources, questions, read_picture=pictures.get, fingerprint="pages")


def config_of(folder: Path, task: str = "retriever", **changes):
    config = load_config(f"{ROOT}/configs/openstax/{task}.py:runlocal")
    flat = {
        "init": str(folder),
        "batches.batch_size": 2,
        "batches.num_negatives": 1,
        "train.steps": 4,
        "train.checkpoint_every": 2,
        "train.optimizer.learning_rate": 0.01,
        **changes,
    }
    for name, value in flat.items():
        *sections, key = name.split(".")
        section = config
        for part in sections:
            section = section[part]
        section[key] = value
    return config


PAGES = {
    "batches.query_length": 60,
    "batches.source_lengths": (300,),
    "pictures": {"max_pixels": 1600},
    "model.vectors": "token",
    "model.dim": 20,
    "mining": {"every": 2, "top_k": 3},
}
TOWERS = {"batches.query_length": 20, "batches.source_lengths": (20,), "model.vectors": ""}


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A Qwen3-VL that writes."""
    return make_published(tmp_path_factory.mktemp("vlm") / "Tiny-VL").folder


def vectors(model: Path) -> list[np.ndarray]:
    everything = corpus()
    embedder, pictures = open_embedder(model, everything, {"batch_size": 2})
    made = [embedder.embed_questions(["which flag?"])]
    return [*made, embedder.embed_rows(everything, pictures, range(len(everything)))]


@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_a_model_that_writes_becomes_a_retriever_of_pages(writer, tmp_path, tower):
    """By a new linear layer; by LoRA with a frozen tower; killed before the third step."""
    changes = {**PAGES, "model.tower": tower} | ({"model.lora": LORA} if tower == "frozen" else {})
    config = config_of(writer, **changes)
    run_training(config, tmp_path / "whole", corpus())
    assert all(np.isfinite(row["loss"]) for row in read_metrics(tmp_path / "whole"))
    ended = subprocess.run(
        [sys.executable, __file__, str(writer), str(tmp_path / "killed"), json.dumps(changes)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])},
    )
    assert ended.returncode == -signal.SIGKILL
    run_training(config, tmp_path / "killed", corpus())
    whole, killed = (vectors(tmp_path / run) for run in ("whole", "killed"))
    for one, other in zip(whole, killed, strict=True):
        np.testing.assert_array_equal(one, other)
    out = tmp_path / "exported"
    export_retrieval_run(tmp_path / "whole", out, overwrite=False)
    for one, other in zip(whole, vectors(out), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["ColQwen3"]
    theirs = transformers.Qwen3VLModel.from_pretrained(out).state_dict()
    base = transformers.Qwen3VLModel.from_pretrained(writer).state_dict()
    moved = {name for name, x in theirs.items() if not np.allclose(x, base[name], atol=1e-5)}
    assert any("language_model" in name for name in moved)
    assert any("visual" in name for name in moved) == (tower == "trained")


def test_two_towers(clip, tmp_path):  # noqa: F811
    config = config_of(clip, **TOWERS)
    run_training(config, tmp_path / "run", corpus())
    out = tmp_path / "out"
    export_retrieval_run(tmp_path / "run", out, overwrite=False)
    for one, other in zip(vectors(tmp_path / "run"), vectors(out), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    transformers.CLIPModel.from_pretrained(out)
    assert np.abs(vectors(clip)[1] - vectors(out)[1]).max() > 1e-3


def test_a_reranker_that_sees(writer, tmp_path):
    changes = {
        "batches.length": 640,
        "pictures": {"max_pixels": 1600},
        "model.lora": LORA,
        "model.tower": "frozen",
        "validate": {"split": "train", "questions": 0, "top_k": 4},
        "train.evaluate_every": 2,
    }
    run_training(config_of(writer, "reranker", **changes), tmp_path / "run", corpus())
    assert json.loads((tmp_path / "run" / "best" / "model.json").read_text())["metric"] == "mrr"
    out = tmp_path / "out"
    export_retrieval_run(tmp_path / "run", out, overwrite=False)
    names = tuple(source.id for source in corpus().sources)
    questions = corpus().questions("train")[:2]
    candidates = [Ranking(question.id, names, (0.0,) * len(names)) for question in questions]
    scores = []
    for folder in (tmp_path / "run", out, writer):
        reranker = open_reranker(folder, corpus(), {"batch_size": 2})
        ranked = reranker.score(questions, candidates)
        by_name = [dict(zip(x.sources, x.scores, strict=True)) for x in ranked]
        scores.append([[of[name] for name in names[:4]] for of in by_name])
        (nothing,) = reranker.relevance([(Side("a"), Side(""))])
        assert 0 < nothing < 1
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-6)
    assert np.abs(np.subtract(scores[1], scores[2])).max() > 1e-3


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("retriever", {**PAGES, "batches.source_lengths": (40,)}, "batches.source_lengths: 40"),
        ("retriever", {**PAGES, "batches.source_lengths": (300, 400)}, "give one"),
        ("retriever", {**PAGES, "model.prompts": ("a", "b")}, "model.prompts: the prompts of Col"),
        ("reranker", {"batches.length": 30}, "batches.length=30: a picture"),
        (
            "reranker",
            {"batches.length": 640, "pictures": {"max_pixels": 1600}, "loss": "divergence"},
            "loss=divergence.*teacher",
        ),
    ],
)
def test_refused(writer, task, changes, message):
    refuses(message, check_config, config_of(writer, task, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.vectors": "token"}, "model.vectors=token"),
        ({"pictures": {"max_pixels": 900}}, "pictures.max_pixels"),
        ({"model.lora": LORA}, "model.lora"),
        ({"batches.query_length": 90}, "batches.query_length: 90"),
    ],
)
def test_refused_towers(clip, changes, message):  # noqa: F811
    refuses(message, check_config, config_of(clip, **{**TOWERS, **changes}))


def test_text_encoders_see_nothing(tmp_path):
    from tests import tiny_encoders

    tiny_encoders.save_plain("bert", tmp_path)
    for task in ("retriever", "reranker"):
        config = config_of(tmp_path, task, **{"model.tower": "frozen"})
        refuses("sees no pictures", check_config, config)
    assert not read_task(config_of(tmp_path)).trunk.sees


def _killed() -> None:
    draw = MinedBatches.__next__

    def die_at_third(batches):
        if batches._step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(batches)

    MinedBatches.__next__ = die_at_third
    config = config_of(Path(sys.argv[1]), **json.loads(sys.argv[3]))
    run_training(config, Path(sys.argv[2]), corpus())


if __name__ == "__main__":
    _killed()
