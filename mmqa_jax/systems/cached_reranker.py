"""Source selection with sources that are read once, for any number of questions (ours).

The model is models.two_sided_vlp: what a pair needs of its source is computed once per source,
what it needs of its question once per question, and the rest is a few tokens' work. So the whole
collection can be ranked by VLP itself (`search`), which WebQA's section 6.2 gives up.

Memory: all questions of a call are held on the device, sources a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.examples import RawExample
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.sequences import Example, Packed, batch, clean
from mmqa_jax.data.tokenizers import TokenTable, WordPiece
from mmqa_jax.models.two_sided_vlp import QuestionStates, SourceMemory, TwoSidedVLP
from mmqa_jax.models.vlp import VLPInputs
from mmqa_jax.retrieval.rankings import rescored, to_rankings
from mmqa_jax.systems.parts import tell_of_cut_questions, vlp_inputs
from mmqa_jax.systems.webqa import Reranker
from mmqa_jax.training.recipes import make_packer, make_source_reader

# Columns are cut to a multiple of these, so that few programs are compiled.
_SOURCE_COLUMNS, _QUESTION_COLUMNS = 16, 16
# Pairs of a dense block: with one joint layer a pair is one token's work, else all its tokens'.
_ALONE, _TOGETHER = 8192, 256
_CHUNK = 2  # single pairs at a time, as a multiple of the sources that are encoded at a time
_LONGEST = 1 << 30  # tokens: asks for the bucket that cuts least


class SourceBlock(NamedTuple):
    """Sources encoded together."""

    rows: np.ndarray  # [S] corpus rows; those behind the first `count` only fill the block
    count: int
    memory: SourceMemory


class Asked(NamedTuple):
    """Questions of like length, encoded together."""

    places: np.ndarray  # [Q] places in the questions of a call
    states: QuestionStates


class CachedReranker:
    """A Reranker and, over the whole collection, a Retriever of systems.webqa.

    Args:
      config: of the rerank run; `inference.batch_size` sources are encoded at a time.
      pairs: computed at a time in `search`; None is a number that suits the model.
    """

    def __init__(
        self,
        config: ConfigDict,
        corpus: Corpus,
        tokenizer: WordPiece,
        model: TwoSidedVLP,
        *,
        pairs: int | None = None,
    ):
        self.corpus, self.batch_size = corpus, config.inference.batch_size
        self._pairs = pairs or (_ALONE if model.sides.joint_layers == 1 else _TOGETHER)
        self._packer = make_packer(config, tokenizer, inference=True)
        self._reader = make_source_reader(config, corpus, tokenizer)
        graphdef, self._state = nnx.split(model)

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
        ) -> jax.Array:  # places in sources and questions, [P] each -> P(relevant) [P]
            chosen = [
                jax.tree.map(lambda x, places=places: x[places][:, None], side)
                for side, places in ((sources, source), (questions, question))
            ]
            odds = jax.vmap(lambda *pair: log_odds(state, *pair)[0, 0])(*chosen)
            return jax.nn.sigmoid(odds)

        @jax.jit
        def best(
            state: Any,
            sources: SourceMemory,
            questions: QuestionStates,
            rows: jax.Array,
            kept: tuple[jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array]:
            """The best of `kept`, log-odds and rows [Q, K], and sources at rows [S], -1 = none."""
            odds = jnp.where(rows >= 0, log_odds(state, sources, questions), -jnp.inf)
            odds = jnp.concatenate([kept[0], odds], axis=1)
            rows = jnp.concatenate(
                [kept[1], jnp.broadcast_to(rows, (len(odds), len(rows)))], axis=1
            )
            odds, places = jax.lax.top_k(odds, kept[0].shape[1])
            return odds, jnp.take_along_axis(rows, places, axis=1)

        def encode_sources(state: Any, inputs: VLPInputs) -> SourceMemory:
            return nnx.merge(graphdef, state).encode_sources(inputs)

        def encode_questions(state: Any, inputs: VLPInputs) -> QuestionStates:
            return nnx.merge(graphdef, state).encode_questions(inputs)

        self._of_pairs, self._best = of_pairs, best
        self._encode_sources, self._encode_questions = map(
            jax.jit, (encode_sources, encode_questions)
        )

    def score(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Ranking],
        hints: Sequence[str] | None = None,
    ) -> list[Ranking]:
        """The same sources by P(relevant), best first; equal ones keep their order.

        Each source is encoded once, however many questions have it among their candidates.

        Args:
          hints: read behind each question: the title that a first hop found.
        """
        groups = self._questions(questions, hints)
        sizes = [len(given.sources) for given in candidates]
        rows = np.array([self.corpus.row[n] for given in candidates for n in given.sources], int)
        question = np.repeat(np.arange(len(candidates)), sizes)
        group_of = np.zeros(len(rows), int)
        for number, group in enumerate(groups):
            group_of[np.isin(question, group.places)] = number
        together = _CHUNK * self.batch_size  # few: each pair has a copy of its source
        scores = np.zeros(len(rows), np.float32)  # all pairs end to end
        with Progress("Scoring sources", len(scores), "pairs") as progress:
            for block in self._blocks(np.unique(rows)):
                place = np.full(len(self.corpus), -1)  # in the block
                place[block.rows[: block.count]] = np.arange(block.count)
                here = place[rows] >= 0
                for number, group in enumerate(groups):
                    for pairs in _chunks(np.flatnonzero(here & (group_of == number)), together):
                        found = self._of_pairs(
                            self._state,
                            block.memory,
                            group.states,
                            place[rows[pairs]],
                            np.searchsorted(group.places, question[pairs]),
                        )
                        scores[pairs] = np.asarray(found)  # a repeated pair has the same score
                progress.advance(int(here.sum()))
        self._reader.tell_of_missing()
        return rescored(candidates, scores)

    def search(
        self, questions: Sequence[Question], top_k: int, hints: Sequence[str] | None = None
    ) -> list[Ranking]:
        """The `top_k` sources of the whole collection by P(relevant), best first.

        Every question with every source; only the best so far of each question are kept.
        """
        groups = self._questions(questions, hints)
        top_k = min(top_k, len(self.corpus))
        together = max(1, min(self._pairs // self.batch_size, len(questions)))
        parts = [
            Asked(group.places[some], jax.tree.map(lambda x, some=some: x[some], group.states))
            for group in groups
            for some in _chunks(np.arange(len(group.places)), min(together, len(group.places)))
        ]
        nothing = jnp.full((together, top_k), -jnp.inf), jnp.full((together, top_k), -1)
        kept = [jax.tree.map(lambda x, part=part: x[: len(part.places)], nothing) for part in parts]
        total = len(questions) * len(self.corpus)
        with Progress("Scoring all sources", total, "pairs") as progress:
            for block in self._blocks(np.arange(len(self.corpus))):
                rows = np.where(np.arange(len(block.rows)) < block.count, block.rows, -1)
                rows = jax.device_put(rows)
                for i, part in enumerate(parts):
                    kept[i] = self._best(self._state, block.memory, part.states, rows, kept[i])
                jax.block_until_ready(kept)  # or the progress runs ahead of the work
                progress.advance(len(questions) * block.count)
        self._reader.tell_of_missing()
        odds, rows = np.zeros((len(questions), top_k)), np.zeros((len(questions), top_k), int)
        for part, (some_odds, some_rows) in zip(parts, jax.device_get(kept), strict=True):
            odds[part.places], rows[part.places] = some_odds, some_rows
        order = np.lexsort((rows, -odds))  # equal ones in the corpus's order
        odds, rows = (np.take_along_axis(x, order, axis=1) for x in (odds, rows))
        relevance = 1 / (1 + np.exp(-odds))
        ids = [source.id for source in self.corpus.sources]
        return to_rankings([q.id for q in questions], rows, relevance, ids)

    def _questions(self, questions: Sequence[Question], hints: Sequence[str] | None) -> list[Asked]:
        """All questions, encoded, those of like length together."""
        tell_of_cut_questions(questions, self._packer)
        texts = [clean(question.question) for question in questions]
        if hints:
            texts = [clean(f"{text} {hint}") for text, hint in zip(texts, hints, strict=True)]
        tokens = TokenTable(self._reader.tokenizer, texts)
        config = self._packer.config
        bucket = config.bucket_index(0, _LONGEST, 2)
        slots = config.buckets[bucket].pictures * config.slots_per_picture
        columns = np.minimum(tokens.lengths, config.max_question_tokens) + 2
        columns = -(-columns // _QUESTION_COLUMNS) * _QUESTION_COLUMNS
        groups = []
        for longest in np.unique(columns):
            places, encoded = np.flatnonzero(columns == longest), []
            for some in _chunks(places, self.batch_size):
                packed = [
                    self._packer.pack_for_selection(Example((), tokens[i]), bucket) for i in some
                ]
                arrays = batch([_columns(one, slots, longest) for one in packed])
                encoded.append(self._encode_questions(self._state, vlp_inputs(arrays)))
            whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *encoded)
            count = len(places)
            groups.append(Asked(places, jax.tree.map(lambda x, n=count: x[:n], whole)))
        return groups

    def _blocks(self, rows: np.ndarray) -> Iterator[SourceBlock]:
        """The sources at `rows`, encoded, those of like length and modality together."""
        config, is_image = self._packer.config, self._reader.is_image[rows]
        length = self._reader.text_length(rows[:, None])
        for picture in (False, True):
            members = np.flatnonzero(is_image == picture)
            members = members[np.argsort(length[members], kind="stable")]
            bucket = config.bucket_index(int(picture), _LONGEST, 2)
            for start in range(0, len(members), self.batch_size):
                some = members[start : start + self.batch_size]
                filled = np.resize(rows[some], self.batch_size)
                packed = [self._source(int(row), bucket) for row in rows[some]]
                longest = max(int(np.flatnonzero(one["context_mask"])[-1]) + 1 for one in packed)
                longest = -(-longest // _SOURCE_COLUMNS) * _SOURCE_COLUMNS
                packed = [_columns(one, 0, longest) for one in packed]
                arrays = batch([packed[i % len(packed)] for i in range(self.batch_size)])
                memory = self._encode_sources(self._state, vlp_inputs(arrays))
                yield SourceBlock(filled, len(some), memory)

    def _source(self, row: int, bucket: int) -> Packed:
        raw = RawExample("", (self._reader.raw(row),))
        return self._packer.pack_for_selection(self._reader.example(raw, (), ()), bucket)


def _columns(packed: Packed, slots: int, longest: int) -> Packed:
    """A packed sequence without its first `slots` region slots, cut behind `longest` columns."""
    width = len(packed["input_ids"])
    end = min(width - slots, longest)
    kept = np.r_[0, 1 + slots : slots + end]
    cut = {name: array[kept] for name, array in packed.items() if array.shape[:1] == (width,)}
    regions = {name: packed[name][slots:] for name in ("region_features", "region_positions")}
    return {**packed, **cut, **regions}


def _chunks(places: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """`places` in pieces of `size`, the last filled up with its first."""
    for start in range(0, len(places), size):
        yield np.resize(places[start : start + size], size)


def rank_all(reranker: Reranker, questions: Sequence[Question], top_k: int) -> list[Ranking]:
    """The whole collection's `top_k` sources of every question by P(relevant).

    Raises:
      UserError: the model reads every pair anew, which would take years.
    """
    if not isinstance(reranker, CachedReranker):
        raise UserError(
            "--candidates=all: this model reads every pair of question and source anew; train one "
            "with model.joint_layers (configs/atlas/rerank_cached.py), or give a file of `mmqa "
            "search`."
        )
    return reranker.search(questions, top_k)
