"""The trained stories260K (llama2.c's format) against its published story and transformers.

The weights are no part of the project; see tests/shared_data.py.
"""

import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cached import decode
from compare import WHOLE, compiled, forward
from shared_data import SHARED, require

from mmqa_jax.decoding import kv_cache
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.weights.published import load_published

MODEL, TOKENIZER = (SHARED / "weights" / name for name in ("stories260K.bin", "tok512.bin"))

BOS, LENGTH = 1, 512
STEPS = 256  # run.c's own
# karpathy/llama2.c doc/stories260K.md: what `run stories260K.bin -z tok512.bin -t 0.0` prints.
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She "
    'said, "I want to play with your ball, but I can\'t find it."\n'
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to "
    'do."\n'
    "Lily didn't want to help her mom, so she said, \"I'm sorry, mom. I didn't know what to do.\" "
    "Her mom said, \"Don't worry, Lily. We can help you."
)


@pytest.fixture(scope="module")
def ours():
    require(MODEL, TOKENIZER)
    return load_published("llama", MODEL, unroll=1)


@pytest.fixture(scope="module")
def written(ours):
    """The most probable token after each, from the first to the longest context: [LENGTH]."""

    def write(model: Llama):
        def step(carry, position):
            token, cache = carry
            logits, cache = decode(model, token, position[None], cache)
            following = logits.argmax(axis=-1).astype(token.dtype)
            return (following, cache), token[0]

        start = (jnp.array([BOS]), kv_cache.empty(model.config, 1, LENGTH, "float32"))
        return jax.lax.scan(step, start, jnp.arange(LENGTH))[1]

    return np.array(compiled(ours, write)())


def words() -> list[bytes]:
    """tok512.bin: the longest word's length, then of each word its score, length and bytes."""
    content, found, at = TOKENIZER.read_bytes(), [], 4
    while at < len(content):
        (length,) = struct.unpack_from("<i", content, at + 4)
        found.append(content[at + 8 : at + 8 + length])
        at += 8 + length
    return found


def test_it_writes_the_published_story(written):
    known = words()
    assert len(known) == 512
    printed = b"".join(known[token] for token in written[1 : STEPS + 1])
    # run.c's decode: a byte by its number; no space at the beginning.
    text = re.sub(rb"<0x(..)>", lambda match: bytes.fromhex(match[1].decode()), printed).decode()
    assert text.removeprefix(" ") == STORY


def test_logits_equal_transformers(ours, written):
    """On 512 tokens of its own, with weights that are read from the file without our code."""
    with torch.no_grad():
        want = read_by_hand()(torch.from_numpy(written)[None].long()).logits.numpy()
    got = compiled(ours, forward)(written[None])
    np.testing.assert_allclose(got, want, **WHOLE)
    np.testing.assert_array_equal(np.argmax(got, axis=-1), want.argmax(axis=-1))


def read_by_hand() -> transformers.LlamaForCausalLM:
    """transformers' model, filled as llama2.c's memory_map_weights (run.c) walks the file."""
    dim, mlp, layers, heads, kv_heads, vocab, context = struct.unpack(
        "<7i", MODEL.read_bytes()[:28]
    )
    assert (dim, mlp, layers, heads, kv_heads, vocab, context) == (64, 172, 5, 8, 4, 512, 512)
    numbers = np.fromfile(MODEL, "<f4", offset=28)
    at = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += np.prod(shape)
        return numbers[at - np.prod(shape) : at].reshape(shape)

    def halves(rows: np.ndarray, count: int) -> np.ndarray:
        """Rotary pairs lie side by side in the file, half a head apart in transformers."""
        pairs = rows.reshape(layers, count, -1, 2, dim)
        return pairs.swapaxes(2, 3).reshape(rows.shape)

    tensors = {"embed_tokens": take(vocab, dim), "input_layernorm": take(layers, dim)}
    width = dim // heads * kv_heads
    tensors["self_attn.q_proj"] = halves(take(layers, dim, dim), heads)
    tensors["self_attn.k_proj"] = halves(take(layers, width, dim), kv_heads)
    tensors["self_attn.v_proj"] = take(layers, width, dim)
    tensors["self_attn.o_proj"] = take(layers, dim, dim)
    tensors["post_attention_layernorm"] = take(layers, dim)
    tensors["mlp.gate_proj"] = take(layers, mlp, dim)
    tensors["mlp.down_proj"] = take(layers, dim, mlp)
    tensors["mlp.up_proj"] = take(layers, mlp, dim)
    tensors["norm"] = take(dim)

    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for name, tensor in tensors.items():
        if name in ("embed_tokens", "norm"):
            state[f"model.{name}.weight"] = torch.tensor(tensor)
        else:
            for layer in range(layers):
                state[f"model.layers.{layer}.{name}.weight"] = torch.tensor(tensor[layer])
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model
