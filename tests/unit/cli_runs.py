"""What the test_cli_*.py files share: running a verb in this process, and a tiny corpus.

The verbs run in this process: their exit code, what they print, what they leave on disk. The
models are one layer deep and two steps trained; what they learn is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from PIL import Image

from mmqa_jax.cli import main
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.models.vlp import network as vlp
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.formats.orbax_reader import read_weights, stored_specs
from mmqa_jax.weights.published import load_published

ROOT = Path(__file__).parents[2]
LANDS = {
    "Arvania": "Pelot", "Borduria": "Szohod", "Cinnabar": "Vermil", "Doriath": "Menegroth",
    "Erewhon": "Colcha", "Florin": "Gilder", "Gondal": "Regina", "Hav": "Medina",
}  # fmt: skip
FLAGS = {"Arvania": (210, 47, 39), "Borduria": (30, 80, 160), "Cinnabar": (0, 0, 0)}
TINY = {  # one layer, one shape a model: compiling is what costs here
    "tokenizer": "corpus:200",
    "model.changes.hidden": 32,
    "model.changes.layers": 1,
    "model.changes.heads": 2,
    "model.changes.mlp": 32,
    "batches.batch_size": 4,
    "batches.threads": 0,
    "train.steps": 2,
    "train.checkpoint_every": 1,
    "train.log_every": 1,
}
TINY_OF = {
    "contrastive": {
        "model.vision.width": 32,
        "model.vision.layers": 1,
        "model.vision.heads": 2,
        "model.vision.mlp_width": 32,
        "model.vision.embed_dim": 32,
        "batches.query_length": 24,
        "batches.source_lengths": "(24,)",
        "inference.buckets": "(24,)",
    },
    "rerank": {
        "packing.buckets": "((1,64),)",
        "packing.max_question_tokens": 20,
        "inference.batch_size": 8,
    },
    "answer": {
        "packing.buckets": "((1,96),)",
        "packing.max_question_tokens": 20,
        "inference.max_new_tokens": 3,
        "inference.num_beams": 2,
        "inference.batch_size": 4,
    },
}
# Of tiny_llm's model in a row: equal sizes, so that all files share its programs, and one block, so
# that there is a program for one length of context only.
ENGINE = {"slots": 4, "length": 192, "buckets": (8, 32), "prefill_tokens": 64}


class Ended(NamedTuple):
    """How a verb ended."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> dict:
        """The JSON object on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


def mmqa(*arguments: str | Path, initializers: bool = False) -> Ended:
    """Runs a verb in this process.

    initializers: a training starts from weights as its model draws them; else NumPy draws them,
      and no program for it is compiled.
    """
    out, err = io.StringIO(), io.StringIO()
    trains = arguments[:1] in (("train",), ("replay",)) and not initializers
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _drawn_starts() if trains else contextlib.nullcontext(),
    ):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's --help
            code = stop.code
    return Ended(code, out.getvalue(), err.getvalue())


def _drawn_starts() -> contextlib.AbstractContextManager[None]:
    from tests.drawn_weights import drawn_starts  # with JAX

    return drawn_starts()


def succeeded(*arguments: str | Path, **options: bool) -> Ended:
    """Runs a verb that must succeed, as `mmqa` does."""
    ended = mmqa(*arguments, **options)
    assert ended.code == 0, ended.err
    return ended


def done(*arguments: str | Path, **options: bool) -> dict:
    """Runs a verb that must succeed; its JSON."""
    return succeeded(*arguments, "--json", **options).value


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder with its size and time; a workdir's lock is no content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@contextlib.contextmanager
def quietly(cache: Path) -> Iterator[None]:
    """No progress lines, and a compile cache that is nobody else's."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_PROGRESS", "off")
        patch.setenv("MMQA_CACHE", str(cache))
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


@contextlib.contextmanager
def narrow_vlp(**sizes: int) -> Iterator[None]:
    """VLP over X101's features with a linear of 32 in front of its trunk, in place of 2048.

    sizes: other values of its config.
    """
    published = vlp.vlp_base_x101()
    with pytest.MonkeyPatch.context() as patch:
        narrow = dataclasses.replace(published, visual_hidden=(32,), **sizes)
        patch.setattr(vlp, "vlp_base_x101", lambda: narrow)
        yield


def sentence(land: str) -> str:
    return f"The capital of {land} is {LANDS[land]}."


def question(number: int, split: str, land: str, **fields) -> dict:
    return {
        "id": f"{split}{number}", "split": split, "category": "text",
        "question": f"What is the capital of {land}?", "answers": [sentence(land)],
        "keywords": LANDS[land], "positives": [f"s-{land}"],
        "negatives": [f"s-{other}" for other in LANDS if other != land], **fields,
    }  # fmt: skip


