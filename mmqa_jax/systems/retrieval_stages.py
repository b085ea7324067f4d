"""What the verbs embed, index and search do: from a corpus to rankings of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out, read_json, write_json
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.systems import webqa
from mmqa_jax.systems.retrieval_scores import score_retrieval, show_retrieval
from mmqa_jax.systems.stages import check_top_k, split_questions

_EMBEDDINGS, _INDEX, _RUN = "embeddings", "index", "embed.json"
_SHARD_ROWS = 1024
_FUSED_DEPTH = 100


def embed(
    data: Path, model: Path, out: Path, *, shard: str | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Embeds every source of a corpus; goes on where an interrupted job stopped.

    Args:
      shard: `I/N`, this process's part of a job that N processes share; by default that of the
        hosts that jax knows.
      overwrite: replace embeddings of another model or corpus that lie in `out`.
    """
    from mmqa_jax.core import startup

    part = _part(shard)
    check_out(out / _EMBEDDINGS, folder=True)
    startup.start()
    corpus = open_corpus(data)
    embedder, pictures = _open_embedder(model, corpus)
    with Progress("Embedding sources", len(corpus), "sources") as progress:
        embeddings = embedder.embed_sources(
            corpus,
            pictures,
            out / _EMBEDDINGS,
            shard_rows=_SHARD_ROWS,
            part=part,
            overwrite=overwrite,
            on_progress=progress.reach,
        )
    result = {"sources": len(corpus), "dim": embedder.dim, "broken_pictures": pictures.broken.count}
    if embeddings is None:
        print(f"This process's part is in {out}; the others' are not all there yet.")
        return {**result, "waiting_for_other_shards": True}
    write_json(out / _RUN, {"data": str(data), "model": str(model)})
    print(f"{len(corpus):,} sources x {embedder.dim}: {out}")
    return result


def index(folder: Path, kind: str) -> dict[str, Any]:
    """Builds the index over the embeddings in `folder`, unless it is there already."""
    from mmqa_jax.retrieval.embeddings import open_embeddings
    from mmqa_jax.retrieval.index import build_index, is_current

    embeddings = open_embeddings(folder / _EMBEDDINGS)
    current = is_current(folder / _INDEX, embeddings, kind)
    if not current:
        build_index(embeddings, kind).save(folder / _INDEX)
    kind = read_json(folder / _INDEX / "manifest.json")["kind"]
    rows, was = len(embeddings.vectors), "was there already" if current else "built"
    print(f"Index of {rows:,} sources ({kind}) {was}: {folder / _INDEX}")
    return {"rows": rows, "kind": kind, "built": not current}


def open_retriever(corpus: Corpus, model: Path, index_dir: Path, *, two_pass: bool) -> Any:
    """The dense retriever over an index of `mmqa index`.

    Raises UserError where the index or its embeddings are of another model or corpus.
    """
    from mmqa_jax.retrieval.embeddings import open_embeddings
    from mmqa_jax.retrieval.index import load_index
    from mmqa_jax.systems.parts import DenseRetriever

    embedder, pictures = _open_embedder(model, corpus)
    embeddings = open_embeddings(index_dir / _EMBEDDINGS, embedder.fingerprint, corpus.fingerprint)
    found = load_index(index_dir / _INDEX, embeddings, embedder.fingerprint)
    return DenseRetriever(corpus, embedder, found, pictures, two_pass=two_pass)


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
    candidates: str = "all",
    modality: str = "unknown",
    webqa_compat: bool = False,
) -> dict[str, Any]:
    """Ranks sources for every question of a split; see `rankings.without_own_source`.

    Args:
      candidates: `all` the collection, or `restricted` to each question's own.
      modality: `unknown` searches all sources; `known` those of the gold sources' modality;
        `classified` those of the modality that a classifier of the train questions guesses.
      webqa_compat: BM25 with the quirks of WebQA's baseline.
    """
    from mmqa_jax.core import startup
    from mmqa_jax.retrieval.modality import ByModality, one_modality
    from mmqa_jax.retrieval.rankings import without_own_source, write_rankings
    from mmqa_jax.systems.parts import FusedRetriever

    check_top_k(top_k)
    check_out(out)
    _check_combination(method, candidates, modality, webqa_compat, two_pass)
    if method != "bm25" and not (model and index_dir):
        raise UserError(f"--method={method} needs --model and --index; give both.")
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    if method != "bm25":
        startup.start()
        dense = open_retriever(corpus, Path(model), Path(index_dir), two_pass=two_pass)

    def retriever(modality: str | None) -> Any:
        part = corpus if modality is None else one_modality(corpus, modality)
        made: list[Any] = []
        if method != "dense":
            made.append(_bm25(part, webqa_compat=webqa_compat, two_pass=two_pass))
        if method != "bm25":
            made.append(dense if modality is None else _of_modality(dense, part, modality))
        return made[0] if len(made) == 1 else FusedRetriever(made, max(depth, _FUSED_DEPTH))

    depth = top_k + any("from_source" in question.extra for question in questions)
    more: dict[str, Any] = {}
    if candidates == "restricted":
        rankings = _restricted(retriever(None), questions, corpus, depth)
    elif modality == "unknown":
        rankings = retriever(None).search(questions, depth)
    else:
        needed, more = _modalities(corpus, questions, modality)
        retrievers = {wanted: retriever(wanted) for wanted in dict.fromkeys(needed)}
        rankings = ByModality(retrievers, lambda _: needed).search(questions, depth)
    rankings = without_own_source(questions, rankings, top_k)
    write_rankings(out, rankings)
    scored = score_retrieval(corpus, questions, rankings)
    searched = "own candidates" if candidates == "restricted" else f"modality {modality}"
    show_retrieval(f"{data.name}, {split}: {method}, {searched}", scored)
    print(f"Rankings of {len(questions):,} questions: {out}")
    return {"questions": len(questions), **scored, **more}


