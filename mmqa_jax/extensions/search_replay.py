"""A searcher's run draws its episodes again, by its first weights or those of its checkpoints.

What is drawn depends on the weights, the seed and the batch's number, so that another host gets
the same bytes; one that differs says that weights, corpus or programs are not those of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.typed import read_typed
from mmqa_jax.core.workdir import Workdir, read_config, steps_in
from mmqa_jax.extensions.searcher import Searcher
from mmqa_jax.training.loop import models_at


def replay(run: Path, steps: Sequence[int] = (), out: Path | None = None) -> dict[str, Any]:
    """Draws batches of a run again, and compares them with those that it kept.

    Args:
      run: workdir of a searcher that was trained, or whose training was killed.
      steps: whose weights draw: 0, those that the run began with, or of checkpoints that are there;
        (): all of these whose batches are kept.
      out: folder of the batches; None: they are not kept.

    Returns:
      `steps`, `batches` and `episodes`: what was drawn.

    Raises:
      RunError: a batch differs; step, question, episode and token are named.
    """
    config = read_config(run)
    if config.get("task") != Searcher.name:
        raise UserError(
            f"{run}: is a run of task={config.get('task')}, {Searcher.name} was expected, which "
            "keeps what it draws; name the workdir of such a run."
        )
    with Workdir(run) as workdir, contextlib.ExitStack() as stack:
        workdir.claim(config)  # nobody trains in it meanwhile
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmqa-")))
        task = read_typed(Searcher, config).in_folder(run)
        kept = Path(task.episodes.dir)
        if folder.resolve() == kept.resolve():
            raise UserError(f"--out={out}: holds what is compared; name another folder.")
        episodes = dataclasses.replace(task.episodes, dir=str(folder))
        mesh = {**task.mesh, "data": -1}  # other devices than the run's, which change no bit
        again = dataclasses.replace(task, episodes=episodes, mesh=mesh)
        numbers = {step: _batches_of(task, step) for step in (0, *steps_in(run / "checkpoints"))}
        if absent := [step for step in steps if step not in numbers]:
            there = ", ".join(map(str, numbers))
            raise UserError(
                f"--steps={absent[0]}: weights of steps {there} are there; name one of these."
            )
        has_kept = [n for n in numbers if any((kept / _file(m)).exists() for m in numbers[n])]
        chosen = sorted(steps) or has_kept
        if not chosen:
            raise UserError(
                f"{kept}: holds no batch that the weights of steps {', '.join(map(str, numbers))} "
                "drew; name steps by --steps, and a folder for what is drawn by --out."
            )
        counts = {"batches": 0, "episodes": 0}
        for step, file in _drawn(again, run, config, {step: numbers[step] for step in chosen}):
            rows = [row for _, row in read_jsonl(folder / file)]
            counts["batches"] += 1
            counts["episodes"] += len(rows)
            if not (kept / file).exists():
                continue
            if (folder / file).read_bytes() != (kept / file).read_bytes():
                before = [row for _, row in read_jsonl(kept / file)]
                raise RunError(f"{kept / file}: step {step} draws {difference(before, rows)}")
    return {"steps": chosen, **counts}


def _file(number: int) -> str:
    return f"{number:06d}.jsonl"


def _batches_of(task: Searcher, step: int) -> range:
    """The numbers of the batches that the weights of a step draw; none where it learns again."""
    if step % task.grpo.updates:
        return range(0)
    first = step * task.loop.accumulate // task.grpo.updates
    return range(first, first + task.loop.accumulate)


def _drawn(
    task: Searcher, run: Path, config: Mapping[str, Any], numbers: Mapping[int, range]
) -> Iterator[tuple[int, str]]:
    """Draws the batches of ascending steps into the task's folder; yields step and file of each."""
    corpus = task.open_corpus()
    recipe = task.recipe(corpus, task.make_tokenizer(corpus, run))
    models = models_at(
        list(numbers),
        config["train"].to_dict(),
        objective=recipe.objective,
        batches=recipe.batches,
        mesh=make_mesh(task.mesh),
        workdir=run,
        seed=task.seed,
        load_pretrained=recipe.load_pretrained,
        metadata={"task": task.name, "corpus": corpus.fingerprint, **recipe.metadata},
    )
    for step, model in models:
        recipe.batches.use(model)
        for number in numbers[step]:
            next(recipe.batches)
            yield step, _file(number)


def difference(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Names the first episode that differs between two files of a batch, and its first token."""
    names = [row["question_id"] for row in before]
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old == new:
            continue
        if old["question_id"] != new["question_id"]:
            return f"question {new['question_id']} in place of {old['question_id']}."
        number = names[:place].count(names[place])
        who = f"question {names[place]}, episode {number}"
        tokens = old.get("drawn", new["drawn"]), new["drawn"]
        differ = (n for n, (x, y) in enumerate(zip(*tokens, strict=False)) if x != y)
        first = next(differ, min(map(len, tokens)))
        if tokens[0] == tokens[1]:
            keys = [key for key in new if old.get(key) != new[key]]
            return f"{who}: the same tokens, but other values of {', '.join(keys)}."
        return f"{who}: token {first} of {len(tokens[0])} is another."
    return f"{len(now)} episodes, where {len(before)} were kept."
