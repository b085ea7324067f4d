"""Published rerankers of pairs: ms-marco MiniLM, bge-reranker, Qwen3-Reranker and their like.

What reads pictures too, Qwen3-VL-Reranker, is in vlm_reranker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32

from mmqa_jax.core.arguments import check_questions
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh, serve
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.encoder_tokenizer import EncoderTokenizer, load_encoder_tokenizer
from mmqa_jax.data.schema import Question, Ranking, source_text
from mmqa_jax.inference.reranker import ScoredPairs, gather
from mmqa_jax.inference.vlm_reranker import VLMReranker, open_vlm_reranker
from mmqa_jax.inference.yes_no_prompt import YesNoPairs, read_yes_no
from mmqa_jax.models.cross_encoder import CrossEncoder
from mmqa_jax.models.decoder_families import FAMILIES as DECODERS
from mmqa_jax.models.modernbert import ModernBertCrossEncoder
from mmqa_jax.models.text_decoder import YesNoDecoder
from mmqa_jax.retrieval.embedder import rows_of_length
from mmqa_jax.retrieval.rankings import rescored
from mmqa_jax.retrieval.text_encoder import encoder_cost, length_buckets
from mmqa_jax.weights.sentence_pooling import read_pair_length
from mmqa_jax.weights.text_encoders import (
    check_padding,
    is_classifier,
    load_cross_encoder,
    load_yes_no,
    model_type_of,
    read_decoder_config,
)
from mmqa_jax.weights.vlm_encoders import FAMILY as VLM


class CrossEncoderReranker:
    """Scores each question's candidates by a model that reads question and source together.

    A source is its title and text, a picture its caption. Pairs are padded to the smallest bucket
    that fits them; of longer pairs the longer text is cut.

    Args:
      corpus: of the sources.
      model: gives a logit of each pair.
      tokenizer: of the model; what makes prompts of pairs for a decoder.
      longest: tokens of a pair, special tokens included; None: as many as the model takes.
      batch_size: pairs a call, over all devices, or `auto`.

    Attributes:
      serving: its devices and batches.
    """

    def __init__(
        self,
        corpus: Corpus,
        model: CrossEncoder | ModernBertCrossEncoder | YesNoDecoder,
        tokenizer: EncoderTokenizer | YesNoPairs,
        *,
        longest: int | None = None,
        batch_size: BatchSize = AUTO,
    ):
        self.corpus, self.tokenizer = corpus, tokenizer
        self._buckets = length_buckets(longest, model.config.positions)
        self._has_types = isinstance(model, CrossEncoder) and model.config.types > 1
        graphdef, self._state = nnx.split(model)
        cost = encoder_cost(model.config, self._buckets[-1], "pairs")
        self.serving = serve(batch_size, cost, self._state)
        self._relevance = jax.jit(
            lambda state, *inputs: jax.nn.sigmoid(nnx.merge(graphdef, state)(*inputs))
        )

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by P(relevant), best first; ties keep their order."""
        check_questions(questions, "CrossEncoderReranker.score")
        return rescored(candidates, gather(self.score_batches(questions, candidates), candidates))

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the batches."""
        rows = [[self.corpus.row[name] for name in given.sources] for given in candidates]
        pairs = [
            (question.question, source_text(self.corpus.sources[row]))
            for question, own in zip(questions, rows, strict=True)
            for row in own
        ]
        yield from self._scored(pairs)

    def relevance(self, pairs: Sequence[tuple[str, str]]) -> Float32[np.ndarray, " n"]:
        """P(relevant) of pairs (question, text): the sigmoid of the model's logit."""
        scores = np.zeros(len(pairs), np.float32)
        for batch in self._scored(pairs):
            scores[batch.indices] = batch.scores
        return scores

    def _scored(self, pairs: Sequence[tuple[str, str]]) -> Iterator[ScoredPairs]:
        tokens = self.tokenizer.encode_pairs(pairs)
        lengths = [self.tokenizer.pair_length(*map(len, pair)) for pair in tokens]
        buckets = np.searchsorted(self._buckets, np.minimum(lengths, self._buckets[-1]))
        with Progress("Scoring sources", len(pairs), "pairs") as progress:
            for number in np.unique(buckets):
                members = np.flatnonzero(buckets == number)
                most = rows_of_length(self.serving, self._buckets[number])
                for start in range(0, len(members), most):
                    chunk = members[start : start + most]
                    batch = self._batch([tokens[i] for i in chunk], self._buckets[number])
                    placement = self.serving.placement
                    own = placement.rows(len(batch[0]))
                    put = placement.put(tuple(array[own] for array in batch))
                    found = fetch(placement.call(self._relevance, self._state, *put))
                    yield ScoredPairs(chunk, found[: len(chunk)])
                    progress.advance(len(chunk))

    def _batch(
        self, tokens: Sequence[tuple[list[int], ...]], length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, mask and token types [B, length] of pairs; the last pair fills the batch."""
        size = min(self.serving.size_for(len(tokens)), rows_of_length(self.serving, length))
        ids = np.full((size, length), self.tokenizer.pad_id, np.int32)
        mask, types = np.zeros((size, length), bool), np.zeros((size, length), np.int32)
        for row in range(size):
            own, of_type = self.tokenizer.pair(*tokens[min(row, len(tokens) - 1)], length)
            ids[row, : len(own)], mask[row, : len(own)] = own, True
            if self._has_types:
                types[row, : len(own)] = of_type
        return ids, mask, types


def open_cross_encoder(
    folder: Path,
    corpus: Corpus,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> CrossEncoderReranker | VLMReranker:
    """The reranker of a published cross-encoder's folder over a corpus.

    Or of a Qwen3-Reranker's, or of a Qwen3-VL-Reranker's, which sees pictures.

    Args:
      folder: of transformers.
      batch_size: pairs a call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    kind = model_type_of(folder)
    if kind == VLM:
        return open_vlm_reranker(folder, corpus, batch_size=batch_size, mesh=mesh)
    if kind in DECODERS and not is_classifier(folder):
        config = read_decoder_config(folder)
        tokenizer = load_encoder_tokenizer(folder, config.vocab_size, pairs=False)
        prompt = read_yes_no(folder, kind, tokenizer)
        model = load_yes_no(folder, prompt.yes, prompt.no, loading_mesh(mesh))
        pairs: EncoderTokenizer | YesNoPairs = YesNoPairs(tokenizer, prompt)
        longest: int | None = prompt.longest
    else:
        model = load_cross_encoder(folder, loading_mesh(mesh))
        pairs = load_encoder_tokenizer(folder, model.config.vocab_size)
        check_padding(folder, pairs.pad_id)
        longest = read_pair_length(folder) or pairs.max_tokens
    return CrossEncoderReranker(corpus, model, pairs, longest=longest, batch_size=batch_size)
