"""Over Python lists: vectors, reranking, scores, a retriever tuned on one's own pairs, data frames.

vectors = mmqa.embed(["Wash the filter every week."])  # float32 [1, 384]
best = mmqa.rerank("Which filter?", texts, "cross-encoder/ms-marco-MiniLM-L6-v2")
scores = mmqa.evaluate(retriever, {"q1": {"filter.txt#1"}}, queries={"q1": "Which filter?"})
encoder = mmqa.train([("Which filter?", "Wash the filter every week.")], "runs/mine")
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32
from ml_collections import ConfigDict

from mmqa_jax.api.answers import Answer, Retriever, open_reranker
from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.hosts import distributed
from mmqa_jax.data.corpus import Corpus, PictureOf, corpus_of_lists
from mmqa_jax.data.formats.tables import columns_of, take_column
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.multiple_choice import list_em, list_f1
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.significance import bootstrap_interval
from mmqa_jax.prompting.backends import Backend
from mmqa_jax.runs.ask_corpus import AskedCorpus, ShownSource
from mmqa_jax.runs.ask_folder import MINILM

Item = str | os.PathLike | bytes | tuple[str, PictureOf]


# Vectors


def embed(
    items: Iterable[Item],
    encoder: str | os.PathLike = MINILM,
    *,
    side: Literal["source", "question"] = "source",
) -> Float32[np.ndarray, "n D"]:
    """Unit vectors of texts, pictures, or captions with their pictures.

    Args:
      items: a str is a text; a path or bytes are a picture; a pair is a caption and its picture. A
        table is taken by its columns `text` and `picture`.
      encoder: see `open_retriever`; one of texts alone takes texts alone.
      side: whose prompt and tower they take, where an encoder has two.

    Returns:
      float32 [n, D], in the order of the items.
    """
    from mmqa_jax.tasks.library import open_text_embedder

    if side not in ("source", "question"):
        raise UserError(f"embed: side={side!r} is not known; use source or question.")
    corpus = _corpus_of(items, "embed")
    distributed.start(join=False)
    embedder, pictures = open_text_embedder(str(encoder), corpus)
    pictured = next((s.id for s in corpus.sources if s.modality == "image"), None)
    if pictured is not None and not embedder.image_size:
        raise UserError(
            f"embed: item {pictured} has a picture, and the encoder {encoder} reads texts alone; "
            "name one that sees, such as a CLIP or SigLIP or a Qwen3-VL-Embedding."
        )
    rows = range(len(corpus))
    if side == "source":
        return embedder.embed_rows(corpus, pictures if embedder.image_size else None, rows)
    texts = [source.text for source in corpus.sources]
    if pictured is None:
        return embedder.embed_questions(texts)
    pixels = [pictures.pixels(row) if corpus.sources[row].image else None for row in rows]
    return embedder.embed_questions(texts, pixels)


class Scored(NamedTuple):
    """An item of a list that was ranked: its place there, and its score."""

    index: int
    score: float


def rerank(
    query: str, items: Iterable[Item], model: Backend | str | os.PathLike, *, top_k: int = 0
) -> list[Scored]:
    """The items in the order of their relevance to a query, best first.

    Args:
      items: as those of `embed`.
      model: of a reranker, see `open_reranker`.
      top_k: how many are returned; 0: all.
    """
    if not isinstance(query, str) or not query.strip():
        raise UserError("rerank: the query is empty or no text; write one.")
    if top_k < 0:
        raise UserError(f"rerank: top_k={top_k}: 0 (all) or more was expected.")
    corpus = AskedCorpus(_corpus_of(items, "rerank"))
    reranker = open_reranker(corpus, model)
    names = tuple(corpus.ids)
    with corpus.asked(query) as question:
        ranking = Ranking(question.id, names, (0.0,) * len(names))
        (scored,) = reranker.score([question], [ranking])
    results = [Scored(int(name), s) for name, s in zip(scored.sources, scored.scores, strict=True)]
    return results[: top_k or None]


def _corpus_of(items: Any, where: str) -> Corpus:
    """A corpus whose ids are the items' places."""
    check_several(items, where, "items")
    if (columns := columns_of(items)) is not None:
        pictures = columns.get("picture")
        texts = columns.get("text") or [""] * len(take_column(columns, ("picture",), where))
        return corpus_of_lists([text or "" for text in texts], pictures=pictures)
    pairs = [_text_and_picture(item, f"{where}: items[{n}]") for n, item in enumerate(items)]
    if not pairs:
        raise UserError(f"{where}: the list is empty; give at least one item.")
    texts, pictures = zip(*pairs, strict=True)
    return corpus_of_lists(texts, pictures=pictures)


