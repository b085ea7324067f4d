"""Source selection at inference: VLP's source head on given sources (WebQA section 5.1)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.arguments import check_questions
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import serve
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.tokenizers import WordPiece
from mmqa_jax.inference.batches import coin_ids, rerank_pairs, vlp_inputs, warn_truncated
from mmqa_jax.models.vlp import VLP, VLPInputs
from mmqa_jax.retrieval.rankings import rescored


class ScoredPairs(NamedTuple):
    """(question, candidate) pairs of one finished batch.

    Attributes:
      indices: int[N], into all candidates of all questions, concatenated.
      scores: float32[N], P(relevant).
    """

    indices: np.ndarray
    scores: np.ndarray


@functools.lru_cache(maxsize=8)  # rerankers of one config share their programs
def make_relevance(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted source head: (state, VLPInputs) -> float32 [B], P(relevant)."""

    def relevance(state: Any, inputs: VLPInputs) -> jax.Array:
        vlp = nnx.merge(graphdef, state)
        return jax.nn.softmax(vlp.source_logits(inputs))[:, 0]

    return jax.jit(relevance)


class Reranker:
    """P(relevant) of given sources, with every pair encoded from scratch.

    Args:
      task: tasks.rerank.Rerank, of the run.
      model: may be abstract (nnx.eval_shape) if `use` gives the parameters.

    Attributes:
      serving: its devices and batches.
    """

    def __init__(self, task: Any, corpus: Corpus, tokenizer: WordPiece, model: VLP):
        self.corpus, self.options = corpus, task.inference
        self._packer = task.packer(tokenizer, inference=True)
        self._reader = task.source_reader(corpus, tokenizer, on_demand=True)
        graphdef, self._state = nnx.split(model)
        self._cost = task.cost()
        self.serving = serve(self.options.batch_size, self._cost, self._state)
        self._relevance = make_relevance(graphdef)

    def use(self, model: VLP) -> None:
        """Continues with the parameters of another model of the same config; compiles nothing."""
        _, self._state = nnx.split(model)
        given = self.options.batch_size
        self.serving = serve(given, self._cost, self._state, beside_training=True)

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by P(relevant), best first; ties keep their order."""
        check_questions(questions, "Reranker.score")
        return rescored(candidates, gather(self.score_batches(questions, candidates), candidates))

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the batches."""
        warn_truncated(questions, self._packer)
        texts = [question.question for question in questions]
        rows = [[self.corpus.row[name] for name in given.sources] for given in candidates]
        placement, batch_size = self.serving.placement, self.serving.batch_size
        batches = rerank_pairs(
            self._reader,
            self._packer,
            texts,
            rows,
            batch_size=batch_size,
            coin_ids=coin_ids(questions, self.options),
            serving=self.serving,
        )
        with Progress("Scoring sources", sum(map(len, rows)), "pairs") as progress:
            for batch in batches:
                real = batch["weights"] > 0
                inputs = vlp_inputs(batch, placement)
                scores = fetch(placement.call(self._relevance, self._state, inputs))
                yield ScoredPairs(batch["index"][real], scores[real])
                progress.advance(int(real.sum()))
        self._reader.warn_missing()


def gather(batches: Iterator[ScoredPairs], candidates: Sequence[Ranking]) -> np.ndarray:
    """Scores float32[N] of all candidates of all questions, concatenated."""
    scores = np.zeros(sum(len(given.sources) for given in candidates), np.float32)
    for batch in batches:
        scores[batch.indices] = batch.scores
    return scores
