"""The systems that rows name, and how a setting of one is executed.

A system is what has `SETTINGS`: the settings (papers/setting.py) by the names that rows have for
them. It is a module of papers/ or extensions/, or a class in the config file of its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.extensions import mavl_votes
from mmqa_jax.papers import llava, pica, prophet, rmr, webqa
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.captions import check_captions, check_no_tags
from mmqa_jax.prompting.multiple_choice import check_choices
from mmqa_jax.retrieval.rankings import check_gold


class System(Protocol):
    """What rows name."""

    SETTINGS: Mapping[str, Setting]


class OwnSystem:
    """A system that is no module of this package: a subclass, in the config file of its rows.

    Attributes:
      name: as in the key `system` of a row.
      SETTINGS: as those of a paper.
    """

    name: ClassVar[str]
    SETTINGS: ClassVar[Mapping[str, Setting]]


BUILT_IN: dict[str, System] = {
    "webqa": webqa,
    "pica": pica,
    "rmr": rmr,
    "prophet": prophet,
    "mavl": mavl_votes,  # the paper's setting, and other votes
    "llava": llava,
}


def known_systems() -> dict[str, System]:
    """Every system by its name: those of the package, and those that a config file defines."""
    return {**BUILT_IN, **{kind.name: kind for kind in OwnSystem.__subclasses__()}}


def parts_of(system: System, setting: str) -> dict[str, bool]:
    """The names of the parts that a setting takes -> whether it needs them."""
    return system.SETTINGS[setting].parts()


def options_of(system: System, setting: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A setting's options, with the defaults of those that are not given."""
    return system.SETTINGS[setting].options(options)


def needs_all(system: System, setting: str) -> bool:
    """Whether an answer depends on the other questions: then they are not cut into chunks."""
    return system.SETTINGS[setting].needs_all


def check_options(
    system: System, setting: str, options: Mapping[str, Any], parts: Mapping[str, Any]
) -> None:
    """Raises UserError for a row that contradicts itself; called before anything is opened.

    Args:
      options: those that are given.
      parts: the row's, as they are described, unopened.
    """
    asked = system.SETTINGS[setting]
    if asked.captions_of == "questions" and "captions" in parts:
        check_no_tags(parts["captions"].tags)
    asked.check_row(asked.options(options), parts)


def check_questions(system: System, setting: str, questions: Sequence[Question]) -> None:
    """Raises UserError for questions that a setting cannot answer; called before parts open."""
    asked = system.SETTINGS[setting]
    if asked.of_choices:
        check_choices(setting, questions)
    if asked.of_gold:
        check_gold(questions)


def check_inputs(
    system: System,
    setting: str,
    questions: Sequence[Question],
    options: Mapping[str, Any],
    parts: Mapping[str, Any],
) -> None:
    """Raises UserError for questions or files that a setting cannot use; called before models load.

    Args:
      questions: of the whole row.
      options: those that are given.
      parts: the opened parts that are files.
    """
    asked = system.SETTINGS[setting]
    asked.check_inputs(questions, asked.options(options))
    if asked.captions_of == "questions":
        check_captions(questions, parts.get("captions"))


def notes_of(
    system: System, setting: str, questions: Sequence[Question], options: Mapping[str, Any]
) -> list[str]:
    """What a reader of the results has to know about how a setting treated its questions."""
    asked = system.SETTINGS[setting]
    return asked.notes(questions, asked.options(options))


def run_setting(
    system: System,
    setting: str,
    questions: Sequence[Question],
    corpus: Corpus,
    parts: Mapping[str, Any],
    options: Mapping[str, Any],
) -> list[Prediction]:
    """Executes one setting of a paper.

    Args:
      setting: a name of the system's SETTINGS.
      parts: at least those that the setting needs.
      options: keyword-only parameters of the setting.

    Returns:
      One Prediction per question; its answer is "" if the setting only retrieves sources.
    """
    function = system.SETTINGS[setting].answer
    available = {"questions": questions, "corpus": corpus, **parts}
    taken = inspect.signature(function).parameters
    results = function(**{k: v for k, v in available.items() if k in taken}, **options)
    return [
        Prediction(x.question_id, "", x.sources, x.scores) if isinstance(x, Ranking) else x
        for x in results
    ]
