"""Encoders and rerankers of texts that are trained further: from and to a published folder.

What the folder's JSON files say is an `EncoderRecord`, which a run keeps in its model.json: so a
run needs the folder at its start alone, and its encoder is opened, and exported for
sentence-transformers, from the run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.models.common.layers import Linear
from mmqa_jax.models.encoders import late_interaction, sentence_pooling, text_encoders
from mmqa_jax.models.encoders.embedding_gemma import MODEL_TYPE, EmbeddingGemmaConfig
from mmqa_jax.models.encoders.heads import CrossEncoder, Dense, SentenceEncoder, YesNoDecoder
from mmqa_jax.models.encoders.text_encoders import check_family
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import ADDED, LoraConfig, add_lora, hold_base, merge_lora
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.formats.safetensors import ArraySource, TensorSource, write_sharded


@dataclasses.dataclass(frozen=True)
class RerankerRecord:
    """A reranker of pairs of texts as training makes it."""

    published: str  # transformers' config.json, as text
    # The ids of the tokens yes and no of a decoder; None: it is a cross-encoder.
    yes_no: tuple[int, int] | None = None
    changes: tuple[tuple[str, Any], ...] = ()  # fields of our config that say how it is computed

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


Vectors = Literal["text", "token"]

_IDENTITY = "torch.nn.modules.linear.Identity"
_MODULES = "sentence_transformers.base.modules"
_CLASSES = {
    "Transformer": f"{_MODULES}.transformer.Transformer",
    "Dense": f"{_MODULES}.dense.Dense",
    "Normalize": f"{_MODULES}.normalize.Normalize",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Mask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
}


@dataclasses.dataclass(frozen=True)
class EncoderRecord:
    """An encoder of texts as training makes it."""

    published: str  # transformers' config.json, as text
    # How vectors are made of the states of tokens: one of a text, or one of each token.
    recipe: sentence_pooling.SentenceRecipe | late_interaction.LateInteraction
    # Fields of our config that say how the encoder is computed.
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def vectors(self) -> Vectors:
        """Whether a text or each of its tokens has a vector."""
        return "token" if isinstance(self.recipe, late_interaction.LateInteraction) else "text"

    @property
    def config(self) -> Any:
        """The encoder's sizes."""
        family, published = self._family
        return replace_fields(family.config(published, "config.json"), **dict(self.changes))

    @property
    def dim(self) -> int:
        """The values of a vector."""
        return sentence_pooling.check_widths(self.recipe.dense, self._width)

    @property
    def _width(self) -> int:
        """The values of a token's state."""
        config = self.config
        return config.projected if isinstance(config, EmbeddingGemmaConfig) else config.hidden

    @property
    def _family(self) -> tuple[text_encoders.Family, Mapping[str, Any]]:
        published = json.loads(self.published)
        return text_encoders.FAMILIES[published["model_type"]], published

    def build(self, *, rngs: nnx.Rngs, lora: LoraConfig | None = None) -> Any:
        """A freshly initialized model."""
        family, _ = self._family
        trunk = family.model(self.config, rngs=rngs)
        if lora is not None:
            add_lora(trunk, lora, rngs=rngs)
        dense = [_dense(layer, rngs) for layer in self.recipe.dense]
        if isinstance(self.recipe, late_interaction.LateInteraction):
            return late_interaction.TokenEncoder(trunk, dense, self.recipe.normalized)
        return SentenceEncoder(trunk, self.recipe.pooling, self.recipe.truncate_dim, dense)

    def trained(self, lora: LoraConfig | None, tower: bool) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all. It has
        no `tower`."""
        return None if lora is None else f"{ADDED}|^dense/"

    def encode(self, model: Any, inputs: Mapping[str, jax.Array]) -> jax.Array:
        """Vectors of texts [B, D], or of each token [B, L, D]; `ids` and `mask` are [B, L]."""
        texts = inputs["ids"], inputs["mask"]
        return model(*texts) if self.vectors == "token" else model.encode_text(*texts)

    def load(
        self, model: Any, folder: Path, mesh: Mesh | None = None, lora: LoraConfig | None = None
    ) -> None:
        """Puts a published folder's weights into a model of shapes, in place.

        Linear layers that the folder lacks stay shapes.
        """
        trunk = text_encoders.load_text_encoder(folder, mesh, ignore=(r"^linear\.weight$",))
        if lora is not None:
            hold_base(trunk, lora)
        nnx.update(model.bert, nnx.state(trunk, nnx.Param))
        for layer, ours in zip(self.recipe.dense, model.dense, strict=True):
            if layer.folder != Path():
                nnx.update(ours, nnx.state(text_encoders.load_dense(layer), nnx.Param))

    def finish(self, model: Any) -> Any:
        """The trained model with LoRA's additions in its kernels."""
        model.bert = merge_lora(model.bert)
        return model

    def write(self, folder: Path, model: Any) -> None:
        """Writes a trained model as sentence-transformers has it, but for its tokenizer."""
        _, published = self._family
        write_sharded(folder, self.trunk_tensors(nnx.state(model.bert, nnx.Param)))
        published = {key: x for key, x in published.items() if key != "torch_dtype"}
        write_json(folder / text_encoders.CONFIG, {**published, "dtype": "float32"})
        recipe = self.recipe
        layers = [("Transformer", "")]
        if isinstance(recipe, sentence_pooling.SentenceRecipe):
            layers.append(("Pooling", "1_Pooling"))
            sizes = {"embedding_dimension": self._width, "include_prompt": True}
            _write(folder / sentence_pooling.POOLING, {**sizes, "pooling_mode": recipe.pooling})
        for layer, ours in zip(recipe.dense, model.dense, strict=True):
            layers.append(("Dense", f"{len(layers)}_Dense"))
            _write_dense(folder / layers[-1][1], layer, ours, self.vectors)
        if isinstance(recipe, late_interaction.LateInteraction):
            layers.append(("Mask", f"{len(layers)}_MultiVectorMask"))
            skipped = {"skiplist_words": list(recipe.skipped)}
            settings = {**skipped, "skiplist_tasks": list(recipe.skips)}
            _write(folder / layers[-1][1] / "config.json", settings)
        if isinstance(recipe, sentence_pooling.SentenceRecipe) or recipe.normalized:
            layers.append(("Normalize", f"{len(layers)}_Normalize"))
            _write(folder / layers[-1][1] / "config.json", _layer_over(self.vectors))
        modules = [
            {"idx": number, "name": str(number), "path": place, "type": _CLASSES[kind]}
            for number, (kind, place) in enumerate(layers)
        ]
        write_json(folder / sentence_pooling.MODULES, modules)
        write_json(folder / sentence_pooling.TRANSFORMER, self._transformer())
        write_json(folder / sentence_pooling.PROMPTS, self._prompts())

    def trunk_tensors(self, state: nnx.State) -> TensorSource:
        """The encoder's parameters as transformers has them."""
        family, config = self._family[0], self.config
        return text_encoders.published_tensors(family, config, state, family.key_map(config))

    def _transformer(self) -> dict[str, Any]:
        recipe = self.recipe
        settings: dict[str, Any] = {"do_lower_case": recipe.lowercase}
        if recipe.max_tokens is not None:
            settings["max_seq_length"] = recipe.max_tokens
        if isinstance(recipe, late_interaction.LateInteraction):
            lengths = {
                "query_length": recipe.query_length,
                "document_length": recipe.document_length,
            }
            settings |= {key: length for key, length in lengths.items() if length is not None}
            if (expansion := recipe.expansion) is not None:
                settings["query_expansion"] = {
                    "strategy": "fixed" if expansion.cuts else "min",
                    "length": expansion.length,
                    "attend": expansion.attended,
                    **({"token": expansion.token} if expansion.token else {}),
                }
        return settings

    def _prompts(self) -> dict[str, Any]:
        recipe = self.recipe
        settings: dict[str, Any] = {
            "prompts": {"query": recipe.prompts.question, "document": recipe.prompts.source},
            "default_prompt_name": None,
        }
        if isinstance(recipe, late_interaction.LateInteraction):
            scored = "meanmaxsim" if recipe.mean else "maxsim"
            return {"model_type": "MultiVectorEncoder", **settings, "similarity_fn_name": scored}
        if recipe.truncate_dim is not None:
            settings["truncate_dim"] = recipe.truncate_dim
        return {"model_type": "SentenceTransformer", **settings, "similarity_fn_name": "cosine"}

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON, which `from_json` reads back."""
        recipe = dataclasses.asdict(self.recipe)
        for layer in recipe["dense"]:
            del layer["folder"]
        published = json.loads(self.published)
        return {"vectors": self.vectors, "published": published, "recipe": recipe}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EncoderRecord:
        """The record of a run's model.json."""
        fields = dict(value["recipe"])
        fields["prompts"] = sentence_pooling.Prompts(**fields["prompts"])
        fields["dense"] = tuple(
            sentence_pooling.DenseLayer(Path(), **layer) for layer in fields["dense"]
        )
        if value["vectors"] == "text":
            recipe: sentence_pooling.SentenceRecipe | late_interaction.LateInteraction = (
                sentence_pooling.SentenceRecipe(**fields)
            )
        else:
            if fields["expansion"] is not None:
                fields["expansion"] = late_interaction.Expansion(**fields["expansion"])
            fields |= {key: tuple(fields[key]) for key in ("skipped", "skips")}
            recipe = late_interaction.LateInteraction(**fields)
        return cls(json.dumps(value["published"]), recipe)


