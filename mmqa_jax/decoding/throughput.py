"""How much an engine has done and how fast."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Throughput:
    """Counts since the start; seconds are wall-clock, without what the caller does in between."""

    requests: int = 0
    prefill_tokens: int = 0  # encoded, without padding
    reused_tokens: int = 0  # of prompts, copied or left in place instead
    decode_tokens: int = 0
    steps: int = 0  # decode steps
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
