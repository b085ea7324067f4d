"""The systems that rows name.

A system is what has `SETTINGS`: the settings (papers/setting.py) by the names that rows have for
them. It is a module of papers/ or extensions/, or a class in the config file of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.extensions import mavl_votes
from mmqa_jax.papers import (
    echosight,
    kat,
    llava,
    mathvista,
    mmcot,
    mmmu,
    mragbench,
    pica,
    prophet,
    rmr,
    webqa,
)
from mmqa_jax.papers.setting import Setting


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
    "kat": kat,
    "mmcot": mmcot,
    "echosight": echosight,
    "mmmu": mmmu,
    "mragbench": mragbench,
    "mathvista": mathvista,
}


def known_systems() -> dict[str, System]:
    """Every system by its name: those of the package, and those that a config file defines."""
    return {**BUILT_IN, **{kind.name: kind for kind in OwnSystem.__subclasses__()}}


def find_setting(system: str, setting: str | None) -> Setting:
    """The setting that a row names; UserError for an unknown one, or an unknown system."""
    systems = known_systems()
    if system not in systems:
        raise UserError(f"config key system={system}: use one of {', '.join(systems)}.")
    settings = systems[system].SETTINGS
    if setting not in settings:
        raise UserError(f"config key setting={setting}: use one of {', '.join(settings)}.")
    return settings[setting]
