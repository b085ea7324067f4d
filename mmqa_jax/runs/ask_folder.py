"""Answers questions from a folder of documents: read, embedded, retrieved, and read by an LLM.

The folder is prepared as a corpus in a cache, as by `mmqa prepare folder`; later calls read and
embed only the files that have changed. Passages are found by MiniLM (or any encoder) and BM25.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import best_precision, cache_dir, matmul_rates
from mmqa_jax.core.mesh import platform
from mmqa_jax.core.store import Store
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus, open_sources
from mmqa_jax.data.documents.chunks import TokenLimit
from mmqa_jax.data.documents.document import place_of, shown_place
from mmqa_jax.data.folder import WHOLE_PAGE, FolderOptions
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, Ranking
from mmqa_jax.data.text_analysis import Analyzer
from mmqa_jax.papers.webqa import Reader, top
from mmqa_jax.prompting.quotes import CONFIDENCE, Quote, best_quote
from mmqa_jax.retrieval.bm25.in_memory import BM25, BM25Retriever, kept_words
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embeddings import Embeddings, cached_vectors
from mmqa_jax.retrieval.fusion import DEFAULT_WEIGHT, HybridSearch, ScoreFusion
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.late_interaction import dense_retriever
from mmqa_jax.retrieval.rankings import Retriever
from mmqa_jax.retrieval.text_encoder import minilm_token_limit
from mmqa_jax.runs import ask_corpus
from mmqa_jax.runs.corpora import KEPT, prepare
from mmqa_jax.runs.originals import Originals
from mmqa_jax.tasks.library import open_text_embedder
from mmqa_jax.weights.hub import is_hub_name

if TYPE_CHECKING:
    from mmqa_jax.prompting.llm_reader import LLMReaderOptions

_TOLD = (
    "thinking",
    "thinking_tokens",
    "cut",
    "sentences",
    ask_corpus.REFUSED,
)  # of a trace, in what `--json` prints

MINILM = "minilm"
_MOST_SOURCES = 1_000_000  # whose texts and vectors are held in memory
_ANALYZER = Analyzer()
# MiniLM's cosine of the nearest passage below which none answers a question, by the number of
# passages: the more there are, the nearer is one by chance. Chosen on OpenStax's val questions by
# `python -m tests.bench refusals` (tests/bench/RESULTS.md).
_LEAST_SIMILARITY = {
    30: 0.287, 100: 0.302, 300: 0.344, 1_000: 0.374, 3_000: 0.432, 10_000: 0.484, 22_472: 0.489,
}  # fmt: skip


# A question is not refused where one passage has this share of its words, by their idf, which lets
# at most 2 % of foreign questions through up to this number of passages, and more beyond it.
_COVERED, _MOST_COVERED = 0.7, 3_000


@dataclasses.dataclass(frozen=True)
class AskOptions:
    """How questions are answered from a folder."""

    # Of passages and questions: `minilm`, a published encoder of texts or a Qwen3-VL-Embedding (its
    # folder, or ORG/NAME in the Hugging Face cache), a CLIP or SigLIP or a contrastive run.
    encoder: str = MINILM
    top_k: int = at_least(1, 5)  # passages that the language model reads
    # Of the encoder's cosines beside BM25's scores, see retrieval/fusion.py.
    weight: float = DEFAULT_WEIGHT
    # Questions whose most similar passage has a lower cosine are refused; None: by the number of
    # passages for MiniLM, unless a passage has most of their words, and for other encoders none is.
    least_similarity: float | None = None
    words: Analyzer = _ANALYZER  # how BM25 makes words of passages and questions
    # Orders the best `candidates` passages anew; "": none does. A rerank run, the folder of a
    # cross-encoder or of a Qwen3-Reranker, or its ORG/NAME in the Hugging Face cache.
    reranker: str = ""
    candidates: int = at_least(1, 20)  # passages that it reads
    # The reader's confidence, 0 to 1, below which the passages' best sentence stands before its
    # words; 0: never; None: as the reader says itself, .9 of a small language model and never of
    # others (prompting/quotes.py).
    quote_below: float | None = None

    @property
    def notes(self) -> list[str]:
        """Says what is refused where the encoder's least similarity is not known, or is none."""
        if self.least_similarity is not None or self.encoder == MINILM:
            return []
        if not self.encoder:
            return ["Found by words alone: refused is what shares no word with any passage."]
        return [
            f"--encoder={self.encoder}: no question is refused for its distance from all passages, "
            "since this encoder's threshold is not known; choose one on questions of yours with "
            "`mmqa ask --calibrate`, and set it as --least_similarity."
        ]

    def threshold(self, passages: int) -> float:
        """The least similarity in use with so many passages."""
        if self.least_similarity is not None:
            return self.least_similarity
        if self.encoder != MINILM:
            return -1.0
        sizes = np.log(list(_LEAST_SIMILARITY))
        return float(np.interp(np.log(max(passages, 1)), sizes, [*_LEAST_SIMILARITY.values()]))


