"""Rankings as predictions: what benchmarks of retrieval score, whichever file they come from."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.prediction_lines import read_answers
from mmqa_jax.retrieval.rankings import holds_rankings, read_rankings
from mmqa_jax.retrieval.trec import is_run

FORMATS = (
    "rankings of `mmqa search`, a run of TREC (.trec), UniIR's (_run.txt), predictions.jsonl of "
    "`mmqa run`, or a folder or pattern (*) of them"
)


def has_positives(question: Question) -> bool:
    """Whether it is known what is relevant for a question."""
    return bool(question.positives)


def read_found(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads each question's sources, best first, from all files of a folder or pattern."""
    found: dict[str, tuple[Path, Prediction]] = {}
    for file in _files(path):
        if holds_rankings(file):
            given = [
                Prediction(x.question_id, "", x.sources, x.scores) for x in read_rankings(file)
            ]
        else:
            given = read_answers(file, question_ids={question.id for question in questions})
        for one in given:
            other, _ = found.setdefault(one.question_id, (file, one))
            if other != file:
                raise UserError(
                    f"{file}: ranks question {one.question_id!r}, as {other} does; name the files "
                    "of one system and one pool."
                )
    return [one for _, one in found.values()]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [one for one in sorted(path.iterdir()) if is_run(one) or one.suffix == ".jsonl"]
    elif "*" in str(path):
        files = [Path(name) for name in sorted(glob.glob(str(path)))]
    else:
        return [path]
    if not files:
        raise UserError(f"{path}: no file of rankings is there; give {FORMATS}.")
    return files
