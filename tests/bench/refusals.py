"""`python -m tests.bench refusals --data=FOLDER`: the threshold of `mmqa ask --data`, chosen on val.

The more passages there are, the nearer is one by chance: so the threshold on MiniLM's cosine of the
nearest passage is chosen for collections of several sizes. FOLDER is OpenStax, prepared. Of its val
questions each has a collection with the passages of its own section and others drawn at random;
foreign_questions.txt, which no textbook answers, have collections drawn at random. The threshold is
the one with the best balanced accuracy; what it refuses of the test questions, and of other foreign
questions (everyday_questions.txt), is measured. There is no peer: `ours` is the threshold.

The row `words` has the shares of questions of which one passage has .7 of the words by their idf,
which are not refused (BM25.coverage): of the collection's passages as above. `words alone` is the
threshold on that share where no encoder tells more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import device_name
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import source_text
from mmqa_jax.evaluation.webqa import refused_share, tune_refusal
from mmqa_jax.retrieval.bm25.in_memory import BM25
from mmqa_jax.runs.ask_folder import MINILM, open_passages
from tests.bench import Options

_SIZES = (30, 100, 300, 1_000, 3_000, 10_000)  # passages
_COVERED = 0.7
_FOREIGN = ("foreign_questions", "everyday_questions")


def run(options: Options) -> dict[str, Any]:
    """The threshold by the size of the collection, and the shares of questions that it refuses."""
    if options.data is None:
        raise UserError(
            "--data: name OpenStax as `mmqa prepare` writes it (configs/openstax/README.md)."
        )
    corpus = open_corpus(options.data)
    chosen_rows = options.chosen(("similarity", "words"))
    texts, sections = _questions(corpus)
    for name in _FOREIGN:
        lines = Path(__file__).with_name(f"{name}.txt").read_text("utf-8").splitlines()
        texts[name], sections[name] = lines, [""] * len(lines)
    rows = _by_words(corpus, texts, sections) if "words" in chosen_rows else []
    if "similarity" in chosen_rows:
        rows += _by_similarity(corpus, texts, sections)
    counts = ", ".join(f"{len(of_kind)} {name}" for name, of_kind in texts.items())
    return {
        "bench": "refusals",
        "device": device_name(),
        "rows": rows,
        "left_out": [f"Questions: {counts}."],
    }


def _by_similarity(
    corpus: Corpus, texts: Mapping[str, list[str]], sections: Mapping[str, list[str]]
) -> list[dict[str, Any]]:
    dense = open_passages(Corpus(corpus.sources, fingerprint=corpus.fingerprint), MINILM).dense
    vectors = np.asarray(dense.index.embeddings.vectors)
    cosines = {
        name: dense.embedder.embed_questions(of_kind) @ vectors.T for name, of_kind in texts.items()
    }
    of_section = _rows_of_sections(corpus)
    rows = []
    for size in (*(size for size in _SIZES if size < len(vectors)), len(vectors)):
        near = {
            name: _nearest(cosines[name], [of_section.get(s, []) for s in sections[name]], size)
            for name in cosines
        }
        chosen = tune_refusal(near["val"], near[_FOREIGN[0]])
        refused = {
            f"refused_{name}": round(refused_share(values, chosen.threshold), 3)
            for name, values in near.items()
        }
        rows.append(
            {
                "name": f"{size} passages",
                "ours": round(chosen.threshold, 3),
                "peer": None,
                "ratio": None,
                "unit": "cosine",
                "floor": None,
                **refused,
            }
        )
    return rows


def _by_words(
    corpus: Corpus, texts: Mapping[str, list[str]], sections: Mapping[str, list[str]]
) -> list[dict[str, Any]]:
    passages = [source_text(source) for source in corpus.sources]
    of_section, rows = _rows_of_sections(corpus), []
    for size in _SIZES[:-1]:
        covered, shares_of = {}, {}
        for name, questions in texts.items():
            draw, shares = np.random.default_rng(0), []
            for text, section in zip(questions, sections[name], strict=True):
                own = of_section.get(section, [])
                others = draw.choice(len(passages), max(size - len(own), 0), replace=False)
                pool = BM25([passages[row] for row in [*own, *others]], asks=True)
                shares.append(pool.coverage(text))
            covered[f"covered_{name}"] = round(float(np.mean(np.array(shares) >= _COVERED)), 3)
            shares_of[name] = shares
        row = {"name": f"{size} passages, words", "ours": _COVERED, "peer": None, "ratio": None}
        rows.append({**row, "unit": "share", "floor": None, **covered})
        chosen = tune_refusal(shares_of["val"], shares_of[_FOREIGN[0]]).threshold
        refused = {
            f"refused_{name}": round(refused_share(shares, chosen), 3)
            for name, shares in shares_of.items()
        }
        row = {**row, "name": f"{size} passages, words alone", "ours": round(chosen, 3)}
        rows.append({**row, "unit": "share", "floor": None, **refused})
    return rows


def _questions(corpus: Corpus) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Texts and sections (BOOK/MODULE) of the multiple-choice questions by split."""
    texts, sections = {}, {}
    for split in ("val", "test"):
        asked = [question for question in corpus.questions(split) if question.choices]
        if not asked:
            raise UserError(f"--data: has no multiple-choice questions in {split}; name OpenStax.")
        texts[split] = [question.question for question in asked]
        sections[split] = ["/".join(question.id.split("/")[1:3]) for question in asked]
    return texts, sections


def _rows_of_sections(corpus: Corpus) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, source in enumerate(corpus.sources):
        rows.setdefault("/".join(source.id.split("/")[:2]), []).append(row)
    return rows


def _nearest(cosines: np.ndarray, sections: Sequence[Sequence[int]], size: int) -> list[float]:
    """The highest cosine of each question in its collection of so many passages."""
    draw, nearest = np.random.default_rng(0), []
    for values, section in zip(cosines, sections, strict=True):
        others = draw.choice(len(values), max(size - len(section), 0), replace=False)
        nearest.append(float(values[[*section, *others]].max()))
    return nearest
