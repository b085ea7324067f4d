"""`python -m tests.bench refusals --data=FOLDER`: the threshold of `mmqa ask --data`, chosen on val.

MiniLM's cosine of the best passage, of the corpus's val questions and of foreign_questions.txt;
the threshold is the one with the best balanced accuracy, and its shares on the test questions and on
the strangers' questions of Atlas (another kind than those that it was chosen on) are measured. There
is no peer: `ours` is the threshold, or a share that is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.speed import device_name
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.refusals import refused_share, tune_refusal
from mmqa_jax.retrieval.rankings import nearest_similarities
from mmqa_jax.runs.ask_folder import open_passages
from tests.bench import Options

_FOREIGN = Path(__file__).with_name("foreign_questions.txt")
_EVERYDAY = Path(__file__).with_name("everyday_questions.txt")


def run(options: Options) -> dict[str, Any]:
    """The threshold, and the shares of questions that it refuses."""
    if options.data is None:
        raise UserError(
            "--data: name a prepared corpus with questions, such as OpenStax's "
            "(configs/openstax/README.md)."
        )
    corpus = open_corpus(options.data)
    dense = open_passages(Corpus(corpus.sources, fingerprint=corpus.fingerprint), "minilm").dense
    asked = {split: _questions(corpus, split) for split in ("val", "test")}
    scores = {split: nearest_similarities(dense, found) for split, found in asked.items()}
    foreign = {
        path.stem: nearest_similarities(dense, _lines(path)) for path in (_FOREIGN, _EVERYDAY)
    }
    chosen = tune_refusal(scores["val"], foreign[_FOREIGN.stem])
    shares = {f"refused of {name}": values for name, values in (scores | foreign).items()}
    rows = [_row("threshold", chosen.threshold, "cosine")]
    rows += [
        {**_row(name, refused_share(values, chosen.threshold), "share"), "questions": len(values)}
        for name, values in shares.items()
    ]
    return {"bench": "refusals", "device": device_name(), "rows": rows}


def _questions(corpus: Corpus, split: str) -> list[Question]:
    """Questions in words with an answer in words; a paragraph that looks for a figure is none."""
    found = [q for q in corpus.questions(split) if q.answers and q.image is None]
    if not found:
        raise UserError(f"--data: the corpus has no {split} questions with answers; name another.")
    return found


def _lines(path: Path) -> list[Question]:
    lines = path.read_text("utf-8").splitlines()
    return [Question(f"{path.stem}{number}", "val", line) for number, line in enumerate(lines)]


def _row(name: str, value: float, unit: str) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(value, 3),
        "peer": None,
        "ratio": None,
        "unit": unit,
        "floor": None,
    }
