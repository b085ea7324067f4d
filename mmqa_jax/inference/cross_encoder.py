"""Published rerankers of pairs: ms-marco MiniLM, bge-reranker, Qwen3-Reranker and their like, and
those with late interaction.

What reads pictures too, Qwen3-VL-Reranker, is in vlm_reranker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
from flax import nnx
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.data.chat_template import MARKS, TEMPLATE, PictureChat, rendered, template_source
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.schema import Question, Ranking, source_text
from mmqa_jax.data.tokenizer_files import SETTINGS
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.inference.reranker import PairScorer, ScoredPairs
from mmqa_jax.models.encoders import sentence_pooling, text_encoders
from mmqa_jax.models.encoders.heads import CrossEncoder, QwenVLYesNo, YesNoDecoder
from mmqa_jax.models.encoders.late_interaction import (
    LateInteraction,
    TokenEncoder,
    is_late_interaction,
)
from mmqa_jax.models.encoders.sentence_pooling import max_sim
from mmqa_jax.models.encoders.text_encoders import FAMILY as VLM
from mmqa_jax.models.encoders.text_encoders import load_vlm_yes_no, read_vlm_config
from mmqa_jax.models.llama.families import FAMILIES as DECODERS
from mmqa_jax.models.modernbert.network import ModernBertCrossEncoder
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.retrieval import late_interaction, vlm_encoder
from mmqa_jax.retrieval.embedder import batches_by_length
from mmqa_jax.retrieval.text_encoder import encoder_cost, length_buckets
from mmqa_jax.weights.config_json import check_keys, kinds


class CrossEncoderReranker(PairScorer):
    """Scores each question's candidates by a model that reads question and source together.

    A source is its title and text, a picture its caption. Pairs are padded to the smallest bucket
    that fits them; of longer pairs the longer text is cut.

    Args:
      corpus: of the sources.
      model: gives a logit of each pair.
      tokenizer: of the model; what makes prompts of pairs for a decoder.
      longest: tokens of a pair, special tokens included; None: as many as the model takes.
      batch_size: pairs a call, over all devices, or `auto`.
    """

    def __init__(
        self,
        corpus: Corpus,
        model: CrossEncoder | ModernBertCrossEncoder | YesNoDecoder,
        tokenizer: Tokenizer | YesNoPairs,
        *,
        longest: int | None = None,
        batch_size: BatchSize = AUTO,
    ):
        self.corpus, self.tokenizer = corpus, tokenizer
        self._buckets = length_buckets(longest, model.config.positions)
        self._has_types = isinstance(model, CrossEncoder) and model.config.types > 1
        super().__init__(model, batch_size, encoder_cost(model.config, self._buckets[-1], "pairs"))
        graphdef = self._graphdef
        self._relevance = jax.jit(
            lambda state, *inputs: jax.nn.sigmoid(nnx.merge(graphdef, state)(*inputs))
        )

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the batches."""
        rows = [[self.corpus.row[name] for name in ranking.sources] for ranking in candidates]
        pairs = [
            (question.question, source_text(self.corpus.sources[row]))
            for question, of_question in zip(questions, rows, strict=True)
            for row in of_question
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
        with Progress("Scoring sources", len(pairs), "pairs") as progress:
            for chunk, length, most in batches_by_length(lengths, self._buckets, self.serving):
                batch = self._batch([tokens[i] for i in chunk], length, most)
                placement = self.serving.placement
                rows = placement.rows(len(batch[0]))
                put = placement.put(tuple(array[rows] for array in batch))
                scores = fetch(placement.call(self._relevance, self._state, *put))
                yield ScoredPairs(chunk, scores[: len(chunk)])
                progress.advance(len(chunk))

    def _batch(
        self, tokens: Sequence[tuple[list[int], ...]], length: int, most: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, mask and token types [B, length] of pairs; the last pair fills the batch."""
        size = min(self.serving.size_for(len(tokens)), most)
        ids = np.full((size, length), self.tokenizer.pad_id, np.int32)
        mask, types = np.zeros((size, length), bool), np.zeros((size, length), np.int32)
        for row in range(size):
            pair_ids, of_type = self.tokenizer.pair(*tokens[min(row, len(tokens) - 1)], length)
            ids[row, : len(pair_ids)], mask[row, : len(pair_ids)] = pair_ids, True
            if self._has_types:
                types[row, : len(pair_ids)] = of_type
        return ids, mask, types


def open_cross_encoder(
    folder: Path,
    corpus: Corpus,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> CrossEncoderReranker | VLMReranker | LateInteractionReranker:
    """The reranker of a published cross-encoder's folder over a corpus.

    Or of a Qwen3-Reranker's, of a Qwen3-VL-Reranker's, which sees pictures, or of an encoder with
    late interaction.

    Args:
      folder: of transformers.
      batch_size: pairs a call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    kind = text_encoders.model_type_of(folder)
    if is_late_interaction(folder):
        return open_late_interaction(folder, corpus, batch_size=batch_size, mesh=mesh)
    if kind == VLM:
        return open_vlm_reranker(folder, corpus, batch_size=batch_size, mesh=mesh)
    if kind in DECODERS and not text_encoders.is_classifier(folder):
        config = text_encoders.read_decoder_config(folder)
        tokenizer = load_encoder_tokenizer(folder, config.vocab_size, pairs=False)
        prompt = read_yes_no(folder, kind, tokenizer)
        model = text_encoders.load_yes_no(folder, prompt.yes, prompt.no, loading_mesh(mesh))
        pairs: Tokenizer | YesNoPairs = YesNoPairs(tokenizer, prompt)
        longest: int | None = prompt.longest
    else:
        model = text_encoders.load_cross_encoder(folder, loading_mesh(mesh))
        pairs = load_encoder_tokenizer(folder, model.config.vocab_size)
        text_encoders.check_padding(folder, pairs.pad_id)
        longest = sentence_pooling.read_pair_length(folder) or pairs.max_tokens
    return CrossEncoderReranker(corpus, model, pairs, longest=longest, batch_size=batch_size)


# Qwen3-VL-Reranker: P(yes) of whether a source answers a question, pictures of both included.
#
# The prompt is a conversation of the checkpoint's chat template; the instruction is its card's. A
# picture stands before the text beside it. Original: QwenLM/Qwen3-VL-Embedding
# src/models/qwen3_vl_reranker.py.

INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
LONGEST = 10240  # tokens of a prompt, the original's MAX_LENGTH
_NOTHING = "NULL"  # the original's, of a side without text and picture


class Side(NamedTuple):
    """A question or a source: its text, "" for none, and pixels uint8 [H, W, 3] or None."""

    text: str
    picture: np.ndarray | None = None


class VLMReranker(PairScorer):
    """Scores each question's candidates by a Qwen-VL that sees the pictures of both.

    A source is its title and text, a picture its pixels and then its title and caption. Of too long
    a prompt the source's text is cut.

    Args:
      corpus: of the sources.
      model: gives a logit of each prompt.
      chat: makes the prompts.
      pad_token: of the tokenizer.
      lengths: to which prompts are padded, see retrieval/vlm_encoder.py.
      batch_size: pairs a call, over all devices, or `auto`.
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
        self._pictures = reranked_pictures(corpus, model.config)
        cost = encoder_cost(model.config.llama, self._lengths[-1], "pairs")
        super().__init__(model, batch_size, cost)
        graphdef = self._graphdef
        self._relevance = jax.jit(
            lambda state, batch: jax.nn.sigmoid(nnx.merge(graphdef, state)(*batch))
        )

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the pairs."""
        asked = [
            (question, self.corpus.row[name])
            for question, ranking in zip(questions, candidates, strict=True)
            for name in ranking.sources
        ]
        with Progress("Scoring sources", len(asked), "pairs") as progress:
            for start in range(0, len(asked), vlm_encoder.HELD):
                chunk = [
                    (self._question(question), self._source(row))
                    for question, row in asked[start : start + vlm_encoder.HELD]
                ]
                rows = np.arange(start, start + len(chunk))
                yield ScoredPairs(rows, self.relevance(chunk))
                progress.advance(len(chunk))

    def relevance(self, pairs: Sequence[tuple[Side, Side]]) -> Float32[np.ndarray, " n"]:
        """P(relevant) of pairs of a question and a source: sigmoid of the log-odds of yes."""
        batches = vlm_encoder.prompt_batches(
            self._prompts(pairs), self._config, self.serving, self._lengths, self._pad
        )
        scores = np.zeros(len(pairs), np.float32)
        for indices, batch in batches:
            placement = self.serving.placement
            relevance = fetch(placement.call(self._relevance, self._state, placement.put(batch)))
            scores[indices] = relevance[: len(indices)]
        return scores

    def _question(self, question: Question) -> Side:
        return Side(question.question, self._pictures.question_pixels(question))

    def _source(self, row: int) -> Side:
        return Side(source_text(self.corpus.sources[row]), self._pictures.pixels(row))

    def _prompts(self, pairs: Sequence[tuple[Side, Side]]) -> list[vlm_encoder.PicturePrompt]:
        return pair_prompts(self._chat, self._config, pairs, longest=self._lengths[-1])


def reranked_pictures(corpus: Corpus, config: QwenVLConfig) -> PictureStore:
    """A corpus's pictures as a Qwen3-VL-Reranker takes them."""
    largest = math.isqrt(config.vision.max_pixels)
    return PictureStore(corpus, largest, vlm_encoder.picture_sizes(config.vision), alpha="white")


def pair_prompts(
    chat: PictureChat,
    config: vlm_encoder.SeeingConfig,
    pairs: Sequence[tuple[Side, Side]],
    *,
    longest: int,
) -> list[vlm_encoder.PicturePrompt]:
    """What a Qwen3-VL-Reranker is asked of pairs, in at most `longest` tokens each."""
    made: list[vlm_encoder.PicturePrompt] = [vlm_encoder.PicturePrompt(())] * len(pairs)
    frames = [(*_parts(asked, 0), "\n<Document>:", *_parts(source, 1)) for asked, source in pairs]
    for frame in set(frames):
        members = [number for number, other in enumerate(frames) if other == frame]
        pictures = [
            tuple(side.picture for side in pairs[n] if side.picture is not None) for n in members
        ]
        tokens = chat.encode(
            SYSTEM,
            [f"<Instruct>: {INSTRUCTION}", "<Query>:", *frame],
            [[side.text for side in pairs[n]] for n in members],
            [longest - vlm_encoder.beyond_placeholders(of_pair, config) for of_pair in pictures],
        )
        for number, ids, of_pair in zip(members, tokens, pictures, strict=True):
            made[number] = vlm_encoder.PicturePrompt(ids, of_pair)
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
    if sentence_pooling.has_recipe(folder):
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
        lengths=vlm_encoder.prompt_lengths(folder, config, LONGEST),
        batch_size=batch_size,
    )


# What a decoder that reranks is asked of a pair: Qwen3-Reranker's prompt, or that of its files.
#
# The model's card says how (Zhang et al. 2025, Qwen3 Embedding): a fixed prompt with the
# instruction, the question and the text, an empty thought, and then the log-odds of `yes` against
# `no` as the next token. A folder of sentence-transformers says the same with a chat template
# that has the roles `query` and `document`, and the layer LogitScore; then these are what is
# done.

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_LONGEST = 8192  # tokens, the card's
_QUERY, _DOCUMENT = MARKS


@dataclasses.dataclass(frozen=True)
class YesNoPrompt:
    """The text around a question and a text, and the two tokens that are compared."""

    # before, between, after: the text; special tokens spelled out in it are recognized.
    before: str
    between: str
    after: str
    # yes, no: ids of the tokens.
    yes: int
    no: int
    longest: int  # tokens of a whole prompt


class YesNoPairs:
    """Prompts of pairs of texts as token ids, with the methods that a reranker asks.

    Too long a prompt loses the end of its text, never what follows the text. Special tokens that
    are spelled out in question or text are plain characters.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: YesNoPrompt):
        self._pieces = tokenizer.pieces
        self.pad_id = tokenizer.pad_id
        # The tokens of the last line run on into the question's.
        lines, newline, self._last_line = prompt.before.rpartition("\n")
        self._between = prompt.between
        self._first, self._last = self._pieces.encode_prompts([lines + newline, prompt.after])

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int]]]:
        """Token ids of what depends on a pair."""
        shield = self._pieces.shield
        prompts = [
            f"{self._last_line}{shield(first)}{self._between}{shield(second)}"
            for first, second in pairs
        ]
        return [(ids,) for ids in self._pieces.encode_prompts(prompts)]

    def pair(self, tokens: Sequence[int], length: int) -> tuple[list[int], list[int]]:
        """Ids and token types, all 0, of a prompt of at most `length` tokens."""
        room = length - len(self._first) - len(self._last)
        ids = [*self._first, *tokens[: max(room, 0)], *self._last]
        return ids, [0] * len(ids)

    def pair_length(self, tokens: int) -> int:
        """Tokens of a whole prompt."""
        return len(self._first) + tokens + len(self._last)


def read_yes_no(folder: Path, kind: str, tokenizer: Tokenizer) -> YesNoPrompt:
    """Reads what a folder's decoder of this `model_type` is asked."""
    modules = dict(sentence_pooling.read_modules(folder))
    if "LogitScore" in modules:
        prompt = _by_files(folder, modules, tokenizer)
    elif kind == "qwen3":
        turn = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        before = f"{turn}<Instruct>: {_INSTRUCTION}\n<Query>: "
        after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        yes, no = (token_of(tokenizer, word, folder) for word in ("yes", "no"))
        prompt = YesNoPrompt(before, "\n<Document>: ", after, yes, no, _LONGEST)
        for special in ("<|im_start|>", "<|im_end|>"):
            token_of(tokenizer, special, folder)
    else:
        raise UserError(
            f"{folder}: holds a language model ({kind}) that is no reranker: a Qwen3-Reranker, or "
            "sentence-transformers' files with the layer LogitScore, was expected; give one, or a "
            "cross-encoder."
        )
    if not tokenizer.pieces.is_byte_level:
        raise UserError(
            f"{folder}: its tokenizer is not one of bytes, so that a prompt cannot be made of "
            "parts; use another reranker."
        )
    last = prompt.before.rpartition("\n")[2]
    if tokenizer.pieces.encode_prompts([last]) != tokenizer.encode_batch([last]):
        raise UserError(
            f"{folder}: its prompt has special tokens in the question's line ({last!r}), which is "
            "not done here; use another reranker."
        )
    return prompt


def _by_files(folder: Path, modules: Mapping[str, str], tokenizer: Tokenizer) -> YesNoPrompt:
    for kind, place in modules.items():
        if kind not in ("Transformer", "LogitScore") or (kind == "Transformer" and place):
            raise UserError(
                f"{folder / 'modules.json'}: holds the layer {kind!r} in {place!r}, which is not "
                "known of a reranker that is a decoder; use another checkpoint."
            )
    file = folder / modules["LogitScore"] / "config.json"
    score = read_json(file)
    read = kinds(integer="true_token_id false_token_id")
    check_keys(score, str(file), read=read, fixed={"module_input_name": ("causal_logits",)})
    ids = [score.get(name) for name in ("true_token_id", "false_token_id")]
    if not all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in ids):
        raise UserError(
            f"{file}: true_token_id and false_token_id are {ids}, two tokens were expected; use "
            "a checkpoint that compares two."
        )
    settings, where = (
        _object(folder / sentence_pooling.TRANSFORMER),
        str(folder / sentence_pooling.TRANSFORMER),
    )
    check_keys(
        settings,
        where,
        read=kinds(size_or_null="max_seq_length", object_or_null="processing_kwargs"),
        harmless=("modality_config", "unpad_inputs", "model_args", "tokenizer_args"),
        fixed={"transformer_task": ("text-generation",), "module_output_name": ("causal_logits",)},
    )
    processing = settings.get("processing_kwargs") or {}
    check_keys(processing, f"{where}, processing_kwargs", read=("chat_template",))
    options = processing.get("chat_template") or {}
    check_keys(
        options,
        f"{where}, processing_kwargs.chat_template",
        read=kinds(flag="add_generation_prompt"),
        fixed={"restore_suffix": (True,)},
    )
    instruction = sentence_pooling.check_logit_prompts(folder / sentence_pooling.PROMPTS)
    text = _rendered(folder, instruction, bool(options.get("add_generation_prompt")))
    before, query, rest = text.partition(_QUERY)
    between, document, after = rest.partition(_DOCUMENT)
    if not query or not document or _QUERY in rest or _DOCUMENT in after:
        raise UserError(
            f"{folder}: its chat template does not put a `query` and then a `document` into the "
            "prompt, each once; use a checkpoint that was published as a reranker."
        )
    longest = settings.get("max_seq_length") or tokenizer.max_tokens or _LONGEST
    return YesNoPrompt(before, between, after, ids[0], ids[1], longest)