def read_encoder_record(
    folder: Path,
    vectors: Vectors | None,
    *,
    dim: int | None = None,
    prompts: sentence_pooling.Prompts | None = None,
    changes: Mapping[str, Any] | None = None,
) -> EncoderRecord:
    """The record of a published folder.

    Args:
      folder: of transformers, with sentence-transformers' files if it has them.
      vectors: of each text or token; None: as the folder has them.
      dim: the values of a token's vector, by a new linear layer over an encoder that has none;
        None: as the folder has them.
      prompts: before questions and sources; None: the folder's.
      changes: see EncoderRecord.
    """
    published = read_json(folder / text_encoders.CONFIG)
    if published.get("model_type") == MODEL_TYPE:  # of which texts alone are trained
        published |= {"vision_config": None, "audio_config": None}
    check_family(folder)
    late = late_interaction.is_late_interaction(folder)
    if late and vectors == "text":
        raise UserError(
            f"config key model.vectors=text: init={folder} has a vector for each token; set it to "
            "token, or give an encoder of texts."
        )
    if late:
        recipe: sentence_pooling.SentenceRecipe | late_interaction.LateInteraction = (
            late_interaction.read_late_interaction(folder)
        )
    else:
        recipe = sentence_pooling.read_recipe(folder)
        decoder = published["model_type"] in text_encoders.DECODERS
        if decoder and not sentence_pooling.has_recipe(folder):
            recipe = dataclasses.replace(recipe, pooling="lasttoken")
        if vectors == "token":
            recipe = late_interaction.LateInteraction(
                prompts=recipe.prompts, max_tokens=recipe.max_tokens, lowercase=recipe.lowercase
            )
    if prompts is not None:
        recipe = dataclasses.replace(recipe, prompts=prompts)
    record = EncoderRecord(json.dumps(published), recipe, tuple(sorted((changes or {}).items())))
    width = record.dim
    if dim is None or (dim == width and recipe.dense):
        return record
    if recipe.dense or not isinstance(recipe, late_interaction.LateInteraction):
        raise UserError(
            f"config key model.dim={dim}: the vectors of init={folder} have {width} values; leave "
            "it out, or set model.vectors to token for an encoder without a linear layer."
        )
    layer = sentence_pooling.DenseLayer(Path(), width, dim, False, _IDENTITY)
    return dataclasses.replace(record, recipe=dataclasses.replace(recipe, dense=(layer,)))


