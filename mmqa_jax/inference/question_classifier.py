"""The trained modality classifier in use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32

from mmqa_jax.core.errors import check_several
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.serving import ServedModel
from mmqa_jax.data.schema import Modality
from mmqa_jax.data.tokenizers import Tokenizer, text_inputs
from mmqa_jax.models.encoders.heads import TextClassifier
from mmqa_jax.retrieval.modality import MODALITIES, without_quotes


@functools.lru_cache(maxsize=8)  # classifiers of one config share their programs
def make_probabilities(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted classifier: (state, ids, mask) -> float32 [B, classes]."""

    def probabilities(state: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.softmax(nnx.merge(graphdef, state)(ids, mask))

    return jax.jit(probabilities)


class QuestionClassifier(ServedModel):
    """Predicts the modality of the sources that a question needs.

    All batches have one size and one length, so that one program is compiled.

    Args:
      task: tasks.modality.QuestionModality, of the run.
      model: with the classes of MODALITIES.
      tokenizer: of the run.
    """

    def __init__(self, task: Any, model: TextClassifier, tokenizer: Tokenizer):
        self._tokenizer, self._length = tokenizer, task.batches.length
        super().__init__(model, task.inference.batch_size, task.cost())
        self._probabilities = make_probabilities(self._graphdef)

    def probabilities(self, texts: Sequence[str]) -> Float32[np.ndarray, "n 2"]:
        """The probability of each of MODALITIES."""
        check_several(texts, "the question classifier")
        tokens = self._tokenizer.encode_batch([without_quotes(text) for text in texts])
        results = np.zeros((len(tokens), len(MODALITIES)), np.float32)
        placement, size = self.serving.placement, self.serving.batch_size
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            padding = [[]] * (size - len(chunk))
            ids, mask, _ = text_inputs([*chunk, *padding], self._length, self._tokenizer)
            inputs = placement.put((ids, mask))
            batch = fetch(placement.call(self._probabilities, self._state, *inputs))
            results[start : start + len(chunk)] = batch[: len(chunk)]
        return results

    def predict(self, texts: Sequence[str]) -> list[Modality]:
        """The more likely modality of every question."""
        return [MODALITIES[best] for best in self.probabilities(texts).argmax(axis=1)]