def _rendered(folder: Path, instruction: str, generation: bool) -> str:
    """The chat template's prompt of the two marks; their contents as texts or as lists of parts."""
    settings = _object(folder / SETTINGS)
    source = template_source(folder, settings)
    if source is None:
        raise UserError(
            f"{folder}: has no chat template ({TEMPLATE}) that makes a prompt of a pair; fetch "
            "the whole folder again."
        )
    roles = [("system", instruction)] if instruction else []
    roles += [("query", _QUERY), ("document", _DOCUMENT)]
    text, reason = "", "it lacks the two roles"
    for whole in (True, False):
        messages = [
            {"role": role, "content": content if whole else [{"type": "text", "text": content}]}
            for role, content in roles
        ]
        try:
            text = rendered(source, messages, settings, generation)
        except jinja2.TemplateError as error:
            reason = str(error)
            continue
        if _QUERY in text and _DOCUMENT in text and "'type'" not in text:
            return text
    if text:
        return text
    raise UserError(
        f"{folder}: its chat template makes no prompt of a `query` and a `document` ({reason}); "
        "use a checkpoint that was published as a reranker."
    )


def token_of(tokenizer: Tokenizer, text: str, folder: Path) -> int:
    """The id of a token that the prompt needs; UserError where the tokenizer lacks it."""
    token = tokenizer.token_id(text)
    if token is None:
        raise UserError(
            f"{folder}: its tokenizer has no token {text!r}, which the prompt of Qwen's rerankers "
            "needs; give that model's own tokenizer, or a reranker of another kind."
        )
    return token


