"""mmqa_jax from Python: a corpus, a retriever, a reader, and answers that cite their sources.

    import mmqa_jax as mmqa

    corpus = mmqa.open_corpus("my-folder")       # or a list of texts
    retriever = mmqa.open_retriever(corpus)      # BM25 and MiniLM
    with mmqa.open_reader(corpus, "smollm2") as reader:
        answer = mmqa.ask("How often is the filter to be cleaned?", retriever, reader)

The parts are those of `mmqa ask --data`: what was read and embedded, and what a language model
said, is kept in the cache folder ($MMQA_CACHE, ~/.cache/mmqa_jax). Wrong input raises UserError,
or TypeError, whose message says what to do.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, get_args

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.hosts import distributed
from mmqa_jax.data.corpus import PictureOf, corpus_of_lists
from mmqa_jax.data.folder import FolderOptions, Pages
from mmqa_jax.data.formats.tables import columns_of, take_column
from mmqa_jax.data.pictures.decode import decode, read_picture_file
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, Ranking, says_not_found
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.models.encoders.text_encoders import published_folder
from mmqa_jax.papers.webqa import Reranker, top
from mmqa_jax.prompting.backends import Backend
from mmqa_jax.prompting.citations import read_citations
from mmqa_jax.prompting.few_shot import Pictures
from mmqa_jax.prompting.llm_reader import (
    LLMReader,
    LLMReaderOptions,
    LLMReranker,
    LLMRerankerOptions,
)
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.retrieval.fusion import DEFAULT_WEIGHT, RankFusion, check_weight
from mmqa_jax.retrieval.rankings import Retriever as Ranker
from mmqa_jax.runs import ask_folder
from mmqa_jax.runs.ask_corpus import AskedCorpus, ShownSource, answer_notes, shown_sources
from mmqa_jax.runs.parts import LLMSpec, RetrieverSpec, open_bm25
from mmqa_jax.runs.parts import open_llm as open_cached
from mmqa_jax.runs.prepare import folder_notes
from mmqa_jax.weights.hub import download_model

Method = Literal["bm25", "dense", "fused", "rrf"]
_CANDIDATES = 20  # that a reranker scores


def open_corpus(
    texts: Any,
    *,
    titles: Sequence[str | None] | None = None,
    pictures: Sequence[PictureOf | None] | None = None,
    ids: Sequence[str] | None = None,
    pages: Pages | None = None,
) -> AskedCorpus:
    """A corpus of texts and pictures, or of a folder.

    Args:
      texts: the snippets, a caption where there is a picture; a table (pandas, polars, pyarrow,
        `datasets`) with the column `text` and, where it has them, `title`, `picture` and `id`; or
        a folder's path: documents and pictures, an interchange folder, or what `mmqa prepare`
        wrote.
      titles, pictures, ids: of the texts, see data/corpus.py; pictures are paths or encoded bytes.
      pages: of a folder, what is taken of a PDF: its `text` and figures (None, too), its pages as
        `pictures`, for an encoder that sees, or `both`.

    Returns:
      Its `sources` have id, text, title and image.

    Raises:
      TypeError: a value of another type.
    """
    if not isinstance(texts, str | os.PathLike):
        if pages is not None:
            raise UserError(
                "open_corpus: pages say what is taken of a folder's PDFs, and a list of texts was "
                "given; leave them out."
            )
        if (columns := columns_of(texts)) is not None:
            texts = take_column(columns, ("text",), "open_corpus")
            titles = columns.get("title") if titles is None else titles
            pictures = columns.get("picture") if pictures is None else pictures
            ids = list(map(str, columns["id"])) if ids is None and "id" in columns else ids
        return AskedCorpus(corpus_of_lists(texts, titles, pictures, ids))
    for name, values in {"titles": titles, "pictures": pictures, "ids": ids}.items():
        if values is not None:
            raise UserError(
                f"open_corpus: {name} belong to a list of texts, and {str(texts)!r} names a "
                "folder; put the text into a list, or leave them out."
            )
    options = None if pages is None else FolderOptions(pages=pages)
    corpus = ask_folder.open_folder(Path(texts), options=options, flag="open_corpus: texts")
    for line in folder_notes(corpus.manifest["origin"]):
        warnings.warn(line, stacklevel=2)
    return corpus


class Retriever:
    """A corpus behind a search. Made by `open_retriever`.

    Attributes:
      corpus: that is searched.
      encoder: of its passages; "": none, BM25 alone.
      passages: the retrievers of the other rooms, which take Questions.
    """

    def __init__(self, corpus: AskedCorpus, encoder: str, passages: ask_folder.Passages):
        self.corpus, self.encoder, self.passages = corpus, encoder, passages

    def search(
        self, query: str, top_k: int = 10, *, picture: PictureOf | None = None
    ) -> list[ShownSource]:
        """The `top_k` best sources of one query, each with `source` and `score`.

        Args:
          picture: that belongs to the query, for an encoder that sees.

        Returns:
          Best first; fewer where the corpus has fewer, or BM25 finds no more that share a word.
        """
        with _asked(self.corpus, query, picture, "Retriever.search") as question:
            (ranking,) = self._search([question], top_k)
        return _found(self.corpus, ranking)

    def search_many(
        self, queries: Sequence[str] | Mapping[Any, str], top_k: int = 10
    ) -> list[list[ShownSource]]:
        """`search` of many queries, which are embedded together.

        Args:
          queries: texts, a table with the column `question` or `query`, or a mapping of ids to
            texts, whose results come in its order.
        """
        check_several(queries, "Retriever.search_many", "queries")
        if (columns := columns_of(queries)) is not None:
            queries = take_column(columns, ("question", "query"), "Retriever.search_many")
        queries = list(queries.values()) if isinstance(queries, Mapping) else list(queries)
        rankings = self.rank({str(n): query for n, query in enumerate(queries)}, top_k)
        return [_found(self.corpus, ranking) for ranking in rankings]

    def rank(self, queries: Mapping[str, str], top_k: int = 100) -> list[Ranking]:
        """The rankings of many queries by their ids, as `write_rankings` takes them."""
        if not isinstance(queries, Mapping):
            raise TypeError(
                f"Retriever.rank: {type(queries).__name__} was given, a dict of id -> query was "
                "expected; take search_many for queries without ids."
            )
        for query in queries.values():
            _check_query(query, "Retriever.rank")
        return self._search([Question(name, "", query) for name, query in queries.items()], top_k)

    def _search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        _check_top_k(top_k)
        return self.passages.ranked.search(questions, min(top_k, len(self.corpus)))


def open_retriever(
    corpus: AskedCorpus,
    method: Method | Any = "fused",
    *,
    encoder: str | os.PathLike = ask_folder.MINILM,
    weight: float = DEFAULT_WEIGHT,
    reranker: Reranker | str | os.PathLike | None = None,
    candidates: int = _CANDIDATES,
    index: str | os.PathLike = "",
) -> Retriever:
    """A retriever over a corpus.

    Args:
      corpus: of `open_corpus`.
      method: `bm25`, `dense` (by an encoder), or both: `fused` by scores, `rrf` by ranks; or a
        retriever of one's own: any object with `search(query, top_k)`, which returns ids of the
        corpus's sources, or pairs of id and score, best first.
      encoder: `minilm`, a published encoder of texts or a Qwen3-VL-Embedding (its folder, or
        ORG/NAME in the Hugging Face cache), a CLIP or SigLIP or a contrastive run; not for bm25.
      weight: of the encoder's cosines beside BM25's scores, from 0 to 1; of fused.
      reranker: of `open_reranker` (or the name of its model), or any with its method `score`, that
        ranks the best `candidates` again.
      index: folder of `mmqa index --kind=bm25`, from which bm25 is searched; "": made in memory.
    """
    _check_corpus(corpus, "open_retriever")
    if hasattr(method, "search"):
        foreign: Ranker = _ForeignRetriever(corpus, method)
        if reranker is not None:
            foreign = _with_reranker(corpus, foreign, reranker, candidates)
        return Retriever(corpus, "", ask_folder.Passages(foreign, None))
    if method not in get_args(Method):
        raise UserError(
            f"open_retriever: method {method!r} is not known; use one of "
            f"{', '.join(get_args(Method))}."
        )
    if index and method != "bm25":
        raise UserError(
            f"open_retriever: index={os.fspath(index)} is of bm25, the method is {method}; leave "
            "it out."
        )
    _check_top_k(candidates, "candidates")
    check_weight(weight, "open_retriever: weight")
    encoder = str(encoder)
    if method == "bm25":
        spec = RetrieverSpec("bm25", index=os.fspath(index))
        on_disk = open_bm25(corpus, spec, asks=True)
        words = ask_folder.open_words(corpus) if on_disk is None else BM25Retriever(corpus, on_disk)
        passages = ask_folder.Passages(words, None)
    else:
        distributed.start(join=False)  # programs are kept between runs
        if method == "fused":
            passages = ask_folder.open_passages(corpus, encoder, weight)
        else:
            dense = ask_folder.open_encoded(corpus, encoder)
            ranked = (
                dense if method == "dense" else RankFusion([ask_folder.open_words(corpus), dense])
            )
            passages = ask_folder.Passages(ranked, dense)
    if reranker is not None:
        ranked = _with_reranker(corpus, passages.ranked, reranker, candidates)
        passages = passages._replace(ranked=ranked)
    return Retriever(corpus, "" if method == "bm25" else encoder, passages)


def open_llm(
    model: str | os.PathLike = "smollm2",
    backend: Literal["engine", "openai"] = "engine",
    *,
    thinking: str = "off",
    download: bool = False,
) -> Backend:
    """A language model, for a reader and a reranker to share; its `close` ends it.

    Args:
      model: as `mmqa prompt --model`: `smollm2`, a folder or GGUF file, ORG/NAME in the Hugging
        Face cache, or a server's name for it.
      backend: `engine` is this process, `openai` a server, at OPENAI_BASE_URL with OPENAI_API_KEY.
      thinking: whether it thinks before it answers: `auto` (as it does by itself), `off`, `on`, or
        the number of tokens that thoughts may have beside those of an answer.
      download: fetch ORG/NAME if it is not in the cache.
    """
    if backend not in ("engine", "openai"):
        raise UserError(f"open_llm: backend {backend!r} is not known; use engine or openai.")
    if download:
        download_model(str(model), "model")
    spec = LLMSpec(str(model), backend, thinking=thinking)
    return open_cached(spec, cache_dir() / "responses", "model")


class Reader:
    """A language model that answers from a corpus's sources. Made by `open_reader`.

    A context manager, which closes the model at its end if it has opened it.
    """

    def __init__(self, corpus: AskedCorpus, llm: Backend | None, reader: Any, owns: bool):
        self.corpus, self.llm, self.reader = corpus, llm, reader
        self._owns = owns

    def answer(
        self, question: str, sources: Sequence[ShownSource], *, picture: PictureOf | None = None
    ) -> Answer:
        """The answer to a question from sources that a search has found, best first.

        Without sources and without a picture there is nothing to answer from: not found.
        """
        check_several(sources, "Reader.answer", "sources of Retriever.search")
        names = tuple(source.source.id for source in sources)
        unknown = [name for name in names if name not in self.corpus.row]
        if unknown:
            raise UserError(
                f"Reader.answer: source {unknown[0]!r} is not in the reader's corpus; open "
                "retriever and reader over the same one."
            )
        scores = tuple(float(source.score) for source in sources)
        with _asked(self.corpus, question, picture, "Reader.answer") as asked:
            if not names and picture is None:
                return Answer(NOT_FOUND, False)
            ranking = Ranking(asked.id, names, scores)
            (prediction,) = self.reader.answer([asked], [ranking])
        text = prediction.answer.strip()
        answer = ask_folder.FolderAnswer(text, text not in ("", NOT_FOUND), prediction, ranking)
        return _answer(self.corpus, answer)

    def close(self) -> None:
        """Ends the model, if `open_reader` has opened it."""
        if self._owns and self.llm is not None:
            self.llm.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_reader(
    corpus: AskedCorpus,
    model: str | os.PathLike | Backend | Read = "smollm2",
    backend: Literal["engine", "openai"] = "engine",
    *,
    pictures: Pictures = "auto",
    max_new_tokens: int = LLMReaderOptions.max_new_tokens,
    thinking: str = "off",
    citations: Literal["asked", "cause"] = "asked",
) -> Reader:
    """A language model as a reader of a corpus.

    Args:
      corpus: of `open_corpus`.
      model, backend: see `open_llm`, or what it returned. Or a function of one's own, which is
        called with the question and its sources (`source.text`, `source.title`), best first, and
        returns the answer, with [1] where it cites the first of them.
      pictures: how the model is shown pictures, see LLMReaderOptions.
      max_new_tokens: of an answer.
      thinking: see `open_llm`, which has said it of a model that it returned.
      citations: what an answer cites, see LLMReaderOptions.
    """
    _check_corpus(corpus, "open_reader")
    options = LLMReaderOptions(
        pictures=pictures, max_new_tokens=max_new_tokens, citations=citations
    )
    if callable(model):
        return Reader(corpus, None, _ForeignReader(corpus, model), False)
    owns = isinstance(model, str | os.PathLike)
    llm = open_llm(model, backend, thinking=thinking) if owns else model
    return Reader(corpus, llm, LLMReader(corpus, llm, options), owns)


def open_reranker(
    corpus: AskedCorpus, model: Backend | str | os.PathLike, *, calibrated: bool = False
) -> Reranker:
    """A reranker: a published one of pairs, or a language model by its probability of yes.

    Args:
      model: folder of a cross-encoder, such as ms-marco MiniLM or bge-reranker, or of a
        Qwen3-Reranker or Qwen3-VL-Reranker, or its ORG/NAME in the Hugging Face cache; or a
        language model of `open_llm`; a server must give log-probabilities.
      calibrated: of a language model, see LLMRerankerOptions.

    Raises:
      TypeError: the name of a language model, which has to be opened.
    """
    _check_corpus(corpus, "open_reranker")
    llm = model
    if isinstance(llm, str | os.PathLike):
        if folder := published_folder(Path(llm), "open_reranker: model"):
            return open_cross_encoder(folder, corpus)
        if os.sep in str(llm) and not Path(llm).exists():
            raise UserError(
                f"open_reranker: {str(llm)!r}: no such file or folder; check the path, or give an "
                "opened language model."
            )
        raise TypeError(
            f"open_reranker: {str(llm)!r} is a name, an opened model was expected; open it with "
            f"open_llm({str(llm)!r}), which a reader can share."
        )
    return LLMReranker(corpus, llm, LLMRerankerOptions(calibrated=calibrated))


Read = Callable[[str, Sequence[ShownSource]], str]


@dataclasses.dataclass(frozen=True)
class _ForeignRetriever:
    """An object with `search(query, top_k)` as a retriever of Questions."""

    corpus: AskedCorpus
    method: Any

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The rankings that the object's own search gives."""
        return [self._ranking(question, top_k) for question in questions]

    def _ranking(self, question: Question, top_k: int) -> Ranking:
        name = f"{type(self.method).__name__}.search"
        results = list(self.method.search(question.question, top_k))[:top_k]
        pairs = []
        for place, result in enumerate(results):
            match result:
                case str():
                    pairs.append((result, 1.0 / (1 + place)))
                case (str() as source, int() | float() as score):
                    pairs.append((source, float(score)))
                case ShownSource():
                    pairs.append((result.source.id, float(result.score)))
                case _:
                    raise TypeError(
                        f"{name}: result {place} is {result!r:.60}; return ids of sources, or "
                        "pairs of id and score."
                    )
        for source, _ in pairs:
            if source not in self.corpus.row:
                raise UserError(
                    f"{name}: source {source!r} is not in the corpus; return ids of its `sources`."
                )
        return Ranking(question.id, tuple(s for s, _ in pairs), tuple(x for _, x in pairs))


