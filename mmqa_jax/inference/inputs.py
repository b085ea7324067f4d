"""What reranker and reader share: inputs on the device, and a warning about long questions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.errors import first_names
from mmqa_jax.core.mesh import DEFAULT_DEVICE, RowPlacement
from mmqa_jax.data.packing import INPUT_FIELDS, Packer
from mmqa_jax.data.schema import Question
from mmqa_jax.models.vlp import VLPInputs


def vlp_inputs(batch: dict[str, np.ndarray], placement: RowPlacement = DEFAULT_DEVICE) -> VLPInputs:
    """The packed arrays of a batch on the devices; `batch` has this process's rows of them."""
    return VLPInputs(**placement.put({name: batch[name] for name in INPUT_FIELDS}))


def coin_ids(questions: Sequence[Question], options: Any) -> list[str] | None:
    """The ids that seed truncation if the section `inference` asks for it, else None.

    Without --always_truncate_tail the baseline draws its coins at inference too (webqa_loader.py
    l.49).
    """
    if options.always_truncate_tail:
        return None
    return [question.id for question in questions]


def warn_truncated(questions: Sequence[Question], packer: Packer) -> None:
    """Warns on stderr about questions that are truncated to the model's maximum length."""
    too_long = [question.id for question in questions if packer.excess(question.question)]
    if too_long:
        print(
            f"{len(too_long)} of {len(questions)} questions are longer than the "
            f"{packer.config.max_question_tokens} tokens that the model takes and are truncated: "
            f"{first_names(too_long)}.",
            file=sys.stderr,
        )