def _object(file: Path) -> dict[str, Any]:
    content = read_json(file) if file.is_file() else {}
    return content if isinstance(content, dict) else {}


# Rerankers with late interaction: ColBERT and its like, by the vectors of tokens. Questions and
# sources are encoded apart, each once a call; what is left of a pair is MaxSim.


_PAIRS = 256  # whose products are in memory at once


class LateInteractionReranker(PairScorer):
    """Ranks each question's candidates by MaxSim of the vectors of their tokens.

    A source is its title and text, a picture its caption. Scores are MaxSim's, no probabilities.

    Args:
      corpus: of the sources.
      model: the encoder.
      tokenizer: of the model.
      recipe: how its folder says that texts are read.
      batch_size: texts a call, over all devices, or `auto`.
    """

    def __init__(
        self,
        corpus: Corpus,
        model: TokenEncoder,
        tokenizer: Tokenizer,
        recipe: LateInteraction,
        *,
        batch_size: BatchSize = AUTO,
    ):
        self.corpus, self.tokenizer, self._mean = corpus, tokenizer, recipe.mean
        positions = model.config.positions
        self.question_side = late_interaction.side_of(recipe, tokenizer, positions, "query")
        self.source_side = late_interaction.side_of(recipe, tokenizer, positions, "document")
        longest = max(self.question_side.longest, self.source_side.longest)
        super().__init__(model, batch_size, encoder_cost(model.config, longest, "texts"))
        graphdef = self._graphdef
        self._encode = jax.jit(lambda state, *rows: nnx.merge(graphdef, state)(*rows))
        self._max_sim = jax.jit(_pairs)

    def score_batches(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> Iterator[ScoredPairs]:
        """Yields the scores batch by batch, in the order of the batches."""
        if not any(ranking.sources for ranking in candidates):
            return
        of_question = np.repeat(np.arange(len(questions)), [len(c.sources) for c in candidates])
        rows = np.array([self.corpus.row[s] for c in candidates for s in c.sources], np.int64)
        distinct, of_source = np.unique(rows, return_inverse=True)  # of the corpus; of each pair
        asked, asked_mask = self.encode_questions([question.question for question in questions])
        order = np.argsort(of_source, kind="stable")
        begins = np.searchsorted(of_source[order], np.arange(len(distinct) + 1))
        texts = [source_text(self.corpus.sources[row]) for row in distinct]
        with Progress("Scoring sources", len(rows), "pairs") as progress:
            for chunk, vectors, mask in self._encoded(texts, self.source_side):
                pairs = [order[begins[source] : begins[source + 1]] for source in chunk]
                which = np.repeat(np.arange(len(chunk)), list(map(len, pairs)))
                indices = np.concatenate(pairs)
                scores = np.empty(len(indices), np.float32)
                for start in range(0, len(indices), _PAIRS):
                    part = slice(start, start + _PAIRS)
                    which_asked = of_question[indices[part]]
                    scores[part] = self._score(
                        asked[which_asked], asked_mask[which_asked], vectors, mask, which[part]
                    )
                yield ScoredPairs(indices, scores)
                progress.advance(len(indices))

    def encode_questions(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of questions, float32 [N, Q, D], and which are scored, bool [N, Q]."""
        return self._all(texts, self.question_side)

    def encode_sources(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of sources, float32 [N, L, D], and which are scored, bool [N, L]."""
        return self._all(texts, self.source_side)

    def _all(
        self, texts: Sequence[str], side: late_interaction.Side
    ) -> tuple[np.ndarray, np.ndarray]:
        batches = [(chunk, fetch(v)[: len(chunk)], m) for chunk, v, m in self._encoded(texts, side)]
        length = max(vectors.shape[1] for _, vectors, _ in batches)
        shape = len(texts), length
        vectors = np.zeros((*shape, batches[0][1].shape[2]), np.float32)
        mask = np.zeros(shape, bool)
        for chunk, of_chunk, scored in batches:
            vectors[chunk, : of_chunk.shape[1]] = of_chunk
            mask[chunk, : of_chunk.shape[1]] = scored[: len(chunk)]
        return vectors, mask

    def _encoded(
        self, texts: Sequence[str], side: late_interaction.Side
    ) -> Iterator[tuple[np.ndarray, jax.Array, np.ndarray]]:
        """Batches: places in `texts`, vectors [B, L, D] and what is scored [B, L]; behind the
        places of a batch is padding."""
        placement = self.serving.placement
        for places, ids, mask, scored in late_interaction.encoded(
            texts, side, self.tokenizer, self.serving
        ):
            local_rows = placement.rows(len(ids))
            put = placement.put((ids[local_rows], mask[local_rows]))
            vectors = placement.call(self._encode, self._state, *put)
            if side.pooling is not None:
                vectors, scored = _pooled(fetch(vectors), scored, side)
            yield places, vectors, scored

    def _score(
        self,
        asked: np.ndarray,
        asked_mask: np.ndarray,
        vectors: jax.Array,
        mask: np.ndarray,
        which: np.ndarray,
    ) -> np.ndarray:
        """Scores of pairs of questions and of the batch's sources `which`, in one program."""
        count, places = len(which), np.minimum(np.arange(_PAIRS), len(which) - 1)
        inputs = (asked[places], asked_mask[places], mask, which[places].astype(np.int32))
        if not vectors.is_fully_addressable:
            vectors = jnp.asarray(fetch(vectors))
        scores = np.asarray(self._max_sim(vectors, *inputs))[:count]
        return scores / np.maximum(asked_mask.sum(1), 1) if self._mean else scores


def _pairs(
    vectors: jax.Array, asked: jax.Array, asked_mask: jax.Array, mask: jax.Array, which: jax.Array
) -> jax.Array:
    return max_sim(asked, asked_mask, vectors[which], mask[which])


def open_late_interaction(
    folder: Path,
    corpus: Corpus,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> LateInteractionReranker:
    """The reranker of a published late-interaction encoder's folder over a corpus.

    Args:
      folder: of sentence-transformers, PyLate or Stanford's ColBERT.
      batch_size: texts a call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    return LateInteractionReranker(
        corpus, *late_interaction.open_token_encoder(folder, mesh), batch_size=batch_size
    )


def _pooled(
    vectors: np.ndarray, scored: np.ndarray, side: late_interaction.Side
) -> tuple[jax.Array, np.ndarray]:
    """Texts' vectors [B, L, D], tokens that are alike merged, and which are scored, [B, L]."""
    merged, mask = np.zeros_like(vectors), np.zeros_like(scored)
    for row, of_text in enumerate(vectors):
        of_text = side.pooled(of_text[scored[row]])
        merged[row, : len(of_text)], mask[row, : len(of_text)] = of_text, True
    return jnp.asarray(merged), mask
