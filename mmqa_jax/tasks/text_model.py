"""What tasks share that train a language model or an encoder-decoder on texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.prompting import text_tokenizer
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.tasks.base_llm import adapter_of, base_fingerprint, make_text_tokenizer
from mmqa_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModelTask(Task):
    """A task whose model reads a language model's tokens and starts from a published one.

    Attributes:
      architecture: of the model, as base_llm has it.
      tokenizer: "" for the base's own; see base_llm.make_text_tokenizer.
    """

    architecture: ClassVar[str]

    def tokenizer_kind(self) -> tuple[type, str]:
        return TextTokenizer, "that of a language model"

    def make_tokenizer(self, corpus: Corpus, folder: Path) -> TextTokenizer:
        return make_text_tokenizer(self, corpus, folder)

    def open_tokenizer(self, folder: Path) -> TextTokenizer:
        return text_tokenizer.open_tokenizer(folder)

    def check_trained(self) -> None:
        """Refuses a filter of the trained parameters: the section `model` says what is trained."""
        if self.loop.optimizer.trainable is not None:
            raise UserError(
                f"config key train.optimizer.trainable={self.loop.optimizer.trainable}: the "
                "section model says what is trained (model.lora: its additions); set it to None."
            )

    def check_targets(self, targets: int) -> None:
        """Refuses answers without a token."""
        if targets < 1:
            raise UserError(f"config key batches.targets={targets}: give 1 or more.")

    def check_lengths(self, lengths: tuple[int, ...]) -> None:
        """Refuses lengths of prompts that are none, or not ascending."""
        if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise UserError(
                f"config key batches.lengths={lengths}: ascending numbers of tokens were expected, "
                "such as (128, 256, 512); change them."
            )

    def metadata(self, tokenizer: TextTokenizer) -> dict[str, Any]:
        """Further values of model.json."""
        return {
            "base": base_fingerprint(self),
            "token_ids": {"eos_token_id": list(tokenizer.end_ids)},
            **({"adapter": dataclasses.asdict(adapter)} if (adapter := adapter_of(self)) else {}),
        }

    def kept(self, objective: Any) -> Callable[[nnx.Module], nnx.Module] | None:
        """`finish` of the recipe: a whole model, or the additions to a published base alone."""
        return None if adapter_of(self) else objective.finish
