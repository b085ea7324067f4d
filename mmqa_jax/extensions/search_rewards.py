"""Rewards tell what an episode of a searching model earns."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from mmqa_jax.core.config import load_module
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import squad_contained, squad_exact_match, squad_f1
from mmqa_jax.evaluation.webqa import keyword_accuracy
from mmqa_jax.prompting.search_actions import Invalid
from mmqa_jax.prompting.search_loop import Episode

Scorer = Literal["exact", "f1", "contained", "webqa"]
_SCORERS: dict[Scorer, Callable[[str, Question], float]] = {
    "exact": lambda answer, question: squad_exact_match(answer, question.answers),
    "f1": lambda answer, question: squad_f1(answer, question.answers),
    "contained": lambda answer, question: squad_contained(answer, question.answers),
    "webqa": keyword_accuracy,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSection:
    """The section `reward`: a sum of parts.

    Attributes:
      scorer: of the answer: SQuAD's exact match (as in Search-R1), its F1, whether a reference
        stands in the answer, or WebQA's accuracy without lemmas.
      answer: weight of the answer's score.
      evidence: weight of the share of the gold sources that came back.
      precision: weight of the share of the sources that came back that are gold.
      format: weight of the share of turns whose action could be read.
      search: cost of a search.
      function: `FILE.py:NAME` of a function of one's own, Episode -> float, which is added; "":
        none. A reward that raises or is no finite number makes an answer count as its group's mean.
    """

    scorer: Scorer = "exact"
    answer: float = 1.0
    evidence: float = at_least(0, 0.0)
    precision: float = at_least(0, 0.0)
    format: float = at_least(0, 0.0)
    search: float = at_least(0, 0.0)
    function: str = ""

    def check(self) -> None:
        """Loads the function of one's own; UserError where there is none."""
        self._own  # noqa: B018

    @functools.cached_property
    def _own(self) -> Callable[[Episode], float] | None:
        if not self.function:
            return None
        file, _, name = self.function.rpartition(":")
        function = getattr(load_module(Path(file)), name, None) if Path(file).is_file() else None
        if not callable(function):
            raise UserError(
                f"config key reward.function={self.function}: FILE.py:NAME of a function was "
                "expected, which takes an Episode and returns a number; correct it."
            )
        return function

    def of(self, episode: Episode) -> dict[str, float]:
        """The reward, and its parts, which become metrics. It is NaN where it could not be told, or
        where the search failed, which is not the policy's fault."""
        prediction, gold = episode.prediction(), set(episode.question.positives)
        came_back = set(episode.read)
        readable = sum(not isinstance(turn.action, Invalid) for turn in episode.turns)
        parts = {
            "answer": _SCORERS[self.scorer](prediction.answer, episode.question),
            "evidence": len(came_back & gold) / max(len(gold), 1),
            "precision": len(came_back & gold) / max(len(came_back), 1),
            "format": readable / max(len(episode.turns), 1),
        }
        reward = sum(getattr(self, name) * value for name, value in parts.items())
        reward += self._further(episode) - self.search * episode.searches()
        if episode.is_lost:
            reward = math.nan
        return {"reward": reward, **parts, "searches": float(episode.searches())}

    def _further(self, episode: Episode) -> float:
        if self._own is None:
            return 0.0
        try:
            value = float(self._own(episode))
        except Exception:  # whatever a user's function raises is one failed reward
            return math.nan
        return value if math.isfinite(value) else math.nan


METRICS = ("answer", "evidence", "precision", "format", "searches")
