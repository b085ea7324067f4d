"""Counts and rates of an engine's work."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Throughput:
    """Counts since the start; seconds are wall-clock, without the caller's time in between."""

    requests: int = 0
    prefill_tokens: int = 0  # encoded, without padding
    reused_tokens: int = 0  # of prompts, taken from the prefix cache instead
    decode_tokens: int = 0
    steps: int = 0  # decode steps
    pictures: int = 0  # that LLaVA's tower encoded
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens encoded per second."""
        return self.prefill_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """New tokens per second, all slots together."""
        return self.decode_tokens / max(self.decode_seconds, 1e-9)
