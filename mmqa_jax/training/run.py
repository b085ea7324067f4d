"""One training run: config in, checkpoints, curves and weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core import startup
from mmqa_jax.core.checkpoint import load_metadata
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.workdir import Workdir
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.training.loop import train
from mmqa_jax.training.recipes import make_recipe, make_tokenizer


def run_training(config: ConfigDict, folder: Path, corpus: Corpus | None = None) -> dict[str, Any]:
    """Trains what the config describes in `folder`, or goes on with it.

    Args:
      config: an experiment (see configs/); `config.data.dir` is a prepared corpus.
      folder: the run's workdir.
      corpus: the opened corpus, where the caller has it.

    Returns:
      What `--json` prints: the task, the step and the folder.
    """
    startup.start()
    if corpus is None and not config.data.dir:
        raise UserError("config key data.dir is empty: name the folder of `mmqa prepare`.")
    corpus = corpus or open_corpus(config.data.dir)
    with Workdir(folder) as workdir:
        workdir.claim(config)
        if not is_trained(folder, config.train.steps):
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
            )
    return {"task": config.task, "steps": config.train.steps, "workdir": str(folder)}


def is_trained(folder: Path, steps: int) -> bool:
    """Whether the run in `folder` has reached its last step and saved its weights."""
    return (folder / "model.json").exists() and load_metadata(folder)["step"] == steps