@dataclasses.dataclass(frozen=True)
class FolderAnswer:
    """The answer to one question."""

    # What the model wrote; NOT_FOUND if no passage is similar enough, or it says so itself.
    text: str
    found: bool  # whether there is an answer
    prediction: Prediction  # with the cited sources, best first; `source_scores` are their cosines
    # The sources that the model was shown, by their cosines; if none was similar enough, the
    # nearest one, which was not shown.
    read: Ranking
    # The sentence of the sources that stands before the model's words, of which it is not sure;
    # None: the words stand for themselves.
    quote: Quote | None = None

    def quoted(self, corpus: Corpus) -> dict[str, Any] | None:
        """The quote with its number among `read`, its source's id, file, page and text (`passage`),
        and its place."""
        if self.quote is None:
            return None
        place, start, end, similarity = self.quote
        source = corpus.sources[corpus.row[self.read.sources[place]]]
        about = {name: source.extra.get(name) for name in ("file", "page")}
        text = source.text[start:end]
        row = {"number": place + 1, "id": source.id, **about, "text": text, "passage": source.text}
        return {**row, "similarity": round(similarity, 3), **place_of(source.extra, start, end)}

    def sources_shown(self, corpus: Corpus) -> list[ask_corpus.ShownSource]:
        """The sources to show: the cited sources, or else all that were read."""
        cited = self.prediction.sources
        if cited:
            return ask_corpus.shown_sources(
                corpus, cited, self.prediction.source_scores, cited=True
            )
        return ask_corpus.shown_sources(corpus, self.read.sources, self.read.scores, cited=False)


class Found(NamedTuple):
    """The search results for a question."""

    # The sources to read, best first, by their cosines; without an encoder by the scores that
    # ranked them.
    best: Ranking
    # The most similar source by itself; empty: none shares a word with the question.
    nearest: Ranking


class ToRead(NamedTuple):
    """The passages that the model reads for a question."""

    question: Question
    passages: Ranking  # by their cosines, to be read in this order
    is_refused: bool  # none is similar enough; `passages` is the nearest one, which is not read


class Passages(NamedTuple):
    """A corpus behind retrievers."""

    ranked: Retriever  # whose best sources are read
    dense: DenseRetriever | None  # tells how similar they are; None: BM25 alone
    words: BM25 | None = None  # tells how much of a question's words they have; None: unknown

    def find(self, questions: Sequence[Question], top_k: int) -> list[Found]:
        """The best `top_k` sources of each question, and the nearest one."""
        best = self.ranked.search(questions, top_k)
        if self.dense is None:
            return [Found(ranking, top(ranking, 1)) for ranking in best]
        results = []
        nearest, scored = self.dense.search_and_score(questions, 1, best)
        for ranking, closest, cosines in zip(best, nearest, scored, strict=True):
            cosine_of = dict(zip(cosines.sources, cosines.scores, strict=True))
            scores = tuple(cosine_of[name] for name in ranking.sources)
            results.append(Found(Ranking(ranking.question_id, ranking.sources, scores), closest))
        return results


