"""A trained MCAN in use: answer candidates, and the latents by which examples are chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32

from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import ServedModel
from mmqa_jax.data.answers import AnswerVocabulary
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question

CANDIDATES = 10  # Prophet's CANDIDATE_NUM


@functools.lru_cache(maxsize=8)  # models of one config share their programs
def make_answer_scores(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted MCAN: (state, question_ids, image) -> the answers' scores [B, V], latents."""

    def run(state: Any, question_ids: jax.Array, image: Any) -> tuple[jax.Array, ...]:
        module = nnx.merge(graphdef, state)
        latent = module.latent(question_ids, image)
        return jax.nn.sigmoid(module.answer_logits(latent).astype(jnp.float32)), latent

    return jax.jit(run)


class VQAModel(ServedModel):
    """Holds the parameters and the jitted function; all batches have one size and one length.

    Args:
      task: tasks.vqa.VQA, of the run.
      tokenizer: of the run.
      answers: of the run.
      corpus: of the questions; only a model on patches needs it.
    """

    def __init__(
        self,
        task: Any,
        tokenizer: Any,
        answers: AnswerVocabulary,
        model: nnx.Module,
        corpus: Corpus | None = None,
    ):
        self.task, self.answers = task, answers
        self.features = task.open_pictures(corpus)
        longest = max(task.batches.lengths)
        self._inputs = task.inputs(tokenizer, self.features, longest)
        super().__init__(model, task.inference.batch_size, task.cost())
        self._run = make_answer_scores(self._graphdef)

    def candidates(
        self, questions: Sequence[Question], count: int = CANDIDATES
    ) -> dict[str, list[tuple[str, float]]]:
        """question_id -> the `count` answers with the highest scores, best first."""
        return self.candidates_and_latents(questions, count)[0]

    def candidates_and_latents(
        self, questions: Sequence[Question], count: int = CANDIDATES
    ) -> tuple[dict[str, list[tuple[str, float]]], Float32[np.ndarray, "n D"]]:
        """Returns what `candidates` does, and the fused feature of every question."""
        candidates: dict[str, list[tuple[str, float]]] = {}
        latents = [np.zeros((0, self.latent_size), np.float32)]
        with Progress("Answer candidates", len(questions), "questions") as progress:
            for batch, scores, latent in self._batches(questions):
                for question, row in zip(batch, scores, strict=True):
                    best = np.argsort(-row, kind="stable")[:count]
                    candidates[question.id] = [
                        (self.answers.answers[i], float(row[i])) for i in best
                    ]
                latents.append(latent)
                progress.advance(len(batch))
        return candidates, np.concatenate(latents)

    @property
    def latent_size(self) -> int:
        """Values of a latent."""
        return self.task.model.fusion_config().flat_out

    def _batches(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[Sequence[Question], np.ndarray, np.ndarray]]:
        placement, size = self.serving.placement, self.serving.batch_size
        rows = placement.rows(size)
        for start in range(0, len(questions), size):
            batch = questions[start : start + size]
            filled = [*batch, *[batch[-1]] * (size - len(batch))]
            arrays = self._inputs([filled[row] for row in rows])
            inputs = placement.put((arrays["question_ids"], arrays["image"]))
            scores, latents = map(fetch, placement.call(self._run, self._state, *inputs))
            yield batch, scores[: len(batch)], latents[: len(batch)]
