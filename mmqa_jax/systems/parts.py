"""The trained parts of a system, loaded once: retrievers, reranker, reader.

Each holds its own jitted functions, takes and returns the schema's types in batches, and
knows nothing of the others. loading.py opens what a training run left in its workdir.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError, first_names
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.images import PictureStore
from mmqa_jax.data.inference_batches import answer_inputs, rerank_pairs
from mmqa_jax.data.schema import Modality, Prediction, Question, Ranking
from mmqa_jax.data.sequences import INPUT_FIELDS, Packer
from mmqa_jax.data.tokenizers import WordPiece
from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.models.vlp import VLP, VLPInputs
from mmqa_jax.retrieval.bm25 import BM25, source_text
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.fusion import reciprocal_rank_fusion
from mmqa_jax.retrieval.rankings import best_of, rescored, to_rankings
from mmqa_jax.retrieval.two_pass import two_pass_search
from mmqa_jax.systems import webqa
from mmqa_jax.training.recipes import make_packer, make_source_reader

# uint8[S, S, 3] of each question's picture (None: it has none); None: the questions' own.
QuestionPixels = Sequence[np.ndarray | None] | None


class DenseRetriever:
    """Nearest sources by the dual encoder's cosine, over the whole collection.

    Args:
      two_pass: search again with the title of the first hit (two-hop questions).
    """

    def __init__(
        self,
        corpus: Corpus,
        embedder: Embedder,
        index: Any,
        pictures: PictureStore,
        *,
        two_pass: bool = False,
    ):
        self.corpus, self.embedder, self.index = corpus, embedder, index
        self.pictures, self.two_pass = pictures, two_pass

    def search(
        self, questions: Sequence[Question], top_k: int, pixels: QuestionPixels = None
    ) -> list[Ranking]:
        """The `top_k` sources of every question, best first.

        Args:
          pixels: uint8[S, S, 3] of each question's picture; default the questions' own.
        """
        top_k = min(top_k, len(self.corpus))
        texts = [question.question for question in questions]
        found = self.index.search(self._embed(questions, pixels), top_k)
        if self.two_pass:
            found = two_pass_search(
                lambda queries, k: self.index.search(self.embedder.embed_questions(queries), k),
                texts,
                [source.title for source in self.corpus.sources],
                top_k,
                first=found,
            )
        ids = [source.id for source in self.corpus.sources]
        return to_rankings([q.id for q in questions], *found, ids)

    def search_restricted(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Ranking],
        pixels: QuestionPixels = None,
    ) -> list[Ranking]:
        """Ranks each question's own candidates by cosine (restricted setting).

        With two passes, a source has the higher of its similarities in the two hops.
        """
        if not self.two_pass:
            return self._within(questions, candidates, self._embed(questions, pixels))
        first, second, _ = self.hops(questions, candidates, pixels)
        return best_of(first, second)

    def hops(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Ranking],
        pixels: QuestionPixels = None,
    ) -> tuple[list[Ranking], list[Ranking], list[str]]:
        """Ranks each question's candidates twice, for the two hops that it may take.

        Returns:
          first: all candidates, by similarity to the question.
          second: those behind the first's best, by similarity to the question with the title of
            that best one. Empty where the title is no news: a question that names it has its
            answer there (and one that shows a picture asks about that).
          hints: these titles, "" where there is no second hop.
        """
        if pixels is None:
            pixels = [self.pictures.question_pixels(question) for question in questions]
        first = self._within(questions, candidates, self._embed(questions, pixels))
        hints = [
            "" if shown is not None else self._news(question, ranking)
            for question, ranking, shown in zip(questions, first, pixels, strict=True)
        ]
        second = [Ranking(question.id, (), ()) for question in questions]
        asked = [i for i, hint in enumerate(hints) if hint]
        if not asked:
            return first, second, hints
        texts = [f"{questions[i].question} {hints[i]}" for i in asked]
        again = self._within(
            [questions[i] for i in asked],
            [dataclasses.replace(first[i], sources=first[i].sources[1:]) for i in asked],
            self.embedder.embed_questions(texts),
        )
        for i, ranking in zip(asked, again, strict=True):
            second[i] = ranking
        return first, second, hints

    def _news(self, question: Question, ranking: Ranking) -> str:
        """Title of the ranking's best source, "" if the question names it or there is none."""
        if not ranking.sources:
            return ""
        title = self.corpus.sources[self.corpus.row[ranking.sources[0]]].title
        # Whole words: a question about Nigeria does not name Niger.
        named = re.search(rf"(?<!\w){re.escape(title)}(?!\w)", question.question, re.IGNORECASE)
        return "" if named else title

    def _embed(self, questions: Sequence[Question], pixels: QuestionPixels) -> np.ndarray:
        if pixels is None:
            pixels = [self.pictures.question_pixels(question) for question in questions]
        return self.embedder.embed_questions([q.question for q in questions], pixels)

    def _within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking], queries: np.ndarray
    ) -> list[Ranking]:
        rows = [[self.corpus.row[name] for name in given.sources] for given in candidates]
        found = self.index.search_within(queries, rows, max(map(len, rows), default=0))
        ids = [source.id for source in self.corpus.sources]
        return to_rankings([q.id for q in questions], *found, ids)


