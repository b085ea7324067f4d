"""Rerankers with late interaction: ColBERT and its like, by the vectors of tokens.

Questions and sources are encoded apart, each once a call, however many pairs they are in; what is
left of a pair is MaxSim (models/encoders/late_interaction.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, source_text
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.inference.reranker import PairScorer, ScoredPairs
from mmqa_jax.models.encoders.late_interaction import LateInteraction, TokenEncoder
from mmqa_jax.models.encoders.sentence_pooling import max_sim
from mmqa_jax.retrieval.late_interaction import Side, encoded, open_token_encoder, side_of
from mmqa_jax.retrieval.text_encoder import encoder_cost

_PAIRS = 256  # whose products are in memory at once


class LateInteractionReranker(PairScorer):
    """Ranks each question's candidates by MaxSim of the vectors of their tokens.

    A source is its title and text, a picture its caption. Scores are MaxSim's, no probabilities.

    Args:
      corpus: of the sources.
      model: the encoder.
      tokenizer: of the model.
      recipe: how its folder says that texts are read.
      batch_size: texts a call, over all devices, or `auto`.
    """

    def __init__(
        self,
        corpus: Corpus,
        model: TokenEncoder,
        tokenizer: Tokenizer,
        recipe: LateInteraction,
        *,
        batch_size: BatchSize = AUTO,
    ):
        self.corpus, self.tokenizer, self._mean = corpus, tokenizer, recipe.mean
        positions = model.config.positions
        self.question_side = side_of(recipe, tokenizer, positions, "query")
        self.source_side = side_of(recipe, tokenizer, positions, "document")
        longest = max(self.question_side.longest, self.source_side.longest)
        super().__init__(model, batch_size, encoder_cost(model.config, longest, "texts"))
        graphdef = self._graphdef
        self._encode = jax.jit(lambda state, *rows: nnx.merge(graphdef, state)(*rows))
        self._max_sim = jax.jit(_pairs)

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the batches."""
        if not any(ranking.sources for ranking in candidates):
            return
        of_question = np.repeat(np.arange(len(questions)), [len(c.sources) for c in candidates])
        rows = np.array([self.corpus.row[s] for c in candidates for s in c.sources], np.int64)
        distinct, of_source = np.unique(rows, return_inverse=True)  # of the corpus; of each pair
        asked, asked_mask = self.encode_questions([question.question for question in questions])
        order = np.argsort(of_source, kind="stable")
        begins = np.searchsorted(of_source[order], np.arange(len(distinct) + 1))
        texts = [source_text(self.corpus.sources[row]) for row in distinct]
        with Progress("Scoring sources", len(rows), "pairs") as progress:
            for chunk, vectors, mask in self._encoded(texts, self.source_side):
                pairs = [order[begins[source] : begins[source + 1]] for source in chunk]
                which = np.repeat(np.arange(len(chunk)), list(map(len, pairs)))
                indices = np.concatenate(pairs)
                scores = np.empty(len(indices), np.float32)
                for start in range(0, len(indices), _PAIRS):
                    part = slice(start, start + _PAIRS)
                    which_asked = of_question[indices[part]]
                    scores[part] = self._score(
                        asked[which_asked], asked_mask[which_asked], vectors, mask, which[part]
                    )
                yield ScoredPairs(indices, scores)
                progress.advance(len(indices))

    def encode_questions(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of questions, float32 [N, Q, D], and which are scored, bool [N, Q]."""
        return self._all(texts, self.question_side)

    def encode_sources(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of sources, float32 [N, L, D], and which are scored, bool [N, L]."""
        return self._all(texts, self.source_side)

    def _all(self, texts: Sequence[str], side: Side) -> tuple[np.ndarray, np.ndarray]:
        batches = [(chunk, fetch(v)[: len(chunk)], m) for chunk, v, m in self._encoded(texts, side)]
        length = max(vectors.shape[1] for _, vectors, _ in batches)
        shape = len(texts), length
        vectors = np.zeros((*shape, batches[0][1].shape[2]), np.float32)
        mask = np.zeros(shape, bool)
        for chunk, of_chunk, scored in batches:
            vectors[chunk, : of_chunk.shape[1]] = of_chunk
            mask[chunk, : of_chunk.shape[1]] = scored[: len(chunk)]
        return vectors, mask

    def _encoded(
        self, texts: Sequence[str], side: Side
    ) -> Iterator[tuple[np.ndarray, jax.Array, np.ndarray]]:
        """Batches: places in `texts`, vectors [B, L, D] and what is scored [B, L]; behind the
        places of a batch is padding."""
        placement = self.serving.placement
        for places, ids, mask, scored in encoded(texts, side, self.tokenizer, self.serving):
            local_rows = placement.rows(len(ids))
            put = placement.put((ids[local_rows], mask[local_rows]))
            vectors = placement.call(self._encode, self._state, *put)
            if side.pooling is not None:
                vectors, scored = _pooled(fetch(vectors), scored, side)
            yield places, vectors, scored

    def _score(
        self,
        asked: np.ndarray,
        asked_mask: np.ndarray,
        vectors: jax.Array,
        mask: np.ndarray,
        which: np.ndarray,
    ) -> np.ndarray:
        """Scores of pairs of questions and of the batch's sources `which`, in one program."""
        count, places = len(which), np.minimum(np.arange(_PAIRS), len(which) - 1)
        inputs = (asked[places], asked_mask[places], mask, which[places].astype(np.int32))
        if not vectors.is_fully_addressable:
            vectors = jnp.asarray(fetch(vectors))
        scores = np.asarray(self._max_sim(vectors, *inputs))[:count]
        return scores / np.maximum(asked_mask.sum(1), 1) if self._mean else scores


def _pairs(
    vectors: jax.Array, asked: jax.Array, asked_mask: jax.Array, mask: jax.Array, which: jax.Array
) -> jax.Array:
    return max_sim(asked, asked_mask, vectors[which], mask[which])


def open_late_interaction(
    folder: Path,
    corpus: Corpus,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> LateInteractionReranker:
    """The reranker of a published late-interaction encoder's folder over a corpus.

    Args:
      folder: of sentence-transformers, PyLate or Stanford's ColBERT.
      batch_size: texts a call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    return LateInteractionReranker(corpus, *open_token_encoder(folder, mesh), batch_size=batch_size)


def _pooled(vectors: np.ndarray, scored: np.ndarray, side: Side) -> tuple[jax.Array, np.ndarray]:
    """Texts' vectors [B, L, D], tokens that are alike merged, and which are scored, [B, L]."""
    merged, mask = np.zeros_like(vectors), np.zeros_like(scored)
    for row, of_text in enumerate(vectors):
        of_text = side.pooled(of_text[scored[row]])
        merged[row, : len(of_text)], mask[row, : len(of_text)] = of_text, True
    return jnp.asarray(merged), mask
