"""Source selection at inference: VLP's source head on given sources (WebQA section 5.1)."""

import abc
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import check_questions
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import ServedModel
from mmqa_jax.data.batches.packing import Example, Packed, RawExample, batch, clean
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.tokenizers import Tokenizer, TokenTable, coins
from mmqa_jax.inference.batches import coin_ids, rerank_pairs, vlp_inputs, warn_truncated
from mmqa_jax.models.vlp.network import VLP, VLPInputs
from mmqa_jax.models.vlp.two_sided import QuestionStates, SourceMemory, TwoSidedVLP
from mmqa_jax.retrieval.rankings import rescored, to_rankings


class ScoredPairs(NamedTuple):
    """(question, candidate) pairs of one finished batch."""

    indices: np.ndarray  # int[N], into all candidates of all questions, concatenated
    scores: np.ndarray  # float32[N], P(relevant)


@functools.lru_cache(maxsize=8)  # rerankers of one config share their programs
def make_relevance(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted source head: (state, VLPInputs) -> float32 [B], P(relevant)."""

    def relevance(state: Any, inputs: VLPInputs) -> jax.Array:
        vlp = nnx.merge(graphdef, state)
        return jax.nn.softmax(vlp.source_logits(inputs))[:, 0]

    return jax.jit(relevance)


class PairScorer(ServedModel):
    """A model that scores pairs of a question and a source; `score_batches` gives the scores."""

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by P(relevant), best first; ties keep their order."""
        check_questions(questions, f"{type(self).__name__}.score")
        return rescored(candidates, gather(self.score_batches(questions, candidates), candidates))

    @abc.abstractmethod
    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the batches."""


class Reranker(PairScorer):
    """P(relevant) of given sources, with every pair encoded from scratch.

    `task`: tasks.rerank.Rerank, of the run.
    """

    def __init__(self, task: Any, corpus: Corpus, tokenizer: Tokenizer, model: VLP):
        self.corpus, self.options = corpus, task.inference
        self._packer = task.packer(tokenizer, inference=True)
        self._reader = task.source_reader(corpus, tokenizer, on_demand=True)
        super().__init__(model, self.options.batch_size, task.cost())
        self._relevance = make_relevance(self._graphdef)

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the batches."""
        warn_truncated(questions, self._packer)
        texts = [question.question for question in questions]
        rows = [[self.corpus.row[name] for name in ranking.sources] for ranking in candidates]
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
    scores = np.zeros(sum(len(ranking.sources) for ranking in candidates), np.float32)
    for scored in batches:
        scores[scored.indices] = scored.scores
    return scores


# Source selection that encodes each source once, for any number of questions (ours).
#
# The model is models.vlp.two_sided: a source's side of a pair is computed once per source, a
# question's side once per question, and what remains per pair is the work of a few tokens. So VLP
# itself can rank the whole collection (`search`), which WebQA's section 6.2 considers infeasible.
#
# Memory: all questions of a call are kept on every device; sources one block at a time, whose
# rows are split over the devices.


# Columns are cut to a multiple of these, so that few programs are compiled.
_SOURCE_COLUMNS, _QUESTION_COLUMNS = 16, 16
# Pairs of a dense block: with one joint layer a pair costs one token's work, else all its tokens'.
_PAIRS_ONE_LAYER, _PAIRS_MORE_LAYERS = 8192, 256
_CHUNK = 2  # single pairs at a time, as a multiple of the sources encoded at a time
_LONGEST = 1 << 30  # tokens: selects the bucket that truncates least


class SourceBlock(NamedTuple):
    """Sources encoded together."""

    rows: np.ndarray  # [S] corpus rows; those after the first `count` are padding
    count: int
    memory: SourceMemory


class QuestionGroup(NamedTuple):
    """Questions of similar length, encoded together."""

    indices: np.ndarray  # [Q] into the questions of a call
    states: QuestionStates


class CachedReranker(PairScorer):
    """A Reranker and, over the whole collection, a Retriever of papers.webqa.

    Args:
      task: tasks.rerank.Rerank, of the run; `inference.batch_size` sources are encoded at a time.
      pairs: that a device scores at a time in `search`; by default chosen for the model.
    """

    def __init__(
        self,
        task: Any,
        corpus: Corpus,
        tokenizer: Tokenizer,
        model: TwoSidedVLP,
        *,
        pairs: int | None = None,
    ):
        super().__init__(model, task.inference.batch_size, task.cost())
        self.corpus, graphdef = corpus, self._graphdef
        self._pairs = pairs or (
            _PAIRS_ONE_LAYER if model.sides.joint_layers == 1 else _PAIRS_MORE_LAYERS
        )
        self._always_truncate_tail = task.inference.always_truncate_tail
        self._packer = task.packer(tokenizer, inference=True)
        self._reader = task.source_reader(corpus, tokenizer)

        def log_odds(
            state: Any, sources: SourceMemory, questions: QuestionStates
        ) -> jax.Array:  # -> [Q, S]
            logits = nnx.merge(graphdef, state).pair_logits(sources, questions)
            return (logits[..., 0] - logits[..., 1]).T

        @jax.jit
        def of_pairs(
            state: Any,
            sources: SourceMemory,
            questions: QuestionStates,
            source: jax.Array,
            question: jax.Array,
        ) -> jax.Array:  # indices into sources and questions, [P] each -> P(relevant) [P]
            chosen = [
                jax.tree.map(lambda x, indices=indices: x[indices][:, None], side)
                for side, indices in ((sources, source), (questions, question))
            ]
            odds = jax.vmap(lambda *pair: log_odds(state, *pair)[0, 0])(*chosen)
            return jax.nn.sigmoid(odds)

        @jax.jit
        def best(
            state: Any,
            sources: SourceMemory,
            questions: QuestionStates,
            rows: jax.Array,
            best_so_far: tuple[jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array]:
            """Best log-odds and rows [Q, K], those so far and of sources at rows [S], -1: none."""
            odds = jnp.where(rows >= 0, log_odds(state, sources, questions), -jnp.inf)
            odds = jnp.concatenate([best_so_far[0], odds], axis=1)
            rows = jnp.concatenate(
                [best_so_far[1], jnp.broadcast_to(rows, (len(odds), len(rows)))], axis=1
            )
            odds, indices = jax.lax.top_k(odds, best_so_far[0].shape[1])
            return odds, jnp.take_along_axis(rows, indices, axis=1)

        def encode_sources(state: Any, inputs: VLPInputs) -> SourceMemory:
            return nnx.merge(graphdef, state).encode_sources(inputs)

        def encode_questions(state: Any, inputs: VLPInputs) -> QuestionStates:
            return nnx.merge(graphdef, state).encode_questions(inputs)

        self._of_pairs, self._best = of_pairs, best
        self._encode_sources, self._encode_questions = map(
            jax.jit, (encode_sources, encode_questions)
        )

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores, one block of sources at a time, each source encoded once."""
        groups = self._questions(questions)
        sizes = [len(ranking.sources) for ranking in candidates]
        rows = np.array(
            [self.corpus.row[n] for ranking in candidates for n in ranking.sources], int
        )
        question = np.repeat(np.arange(len(candidates)), sizes)
        group_of = np.zeros(len(rows), int)
        for number, group in enumerate(groups):
            group_of[np.isin(question, group.indices)] = number
        chunk_size = _CHUNK * self.serving.batch_size  # small: each pair has a copy of its source
        scores = np.zeros(len(rows), np.float32)  # all pairs, concatenated
        with Progress("Scoring sources", len(scores), "pairs") as progress:
            for block in self._blocks(np.unique(rows)):
                index_in_block = np.full(len(self.corpus), -1)
                index_in_block[block.rows[: block.count]] = np.arange(block.count)
                in_block = index_in_block[rows] >= 0
                for number, group in enumerate(groups):
                    members = np.flatnonzero(in_block & (group_of == number))
                    for pairs in _chunks(members, chunk_size):
                        relevance = self._call(
                            self._of_pairs,
                            block.memory,
                            group.states,
                            index_in_block[rows[pairs]],
                            np.searchsorted(group.indices, question[pairs]),
                        )
                        scores[pairs] = fetch(relevance)  # repeated pairs get equal scores
                yield ScoredPairs(np.flatnonzero(in_block), scores[in_block])
                progress.advance(int(in_block.sum()))
        self._reader.warn_missing()

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection by P(relevant), best first.

        Scores every question with every source, keeping only the best so far of each question.
        """
        groups = self._questions(questions)
        top_k = min(top_k, len(self.corpus))
        pairs = self._pairs * self.serving.placement.padded(1)
        size = max(1, min(pairs // self.serving.batch_size, len(questions)))
        parts = [
            QuestionGroup(group.indices[chunk], _chosen(group.states, chunk))
            for group in groups
            for chunk in _chunks(np.arange(len(group.indices)), min(size, len(group.indices)))
        ]
        shapes = [(len(part.indices), top_k) for part in parts]
        best = [
            jax.device_put((np.full(shape, -np.inf, np.float32), np.full(shape, -1)))
            for shape in shapes
        ]
        total = len(questions) * len(self.corpus)
        with Progress("Scoring all sources", total, "pairs") as progress:
            for block in self._blocks(np.arange(len(self.corpus))):
                rows = np.where(np.arange(len(block.rows)) < block.count, block.rows, -1)
                rows = jax.device_put(rows)
                for i, part in enumerate(parts):
                    best[i] = self._call(self._best, block.memory, part.states, rows, best[i])
                jax.block_until_ready(best)  # keeps the progress bar from running ahead
                progress.advance(len(questions) * block.count)
        self._reader.warn_missing()
        odds, rows = np.zeros((len(questions), top_k)), np.zeros((len(questions), top_k), int)
        for part, (best_odds, best_rows) in zip(parts, fetch(best), strict=True):
            odds[part.indices], rows[part.indices] = best_odds, best_rows
        order = np.lexsort((rows, -odds))  # ties in corpus order
        odds, rows = (np.take_along_axis(x, order, axis=1) for x in (odds, rows))
        relevance = 1 / (1 + np.exp(-odds))
        return to_rankings([q.id for q in questions], rows, relevance, self.corpus.ids)

    def _questions(self, questions: Sequence[Question]) -> list[QuestionGroup]:
        """Encodes all questions, grouped by length."""
        warn_truncated(questions, self._packer)
        texts = [clean(question.question) for question in questions]
        tokens = TokenTable(self._reader.tokenizer, texts)
        config = self._packer.config
        bucket = config.bucket_index(0, _LONGEST, 2)
        slots = config.buckets[bucket].pictures * config.slots_per_picture
        columns = np.minimum(tokens.lengths, config.max_question_tokens) + 2
        columns = -(-columns // _QUESTION_COLUMNS) * _QUESTION_COLUMNS
        groups: list[QuestionGroup] = []
        for longest in np.unique(columns):
            indices, encoded = np.flatnonzero(columns == longest), []
            for chunk in _chunks(indices, self.serving.batch_size):
                packed = [
                    self._pack(Example((), tokens[i]), bucket, questions[i].id) for i in chunk
                ]
                arrays = batch([_columns(packed_row, slots, longest) for packed_row in packed])
                encoded.append(self._call(self._encode_questions, self._put(arrays)))
            states = self.serving.placement.copied(_joined(encoded, len(indices)))
            groups.append(QuestionGroup(indices, states))
        return groups

    def _blocks(self, rows: np.ndarray) -> Iterator[SourceBlock]:
        """Encodes the sources at `rows`, in blocks of similar length and the same modality."""
        config, is_image = self._packer.config, self._reader.is_image[rows]
        size = self.serving.batch_size
        length = self._reader.text_length(rows[:, None])
        for picture in (False, True):
            members = np.flatnonzero(is_image == picture)
            members = members[np.argsort(length[members], kind="stable")]
            bucket = config.bucket_index(int(picture), _LONGEST, 2)
            for start in range(0, len(members), size):
                chunk = members[start : start + size]
                filled = np.resize(rows[chunk], size)
                self._reader.look_ahead(rows[chunk])
                packed = [self._source(int(row), bucket) for row in rows[chunk]]
                longest = max(
                    int(np.flatnonzero(columns["context_mask"])[-1]) + 1 for columns in packed
                )
                longest = -(-longest // _SOURCE_COLUMNS) * _SOURCE_COLUMNS
                packed = [_columns(columns, 0, longest) for columns in packed]
                arrays = batch([packed[i % len(packed)] for i in range(size)])
                memory = self._call(self._encode_sources, self._put(arrays))
                yield SourceBlock(filled, len(chunk), memory)

    def _put(self, arrays: Packed) -> VLPInputs:
        """A whole batch on the devices."""
        placement = self.serving.placement
        rows = placement.rows(self.serving.batch_size)
        return vlp_inputs({name: array[rows] for name, array in arrays.items()}, placement)

    def _call(self, function: Any, *arrays: Any) -> Any:
        return self.serving.placement.call(function, self._state, *arrays)

    def _source(self, row: int, bucket: int) -> Packed:
        example = self._reader.example(RawExample("", (self._reader.raw(row),)), (), ())
        return self._pack(example, bucket, self.corpus.sources[row].id)

    def _pack(self, example: Example, bucket: int, name: str) -> Packed:
        """The question or source called `name`."""
        rng = None if self._always_truncate_tail else coins(name)
        return self._packer.pack_for_selection(example, bucket, rng)


@functools.partial(jax.jit, static_argnums=1)
def _joined(encoded: Sequence[QuestionStates], count: int) -> QuestionStates:
    """Joins batches to their first `count` questions."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[:count], *encoded)


@jax.jit
def _chosen(states: QuestionStates, indices: jax.Array) -> QuestionStates:
    return jax.tree.map(lambda x: x[indices], states)


def _columns(packed: Packed, slots: int, longest: int) -> Packed:
    """A packed sequence without its first `slots` region slots, cut after `longest` columns."""
    width = len(packed["input_ids"])
    end = min(width - slots, longest)
    selected = np.r_[0, 1 + slots : slots + end]
    cut = {name: array[selected] for name, array in packed.items() if array.shape[:1] == (width,)}
    regions = {name: packed[name][slots:] for name in ("region_features", "region_positions")}
    return {**packed, **cut, **regions}


def _chunks(indices: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """`indices` in chunks of `size`; the last one is filled by repeating its own indices."""
    for start in range(0, len(indices), size):
        yield np.resize(indices[start : start + size], size)
