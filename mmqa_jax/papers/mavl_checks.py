"""What MAVL's settings refuse before anything is opened: teams, votes, keys without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import has_answers
from mmqa_jax.prompting.plans import ROLES, Role
from mmqa_jax.runs.parts import KnowledgeSpec

# Keys of parts.knowledge without effect -> what to do instead.
_INSTEAD = {
    "top_k": "set options.passages",
    "text": "Tool_2 always searches for caption and question; leave it out",
    "section_key": "Tool_2 always searches all sources; leave it out",
    "max_words": "set options.knowledge_words",
}


def check_team(agents: Sequence[Role], votes: Sequence[float]) -> None:
    """Raises UserError unless every role is there at most once, in order, with its votes."""
    if not agents or tuple(agents) != tuple(role for role in ROLES if role in agents):
        raise UserError(
            f"config key options.agents={tuple(agents)}: each of {', '.join(ROLES)} at most once, "
            "in this order, was expected; change it, and options.votes with it."
        )
    if len(votes) != len(agents) or min(votes) < 0:
        raise UserError(
            f"config key options.votes={tuple(votes)}: one number of at least 0 for each of "
            f"options.agents={tuple(agents)} was expected; change one of them."
        )


def check_oracle(questions: Sequence[Question], plans: str) -> None:
    """Raises UserError if plans are to be chosen by answers that are not published."""
    if plans == "oracle" and not all(map(has_answers, questions)):
        raise UserError(
            "config key options.plans=oracle: chooses plans by the reference answers, which some "
            "questions of this split lack; take another split."
        )


def check_knowledge(knowledge: Mapping[str, Any] | None, words: int) -> None:
    """Raises UserError for keys of parts.knowledge that Tool_2 does not read.

    Args:
      words: that it keeps of a passage.
    """
    given = knowledge or {}
    for key, instead in _INSTEAD.items():
        default = getattr(KnowledgeSpec, key)
        neutral = (default, 0) if key == "max_words" else (default,)
        if given.get(key, default) not in neutral:
            raise UserError(
                f"config key parts.knowledge.{key}={given[key]}: has no effect on MAVL; {instead}."
            )
    if given and 0 < given.get("max_words", KnowledgeSpec.max_words) < words:
        raise UserError(
            f"config key options.knowledge_words={words}: parts.knowledge.max_words cuts passages "
            "before; set that to 0."
        )


def check_revote(votes: Sequence[float], weighting: str, folds: int) -> None:
    """Raises UserError for votes below 0, or weights that would be fitted on no questions."""
    if not votes or min(votes) < 0:
        raise UserError(
            f"config key options.votes={tuple(votes)}: one number of at least 0 for each agent of "
            "the finished run was expected; correct it."
        )
    if weighting == "fitted" and folds < 2:
        raise UserError(
            f"config key options.folds={folds}: weights are fitted to the questions of the other "
            "parts; give at least 2, or set options.weighting to level or probability."
        )
