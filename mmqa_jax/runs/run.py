"""`mmqa run`: one row of a paper's table, end to end.

A run writes retrieval/*.jsonl, predictions.jsonl, per_question.jsonl, scores.json and report.html
to its workdir. Its questions are answered in chunks (core.chunks): parts/ keeps those that are
finished, journals/ the finished batches of the others.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ml_collections import ConfigDict

from mmqa_jax.core.chunks import PARTS, Engine
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.local_copies import with_local_copies
from mmqa_jax.core.paths import in_store, key_of
from mmqa_jax.core.shards import WHOLE, Shard
from mmqa_jax.core.workdir import claim_workdir, read_config
from mmqa_jax.runs.opened_parts import OpenedParts
from mmqa_jax.runs.results import RowRun, write_results
from mmqa_jax.runs.row import FREE, Row, read_row
from mmqa_jax.runs.stages import Answered, answering

CHUNK = 512  # questions


def run_row(
    row: Row,
    folder: Path,
    *,
    limit: int | None = None,
    opened: OpenedParts | None = None,
    shard: Shard = WHOLE,
    chunk: int = CHUNK,
    engine: Engine | None = None,
) -> RowRun | None:
    """Runs a row in `folder`, or continues it there.

    Args:
      limit: only the first `limit` questions of the split; recorded in every output.
      opened: parts that several rows share; their journals are used instead of the folder's own.
      shard, chunk, engine: see core.chunks.Job.

    Returns:
      The results; None while other shards have not finished theirs.
    """
    if limit is not None and limit < 1:
        raise UserError(
            f"--limit={limit}: at least 1 was expected; leave it out for all questions."
        )
    row.check_inputs()
    worker = engine is not None and engine.is_worker
    with contextlib.nullcontext() if worker else _claimed(row, folder, limit, shard):
        here = _with_local_copies(row)
        assert opened is None or not here.data.context, "others' parts read questions as they are"
        corpus = here.open_corpus() if opened is None else opened.corpus
        questions = here.questions(corpus)[:limit]
        here.check_questions(questions)
        parts = opened or OpenedParts(corpus, _journals(folder, shard, worker=worker))
        with answering(
            here.stage(row.what(corpus, questions), questions, parts),
            folder / PARTS,
            questions,
            parts,
            chunk=len(questions) if row.needs_all else chunk,
            shard=shard,
            engine=engine,
        ) as job:
            chunks = job.parts()
            if chunks is None:
                job.waiting()
                return None
            row_run = write_results(folder, here, corpus, questions, Answered.of(chunks), limit)
            job.done()
    return row_run


def _claimed(
    row: Row, folder: Path, limit: int | None, shard: Shard
) -> contextlib.AbstractContextManager:
    """The workdir as this row's.

    Also a run that fails before any work is done leaves nothing: a wrong server's name, say, can be
    corrected in the same workdir.
    """
    held = read_config(folder).get("row") if (folder / "config.json").exists() else None
    if held not in (None, row.row):
        raise UserError(
            f"--workdir={folder}: holds a run of row {held}; name a new --workdir for {row.row}."
        )
    no_results = ("published", "made_by")  # keys that do not affect them
    recorded = {key: value for key, value in row.config.items() if key not in no_results}
    return claim_workdir(
        folder,
        ConfigDict({**recorded, "limit": limit}),
        work=(f"{PARTS}/[0-9]*", "journals/*"),
        shared=shard.count > 1,
        free=FREE,
        undone_by=(UserError, RunError),
    )


def _with_local_copies(row: Row) -> Row:
    """The row, with copies on this host in place of what is in an object store."""
    config = ConfigDict(row.config)
    copied = with_local_copies(config)
    return row if copied is config else read_row(copied)


def _journals(folder: Path, shard: Shard, *, worker: bool) -> Path:
    """Where this process keeps its finished batches."""
    home = cache_dir() / "journals" / key_of(str(folder)) if in_store(folder) else folder
    journals = home / "journals"
    if shard.count > 1:
        journals /= f"{shard.index}-of-{shard.count}"
    if worker:
        journals /= f"worker-{socket.gethostname()}-{os.getpid()}"
    return journals
