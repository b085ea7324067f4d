"""Ids of questions as prediction files write them: text, a number, or 11.0, as pandas writes it."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.table_files import whole_number

_WHOLE = re.compile(r"\d+\.0+")


def id_of(value: Any, where: str, known: Container[str] = (), key: str = "question_id") -> str:
    """The question's id as text.

    The official vqa.py compares sets of numbers, in which 11.0 is 11, and VLMEvalKit calls int.

    Args:
      value: as the file has it.
      where: begins an error's sentence.
      known: the questions' ids: the text `11.0` is `11` only where that is one of them and `11.0`
        is not, since a corpus of one's own may have any ids.
      key: names the value in an error.
    """
    if isinstance(value, str) and value:
        if value not in known and _WHOLE.fullmatch(value):
            digits = str(whole_number(value))
            return digits if digits in known else value
        return value
    number = whole_number(value)
    if number is None:
        raise UserError(
            f"{where}: {key} is {value!r:.60}; text or a whole number was expected; correct it."
        )
    return str(number)
