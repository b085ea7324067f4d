"""One training run: config in, checkpoints, curves and weights out."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.checkpoints.checksums import check_sums, read_sums
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.hosts.distributed import check_same_run, check_shared_folder
from mmqa_jax.core.local_copies import with_local_copies
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.metrics import check_wandb
from mmqa_jax.core.workdir import claim_workdir
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.tasks.registry import check_config, read_task
from mmqa_jax.training.attempts import goodput, read_attempts
from mmqa_jax.training.best_weights import read_best
from mmqa_jax.training.loop import Observed, Resuming, parse_steps, train
from mmqa_jax.training.options import FREE
from mmqa_jax.training.state import outline
from mmqa_jax.weights.folder import write_run_sums
from mmqa_jax.weights.record import RUN_FILES, is_trained

# A run may resume with other values of these, on other hosts: they change no step. Whether another
# `train.steps` does is found out by the loop (training/loop.py, `Resuming`).
_FREE = frozenset(
    {
        *("batches.threads", "batches.workers", "features.cache", "mesh", "train.steps"),
        *(f"train.{key}" for key in FREE),
    }
)


def run_training(
    config: ConfigDict,
    folder: Path,
    corpus: Corpus | None = None,
    *,
    only_start: bool = False,
    profile: str | None = None,
    wandb: str | None = None,
    skip_damaged: bool = False,
    stretch_schedule: bool = False,
) -> dict[str, Any]:
    """Trains what the config describes, or resumes it.

    Args:
      config: an experiment (see configs/); `config.data` names a prepared corpus.
      folder: the run's workdir.
      corpus: the opened corpus, if the caller has it.
      only_start: saves the initial weights, without training: published weights, or those of
        another run, for the other verbs.
      profile: START:END, steps to write a trace of; see training.loop.
      wandb: project in Weights & Biases that gets the rows of metrics.jsonl too.
      skip_damaged: sets damaged checkpoints aside and goes on from an earlier one.
      stretch_schedule: lets another `train.steps` change the schedule of a run that goes on.

    Returns:
      What `--json` prints: the task, the step and the folder, the best step if one is kept, and
      the goodput (training.attempts) of a run that took steps.
    """
    distributed.start()
    with distributed.fail_together():
        check_config(config)
        if only_start and profile is not None:
            raise UserError("--profile: --only_start takes no step; leave one of them out.")
        steps = None if profile is None else parse_steps(profile, config.train.steps)
        if wandb is not None:
            check_wandb(wandb)
        resuming = Resuming(skip_damaged, stretch_schedule)
        return _run_training(config, folder, corpus, only_start, Observed(steps, wandb), resuming)


def _run_training(
    named: ConfigDict,
    folder: Path,
    corpus: Corpus | None,
    only_start: bool,
    observed: Observed,
    resuming: Resuming,
) -> dict[str, Any]:
    """Trains; `named` is the config whose places may be in an object store."""
    config = with_local_copies(named, stream=True)
    task = read_task(config).in_folder(folder)
    corpus = corpus or task.open_corpus()
    steps = 0 if only_start else config.train.steps
    further = {
        "--workdir": str(folder),
        "--only_start": only_start,
        "--skip_damaged": resuming.skip_damaged,
        "--stretch_schedule": resuming.stretch_schedule,
    }
    check_same_run(named, {**further, "the prepared corpus": corpus.fingerprint})
    with claim_workdir(folder, named, work=("checkpoints/[0-9]*",), free=_FREE) as (workdir, _):
        distributed.barrier("the workdir is claimed")
        check_shared_folder(folder)
        resuming = dataclasses.replace(
            resuming, former=workdir.recorded_config()["train"], on_start=workdir.record_changes
        )
        distributed.connect_devices()
        if only_start and any(folder.glob("checkpoints/[0-9]*")):
            raise UserError(
                f"--only_start: {folder} holds a trained run; name another --workdir, or leave "
                "--only_start out to resume that run."
            )
        if is_trained(folder, steps):
            task.open_tokenizer(folder)  # raises if it is damaged
        else:
            check_sums(
                folder, RUN_FILES, remedy="copy the run again, or train it in a new --workdir"
            )
            tokenizer = task.make_tokenizer(corpus, folder)
            recipe = task.recipe(corpus, tokenizer)
            if recipe.answers is not None:
                from mmqa_jax.tasks.vqa import keep_vocabulary

                keep_vocabulary(recipe.answers, folder)
            _keep_sums(folder)
            validation = None
            if task.loop.evaluate_every and not only_start:
                model = nnx.eval_shape(lambda: outline(recipe.objective))
                validation = task.validation(corpus, tokenizer, model)
            with contextlib.closing(recipe.batches) as batches:
                train(
                    config.train.to_dict(),
                    objective=recipe.objective,
                    batches=batches,
                    mesh=make_mesh(task.mesh),
                    workdir=folder,
                    seed=task.seed,
                    validation=validation,
                    load_pretrained=recipe.load_pretrained,
                    finish=recipe.finish,
                    title=task.title,
                    limits=task.limits,
                    metadata={"task": task.name, "corpus": corpus.fingerprint, **recipe.metadata},
                    only_start=only_start,
                    observed=observed,
                    resuming=resuming,
                )
            if recipe.reader is not None:
                recipe.reader.warn_missing()
    result = {"task": config.task, "steps": steps, "workdir": str(folder)}
    if (best := read_best(folder)) is not None:
        result["best"] = best
    if (times := goodput(read_attempts(folder))) is not None:
        result["goodput"] = times.as_json()
    return result


def _keep_sums(folder: Path) -> None:
    """Writes the checksums of the run's files when they are new."""
    if jax.process_index() == 0:
        there = {name for name in RUN_FILES if (folder / name).exists()}
        if there - (read_sums(folder) or {}).keys():
            write_run_sums(folder)
    distributed.barrier("checksums")
