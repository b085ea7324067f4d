"""Exact match as SQuAD and open-domain question answering count it."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_squad(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, single spaces (SQuAD's evaluate-v1.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def squad_exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 if an answer equals any of the references once normalized (FiD's `ems`).

    Word boundaries are Python's, as in SQuAD's script. FiD's are those of the package regex, where
    `a` before a combining accent is no article.
    """
    return float(normalize_squad(answer) in map(normalize_squad, references))
