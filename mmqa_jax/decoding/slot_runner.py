"""The engine's state on the device, and the five compiled programs that run on it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import batch_blocks, batch_sharding, replicated, split_rows
from mmqa_jax.decoding import kv_cache, scanned_cache
from mmqa_jax.decoding.cached_attention import Branches
from mmqa_jax.decoding.kv_cache import KVCache, run_layers, tokens_in
from mmqa_jax.decoding.prefix_cache import Buckets
from mmqa_jax.decoding.sampling import SamplingParameters, choose
from mmqa_jax.models.attention.flash import implementation_for
from mmqa_jax.models.llama.network import LayerTraits, Llama, for_length, last_token, layer_traits
from mmqa_jax.models.qwen_vl.network import spread

CACHE_TYPES = ("float32", "bfloat16", "int8")
WEIGHT_TYPES = ("given", "int8")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; results do not depend on them beyond the last bits.

    `slots` sequences are decoded at once, each up to `length` tokens including its prompt. Prompts
    are encoded in chunks of the sizes `buckets`, `prefill_tokens` tokens of several prompts at a
    time; prompts share their common prefix in steps of the largest bucket. Decoding reads the
    columns that the longest sequence has reached, in steps of `decode_block`, with a program for
    each; 0 is about a quarter of all. Prefill attention reads `block` columns at a time; 0 is
    `decode_block`: best on a GPU, where every block costs a synchronization. `cache_dtype` None is
    the model's, float32 on a CPU; `weights` "given" keeps the model's. `scan_layers` compiles one
    layer instead of all; None does so on a TPU, where it costs no copies.
    """

    slots: int = 16
    length: int = 2048
    buckets: Buckets = (32, 128)
    prefill_tokens: int = 256
    block: int = 128
    decode_block: int = 0
    cache_dtype: str | None = None
    weights: str = "given"
    scan_layers: bool | None = None

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
        if self.block < 0 or (self.block and self.columns % self.block):
            raise UserError(
                f"engine.block is {self.block}: expected 0 (all) or a divisor of {self.columns}, "
                f"engine.length rounded up to a multiple of {self.buckets[-1]}, the largest of "
                "engine.buckets."
            )
        if self.decode_block < 0 or self.decode_block % self._unit:
            raise UserError(
                f"engine.decode_block is {self.decode_block}: expected 0 (a quarter of all) or a "
                f"multiple of {self._unit}, of the largest of engine.buckets and engine.block."
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
    def segment(self) -> int:
        """Columns of a segment of the cache: decoding reads whole segments."""
        quarter = -(-self.columns // (4 * self._unit)) * self._unit
        return min(self.decode_block or quarter, self.columns)

    def read(self, columns: int) -> int:
        """How many columns a program reads whose rows reach into the first `columns`."""
        return min(-(-int(columns) // self.segment) * self.segment, self.columns)

    @property
    def _unit(self) -> int:
        """What divides a segment: neither a chunk nor a block may straddle two."""
        return math.lcm(self.buckets[-1], self.block or 1)

    @property
    def scored_tokens(self) -> int:
        """How many log-probabilities one program computes: few tokens of a prompt are scored."""
        return max(1, self.prefill_tokens // 4)

    def rows(self, bucket: int, shards: int = 1) -> int:
        """How many chunks of a bucket are encoded at once: equally many, and one at least, of each
        shard of the slots."""
        return shards * max(1, min(self.prefill_tokens // bucket, self.slots) // shards)


def scans(config: EngineConfig, mesh: Mesh | None) -> bool:
    """Whether an engine on the mesh (None: the default device) scans the model's layers."""
    if config.scan_layers is not None:
        return config.scan_layers
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    return device.platform == "tpu"


def slot_shards(slots: int, mesh: Mesh | None) -> int:
    """Over how many shards of a mesh so many slots are split; 1 where they do not divide."""
    shards = 1 if mesh is None else batch_blocks(mesh)
    return 1 if slots % shards else shards


@flax.struct.dataclass
class Slots:
    """Decoding state of every slot; [S] each."""

    token: jax.Array  # int32: the last token, not yet in the cache
    position: jax.Array  # int32: its position
    count: jax.Array  # int32: new tokens so far
    parameters: SamplingParameters
    # int32: by how much rotary positions differ from `position` (M-RoPE); None: they are it.
    shift: jax.Array | None = None


class Programs:
    """The engine's jitted programs for a model, sizes and mesh; nothing is allocated.

    They take the model's state, the cache and the slots (both donated), and what `SlotRunner`
    passes on. `encode` and `step` are what `mmqa plan` calls prefill and decode. With `by_layer`
    (one CPU) these are functions that run many programs, and the state is a SplitState, of which
    `begin` and `score` take what is no layer's.

    Args:
      model: with the layers that its cache is made for, stacked (`scanned_cache`) or not
        (`kv_cache`); arrays or ShapeDtypeStructs.
      config: sizes.
      mesh: where all lies; None is the default device.
    """

    def __init__(self, model: Llama, config: EngineConfig, mesh: Mesh | None = None):
        self.whole = (
            SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else replicated(mesh)
        )
        model = for_length(model, config.length)
        self.scanned = not isinstance(model.layers, nnx.List)
        device = next(iter(self.whole.device_set))
        # On one CPU a program for each layer, see layer_programs.
        self.by_layer = mesh is None and device.platform == "cpu" and not self.scanned
        graphdef = split_model(model)[0] if self.by_layer else nnx.graphdef(model)
        columns, block = config.columns, config.block or config.columns
        # XLA on CPU writes bfloat16 through float32 copies of the whole cache.
        computed = "float32" if device.platform == "cpu" else model.config.dtype
        dtype = config.cache_dtype or computed
        self.shards = slot_shards(config.slots, mesh)
        # Of arrays whose rows are those of the slots, or of chunks that go to them.
        self.rows = batch_sharding(mesh) if self.shards > 1 else self.whole
        sizes = (model.config, config.slots, columns, dtype, mesh)
        # Steps (and, on a GPU, prompts) read each slot's own columns: one program, whatever the
        # longest slot's are.
        segment = config.segment
        if self.scanned:
            self.ragged = scanned_cache.ragged_fits(model.config, columns, device)
            self.cache = scanned_cache.layout(*sizes)
        else:
            chunk = config.buckets[0]
            self.ragged = kv_cache.ragged_fits(model.config, columns, chunk, dtype, device)
            segment = columns if self.ragged else segment
            self.cache = kv_cache.layout(*sizes, segment)
        self.slots = _slots(config.slots, self.whole, shifts=bool(model.config.mrope))
        arrays = self.cache, self.slots
        placed = jax.tree.map(lambda x: x.sharding or self.whole, arrays)
        # One program makes all of them: one for every shape would take longer to compile. They are
        # committed to their devices, as what `encode` returns is: it would be compiled twice.
        self.empty = jax.jit(functools.partial(kv_cache.zeros, arrays), out_shardings=placed)
        # A GPU waits for the host at a branch, which could not enqueue the next step meanwhile.
        self.told_of_sampling = device.platform == "gpu"
        implementation = implementation_for(device)

        def encode(
            state, cache, tokens, starts, ends, rows, branches, patches, shifts, adapters, limit
        ):
            model = nnx.merge(graphdef, state)
            embedded, deepstack = embed(model, tokens, patches)
            embedded = by_rows(embedded)
            if self.scanned:
                return scanned_cache.prefill(
                    model,
                    embedded,
                    cache,
                    starts=starts,
                    rows=rows,
                    limit=limit,
                    branches=branches,
                    shifts=shifts,
                    deepstack=deepstack,
                    adapters=adapters,
                    implementation=implementation,
                    mesh=mesh,
                )
            return kv_cache.forward(
                model,
                embedded,
                cache,
                starts=starts,
                ends=ends,
                rows=rows,
                block=block,
                branches=branches,
                shifts=shifts,
                deepstack=deepstack,
                adapters=adapters,
                limit=limit,
                implementation="ragged" if self.ragged else implementation,
                mesh=mesh,
            )

        def begin(state, slots, hidden, lengths, rows, positions, parameters, shifts, sampled):
            logits = nnx.merge(graphdef, state).logits(last_token(hidden, lengths))
            zeros = jnp.zeros_like(rows)
            token, logprob = choose(logits, parameters, zeros, rows < config.slots, sampled)
            fresh = Slots(token, positions, zeros + 1, parameters, shifts)
            slots = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), slots, fresh)
            return slots, token, logprob

        def step(state, cache, slots, active, adapters, limit, sampled):
            model = nnx.merge(graphdef, state)
            position = jnp.where(active, slots.position, 0)
            embedded = by_rows(model.embed(slots.token[:, None]))
            if self.scanned:
                hidden, cache = scanned_cache.decode(
                    model,
                    embedded,
                    cache,
                    positions=position,
                    active=active,
                    limit=limit,
                    shifts=slots.shift,
                    adapters=adapters,
                    mesh=mesh,
                    ragged=self.ragged,
                )
            else:
                hidden, cache = kv_cache.forward(
                    model,
                    embedded,
                    cache,
                    starts=position,
                    ends=position + 1,
                    rows=jnp.where(active, jnp.arange(config.slots), config.slots),
                    block=columns,
                    shifts=None if slots.shift is None else slots.shift[:, None],
                    all_rows=True,
                    adapters=adapters,
                    limit=limit,
                    implementation="ragged" if self.ragged else "blocks",
                    mesh=mesh,
                )
            return cache, *next_tokens(model, slots, hidden, active, sampled)

        def score(state, hidden, rows, offsets, targets):
            predicting = by_rows(hidden[rows, offsets])  # each device some of them
            logits = nnx.merge(graphdef, state).logits(predicting)  # [N, V]
            chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
            total = jax.nn.logsumexp(logits, axis=-1)
            return chosen - total, logits.argmax(-1), logits.max(-1) - total

        def copy(cache, source, target, end):
            of_layers = scanned_cache if self.scanned else kv_cache
            return of_layers.copy(cache, source, target, end, min(block, segment), mesh)

        def by_rows(x: jax.Array) -> jax.Array:
            return split_rows(x) if self.shards > 1 else x

        whole = self.whole
        of_cache = jax.tree.map(lambda x: x.sharding or whole, self.cache)
        self.encode = jax.jit(
            encode, static_argnums=10, donate_argnums=1, out_shardings=(self.rows, of_cache)
        )
        self.begin = jax.jit(
            begin, static_argnums=8, donate_argnums=1, out_shardings=(whole, whole, whole)
        )
        self.step = jax.jit(
            step,
            static_argnums=(5, 6),
            donate_argnums=(1, 2),
            out_shardings=(of_cache, whole, whole, whole),
        )
        if self.by_layer:
            self.encode, self.step = encode_and_step(
                graphdef, layer_traits(model.config, columns), block, embed, next_tokens
            )
        self.score = jax.jit(score, out_shardings=(whole, whole, whole))
        self.copy = jax.jit(copy, donate_argnums=0, out_shardings=of_cache)

    def sampled(self, temperatures: np.ndarray) -> bool | None:
        """What `begin` and `step` are told of sampling at these temperatures, see `choose`."""
        return bool((temperatures > 0).any()) if self.told_of_sampling else None


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """What programs are made for; equal for two models of one config."""

    graphdef: nnx.GraphDef
    shapes: Llama = dataclasses.field(compare=False)  # of ShapeDtypeStructs


@functools.lru_cache(maxsize=4)  # few: compiled programs take memory of a device
def _programs_of(architecture: _Architecture, config: EngineConfig, mesh: Mesh | None) -> Programs:
    """The programs of this engine, or of an equal one before it."""
    return Programs(architecture.shapes, config, mesh)


def embed(
    model: Llama, tokens: jax.Array, patches: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """[R, L, H] of tokens int [R, L]; where they are negative, of the patches [R, L, features].

    And what these add to the first layers' states, [n, R, L, H]; None: nothing.
    """
    embedded = model.embed(jnp.maximum(tokens, 0))
    if patches is None:
        return embedded, None
    return spread(embedded, patches, tokens < 0)


def next_tokens(
    model: Llama, slots: Slots, hidden: jax.Array, active: jax.Array, sampled: bool | None
) -> tuple[Slots, jax.Array, jax.Array]:
    """The slots after a step, their tokens [S] and log-probabilities; hidden is [S, 1, H].

    sampled: see `choose`.
    """
    logits = model.logits(hidden[:, 0])
    token, logprob = choose(logits, slots.parameters, slots.count, active, sampled)
    slots = slots.replace(token=token, position=slots.position + 1, count=slots.count + 1)
    return slots, token, logprob


def _slots(count: int, sharding: Sharding, *, shifts: bool) -> Slots:
    """ShapeDtypeStructs of the state of `count` slots."""

    def array(kind: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), kind, sharding=sharding)

    number = array("float32")
    parameters = SamplingParameters(number, array("int32"), number, array("uint32", 2))
    integer = array("int32")
    return Slots(integer, integer, integer, parameters, integer if shifts else None)


class SlotRunner:
    """A model with its cache and slots on the device; every method enqueues one program.

    Inputs are numpy arrays of fixed shapes, so that each program is compiled once per bucket (or
    once at all), and per step of `EngineConfig.segment` in the columns that it reads.

    Args:
      model: on the mesh if there is one; see `Programs`.
      config: sizes.
      mesh: where the cache goes; None is the default device.
    """

    def __init__(self, model: Llama, config: EngineConfig, mesh: Mesh | None = None):
        self.config, self._mesh = config, mesh
        graphdef, state = nnx.split(model)
        shapes = nnx.merge(graphdef, jax.eval_shape(lambda: state))
        self._programs = _programs_of(_Architecture(graphdef, shapes), config, mesh)
        self.use(model)
        self.cache, self._slots = self._programs.empty()
        self._temperatures = np.zeros(config.slots, np.float32)  # the slots', for the host

    def use(self, model: Llama) -> None:
        """Computes with the arrays of this model, which is like the first one."""
        # The model's arrays, and those that are no layer's.
        self._state = self._outer = nnx.state(model)
        if self._programs.by_layer:
            _, self._state = split_model(model)
            self._outer = self._state.outer

    def encode(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        rows: np.ndarray,
        branches: Branches,
        patches: jax.Array | None = None,
        shifts: np.ndarray | None = None,
        adapters: np.ndarray | None = None,
    ) -> jax.Array:
        """Encodes chunks [R, L] into the cache; hidden states [R, L, H]. See `kv_cache.forward`.

        The n-th of `shards` equal parts of the R rows is of slots of the n-th part of all slots.
        patches: [R, L, features] on the device, as `rows` says, used where tokens are negative;
        None if there are none (a separate program). shifts: int32 [R, L, 3], with M-RoPE.
        adapters: int32 [R, 1], numbers of `lora.add_adapters`; None: the model has none.
        """
        limit = self.config.read(ends.max())
        if self._programs.scanned:  # it reads what is in front of the chunks
            limit = self.config.read(starts.max())
            branches = branches if branches.trunk.any() else None
        elif self._programs.ragged:
            limit = self.config.columns
        inputs = self._put_rows((tokens, starts, ends, rows, branches, patches, shifts, adapters))
        hidden, self.cache = self._run(
            self._programs.encode, self._state, self.cache, *inputs, limit
        )
        return hidden

    def begin(
        self,
        hidden: jax.Array,
        lengths: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        parameters: SamplingParameters,
        shifts: np.ndarray | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Draws the first tokens after encoded prompts; their slots are then ready for `step`.

        Args:
          hidden: from `encode`, [R, L, H].
          lengths: int32 [R], tokens of the prompt's last chunk.
          rows: int32 [R], slots; `config.slots` for rows whose prompt is not complete.
          positions: int32 [R], of the first token.
          parameters: of the R requests.
          shifts: int32 [R], by how much rotary positions differ from these, with M-RoPE.

        Returns:
          Tokens [R] and their log-probabilities.
        """
        begun = rows < self.config.slots
        self._temperatures[rows[begun]] = parameters.temperature[begun]
        sampled = self._programs.sampled(parameters.temperature[begun])
        inputs = self._put_rows((lengths, rows, positions, parameters, shifts))
        self._slots, token, logprob = self._run(
            self._programs.begin, self._outer, self._slots, hidden, *inputs, sampled
        )
        return token, logprob

    def step(
        self, active: np.ndarray, columns: int, adapters: np.ndarray | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The next token of every active slot (bool [S]) and its log-probability, [S] each.

        columns: what the longest active sequence takes with the token that this step caches. There
          is one program for every multiple of a segment, and one for all where decoding is ragged.
        adapters: int32 [S, 1], of the slots, as in `encode`.
        """
        limit = self.config.columns if self._programs.ragged else self.config.read(columns)
        inputs = self._state, self.cache, self._slots, *self.put((active, adapters)), limit
        sampled = self._programs.sampled(self._temperatures[active])
        self.cache, self._slots, token, logprob = self._run(self._programs.step, *inputs, sampled)
        return token, logprob

    def score(
        self, hidden: jax.Array, rows: np.ndarray, offsets: np.ndarray, targets: np.ndarray
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Log-probabilities of tokens, the likeliest tokens in their places, and theirs: [N] each.

        Args:
          hidden: from `encode`, [R, L, H].
          rows, offsets: int32 [N], the hidden states that predict the tokens.
          targets: int32 [N], the tokens; N is `config.scored_tokens`.
        """
        inputs = self.put((rows, offsets, targets))
        return self._run(self._programs.score, self._outer, hidden, *inputs)

    def copy(self, source: int, target: int, end: int) -> None:
        """Copies columns 0..end of one slot into another (rounded up to whole blocks)."""
        inputs = self.put((np.int32(source), np.int32(target), np.int32(end)))
        self.cache = self._run(self._programs.copy, self.cache, *inputs)

    def _run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a program on the mesh: while it is traced, it asks for that one's platform."""
        with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            return program(*arguments)

    @property
    def rows(self) -> Sharding:
        """Where the embeddings of patches in a batch of chunks are taken from."""
        return self._programs.whole

    @property
    def shards(self) -> int:
        """Into how many equal shards the slots, and the rows of a batch of chunks, are split."""
        return self._programs.shards

    def put(self, inputs: Any) -> Any:
        """Moves host arrays to the device, replicated over a mesh."""
        # The caller must not modify them afterwards: on CPU JAX may alias them.
        return jax.device_put(inputs, self._programs.whole)

    def _put_rows(self, inputs: Any) -> Any:
        """Moves host arrays of chunks [R, ...] to the devices of their slots."""
        return jax.device_put(inputs, self._programs.rows)


# A model's forward pass on one CPU as a small program for each layer, the same for all.
#
# XLA unrolls layers that are not scanned, and a scan on a CPU copies each layer's weights. One
# program of 30 layers takes 30 times as long to compile, and to read from the compile cache, as
# one of a layer. A CPU loses nothing where a program ends; an accelerator would wait for the
# host.


class SplitState(NamedTuple):
    """A model's arrays, its layers by themselves."""

    outer: nnx.State  # embedding, last norm and head
    layers: tuple[tuple[nnx.GraphDef, nnx.State], ...]


def split_model(model: Llama) -> tuple[nnx.GraphDef, SplitState]:
    """The model without its layers, which are not stacked, and its arrays."""
    layers, model.layers = model.layers, nnx.List([])
    graphdef, outer = nnx.split(model)
    model.layers = layers
    return graphdef, SplitState(outer, tuple(map(nnx.split, layers)))


def encode_and_step(
    graphdef: nnx.GraphDef, traits: LayerTraits, block: int, embed: Callable, next_tokens: Callable
) -> tuple[Callable, Callable]:
    """`encode` and `step` of `slot_runner.Programs`, for a SplitState.

    Args:
      graphdef: of the model without its layers.
      traits: of its layers.
      block: columns that `encode` reads at a time.
      embed: (model, tokens, patches) -> [R, L, H], and what deepstack adds or None.
      next_tokens: (model, slots, normed hidden states [S, 1, H], active, sampled) -> what a step
        returns after its cache.
    """

    def encode(state: SplitState, cache: KVCache, *chunk: Any) -> tuple[jax.Array, KVCache]:
        *chunk, limit = chunk
        x, deepstack, of_tokens = _enter(state.outer, *chunk, graphdef=graphdef, embed=embed)
        x, cache = run_layers(
            state.layers, x, cache, of_tokens, traits, deepstack, block=block, limit=limit
        )
        return _leave(state.outer, x, graphdef=graphdef), cache

    def step(
        state: SplitState,
        cache: KVCache,
        of_slots: Any,
        active: jax.Array,
        adapters: jax.Array | None,
        limit: int,
        sampled: bool | None,
    ):
        x, of_tokens = _enter_step(
            state.outer, of_slots, active, adapters, graphdef=graphdef, embed=embed
        )
        whole = sum(segment.columns for segment in cache[0].segments)
        x, cache = run_layers(
            state.layers, x, cache, of_tokens, traits, block=whole, all_rows=True, limit=limit
        )
        options = {"graphdef": graphdef, "next_tokens": next_tokens, "sampled": sampled}
        return cache, *_leave_step(state.outer, of_slots, x, active, **options)

    return encode, step


# By shapes, so that engines of other sizes share them where these are the same.
@functools.partial(jax.jit, static_argnames=("graphdef", "embed"))
def _enter(
    outer: nnx.State,
    tokens: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    rows: jax.Array,
    branches: Any,
    patches: jax.Array | None,
    shifts: jax.Array | None,
    adapters: jax.Array | None,
    *,
    graphdef: nnx.GraphDef,
    embed: Callable,
) -> tuple[Any, ...]:
    """Computes what the layers take: tokens [R, L] embedded, deepstack, and their places."""
    model = nnx.merge(graphdef, outer)
    of_tokens = tokens_in(
        model.config,
        tokens.shape[1],
        starts=starts,
        ends=ends,
        rows=rows,
        branches=branches,
        shifts=shifts,
        adapters=adapters,
    )
    return *embed(model, tokens, patches), of_tokens


@functools.partial(jax.jit, static_argnames=("graphdef", "embed"))
def _enter_step(
    outer: nnx.State,
    of_slots: Any,
    active: jax.Array,
    adapters: jax.Array | None,
    *,
    graphdef: nnx.GraphDef,
    embed: Callable,
) -> tuple[Any, ...]:
    """`_enter` of the last token of every slot; inactive ones are not written."""
    slots = active.shape[0]
    starts = jnp.where(active, of_slots.position, 0)
    rows = jnp.where(active, jnp.arange(slots), slots)
    shifts = None if of_slots.shift is None else of_slots.shift[:, None]
    chunk = (of_slots.token[:, None], starts, starts + 1, rows, None, None, shifts, adapters)
    x, _, of_tokens = _enter(outer, *chunk, graphdef=graphdef, embed=embed)
    return x, of_tokens


@functools.partial(jax.jit, static_argnames="graphdef")
def _leave(outer: nnx.State, x: jax.Array, *, graphdef: nnx.GraphDef) -> jax.Array:
    return nnx.merge(graphdef, outer).norm(x)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "next_tokens", "sampled"), donate_argnums=1
)
def _leave_step(
    outer: nnx.State,
    of_slots: Any,
    x: jax.Array,
    active: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    next_tokens: Callable,
    sampled: bool | None,
) -> Any:
    model = nnx.merge(graphdef, outer)
    return next_tokens(model, of_slots, model.norm(x), active, sampled)