def is_decoder(config: Any) -> bool:
    """Whether an encoder is a decoder, which alone takes LoRA's additions."""
    return isinstance(config, LlamaConfig)


def _dense(layer: sentence_pooling.DenseLayer, rngs: nnx.Rngs) -> Dense:
    def linear(bias: bool) -> Linear:
        return Linear(layer.inputs, layer.outputs, ("embed", None), rngs=rngs, use_bias=bias)

    mapped = layer.residual and layer.inputs != layer.outputs
    return Dense(linear(layer.bias), layer.activation, linear(False) if mapped else layer.residual)


def _write_dense(
    folder: Path, layer: sentence_pooling.DenseLayer, dense: Dense, vectors: Vectors
) -> None:
    settings = {
        "in_features": layer.inputs,
        "out_features": layer.outputs,
        "bias": layer.bias,
        "activation_function": layer.activation,
        **_layer_over(vectors),
        **({"use_residual": True} if layer.residual else {}),
    }
    tensors = {"linear.weight": dense.linear.kernel[...].T}
    if dense.linear.bias is not None:
        tensors["linear.bias"] = dense.linear.bias[...]
    if isinstance(dense.residual, Linear):
        tensors["residual.weight"] = dense.residual.kernel[...].T
    _write(folder / "config.json", settings)
    write_sharded(folder, ArraySource({key: np.asarray(x) for key, x in tensors.items()}))


def _layer_over(vectors: Vectors) -> dict[str, str]:
    """What a layer reads and writes, by sentence-transformers' names."""
    name = "token_embeddings" if vectors == "token" else "sentence_embedding"
    return {"module_input_name": name, "module_output_name": name}


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content)
