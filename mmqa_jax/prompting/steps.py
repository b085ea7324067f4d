"""What MAVL's planners and tools were asked and found for a question, for its trace."""

from __future__ import annotations

import dataclasses
from typing import Any

from mmqa_jax.prompting.plans import Role


@dataclasses.dataclass
class Steps:
    """The steps before the answers to one question.

    Attributes:
      planner_prompts: of every agent's planner that was asked.
      knowledge_prompt: of Tool_3; "" where it was not asked.
      passages: of Tool_2, their ids and scores.
      failed: why steps gave nothing.
    """

    planner_prompts: dict[Role, str] = dataclasses.field(default_factory=dict)
    knowledge_prompt: str = ""
    passages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """What trace.jsonl keeps of them, failures aside."""
        record = dataclasses.asdict(self)
        return {name: value for name, value in record.items() if value and name != "failed"}
