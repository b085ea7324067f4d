"""Fusion-in-Decoder in use: a reader of WebQA's interface, and of given passages.

As FiD's test_reader.py and KAT's evaluate_KAT.py: each passage is encoded with the question by
itself, and a T5's decoder reads all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.errors import check_questions
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import ServedModel
from mmqa_jax.data.batches.seq2seq import passage_arrays
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.decoding.t5_generate import beam_search
from mmqa_jax.models.t5.network import T5, Passages

Beams = tuple[tuple[str, float], ...]  # answers with their scores, best first


class FusionReader(ServedModel):
    """Answers questions in words from all of their sources at once.

    Args:
      task: tasks.fusion_in_decoder.FusionInDecoder, of the run.
      tokenizer: of the run.
    """

    def __init__(self, task: Any, corpus: Corpus, tokenizer: Any, model: T5):
        self.corpus, self.tokenizer, self.options = corpus, tokenizer, task.inference
        self._task = task
        self._silent = {model.config.pad, *tokenizer.end_ids}
        super().__init__(model, self.options.batch_size, task.cost(model.config))

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """Answers every question from its cited sources, or from the question alone if none.

        Of pictures the titles and captions are read. Sources beyond the task's `passages.count`
        stay cited and are not read.
        """
        check_questions(questions, "FusionReader.answer")
        batches = self.answer_batches(questions, cited)
        predictions = {index: prediction for batch in batches for index, prediction in batch}
        return [predictions[index] for index in range(len(questions))]

    def answer_batches(
        self, questions: Sequence[Question], cited: Sequence[Ranking]
    ) -> Iterator[list[tuple[int, Prediction]]]:
        """Yields (index of the question, its prediction) batch by batch."""
        passages = [
            [
                self._task.passage_of(self.corpus.sources[self.corpus.row[n]])
                for n in ranking.sources
            ]
            for ranking in cited
        ]
        count = self._task.passages.count
        for batch in self.read_batches(questions, passages):
            yield [
                (
                    index,
                    Prediction(
                        cited[index].question_id,
                        beams[0][0],
                        cited[index].sources,
                        cited[index].scores,
                        beams,
                        read=cited[index].sources[:count],
                    ),
                )
                for index, beams in batch
            ]

    def read(
        self, questions: Sequence[Question], passages: Sequence[Sequence[str]]
    ) -> list[Prediction]:
        """Answers every question from its passages, best first, in the formats of
        `data.formats.kat_knowledge`.
        """
        check_questions(questions, "FusionReader.read")
        batches = self.read_batches(questions, passages)
        beams_of = {index: beams for batch in batches for index, beams in batch}
        return [
            read_prediction(question, of_question, beams_of[index])
            for index, (question, of_question) in enumerate(zip(questions, passages, strict=True))
        ]

    def read_batches(
        self, questions: Sequence[Question], passages: Sequence[Sequence[str]]
    ) -> Iterator[list[tuple[int, Beams]]]:
        """Yields (index of the question, its answers) batch by batch."""
        placement, size = self.serving.placement, self.serving.batch_size
        rows = placement.rows(size)
        with Progress("Answering", len(questions), "questions") as progress:
            for start in range(0, len(questions), size):
                numbers = range(start, min(start + size, len(questions)))
                texts = [
                    self._task.encoded(self.tokenizer, questions[n].question, passages[n])[0]
                    for n in numbers
                ]
                arrays = passage_arrays(texts, self._task.size, size)
                inputs = placement.put(
                    Passages.of({name: array[rows] for name, array in arrays.items()})
                )
                result = placement.call(
                    beam_search,
                    self._graphdef,
                    self._state,
                    inputs,
                    end_id=self.tokenizer.end_ids[0],
                    num_beams=self.options.num_beams,
                    max_new_tokens=self.options.max_new_tokens,
                    length_penalty=self.options.length_penalty,
                )
                tokens, lengths, scores = fetch((result.tokens, result.lengths, result.scores))
                yield [
                    (number, self._texts(tokens[row], lengths[row], scores[row]))
                    for row, number in enumerate(numbers)
                ]
                progress.advance(len(numbers))

    def _texts(self, tokens: np.ndarray, lengths: np.ndarray, scores: np.ndarray) -> Beams:
        """tokens int[K, T], lengths int[K], scores float[K] -> answers, best first."""
        return tuple(
            (self._text(beam[:length].tolist()), float(score))
            for beam, length, score in zip(tokens, lengths, scores, strict=True)
        )

    def _text(self, tokens: Sequence[int]) -> str:
        """The text of an answer's tokens."""
        return self.tokenizer.decode([t for t in tokens if t not in self._silent]).strip()


def read_prediction(question: Question, passages: Sequence[str], beams: Beams) -> Prediction:
    """An answer from passages that are no sources: its trace has them."""
    return Prediction(question.id, beams[0][0], beams=beams, trace={"passages": list(passages)})
