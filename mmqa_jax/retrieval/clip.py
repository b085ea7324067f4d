"""CLIP as WebQA's dense retriever: a converted checkpoint and its byte-pair tokenizer.

Pictures are embedded by their pixels alone and snippets by their text alone, cut to CLIP's 77
tokens, questions as they are written (reference.md 3).
"""

from __future__ import annotations

import hashlib
import html
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, read_text
from mmqa_jax.models.clip import CLIP
from mmqa_jax.models.dual_encoder import DualEncoder, clip_dual_encoder
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.weights.converted import load_converted, read_record

START, END = "<|startoftext|>", "<|endoftext|>"
# openai/CLIP clip/simple_tokenizer.py: contractions, runs of letters, single digits, the rest.
_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_BUCKETS = (16, 32, 48, 77)


class ClipTokenizer:
    """CLIP's byte-level BPE, lower case; ids without the start and end tokens.

    As `clip.tokenize`: HTML entities are resolved (twice) and white space is collapsed. OpenAI's
    also repairs broken encodings with ftfy; mend such texts beforehand.

    Args:
      vocabulary: token -> id, END and START among them.
      merges: pairs in order of their rank.

    Attributes:
      cls_id, sep_id, pad_id: of START, END and the padding, which is never looked at.
      fingerprint: 16 hex digits that change with vocabulary or merges.
    """

    def __init__(self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]):
        self.cls_id, self.sep_id = vocabulary[START], vocabulary[END]
        self.pad_id = self.sep_id
        self._tokenizer = Tokenizer(
            models.BPE(
                vocabulary, list(merges), end_of_word_suffix="</w>", unk_token=END, fuse_unk=False
            )
        )
        self._tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        parts = json.dumps([sorted(vocabulary.items()), [list(pair) for pair in merges]])
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without start and end."""
        clean = [html.unescape(html.unescape(text)).strip() for text in texts]
        encodings = self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def load_clip_tokenizer(folder: str | os.PathLike) -> ClipTokenizer:
    """Reads vocab.json and merges.txt, or tokenizer.json, as published with CLIP.

    Raises:
      UserError: neither is there, or they are no CLIP tokenizer's.
    """
    folder = Path(folder)
    path = folder / "vocab.json"
    if path.is_file():
        vocabulary = read_json(path)
        lines = read_text(folder / "merges.txt").split("\n")
        merges = [line.split() for line in lines if line and not line.startswith("#version")]
    else:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"{folder}: has no tokenizer (vocab.json with merges.txt, or tokenizer.json); put "
                "the one published with the checkpoint there."
            )
        model = read_json(path).get("model", {})
        vocabulary, merges = model.get("vocab"), model.get("merges", [])
        merges = [pair.split() if isinstance(pair, str) else pair for pair in merges]
    if not isinstance(vocabulary, dict) or not {START, END} <= vocabulary.keys():
        raise UserError(
            f"{path}: is not CLIP's vocabulary (it lacks {START} and {END}); put the tokenizer "
            "published with the checkpoint there."
        )
    return ClipTokenizer(vocabulary, [tuple(pair) for pair in merges])


def load_clip_embedder(folder: str | os.PathLike, *, batch_size: int = 64) -> Embedder:
    """The embedder of a CLIP that `mmqa convert --model=clip` wrote.

    Pictures must be resized as CLIP does (`PictureStore(..., resize="crop")`).

    Raises:
      UserError: another model's folder, or no tokenizer beside the weights.
    """
    record = read_record(folder)
    if record.architecture.name != "clip":
        raise UserError(
            f"{folder}: holds a model of kind {record.architecture.name!r}, clip was expected; "
            "convert one with `mmqa convert --model=clip`."
        )
    tokenizer = load_clip_tokenizer(folder)
    config = record.config
    if len(tokenizer_ids := {tokenizer.cls_id, tokenizer.sep_id}) < 2 or (
        max(tokenizer_ids) >= config.text.vocab_size
    ):
        raise UserError(
            f"{folder}: the tokenizer's ids do not fit the model's {config.text.vocab_size} "
            "tokens; put the tokenizer published with the checkpoint there."
        )
    clip: CLIP = load_converted(folder)
    dual_config = clip_dual_encoder(config, fusion="image")
    model = nnx.eval_shape(lambda: DualEncoder(dual_config, rngs=nnx.Rngs(0)))
    nnx.update(model, nnx.state(clip))
    model.picture_gate.set_value(jnp.ones(()))  # CLIP has none; `image` does not use it
    graphdef, state = nnx.split(model)
    context = config.text.context
    return Embedder(
        graphdef,
        state,
        tokenizer,
        image_size=config.vision.image_size,
        buckets=tuple(sorted({min(size, context) for size in _BUCKETS})),
        batch_size=batch_size,
        text_of=lambda source: source.text,
    )
