"""Encoders and rerankers that see pictures and are trained further.

As `trained.EncoderRecord` they are made of a published folder and written as one. How pictures are
prepared, and the chat template, are files of the folder (RUN_FILES), which a run keeps, too.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig, of_towers
from mmqa_jax.models.encoders.heads import QwenVLYesNo
from mmqa_jax.models.encoders.page_retrievers import (
    RETRIEVERS,
    PageModel,
    PageRetriever,
    open_page_retriever,
    page_retriever_name,
)
from mmqa_jax.models.encoders.sentence_pooling import Prompts, has_recipe, read_recipe
from mmqa_jax.models.encoders.text_encoders import CONFIG, FAMILY, for_encoding, reader_key_map
from mmqa_jax.models.encoders.trained import Vectors
from mmqa_jax.models.llama.keys import together
from mmqa_jax.models.llama.lora import ADDED, LoraConfig, add_lora, hold_base, merge_lora
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.qwen_vl.keys import open_qwen_vl, processor_to_hf, read_qwen_vl_config
from mmqa_jax.models.qwen_vl.network import PatchBatch, QwenVLConfig
from mmqa_jax.models.qwen_vl.omni import MODEL_TYPES as OMNI
from mmqa_jax.models.two_towers import keys
from mmqa_jax.models.two_towers.config import CLIPConfig, SiglipConfig
from mmqa_jax.models.two_towers.network import CLIP, Siglip
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource, write_sharded
from mmqa_jax.weights.keymap import KeyMap, untied_source
from mmqa_jax.weights.published import load_checkpoint

_CHAT = "chat"  # in place of a class of page retrievers: Qwen3-VL-Embedding
_EMBEDDING = PageRetriever("Qwen3-VL-Embedding", "", "", pooling="lasttoken", projection="")
# What a model that writes becomes, by its model_type: Col... or Bi....
_BECOMES = {
    **{"qwen2_vl": "Qwen2", "qwen2_5_vl": "Qwen2_5", "qwen3_vl": "Qwen3", "qwen3_5": "Qwen3_5"},
    **{"paligemma": "Pali", "idefics3": "Idefics3", "gemma3": "Gemma3"},
    "modernvbert": "ModernVBert",
}
_NOT_TRAINED = ("torch_dtype", "quantization_config")  # of config.json
_GATE = "picture_gate"  # of the fusion `mean` alone
_PAGE_DIM = 128  # values of a token's vector, as of ColPali
_TOWER = r"^(?!(vision|projector|newline)(/|$))"  # of a reader of prompts: all but its tower


@dataclasses.dataclass(frozen=True)
class PageRecord:
    """A reader of prompts with pictures as training makes it."""

    published: str  # transformers' config.json, as text
    retriever: str  # a name of `page_retrievers.RETRIEVERS`; `chat`: Qwen3-VL-Embedding
    folder: Path  # of the files that say how pictures are prepared, and of the chat template
    dim_of_layer: int | None  # the values behind the linear layer; None: there is none
    # Our key map's names of tensors, and the folder's.
    names: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    # Instructions of `chat`, "": the original's.
    prompts: Prompts = dataclasses.field(default_factory=Prompts)
    max_pixels: int = 0  # what larger pictures are resized to; 0: as the folder says. Of a Qwen-VL.
    # Fields of our config that say how the model is computed.
    changes: tuple[tuple[str, Any], ...] = ()

    kind: ClassVar[str] = "pages"

    @property
    def entry(self) -> PageRetriever:
        """How the class makes vectors."""
        return _EMBEDDING if self.is_chat else RETRIEVERS[self.retriever]

    @property
    def is_chat(self) -> bool:
        """Whether prompts are conversations of the folder's chat template."""
        return self.retriever == _CHAT

    @property
    def vectors(self) -> Vectors:
        """Whether a prompt or each of its tokens has a vector."""
        return "text" if self.entry.pooling else "token"

    @functools.cached_property
    def model(self) -> PageModel:
        """The model of the published files."""
        published = json.loads(self.published)
        return PageModel(self.entry, published, self.folder, self.dim_of_layer)

    @functools.cached_property
    def config(self) -> Any:
        """The model's sizes."""
        config = self.model.config()
        if self.is_chat:
            config = for_encoding(config, platform())
        config = with_most_pixels(config, self.max_pixels)
        return replace_fields(config, **dict(self.changes))

    @property
    def text(self) -> Any:
        """The sizes of what reads the prompts."""
        config = self.config
        return config.text if isinstance(config, ModernVBertConfig) else config.llama

    @property
    def dim(self) -> int:
        """The values of a vector."""
        return self.dim_of_layer or self.text.hidden

    def build(self, *, rngs: nnx.Rngs, lora: LoraConfig | None = None) -> Any:
        """A freshly initialized model."""
        model: Any = self.model.build(self.config, rngs=rngs)
        if lora is not None:
            add_lora(model.llama, lora, rngs=rngs)
        return model

    def trained(self, lora: LoraConfig | None, tower: bool) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all."""
        if lora is not None:
            return f"{ADDED}|^projection/" + ("|^vision/" if tower else "")
        return None if tower else _TOWER

    def encode(self, model: Any, inputs: Mapping[str, jax.Array]) -> jax.Array:
        """Vectors of prompts, whose arrays are those of `retrieval.vlm_encoder` by name."""
        prompts = prompts_of(inputs)
        return model(*prompts) if self.vectors == "token" else model.encode_prompts(*prompts)

    def load(
        self, model: Any, folder: Path, mesh: Mesh | None = None, lora: LoraConfig | None = None
    ) -> None:
        """Puts a published folder's weights into a model of shapes, in place.

        A linear layer that the folder lacks stays shapes.
        """
        of_page, checkpoint = open_page_retriever(folder, self.entry, new=self.dim_of_layer)
        layer = self.entry.projection
        is_new = bool(layer) and f"{layer}.weight" not in checkpoint.source.specs()
        if is_new:
            without = dataclasses.replace(self.entry, pooling="lasttoken", projection="")
            of_page, checkpoint = open_page_retriever(folder, without)
        base: Any = load_checkpoint(of_page.build, checkpoint, self.config, mesh)
        if lora is not None:
            hold_base(base.llama, lora)
        nnx.update(model, nnx.state(base, nnx.Param))

    def finish(self, model: Any) -> Any:
        """The trained model with LoRA's additions in its kernels."""
        model.llama = merge_lora(model.llama)
        return model

    def write(self, folder: Path, model: Any) -> None:
        """Writes a trained model as its folder was published, but for its tokenizer."""
        write_sharded(folder, self.tensors(nnx.state(model, nnx.Param)))
        published = json.loads(self.published)
        if not self.is_chat and "architectures" in published:
            published["architectures"] = [self.retriever]
        write_json(folder / CONFIG, {**published, "dtype": "float32"})
        if self.max_pixels:
            _write_sizes(folder, self.config)

    def tensors(self, state: nnx.State) -> TensorSource:
        """The parameters by the published names."""
        made = _as_named(state, self.model.key_map(self.config), self.names)
        fused = self.model.reader.fused(self.config)
        return together(made, fused) if fused else made

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON, which `from_json` reads back."""
        value = dataclasses.asdict(self) | {"kind": self.kind}
        del value["folder"], value["changes"]
        return value | {"published": json.loads(self.published), "names": dict(self.names)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], folder: Path) -> Self:
        """The record of a run's model.json; `folder` is the run's."""
        fields = {key: x for key, x in value.items() if key != "kind"}
        fields |= {"published": json.dumps(value["published"]), "folder": folder}
        return cls(**{**fields, "prompts": Prompts(**value["prompts"])})


@dataclasses.dataclass(frozen=True)
class TowersRecord:
    """A CLIP or SigLIP as training makes it: texts and pictures each by a tower."""

    published: str  # transformers' config.json, as text
    folder: Path  # of the files that say how pictures are prepared, and of the chat template
    changes: tuple[tuple[str, Any], ...] = ()  # fields of our configs that say how it is computed

    kind: ClassVar[str] = "towers"
    vectors: ClassVar[Vectors] = "text"
    max_pixels: ClassVar[int] = 0

    @property
    def is_clip(self) -> bool:
        """Whether it is a CLIP, and no SigLIP."""
        return json.loads(self.published)["model_type"] == "clip"

    @functools.cached_property
    def towers(self) -> CLIPConfig | SiglipConfig:
        """The sizes of both towers."""
        read: Any = keys.clip_config if self.is_clip else keys.siglip_config
        config = read(json.loads(self.published), str(self.folder / CONFIG))
        return replace_fields(config, **dict(self.changes))

    @property
    def config(self) -> DualEncoderConfig:
        """The towers as one model, of which a source with a picture has the picture's vector."""
        return of_towers(self.towers, fusion="image")

    @property
    def dim(self) -> int:
        """The values of a vector."""
        return self.config.embed_dim

    def build(self, *, rngs: nnx.Rngs, lora: LoraConfig | None = None) -> DualEncoder:
        """A freshly initialized model."""
        return DualEncoder(self.config, rngs=rngs)

    def trained(self, lora: LoraConfig | None, tower: bool) -> str:
        """Regular expression over the names of the parameters that are trained: scores have a
        factor of their own, and neither the learned one nor a gate."""
        return "^(text|vision)/" if tower else "^text/"

    def encode(self, model: DualEncoder, inputs: Mapping[str, jax.Array]) -> jax.Array:
        """Vectors of texts, or of sources with pictures."""
        texts = inputs["ids"], inputs["mask"]
        if "pixels" in inputs:
            return model.encode_source(*texts, inputs["pixels"], inputs["has_picture"])
        return model.encode_text(*texts)

    def load(self, model: Any, folder: Path, mesh: Mesh | None = None, lora: Any = None) -> None:
        """Puts a published folder's weights into a model of shapes, in place."""
        checkpoint = (keys.open_clip if self.is_clip else keys.open_siglip)(folder)
        kind = CLIP if self.is_clip else Siglip
        nnx.update(model, nnx.state(load_checkpoint(kind, checkpoint, self.towers, mesh)))
        model.picture_gate.set_value(jax.numpy.ones(()))  # of another fusion

    def write(self, folder: Path, model: Any) -> None:
        """Writes a trained model as transformers has it, but for its tokenizer."""
        write_sharded(folder, self.tensors(nnx.state(model, nnx.Param)))
        write_json(folder / CONFIG, {**json.loads(self.published), "dtype": "float32"})

    def tensors(self, state: nnx.State) -> TensorSource:
        """The parameters by the published names."""
        leaves = [(path, leaf) for path, leaf in nnx.to_flat_state(state) if path != (_GATE,)]
        return keys.publish_clip(self.towers, nnx.from_flat_state(leaves)).source

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON, which `from_json` reads back."""
        return {"kind": self.kind, "published": json.loads(self.published)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], folder: Path) -> Self:
        """The record of a run's model.json; `folder` is the run's."""
        return cls(json.dumps(value["published"]), folder)


PicturedRecord = PageRecord | TowersRecord


def read_pictured_record(
    folder: Path,
    vectors: Vectors | None,
    *,
    dim: int | None = None,
    prompts: Prompts | None = None,
    max_pixels: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> PicturedRecord | None:
    """The record of a published folder; None: it holds no model that sees pictures.

    Args:
      vectors, dim, prompts, changes: see trained.read_encoder_record. A vision-language model that
        writes texts becomes a retriever of colpali_engine's class for it.
      max_pixels: see PageRecord.
    """
    published = read_json(folder / CONFIG)
    kind = published.get("model_type")
    text = _kept(published)
    changed = tuple(sorted((changes or {}).items()))
    if kind in ("clip", "siglip", keys.FLEXIBLE):
        record: PicturedRecord = TowersRecord(text, folder, changed)
        if kind == keys.FLEXIBLE or vectors == "token" or dim or prompts or max_pixels:
            raise UserError(
                f"config key init={folder}: holds a {kind}, of which one of fixed size is trained "
                "as it is; use such a one, and leave out model.vectors=token, model.dim, "
                "model.prompts and pictures.max_pixels."
            )
        return record
    name = page_retriever_name(folder)
    if name is None and kind not in _BECOMES:
        return None
    embeds = has_recipe(folder) or "embedding" in str(folder.resolve()).lower()
    if name is None and kind == FAMILY and embeds and vectors != "token":
        recipe = read_recipe(
            folder, processing=({"chat_template": {"add_generation_prompt": True}},)
        )
        name, prompts = _CHAT, prompts or recipe.prompts
    elif name is None:
        name = ("Bi" if vectors == "text" else "Col") + _BECOMES[kind]
    entry = _EMBEDDING if name == _CHAT else RETRIEVERS[name]
    if entry.task or entry.sees_both or kind in OMNI:
        raise UserError(
            f"config key init={folder}: a {entry.title} is read of parts of its files, and is not "
            "trained here; use a ColQwen of another kind."
        )
    if vectors not in (None, "text" if entry.pooling else "token"):
        raise UserError(
            f"config key model.vectors={vectors}: init={folder} is a {entry.title}; leave it "
            "empty, or name a model of the other kind."
        )
    if prompts is not None and name != _CHAT:
        raise UserError(
            f"config key model.prompts: the prompts of {entry.title} are its own; set it to ()."
        )
    model, checkpoint = open_page_retriever(folder, entry, new=dim or _PAGE_DIM)
    if dim and dim != model.dim:
        raise UserError(
            f"config key model.dim={dim}: the vectors of init={folder} have "
            f"{model.dim or 'as many values as its states'}; leave it out."
        )
    config = checkpoint.config
    if max_pixels and not isinstance(config, QwenVLConfig):
        raise UserError(
            f"config key pictures.max_pixels={max_pixels}: init={folder} has pictures of one size; "
            "set it to 0."
        )
    names = _names(checkpoint.source, model.key_map(config))
    return PageRecord(
        text, name, folder, model.dim, names, prompts or Prompts(), max_pixels, changed
    )


@dataclasses.dataclass(frozen=True)
class SeeingReranker:
    """A Qwen3-VL-Reranker as training makes it."""

    # published, folder, names, max_pixels, changes: see PageRecord.
    published: str
    folder: Path
    yes_no: tuple[int, int]  # the ids of the tokens yes and no
    names: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    max_pixels: int = 0
    changes: tuple[tuple[str, Any], ...] = ()

    kind: ClassVar[str] = "pages"

    @functools.cached_property
    def config(self) -> QwenVLConfig:
        """The model's sizes."""
        config = read_qwen_vl_config(self.folder, json.loads(self.published))
        config = with_most_pixels(for_encoding(config, platform()), self.max_pixels)
        return replace_fields(config, **dict(self.changes))

    def build(self, *, rngs: nnx.Rngs, lora: LoraConfig | None = None) -> QwenVLYesNo:
        """A freshly initialized model."""
        model = QwenVLYesNo(self.config, *self.yes_no, rngs=rngs)
        if lora is not None:
            add_lora(model.llama, lora, rngs=rngs)
        return model

    def logits(
        self, model: Any, batch: Mapping[str, jax.Array], dropout_key: jax.Array | None
    ) -> jax.Array:
        """The log-odds of yes of pairs [B]; there is no dropout."""
        inputs = {key.removeprefix("pair_"): array for key, array in batch.items()}
        return model(*prompts_of(inputs))

    def load(
        self, model: Any, folder: Path, mesh: Mesh | None = None, lora: LoraConfig | None = None
    ) -> None:
        """Puts a published folder's weights into a model of shapes, in place."""
        checkpoint = open_qwen_vl(folder)._replace(key_map=reader_key_map)
        base: Any = load_checkpoint(
            lambda config, rngs: QwenVLYesNo(config, *self.yes_no, rngs=rngs),
            checkpoint,
            self.config,
            mesh,
        )
        if lora is not None:
            hold_base(base.llama, lora)
        nnx.update(model, nnx.state(base, nnx.Param))

    def finish(self, model: Any) -> Any:
        """The trained model with LoRA's additions in its kernels."""
        model.llama = merge_lora(model.llama)
        return model

    def write(self, folder: Path, model: Any) -> None:
        """Writes a trained model as its folder was published, but for its tokenizer."""
        write_sharded(folder, self.tensors(nnx.state(model, nnx.Param)))
        write_json(folder / CONFIG, {**json.loads(self.published), "dtype": "float32"})
        if self.max_pixels:
            _write_sizes(folder, self.config)

    def tensors(self, state: nnx.State) -> TensorSource:
        """The parameters by the published names."""
        return _as_named(state, reader_key_map(self.config), self.names)

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON, which `from_json` reads back."""
        value = {"kind": self.kind, "yes_no": list(self.yes_no), "max_pixels": self.max_pixels}
        return value | {"published": json.loads(self.published), "names": dict(self.names)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], folder: Path) -> Self:
        """The record of a run's model.json; `folder` is the run's."""
        names, most = value["names"], value["max_pixels"]
        return cls(json.dumps(value["published"]), folder, tuple(value["yes_no"]), names, most)


def read_seeing_reranker(folder: Path, yes: int, no: int, *, max_pixels: int = 0) -> SeeingReranker:
    """The record of a published Qwen3-VL-Reranker, whose tokens yes and no these are."""
    checkpoint = open_qwen_vl(folder)
    names = _names(checkpoint.source, reader_key_map(checkpoint.config))
    return SeeingReranker(_kept(read_json(folder / CONFIG)), folder, (yes, no), names, max_pixels)


def prompts_of(inputs: Mapping[str, jax.Array]) -> tuple[Any, ...]:
    """The arguments of a reader of prompts, by the names of the arrays of a batch."""
    prompts: tuple[Any, ...] = inputs["ids"], inputs["mask"]
    if "squares" in inputs:
        return (*prompts, inputs["squares"])
    if "patches" not in inputs:
        return prompts
    arrays = (inputs[field.name] for field in dataclasses.fields(PatchBatch))
    return (*prompts, PatchBatch(*arrays), inputs["features"], inputs["positions"])


def with_most_pixels(config: Any, most: int) -> Any:
    """The config whose larger pictures are resized to so many pixels; 0: as it is."""
    if not most:
        return config
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, max_pixels=most))


def _write_sizes(folder: Path, config: QwenVLConfig) -> None:
    """Writes the sizes of pictures to the files of a folder that say how they are prepared; the
    keys of old versions of transformers would come first."""
    sizes = {**processor_to_hf(config.vision), "min_pixels": None, "max_pixels": None}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        known = read_json(file) if file.is_file() else {}
        if "image_processor" in known:
            write_json(file, {**known, "image_processor": known["image_processor"] | sizes})
        elif name == "preprocessor_config.json":
            write_json(file, {**known, **sizes})


def _kept(published: Mapping[str, Any]) -> str:
    return json.dumps({key: x for key, x in published.items() if key not in _NOT_TRAINED})


def _names(source: TensorSource, key_map: KeyMap) -> dict[str, str]:
    """A key map's names of a source's tensors -> the source's own."""
    return {key_map.renamed(key): key for key in source.specs()}


def _as_named(state: nnx.State, key_map: KeyMap, names: Mapping[str, str]) -> TensorSource:
    """A model's tensors by `_names`."""
    source = untied_source(state, key_map)
    tensors = {
        names.get(key, key): (spec, functools.partial(source.read, key))
        for key, spec in source.specs().items()
    }
    return DerivedSource(source.name, tensors)
