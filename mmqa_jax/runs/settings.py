"""The systems that rows name, and how a setting of one is executed.

A system is a module with `SETTINGS`, name -> function of (questions, corpus, parts, options), and
`PARTS`, the names of the parameters that are parts. A function takes what it names. A module may
have `check_questions` and `notes`, as webqa.py has them, and `check_options`, `check_inputs` and
`NEEDS_ALL`, as mavl.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.papers import llava, mavl, pica, prophet, rmr, webqa


class OwnSystem:
    """A system that is no module of this package: a subclass, in the config file of its rows.

    Its attributes are what the modules have: SETTINGS and PARTS, and the hooks as static methods.

    Attributes:
      name: as in the key `system` of a row.
    """

    name: ClassVar[str]
    SETTINGS: ClassVar[Mapping[str, Callable[..., Any]]]
    PARTS: ClassVar[tuple[str, ...]]


System = ModuleType | type[OwnSystem]
BUILT_IN: dict[str, System] = {
    "webqa": webqa,
    "pica": pica,
    "rmr": rmr,
    "prophet": prophet,
    "mavl": mavl,
    "llava": llava,
}


def known_systems() -> dict[str, System]:
    """Every system by its name: those of the package, and those that a config file defines."""
    return {**BUILT_IN, **{kind.name: kind for kind in OwnSystem.__subclasses__()}}


def parts_of(system: System, setting: str) -> dict[str, bool]:
    """The names of the parts that a setting takes -> whether it needs them."""
    taken = inspect.signature(system.SETTINGS[setting]).parameters
    return {name: p.default is p.empty for name, p in taken.items() if name in system.PARTS}


def options_of(system: System, setting: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A setting's options, with the defaults of those that are not given."""
    parameters = inspect.signature(system.SETTINGS[setting]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {**defaults, **options}


def needs_all(system: System, setting: str) -> bool:
    """Whether an answer depends on the other questions: then they are not cut into chunks."""
    return setting in getattr(system, "NEEDS_ALL", ())


def check_options(
    system: System, setting: str, options: Mapping[str, Any], parts: Mapping[str, Any]
) -> None:
    """Raises UserError for a row that contradicts itself; called before anything is opened.

    Args:
      options: those that are given.
      parts: the row's config section `parts`.
    """
    if hasattr(system, "check_options"):
        system.check_options(setting, options_of(system, setting, options), parts)


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
    if hasattr(system, "check_inputs"):
        given = options_of(system, setting, options)
        system.check_inputs(setting, questions, given, parts)


def check_questions(system: System, setting: str, questions: Sequence[Question]) -> None:
    """Raises UserError for questions that a setting cannot answer; called before parts open."""
    if hasattr(system, "check_questions"):
        system.check_questions(setting, questions)


def notes_of(
    system: System, setting: str, questions: Sequence[Question], options: Mapping[str, Any]
) -> list[str]:
    """What a reader of the results has to know about how a setting treated its questions."""
    return system.notes(setting, questions, options) if hasattr(system, "notes") else []


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
    function = system.SETTINGS[setting]
    available = {"questions": questions, "corpus": corpus, **parts}
    taken = inspect.signature(function).parameters
    results = function(**{k: v for k, v in available.items() if k in taken}, **options)
    return [
        Prediction(x.question_id, "", x.sources, x.scores) if isinstance(x, Ranking) else x
        for x in results
    ]
