"""Qwen3-VL-Reranker: P(yes) of whether a source answers a question, pictures of both included.

The prompt is a conversation of the checkpoint's chat template; the instruction is its card's. A
picture stands before the text beside it.
Original: QwenLM/Qwen3-VL-Embedding src/models/qwen3_vl_reranker.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32

from mmqa_jax.core.arguments import check_questions
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh, serve
from mmqa_jax.data.chat_template import MARKS, PictureChat
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.encoder_tokenizer import load_encoder_tokenizer
from mmqa_jax.data.picture_store import PictureStore
from mmqa_jax.data.schema import Question, Ranking, source_text
from mmqa_jax.inference.reranker import ScoredPairs, gather
from mmqa_jax.inference.yes_no_prompt import SYSTEM, token_of
from mmqa_jax.models.vlm_encoder import QwenVLYesNo
from mmqa_jax.retrieval.picture_batches import (
    HELD,
    PicturePrompt,
    beyond_placeholders,
    prompt_batches,
)
from mmqa_jax.retrieval.rankings import rescored
from mmqa_jax.retrieval.text_encoder import encoder_cost
from mmqa_jax.retrieval.vlm_encoder import picture_sizes, prompt_lengths
from mmqa_jax.weights.sentence_pooling import has_recipe
from mmqa_jax.weights.vlm_encoders import load_vlm_yes_no, read_vlm_config

INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
LONGEST = 10240  # tokens of a prompt, the original's MAX_LENGTH
_NOTHING = "NULL"  # the original's, of a side without text and picture


class Side(NamedTuple):
    """A question or a source: its text, "" for none, and pixels uint8 [H, W, 3] or None."""

    text: str
    picture: np.ndarray | None = None


class VLMReranker:
    """Scores each question's candidates by a Qwen-VL that sees the pictures of both.

    A source is its title and text, a picture its pixels and then its title and caption. Of too long
    a prompt the source's text is cut.

    Args:
      corpus: of the sources.
      model: gives a logit of each prompt.
      chat: makes the prompts.
      pad_token: of the tokenizer.
      lengths: to which prompts are padded, see retrieval/picture_batches.py.
      batch_size: pairs a call, over all devices, or `auto`.

    Attributes:
      serving: its devices and batches.
    """

    def __init__(
        self,
        corpus: Corpus,
        model: QwenVLYesNo,
        chat: PictureChat,
        *,
        pad_token: int,
        lengths: Sequence[int],
        batch_size: BatchSize = AUTO,
    ):
        self.corpus = corpus
        self._chat, self._config, self._pad = chat, model.config, pad_token
        self._lengths = tuple(lengths)
        vision = model.config.vision
        sizes, largest = picture_sizes(vision), math.isqrt(vision.max_pixels)
        self._pictures = PictureStore(corpus, largest, sizes, alpha="white")
        graphdef, self._state = nnx.split(model)
        cost = encoder_cost(model.config.llama, self._lengths[-1], "pairs")
        self.serving = serve(batch_size, cost, self._state)
        self._relevance = jax.jit(
            lambda state, batch: jax.nn.sigmoid(nnx.merge(graphdef, state)(*batch))
        )

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by P(relevant), best first; ties keep their order."""
        check_questions(questions, "VLMReranker.score")
        return rescored(candidates, gather(self.score_batches(questions, candidates), candidates))

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the pairs."""
        asked = [
            (question, self.corpus.row[name])
            for question, given in zip(questions, candidates, strict=True)
            for name in given.sources
        ]
        with Progress("Scoring sources", len(asked), "pairs") as progress:
            for start in range(0, len(asked), HELD):
                chunk = [
                    (self._question(question), self._source(row))
                    for question, row in asked[start : start + HELD]
                ]
                rows = np.arange(start, start + len(chunk))
                yield ScoredPairs(rows, self.relevance(chunk))
                progress.advance(len(chunk))

    def relevance(self, pairs: Sequence[tuple[Side, Side]]) -> Float32[np.ndarray, " n"]:
        """P(relevant) of pairs of a question and a source: sigmoid of the log-odds of yes."""
        batches = prompt_batches(
            self._prompts(pairs), self._config, self.serving, self._lengths, self._pad
        )
        scores = np.zeros(len(pairs), np.float32)
        for indices, batch in batches:
            placement = self.serving.placement
            found = fetch(placement.call(self._relevance, self._state, placement.put(batch)))
            scores[indices] = found[: len(indices)]
        return scores

    def _question(self, question: Question) -> Side:
        return Side(question.question, self._pictures.question_pixels(question))

    def _source(self, row: int) -> Side:
        return Side(source_text(self.corpus.sources[row]), self._pictures.pixels(row))

    def _prompts(self, pairs: Sequence[tuple[Side, Side]]) -> list[PicturePrompt]:
        made: list[PicturePrompt] = [PicturePrompt(())] * len(pairs)
        frames = [(*_parts(asked, 0), "\n<Document>:", *_parts(source, 1))
                  for asked, source in pairs]  # fmt: skip
        for frame in set(frames):
            members = [number for number, one in enumerate(frames) if one == frame]
            shown = [
                tuple(side.picture for side in pairs[n] if side.picture is not None)
                for n in members
            ]
            tokens = self._chat.encode(
                SYSTEM,
                [f"<Instruct>: {INSTRUCTION}", "<Query>:", *frame],
                [[side.text for side in pairs[n]] for n in members],
                [self._lengths[-1] - beyond_placeholders(own, self._config) for own in shown],
            )
            for number, ids, own in zip(members, tokens, shown, strict=True):
                made[number] = PicturePrompt(ids, own)
        return made


def _parts(side: Side, number: int) -> list[str | None]:
    """A question's or a source's parts of the message; None is a picture."""
    picture = [] if side.picture is None else [None]
    if not side.text:
        return picture or [_NOTHING]
    return [*picture, MARKS[number]]


def open_vlm_reranker(
    folder: Path,
    corpus: Corpus,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> VLMReranker:
    """The reranker of a Qwen3-VL-Reranker's folder over a corpus.

    Args:
      folder: of transformers, with a chat template.
      batch_size: pairs a call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    if has_recipe(folder):
        raise UserError(
            f"{folder}: its files say how vectors are made (modules.json): it is no reranker; "
            "give a Qwen3-VL-Reranker, or use it as an encoder."
        )
    config = read_vlm_config(folder)
    tokenizer = load_encoder_tokenizer(folder, config.llama.vocab_size, pairs=False)
    yes, no = (token_of(tokenizer, word, folder) for word in ("yes", "no"))
    return VLMReranker(
        corpus,
        load_vlm_yes_no(folder, yes, no, loading_mesh(mesh)),
        PictureChat(folder, tokenizer, config.image_token),
        pad_token=tokenizer.pad_id,
        lengths=prompt_lengths(folder, config, LONGEST),
        batch_size=batch_size,
    )
