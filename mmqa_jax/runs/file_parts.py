"""Parts that are files which another stage wrote: a VQA model's heuristics, a finished run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.prompting.candidates import load_answer_aware, load_candidates
from mmqa_jax.prompting.captions import Captions, open_captions
from mmqa_jax.prompting.heuristics import AnswerHeuristics
from mmqa_jax.runs.part import OpenParts


@dataclasses.dataclass(frozen=True)
class HeuristicsSpec:
    """What a VQA model says of the questions: files of `mmqa candidates` or of Prophet's authors.

    Attributes:
      candidates: its answers with confidences, of the questions and of the examples.
      examples: ids of answer-aware examples; "": shots are chosen as the library does.
    """

    candidates: str
    examples: str = ""

    def paths(self) -> list[str]:
        """The files that it reads."""
        return [self.candidates, self.examples]

    def open(self, row: OpenParts) -> AnswerHeuristics:
        """The answer heuristics."""
        return open_heuristics(self)


@dataclasses.dataclass(frozen=True)
class FinishedSpec:
    """A finished run of another row: its workdir."""

    run: str

    def paths(self) -> list[str]:
        """The folder that it reads."""
        return [self.run]

    def open(self, row: OpenParts) -> Mapping[str, Mapping[str, Any]]:
        """Question id -> its line in the run's trace.jsonl."""
        return open_finished(self)


def open_heuristics(spec: HeuristicsSpec) -> AnswerHeuristics:
    """The answer heuristics.

    Raises:
      UserError: a file that is malformed.
    """
    examples = load_answer_aware(spec.examples) if spec.examples else {}
    return AnswerHeuristics(load_candidates(spec.candidates), examples)


def open_finished(spec: FinishedSpec) -> Mapping[str, Mapping[str, Any]]:
    """Question id -> its line in the trace.jsonl of a finished run.

    Raises:
      UserError: the folder holds no such file, or a line is malformed.
    """
    path = Path(spec.run) / "trace.jsonl"
    if not path.is_file():
        raise UserError(
            f"config key parts.finished.run={spec.run}: has no trace.jsonl; name the workdir of a "
            "finished run of a prompted row."
        )
    rows = {}
    for number, row in read_jsonl(path):
        if not isinstance(row, dict) or not isinstance(row.get("question_id"), str):
            raise UserError(
                f'{path}, line {number}: expected an object with a text "question_id"; run that '
                "row again."
            )
        rows[row["question_id"]] = row
    return rows


@dataclasses.dataclass(frozen=True)
class CaptionsSpec:
    """Side files that describe pictures, see prompting/captions.py.

    Attributes:
      captions: file of captions, by the id of a question, a picture (image_id) or a source.
      tags: file of tags; "": none.
    """

    captions: str
    tags: str = ""

    def paths(self) -> list[str]:
        """The files that it reads."""
        return [self.captions, self.tags]

    def open(self, row: OpenParts) -> Captions:
        """Captions and tags by name."""
        return open_captions(self.captions, self.tags, row.corpus.questions())
