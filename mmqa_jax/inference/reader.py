"""Answering at inference: VLP's beam search with an appended [MASK] (WebQA section 5.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality, Prediction, Question, Ranking
from mmqa_jax.data.tokenizers import WordPiece
from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.inference.batches import answer_inputs
from mmqa_jax.inference.from_config import make_packer, make_source_reader
from mmqa_jax.inference.inputs import vlp_inputs, warn_truncated
from mmqa_jax.models.vlp import VLP


class Reader:
    """Answers questions in words from cited sources.

    Attributes:
      modality: of the sources it was trained on, if only one (VLP_I, VLP_T), else None.
      max_pictures: the most pictures that it takes at once.
    """

    def __init__(self, config: ConfigDict, corpus: Corpus, tokenizer: WordPiece, model: VLP):
        self.corpus, self.tokenizer, self.options = corpus, tokenizer, config.inference
        self.modality: Modality | None = config.data.get("modality")
        self._packer = make_packer(config, tokenizer, inference=True)
        self.max_pictures = self._packer.config.max_pictures
        self._reader = make_source_reader(config, corpus, tokenizer, on_demand=True)
        self._graphdef, self._state = nnx.split(model)

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """Answers every question from its cited sources, or from the question alone if none.

        A picture that belongs to the question (`Question.image`) comes before the sources.
        Cited sources that the reader leaves out (see `readable`) stay cited.
        """
        answers: list[Prediction | None] = [None] * len(questions)
        for batch in self.answer_batches(questions, cited):
            for index, prediction in batch:
                answers[index] = prediction
        return answers

    def answer_batches(
        self, questions: Sequence[Question], cited: Sequence[Ranking]
    ) -> Iterator[list[tuple[int, Prediction]]]:
        """Yields (index of the question, its prediction) batch by batch."""
        warn_truncated(questions, self._packer)
        pictures = self._reader.pictures  # None: the model takes a detector's regions
        pixels = (
            [pictures.question_pixels(question) for question in questions]
            if pictures is not None
            else None
        )
        readable = [self.readable(ranking) for ranking in cited]
        batches = answer_inputs(
            self._reader,
            self._packer,
            [question.question for question in questions],
            [[self.corpus.row[name] for name in names] for names in readable],
            batch_size=self.options.batch_size,
            question_pixels=pixels,
        )
        with Progress("Answering", len(questions), "questions") as progress:
            for batch in batches:
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
                real = np.flatnonzero(batch["weights"] > 0)
                indices = batch["index"][real].tolist()
                yield [
                    (i, self._prediction(cited[i], tokens[row], scores[row]))
                    for i, row in zip(indices, real, strict=True)
                ]
                progress.advance(len(real))
        self._reader.warn_missing()

    def readable(self, cited: Ranking) -> tuple[str, ...]:
        """The cited sources that VLP takes: all snippets, the first `max_pictures` pictures.

        Further pictures are left out with their captions (webqa_loader.py,
        Preprocess4webqaDecoder); so is the other modality if the reader was trained on one only.
        """
        kept, shown = [], 0
        for name in cited.sources:
            kind = self.corpus.sources[self.corpus.row[name]].modality
            shown += kind == "image"
            if (kind == "text" or shown <= self.max_pictures) and self.modality in (None, kind):
                kept.append(name)
        return tuple(kept)

    def check_length(self, question: str) -> None:
        """Raises UserError if the question has more tokens than the model takes."""
        if excess := self._packer.excess(question):
            raise UserError(
                f"the question has {excess} tokens more than the "
                f"{self._packer.config.max_question_tokens} that the model takes; shorten it."
            )

    def _prediction(self, cited: Ranking, tokens: np.ndarray, scores: np.ndarray) -> Prediction:
        """tokens int[K, T], scores float[K], best first -> the answer with its beams."""
        if self.options.get("only_best", False):
            tokens, scores = tokens[:1], scores[:1]  # the others are not exact
        texts = [self.tokenizer.decode(_until_end(beam, self.tokenizer)) for beam in tokens]
        beams = tuple((text, float(score)) for text, score in zip(texts, scores, strict=True))
        return Prediction(cited.question_id, texts[0], cited.sources, cited.scores, beams)


def _until_end(tokens: np.ndarray, tokenizer: WordPiece) -> list[int]:
    """Tokens before the first [SEP] or [PAD]."""
    kept = []
    for token in tokens.tolist():
        if token in (tokenizer.sep_id, tokenizer.pad_id):
            break
        kept.append(token)
    return kept