@dataclasses.dataclass(frozen=True)
class _ForeignReader:
    """A function of question and sources as a reader, whose `[1]` are read as citations."""

    corpus: AskedCorpus
    read: Read

    def answer(
        self, questions: Sequence[Question], rankings: Sequence[Ranking]
    ) -> list[Prediction]:
        """Asks the function about one question after the other."""
        return list(map(self._answer, questions, rankings))

    def _answer(self, question: Question, ranking: Ranking) -> Prediction:
        text = self.read(question.question, _found(self.corpus, ranking))
        if not isinstance(text, str):
            raise TypeError(
                f"open_reader: the function returned {type(text).__name__}; return the answer as "
                "a text, with [1] where it cites the first source."
            )
        answer, numbers, wrong = read_citations(text, len(ranking.sources))
        if says_not_found(answer, cited=bool(numbers)):
            answer = NOT_FOUND
        return Prediction(
            question.id,
            answer,
            tuple(ranking.sources[number - 1] for number in numbers),
            tuple(ranking.scores[number - 1] for number in numbers),
            read=ranking.sources,
            trace={"wrong_citations": wrong} if wrong else {},
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
      text: what the model wrote, without its markers; `Not found in the sources.` if no source is
        similar enough, or the model says so.
      found: whether there is an answer.
      sources: those that it cites, each with `source`, `score` and its number, `cited`.
      read: all that the model was shown; if none was similar enough, the nearest one, which was
        not.
      notes: what the model was not shown, and what failed.
      quote: the passages' best sentence where the model is not sure of its words: `text`, the
        source's `id`, `file`, `page` and text (`passage`), and its place there; None: it is sure.
    """

    text: str
    found: bool
    sources: Sequence[ShownSource] = ()
    read: Sequence[ShownSource] = ()
    notes: Sequence[str] = ()
    quote: Mapping[str, Any] | None = None


def ask(
    question: str,
    retriever: Retriever,
    reader: Reader,
    *,
    picture: PictureOf | None = None,
    top_k: int = ask_folder.AskOptions.top_k,
    least_similarity: float | None = None,
    quote_below: float | None = None,
) -> Answer:
    """Answers a question from the corpus of a retriever and a reader, as `mmqa ask --data` does.

    Args:
      picture: that belongs to the question; a path or encoded bytes.
      top_k: sources that the model reads.
      least_similarity: as AskOptions; a question whose nearest source is less similar is refused
        unread. BM25 alone refuses questions that share no word with any source.
      quote_below: as AskOptions; below this confidence of the model the answer has a `quote`.
    """
    if not isinstance(retriever, Retriever) or not isinstance(reader, Reader):
        types = f"{type(retriever).__name__} and {type(reader).__name__}"
        raise TypeError(
            f"ask: {types} were given; give the question, what open_retriever returned, then what "
            "open_reader returned."
        )
    if retriever.corpus is not reader.corpus:
        raise UserError("ask: retriever and reader are of two corpora; open both over the same.")
    _check_query(question, "ask")
    _check_top_k(top_k)
    if least_similarity is None and isinstance(retriever.passages.ranked, _ForeignRetriever):
        least_similarity = -math.inf  # its scores are on a scale of its own
    options = ask_folder.AskOptions(
        retriever.encoder,
        min(top_k, len(retriever.corpus)),
        least_similarity=least_similarity,
        quote_below=quote_below,
    )
    answerer = ask_folder.FolderAnswerer(
        retriever.corpus, reader.reader, options, retriever.passages
    )
    answer = _answer(retriever.corpus, answerer.answer(question, _encoded(picture, "ask")))
    return dataclasses.replace(answer, notes=(*answer.notes, *options.notes))


def _with_reranker(
    corpus: AskedCorpus, ranked: Ranker, reranker: Reranker | str | os.PathLike, candidates: int
) -> _Reranked:
    if isinstance(reranker, str | os.PathLike):
        reranker = open_reranker(corpus, reranker)
    return _Reranked(ranked, reranker, min(candidates, len(corpus)))


@dataclasses.dataclass(frozen=True)
class _Reranked:
    """The best sources of a retriever, ranked again."""

    retriever: Ranker
    reranker: Reranker
    candidates: int

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` best of the candidates, and of as many at least."""
        rankings = self.retriever.search(questions, max(top_k, self.candidates))
        return [top(ranking, top_k) for ranking in self.reranker.score(questions, rankings)]


def _answer(corpus: AskedCorpus, answer: ask_folder.FolderAnswer) -> Answer:
    cited, scores = answer.prediction.sources, answer.prediction.source_scores
    return Answer(
        answer.text,
        answer.found,
        tuple(shown_sources(corpus, cited, scores, cited=True)),
        tuple(_found(corpus, answer.read)),
        tuple(answer_notes(answer.prediction)),
        answer.quoted(corpus),
    )


def _found(corpus: AskedCorpus, ranking: Ranking) -> list[ShownSource]:
    return shown_sources(corpus, ranking.sources, ranking.scores, cited=False)


def _asked(
    corpus: AskedCorpus, text: str, picture: PictureOf | None, where: str
) -> AbstractContextManager[Question]:
    """The question, whose picture the corpus has inside the `with` block."""
    _check_query(text, where)
    return corpus.asked(text, _encoded(picture, where))


def _encoded(picture: PictureOf | None, where: str) -> bytes | None:
    if picture is None:
        return None
    data = picture if isinstance(picture, bytes) else read_picture_file(picture)
    decode(data, f"{where}: the picture")  # a broken one is refused before it is searched with
    return data


def _check_query(query: Any, where: str) -> None:
    if not isinstance(query, str):
        raise TypeError(
            f"{where}: a text was expected, {type(query).__name__} was given; give one text at a "
            "time, or many to Retriever.search_many."
        )
    if not query.strip():
        raise UserError(f"{where}: the question is empty; write one.")


def _check_top_k(top_k: int, name: str = "top_k") -> None:
    if top_k < 1:
        raise UserError(f"{name}={top_k}: at least 1 was expected; give a larger number.")


def _check_corpus(corpus: Any, where: str) -> None:
    if not isinstance(corpus, AskedCorpus):
        raise TypeError(
            f"{where}: {type(corpus).__name__} was given, a corpus was expected; open one with "
            "open_corpus(...) and give that."
        )