class FolderAnswerer:
    """Answers from a folder's passages: retrievers and a reader.

    Args:
      corpus: of `open_folder`.
      reader: of the passages, over the same corpus; None: each question brings its own to `read`.
      passages: of the corpus; None: they are opened as `options` say.
    """

    def __init__(
        self,
        corpus: ask_corpus.AskedCorpus,
        reader: Reader | None,
        options: AskOptions,
        passages: Passages | None = None,
    ):
        self.corpus, self.options = corpus, options
        self._reader = reader
        self._passages = passages or open_passages(
            corpus, options.encoder, options.weight, options.words
        )
        self._threshold = options.threshold(len(corpus))
        self.reranker = None
        if options.reranker:
            from mmqa_jax.tasks.rerank import open_reranker

            self.reranker = open_reranker(options.reranker, corpus)

    def answer(self, text: str, picture: bytes | None = None) -> FolderAnswer:
        """Answers a question, citing the folder's sources.

        `picture`: encoded picture that belongs to the question; the answer may then come from it,
        and is refused by the model alone.
        """
        with self.corpus.asked(text, picture) as question:
            (to_read,) = self.find([question])
            return self.read(to_read)

    @property
    def embedder(self) -> Any:
        """The encoder of passages and questions; None: they are found by words alone."""
        dense = self._passages.dense
        return None if dense is None else dense.embedder

    def find(self, questions: Sequence[Question]) -> list[ToRead]:
        """The passages for questions of `corpus.asked`."""
        to_read = []
        options = self.options
        most = max(options.top_k, options.candidates if self.reranker is not None else 0)
        ranked = self._passages.find(questions, most)
        if self.reranker is not None:
            ranked = self._reranked(questions, ranked)
        for question, (best, nearest) in zip(questions, ranked, strict=True):
            is_refused = question.image is None and not self._is_near(question, nearest)
            to_read.append(ToRead(question, nearest if is_refused else best, is_refused))
        return to_read

    def read(
        self,
        to_read: ToRead,
        reader: Reader | None = None,
        turn: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> FolderAnswer:
        """Answers a question from its search results.

        Args:
          reader: in place of this answerer's own.
          turn: in whose context the encoder computes.
        """
        question, passages, is_refused = to_read
        if is_refused:
            return FolderAnswer(NOT_FOUND, False, self.refusal(to_read), passages)
        reader = reader or self._reader
        assert reader is not None, "a question needs a reader"
        (prediction,) = reader.answer([question], [passages])
        answer = prediction.answer.strip()
        is_found = answer not in ("", NOT_FOUND)
        quote, below = None, self.options.quote_below
        if below is None:  # a reader that is no language model does not say
            below = getattr(reader, "quote_below", 0.0)
        confidence = prediction.trace.get(CONFIDENCE, 1.0)
        if is_found and question.image is None and confidence < below:
            with turn():
                quote = self._quote(question, passages, answer)
        return FolderAnswer(answer, is_found, prediction, passages, quote)

    def _quote(self, question: Question, passages: Ranking, words: str) -> Quote | None:
        """The sentences of the passages that answer best, by an encoder of texts."""
        if self.embedder is None or self.embedder.image_size:
            return None
        sources = [self.corpus.sources[self.corpus.row[name]] for name in passages.sources]
        return best_quote(question.question, sources, self.embedder, words)

    def refusal(self, to_read: ToRead) -> Prediction:
        """The prediction of a refused question, whose trace has REFUSED."""
        question, nearest, _ = to_read
        reason: dict[str, Any] = {"least": round(self._threshold, 3)}
        if nearest.sources:
            source = self.corpus.sources[self.corpus.row[nearest.sources[0]]]
            where = shown_place(source.extra) or source.id
            reason |= {"nearest": where, "similarity": round(float(nearest.scores[0]), 3)}
        return Prediction(question.id, NOT_FOUND, trace={ask_corpus.REFUSED: reason})

    def _reranked(self, questions: Sequence[Question], ranked: Sequence[Found]) -> list[Found]:
        """The best `top_k` in the reranker's order; their scores stay the cosines."""
        assert self.reranker is not None
        orders = self.reranker.score(questions, [found.best for found in ranked])
        results = []
        for (best, nearest), order in zip(ranked, orders, strict=True):
            cosine_of = dict(zip(best.sources, best.scores, strict=True))
            names = order.sources[: self.options.top_k]
            scores = tuple(cosine_of[name] for name in names)
            results.append(Found(Ranking(order.question_id, names, scores), nearest))
        return results

    def _is_near(self, question: Question, nearest: Ranking) -> bool:
        """Whether a source is similar enough to a question to answer it, by meaning or by words."""
        if nearest.sources and nearest.scores[0] >= self._threshold:
            return True
        words = self._passages.words
        if words is None or self.options.least_similarity is not None or len(words) > _MOST_COVERED:
            return False
        return words.coverage(question.question) >= _COVERED


def open_folder(
    folder: Path,
    cache: Path | None = None,
    options: FolderOptions | None = None,
    flag: str = "--data",
    encoder: str = MINILM,
) -> ask_corpus.AskedCorpus:
    """Opens a folder of documents as a corpus, and reads only changed files.

    Args:
      folder: of documents and pictures, an interchange folder, or a prepared corpus.
      cache: where the corpus is kept; None: in the cache folder, by the path of `folder`.
      options: how documents become sources; None: the defaults.
      flag: that named the folder, for messages.
      encoder: of AskOptions: passages are no longer than it reads.
    """
    if (folder / corpus_records.MANIFEST).exists():
        if options is not None and (changed := options.flag):
            raise UserError(
                f"{changed}: {folder} was prepared already, with the pages that `mmqa prepare "
                f"folder` was told; leave {changed.partition('=')[0]} out, or name the documents."
            )
        corpus = ask_corpus.AskedCorpus(open_sources(folder))
        if (folder / KEPT).is_dir():
            corpus.originals = Originals(Path(corpus.manifest["origin"]["folder"]), folder / KEPT)
        return corpus
    if cache is None:
        key = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
        cache = cache_dir() / "folders" / key[:16]
    options = options or FolderOptions()
    if not (folder / "sources.jsonl").exists():
        chunk = dataclasses.replace(options.chunk, tokens=_token_limit(encoder))
        options = dataclasses.replace(options, chunk=chunk)
    manifest = prepare("folder", folder, cache, overwrite=True, folder=options, flag=flag)
    prepared = open_sources(cache)
    prepared.manifest.update(manifest)  # of this call: how many files were opened
    corpus = ask_corpus.AskedCorpus(prepared)
    corpus.originals = Originals(folder, cache / KEPT)
    return corpus


def ask_folder(
    data: Path,
    questions: Sequence[str],
    picture: bytes | None,
    *,
    model: str,
    backend: str,
    thinking: str,
    cache: Path | None,
    folder: FolderOptions | None,
    options: AskOptions,
    reading: LLMReaderOptions,
) -> Iterator[dict[str, Any]]:
    """Answers questions in turn from a folder; yields what `--json` prints of each.

    Args:
      data, cache, folder: see `open_folder`.
      model, backend, thinking: the language model that reads the passages, see runs.parts.LLMSpec.
    """
    from mmqa_jax.prompting.llm_reader import LLMReader
    from mmqa_jax.runs.parts import LLMSpec, open_llm
    from mmqa_jax.runs.prepare import folder_notes

    corpus = open_folder(data, cache, folder, encoder=options.encoder)
    for line in (*folder_notes(corpus.manifest["origin"]), *options.notes):
        print(line, file=sys.stderr)
    spec = LLMSpec(model, backend, thinking=thinking)
    llm = open_llm(spec, cache_dir() / "responses", "--model")
    try:
        answerer = FolderAnswerer(corpus, LLMReader(corpus, llm, reading), options)
        for answer, row in ask_corpus.ask_in_turn(answerer, questions, picture):
            for note in ask_corpus.answer_notes(answer.prediction):
                print(note, file=sys.stderr)
            trace = answer.prediction.trace
            yield {**row, **{key: trace[key] for key in _TOLD if key in trace}}
    finally:
        llm.close()


def open_passages(
    corpus: Corpus, encoder: str, weight: float = DEFAULT_WEIGHT, analyzer: Analyzer = _ANALYZER
) -> Passages:
    """All sources of a corpus behind an encoder (see `open_encoded`) and BM25.

    Args:
      weight: of the encoder's cosines beside BM25's scores, see retrieval/fusion.py.
      analyzer: makes BM25's words.
    """
    dense = open_encoded(corpus, encoder)
    bm25 = open_words(corpus, analyzer)
    return Passages(ScoreFusion(HybridSearch(dense, bm25), weight), dense, bm25.bm25)


def open_words(corpus: Corpus, analyzer: Analyzer = _ANALYZER) -> BM25Retriever:
    """All sources of a corpus by the words of questions, which are kept on disk."""
    counted = kept_words(cache_dir() / "words", corpus, analyzer)
    return BM25Retriever(corpus, BM25(counted, analyzer=analyzer, asks=True))


def open_encoded(corpus: Corpus, encoder: str) -> DenseRetriever:
    """Opens the vectors of all sources; those of unchanged files are kept on disk.

    `encoder`: `minilm` and other encoders of texts embed pictures by their captions, others by
    caption and pixels.
    """
    if len(corpus) > _MOST_SOURCES:
        raise UserError(
            f"--data: {len(corpus):,} sources are too many to be embedded before a question is "
            "answered; use `mmqa embed`, `mmqa index` and `mmqa search`, or a row of `mmqa run`."
        )
    embedder, pictures = _open_encoder(encoder, corpus)
    drawn = next((page for page in corpus.sources if page.extra.get(WHOLE_PAGE)), None)
    if drawn is not None and not embedder.image_size:
        raise UserError(f"{drawn.extra.get('file')}: {no_pictures(encoder)}")
    texts = [embedder.text_of(source) for source in corpus.sources]
    if not embedder.image_size:
        contents, kind = texts, "text"

        def embed(rows: Any) -> Any:
            with jax.default_matmul_precision(_products()):
                return embedder.embed_passages([texts[row] for row in rows])
    else:
        contents, kind = [_content(corpus, row, text) for row, text in enumerate(texts)], "source"

        def embed(rows: Any) -> Any:
            with jax.default_matmul_precision(_products()):
                return embedder.embed_rows(corpus, pictures, rows.tolist())

    files = [str(source.extra.get("file", "")) for source in corpus.sources]
    vectors = cached_vectors(
        cache_dir() / "vectors",
        f"{kind} {embedder.fingerprint}",
        contents,
        embed,
        unit="passages",
        groups=files if all(files) else None,
    )
    if note := _not_read(corpus, embedder, texts):
        print(f"--encoder={encoder}: {note}", file=sys.stderr)
    embeddings = Embeddings(vectors, embedder.fingerprint, corpus.fingerprint)
    return dense_retriever(corpus, embedder, ExactIndex(embeddings), pictures)


def _not_read(corpus: Corpus, embedder: Any, texts: Sequence[str]) -> str:
    """Warns of passages whose ends the encoder cuts off; "" where it reads all.

    It is counted once for a corpus.
    """
    limit = embedder.token_limit
    what = {"encoder": embedder.fingerprint, "most": limit.most}
    with Store(cache_dir() / "tokens", what, damage="drop", sync=False) as store:
        cut = store.get(corpus.fingerprint) if corpus.fingerprint else None
        if cut is None:
            over = [max(0, tokens - limit.most) for tokens in limit.count(texts)]
            cut = [sum(over), sum(map(bool, over))]
            if corpus.fingerprint:
                store.add({corpus.fingerprint: cut})
    tokens, passages = cut
    if not passages:
        return ""
    return (
        f"{passages:,} of {len(texts):,} passages are longer than the {limit.most:,} tokens that "
        f"it reads: {tokens:,} tokens at their ends are found by their words alone."
    )


def no_pictures(encoder: str) -> str:
    """Returns the message for pages as pictures that an encoder of texts cannot search."""
    return (
        f"its pages are pictures, which the encoder {encoder} cannot read; name one that does (a "
        "Qwen3-VL-Embedding, a CLIP or SigLIP) by --encoder, or take --pages=text."
    )


def _open_encoder(encoder: str, corpus: Corpus) -> tuple[Any, PictureStore]:
    """The encoder and the corpus's pictures as it takes them."""
    embedder, pictures = _loaded(encoder)
    return embedder, pictures.over(corpus)


@functools.lru_cache(maxsize=1)  # its tokenizer is needed before there is a corpus
def _loaded(encoder: str) -> tuple[Any, PictureStore]:
    if encoder != MINILM and not is_hub_name(encoder) and not Path(encoder).exists():
        raise UserError(
            f"--encoder={encoder}: no such folder, nor {MINILM}, nor ORG/NAME of an encoder on the "
            "Hugging Face hub; check the path."
        )
    return open_text_embedder(encoder, Corpus([]))


def _token_limit(encoder: str) -> TokenLimit | None:
    return minilm_token_limit() if encoder == MINILM else _loaded(encoder)[0].token_limit


@functools.cache
def _products() -> str | None:
    """How passages' products are rounded: to bfloat16 on a CPU that is faster so, as in the demo.

    Vectors that are kept may be of either kind: their cosines differ by less than .001.
    """
    fast = platform() == "cpu" and best_precision(matmul_rates()) == "bfloat16"
    return "bfloat16" if fast else None


def _content(corpus: Corpus, row: int, text: str) -> str:
    """Returns what the vector of a source depends on: its text and its picture."""
    picture = corpus.picture(row)
    return text if picture is None else f"{text}\0{hashlib.sha256(picture).hexdigest()}"
