"""What tests/resume/flips.py damages; to add one, write its Target and name it in TARGETS."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny_run
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from mmqa_jax.core.checkpoint import Checkpoints
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.inference.loading import load_question_classifier
from mmqa_jax.prompting.text_tokenizer import open_tokenizer
from mmqa_jax.training.throughput import CLOCK_COLUMNS
from mmqa_jax.weights.folder import (
    load_converted,
    load_weights,
    read_metadata,
    read_record,
    replace_trained,
)

sys.path += [str(Path(__file__).parents[1] / "unit"), str(Path(__file__).parent)]
import cli_runs
import tiny_checkpoints
from flips import Target

OLD, NEW = 10, 20


def digest(*values: Any) -> str:
    """Of pytrees of arrays, bit by bit, and of other values by what they print."""
    found = hashlib.sha256()
    for value in values:
        for name, leaf in flatten_named({"value": value}).items():
            array = isinstance(leaf, jax.Array | np.ndarray)
            found.update(f"{name} {leaf.dtype} {leaf.shape}".encode() if array else b"")
            found.update(np.asarray(leaf).tobytes() if array else repr(leaf).encode())
    return found.hexdigest()


def _arrays(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    params = {"kernel": rng.normal(size=(40, 30)).astype("f4"), "bias": np.full(7, step, "f4")}
    train = {"step": np.int32(step), "moment": rng.normal(size=(40, 30)).astype("f4")}
    return jax.tree.map(jax.numpy.asarray, {"params": params, "train": train})


def _save_steps(folder: Path) -> None:
    """Two checkpoints: the older is the better, the newer the one to resume from."""
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        for step in (OLD, NEW):
            batches = tiny_run.pipeline()
            for _ in range(step):
                next(batches)
            meta = {"seed": 7, "window": {"sums": {"loss": step / 3}, "count": 2}}
            checkpoints.save(step, **_arrays(step), iterator=batches, meta=meta, score=1 / step)
            checkpoints.wait()


def _restore(folder: Path) -> str:
    batches = tiny_run.pipeline()
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        found = checkpoints.restore_latest(**_arrays(0), iterator=batches)
        best = checkpoints.best()
    return digest(found.params, found.train, found.meta, found.step, best, batches.get_state())


def _stop_run(folder: Path) -> None:
    """A run that was stopped after its best step: checkpoints, and the folder best."""
    batches = tiny_run.Watched(tiny_run.pipeline(), 35, tiny_run.raise_signal(15))
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        tiny_run.run(folder, batches, validation=tiny_run.KEEP_BEST, steps=40)


def _resume(folder: Path) -> str:
    params = tiny_run.run(folder, tiny_run.pipeline(), validation=tiny_run.KEEP_BEST, steps=40)
    rows = [
        {name: value for name, value in row.items() if name not in ("time", *CLOCK_COLUMNS)}
        for row in read_metrics(folder)
    ]
    best = load_weights(folder / "best", params)
    record = json.loads((folder / "best" / "model.json").read_text())
    return digest(params, best, record, rows)


def _train(folder: Path) -> None:
    """`mmqa train` of a classifier, with its weights once more as a best step's."""
    raw = folder.with_name("raw")
    questions = [row for row in cli_runs.QUESTIONS if row["split"] == "train"]
    questions[0] |= {"category": "color", "positives": ["p-Arvania"], "negatives": ["s-Hav"]}
    cli_runs.write_documents(raw, questions)
    data = folder.with_name("data")
    cli_runs.done("prepare", "corpus", f"--raw={raw}", f"--out={data}")
    changes = {
        **{key: value for key, value in cli_runs.TINY.items() if key != "batches.threads"},
        **{"batches.length": 16, "inference.batch_size": 4, "data.dir": data},
    }
    config = f"--config={cli_runs.ROOT}/configs/webqa/modality.py:runlocal"
    flags = [f"--config.{key}={value}" for key, value in changes.items()]
    cli_runs.done("train", config, *flags, f"--workdir={folder}")
    params = load_question_classifier(folder)._state
    companions = [folder / "config.json", folder / "tokenizer.json"]
    replace_trained(folder / "best", None, params, read_metadata(folder), companions)


def _open_trained(folder: Path) -> str:
    found = []
    for place in (folder, folder / "best"):
        with contextlib.redirect_stderr(io.StringIO()):
            classifier = load_question_classifier(place)
        asked = [row["question"] for row in cli_runs.QUESTIONS]
        found += [classifier.probabilities(asked), classifier._state]
    return digest(*found)


def _convert(folder: Path) -> None:
    """`mmqa convert` of a LLaMA with its tokenizer."""
    source = folder.with_name("published")
    flags = tiny_checkpoints.make_source("llama", source).flags("llama")
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(40)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    cli_runs.done(*flags, f"--out={folder}")


def _open_converted(folder: Path) -> str:
    record = read_record(folder)
    text = open_tokenizer(folder)
    state = nnx.state(load_converted(folder))
    return digest(state, record.config, text.fingerprint, text.encode("w1 w7 other"))


TARGETS = [
    Target("training step", _save_steps, _restore),
    Target(
        "resumed run",
        _stop_run,
        _resume,
        spared=("metrics.jsonl", "attempts.jsonl", "events.out.*"),
    ),
    Target(
        "trained run",
        _train,
        _open_trained,
        files=("*.json", "SHA256SUMS", "weights/**/*", "best/**/*"),
        spared=("attempts.jsonl",),
    ),
    Target("converted weights", _convert, _open_converted),
]

os.environ.setdefault("MMQA_PROGRESS", "off")
