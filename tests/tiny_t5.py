"""A tiny random T5 with a trained SentencePiece model, as a published folder."""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import sentencepiece
from flax import nnx
from sentencepiece import sentencepiece_model_pb2

from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.keys import publish_t5
from mmqa_jax.models.t5.network import T5
from mmqa_jax.weights.published import write_published
from tests.drawn_weights import drawn

VOCABULARY = 50  # of the SentencePiece model
EXTRA = 100  # `<extra_id_N>` behind its own tokens
WORDS = ("red", "green", "blue", "sun", "sea", "tree", "river", "stone", "one", "two", "three")
SENTENCES = [
    f"Which {a} is the {b} of {c}? Answer: {b}-{a}, {len(a)}."
    for a in WORDS
    for b in WORDS[::2]
    for c in WORDS[::3]
]


def write_spiece(file: Path, vocab_size: int = VOCABULARY, *, in_bytes: bool = False) -> None:
    """Trains a unigram model with T5's special tokens; `in_bytes`: mT5's kind."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=made, model_type="unigram",
        vocab_size=vocab_size + 256 * in_bytes, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        byte_fallback=in_bytes, minloglevel=2,
    )  # fmt: skip
    file.write_bytes(made.getvalue())


def add_spiece(writer: gguf.GGUFWriter, file: Path, vocab_size: int) -> None:
    """A model of `write_spiece` in GGUF, as llama.cpp's conversion has it (T5Model.set_vocab).

    vocab_size: rows of the embedding table; those behind the pieces have no piece.
    """
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    proto = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    kinds = {1: "NORMAL", 2: "UNKNOWN", 3: "CONTROL", 4: "NORMAL", 5: "UNUSED", 6: "BYTE"}
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    scores, types = [-10000.0] * vocab_size, [gguf.TokenType.UNUSED] * vocab_size
    for number in range(model.vocab_size()):
        piece = proto.pieces[number]
        tokens[number], scores[number] = piece.piece, piece.score
        types[number] = gguf.TokenType[kinds[piece.type]]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_add_space_prefix(proto.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(proto.normalizer_spec.remove_extra_whitespaces)
    writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)


def t5_config(vocab_size: int) -> T5Config:
    """A tiny Flan-T5 whose random parameters are large enough to tell tokens apart."""
    return T5Config(
        vocab_size=vocab_size, hidden=32, head_size=12, heads=3, mlp=40, encoder_layers=2,
        decoder_layers=1, buckets=12, farthest=20, activation="gelu_new", gated=True, tied=False,
        scaled=False, dropout=0.0, unroll=1,
    )  # fmt: skip


def write_folder(folder: Path) -> Path:
    """The published folder: weights, config.json, generation_config.json, spiece.model."""
    folder.mkdir(parents=True)
    write_spiece(folder / "spiece.model")
    config = t5_config(VOCABULARY + EXTRA)
    model = drawn(lambda: T5(config, rngs=nnx.Rngs()), 3)
    published = publish_t5(config, nnx.state(model))
    write_published(folder, published, more={"eos_token_id": 1})
    return folder
