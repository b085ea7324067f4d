"""How long a job takes an engine at least, in closed form, by the data sheet of its devices.

`sizes.choose_sizes` compares meshes by it, before anything is compiled: copies of the weights need
no exchange, which favors prompts; a copy that is split reads its weights once for more sequences,
which favors new tokens.
"""

import dataclasses
from typing import NamedTuple

from mmqa_jax.core.chips import Chip, near_seconds
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.experts import reached


class CallTime(NamedTuple):
    """Seconds of the parts of one call of a program, each at the data sheet's peak."""

    compute: float
    hbm: float
    exchange: float


class JobTime(NamedTuple):
    """Seconds of a job on all copies."""

    prefill: float
    decode: float
    tokens_per_second: float  # new ones, while all slots decode

    @property
    def seconds(self) -> float:
        """Returns the time of prompts and of decoding, one after the other."""
        return self.prefill + self.decode


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be answered; a mean where sequences differ."""

    sequences: float
    prompt_tokens: float
    new_tokens: float


@dataclasses.dataclass(frozen=True)
class SplitCopy:
    """A copy of a language model, split over `tensor` devices."""

    # With the key heads that each device has, repeated where `tensor` does not divide them, and the
    # dtype of arithmetic.
    model: LlamaConfig
    chip: Chip
    tensor: int
    layer_bytes: float  # of the weights of all layers on a device
    expert_bytes: float  # of these, the experts'
    head_bytes: float  # of the output head on a device
    token_bytes: float  # of a token's keys and values on a device
    state_bytes: float = 0.0  # of a sequence's recurrent states on a device

    def decode(self, slots: float, columns: float) -> CallTime:
        """One token of each of a copy's slots, which see so many columns."""
        read = slots * (columns * self.token_bytes + 2 * self.state_bytes)
        return self._call(slots, slots, columns, read)

    def prefill(self, tokens: float, prompts: float, columns: float) -> CallTime:
        """A batch of chunks of so many tokens, of so many prompts; a token sees so many columns."""
        return self._call(tokens, prompts, columns, tokens * self.token_bytes)

    def _call(self, tokens: float, heads: float, columns: float, cache_bytes: float) -> CallTime:
        """`heads`: tokens of which logits are computed."""
        model, item = self.model, 4 if self.model.dtype == "float32" else 2
        of_period = sum(
            layer.mixing
            + layer.mlp_numbers(layer.active_experts)
            # Scores and values; of a memory its answers, its change and what it gives.
            + (3 * layer.state_numbers or 2 * layer.heads * layer.head_size * columns)
            for layer in model.places
        )
        products = tokens * of_period * (model.layers // model.period)
        products += heads * model.hidden * model.vocab_size
        unread = 0.0
        if model.experts:
            unread = self.expert_bytes * (1 - reached(model, tokens))
        moved = self.layer_bytes - unread + self.head_bytes + cache_bytes
        sums = near_seconds("all-reduce", self.tensor, tokens * model.hidden * item, self.chip)
        kind = "f32" if item == 4 else "bf16"
        return CallTime(
            self.chip.seconds({kind: 2 * products / self.tensor}),
            moved / self.chip.hbm_rate,
            2 * model.layers * sums,
        )

    def seconds(self, job: Job, copies: int, slots: float, tokens: float) -> JobTime:
        """The time of a job that is shared among copies.

        What a batch of prompts exchanges can run beside the products of others; nothing runs beside
        what a decoding step exchanges.

        Args:
          slots: of a copy.
          tokens: of a copy, of a batch of prompts' chunks.
        """
        sequences = job.sequences / copies
        batch = self.prefill(tokens, tokens / job.prompt_tokens, job.prompt_tokens / 2)
        prefill = sequences * job.prompt_tokens / tokens * max(batch)
        slots = min(slots, max(sequences, 1.0))
        step = self.decode(slots, job.prompt_tokens + job.new_tokens / 2)
        seconds = max(step.compute, step.hbm) + step.exchange
        steps = job.new_tokens * max(sequences / slots, 1.0)
        return JobTime(prefill, steps * seconds, copies * slots / seconds)