def _text_and_picture(item: Any, place: str) -> tuple[str, PictureOf | None]:
    match item:
        case str():
            return item, None
        case os.PathLike() | bytes():
            return "", item
        case (str() as text, str() | os.PathLike() | bytes() as picture):
            return text, picture
    raise TypeError(
        f"{place} is {type(item).__name__}; give a text, a picture's path (pathlib.Path) or bytes, "
        "or a pair of caption and picture."
    )


# Scores


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of one system.

    Attributes:
      per_question: question id -> metric -> score.
      missing: ids of the questions without a result; they score 0.
    """

    per_question: Mapping[str, Mapping[str, float]]
    missing: tuple[str, ...] = ()

    @property
    def means(self) -> dict[str, float]:
        """Metric -> mean over the questions."""
        return {name: float(np.mean(values)) for name, values in self._columns().items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Metric -> its 95 % bootstrap interval over the questions."""
        bounds = {name: bootstrap_interval(np.array(v)) for name, v in self._columns().items()}
        return {name: (bound.low, bound.high) for name, bound in bounds.items()}

    def _columns(self) -> dict[str, list[float]]:
        rows = list(self.per_question.values())
        return {name: [row[name] for row in rows] for name in rows[0]}


def evaluate(
    results: Any,
    references: Mapping[str, Any],
    *,
    queries: Mapping[str, str] | None = None,
    ks: Sequence[int] = (1, 5, 10),
) -> Scores:
    """Scores a retriever, its rankings, or answers.

    Args:
      results: by question id: a text or an `Answer` (answers are scored), or sources best first
        (rankings are): ids, what `Retriever.search` returns, or a Ranking. Or the rankings of
        `Retriever.rank`. Or a retriever (any object with `search(query, top_k)`), which answers
        `queries`.
      references: by question id: of answers a text or several, of which the best counts; of
        rankings the ids of the gold sources, or a mapping of ids to relevances.
      queries: texts by question id, for a retriever.
      ks: of recall@k, hit@k and nDCG@k.

    Returns:
      Of answers `em` and `f1` (MultimodalQA's: words, numbers as numbers); of rankings recall@k,
      hit_any@k, hit_all@k, ndcg@k and mrr, as `mmqa evaluate` computes them.
    """
    if not isinstance(references, Mapping) or not references:
        raise UserError("evaluate: references are a dict of question id -> what is right.")
    if hasattr(results, "search"):
        results = _searched(results, references, queries, max(ks))
    elif queries is not None:
        raise UserError("evaluate: queries are for a retriever; leave them out with results.")
    if not isinstance(results, Mapping):
        check_several(results, "evaluate", "rankings")
        results = {ranking.question_id: ranking for ranking in results}
    if unknown := [name for name in results if name not in references]:
        raise UserError(
            f"evaluate: question {unknown[0]!r} has a result but no reference; give one, or leave "
            "the result out."
        )
    missing = tuple(name for name in references if name not in results)
    if any(isinstance(result, str | Answer) for result in results.values()):
        return Scores(
            {n: _of_answer(n, results, right) for n, right in references.items()}, missing
        )
    gold = [
        right if isinstance(right, Mapping) else _several(right) for right in references.values()
    ]
    ranked = [_ids_of(results.get(name, ()), name) for name in references]
    scored = score_rankings(gold, ranked, ks)
    names = list(references)
    rows = {
        names[row]: {metric: float(values[n]) for metric, values in scored.per_question.items()}
        for n, row in enumerate(scored.rows)
    }
    if not rows:
        raise UserError("evaluate: no question has a gold source; name at least one.")
    return Scores(rows, missing)


