"""The engine's state on the device, and the five compiled programs that run on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import replicated
from mmqa_jax.decoding import kv_cache
from mmqa_jax.decoding.kv_cache import Branches
from mmqa_jax.decoding.prefix_cache import Buckets
from mmqa_jax.decoding.sampling import SamplingParameters, choose
from mmqa_jax.models.llama import Llama, last_token

CACHE_TYPES = ("float32", "bfloat16", "int8")
WEIGHT_TYPES = ("given", "int8")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; results do not depend on them beyond the last bits.

    `slots` sequences are decoded at once, each up to `length` tokens including its prompt. Prompts
    are encoded in chunks of the sizes `buckets`, `prefill_tokens` tokens of several prompts at a
    time; prompts share their common prefix in steps of the largest bucket. Prefill attention
    reads `block` columns of the cache at a time, decoding `decode_block`; 0 is all of them: best
    for decoding unless `length` is many times what is used, and for everything on a GPU, where
    every block costs a synchronization. `cache_dtype` None is the model's, float32 on a CPU;
    `weights` "given" keeps the model's.
    """

    slots: int = 16
    length: int = 2048
    buckets: Buckets = (32, 128)
    prefill_tokens: int = 256
    block: int = 128
    decode_block: int = 0
    cache_dtype: str | None = None
    weights: str = "given"

    def __post_init__(self):
        object.__setattr__(self, "buckets", tuple(self.buckets))
        for name in ("slots", "length", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"engine.{name} is {getattr(self, name)}: expected at least 1; raise it."
                )
        pairs = zip(self.buckets[:-1], self.buckets[1:], strict=True)
        if not self.buckets or self.buckets[0] < 1 or any(b <= a or b % a for a, b in pairs):
            raise UserError(
                f"engine.buckets is {self.buckets}: expected ascending sizes, each a multiple of "
                "the one before, such as (32, 128)."
            )
        for name in ("block", "decode_block"):
            block = getattr(self, name)
            if block < 0 or (block and self.columns % block):
                raise UserError(
                    f"engine.{name} is {block}: expected 0 (all) or a divisor of {self.columns}, "
                    f"engine.length rounded up to a multiple of {self.buckets[-1]}, the largest of "
                    "engine.buckets."
                )
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_TYPES:
            raise UserError(
                f"engine.cache_dtype is {self.cache_dtype!r}: expected one of "
                f"{', '.join(CACHE_TYPES)}, or None for the model's."
            )
        if self.weights not in WEIGHT_TYPES:
            raise UserError(
                f"engine.weights is {self.weights!r}: expected one of {', '.join(WEIGHT_TYPES)}."
            )

    @property
    def columns(self) -> int:
        """Tokens that a slot can hold: `length` rounded up to whole chunks."""
        largest = self.buckets[-1]
        return -(-self.length // largest) * largest

    @property
    def scored_tokens(self) -> int:
        """How many log-probabilities one program computes: few tokens of a prompt are scored."""
        return max(1, self.prefill_tokens // 4)

    def rows(self, bucket: int) -> int:
        """How many chunks of a bucket are encoded at once."""
        return max(1, min(self.prefill_tokens // bucket, self.slots))


@flax.struct.dataclass
class Slots:
    """Decoding state of every slot; [S] each."""

    token: jax.Array  # int32: the last token, not yet in the cache
    position: jax.Array  # int32: its position
    count: jax.Array  # int32: new tokens so far
    parameters: SamplingParameters


class SlotRunner:
    """A model with its cache and slots on the device; every method enqueues one program.

    Inputs are numpy arrays of fixed shapes, so that each program is compiled once per bucket (or
    once at all).

    Args:
      model: with unstacked layers, on the mesh if there is one.
      config: sizes.
      mesh: where the cache goes; None is the default device.
    """

    def __init__(
        self,
        model: Llama,
        config: EngineConfig,
        mesh: Mesh | None = None,
    ):
        self.config = config
        graphdef, self._state = nnx.split(model)
        self._whole = SingleDeviceSharding(jax.devices()[0]) if mesh is None else replicated(mesh)
        columns = config.columns
        # XLA on CPU writes bfloat16 through float32 copies of the whole cache.
        on_cpu = next(iter(self._whole.device_set)).platform == "cpu"
        dtype = config.cache_dtype or ("float32" if on_cpu else model.config.dtype)
        self.cache = kv_cache.empty(model.config, config.slots, columns, dtype, mesh)
        of_cache = jax.tree.map(lambda x: x.sharding, self.cache)
        block, decode_block = config.block or columns, config.decode_block or columns

        def encode(state, cache, tokens, starts, ends, rows, branches, patches=None):
            model = nnx.merge(graphdef, state)
            embedded = model.embed(jnp.maximum(tokens, 0))
            if patches is not None:
                patches = patches.astype(embedded.dtype)
                embedded = jnp.where(tokens[..., None] < 0, patches, embedded)
            return kv_cache.forward(
                model,
                embedded,
                cache,
                starts=starts,
                ends=ends,
                rows=rows,
                block=block,
                branches=branches,
            )

        def begin(state, slots, hidden, lengths, rows, positions, parameters):
            logits = nnx.merge(graphdef, state).logits(last_token(hidden, lengths))
            zeros = jnp.zeros_like(rows)
            token, logprob = choose(logits, parameters, zeros, rows < config.slots)
            fresh = Slots(token, positions, zeros + 1, parameters)
            slots = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), slots, fresh)
            return slots, token, logprob

        def step(state, cache, slots, active):
            model = nnx.merge(graphdef, state)
            position = jnp.where(active, slots.position, 0)
            hidden, cache = kv_cache.forward(
                model,
                model.embed(slots.token[:, None]),
                cache,
                starts=position,
                ends=position + 1,
                rows=jnp.where(active, jnp.arange(config.slots), config.slots),
                block=decode_block,
                all_rows=True,
            )
            logits = model.logits(hidden[:, 0])
            token, logprob = choose(logits, slots.parameters, slots.count, active)
            slots = slots.replace(token=token, position=slots.position + 1, count=slots.count + 1)
            return cache, slots, token, logprob

        def score(state, hidden, rows, offsets, targets):
            logits = nnx.merge(graphdef, state).logits(hidden[rows, offsets])  # [N, V]
            chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
            return chosen - jax.nn.logsumexp(logits, axis=-1), logits.argmax(-1) == targets

        def copy(cache, source, target, end):
            blocks = (end + block - 1) // block
            return kv_cache.copy(cache, source, target, blocks, block)

        whole = self._whole
        self._encode = jax.jit(encode, donate_argnums=1, out_shardings=(whole, of_cache))
        self._begin = jax.jit(begin, donate_argnums=1, out_shardings=(whole, whole, whole))
        self._step = jax.jit(
            step, donate_argnums=(1, 2), out_shardings=(of_cache, whole, whole, whole)
        )
        self._score = jax.jit(score, out_shardings=(whole, whole))
        self._copy = jax.jit(copy, donate_argnums=0, out_shardings=of_cache)
        self._slots = Slots(
            *(self._zeros() for _ in range(3)),
            SamplingParameters(
                self._zeros(np.float32),
                self._zeros(),
                self._zeros(np.float32),
                self._zeros(np.uint32, (2,)),
            ),
        )

    def encode(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        rows: np.ndarray,
        branches: Branches,
        patches: np.ndarray | None = None,
    ) -> jax.Array:
        """Encodes chunks [R, L] into the cache; hidden states [R, L, H]. See `kv_cache.forward`.

        patches: float32 [R, L, H], used where tokens are negative; None if there are none (a
        separate program).
        """
        inputs = self.put((tokens, starts, ends, rows, branches, patches))
        hidden, self.cache = self._encode(self._state, self.cache, *inputs)
        return hidden

    def begin(
        self,
        hidden: jax.Array,
        lengths: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        parameters: SamplingParameters,
    ) -> tuple[jax.Array, jax.Array]:
        """Draws the first tokens after encoded prompts; their slots are then ready for `step`.

        Args:
          hidden: from `encode`, [R, L, H].
          lengths: int32 [R], tokens of the prompt's last chunk.
          rows: int32 [R], slots; `config.slots` for rows whose prompt is not complete.
          positions: int32 [R], of the first token.
          parameters: of the R requests.

        Returns:
          Tokens [R] and their log-probabilities.
        """
        inputs = self.put((lengths, rows, positions, parameters))
        self._slots, token, logprob = self._begin(self._state, self._slots, hidden, *inputs)
        return token, logprob

    def step(self, active: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """The next token of every active slot (bool [S]) and its log-probability, [S] each."""
        self.cache, self._slots, token, logprob = self._step(
            self._state, self.cache, self._slots, self.put(active)
        )
        return token, logprob

    def score(
        self, hidden: jax.Array, rows: np.ndarray, offsets: np.ndarray, targets: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities of tokens, and whether each is the likeliest: [N] each.

        Args:
          hidden: from `encode`, [R, L, H].
          rows, offsets: int32 [N], the hidden states that predict the tokens.
          targets: int32 [N], the tokens; N is `config.scored_tokens`.
        """
        return self._score(self._state, hidden, *self.put((rows, offsets, targets)))

    def copy(self, source: int, target: int, end: int) -> None:
        """Copies columns 0..end of one slot into another (rounded up to whole blocks)."""
        inputs = self.put((np.int32(source), np.int32(target), np.int32(end)))
        self.cache = self._copy(self.cache, *inputs)

    def _zeros(self, dtype=np.int32, shape: tuple[int, ...] = ()) -> jax.Array:
        return jnp.zeros((self.config.slots, *shape), dtype, device=self._whole)

    def put(self, inputs: Any) -> Any:
        """Moves host arrays to the device, replicated over a mesh."""
        # The caller must not modify them afterwards: on CPU JAX may alias them.
        return jax.device_put(inputs, self._whole)