class BM25Retriever:
    """BM25 over titles, snippets and captions of the whole collection."""

    def __init__(self, corpus: Corpus, *, two_pass: bool = False):
        self.corpus, self.two_pass = corpus, two_pass
        self.bm25 = BM25([source_text(source) for source in corpus.sources])

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of every question, best first."""
        texts = [question.question for question in questions]
        top_k = min(top_k, len(self.corpus))
        if self.two_pass:
            titles = [source.title for source in self.corpus.sources]
            found = two_pass_search(self.bm25.search, texts, titles, top_k)
        else:
            found = self.bm25.search(texts, top_k)
        ids = [source.id for source in self.corpus.sources]
        return to_rankings([q.id for q in questions], *found, ids)

    def search_restricted(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Ranks each question's own candidates (WebQA 6.1, BM25 row)."""
        rankings = []
        for question, given in zip(questions, candidates, strict=True):
            rows = [self.corpus.row[name] for name in given.sources]
            found, scores = self.bm25.search_within(question.question, rows, len(rows))
            names = tuple(self.corpus.sources[int(row)].id for row in found)
            rankings.append(Ranking(question.id, names, tuple(map(float, scores))))
        return rankings


class FusedRetriever:
    """Reciprocal-rank fusion of several retrievers, each asked for `depth` sources."""

    def __init__(self, retrievers: Sequence[Any], depth: int = 100):
        self.retrievers, self.depth = retrievers, depth

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of every question, best first."""
        lists = [retriever.search(questions, self.depth) for retriever in self.retrievers]
        return reciprocal_rank_fusion(lists, top_k=top_k)


class Reranker:
    """VLP's source head over given sources."""

    def __init__(self, config: ConfigDict, corpus: Corpus, tokenizer: WordPiece, model: VLP):
        self.corpus, self.batch_size = corpus, config.inference.batch_size
        self._packer = make_packer(config, tokenizer, inference=True)
        self._reader = make_source_reader(config, corpus, tokenizer)
        graphdef, self._state = nnx.split(model)

        def relevance(state: Any, inputs: VLPInputs) -> jax.Array:  # -> [B] P(relevant)
            vlp = nnx.merge(graphdef, state)
            return jax.nn.softmax(vlp.source_logits(inputs))[:, 0]

        self._relevance = jax.jit(relevance)

    def score(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Ranking],
        hints: Sequence[str] | None = None,
    ) -> list[Ranking]:
        """The same sources by P(relevant), best first; equal ones keep their order.

        Args:
          hints: read behind each question: the title that a first hop found.
        """
        tell_of_cut_questions(questions, self._packer)
        texts = [question.question for question in questions]
        if hints is not None:
            texts = [f"{text} {hint}" for text, hint in zip(texts, hints, strict=True)]
        rows = [[self.corpus.row[name] for name in given.sources] for given in candidates]
        scores = np.zeros(sum(map(len, rows)), np.float32)  # all pairs end to end
        batches = rerank_pairs(self._reader, self._packer, texts, rows, batch_size=self.batch_size)
        with Progress("Scoring sources", len(scores), "pairs") as progress:
            for batch in batches:
                real = batch["weights"] > 0
                found = jax.device_get(self._relevance(self._state, vlp_inputs(batch)))
                scores[batch["index"][real]] = found[real]
                progress.advance(int(real.sum()))
        self._reader.tell_of_missing()
        return rescored(candidates, scores)


class TwoPassReranker:
    """VLP's relevance together with the retriever's similarity, over one or two hops.

    Ours, beyond the paper. Where the title of the retriever's best source is news, the other
    candidates are read again with that title behind the question: that finds the second source
    of a two-hop question.

    Args:
      weight: of the similarity; see `webqa.interpolate`.
      second_pass: candidates that are read in the second hop, those the retriever likes best.
    """

    def __init__(
        self,
        retriever: DenseRetriever,
        reranker: Reranker,
        weight: float = 0.0,
        second_pass: int = 10,
    ):
        self.retriever, self.reranker = retriever, reranker
        self.weight, self.second_pass = weight, second_pass

    def score(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Ranking],
        pixels: QuestionPixels = None,
    ) -> list[Ranking]:
        """The same sources by the interpolated probability, best first."""
        return webqa.combine(self.read(questions, candidates, pixels), self.weight)

    def read(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Ranking],
        pixels: QuestionPixels = None,
    ) -> list[webqa.Hop]:
        """VLP's relevance and the retriever's similarity in the first and the second hop."""
        first, second, hints = self.retriever.hops(questions, candidates, pixels)
        second = [webqa.top(ranking, self.second_pass) for ranking in second]
        again = [i for i, ranking in enumerate(second) if ranking.sources]
        relevance = list(second)  # no second hop, nothing to score
        scored = self.reranker.score(
            [questions[i] for i in again], [second[i] for i in again], [hints[i] for i in again]
        )
        for i, ranking in zip(again, scored, strict=True):
            relevance[i] = ranking
        return [
            webqa.Hop(self.reranker.score(questions, candidates), first),
            webqa.Hop(relevance, second),
        ]