def _searched(
    retriever: Any,
    references: Mapping[str, Any],
    queries: Mapping[str, str] | None,
    top_k: int,
) -> dict[str, Any]:
    if not isinstance(queries, Mapping):
        raise TypeError("evaluate: a retriever needs `queries`, a dict of question id -> text.")
    if unasked := [name for name in references if name not in queries]:
        raise UserError(f"evaluate: question {unasked[0]!r} has no query; give its text.")
    asked = {name: queries[name] for name in references}
    if isinstance(retriever, Retriever):
        return {ranking.question_id: ranking for ranking in retriever.rank(asked, top_k)}
    return {name: retriever.search(query, top_k) for name, query in asked.items()}


def _of_answer(name: str, results: Mapping[str, Any], right: Any) -> dict[str, float]:
    answer = results.get(name)
    if answer is None:
        return {"em": 0.0, "f1": 0.0}
    text = answer.text if isinstance(answer, Answer) else answer
    if not isinstance(text, str):
        raise TypeError(f"evaluate: the result of {name!r} is no text, as others are.")
    scorers = {"em": list_em, "f1": list_f1}
    return {
        metric: max(scorer([text], [reference]) for reference in _several(right))
        for metric, scorer in scorers.items()
    }


def _several(right: Any) -> Collection[str]:
    if isinstance(right, str):
        return (right,)
    if not isinstance(right, Collection) or not all(isinstance(name, str) for name in right):
        raise TypeError(f"evaluate: a reference is {right!r:.60}; give a text or several.")
    return right


def _ids_of(result: Any, name: str) -> list[str]:
    if isinstance(result, Ranking):
        return list(result.sources)
    check_several(result, f"evaluate: the result of {name!r}", "sources")
    return [_id_of(source, name) for source in result]


def _id_of(source: Any, name: str) -> str:
    match source:
        case str():
            return source
        case ShownSource():
            return source.source.id
        case (str() as source_id, _):
            return source_id
    raise TypeError(
        f"evaluate: a source of {name!r} is {type(source).__name__}; give ids, pairs of id and "
        "score, or what Retriever.search returns."
    )


# Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How `train` tunes an encoder.

    Attributes:
      steps: of AdamW, with a cosine schedule and 10 % of warmup.
      batch_size: pairs of a step; each one's negatives are all the others' sources.
      learning_rate: the highest.
      query_length, source_length: tokens that are read, special ones included.
      vectors: `text`: one of a text; `token`: one of each token (late interaction).
      seed: of the order of the pairs.
    """

    steps: int = 60
    batch_size: int = 32
    learning_rate: float = 5e-5
    query_length: int = 64
    source_length: int = 128
    vectors: Literal["text", "token"] = "text"
    seed: int = 0


def train(
    pairs: Any,
    workdir: str | os.PathLike,
    encoder: str | os.PathLike = MINILM,
    tuning: Tuning | None = None,
) -> str:
    """Tunes an encoder of texts on pairs of a question and its source, by the task `retriever`.

    A run that was interrupted goes on when it is called again with the same arguments.

    Args:
      pairs: (question, source) or (question, source, negative) texts, or a table with the columns
        `question` and `text`, and `negative` where it has one.
      workdir: folder for checkpoints and weights.
      encoder: `minilm`, the folder or ORG/NAME of a published encoder of texts.
      tuning: see Tuning.

    Returns:
      The workdir, which `embed`, `open_retriever` and the verbs take as their encoder.
    """
    from mmqa_jax.tasks.run import run_training

    tuning = tuning or Tuning()
    corpus, negatives = _corpus_of_pairs(pairs)
    run_training(_config(str(encoder), tuning, negatives), Path(workdir), corpus)
    return os.fspath(workdir)


def _corpus_of_pairs(pairs: Any) -> tuple[Corpus, int]:
    """The texts as sources and the questions about them, and the most negatives of a question."""
    rows = _rows_of_pairs(pairs)
    names: dict[str, str] = {}  # text -> id
    golds: dict[str, list[str]] = {}  # question -> ids, here and below
    negatives: dict[str, list[str]] = {}
    for query, text, *others in rows:
        ids = [names.setdefault(source, str(len(names))) for source in (text, *others)]
        golds.setdefault(query, []).append(ids[0])
        negatives.setdefault(query, []).extend(ids[1:])
    questions = [
        Question(
            f"q{number}",
            "train",
            query,
            positives=tuple(dict.fromkeys(gold)),
            negatives=tuple(dict.fromkeys(n for n in negatives[query] if n not in gold)),
        )
        for number, (query, gold) in enumerate(golds.items())
    ]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    corpus = Corpus(corpus_of_lists(list(names)).sources, questions, fingerprint=digest)
    return corpus, max(len(question.negatives) for question in questions)


def _rows_of_pairs(pairs: Any) -> list[tuple[str, ...]]:
    if (columns := columns_of(pairs)) is not None:
        texts = [
            take_column(columns, names, "train")
            for names in (("question", "query"), ("text", "positive"))
        ]
        if "negative" in columns:
            texts.append(columns["negative"])
        pairs = zip(*texts, strict=True)
    check_several(pairs, "train", "pairs")
    rows = []
    for number, pair in enumerate(pairs):
        row = tuple(text for text in pair if text is not None) if _is_row(pair) else ()
        if len(row) < 2 or not all(isinstance(text, str) and text.strip() for text in row):
            raise UserError(
                f"train: pairs[{number}] is {pair!r:.60}; give a question, its source and, if "
                "there are any, sources that do not answer it, as texts."
            )
        rows.append(row)
    if not rows:
        raise UserError("train: there are no pairs; give at least one.")
    return rows


def _is_row(pair: Any) -> bool:
    return isinstance(pair, Sequence) and not isinstance(pair, str | bytes)


def _config(encoder: str, tuning: Tuning, negatives: int) -> ConfigDict:
    """A config of the task `retriever`."""
    optimizer = {
        "name": "adamw",
        "learning_rate": tuning.learning_rate,
        "schedule": "cosine",
        "warmup": 0.1,
        "clip_norm": 1.0,
    }
    changes = {"dtype": "float32"}
    return ConfigDict(
        {
            "task": "retriever",
            "seed": tuning.seed,
            "data": {"dir": "pairs", "split": "train"},
            "mesh": {"data": -1},
            "tokenizer": "",
            "init": encoder,
            "model": {"vectors": tuning.vectors, "changes": changes},
            "loss": {"kind": "softmax", "scale": 20.0 if tuning.vectors == "text" else 1.0},
            "batches": {
                "batch_size": tuning.batch_size,
                "query_length": tuning.query_length,
                "source_lengths": (tuning.source_length,),
                "num_negatives": min(negatives, 1),
                "threads": 2,
            },
            "train": {
                "steps": tuning.steps,
                "optimizer": optimizer,
                "checkpoint_every": tuning.steps,
            },
            "inference": {"batch_size": "auto"},
        }
    )


# Data frames


def to_frame(results: Any) -> Any:
    """Results as a pandas DataFrame.

    Args:
      results: what `Retriever.search`, `Retriever.search_many` or `Retriever.rank` returned (a row
        for each source), Answers, Scores (a row for each question), or what `rerank` returned.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError("to_frame: pandas is not installed; run `pip install pandas`.") from error
    return pandas.DataFrame(list(_frame_rows(results)))


def _frame_rows(results: Any) -> Iterable[dict[str, Any]]:
    if isinstance(results, Scores):
        return [{"question": name, **row} for name, row in results.per_question.items()]
    if isinstance(results, Answer):
        results = [results]
    if not isinstance(results, Sequence) or isinstance(results, str):
        raise TypeError(f"to_frame: {type(results).__name__} was given; give results of mmqa_jax.")
    return [row for number, result in enumerate(results) for row in _rows_of(result, number)]


def _rows_of(result: Any, number: int) -> Iterable[dict[str, Any]]:
    match result:
        case Answer():
            sources = [source.source.id for source in result.sources]
            return [{"answer": result.text, "found": result.found, "sources": sources}]
        case ShownSource():
            return [result.row()]
        case Scored():
            return [result._asdict()]
        case Ranking():
            pairs = zip(result.sources, result.scores, strict=True)
            return [
                {"question": result.question_id, "rank": rank, "id": name, "score": score}
                for rank, (name, score) in enumerate(pairs, start=1)
            ]
        case list():  # of search_many
            return [{"query_number": number, **source.row()} for source in result]
    raise TypeError(f"to_frame: {type(result).__name__} is no result of mmqa_jax.")
