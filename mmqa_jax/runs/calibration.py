"""Chooses the similarity below which a folder answers nothing, on a user's own questions."""

import csv
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_text
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.webqa import tune_refusal
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.ask_folder import open_encoded

_ANSWERED = {"yes": True, "no": False}


def calibrate(corpus: AskedCorpus, encoder: str, questions: Path) -> dict[str, Any]:
    """The threshold with the best balanced accuracy, and the shares of questions that it refuses.

    Args:
      corpus: of `open_folder`.
      encoder: of AskOptions.
      questions: a CSV file with the columns `question` and `answered`, yes or no: whether the
        folder answers it.
    """
    texts = _read(questions)
    asked = [Question(str(n), "", text) for n, (text, _) in enumerate(texts)]
    nearest = open_encoded(corpus, encoder).search(asked, 1)
    similarities = [ranking.scores[0] for ranking in nearest]
    pairs = list(zip(similarities, (answered for _, answered in texts), strict=True))
    chosen = tune_refusal(*([x for x, has in pairs if has is kind] for kind in (True, False)))
    return {
        "least_similarity": round(chosen.threshold, 3),
        "refused_answered": round(chosen.answerable, 3),
        "refused_others": round(chosen.foreign, 3),
        "questions": len(texts),
    }


def _read(file: Path) -> list[tuple[str, bool]]:
    """Questions, and whether each is answered."""
    lines = read_text(file).splitlines(keepends=True)
    read = []
    for number, row in enumerate(csv.DictReader(lines), start=2):
        text, answered = ((row.get(name) or "").strip() for name in ("question", "answered"))
        if not text or answered.lower() not in _ANSWERED:
            raise UserError(
                f"--calibrate={file}: row {number} has question {text!r:.60} and answered "
                f"{answered!r:.20}; a question, and yes or no, were expected; the first row names "
                "the columns question,answered."
            )
        read.append((text, _ANSWERED[answered.lower()]))
    return read
