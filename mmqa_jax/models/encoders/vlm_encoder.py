"""A Qwen-VL that writes nothing: one vector of a prompt, or a judgement of yes or no.

Texts and pictures stand in one prompt, and the state of its last token is what is kept:
Qwen3-VL-Embedding makes a vector of it, Qwen3-VL-Reranker compares two next tokens by it.
Originals: QwenLM/Qwen3-VL-Embedding src/models/qwen3_vl_embedding.py and qwen3_vl_reranker.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.encoders.sentence_encoder import last_token
from mmqa_jax.models.qwen_vl.network import PatchBatch, QwenVL, QwenVLConfig, spread
from mmqa_jax.models.two_towers.network import l2_normalize


class QwenVLPooled(QwenVL):
    """A Qwen-VL whose last token's state is asked for."""

    def last_states(
        self,
        input_ids: jax.Array,
        mask: jax.Array,
        pictures: PatchBatch | None = None,
        rows: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Right-padded prompts -> the normed state of each one's last token, float32 [B, H].

        Args:
          input_ids: int [B, L], one placeholder for each token of a picture.
          mask: bool [B, L], true at real tokens.
          pictures: K of each prompt, arrays [B, K, ...] of one bucket of U units; None: none has
            any, and `rows` and `positions` are not needed.
          rows: int [B, L], which of its pictures' K * U units a token takes; -1: none.
          positions: int [B, L, 3].
        """
        tokens, deepstack = self.llama.embed(input_ids), None
        if pictures is not None:
            assert rows is not None, "pictures have places in the prompt"
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pictures)
            found = self.encode_images(flat)  # [B * K, U, features]
            found = found.reshape(len(input_ids), -1, found.shape[-1])
            own = jnp.take_along_axis(found, jnp.maximum(rows, 0)[..., None], axis=1)
            tokens, deepstack = spread(tokens, own, rows >= 0)
        hidden = self.llama.encode(tokens, positions=positions, deepstack=deepstack)
        return last_token(hidden, mask)


class QwenVLEncoder(QwenVLPooled):
    """One vector of a prompt; without an output head."""

    def __init__(self, config: QwenVLConfig, truncate_dim: int | None = None, *, rngs: nnx.Rngs):
        """`truncate_dim`: the first so many values are kept (Matryoshka); None: all."""
        headless = dataclasses.replace(config.llama, tied=True)
        super().__init__(dataclasses.replace(config, llama=headless), rngs=rngs)
        self.truncate_dim = truncate_dim

    def encode_text(self, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Prompts without pictures, [B, L] each -> float32 [B, D], of length 1."""
        return self.encode_prompts(input_ids, attention_mask)

    def encode_prompts(self, *prompts: Any) -> jax.Array:
        """Prompts as `last_states` takes them -> float32 [B, D], of length 1."""
        states = self.last_states(*prompts)
        return l2_normalize(states[:, : self.truncate_dim])


class QwenVLYesNo(QwenVLPooled):
    """How much likelier yes is than no behind a prompt."""

    def __init__(self, config: QwenVLConfig, yes: int, no: int, *, rngs: nnx.Rngs):
        """`yes` and `no`: the ids of the two tokens."""
        super().__init__(config, rngs=rngs)
        self.yes, self.no = yes, no

    def __call__(self, *prompts: Any) -> jax.Array:
        """Prompts as `last_states` takes them -> log-odds of yes, float32 [B]."""
        states = self.last_states(*prompts)
        logits = self.llama.logits(states.astype(self.config.llama.dtype))  # [B, V]
        return logits[:, self.yes] - logits[:, self.no]