def png(color: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), color).save(buffer, "PNG")
    return buffer.getvalue()


def write_documents(folder: Path, questions: list[dict]) -> Path:
    """A corpus interchange folder: eight snippets, three flags, and the questions."""
    folder.mkdir(parents=True)
    sources = [
        {"id": f"s-{land}", "modality": "text", "text": sentence(land), "title": land}
        for land in LANDS
    ]
    for land, color in FLAGS.items():
        (folder / f"{land}.png").write_bytes(png(color))
        sources.append(
            {
                "id": f"p-{land}",
                "modality": "image",
                "text": f"Flag of {land}",
                "title": land,
                "image": f"{land}.png",
            }
        )
    for name, rows in (("sources", sources), ("questions", questions)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "ATTRIBUTION.txt").write_text("Flags of lands, by nobody, CC0")
    return folder


QUESTIONS = [
    *(question(n, "train", land) for n, land in enumerate(LANDS)),
    # As in WebQA's test split: candidates, but which are gold is hidden.
    *(
        question(n, "val", land, positives=[], negatives=[f"s-{land}", "s-Hav"])
        for n, land in enumerate(list(LANDS)[:3])
    ),
    *(question(n, "test", land) for n, land in enumerate(list(LANDS)[2:5])),
    question(
        3, "test", "Arvania", question="What color has the flag of Arvania?", keywords="red",
        answers=["It is red."], category="color", positives=["p-Arvania"],
        negatives=["p-Borduria", "s-Arvania"],
    ),
    question(4, "test", "Hav", positives=[], negatives=[]),
]  # fmt: skip
TEST = [row for row in QUESTIONS if row["split"] == "test"]


def train_flags(name: str, data: Path, workdir: Path, **overrides) -> list[str]:
    values = {**TINY, **TINY_OF[name], "data.dir": data, **overrides}
    flags = [f"--config={ROOT}/configs/atlas/{name}.py:runlocal", f"--workdir={workdir}"]
    return flags + [f"--config.{key}={value}" for key, value in values.items()]


def flags_with(verb: str, config: str, workdir: Path, values: Mapping[str, object]) -> list[str]:
    """A verb with a config of the folder configs, some of its values changed."""
    flags = [verb, f"--config={ROOT}/configs/{config}", f"--workdir={workdir}"]
    return flags + [f"--config.{key}={value}" for key, value in values.items()]


def of_engine(sizes: Mapping[str, object] = ENGINE, part: str = "llm") -> dict[str, object]:
    """A row's config values that give the engine of a part these sizes."""
    return {f"parts.{part}.engine.{key}": value for key, value in sizes.items()}


def weights_of(folder: Path, part: str = "weights") -> dict[str, np.ndarray]:
    """The arrays of a weights folder by name, or those of a checkpoint's `part`."""
    specs = stored_specs(folder / part)
    return {name: np.asarray(x) for name, x in read_weights(folder / part, specs).items()}


def traced_loss(run: Path, config: ConfigDict | None = None) -> dict:
    """The first batch of a run, of which its loss is traced only: no step is compiled.

    Args:
      run: its folder.
      config: as `mmqa train` would be given it for a folder that is still empty; None: the run's.
    """
    config = config or read_config(run)
    task, corpus = read_task(config).in_folder(run), open_corpus(config.data.dir)
    recipe = task.recipe(corpus, task.make_tokenizer(corpus, run))
    with contextlib.closing(recipe.batches) as batches:
        batch = next(batches)

    def loss():
        model = recipe.objective.outline()
        return recipe.objective.loss(model, batch, jax.random.key(1))[0]

    assert nnx.eval_shape(loss).shape == ()
    return batch


def assert_export_is_the_run(model: str, run: Path, exported: Path) -> None:
    """Config, weights and tokenizer: all that answers depend on. Exports the run to `exported`."""
    done("convert", f"--model={model}", f"--source={run}", f"--out={exported}", "--export=hf")
    ours, theirs = load_converted(run), load_published(model, exported)
    assert theirs.config == ours.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(theirs), nnx.state(ours))
    assert open_text_tokenizer(exported).fingerprint == open_text_tokenizer(run).fingerprint


def killed_after(step: int, run: Path, into: Path) -> Path:
    """A copy of a finished run as a kill after a step would have left it."""
    shutil.copytree(run, into)
    for checkpoint in (into / "checkpoints").glob("[0-9]*"):
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    for name in ("weights", "best"):
        shutil.rmtree(into / name)
    (into / "model.json").unlink()
    assert (into / "checkpoints" / str(step)).is_dir()
    return into


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
