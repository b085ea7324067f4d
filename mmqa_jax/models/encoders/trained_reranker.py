"""Rerankers of texts that are trained further: made of a published folder, and written as one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.models.encoders import text_encoders
from mmqa_jax.models.encoders.heads import CrossEncoder, YesNoDecoder
from mmqa_jax.models.llama.lora import LoraConfig, add_lora, hold_base, merge_lora
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.formats.safetensors import write_sharded


@dataclasses.dataclass(frozen=True)
class RerankerRecord:
    """A reranker of pairs of texts as training makes it.

    Attributes:
      published: transformers' config.json, as text.
      yes_no: the ids of the tokens yes and no of a decoder; None: it is a cross-encoder.
      changes: fields of our config that say how it is computed.
    """

    published: str
    yes_no: tuple[int, int] | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    kind: ClassVar[str] = "texts"

    @property
    def _family(self) -> tuple[text_encoders.Family, Mapping[str, Any]]:
        published = json.loads(self.published)
        return text_encoders.FAMILIES[published["model_type"]], published

    @property
    def config(self) -> Any:
        """The model's sizes."""
        family, published = self._family
        return replace_fields(family.config(published, "config.json"), **dict(self.changes))

    def logits(
        self, model: Any, batch: Mapping[str, jax.Array], dropout_key: jax.Array | None
    ) -> jax.Array:
        """The logits of pairs [B]; of dropout, `CrossEncoder` alone has any."""
        pairs = batch["pair_ids"], batch["pair_mask"], batch["pair_types"]
        if isinstance(model, CrossEncoder):
            return model(*pairs, dropout_key=dropout_key)
        return model(*pairs)

    def build(self, *, rngs: nnx.Rngs, lora: LoraConfig | None = None) -> Any:
        """A freshly initialized model: (ids, mask, types) [B, L] -> logits [B]."""
        if self.yes_no is None:
            return self._family[0].cross_encoder(self.config, rngs=rngs)
        model = YesNoDecoder(self.config, *self.yes_no, rngs=rngs)
        if lora is not None:
            add_lora(model, lora, rngs=rngs)
        return model

    def load(
        self, model: Any, folder: Path, mesh: Mesh | None = None, lora: LoraConfig | None = None
    ) -> None:
        """Puts a published folder's weights into a model of shapes, in place.

        The head of an encoder that is no reranker yet stays shapes.
        """
        if self.yes_no is not None:
            base: Any = text_encoders.load_yes_no(folder, *self.yes_no, mesh)
            if lora is not None:
                hold_base(base, lora)
        elif text_encoders.is_classifier(folder):
            base = text_encoders.load_cross_encoder(folder, mesh)
        else:
            base, model = text_encoders.load_text_encoder(folder, mesh), model.bert
        nnx.update(model, nnx.state(base, nnx.Param))

    def finish(self, model: Any) -> Any:
        """The trained decoder with LoRA's additions in its kernels."""
        return merge_lora(model)

    def write(self, folder: Path, model: Any) -> None:
        """Writes a trained model as transformers has it, but for its tokenizer."""
        family, published = self._family
        key_map = family.classifier
        if self.yes_no is not None or key_map is None:
            key_map = text_encoders.decoder_key_map
        state, config = nnx.state(model, nnx.Param), self.config
        tensors = text_encoders.published_tensors(
            family, config, state, key_map(config), classifier=self.yes_no is None
        )
        write_sharded(folder, tensors)
        published = {key: x for key, x in published.items() if key != "torch_dtype"}
        write_json(folder / text_encoders.CONFIG, {**published, "dtype": "float32"})

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON, which `from_json` reads back."""
        return {"published": json.loads(self.published), "yes_no": self.yes_no}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RerankerRecord:
        """The record of a run's model.json."""
        yes_no = value["yes_no"]
        return cls(json.dumps(value["published"]), tuple(yes_no) if yes_no else None)


def cross_encoder_record(folder: Path) -> RerankerRecord:
    """The record of a published cross-encoder, or of an encoder that gets a head of its own."""
    published = read_json(folder / text_encoders.CONFIG)
    kind = published.get("model_type")
    family = text_encoders.FAMILIES.get(kind)
    if family is None or family.classifier is None:
        known = [name for name, entry in text_encoders.FAMILIES.items() if entry.classifier]
        raise UserError(
            f"config key init={folder}: model_type is {kind!r}, of which no reranker is made; give "
            f"an encoder of {', '.join(known)}, or a Qwen3-Reranker."
        )
    if not text_encoders.is_classifier(folder):
        named = (published.get("architectures") or ["Model"])[0]
        name = f"{named.partition('For')[0].removesuffix('Model')}ForSequenceClassification"
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        published = {**published, "architectures": [name], **labels}
    return RerankerRecord(json.dumps(published))