def _check_combination(
    method: str, candidates: str, modality: str, webqa_compat: bool, two_pass: bool
) -> None:
    if webqa_compat and (method != "bm25" or two_pass):
        raise UserError("--webqa_compat: is a mode of plain --method=bm25; leave it out.")
    if candidates == "restricted" and (method == "fused" or modality != "unknown"):
        raise UserError(
            "--candidates=restricted: works with --method=bm25 or dense and without --modality; "
            "change one."
        )


def _bm25(corpus: Corpus, *, webqa_compat: bool, two_pass: bool) -> Any:
    from mmqa_jax.retrieval.bm25_webqa import WebQABM25Retriever
    from mmqa_jax.systems.parts import BM25Retriever

    if webqa_compat:
        return WebQABM25Retriever(corpus)
    return BM25Retriever(corpus, two_pass=two_pass)


def _of_modality(dense: Any, part: Corpus, modality: str) -> Any:
    """The dense retriever over the sources of one modality."""
    from mmqa_jax.retrieval.modality import ModalityIndex
    from mmqa_jax.systems.parts import DenseRetriever

    view = ModalityIndex(dense.index, dense.corpus.modality_rows(modality))
    return DenseRetriever(part, dense.embedder, view, dense.pictures, two_pass=dense.two_pass)


def _restricted(
    retriever: Any, questions: Sequence[Question], corpus: Corpus, top_k: int
) -> list[Ranking]:
    candidates = webqa.restricted_candidates(questions, corpus)
    ranked = retriever.search_restricted(questions, candidates)
    return [webqa.top(ranking, top_k) for ranking in ranked]


def _modalities(
    corpus: Corpus, questions: Sequence[Question], modality: str
) -> tuple[list[str | None], dict[str, Any]]:
    """Modality to search for each question, and what there is to report of it."""
    from mmqa_jax.retrieval.modality import fit_classifier, gold_modality

    gold = [gold_modality(question, corpus) for question in questions]
    if modality == "known":
        return gold, {"modality_unknown": gold.count(None)}
    classifier = fit_classifier(corpus.questions("train"), corpus)
    guessed = classifier.predict([question.question for question in questions])
    told = [a == b for a, b in zip(guessed, gold, strict=True) if b is not None]
    return guessed, {"modality_accuracy": sum(told) / len(told) if told else None}


def _open_embedder(model: Path, corpus: Corpus) -> tuple[Any, Any]:
    """The embedder of a contrastive run or of a converted CLIP, and pictures as it takes them."""
    from mmqa_jax.data.images import PictureStore
    from mmqa_jax.retrieval.clip import load_clip_embedder
    from mmqa_jax.systems.loading import load_embedder
    from mmqa_jax.weights.converted import is_converted

    if is_converted(model):
        embedder = load_clip_embedder(model)
        return embedder, PictureStore(corpus, embedder.image_size, "crop")
    embedder, config = load_embedder(model)
    return embedder, PictureStore(corpus, config.pictures.size, config.pictures.resize)


def _part(shard: str | None) -> tuple[int, int] | None:
    """`2/8` -> (2, 8)."""
    if shard is None:
        return None
    number, slash, count = shard.partition("/")
    if not slash or not (number.isdecimal() and count.isdecimal()) or int(number) >= int(count):
        raise UserError(f"--shard={shard}: I/N with I from 0 to N - 1 was expected, such as 0/8.")
    return int(number), int(count)
