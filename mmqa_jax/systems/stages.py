"""One stage at a time: what the verbs prepare, embed, index, search, rerank, answer and
evaluate do. Every stage reads the files of the one before it and writes its own.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import (
    no_empty_folders,
    read_jsonl,
    read_text,
    write_json,
    write_jsonl,
)
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import Corpus, open_corpus, prepare_interchange, prepare_webqa_format
from mmqa_jax.data.records import refuse_corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.systems import webqa

_EMBEDDINGS, _INDEX, _RUN = "embeddings", "index", "embed.json"
_KS = (1, 2, 5, 10, 20)


def prepare(
    dataset: str,
    raw: Path | None,
    out: Path,
    *,
    overwrite: bool = False,
    max_broken_pictures: int | None = None,
) -> dict[str, Any]:
    """Official files -> ArrayRecord in `out`; Atlas makes its official files in `out`/raw.

    Args:
      overwrite: replace the corpus that lies in `out`.
      max_broken_pictures: how many may be broken; see data.images.BrokenPictures.
    """
    if max_broken_pictures is not None and max_broken_pictures < 0:
        raise UserError(
            f"--max_broken_pictures={max_broken_pictures}: 0 or more was expected; give a larger "
            "number."
        )
    if dataset == "atlas" and raw is not None:
        raise UserError("--raw: Atlas is made from installed packages; leave --raw out.")
    if dataset != "atlas" and raw is None:
        raise UserError(f"--raw: name the folder with the files of {dataset}.")
    if raw is not None and not raw.is_dir():
        raise UserError(f"--raw={raw}: no such folder; check the path.")
    check_out(out, folder=True)
    if not overwrite:
        refuse_corpus(out)
    options = {"overwrite": overwrite, "max_broken_pictures": max_broken_pictures}
    with no_empty_folders(out):
        if dataset == "atlas":
            return prepare_atlas(out, **options)
        with Progress("Preparing", None, "records") as progress:
            if dataset == "corpus":
                manifest = prepare_interchange(raw, out, progress=progress.reach, **options)
            else:
                manifest = _prepare_official(raw, "WebQA", out, progress, **options)
    return _summary(manifest, out)


def prepare_atlas(out: Path, countries: int = 0, **options: Any) -> dict[str, Any]:
    """Builds Atlas in `out`/raw (WebQA's official formats) and prepares it in `out`.

    Args:
      countries: how many countries; 0 = all.
      options: of `prepare`; what an earlier attempt left in `out`/raw is taken as it is.
    """
    from mmqa_jax.data.datasets.atlas import build_atlas

    raw = out / "raw"
    if not (raw / "summary.json").exists():
        with Progress("Making Atlas", None, "steps") as progress:
            build_atlas(raw, limit_countries=countries or None, progress=_stage(progress))
    with Progress("Preparing", None, "records") as progress:
        manifest = _prepare_official(raw, "atlas", out, progress, name="atlas", **options)
    return _summary(manifest, out)


def embed(data: Path, model: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Embeds every source of a corpus; goes on where an interrupted job stopped.

    Args:
      overwrite: replace embeddings of another model or corpus that lie in `out`.
    """
    from mmqa_jax.core import startup
    from mmqa_jax.data.images import PictureStore
    from mmqa_jax.systems.parts import load_embedder

    check_out(out / _EMBEDDINGS, folder=True)
    startup.start()
    corpus = open_corpus(data)
    embedder, config = load_embedder(model)
    pictures = PictureStore(corpus, config.pictures.size, config.pictures.resize)
    with Progress("Embedding sources", len(corpus), "sources") as progress:
        embeddings = embedder.embed_sources(
            corpus,
            pictures,
            out / _EMBEDDINGS,
            shard_rows=1024,
            overwrite=overwrite,
            on_progress=progress.reach,
        )
    write_json(out / _RUN, {"data": str(data), "model": str(model)})
    rows, dim = embeddings.vectors.shape
    return {"sources": rows, "dim": dim, "broken_pictures": pictures.broken.count}


def index(folder: Path, kind: str) -> dict[str, Any]:
    """Builds the index over the embeddings in `folder`."""
    from mmqa_jax.retrieval.embeddings import open_embeddings
    from mmqa_jax.retrieval.index import build_index

    embeddings = open_embeddings(folder / _EMBEDDINGS)
    built = build_index(embeddings, kind)
    built.save(folder / _INDEX)
    return {"rows": len(embeddings.vectors), "kind": type(built).__name__}


def open_retriever(corpus: Corpus, model: Path, index_dir: Path, *, two_pass: bool) -> Any:
    """The dense retriever over an index of `mmqa index`."""
    from mmqa_jax.data.images import PictureStore
    from mmqa_jax.retrieval.embeddings import open_embeddings
    from mmqa_jax.retrieval.index import load_index
    from mmqa_jax.systems.parts import DenseRetriever, load_embedder

    embedder, config = load_embedder(model)
    embeddings = open_embeddings(index_dir / _EMBEDDINGS, embedder.fingerprint, corpus.fingerprint)
    return DenseRetriever(
        corpus,
        embedder,
        load_index(index_dir / _INDEX, embeddings, embedder.fingerprint),
        PictureStore(corpus, config.pictures.size, config.pictures.resize),
        two_pass=two_pass,
    )


def search(
    data: Path,
    method: str,
    out: Path,
    *,
    model: str | None,
    index_dir: str | None,
    split: str,
    top_k: int,
    two_pass: bool,
) -> dict[str, Any]:
    """Ranks the whole collection for every question of a split."""
    from mmqa_jax.core import startup
    from mmqa_jax.evaluation.retrieval import recall_at_k
    from mmqa_jax.retrieval.rankings import write_rankings
    from mmqa_jax.systems.parts import BM25Retriever, FusedRetriever

    check_top_k(top_k)
    check_out(out)
    if method != "bm25" and not (model and index_dir):
        raise UserError(f"--method={method} needs --model and --index; give both.")
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    retrievers: list[Any] = []
    if method != "dense":
        retrievers.append(BM25Retriever(corpus, two_pass=two_pass))
    if method != "bm25":
        startup.start()
        dense = open_retriever(corpus, Path(model), Path(index_dir), two_pass=two_pass)
        retrievers.append(dense)
    retriever = retrievers[0] if len(retrievers) == 1 else FusedRetriever(retrievers)
    rankings = retriever.search(questions, top_k)
    write_rankings(out, rankings)
    gold = [set(q.positives) for q in questions]
    recall = {}
    if any(gold):  # WebQA hides them in its test split
        recall = recall_at_k(gold, [r.sources for r in rankings], _KS)
    return {"questions": len(questions), "recall": {f"recall@{k}": v for k, v in recall.items()}}


def rerank(
    data: Path, model: Path, candidates: str, out: Path, *, split: str, top_k: int
) -> dict[str, Any]:
    """Scores each question's candidates with the source head."""
    from mmqa_jax.core import startup
    from mmqa_jax.retrieval.rankings import read_rankings, write_rankings
    from mmqa_jax.systems.parts import load_reranker

    check_top_k(top_k)
    check_out(out)
    startup.start()
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    if candidates == "restricted":
        given = webqa.restricted_candidates(questions, corpus)
    else:
        given = read_rankings(candidates, [q.id for q in questions], corpus.row)
        given = [Ranking(r.question_id, r.sources[:top_k], r.scores[:top_k]) for r in given]
    relevance = load_reranker(model, corpus).score(questions, given)
    write_rankings(out, relevance)
    best, sweep = webqa.tune_threshold(questions, relevance)
    return {"questions": len(questions), "best_threshold": best, "source_f1": sweep[best]}


def answer(
    data: Path, model: Path, sources: str, out: Path, *, split: str, threshold: float
) -> dict[str, Any]:
    """Answers every question of a split from its gold, given or no sources."""
    from mmqa_jax.core import startup
    from mmqa_jax.retrieval.rankings import read_rankings
    from mmqa_jax.systems.parts import load_reader

    if not 0 <= threshold <= 1:
        raise UserError(
            f"--threshold={threshold}: a probability from 0 to 1 was expected; give one, such as "
            "0.2."
        )
    check_out(out)
    startup.start()
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    relevance = []
    if sources not in ("oracle", "none"):  # mistakes in it show before the model loads
        relevance = read_rankings(sources, [q.id for q in questions], corpus.row)
    reader = load_reader(model, corpus)
    if sources == "oracle":
        predictions = webqa.answer_oracle(questions, reader)
    elif sources == "none":
        predictions = webqa.answer_question_only(questions, reader)
    else:
        predictions = reader.answer(questions, webqa.select_sources(relevance, threshold))
    write_predictions(out, predictions)
    return {"questions": len(predictions), "predictions": str(out)}


def evaluate(
    dataset: str,
    references: Path,
    predictions: Path,
    *,
    split: str,
    lemmatizer: str,
    only_given: bool = False,
) -> dict[str, Any]:
    """Scores predictions (answers and cited sources) or rankings; prints the tables.

    Args:
      only_given: score only the questions that the file holds; otherwise a missing prediction
        counts 0 and a missing ranking is refused.
    """
    from rich.console import Console

    from mmqa_jax.data.datasets.webqa import read_submission
    from mmqa_jax.evaluation.retrieval import score_rankings
    from mmqa_jax.evaluation.tables import answer_table, retrieval_table, to_rich
    from mmqa_jax.evaluation.webqa import score_answers, score_sources
    from mmqa_jax.retrieval.rankings import read_rankings

    corpus = open_corpus(references)
    questions = split_questions(corpus, references, split)
    console = Console()
    if predictions.suffix == ".jsonl" and _holds_rankings(predictions):
        if only_given:
            questions = _among(questions, read_rankings(predictions), predictions)
        rankings = read_rankings(predictions, [q.id for q in questions], corpus.row)
        found = score_rankings([set(q.positives) for q in questions], [r.sources for r in rankings])
        recall = {
            int(k.removeprefix("recall@")): v for k, v in found.scores.items() if "recall@" in k
        }
        console.print(to_rich(retrieval_table("Retrieval", {predictions.stem: recall}, {})))
        return {"dataset": dataset, "n": len(found.rows), "scores": found.scores, "by_category": {}}
    if predictions.suffix == ".jsonl":
        given = read_predictions(predictions, corpus.row)
    else:
        given = read_submission(predictions, corpus)
    if only_given:
        questions = _among(questions, given, predictions)
    answers = score_answers(questions, given, lemmatizer=lemmatizer)
    sources = score_sources(questions, given) if any(q.positives for q in questions) else None
    console.print(to_rich(answer_table(f"{dataset}, {split}", answers)))
    cited = sources.by_category if sources else {}
    by_category = {
        category: {**scores, **cited.get(category, {})}
        for category, scores in answers.by_category.items()
    }
    return {
        "dataset": dataset,
        "n": answers.n,
        "missing": answers.missing,
        "scores": {**answers.scores, **(sources.scores if sources else {})},
        "by_category": by_category,
    }


def split_questions(corpus: Corpus, data: Path, split: str) -> list[Question]:
    """The questions of a split; UserError where there are none."""
    questions = corpus.questions(split)
    if not questions:
        known = sorted({question.split for question in corpus.questions()})
        remedy = f"choose one of {', '.join(known)}"
        if not known:
            remedy = "the corpus has no questions at all, prepare it with some"
        raise UserError(f"--split={split}: {data} has no such questions; {remedy}.")
    return questions


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """predictions.jsonl: one Prediction a line."""
    write_jsonl(path, map(dataclasses.asdict, predictions))


def read_predictions(path: Path, source_ids: Container[str] | None = None) -> list[Prediction]:
    """Reads predictions.jsonl; `question_id` is needed, `answer` and `sources` may be absent.

    Args:
      source_ids: the corpus's source ids; None: cited sources are not checked.

    Raises:
      UserError: names file and line of a malformed row or an unknown source.
    """
    names = {field.name for field in dataclasses.fields(Prediction)}
    predictions = []
    for number, row in read_jsonl(path):
        if not isinstance(row, dict) or not isinstance(row.get("question_id"), str):
            raise UserError(
                f'{path}, line {number}: expected an object with a text "question_id"; correct '
                "that line."
            )
        if not isinstance(row.get("answer", ""), str):
            raise UserError(f'{path}, line {number}: "answer" must be text; correct that line.')
        sources = row.get("sources", [])
        if not isinstance(sources, list) or not all(isinstance(name, str) for name in sources):
            raise UserError(
                f'{path}, line {number}: "sources" must be a list of id strings; correct that line.'
            )
        for name in sources:
            if source_ids is not None and name not in source_ids:
                raise UserError(
                    f"{path}, line {number}: source {name!r} is not in the corpus; the file is of "
                    "another corpus."
                )
        known = {name: _tuples(value) for name, value in row.items() if name in names}
        predictions.append(Prediction(**known))
    return predictions


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _among(
    questions: Sequence[Question], given: Sequence[Prediction | Ranking], path: Path
) -> list[Question]:
    """The questions that the file `path` predicts or ranks; UserError where there are none."""
    held = {row.question_id for row in given}
    kept = [question for question in questions if question.id in held]
    if not kept:
        raise UserError(
            f"--only_given: {path} holds none of the {len(questions)} questions of this split; "
            "name another file or --split."
        )
    return kept


def check_top_k(top_k: int) -> None:
    """UserError for a --top_k below 1."""
    if top_k < 1:
        raise UserError(f"--top_k={top_k}: at least 1 was expected; give a larger number.")


def check_out(path: Path, *, folder: bool = False) -> None:
    """UserError where no file (or folder) can be written: before hours of work, not after them."""
    if path.is_dir() and not folder:
        raise UserError(f"--out={path}: is a folder, a file to write was expected; name a file.")
    here = path.absolute()
    places = (here, *here.parents) if folder else here.parents
    parent = next(place for place in places if os.path.exists(place))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--out={path}: {parent} is no folder to write to; name another path.")


def _holds_rankings(path: Path) -> bool:
    first = next(read_jsonl(path), (0, {}))[1]
    return isinstance(first, dict) and "scores" in first and "answer" not in first


def _prepare_official(
    raw: Path,
    prefix: str,
    out: Path,
    progress: Progress,
    name: str = "webqa",
    **options: Any,
) -> dict[str, Any]:
    train_val, test = raw / f"{prefix}_train_val.json", raw / f"{prefix}_test.json"
    if not train_val.exists():
        raise UserError(
            f"{train_val}: no such file; put the official files ({prefix}_train_val.json, "
            f"{prefix}_test.json, imgs.tsv, imgs.lineidx) there."
        )
    extra, notice = raw / f"{prefix}_corpus.json", raw / "ATTRIBUTION.txt"
    return prepare_webqa_format(
        train_val,
        test if test.exists() else None,
        raw / "imgs.tsv",
        raw / "imgs.lineidx",
        out,
        corpus_json=extra if extra.exists() else None,
        name=name,
        attribution=read_text(notice) if notice.exists() else "",
        progress=progress.reach,
        **options,
    )


def _stage(progress: Progress) -> Any:
    """A (stage, done, total) callback that counts finished stages."""

    def advance(stage: str, done: int, total: int) -> None:
        progress.advance(int(done == total), stage=stage)

    return advance


def _summary(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    if attribution := manifest["attribution"].strip():
        print(attribution)  # with its line break: JSON may follow
    if broken := manifest["broken_pictures"]:
        shown = ", ".join(list(broken)[:5]) + (", ..." if len(broken) > 5 else "")
        are = "picture is" if len(broken) == 1 else "pictures are"
        print(f"{len(broken)} {are} broken and left out: {shown}", file=sys.stderr)
    kept = ("name", "fingerprint", "counts", "splits", "broken_pictures")
    return {**{key: manifest[key] for key in kept}, "data": str(out)}
