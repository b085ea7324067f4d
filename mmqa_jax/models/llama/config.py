"""Configs of LLaMA and its relatives: published sizes, and transformers' config.json both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import config_checks
from mmqa_jax.models.common.activations import ACTIVATIONS, LEARNED
from mmqa_jax.models.common.rope import RopeScaling, yarn_factor
from mmqa_jax.models.llama import layer_kinds, published_config
from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.weights.bundled import LANGUAGE_MODELS
from mmqa_jax.weights.registry import Base

QK_NORMS = ("none", "head", "whole", "rotated")
NORMS = ("before", "after", "both")
PICTURE_SIGHTS = ("causal", "both", "near", "prompt")
NORM_KINDS = ("rms", "layer", "biased_layer")
ROUTERS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of a LLaMA or a relative; the defaults are LLaMA-2 7B's.

    `family` names the published model (`families.FAMILIES`): its keys and config.json; what
    is computed is in the other fields. `kv_heads` below `heads` is grouped-query attention.
    `head_dim` None is hidden / heads. `positions` is the longest context; nothing is allocated for
    it. `tied`: the output head is the embedding table. `attention_bias` is on the projections of
    the attention, on its output if `out_bias` (None: as the others); `mlp_bias` on all three of the
    MLP, or of each expert and on the router. `attention_dropout` acts on attention weights.

    `windows`: of each layer, how many tokens one sees, itself included; 0 is all, () all in every
    layer. `rotated`: whether each layer rotates queries and keys by their positions, () all do;
    `rotary_fraction` of each head are rotated. `local`: which layers rotate by `local_theta` and
    without scaling, () none. `mrope`: how many rotary pairs turn by a token's time, row and column,
    where positions are three (Qwen-VL), () is one position for all; `mrope_interleaved`: these
    pairs are in turn. `qk_norm`: an RMS norm of queries and keys before that, "none", of
    each "head" or of the "whole" projection; or, of heads that are "rotated", one without a scale.
    `norms`: of what attention and MLP get, "before", of what they give, "after", or "both"; with
    `unit_norms` all multiply by 1 + their scale. Norms are of `norm_kind`: RMS norms, or layer
    norms without or with biases. In `parallel` attention and MLP get the same normed input. The MLP
    has a gate if it is `gated_mlp`.
    Embeddings are multiplied by `embedding_scale`, what attention and MLP give by
    `residual_scale`, attention scores by `attention_scale` (None is one over the root of a head's
    size); logits are divided by `logit_divisor`. Scores then stay within `attention_cap`, logits
    within `logit_cap` (`masked.capped`). `sinks`: each head has a score that is in the softmax and
    has no value. `gate_limit`: of `activations.gated`. `bidirectional`: a token sees
    what follows it too, within its window on both sides (EmbeddingGemma): an encoder of texts,
    which writes none.

    `experts`: how many MLPs, of width `mlp`, each layer has in the place of one, of which a token
    goes to `active_experts` (`llama.experts`); None is one MLP. With `normed_experts` the weights
    of these add up to 1; with `weighted_input` they are sigmoids, which multiply what an expert
    gets in place of what it gives. A `shared_expert` of that width sees every token, gated by one
    number if `shared_gate`. Layers without experts ("plain") have an MLP of width `plain_mlp`.
    `router` makes probabilities of its scores, of which those of the chosen experts are weights,
    multiplied by `expert_weight`; with `choice_bias` a number of each expert, which training leaves
    as it is, is added where experts are chosen.
    With `expert_groups` so many groups of as many experts are ranked first, and experts chosen in
    the best `active_groups` alone (`Experts.within_groups`).
    `experts_beside` is the width of experts that stand beside an MLP of width `mlp`, and what each
    of both gives is normed before the sum (Gemma 4).

    `chunk` and `growth`: of `llama.latent`; the latter is by how much, and after how many
    tokens each time.

    `kinds`: of each layer one of `layer_kinds.KINDS`, () is attention in all. Layers of several
    kinds repeat with a `period`, as long as all layers where nothing repeats. `delta` are the sizes
    of "linear" ones, `conv_taps` the tokens of the convolution of "conv" ones
    (`llama.gated_delta`). `gated`: what attention gives is multiplied by a sigmoid of the layer's
    input, of each number or, with `head_gates`, of each head.

    `latent`: sizes of attention over latents (`llama.latent`), whose one key head has a `head_dim`
    of the latent and the rotated key.

    `side`: the width of an input of its own that each layer gets beside what the one before gives,
    None is none: of a projection of the embeddings and, with `side_table`, of a table of the tokens
    (Gemma 3n's per-layer embeddings).

    `picture_sight`: whether a picture's tokens see it up to themselves, "causal", or whole, "both"
    (Gemma 3); with "near" ones whole in layers with a window alone (Gemma 4). With
    "prompt" all tokens of a prompt, words too, see all of it in every layer (PaliGemma).

    `value_norm`: each head of the values is divided by its root mean square. `layer_scales`: what a
    layer gives is multiplied by a number of its own, which training leaves as it is. `full_layers`:
    the heads of "full" layers beside "near" ones, which are `local`; None is as the others'.
    `keys_are_values`: values are what is projected for the keys.

    `borrowers`: how many of the last layers have no keys and values of their own and take those of
    the last layer of their kind before them (Gemma 4's E2B and E4B), whose MLPs have a width
    `borrower_mlp` of their own; None is `mlp`.

    `dtype` is the compute dtype (norms, softmax, rotary angles and logits stay float32),
    `attention` the implementation of `layers.attention`; `remat` and `unroll` go to
    `layers.scan_layers`.
    """

    vocab_size: int = 32000
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    mlp: int = 11008
    head_dim: int | None = None
    positions: int = 4096
    eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    attention_dropout: float = 0.0
    init_stddev: float = 0.02
    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    unroll: int | bool | None = None
    family: str = "llama"
    out_bias: bool | None = None
    windows: tuple[int, ...] = ()
    rotated: tuple[bool, ...] = ()
    rotary_fraction: float = 1.0
    mrope: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    qk_norm: str = "none"
    norms: str = "before"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_divisor: float = 1.0
    unit_norms: bool = False
    norm_kind: str = "rms"
    parallel: bool = False
    gated_mlp: bool = True
    attention_cap: float | None = None
    logit_cap: float | None = None
    local: tuple[bool, ...] = ()
    local_theta: float = 10000.0
    bidirectional: bool = False
    experts: int | None = None
    active_experts: int | None = None
    normed_experts: bool = False
    shared_expert: int | None = None
    shared_gate: bool = True
    kinds: tuple[str, ...] = ()
    delta: layer_kinds.DeltaConfig | None = None
    gated: bool = False
    head_gates: bool = False
    sinks: bool = False
    gate_limit: float | None = None
    experts_beside: int | None = None
    value_norm: bool = False
    layer_scales: bool = False
    full_layers: layer_kinds.FullLayers | None = None
    keys_are_values: bool = False
    picture_sight: str = "causal"
    side: int | None = None
    side_table: bool = False
    chunk: int | None = None
    growth: tuple[float, ...] = ()
    weighted_input: bool = False
    plain_mlp: int | None = None
    router: str = "softmax"
    choice_bias: bool = False
    expert_weight: float = 1.0
    conv_taps: int | None = None
    borrowers: int | None = None
    borrower_mlp: int | None = None
    latent: layer_kinds.LatentConfig | None = None
    expert_groups: int | None = None
    active_groups: int | None = None

    def __post_init__(self):
        config_checks.check_layers(self, "model", "layers")
        if self.head_dim is None:
            config_checks.check_divides("model.heads", self.heads, "model.hidden", self.hidden)
        config_checks.check_divides("model.kv_heads", self.kv_heads, "model.heads", self.heads)
        if self.head_size % 2:
            raise UserError(
                f"model.head_dim is {self.head_size}: expected an even number, since rotary "
                "embeddings rotate pairs; change it."
            )
        for name in ("rope_theta", "local_theta", "attention_cap", "logit_cap", "gate_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"model.{name} is {value}: expected a number above 0; correct it.")
        if self.experts and not 1 <= (self.active_experts or 0) <= self.experts:
            raise UserError(
                f"model.active_experts is {self.active_experts}: expected 1 to model.experts = "
                f"{self.experts}; correct it."
            )
        if groups := self.expert_groups:
            config_checks.check_divides(
                "model.expert_groups", groups, "model.experts", self.experts or 0
            )
            reached = (self.experts or 0) // groups * (self.active_groups or 0)
            if not (self.active_experts or 1) <= reached <= (self.experts or 0):
                raise UserError(
                    f"model.active_groups is {self.active_groups}: expected 1 to "
                    f"model.expert_groups = {groups}, with at least model.active_experts = "
                    f"{self.active_experts} experts together; correct it."
                )
        if self.latent and self.head_dim != self.latent.rank + self.latent.turning:
            raise UserError(
                f"model.head_dim is {self.head_dim}: expected model.latent's rank and turning "
                f"together, {self.latent.rank + self.latent.turning}; correct it."
            )
        if self.side is not None and self.side < 1:
            raise UserError(f"model.side is {self.side}: expected a width from 1; correct it.")
        if self.experts_beside and not (self.experts and self.norms == "both"):
            raise UserError(
                "model.experts_beside needs model.experts and model.norms both; give these, or "
                "leave it out."
            )
        if self.shared_expert and not self.experts:
            raise UserError("model.shared_expert needs model.experts; leave it out.")
        config_checks.check_rate("model.attention_dropout", self.attention_dropout)
        learned = () if self.gated_mlp else LEARNED
        config_checks.check_known("model.activation", self.activation, (*ACTIVATIONS, *learned))
        config_checks.check_known("model.family", self.family, FAMILIES)
        config_checks.check_known("model.qk_norm", self.qk_norm, QK_NORMS)
        config_checks.check_known("model.norms", self.norms, NORMS)
        config_checks.check_known("model.picture_sight", self.picture_sight, PICTURE_SIGHTS)
        config_checks.check_known("model.norm_kind", self.norm_kind, NORM_KINDS)
        config_checks.check_known("model.router", self.router, ROUTERS)
        if self.parallel and self.norms != "before":
            raise UserError('model.parallel needs model.norms "before"; correct one of them.')
        if self.experts and not self.gated_mlp:
            raise UserError("model.gated_mlp: experts have gates; set it to true.")
        object.__setattr__(self, "mrope", tuple(self.mrope))
        if self.mrope and (len(self.mrope) != 3 or 2 * sum(self.mrope) != self.rotary_size):
            raise UserError(
                f"model.mrope is {self.mrope}: expected three numbers of rotary pairs, together "
                f"{self.rotary_size // 2}, half of a head; correct it."
            )
        object.__setattr__(self, "growth", tuple(self.growth))
        if self.growth and (len(self.growth) != 2 or not self.growth[1] >= 1):
            raise UserError(
                f"model.growth is {self.growth}: expected two numbers, by how much and after how "
                "many tokens; correct it."
            )
        for name in ("windows", "rotated", "local", "kinds"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if values and len(values) != self.layers:
                raise UserError(
                    f"model.{name} has {len(values)} values: expected one for each of "
                    f"model.layers = {self.layers}, or none; correct it."
                )
        for kind in self.kinds:
            config_checks.check_known("model.kinds", kind, layer_kinds.KINDS)
        if any(kind.startswith("plain") for kind in self.kinds) and not self.plain_mlp:
            raise UserError('model.kinds has "plain", whose width model.plain_mlp says; give it.')
        if {"conv", "plain_conv"} & {*self.kinds} and not (self.conv_taps or 0) > 1:
            raise UserError(
                f"model.conv_taps is {self.conv_taps}: expected at least 2 for the convolutions of "
                "model.kinds; raise it."
            )
        if "linear" in self.kinds and self.delta is None:
            raise UserError('model.kinds has "linear", whose sizes model.delta says; give them.')
        near = tuple(kind == "near" for kind in self.kinds)
        if self.full_layers and near != self.local and self.layers > 1:
            raise UserError(
                'model.full_layers needs model.kinds, "near" where model.local is true and "full" '
                "elsewhere; correct them."
            )
        if self.picture_sight == "near" and "near" not in self.kinds and self.layers > 1:
            raise UserError(
                'model.picture_sight "near" needs layers of that kind in model.kinds; leave it out.'
            )
        lenders = self.layers - (self.borrowers or 0)
        lend = {*self.kinds[:lenders]}
        if (
            self.layers > 1 and self.borrowers and not {*self.kinds[lenders:]} <= lend
        ) or lenders < 0:
            raise UserError(
                f"model.borrowers is {self.borrowers}: expected so many last layers "
                f"of model.layers = {self.layers} that those before have their model.kinds, too; "
                "correct it."
            )
        if any(window < 0 for window in self.windows):
            raise UserError(
                f"model.windows is {self.windows}: expected numbers from 0; correct it."
            )
        if not 0 < self.rotary_fraction <= 1 or self.rotary_size % 2:
            raise UserError(
                f"model.rotary_fraction is {self.rotary_fraction}, of a head "
                f"{self.rotary_fraction * self.head_size:g} numbers: expected a fraction that is "
                "an even number of them; correct it."
            )
        if self.local and self.rotary_fraction != 1:
            raise UserError("model.local needs model.rotary_fraction 1; correct one of them.")
        if self.rope_scaling is not None:
            self.rope_scaling.check_pairs(self.rotary_size // 2)

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def rotary_size(self) -> int:
        """How many numbers of a head are rotated, its first ones in the published layout."""
        return self.latent.turning if self.latent else int(self.head_size * self.rotary_fraction)

    @property
    def recurrent(self) -> bool:
        """Whether some layer holds a state of the tokens before in place of keys and values."""
        return not layer_kinds.RECURRENT.isdisjoint(self.kinds)

    @property
    def period(self) -> int:
        """After how many layers their kinds repeat: the least number that divides all layers."""
        if self.borrowers:
            return self.layers
        kinds = self.kinds or ("full",) * self.layers
        periods = (n for n in range(1, self.layers + 1) if self.layers % n == 0)
        return next(n for n in periods if kinds == kinds[:n] * (self.layers // n))

    def of_layer(self, number: int) -> LlamaConfig:
        """The config of one layer, which has all that its kind changes; where all layers are of one
        kind, of all."""
        if not self.kinds:
            return self
        changes: dict[str, Any] = {"windows": (), "rotated": (), "local": (), "full_layers": None}
        if self.full_layers and self.kinds[number] == "full":
            changes |= dataclasses.asdict(self.full_layers)
        if self.kinds[number].startswith("plain"):
            changes |= dict.fromkeys(("experts", "active_experts", "shared_expert"))
            changes |= dict.fromkeys(("expert_groups", "active_groups"))
            changes |= {"mlp": self.plain_mlp}
        if number >= self.layers - (self.borrowers or 0):
            changes["mlp"] = self.borrower_mlp or self.mlp
        changes["borrowers"] = int(number >= self.layers - (self.borrowers or 0)) or None
        if self.picture_sight == "near":
            near = self.kinds[number] == "near"
            changes["picture_sight"] = "both" if near else "causal"
        return dataclasses.replace(self, kinds=(self.kinds[number],), layers=1, **changes)

    def lender(self, number: int) -> int:
        """The layer whose keys and values a layer takes: itself, or one before."""
        lenders = self.layers - (self.borrowers or 0)
        if number < lenders:
            return number
        return max(n for n in range(lenders) if self.kinds[n] == self.kinds[number])

    @property
    def borrows(self) -> bool:
        """Whether a layer takes keys and values of another; of the config of one layer."""
        return 0 < (self.borrowers or 0) == self.layers

    @property
    def places(self) -> tuple[LlamaConfig, ...]:
        """The config of each layer of a period."""
        return tuple(map(self.of_layer, range(self.period)))

    @property
    def mixing(self) -> int:
        """Parameters of the products of one layer's attention, or of what is in its place."""
        if latent := self.latent:
            asked = latent.query_rank or self.hidden
            of_head = asked * (latent.resting + latent.turning)
            of_head += latent.rank * (latent.resting + latent.value) + latent.value * self.hidden
            down = (latent.query_rank or 0) + latent.rank + latent.turning
            return self.heads * of_head + self.hidden * down
        if not self.recurrent:
            projections = 0 if self.borrows else 2 - self.keys_are_values
            heads = 2 * self.heads + projections * self.kv_heads
            return self.hidden * (self.head_size * heads + self.gates)
        delta = self.delta
        if delta is None:
            return 4 * self.hidden**2
        keys, values = delta.key_heads * delta.key_size, delta.value_heads * delta.value_size
        return self.hidden * (2 * keys + 3 * values + 2 * delta.value_heads)

    @property
    def gates(self) -> int:
        """How many numbers of a token gate what attention gives."""
        return self.gated * self.heads * (1 if self.head_gates else self.head_size)

    @property
    def state_numbers(self) -> int:
        """Numbers of one layer's memory of a text (`gated_delta`); 0 for attention."""
        if not self.recurrent:
            return 0
        if self.delta is None:
            return self.conv_taps * self.hidden
        return self.delta.value_heads * self.delta.key_size * self.delta.value_size

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of a layer's linears, without those inside experts, of the gated delta rule and
        of latents."""
        names = ("q", "k", "out") if self.keys_are_values else ("q", "k", "v", "out")
        names = ("q", "out") if self.borrows else names
        names = ("out",) if self.latent else names
        names = () if self.kinds and layer_kinds.RECURRENT.issuperset(self.kinds) else names
        names += ("out_gate",) if self.gated and names else ()
        names += ("side_gate", "side_out") if self.side else ()
        in_place = self.experts and not self.experts_beside
        gate = ("gate",) if self.gated_mlp else ()
        return names if in_place else (*names, *gate, "up", "down")

    @property
    def dense_mlp(self) -> int:
        """The width of the MLP that every token sees; 0 where it goes to experts alone."""
        return (self.shared_expert or 0) if self.experts and not self.experts_beside else self.mlp

    def mlp_numbers(self, experts: int | None) -> int:
        """Parameters of the products of one layer's MLP, and of so many of its experts."""
        width = self.dense_mlp + (experts or 0) * self.expert_mlp
        return (2 + self.gated_mlp) * self.hidden * width

    @property
    def expert_mlp(self) -> int:
        """The width of one expert."""
        return self.experts_beside or self.mlp

    @property
    def biases(self) -> frozenset[str]:
        """The projections of a layer that have a bias, of `linears`."""
        out = self.attention_bias if self.out_bias is None else self.out_bias
        names = ("q", "k", "v") if self.attention_bias else ()
        names += ("out_gate",) if names and self.gated and not self.head_gates else ()
        names += ("out",) if out else ()
        return frozenset(names + (("gate", "up", "down") if self.mlp_bias else ()))

    def windowed(self, columns: int) -> bool:
        """Whether in `columns` tokens some layer does not see all."""
        return any(0 < window < columns for window in self.windows)

    @property
    def served_positions(self) -> int:
        """The longest text that an engine takes: `long_texts` are not in its attention."""
        chunks = [] if self.chunk is None else [self.chunk]
        return min([self.positions, *chunks, *(int(n) - 1 for n in self.growth[1:])])

    def check_served(self, length: int) -> None:
        """Raises UserError for an engine whose texts are longer than `served_positions`."""
        most = self.served_positions
        if length > most:
            known = "model.positions = " if most == self.positions else "the model's chunks, "
            raise UserError(f"engine.length is {length}: expected at most {known}{most}; lower it.")

    def within(self, length: int) -> LlamaConfig:
        """Returns the config for texts of up to `length` tokens, see `RopeScaling.within`."""
        scaling = self.rope_scaling
        if scaling is None or not scaling.by_length:
            return self
        return dataclasses.replace(self, rope_scaling=scaling.within(length))

    @classmethod
    def from_hf(cls, published: Mapping[str, Any], where: str = "config.json") -> LlamaConfig:
        """Our config from transformers' `config.json` of any family that is known here.

        Absent values are transformers' defaults. Reads `rope_theta` with `rope_scaling`
        (transformers 4) and `rope_parameters` (5).

        Args:
          published: the file's content, or the `text_config` of a LLaVA's.
          where: its name, for messages.
        """
        return cls(**published_config.fields_from_hf(published, where))

    def to_hf(self) -> dict[str, Any]:
        """transformers' `config.json`, without token ids; versions 4 and 5 read it."""
        return published_config.fields_to_hf(self)


def _published(**sizes) -> Callable[..., LlamaConfig]:
    """A preset of a published model's sizes."""
    return lambda **changes: LlamaConfig(**sizes | changes)


def _of_json(model_type: str, **published: Any) -> Callable[..., LlamaConfig]:
    """A preset of keys of a config.json; the others are transformers' defaults, the sizes of the
    first model that a family was published with."""
    config = {"model_type": model_type, **published}
    return lambda **changes: dataclasses.replace(LlamaConfig.from_hf(config), **changes)


_13B = {"hidden": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "mlp": 13824}
llama_7b = _published(eps=1e-6, positions=2048)  # LLaMA-1
llama_13b = _published(**_13B, eps=1e-6, positions=2048)
llama2_7b = _published()  # chat or not, and Vicuna-1.5 (LLaVA-1.5)
llama2_13b = _published(**_13B)
llama2_70b = _published(hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672)
_LLAMA3_8B = {"vocab_size": 128256, "kv_heads": 8, "mlp": 14336, "rope_theta": 500000.0}
llama3_8b = _published(**_LLAMA3_8B, positions=8192)
llama31_8b = _published(**_LLAMA3_8B, positions=131072, rope_scaling=RopeScaling("llama3", 8.0))
smollm2_135m = _published(
    vocab_size=49152, hidden=576, layers=30, heads=9, kv_heads=3, mlp=1536, positions=8192,
    rope_theta=100000.0, tied=True,
)  # fmt: skip
# karpathy/tinyllamas stories260K: a 260 K-parameter story generator for tests.
stories260k = _published(
    vocab_size=512, hidden=64, layers=5, heads=8, kv_heads=4, mlp=172, positions=512, tied=True
)
_LLAMA3 = {"vocab_size": 128256, "kv_heads": 8, "rope_theta": 5e5, "positions": 131072}
_LLAMA32 = {**_LLAMA3, "rope_scaling": RopeScaling("llama3", 32.0), "tied": True, "mlp": 8192}
_SMOLLM2 = {"vocab_size": 49152, "positions": 8192, "tied": True}
_MISTRAL = {"family": "mistral", "vocab_size": 131072, "kv_heads": 8, "positions": 32768}
_MISTRAL |= {"rope_theta": 1e8}
_MINISTRAL3 = {"family": "ministral3", "vocab_size": 131072, "kv_heads": 8, "head_dim": 128}
_MINISTRAL3 |= {"rope_theta": 1e6, "positions": 16384}  # of 262,144, see Family.tempered
_MINISTRAL3 |= {"rope_scaling": RopeScaling("yarn", 16.0, original_positions=16384, query_beta=0.1)}
_OLMO2 = {"family": "olmo2", "qk_norm": "whole", "norms": "after", "vocab_size": 100352}
_OLMO2 |= {"eps": 1e-6, "rope_theta": 5e5}
_QWEN25 = {"family": "qwen2", "attention_bias": True, "out_bias": False, "eps": 1e-6}
_QWEN25 |= {"rope_theta": 1e6, "positions": 32768}
_SMALL = {"vocab_size": 151936, "tied": True}
_QWEN3 = {"family": "qwen3", "qk_norm": "head", "head_dim": 128, "eps": 1e-6, "kv_heads": 8}
_QWEN3 |= {"rope_theta": 1e6, "positions": 40960, "vocab_size": 151936}
_QWEN3_MOE = {**_QWEN3, "family": "qwen3_moe", "kv_heads": 4, "experts": 128}
_QWEN3_MOE |= {"active_experts": 8, "normed_experts": True}
_GPT_OSS = {"family": "gpt_oss", "vocab_size": 201088, "hidden": 2880, "heads": 64, "kv_heads": 8}
_GPT_OSS |= {"head_dim": 64, "mlp": 2880, "positions": 131072, "rope_theta": 150000.0}
_GPT_OSS |= {"attention_bias": True, "mlp_bias": True, "sinks": True, "activation": "quick_gelu"}
_GPT_OSS |= {"gate_limit": 7.0, "active_experts": 4, "normed_experts": True}
_GPT_OSS["rope_scaling"] = RopeScaling(
    "yarn", 32.0, original_positions=4096, attention_factor=yarn_factor(32.0), truncate=False
)
_GLM45 = {"family": "glm4_moe", "vocab_size": 151552, "heads": 96, "kv_heads": 8, "head_dim": 128}
_GLM45 |= {"positions": 131072, "rope_theta": 1e6, "attention_bias": True, "out_bias": False}
_GLM45 |= {"rotary_fraction": 0.5, "active_experts": 8, "normed_experts": True}
_GLM45 |= {"router": "sigmoid", "choice_bias": True, "shared_gate": False}
_QWEN35 = {"family": "qwen3_5_text", "qk_norm": "head", "unit_norms": True, "gated": True}
_QWEN35 |= {"head_dim": 256, "rotary_fraction": 0.25, "eps": 1e-6, "rope_theta": 1e7}
_QWEN35 |= {"vocab_size": 248320, "positions": 262144}


def _yarn(factor: float, mscale: float = 1.0, **more: Any) -> dict[str, Any]:
    """Keys of a DeepSeek's positions, of which the first 4,096 are those of pretraining."""
    scales = {"mscale": mscale, "mscale_all_dim": mscale, "beta_fast": 32, "beta_slow": 1}
    rope = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    return {"rope_scaling": rope | scales, "max_position_embeddings": round(4096 * factor), **more}


_TRINITY = {"num_dense_layers": 2, "num_experts": 128, "num_experts_per_tok": 8}
_TRINITY |= {"num_shared_experts": 1, "route_scale": 2.826, "mup_enabled": True}
_TRINITY |= {"sliding_window": 2048, "max_position_embeddings": 131072}


def _qwen35(**sizes) -> Callable[..., LlamaConfig]:
    """A preset of a Qwen3.5: every fourth layer is attention."""
    kinds = ("linear", "linear", "linear", "full") * (sizes["layers"] // 4)
    delta = layer_kinds.DeltaConfig(value_heads=sizes.pop("value_heads", 32))
    return _published(**_QWEN35 | sizes, kinds=kinds, delta=delta)


_GEMMA = {"norms": "both", "unit_norms": True, "activation": "gelu_pytorch_tanh", "tied": True}
_GEMMA |= {"eps": 1e-6, "head_dim": 256}
_GEMMA2 = {**_GEMMA, "family": "gemma2", "vocab_size": 256000, "positions": 8192}
_GEMMA2 |= {"attention_cap": 50.0, "logit_cap": 30.0}
_GEMMA3 = {**_GEMMA, "family": "gemma3_text", "qk_norm": "head", "rope_theta": 1e6}

_GEMMA4 = {**_GEMMA3, "family": "gemma4_text", "unit_norms": False, "vocab_size": 262144}
_GEMMA4 |= {"positions": 262144, "rope_scaling": RopeScaling("proportional", 1.0, partial=0.25)}
_GEMMA4 |= {"attention_scale": 1.0, "logit_cap": 30.0, "value_norm": True, "layer_scales": True}
_GEMMA4_SMALL = {**_GEMMA4, "window": 512, "positions": 131072, "side": 256, "side_table": True}
_GEMMA4 |= {"every": 6, "window": 1024}


def _lfm2(attends: tuple[int, ...], **sizes) -> Callable[..., LlamaConfig]:
    """A preset of an LFM2, of which the layers `attends` have attention."""
    kinds = ["full" if number in attends else "conv" for number in range(sizes["layers"])]
    if "experts" in sizes:
        kinds[:2] = ["plain_conv"] * 2
    sizes |= {"family": "lfm2_moe" if "experts" in sizes else "lfm2", "kv_heads": 8}
    sizes |= {"vocab_size": 65536, "positions": 128000, "rope_theta": 1e6, "qk_norm": "head"}
    return _published(**sizes, kinds=tuple(kinds), conv_taps=3, tied=True)


def _gemma(**sizes) -> Callable[..., LlamaConfig]:
    """A preset of a Gemma: `every`, layers up to one that sees all; `window`, of the others."""
    every, window, layers = sizes.pop("every"), sizes.pop("window"), sizes["layers"]
    near = tuple((number + 1) % every != 0 for number in range(layers))
    sizes["windows"] = tuple(window * is_near for is_near in near)
    sizes["embedding_scale"] = sizes["hidden"] ** 0.5
    if "full_layers" in sizes:
        sizes["kinds"] = tuple("near" if is_near else "full" for is_near in near)
    return _published(**sizes, local=() if sizes["family"] == "gemma2" else near)


# Further models, by name: Hugging Face's config.json of each (the Instruct or chat model's).
RELATIVES: Mapping[str, Callable[..., LlamaConfig]] = {
    "llama31_70b": _published(
        **_LLAMA3, hidden=8192, layers=80, heads=64, mlp=28672,
        rope_scaling=RopeScaling("llama3", 8.0),
    ),
    "llama32_1b": _published(**_LLAMA32, hidden=2048, layers=16, heads=32),
    "llama32_3b": _published(**_LLAMA32, hidden=3072, layers=28, heads=24),
    "smollm2_360m": _published(
        **_SMOLLM2, hidden=960, layers=32, heads=15, kv_heads=5, mlp=2560, rope_theta=1e5
    ),
    "smollm2_17b": _published(  # 1.7 B
        **_SMOLLM2, hidden=2048, layers=24, heads=32, kv_heads=32, mlp=8192, rope_theta=1.3e5
    ),
    "qwen25_05b": _published(
        **_QWEN25, **_SMALL, hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864
    ),
    "qwen25_15b": _published(
        **_QWEN25, **_SMALL, hidden=1536, layers=28, heads=12, kv_heads=2, mlp=8960
    ),
    "qwen25_3b": _published(
        **_QWEN25, **_SMALL, hidden=2048, layers=36, heads=16, kv_heads=2, mlp=11008
    ),
    "qwen25_7b": _published(
        **_QWEN25, vocab_size=152064, hidden=3584, layers=28, heads=28, kv_heads=4, mlp=18944
    ),
    "qwen25_14b": _published(
        **_QWEN25, vocab_size=152064, hidden=5120, layers=48, heads=40, kv_heads=8, mlp=13824
    ),
    "qwen25_32b": _published(
        **_QWEN25, vocab_size=152064, hidden=5120, layers=64, heads=40, kv_heads=8, mlp=27648
    ),
    "qwen25_72b": _published(
        **_QWEN25, vocab_size=152064, hidden=8192, layers=80, heads=64, kv_heads=8, mlp=29568
    ),
    "qwen3_06b": _published(**_QWEN3, hidden=1024, layers=28, heads=16, mlp=3072, tied=True),
    "qwen3_17b": _published(**_QWEN3, hidden=2048, layers=28, heads=16, mlp=6144, tied=True),
    "qwen3_4b": _published(**_QWEN3, hidden=2560, layers=36, heads=32, mlp=9728, tied=True),
    "qwen3_8b": _published(**_QWEN3, hidden=4096, layers=36, heads=32, mlp=12288),
    "qwen3_14b": _published(**_QWEN3, hidden=5120, layers=40, heads=40, mlp=17408),
    "qwen3_32b": _published(**_QWEN3, hidden=5120, layers=64, heads=64, mlp=25600),
    "qwen3_30b_a3b": _published(**_QWEN3_MOE, hidden=2048, layers=48, heads=32, mlp=768),
    "qwen3_235b_a22b": _published(**_QWEN3_MOE, hidden=4096, layers=94, heads=64, mlp=1536),
    # Qwen3.6's 27B and 35B-A3B have the sizes of these; the language models alone.
    "qwen35_4b": _qwen35(hidden=2560, layers=32, heads=16, kv_heads=4, mlp=9216, tied=True),
    "qwen35_9b": _qwen35(hidden=4096, layers=32, heads=16, kv_heads=4, mlp=12288),
    "qwen35_27b": _qwen35(
        hidden=5120, layers=64, heads=24, kv_heads=4, mlp=17408, value_heads=48
    ),
    "qwen35_35b_a3b": _qwen35(
        family="qwen3_5_moe_text", hidden=2048, layers=40, heads=16, kv_heads=2, mlp=512,
        experts=256, active_experts=8, normed_experts=True, shared_expert=512,
    ),
    "mistral_7b": _published(  # v0.3, without a window
        family="mistral", vocab_size=32768, kv_heads=8, mlp=14336, positions=32768, rope_theta=1e6
    ),
    # Its window is as long as its positions.
    "ministral_8b": _published(**_MISTRAL, layers=36, mlp=12288),
    "mistral_small_24b": _published(
        **_MISTRAL, hidden=5120, layers=40, mlp=32768, head_dim=128
    ),
    "ministral3_3b": _published(
        **_MINISTRAL3, hidden=3072, layers=26, mlp=9216, tied=True
    ),
    "ministral3_8b": _published(**_MINISTRAL3, layers=34, mlp=14336),
    "smollm3_3b": _published(
        family="smollm3", vocab_size=128256, hidden=2048, layers=36, heads=16, kv_heads=4,
        mlp=11008, eps=1e-6, positions=65536, rope_theta=5e6, tied=True,
        rotated=tuple((number + 1) % 4 != 0 for number in range(36)),
    ),
    "olmo2_7b": _published(**_OLMO2),
    "olmo2_13b": _published(
        **_OLMO2, hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13824
    ),
    "granite33_8b": _published(
        family="granite", vocab_size=49159, kv_heads=8, layers=40, mlp=12800, positions=131072,
        rope_theta=1e7, tied=True, embedding_scale=12.0, residual_scale=0.22,
        attention_scale=0.0078125, logit_divisor=16.0,
    ),
    "olmoe_7b": _published(
        family="olmoe", vocab_size=50304, hidden=2048, layers=16, heads=16, kv_heads=16, mlp=1024,
        qk_norm="whole", experts=64, active_experts=8,
    ),
    "mixtral_8x7b": _published(
        family="mixtral", kv_heads=8, mlp=14336, positions=32768, rope_theta=1e6, experts=8,
        active_experts=2, normed_experts=True,
    ),
    "llama4_maverick": _published(
        family="llama4_text", vocab_size=202048, hidden=5120, layers=48, heads=40, kv_heads=8,
        mlp=8192, positions=1048576, rope_theta=5e5, experts=128, active_experts=1,
        weighted_input=True, shared_expert=8192, shared_gate=False, plain_mlp=16384,
        kinds=("plain", "full") * 24, rotated=(True, True, True, False) * 12, chunk=8192,
        growth=(0.1, 8192),
    ),
    "llama4_scout": _published(
        family="llama4_text", vocab_size=202048, hidden=5120, layers=48, heads=40, kv_heads=8,
        mlp=8192, positions=10485760, rope_theta=5e5, qk_norm="rotated",
        rope_scaling=RopeScaling("llama3", 16.0, high_freq_factor=1.0), experts=16,
        active_experts=1, weighted_input=True, shared_expert=8192, shared_gate=False,
        rotated=(True, True, True, False) * 12, chunk=8192, growth=(0.1, 8192),
    ),
    "gpt_oss_20b": _published(**_GPT_OSS, layers=24, experts=32, windows=(128, 0) * 12),
    "gpt_oss_120b": _published(**_GPT_OSS, layers=36, experts=128, windows=(128, 0) * 18),
    "seed_oss_36b": _published(
        family="seed_oss", vocab_size=155136, hidden=5120, layers=64, heads=80, kv_heads=8,
        head_dim=128, mlp=27648, positions=524288, rope_theta=1e7, eps=1e-6, attention_bias=True,
        out_bias=False,
    ),
    "ernie45_03b": _published(
        family="ernie4_5", vocab_size=103424, hidden=1024, layers=18, heads=16, kv_heads=2,
        head_dim=128, mlp=3072, positions=131072, rope_theta=5e5, tied=True,
    ),
    "exaone4_32b": _published(
        family="exaone4", vocab_size=102400, hidden=5120, layers=64, heads=40, kv_heads=8,
        mlp=27392, positions=131072, rope_theta=1e6, rope_scaling=RopeScaling("llama3", 16.0),
        qk_norm="head", norms="after", windows=(4096, 4096, 4096, 0) * 16,
        rotated=(True, True, True, False) * 16,
    ),
    "glm4_9b": _published(
        family="glm4", vocab_size=151552, layers=40, kv_heads=2, mlp=13696, positions=32768,
        norms="both", attention_bias=True, out_bias=False, rotary_fraction=0.5,
    ),
    "glm45_air": _published(  # and GLM-4.6V, GLM-4.5V without their towers
        **_GLM45, hidden=4096, layers=46, mlp=1408, experts=128, shared_expert=1408,
        plain_mlp=10944, kinds=("plain",) + ("full",) * 45,
    ),
    "glm46": _published(  # 355 B; GLM-4.5 has 131,072 positions
        **_GLM45 | {"positions": 202752}, hidden=5120, layers=92, mlp=1536, experts=160,
        shared_expert=1536, plain_mlp=12288, kinds=("plain",) * 3 + ("full",) * 89,
        qk_norm="head", expert_weight=2.5,
    ),
    "dots1_142b": _published(
        family="dots1", vocab_size=152064, layers=62, mlp=1408, positions=32768, eps=1e-5,
        rope_theta=1e7, qk_norm="head", experts=128, active_experts=6, normed_experts=True,
        router="sigmoid", choice_bias=True, expert_weight=2.5, shared_expert=2816,
        shared_gate=False, plain_mlp=10944, kinds=("plain",) + ("full",) * 61, head_dim=128,
    ),
    "helium1_2b": _published(
        family="helium", vocab_size=64000, hidden=2048, layers=28, heads=16, kv_heads=8, mlp=8192,
        eps=1e-8, rope_theta=20000.0, out_bias=False,
    ),
    "lfm2_350m": _lfm2((2, 5, 8, 10, 12, 14), hidden=1024, layers=16, heads=16, mlp=4608),
    "lfm2_12b": _lfm2((2, 5, 8, 10, 12, 14), hidden=2048, layers=16, heads=32, mlp=8192),  # 1.2 B
    "lfm2_8b_a1b": _lfm2(
        (2, 6, 10, 14, 18, 21), hidden=2048, layers=24, heads=32, mlp=1792, plain_mlp=7168,
        experts=32, active_experts=4, normed_experts=True, router="sigmoid", choice_bias=True,
    ),
    # The sizes of LFM3-1.7B, granite-swash-2b, CWM, glm-4-9b-chat-hf, Qwen1.5-MoE-A2.7B and
    # Solar-Open-100B are transformers' defaults of their families.
    "lfm3_17b": _of_json("lfm3"),
    "granite_swash_2b": _of_json("granite_swa"),
    "cwm_32b": _of_json("cwm"),
    "glm4_9b_chat": _of_json("glm"),
    "qwen15_moe_a27b": _of_json("qwen2_moe"),
    "solar_open_100b": _of_json("solar_open"),
    "minimax_m2": _of_json("minimax_m2", rotary_dim=64),
    "hy3": _of_json("hy_v3", max_position_embeddings=262144),
    "deepseek_v2_lite": _of_json("deepseek_v2", **_yarn(40, 0.707), q_lora_rank=None,
        hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_experts_per_tok=6, first_k_dense_replace=1,
    ),
    "deepseek_v2": _of_json("deepseek_v2", **_yarn(40, 0.707), hidden_size=5120,
        intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=60,
        num_attention_heads=128, n_routed_experts=160, num_experts_per_tok=6, n_group=8,
        topk_group=3, topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        first_k_dense_replace=1,
    ),
    "deepseek_v3": _of_json("deepseek_v3", **_yarn(40)),
    "kimi_k2": _of_json("kimi_k2", **_yarn(32, rope_theta=50000.0), vocab_size=163840,
        num_attention_heads=64, n_routed_experts=384, n_group=1, topk_group=1,
        first_k_dense_replace=1, routed_scaling_factor=2.827,
    ),
    "glm47_flash": _of_json("glm4_moe_lite", rope_theta=1e6),
    "youtu_2b": _of_json("youtu", rope_theta=1.6e6),
    "trinity_nano": _of_json("afmoe", **_TRINITY, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=56, num_attention_heads=8, num_key_value_heads=2,
        moe_intermediate_size=256,
    ),
    "trinity_mini": _of_json("afmoe", **_TRINITY, num_attention_heads=32, num_key_value_heads=4,
        moe_intermediate_size=1024,
    ),
    "command_r7b": _published(
        family="cohere2", vocab_size=256000, layers=32, kv_heads=8, mlp=14336, positions=132096,
        rope_theta=50000.0, tied=True, norm_kind="layer", parallel=True, logit_divisor=4.0,
        windows=(4096, 4096, 4096, 0) * 8, rotated=(True, True, True, False) * 8,
    ),
    "apertus_8b": _published(
        family="apertus", vocab_size=131072, kv_heads=8, mlp=21504, positions=65536,
        rope_theta=1.2e7, rope_scaling=RopeScaling("llama3", 8.0), qk_norm="head",
        activation="xielu", gated_mlp=False,
    ),
    "nemotron_mini_4b": _published(
        family="nemotron", vocab_size=256000, hidden=3072, heads=24, kv_heads=8, mlp=9216,
        rotary_fraction=0.5, activation="relu2", gated_mlp=False, norm_kind="biased_layer",
        unit_norms=True,
    ),
    "stablelm2_16b": _published(  # 1.6 B
        family="stablelm", vocab_size=100352, hidden=2048, layers=24, heads=32, kv_heads=32,
        mlp=5632, rotary_fraction=0.25, norm_kind="biased_layer", attention_bias=True,
        out_bias=False,
    ),
    "starcoder2_7b": _published(
        family="starcoder2", vocab_size=49152, hidden=4608, layers=32, heads=36, kv_heads=4,
        mlp=18432, positions=16384, rope_theta=1e6, tied=True, norm_kind="biased_layer",
        gated_mlp=False, attention_bias=True, mlp_bias=True, activation="gelu_pytorch_tanh",
        windows=(4096,) * 32,
    ),
    "phi3_mini": _published(  # of 4,096 tokens
        family="phi3", vocab_size=32064, hidden=3072, mlp=8192, windows=(2047,) * 32
    ),
    "phi4": _published(
        family="phi3", vocab_size=100352, hidden=5120, layers=40, heads=40, kv_heads=10, mlp=17920,
        positions=16384, rope_theta=250000.0,
    ),
    "gemma2_2b": _gemma(
        **_GEMMA2, hidden=2304, layers=26, heads=8, kv_heads=4, mlp=9216, every=2, window=4096
    ),
    "gemma2_9b": _gemma(
        **_GEMMA2, hidden=3584, layers=42, heads=16, kv_heads=8, mlp=14336, every=2, window=4096
    ),
    "gemma2_27b": _gemma(
        **_GEMMA2 | {"head_dim": 128}, hidden=4608, layers=46, heads=32, kv_heads=16, mlp=36864,
        every=2, window=4096, attention_scale=144**-0.5,
    ),
    "gemma3_1b": _gemma(
        **_GEMMA3, hidden=1152, layers=26, heads=4, kv_heads=1, mlp=6912, positions=32768,
        vocab_size=262144, every=6, window=512,
    ),
    "gemma3_4b": _gemma(  # and the others without their vision towers
        **_GEMMA3, hidden=2560, layers=34, heads=8, kv_heads=4, mlp=10240, positions=131072,
        vocab_size=262208, every=6, window=1024, rope_scaling=RopeScaling("linear", 8.0),
    ),
    "gemma3_12b": _gemma(
        **_GEMMA3, hidden=3840, layers=48, heads=16, kv_heads=8, mlp=15360, positions=131072,
        vocab_size=262208, every=6, window=1024, rope_scaling=RopeScaling("linear", 8.0),
    ),
    "gemma3_27b": _gemma(
        **_GEMMA3 | {"head_dim": 128}, hidden=5376, layers=62, heads=32, kv_heads=16, mlp=21504,
        positions=131072, vocab_size=262208, every=6, window=1024,
        rope_scaling=RopeScaling("linear", 8.0), attention_scale=168**-0.5,
    ),
    "gemma4_e2b": _gemma(
        **_GEMMA4_SMALL, hidden=1536, layers=35, heads=8, kv_heads=1, mlp=6144, every=5,
        full_layers=layer_kinds.FullLayers(512, 1), borrowers=20, borrower_mlp=12288,
    ),
    "gemma4_e4b": _gemma(
        **_GEMMA4_SMALL, hidden=2560, layers=42, heads=8, kv_heads=2, mlp=10240, every=6,
        full_layers=layer_kinds.FullLayers(512, 2), borrowers=18,
    ),
    "gemma4_12b": _gemma(
        **_GEMMA4 | {"family": "gemma4_unified_text"}, hidden=3840, layers=48, heads=16, kv_heads=8,
        mlp=15360, full_layers=layer_kinds.FullLayers(512, 1, keys_are_values=True),
    ),
    "gemma4_31b": _gemma(
        **_GEMMA4, hidden=5376, layers=60, heads=32, kv_heads=16, mlp=21504,
        full_layers=layer_kinds.FullLayers(512, 4, keys_are_values=True),
    ),
    "gemma4_26b_a4b": _gemma(
        **_GEMMA4, hidden=2816, layers=30, heads=16, kv_heads=8, mlp=2112, experts=128,
        active_experts=8, normed_experts=True, experts_beside=704,
        full_layers=layer_kinds.FullLayers(512, 2, keys_are_values=True),
    ),
}  # fmt: skip


PRESETS: Mapping[str, Callable[..., LlamaConfig]] = {
    **{"smollm2": smollm2_135m, "smollm2_135m": smollm2_135m, "stories260k": stories260k},
    **{"llama_7b": llama_7b, "llama_13b": llama_13b, "llama2_7b": llama2_7b},
    **{"llama2_13b": llama2_13b, "llama2_70b": llama2_70b},
    **{"llama3_8b": llama3_8b, "llama31_8b": llama31_8b},
    **RELATIVES,
}
FREE = ("dtype", "attention", "attention_dropout", "remat", "unroll")
BASE = Base(
    "LLaMA",
    f"{', '.join(LANGUAGE_MODELS)}, a folder, a GGUF file or ORG/NAME",
    LlamaConfig,
    {"changes": FREE},
)
