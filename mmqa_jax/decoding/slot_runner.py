"""The engine's state on the device, and the four compiled programs that run on it."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import (
    EXACT_ON_CPU,
    batch_blocks,
    batch_sharding,
    prompt_options,
    replicated,
    split_rows,
)
from mmqa_jax.decoding import kv_cache, layer_programs, scanned_cache
from mmqa_jax.decoding.cached_attention import Branches
from mmqa_jax.decoding.layer_programs import encode_and_step, split_model
from mmqa_jax.decoding.sampling import SamplingParameters, Shaping, TopLogprobs, choose
from mmqa_jax.decoding.scheduler import Buckets
from mmqa_jax.decoding.slots import (
    Slots,
    of_active,
    slot_shapes,
    step_ends,
    token_rows,
    with_proposed,
)
from mmqa_jax.decoding.speculation import MOST, kept_tokens, proposals
from mmqa_jax.models.attention.flash import implementation_for
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama, for_length, last_token, layer_traits
from mmqa_jax.models.llama.quantize import FORMS
from mmqa_jax.models.qwen_vl.network import spread

_PAGE = 128  # columns: a multiple of a TPU's lanes
CACHE_TYPES = ("float32", "bfloat16", "int8")
WEIGHT_TYPES = ("given", "int8", "published", *FORMS)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.

    `slots` sequences are decoded at once, each of up to `length` tokens including its prompt, over
    a cache of `pages` pages of `page` tokens: a sequence takes as many as it needs, and waits for
    them before it begins; 0 pages are as many as slots of `length` tokens take, 0 tokens are 128,
    or the largest bucket where that is less or does not fit. Prompts are encoded in chunks of the
    sizes `buckets`, `prefill_tokens` tokens of several prompts at a time; prompts share their
    common prefix in steps of the larger of page and largest bucket. `cache_dtype` None is the
    model's, float32 on a CPU; `weights` "given" keeps the model's, "int8" rounds them,
    "published" keeps a rounded checkpoint's codes (of one of `FORMS`, which `mmqa plan` takes).
    `scan_layers` compiles one layer instead of all; None does so on a TPU, where it costs no
    copies. A step takes `speculate` tokens of a slot, of which all but the first are proposed,
    see speculation.py.

    `exact`: an answer's bits do not depend on what else is served, nor on slots (two or more for
    each copy of the weights), length, pages and `prefill_tokens`; else on a CPU its last bits may.
    Beam searches are not exact, nor is bfloat16 on a CPU with AMX. What holds on TPUs and GPUs:
    ENGINE.md, "The same bits".
    """

    slots: int = 16
    length: int = 2048
    buckets: Buckets = (32, 128)
    prefill_tokens: int = 256
    page: int = 0
    pages: int = 0
    cache_dtype: str | None = None
    weights: str = "given"
    scan_layers: bool | None = None
    exact: bool = True
    speculate: int = 1

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
        if self.page < 0 or (self.page and not page_fits(self.page, self.buckets)):
            raise UserError(
                f"engine.page is {self.page}: expected 0 (chosen) or a number that each of "
                f"engine.buckets = {self.buckets} divides or is divided by; change it."
            )
        if not 1 <= self.speculate <= MOST:
            raise UserError(
                f"engine.speculate is {self.speculate}: expected 1 (a token a step) to {MOST}; "
                "change it."
            )
        if self.pages < 0:
            raise UserError(
                f"engine.pages is {self.pages}: expected 0 (as many as the slots take) or more."
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
    def scored_tokens(self) -> int:
        """How many log-probabilities one program computes: few tokens of a prompt are scored."""
        return max(self._least, self.prefill_tokens // 4)

    def rows(self, bucket: int, shards: int = 1) -> int:
        """How many chunks of a bucket are encoded at once: equally many, and one at least, of each
        shard of the slots."""
        return shards * max(self._least, min(self.prefill_tokens // bucket, self.slots) // shards)

    @property
    def _least(self) -> int:
        """The fewest rows of a program: a single one is summed in another order."""
        return 2 if self.exact else 1


def check_draft(draft: LlamaConfig, config: EngineConfig, *, sees: bool) -> None:
    """Rejects a model that cannot propose tokens to another one.

    `sees`: whether the other one takes pictures.
    """
    problem, remedy = "", "leave engine.draft out"
    if sees:
        problem = "the model takes pictures, which a draft does not see"
    elif draft.recurrent:
        problem = "its layers of the gated delta rule cannot take back tokens"
    elif draft.bidirectional:
        problem = "its tokens see what follows them, so that it writes none"
    elif config.speculate < 2:
        problem, remedy = "engine.speculate is 1, a token a step", "set that to 4, for example"
    elif config.length > draft.positions:
        problem = f"it reads {draft.positions} tokens, fewer than engine.length = {config.length}"
    if problem:
        raise UserError(f"engine.draft: {problem}; {remedy}.")


def for_kinds(config: EngineConfig, model: LlamaConfig) -> EngineConfig:
    """The sizes for a model, whose layers are not scanned where they are of several kinds.

    Rejects what recurrent layers cannot do.
    """
    if model.recurrent and config.speculate > 1:
        raise UserError(
            f"engine.speculate is {config.speculate}: layers of the gated delta rule cannot take "
            "back tokens that were proposed; set it to 1."
        )
    if model.kinds and config.scan_layers:
        raise UserError(
            "engine.scan_layers is true: layers of several kinds are compiled one by one; leave it "
            "out."
        )
    return dataclasses.replace(config, scan_layers=False) if model.kinds else config


def page_fits(page: int, buckets: Buckets) -> bool:
    """Whether every chunk lies in whole pages, or within one."""
    return all(bucket % page == 0 or page % bucket == 0 for bucket in buckets)


def page_of(config: EngineConfig, device: jax.Device) -> int:
    """Columns of a page: as given, or as the TPU's kernel wants them where the chunks allow it;
    elsewhere no more than the largest of these, so that prompts share as small steps."""
    largest = config.buckets[-1]
    fits = page_fits(_PAGE, config.buckets) and (largest >= _PAGE or device.platform == "tpu")
    return config.page or (_PAGE if fits else largest)


def most_pages(config: EngineConfig, page: int) -> int:
    """The most pages of a sequence: of `length` columns."""
    return -(-config.length // page)


def pages_of_shard(config: EngineConfig, page: int, shards: int) -> int:
    """How many pages the slots of a shard have together; UserError if one sequence needs more."""
    pages = config.pages or config.slots * most_pages(config, page)
    if pages // shards < most_pages(config, page):
        raise UserError(
            f"engine.pages is {pages}: {pages // shards} of {page} tokens for each copy of the "
            f"weights hold fewer than engine.length = {config.length}; raise it, or lower "
            "engine.length."
        )
    return pages // shards


def columns_read(columns: int, most: int, page: int) -> int:
    """How many of `most` columns a program reads whose rows reach into the first `columns`: whole
    pages, of which there is a power of two, so that few programs are compiled; 0 for none."""
    pages = -(-columns // page)
    return min(page * 2 ** math.ceil(math.log2(pages)), most) if pages else 0


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


class Programs:
    """The engine's jitted programs for a model, sizes and mesh; nothing is allocated.

    They take the model's state, the cache and the slots (both donated), and what `SlotRunner`
    passes on. `encode` and `step` are what `mmqa plan` calls prefill and decode. With `by_layer`
    (one CPU) these are functions that run many programs, and the state is a SplitState, of which
    `begin` and `score` take what is no layer's.

    Args:
      model: with the layers that its cache is made for, stacked (`scanned_cache`) or not (on a TPU
        `layered_cache`, else `kv_cache`); arrays or ShapeDtypeStructs.
      config: sizes.
      mesh: where all lies; None is the default device.
    """

    def __init__(self, model: Llama, config: EngineConfig, mesh: Mesh | None = None):
        self.whole = (
            SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else replicated(mesh)
        )
        model = for_length(model, config.length)
        self.recurrent = model.config.recurrent
        self.scanned = not isinstance(model.layers, nnx.List)
        device = next(iter(self.whole.device_set))
        # Whether the cache holds tokens as rows, as a TPU wants them.
        self.of_rows = self.scanned or scanned_cache.serves(device)
        # On one CPU a program for each layer, see layer_programs.
        self.by_layer = mesh is None and device.platform == "cpu" and not self.of_rows
        graphdef = split_model(model)[0] if self.by_layer else nnx.graphdef(model)
        self.page = page_of(config, device)
        # Of a sequence, and of what is proposed behind its end.
        self.columns = columns = -(-(config.length + config.speculate - 1) // self.page) * self.page
        # XLA on CPU writes bfloat16 through float32 copies of the whole cache.
        computed = "float32" if device.platform == "cpu" else model.config.dtype
        dtype = config.cache_dtype or computed
        self.shards = slot_shards(config.slots, mesh)
        # Of arrays whose rows are those of the slots, or of chunks that go to them.
        self.rows = batch_sharding(mesh) if self.shards > 1 else self.whole
        self.pages_of_shard = pages_of_shard(config, self.page, self.shards)
        count = self.shards * (self.pages_of_shard + 1)  # with page 0, which is no slot's
        blocks = 1 if mesh is None else batch_blocks(mesh)
        if self.shards == 1 < blocks and count % blocks == 0:
            count += 1  # else the mesh would split them
        sizes = (model.config, count, self.page, dtype, mesh)
        # Steps (and, on a GPU, prompts) read each slot's own columns: one program, whatever the
        # longest slot's are.
        if self.of_rows:
            self.ragged = scanned_cache.ragged_fits(self.page, device)
            self.cache = (
                scanned_cache.layout(*sizes)
                if self.scanned
                else layer_programs.layout(*sizes, slots=config.slots)
            )
        else:
            chunk = config.buckets[0]
            fits = (model.config, self.page, chunk, dtype, device)
            self.ragged = kv_cache.ragged_fits(*fits)
            self.cache = kv_cache.layout(*sizes, slots=config.slots)
        implementation = implementation_for(device)
        if self.ragged and not self.of_rows:
            implementation = "ragged"
        in_whole = model.config.picture_sight != "causal"  # the kernels do not know it
        of_prompt = implementation_for(device) if in_whole else implementation
        if in_whole and self.page > config.buckets[-1]:
            raise UserError(
                f"engine.page is {self.page}: expected at most the largest of engine.buckets = "
                f"{config.buckets}, since a chunk of this model holds whole pictures; change one."
            )
        # Whether rows of a batch of chunks may follow one another: each reads the cache after all
        # have written to it, but states go from chunk to chunk.
        self.joins_chunks = not (self.of_rows or self.recurrent)
        # Whether programs read the rows' own columns, of any number, and need not be told of them.
        self.reads_own = self.ragged or (device.platform == "cpu" and not self.of_rows)
        # A GPU waits for the host at each round of a loop, as over pages.
        of_step = "xla" if implementation == "cudnn" else implementation
        if config.speculate > 1 and self.of_rows and not self.ragged:
            raise UserError(
                f"engine.speculate is {config.speculate}: a TPU's layers take several tokens of a "
                f"slot only by their kernel, with pages of 128 columns (here {self.page}); "
                "leave engine.page and engine.buckets at their defaults, or set it to 1."
            )
        text = columns if config.speculate > 1 else 0
        self.slots = slot_shapes(
            config.slots, self.whole, shifts=bool(model.config.mrope), text=text
        )
        arrays = self.cache, self.slots
        placed = jax.tree.map(lambda x: x.sharding or self.whole, arrays)
        # One program makes all of them: one for every shape would take longer to compile. They are
        # committed to their devices, as what `encode` returns is: it would be compiled twice.
        self.empty = jax.jit(functools.partial(kv_cache.zeros, arrays), out_shardings=placed)
        # A GPU waits for the host at a branch, which could not enqueue the next step meanwhile.
        self.told_of_sampling = device.platform == "gpu"

        def encode(
            state,
            cache,
            tokens,
            table,
            starts,
            ends,
            branches,
            patches,
            shifts,
            adapters,
            rows,
            limit,
        ):
            model = nnx.merge(graphdef, state)
            embedded, deepstack = embed(model, tokens, patches)
            embedded = by_rows(embedded)
            whole = (model.config, tokens, starts, ends, branches, patches)
            pictures = kv_cache.seen_whole(*whole)
            of_chunk = {
                "table": table,
                "starts": starts,
                "branches": branches,
                "shifts": shifts,
                "deepstack": deepstack,
                "adapters": adapters,
                "pictures": pictures,
                "limit": limit,
                "implementation": of_prompt,
                "mesh": mesh,
            }
            if self.scanned:
                return scanned_cache.prefill(model, embedded, cache, **of_chunk)
            forward = layer_programs.prefill if self.of_rows else kv_cache.forward
            return forward(model, embedded, cache, ends=ends, rows=rows, **of_chunk)

        def begin(
            state, slots, hidden, lengths, rows, positions, parameters, shifts, text, sampled,
            shaping=None,
        ):  # fmt: skip
            logits = nnx.merge(graphdef, state).logits(last_token(hidden, lengths))
            zeros = jnp.zeros_like(rows)
            begun = rows < config.slots
            token, logprob = choose(logits, parameters, zeros, begun, sampled, shaping)
            if text is not None:
                text = jnp.where(jnp.arange(columns) == positions[:, None], token[:, None], text)
            fresh = Slots(token, positions, zeros + 1, parameters, shifts, text)
            slots = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), slots, fresh)
            return slots, token, logprob

        def step(
            state, cache, slots, table, active, adapters, limit, sampled, proposed=None,
            shaping=None,
        ):  # fmt: skip
            model = nnx.merge(graphdef, state)
            proposed = proposals(slots, config.speculate) if proposed is None else proposed
            if self.of_rows:
                table, position = of_active(slots, table, active)
                decode = scanned_cache.decode
                if not self.scanned:
                    ends = step_ends(model.config, position, active)
                    decode = functools.partial(layer_programs.decode, ends=ends)
                hidden, cache = decode(
                    model,
                    by_rows(model.embed(with_proposed(slots.token, proposed))),
                    cache,
                    table=table,
                    positions=position,
                    limit=limit,
                    shifts=slots.shift,
                    adapters=adapters,
                    mesh=mesh,
                    ragged=self.ragged,
                )
            else:
                rows = token_rows(slots, table, active, adapters, proposed)
                tokens, table, position, shifts, adapters = rows
                hidden, cache = kv_cache.forward(
                    model,
                    by_rows(model.embed(tokens)),
                    cache,
                    table=table,
                    starts=position,
                    ends=step_ends(model.config, position, active),
                    shifts=shifts,
                    adapters=adapters,
                    limit=limit,
                    implementation=of_step,
                    mesh=mesh,
                )
            return cache, *next_tokens(model, slots, hidden, active, sampled, proposed, shaping)

        def score(state, hidden, rows, offsets, targets):
            predicting = by_rows(hidden[rows, offsets])  # each device some of them
            logits = nnx.merge(graphdef, state).logits(predicting)  # [N, V]
            chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
            total = jax.nn.logsumexp(logits, axis=-1)
            return chosen - total, logits.argmax(-1), logits.max(-1) - total

        def by_rows(x: jax.Array) -> jax.Array:
            return split_rows(x) if self.shards > 1 else x

        whole = self.whole
        of_cache = jax.tree.map(lambda x: x.sharding or whole, self.cache)
        exact = config.exact and device.platform == "cpu"
        options = EXACT_ON_CPU if exact else None
        jit = functools.partial(jax.jit, compiler_options=options)
        self.encode = jax.jit(
            encode,
            static_argnums=11,
            donate_argnums=1,
            out_shardings=(self.rows, of_cache),
            compiler_options=options or prompt_options(mesh),
        )
        self.begin = jit(
            begin, static_argnums=9, donate_argnums=1, out_shardings=(whole, whole, whole)
        )
        self.step = jit(
            step,
            static_argnums=(6, 7),
            donate_argnums=(1, 2),
            out_shardings=(of_cache, whole, whole, whole),
        )
        if self.by_layer:
            self.encode, self.step = encode_and_step(
                graphdef,
                layer_traits(model.config, columns),
                config.speculate,
                embed,
                next_tokens,
                options,
            )
        self.score = jit(score, out_shardings=(whole, whole, whole))

    def read(self, columns: int) -> int:
        """How many columns a program reads that is told of the longest row's."""
        return columns_read(columns, self.columns, self.page)

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
    words = jnp.maximum(tokens, 0)
    embedded, deepstack = model.words_of(words), None
    if patches is not None:
        embedded, deepstack = spread(embedded, patches, tokens < 0)
    return model.with_side(embedded, words), deepstack


def next_tokens(
    model: Llama,
    slots: Slots,
    hidden: jax.Array,
    active: jax.Array,
    sampled: bool | None,
    proposed: jax.Array | None = None,
    shaping: Shaping | None = None,
) -> tuple[Slots, jax.Array, jax.Array | TopLogprobs]:
    """The slots after a step, their tokens [S] and log-probabilities; hidden is [S, 1, H].

    With proposals [S, L - 1] it is [S * L, 1, H] or [S, L, H], and the rest as `kept_tokens` gives
    it. sampled, shaping: see `choose`.
    """
    if proposed is not None:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        return kept_tokens(model, slots, hidden, proposed, active, sampled, shaping)
    logits = model.logits(hidden[:, 0])
    token, logprob = choose(logits, slots.parameters, slots.count, active, sampled, shaping)
    slots = slots.replace(token=token, position=slots.position + 1, count=slots.count + 1)
    return slots, token, logprob


class SlotRunner:
    """A model with its cache and slots on the device; every method enqueues one program.

    Inputs are numpy arrays of fixed shapes, so that each program is compiled once per bucket (or
    once at all), and per number of columns that it reads, see `columns_read`.

    Args:
      model: on the mesh if there is one; see `Programs`.
      config: sizes.
      mesh: where the cache goes; None is the default device.
      draft: a smaller model that proposes tokens, with a cache of its own in the same pages; None:
        they are looked up.
    """

    def __init__(
        self,
        model: Llama,
        config: EngineConfig,
        mesh: Mesh | None = None,
        draft: Llama | None = None,
    ):
        self.config, self._mesh = config, mesh
        self._draft = None if draft is None else SlotRunner(draft, config, mesh)
        graphdef, state = nnx.split(model)
        shapes = nnx.merge(graphdef, jax.eval_shape(lambda: state))
        self._programs = _programs_of(_Architecture(graphdef, shapes), config, mesh)
        self.use(model)
        columns, self.page = self._programs.columns, self._programs.page
        # Each slot's pages, and a padding row's; what they do not use is page 0.
        self._table = np.zeros((config.slots + 1, columns // self.page), np.int32)
        self._placed_table: jax.Array | None = None  # on the device, if it is the same
        self.cache, self._slots = self._programs.empty()
        if self._draft is not None:
            self._slots = self._slots.replace(text=None)
            self._draft._table = self._table  # its pages have the same numbers
        self._temperatures = np.zeros(config.slots, np.float32)  # the slots', for the host

    def use(self, model: Llama) -> None:
        """Computes with the arrays of this model, which is like the first one."""
        # The model's arrays, and those that are no layer's.
        self._state = self._outer = nnx.state(model)
        if self._programs.by_layer:
            _, self._state = split_model(model)
            self._outer = self._state.outer

    def assign(self, slot: int, pages: Sequence[int]) -> None:
        """A slot has these pages from now on, in the order of its columns."""
        self._table[slot] = 0
        self._table[slot, : len(pages)] = pages
        self._placed_table = None

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
        if self._draft is not None and not branches.trunk.any():  # else nothing is written after it
            self._draft.encode(tokens, starts, ends, rows, branches)
        limit = self._programs.read(ends.max())
        if self._programs.of_rows:  # it reads what is in front of the chunks
            limit = self._programs.read(starts.max())
            branches = branches if branches.trunk.any() else None
        elif self._programs.reads_own:
            limit = self._programs.columns
        inputs = (tokens, self._table[rows], starts, ends, branches, patches, shifts, adapters)
        inputs = self._put_rows((*inputs, rows if self._programs.recurrent else None))
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
        text: np.ndarray | None = None,
        shaping: Shaping | None = None,
    ) -> tuple[jax.Array, jax.Array | TopLogprobs]:
        """Draws the first tokens after encoded prompts; their slots are then ready for `step`.

        Args:
          hidden: from `encode`, [R, L, H].
          lengths: int32 [R], tokens of the prompt's last chunk.
          rows: int32 [R], slots; `config.slots` for rows whose prompt is not complete.
          positions: int32 [R], of the first token.
          parameters: of the R requests.
          shifts: int32 [R], by how much rotary positions differ from these, with M-RoPE.
          text: int32 [R, T], the prompts by column, where the slots hold it (`text_columns`).
          shaping: of the R requests; None (another program): none has any.

        Returns:
          Tokens [R] and their log-probabilities.
        """
        begun = rows < self.config.slots
        self._temperatures[rows[begun]] = parameters.temperature[begun]
        sampled = self._programs.sampled(parameters.temperature[begun])
        inputs = self._put_rows((lengths, rows, positions, parameters, shifts, text))
        shapings = [] if shaping is None else [self._put_rows(shaping)]
        self._slots, token, logprob = self._run(
            self._programs.begin, self._outer, self._slots, hidden, *inputs, sampled, *shapings
        )
        return token, logprob

    def step(
        self,
        active: np.ndarray,
        columns: int,
        adapters: np.ndarray | None = None,
        shaping: Shaping | None = None,
    ) -> tuple[jax.Array, jax.Array | TopLogprobs]:
        """The next token of every active slot (bool [S]) and its log-probability, [S] each; [S, L]
        with speculation, see `kept_tokens`.

        columns: what the longest active sequence takes with the token that this step caches. There
          is one program for each number of pages that is a power of two, and one for all where each
          slot's own columns are read.
        adapters: int32 [S, 1], of the slots, as in `encode`.
        shaping: of the slots, as in `begin`.
        """
        if self._placed_table is None:
            self._placed_table = self._put_rows(self._table[:-1].copy())
        sampled = self._programs.sampled(self._temperatures[active])
        active, adapters, shaping = self.put((active, adapters, shaping))
        proposed = None
        if self._draft is not None:
            of_slots = (self._slots, self._placed_table, active)
            proposed = self._draft.propose(*of_slots, columns, sampled)
        token, logprob = self._step(
            self._placed_table, active, adapters, columns, sampled, proposed, shaping
        )
        return token, logprob

    def propose(
        self,
        slots: Slots,
        table: jax.Array,
        active: jax.Array,
        columns: int,
        sampled: bool | None,
    ) -> jax.Array:
        """Writes proposals behind the last tokens of another model's slots, int32 [S, L - 1]:
        by the same draws, so that of equal models all is right."""
        self._slots = jax.tree.map(jnp.copy, slots)  # a step takes its slots over
        steps = range(self.config.speculate)  # the last one only caches what the one before wrote
        tokens = [self._step(table, active, None, columns, sampled)[0] for _ in steps]
        return jnp.stack(tokens[:-1], axis=1)

    def _step(
        self,
        table: jax.Array,
        active: jax.Array,
        adapters: jax.Array | None,
        columns: int,
        sampled: bool | None,
        proposed: jax.Array | None = None,
        shaping: Shaping | None = None,
    ) -> tuple[jax.Array, jax.Array | TopLogprobs]:
        programs = self._programs
        limit = programs.columns if programs.reads_own else programs.read(columns)
        inputs = [self._state, self.cache, self._slots, table, active, adapters, limit, sampled]
        if shaping is not None:
            inputs += [proposed, shaping]
        elif proposed is not None:
            inputs += [proposed]
        self.cache, self._slots, token, logprob = self._run(programs.step, *inputs)
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

    def _run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a program on the mesh: while it is traced, it asks for that one's platform."""
        with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            return program(*arguments)

    @property
    def joins_chunks(self) -> bool:
        """Whether a batch may hold several chunks of a prompt."""
        return self._programs.joins_chunks

    @property
    def rows(self) -> Sharding:
        """Where the embeddings of patches in a batch of chunks are taken from."""
        return self._programs.whole

    @property
    def text_columns(self) -> int:
        """Columns of the slots' text; 0: they hold none."""
        return 0 if self._slots.text is None else self._programs.columns

    @property
    def pages_of_shard(self) -> int:
        """How many pages the slots of a shard have together."""
        return self._programs.pages_of_shard

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
