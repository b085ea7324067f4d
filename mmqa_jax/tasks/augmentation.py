"""The augmentation of training examples that a config's section `augment` names.

`augment.factory` is `package.module:Class`; the section's other values are its arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.examples import Augment

# Modules of runs that were trained when they had another name.
_FORMER = {"mmqa_jax.data.datasets.atlas.augment": "mmqa_jax.data.atlas.augment"}


def augmentation_factory(section: Mapping[str, Any]) -> Callable[..., Augment]:
    """What `augment.factory` names, a class or function of this package."""
    named = section.get("factory", "")
    module, _, name = str(named).partition(":")
    module = _FORMER.get(module, module)
    found = None
    if module.startswith("mmqa_jax."):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "-"):
                raise
    if not callable(found):
        raise UserError(
            f"config key augment.factory={named!r}: a class of mmqa_jax was expected as "
            "package.module:Class; correct it or leave augment out."
        )
    return found


def make_augmentation(section: Mapping[str, Any]) -> Augment | None:
    """The augmentation, None where the section is missing or its probabilities are all 0."""
    options = {key: value for key, value in section.items() if key != "factory"}
    return augmentation_factory(section)(**options) if any(options.values()) else None
