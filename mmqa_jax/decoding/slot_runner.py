"""What the engine keeps and runs on the device: cache, slots, and five compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules, replicated
from mmqa_jax.decoding import slot_cache
from mmqa_jax.decoding.prefix import Buckets
from mmqa_jax.decoding.sampling import SamplingParameters, choose
from mmqa_jax.models.llama import Llama

CACHE_TYPES = ("float32", "bfloat16", "int8")
WEIGHT_TYPES = ("given", "int8")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; results do not depend on them beyond the last bits.

    `slots` sequences are decoded at once, each up to `length` tokens with its prompt. A prompt is
    encoded in pieces of the sizes `buckets`, `prefill_tokens` tokens of several prompts at a time;
    prompts share what they have in common in steps of the largest bucket. Attention of prompts
    reads `block` columns of the cache at a time, of decoding `decode_block`; 0 is all: best for
    decoding unless `length` is a multiple of what is used, and for everything on a GPU, where
    every block costs a stop. `cache_dtype` None is the model's, float32 on a CPU; `weights`
    "given" keeps the model's.
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
        """Tokens for which a slot has room: `length` rounded up to whole pieces."""
        largest = self.buckets[-1]
        return -(-self.length // largest) * largest

    def rows(self, bucket: int) -> int:
        """How many pieces of a bucket are encoded at once."""
        return max(1, min(self.prefill_tokens // bucket, self.slots))


@flax.struct.dataclass
class Slots:
    """Where every slot stands; [S] each."""

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
      mesh, rules: where the cache goes; None is the default device.
      compiler_options: of XLA, for all programs.
    """

    def __init__(
        self,
        model: Llama,
        config: EngineConfig,
        mesh: Mesh | None = None,
        rules: Rules = DEFAULT_RULES,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        self.config = config
        graphdef, self._state = nnx.split(model)
        self._whole = SingleDeviceSharding(jax.devices()[0]) if mesh is None else replicated(mesh)
        columns = config.columns
        # XLA on CPU writes bfloat16 through float32 copies of the whole cache.
        on_cpu = next(iter(self._whole.device_set)).platform == "cpu"
        dtype = config.cache_dtype or ("float32" if on_cpu else model.config.dtype)
        self.cache = slot_cache.empty(model.config, config.slots, columns, dtype, mesh, rules)
        of_cache = jax.tree.map(lambda x: x.sharding, self.cache)
        block, decode_block = config.block or columns, config.decode_block or columns

        def encode(state, cache, tokens, starts, ends, rows, patches=None):
            model = nnx.merge(graphdef, state)
            embedded = model.embed(jnp.maximum(tokens, 0))
            if patches is not None:
                patches = patches.astype(embedded.dtype)
                embedded = jnp.where(tokens[..., None] < 0, patches, embedded)
            return slot_cache.forward(
                model,
                embedded,
                cache,
                starts=starts,
                ends=ends,
                rows=rows,
                block=block,
            )

        def begin(state, slots, hidden, last, rows, positions, parameters):
            picked = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
            logits = nnx.merge(graphdef, state).logits(picked)
            zeros = jnp.zeros_like(rows)
            token, logprob = choose(logits, parameters, zeros, rows < config.slots)
            fresh = Slots(token, positions, zeros + 1, parameters)
            slots = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), slots, fresh)
            return slots, token, logprob

        def step(state, cache, slots, active):
            model = nnx.merge(graphdef, state)
            position = jnp.where(active, slots.position, 0)
            hidden, cache = slot_cache.forward(
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

        def score(state, hidden, targets):
            logits = nnx.merge(graphdef, state).logits(hidden)  # [R, L, V]
            chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            return chosen - jax.nn.logsumexp(logits, axis=-1), logits.argmax(-1) == targets

        def copy(cache, source, target, end):
            blocks = (end + block - 1) // block
            return slot_cache.copy(cache, source, target, blocks, block)

        def compiled(program, donate, out_shardings):
            return jax.jit(
                program,
                donate_argnums=donate,
                out_shardings=out_shardings,
                compiler_options=compiler_options and dict(compiler_options),
            )

        whole = self._whole
        self._encode = compiled(encode, 1, (whole, of_cache))
        self._begin = compiled(begin, 1, (whole, whole, whole))
        self._step = compiled(step, (1, 2), (of_cache, whole, whole, whole))
        self._score = compiled(score, (), (whole, whole))
        self._copy = compiled(copy, 0, of_cache)
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
        patches: np.ndarray | None = None,
    ) -> jax.Array:
        """Pieces [R, L] into the cache; hidden states [R, L, H] on the device. See `forward`.

        patches: float32 [R, L, H], read where tokens are negative; None where none is (a program
        of its own).
        """
        inputs = self.put((tokens, starts, ends, rows, patches))
        hidden, self.cache = self._encode(self._state, self.cache, *inputs)
        return hidden

    def begin(
        self,
        hidden: jax.Array,
        last: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        parameters: SamplingParameters,
    ) -> tuple[jax.Array, jax.Array]:
        """First tokens of encoded prompts; their slots are ready for `step`.

        Args:
          hidden: of `encode`, [R, L, H].
          last: int32 [R], place of the prompt's last token in the piece.
          rows: int32 [R], slots; `config.slots` where a row's prompt is not at its end.
          positions: int32 [R], of the first token.
          parameters: of the R requests.

        Returns:
          Tokens [R] and their log-probabilities.
        """
        inputs = self.put((last, rows, positions, parameters))
        self._slots, token, logprob = self._begin(self._state, self._slots, hidden, *inputs)
        return token, logprob

    def step(self, active: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """The next token of every active slot (bool [S]) and its log-probability, [S] each."""
        self.cache, self._slots, token, logprob = self._step(
            self._state, self.cache, self._slots, self.put(active)
        )
        return token, logprob

    def score(self, hidden: jax.Array, targets: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Log-probability of the token after each of [R, L], and whether it is the likeliest."""
        return self._score(self._state, hidden, self.put(targets))

    def copy(self, source: int, target: int, end: int) -> None:
        """Columns 0..end of one slot into another (rounded up to whole blocks)."""
        where = self.put((np.int32(source), np.int32(target), np.int32(end)))
        self.cache = self._copy(self.cache, *where)

    def _zeros(self, dtype=np.int32, shape: tuple[int, ...] = ()) -> jax.Array:
        return jnp.zeros((self.config.slots, *shape), dtype, device=self._whole)

    def put(self, inputs: Any) -> Any:
        """Host arrays on the device, whole on every device of a mesh."""
        # The caller must not change them afterwards: on CPU JAX may read them in place.
        return jax.device_put(inputs, self._whole)
