"""T5s in use as readers: Fusion-in-Decoder over passages, and Multimodal-CoT's over a picture."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmqa_jax.core.errors import UserError, check_questions
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, ServedModel, loading_mesh
from mmqa_jax.data.batches.texts import passage_arrays, target_arrays
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureVectors
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.decoding.t5_engine import beam_search, score
from mmqa_jax.models.t5.network import T5, MultimodalT5, Passages, PicturedTexts
from mmqa_jax.prompting.text_tokenizer import TextTokenizer, open_text_tokenizer
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder

# Fusion-in-Decoder in use: a reader of WebQA's interface, and of given passages.


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
        `benchmarks.okvqa`.
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


# Multimodal-CoT's T5 in use: a text and a picture's vectors in, a text out.


# What transformers' decoders close up where clean_up_tokenization_spaces is set.
_APART = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class MultimodalWriter(ServedModel):
    """Writes texts about questions with pictures, greedily.

    Args:
      vectors: of the questions' pictures.
      length: tokens of a text that is read, its end token included; what is longer is cut.
    """

    def __init__(
        self,
        model: MultimodalT5,
        tokenizer: TextTokenizer,
        vectors: PictureVectors,
        *,
        length: int = 512,
        batch_size: BatchSize = AUTO,
    ):
        self._tokenizer, self._vectors, self._length = tokenizer, vectors, length
        config = model.config
        self._silent = {config.pad, *tokenizer.end_ids}
        of_token = 8 * config.hidden + 3 * config.mlp + 2 * config.heads * length
        cost = RowCost("questions", 8, 64, 4 * (length * of_token + vectors.shape[0] * 4096))
        super().__init__(model, batch_size, cost)

    def write(
        self, questions: Sequence[Question], texts: Sequence[str], max_new_tokens: int
    ) -> list[str]:
        """Writes a text for each question's text and picture."""

        def search(inputs: PicturedTexts, numbers: range) -> list[list[int]]:
            best = self._call(
                beam_search,
                inputs,
                end_id=self._tokenizer.end_ids[0],
                num_beams=1,
                max_new_tokens=max_new_tokens,
            )
            pairs = zip(best.tokens[:, 0], best.lengths[:, 0], strict=True)
            return [tokens[:count].tolist() for tokens, count in pairs]

        return self._each(questions, texts, search)

    def forced(
        self,
        questions: Sequence[Question],
        texts: Sequence[str],
        targets: Sequence[str],
        max_new_tokens: int,
    ) -> list[str]:
        """The likeliest token in each place of a given text, whose tokens stand before it.

        That is no generation: it is how a model is judged that is shown the right text.
        """
        longest = max_new_tokens + 1

        def read(inputs: PicturedTexts, numbers: range) -> list[list[int]]:
            tokens = [cut_tokens(self._tokenizer, targets[n], longest) for n in numbers]
            arrays = target_arrays(tokens, longest, self.serving.batch_size)
            scores = self._call(score, inputs, arrays["target_ids"])
            pairs = zip(scores.likeliest, arrays["target_lengths"], strict=True)
            return [likeliest[:count].tolist() for likeliest, count in pairs]

        return self._each(questions, texts, read)

    def _each(
        self,
        questions: Sequence[Question],
        texts: Sequence[str],
        run: Callable[[PicturedTexts, range], list[list[int]]],
    ) -> list[str]:
        """A text for every question; `run` gives the tokens of a batch and is told its numbers."""
        size, written = self.serving.batch_size, []
        with Progress("Writing", len(questions), "questions") as progress:
            for start in range(0, len(questions), size):
                numbers = range(start, min(start + size, len(questions)))
                asked = [questions[n] for n in numbers]
                tokens = run(self._inputs(asked, [texts[n] for n in numbers], size), numbers)
                written += map(self._text, tokens[: len(numbers)])
                progress.advance(len(numbers))
        return written

    def _call(self, program: Any, *arrays: Any, **options: Any) -> Any:
        """The outputs of a program on the host; `arrays` have a row for each of the batch."""
        placement = self.serving.placement
        rows = placement.rows(self.serving.batch_size)
        put = placement.put(jax.tree.map(lambda array: array[rows], arrays))
        made = placement.call(program, self._graphdef, self._state, *put, **options)
        return fetch(placement.copied(made))

    def _inputs(
        self, questions: Sequence[Question], texts: Sequence[str], size: int
    ) -> PicturedTexts:
        """`size` rows."""
        ids, lengths = np.zeros((size, self._length), np.int32), np.ones(size, np.int32)
        features = np.zeros((size, *self._vectors.shape), np.float32)
        for row, (question, text) in enumerate(zip(questions, texts, strict=True)):
            tokens = cut_tokens(self._tokenizer, text, self._length)
            ids[row, : len(tokens)], lengths[row] = tokens, len(tokens)
            features[row] = self._vectors.of(question)
        return PicturedTexts(ids, lengths, features)

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode([t for t in tokens if t not in self._silent])
        for apart in _APART:
            text = text.replace(apart, apart.strip() if apart.endswith(" ") else apart[1:])
        return text.strip()


def cut_tokens(tokenizer: Any, text: str, length: int) -> list[int]:
    """A text's tokens and the end token, at most `length`: the text is cut, the end stays."""
    end = list(tokenizer.end_ids[:1])
    return [*tokenizer.encode_plain(tokenizer.shield(text))[: length - len(end)], *end]


def open_multimodal_writer(folder: str | Path, vectors: PictureVectors) -> MultimodalWriter:
    """The writer of a run, of a converted folder or of a published one."""
    path, mesh = Path(folder), loading_mesh()
    if is_weights_folder(path):
        model = load_converted(path, mesh=mesh)
    else:
        model = load_published("multimodal_t5", path, mesh=mesh)
    check_width(model, vectors, str(path))
    return MultimodalWriter(model, open_text_tokenizer(path), vectors)


def check_width(model: Any, vectors: PictureVectors, where: str) -> None:
    """Refuses another model, and vectors of another width than a model's."""
    if not isinstance(model, MultimodalT5):
        raise UserError(
            f"{where}: holds no T5 of Multimodal-CoT; name a run of task multimodal_cot, or a "
            "folder of mm-cot."
        )
    if model.config.features != vectors.shape[1]:
        raise UserError(
            f"{where}: reads pictures of {model.config.features} values a vector, these have "
            f"{vectors.shape[1]}; name the features that it was trained on."
        )
