"""Questions that a stranger may ask a demo, and that no source of Atlas answers."""

from __future__ import annotations

from importlib import resources

from mmqa_jax.data.schema import Question


def strangers() -> list[Question]:
    """The questions of strangers.txt: general knowledge, none about countries or pictures.

    On them `mmqa demo` chooses which questions `mmqa ask` refuses, so that they say nothing about
    how many it refuses: measure that on others.
    """
    text = (resources.files("mmqa_jax.data.atlas") / "strangers.txt").read_text("utf-8")
    return [Question(f"stranger{n}", "val", line) for n, line in enumerate(text.splitlines())]
