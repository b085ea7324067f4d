"""BEM (Bulian et al., EMNLP 2022): a BERT that says whether two answers mean the same.

It reads `[CLS] answer [SEP] reference [SEP] question [SEP]`; its second label is "equivalent". The
authors' weights are a model of TensorFlow Hub, which is not read here; those that are have
transformers' layout and two token types, 0 of the answer and 1 of the rest, as the model card of
kortukov/answer-equivalence-bem feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer, cut_longest
from mmqa_jax.models.encoders.heads import CrossEncoder
from mmqa_jax.models.encoders.text_encoders import load_pair_classifier, published_folder

_BUCKETS = (64, 128, 256, 512)  # tokens
_BATCH_TOKENS = 8192  # padding included
_THRESHOLD = 0.5


class BEM:
    """Judges answers: calling it tells whether each is equivalent to its reference, by a model with
    the labels different and equivalent.
    """

    def __init__(self, model: CrossEncoder, tokenizer: Tokenizer):
        longest = model.config.positions
        self._buckets = (*(size for size in _BUCKETS if size < longest), longest)
        self._tokenizer = tokenizer
        graphdef, self._state = nnx.split(model)
        self._probabilities = jax.jit(
            lambda state, *inputs: jax.nn.softmax(nnx.merge(graphdef, state)(*inputs))[:, 1]
        )

    def __call__(self, asked: Sequence[tuple[str, str, str]]) -> list[bool]:
        """Judges triples of (question, reference, answer); see evqa.Judge."""
        return (self.probabilities(asked) >= _THRESHOLD).tolist()

    def probabilities(self, asked: Sequence[tuple[str, str, str]]) -> Float32[np.ndarray, " n"]:
        """P(equivalent) of each (question, reference, answer).

        Beyond the model's positions the longer of the answer and what follows it is cut.
        """
        texts = list(dict.fromkeys(text for pair in asked for text in pair))
        ids = dict(zip(texts, self._tokenizer.encode_batch(texts), strict=True)) if texts else {}
        pairs = [self._pair(*(ids[text] for text in pair)) for pair in asked]
        lengths = [len(first) + len(second) for first, second in pairs]
        buckets = np.searchsorted(self._buckets, lengths)
        probabilities = np.zeros(len(asked), np.float32)
        with Progress("Judging answers", len(asked), "answers") as progress:
            for bucket in np.unique(buckets):
                size = self._buckets[bucket]
                rows, batch = np.flatnonzero(buckets == bucket), max(1, _BATCH_TOKENS // size)
                for start in range(0, len(rows), batch):
                    chunk = rows[start : start + batch]
                    inputs = self._inputs([pairs[row] for row in np.resize(chunk, batch)], size)
                    scores = fetch(self._probabilities(self._state, *jax.device_put(inputs)))
                    probabilities[chunk] = scores[: len(chunk)]
                    progress.advance(len(chunk))
        return probabilities

    def _pair(
        self, question: list[int], reference: list[int], answer: list[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens of type 0, and those of type 1."""
        cls, sep = self._tokenizer.cls_id, self._tokenizer.sep_id
        first, second = [cls, *answer, sep], [*reference, sep, *question, sep]
        return cut_longest(first, second, self._buckets[-1])

    def _inputs(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, mask and token types [B, length]."""
        ids = np.full((len(pairs), length), self._tokenizer.pad_id, np.int32)
        mask, types = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.int32)
        for row, (first, second) in enumerate(pairs):
            end = len(first) + len(second)
            ids[row, :end], mask[row, :end] = [*first, *second], True
            types[row, len(first) : end] = 1
        return ids, mask, types


def open_bem(model: str, flag: str = "--bem") -> BEM:
    """Opens BEM by its folder, or by ORG/NAME in the Hugging Face cache; messages name `flag`."""
    folder = published_folder(model, flag)
    if folder is None:
        raise UserError(
            f"{flag}={model}: holds no model of transformers; name BEM in that layout, such as "
            "kortukov/answer-equivalence-bem."
        )
    what = "different and equivalent answers"
    bert = load_pair_classifier(folder, 2, what)
    return BEM(bert, load_encoder_tokenizer(folder, bert.config.vocab_size))
