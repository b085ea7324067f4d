"""One training run: config in, checkpoints, curves and weights out."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from mmqa_jax.core import startup
from mmqa_jax.core.checkpoint import load_metadata
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import no_empty_folders, read_json
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.workdir import Workdir
from mmqa_jax.data.clip_tokenizer import open_tokenizer
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.training.checks import check_config
from mmqa_jax.training.loop import train
from mmqa_jax.training.recipes import make_recipe, make_tokenizer


def run_training(
    config: ConfigDict, folder: Path, corpus: Corpus | None = None, *, only_start: bool = False
) -> dict[str, Any]:
    """Trains what the config describes in `folder`, or goes on with it.

    Args:
      config: an experiment (see configs/); `config.data.dir` is a prepared corpus.
      folder: the run's workdir.
      corpus: the opened corpus, where the caller has it.
      only_start: saves the model as `config.init` makes it, without training: published weights,
        or those of another run, for the other verbs.

    Returns:
      What `--json` prints: the task, the step and the folder.

    Raises:
      UserError: a config that cannot be trained (it leaves no trace in `folder`), or a folder of
        another config.
    """
    startup.start()
    check_config(config)
    if corpus is None and not config.data.dir:
        raise UserError("config key data.dir is empty: name the folder of `mmqa prepare`.")
    corpus = corpus or open_corpus(config.data.dir)
    steps = 0 if only_start else config.train.steps
    with claimed(folder, config, work="checkpoints/[0-9]*"):
        if only_start and any(folder.glob("checkpoints/[0-9]*")):
            raise UserError(
                f"--only_start: {folder} holds a run that was trained; name another --workdir, or "
                "leave --only_start out to go on there."
            )
        if is_trained(folder, steps):
            open_tokenizer(folder / "tokenizer.json")  # or says what is wrong with it
        else:
            recipe = make_recipe(config, corpus, make_tokenizer(config.tokenizer, corpus, folder))
            train(
                config.train.to_dict(),
                task=recipe.task,
                batches=recipe.batches,
                mesh=make_mesh(config.mesh.to_dict()),
                workdir=folder,
                seed=config.seed,
                fill=recipe.fill,
                title=recipe.title,
                metadata={"task": config.task, "corpus": corpus.fingerprint},
                only_start=only_start,
            )
            recipe.reader.tell_of_missing()
    return {"task": config.task, "steps": steps, "workdir": str(folder)}


@contextlib.contextmanager
def claimed(folder: Path, config: ConfigDict, work: str) -> Iterator[tuple[Workdir, bool]]:
    """A run's workdir, claimed for its config, and whether the run goes on there.

    If the input of a first start is refused, what it wrote is taken back: else the corrected
    config would be refused as another one.

    Args:
      work: pattern of what is worth more than that: with such a file all is kept.
    """
    with no_empty_folders(folder), Workdir(folder) as workdir:
        resumed = workdir.claim(config)
        before = set(folder.iterdir()) if folder.exists() else set()
        written = {workdir / "config.json", workdir / ".lock"}
        try:
            yield workdir, resumed
        except UserError:
            if not resumed and jax.process_index() == 0 and not any(folder.glob(work)):
                for path in written | (set(folder.iterdir()) - before):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            raise


def read_config(folder: Path) -> ConfigDict:
    """The config of the run in `folder`; UserError where its config.json is of another kind."""
    record = read_json(folder / "config.json")
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise UserError(
            f"{folder / 'config.json'}: is not a run's config.json; copy the run anew or start it "
            "again in a new --workdir."
        )
    return ConfigDict(record["config"])


def is_trained(folder: Path, steps: int) -> bool:
    """Whether the run in `folder` has reached its last step and saved its weights."""
    return (folder / "model.json").exists() and load_metadata(folder).get("step") == steps