class Reader:
    """VLP's answers: beam search with an appended [MASK] (WebQA section 5.2).

    Attributes:
      modality: of the sources that it was trained on alone (VLP_I, VLP_T), or None.
      max_pictures: how many pictures it sees at once.
    """

    def __init__(self, config: ConfigDict, corpus: Corpus, tokenizer: WordPiece, model: VLP):
        self.corpus, self.tokenizer, self.options = corpus, tokenizer, config.inference
        self.modality: Modality | None = config.data.get("modality")
        self._packer = make_packer(config, tokenizer, inference=True)
        self.max_pictures = self._packer.config.max_pictures
        self._reader = make_source_reader(config, corpus, tokenizer)
        self._graphdef, self._state = nnx.split(model)

    def answer(
        self,
        questions: Sequence[Question],
        cited: Sequence[Ranking],
        question_pixels: QuestionPixels = None,
    ) -> list[Prediction]:
        """Answers every question from its cited sources (none = from the question alone).

        Args:
          question_pixels: uint8[S, S, 3] of a picture that belongs to the question; it is
            read before the cited sources. By default the questions' own pictures.
        """
        tell_of_cut_questions(questions, self._packer)
        pictures = self._reader.pictures  # None: pictures are read as a detector's regions
        if question_pixels is None and pictures is not None:
            question_pixels = [pictures.question_pixels(question) for question in questions]
        batches = answer_inputs(
            self._reader,
            self._packer,
            [question.question for question in questions],
            [[self.corpus.row[name] for name in given.sources] for given in cited],
            batch_size=self.options.batch_size,
            question_pixels=question_pixels,
        )
        answers: list[Prediction | None] = [None] * len(questions)
        with Progress("Answering", len(questions), "questions") as progress:
            for batch in batches:
                real = batch["weights"] > 0
                result = beam_search(
                    self._graphdef,
                    self._state,
                    vlp_inputs(batch),
                    mask_id=self.tokenizer.mask_id,
                    sep_id=self.tokenizer.sep_id,
                    num_beams=self.options.num_beams,
                    max_new_tokens=self.options.max_new_tokens,
                    token_type=self._packer.config.segments[1],
                    length_penalty=self.options.length_penalty,
                    no_repeat_ngram=self.options.get("no_repeat_ngram", 0),
                    only_best=self.options.get("only_best", False),
                )
                tokens, scores = jax.device_get((result.tokens, result.scores))
                for row in np.flatnonzero(real):
                    place = int(batch["index"][row])
                    answers[place] = self._prediction(
                        questions[place].id, cited[place], tokens[row], scores[row]
                    )
                progress.advance(int(real.sum()))
        self._reader.tell_of_missing()
        return answers

    def check_length(self, question: str) -> None:
        """Raises UserError if the question has more tokens than the model takes."""
        if excess := self._packer.excess(question):
            raise UserError(
                f"the question has {excess} tokens more than the "
                f"{self._packer.config.max_question_tokens} that the model takes; ask it in fewer "
                "words."
            )

    def _prediction(
        self, question_id: str, cited: Ranking, tokens: np.ndarray, scores: np.ndarray
    ) -> Prediction:
        """tokens int[K, T], scores float[K], best first -> the answer with its beams."""
        if self.options.get("only_best", False):
            tokens, scores = tokens[:1], scores[:1]  # the others are not exact
        texts = [self.tokenizer.decode(until_end(beam, self.tokenizer)) for beam in tokens]
        beams = tuple((text, float(score)) for text, score in zip(texts, scores, strict=True))
        return Prediction(question_id, texts[0], cited.sources, cited.scores, beams)


def tell_of_cut_questions(questions: Sequence[Question], packer: Packer) -> None:
    """Says on stderr which questions have more tokens than the model takes: VLP cuts them."""
    cut = [question.id for question in questions if packer.excess(question.question)]
    if cut:
        print(
            f"{len(cut)} of {len(questions)} questions are longer than the "
            f"{packer.config.max_question_tokens} tokens that the model takes, and are cut: "
            f"{first_names(cut)}.",
            file=sys.stderr,
        )


def until_end(tokens: np.ndarray, tokenizer: WordPiece) -> list[int]:
    """Tokens before the first [SEP] or [PAD]."""
    kept = []
    for token in tokens.tolist():
        if token in (tokenizer.sep_id, tokenizer.pad_id):
            break
        kept.append(token)
    return kept


def vlp_inputs(batch: dict[str, np.ndarray]) -> VLPInputs:
    """The packed arrays of a batch on the device."""
    return VLPInputs(**{name: jax.device_put(batch[name]) for name in INPUT_FIELDS})
