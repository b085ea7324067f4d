"""The language model in a Gemma 3 checkpoint that has a vision tower; the tower is left out."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

from mmqa_jax.models.published_keys import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

WITH_TOWER = ("gemma3",)
_READ = kinds(object="text_config", object_or_null="vision_config", flag="tie_word_embeddings")
_OF_PICTURES = (
    *("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    "vision_config",
)
# As published, and as transformers 4.52 and later write it.
_LANGUAGE_MODEL = re.compile(
    r"^(?:language_model\.(model\.|lm_head\.)|model\.language_model\.|(lm_head\.))"
)
_TOWER = re.compile(r"^(?:model\.)?(vision_tower|multi_modal_projector)\.")


def language_model(
    published: Mapping[str, Any], source: TensorSource, where: str
) -> tuple[dict[str, Any], TensorSource]:
    """The config.json and the tensors of the language model alone, as Gemma3ForCausalLM has them.

    A warning names the parts that are left out.

    Args:
      published: the config.json of a Gemma3ForConditionalGeneration.
      source: its tensors.
      where: what messages call the file.
    """
    check_keys(published, where, read=_READ, harmless=_OF_PICTURES)
    inherited = {key: published[key] for key in ("tie_word_embeddings",) if key in published}
    text = {**inherited, "model_type": "gemma3_text", **published["text_config"]}
    text["final_logit_softcapping"] = None  # the class with a tower does not use it
    tensors, left_out = {}, set()
    for key, spec in source.specs().items():
        if found := _TOWER.match(key):
            left_out.add(found[1])
            continue
        ours = _LANGUAGE_MODEL.sub(lambda match: match[1] or match[2] or "model.", key)
        tensors[ours] = spec, functools.partial(source.read, key)
    logging.getLogger(__name__).warning(
        "%s: of this Gemma 3 the language model is read; %s left out, it sees no pictures",
        where,
        f"its {' and '.join(sorted(left_out))} are" if left_out else "a vision tower is",
    )
    return text, DerivedSource(source.name, tensors)
