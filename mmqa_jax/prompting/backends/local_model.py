"""Opens weights on this machine as a backend: identified by content, sharded over a mesh."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax import __version__
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.mesh import MESH_AXES, platform
from mmqa_jax.core.serving import AUTO, free_bytes
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.sizes import (
    DRAFT,
    SIZES,
    UNKNOWN,
    Demand,
    EngineSizes,
    choose_sizes,
    parameter_count,
    takes_all,
    tower_bytes,
)
from mmqa_jax.decoding.slot_runner import EngineConfig, check_draft, scans
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.quantize import FORMS, load_in_codes, published_form
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig
from mmqa_jax.models.two_towers.config import SiglipVisionConfig, VisionConfig
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.backends.t5 import T5Backend, open_t5_backend
from mmqa_jax.prompting.backends.thinking import Thinking
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.bundled import LANGUAGE_MODELS
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.folder import load_additions, load_converted, read_record, weights_hash
from mmqa_jax.weights.hub import find_model, is_hub_name
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder
from mmqa_jax.weights.registry import architecture, model_of, nouns


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """How a model is loaded. `dtype` is that of parameters and arithmetic: float32 or bfloat16, or
    "auto": float32 on a CPU, bfloat16 elsewhere. `mesh` is the size of each mesh axis; all 1 is
    one device, "auto" is chosen (see decoding/sizes.py), as is what is left out."""

    dtype: str = "auto"
    mesh: dict[str, int | Literal["auto"]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise UserError(
                f"config key model.dtype={self.dtype!r}: expected auto, float32 or bfloat16."
            )


def open_backend(
    model: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | None = None,
    config: ModelConfig | None = None,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    adapters: Mapping[str, str | os.PathLike] | None = None,
    flag: str = "--model",
    thinking: Thinking | None = None,
) -> EngineBackend | T5Backend:
    """Opens a LLaMA, LLaVA, OneVision, Qwen-VL or T5 as a backend; its weights are loaded on first
    use.

    Args:
      model: a name of LANGUAGE_MODELS, a folder of `mmqa convert`, the workdir of a language-model
        run (or its folder best), a published checkpoint in any layout that `mmqa convert
        --model=llama` (llava, onevision, qwen_vl, t5) reads, or a name on the hub (weights.hub).
      tokenizer: folder, tokenizer.json or GGUF file with the tokenizer; None is the model's.
      config: see ModelConfig.
      engine: an EngineConfig, or values of one of which some may be "auto", as are those left out;
        what is chosen is printed when the engine is made (see decoding/sizes.py).
      adapters: folders of adapters over this base (`weights.folder.load_additions`), by the names
        that requests to the engine give.
      flag: that named the model, for messages.
      thinking: what the chat template is told; None: nothing.
    """
    config = config or ModelConfig()
    path = _find(model, flag)
    kind = model_of(path) or "llama"
    family = architecture(kind, flag, trained=True)
    if not family.writes:
        raise UserError(f"{flag}={path}: contains a {kind}; give a {nouns('writes')}.")
    shape = _config_of(kind, path)
    if isinstance(engine, EngineConfig):
        engine = dataclasses.asdict(engine)
    engine = {**dict.fromkeys(SIZES, AUTO), **(engine or {})}
    draft = _open_draft(engine.get(DRAFT))
    if adapters and not family.lora:
        raise UserError(
            f"--adapter: {path} holds a {kind}, and a {nouns('lora')} takes adapters; leave it out."
        )
    if family.writes == "encoder-decoder":
        text = open_text_tokenizer(path if tokenizer is None else tokenizer)
        dtype = _dtype(config)
        return open_t5_backend(
            path,
            shape,
            text,
            dtype=dtype,
            mesh=config.mesh,
            devices=devices_for(config.mesh),
            engine=engine,
            weights_hash=weights_hash(path),
            load=lambda mesh: _load(kind, path, dtype, mesh, False),
            flag=flag,
        )
    pictures = shape if family.sees else None
    llama = shape.llama if family.sees else shape
    if adapters and llama.kinds:
        raise UserError(
            f"--adapter: {path} has layers of several kinds, which serve no adapters beside each "
            "other; convert an adapter with its base by `mmqa convert`, and name that as --model."
        )
    dtype = _dtype(config)
    load = _load
    if engine.get("weights") in ("published", *FORMS):
        form = "" if is_weights_folder(path) else published_form(kind, path)
        if engine["weights"] not in ("published", form) or not form:
            raise UserError(
                f"engine.weights={engine['weights']}: {path} holds no matrices in codes of 4 or 8 "
                f"bits that can be multiplied so{form and f', but {form}'}; leave it out, or take "
                "a checkpoint as it was published in FP8, MXFP4, AWQ, GPTQ or compressed-tensors."
            )
        engine["weights"], load = form, _load_in_codes
    for folder in map(Path, (adapters or {}).values()):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name that of a LoRA run, or of PEFT.")
    digest = weights_hash(path) if adapters else ""  # which reads all weights
    additions = {
        name: load_additions(Path(folder), path, digest, kind, shape)
        for name, folder in (adapters or {}).items()
    }
    values = sum(
        x.size for addition in additions.values() for ab in addition.matrices.values() for x in ab
    )
    sizing = Sizing(
        dataclasses.replace(llama, dtype=dtype),
        engine,
        config.mesh,
        None if pictures is None else pictures.vision,
        f"{flag}={model}",
        beside=values * (4 if dtype == "float32" else 2),
        draft=draft and dataclasses.replace(draft.config, dtype=dtype),
    )
    sizes = sizing.choose()  # sizes that do not fit are refused before any weights are read
    text = open_text_tokenizer(path if tokenizer is None else tokenizer, thinking)
    if draft is not None:
        check_draft(draft.config, sizes.engine, sees=pictures is not None)
        if open_text_tokenizer(draft.path).published.get_vocab() != text.published.get_vocab():
            raise UserError(
                f"engine.draft={draft.path}: its vocabulary is another than that of {path}; name a "
                "smaller model of the same family, or leave it out."
            )
    # Engine sizes change answers at most in their last bits; rounding changes more.
    numerics = [dtype, sizing.setting("cache_dtype"), sizing.setting("weights"), platform()]
    parts = [kind, digest or weights_hash(path), text.fingerprint, [*numerics, __version__]]

    def make_engine(demand: Demand) -> Engine:
        sizes = sizing.choose(demand)
        print(f"{path.name}: {sizes}", file=sys.stderr)
        if sizes.reason:
            print(f"{path.name}: {sizes.reason}", file=sys.stderr)
        mesh = sizes.mesh() if len(sizes.devices) > 1 else None
        apart = bool(family.layers_apart) and not scans(sizes.engine, mesh)
        model = load(kind, path, dtype, mesh, apart)
        options = {"end_ids": text.end_ids, "config": sizes.engine, "mesh": mesh}
        if draft is not None:
            apart = bool(architecture(draft.kind).layers_apart) and apart
            options["draft"] = _load(draft.kind, draft.path, dtype, mesh, apart)
        return Engine(model, text, **options, adapters=additions)

    def resize(engine: Engine, demand: Demand) -> None:
        on = {} if engine.mesh is None else dict(engine.mesh.shape)
        sizes = sizing.choose(demand, dict.fromkeys(MESH_AXES, 1) | on)  # weights stay
        if sizes.engine != engine.config:
            print(f"{path.name}: {sizes}", file=sys.stderr)
            engine.resize(sizes.engine)

    return EngineBackend(
        make_engine,
        text,
        length=sizing.setting("length")
        if sizing.setting("length") != AUTO
        else llama.served_positions,
        fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        pictures=pictures,
        resize=resize,
        hides=not llama.recurrent and llama.picture_sight == "causal",
        parameters=parameter_count(llama),
    )


class _Draft(NamedTuple):
    """A model that proposes tokens."""

    kind: str
    path: Path
    config: LlamaConfig


def _open_draft(model: str | None) -> _Draft | None:
    """The model that `engine.draft` names, its weights not yet read."""
    if not model:
        return None
    path = _find(model, "engine.draft")
    kind = model_of(path) or "llama"
    family = architecture(kind, "engine.draft", trained=True)
    if family.writes != "decoder" or family.sees:
        raise UserError(
            f"engine.draft={path}: contains a {kind}; give a LLaMA or a relative of it."
        )
    return _Draft(kind, path, _config_of(kind, path))


def _dtype(config: ModelConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if platform() == "cpu" else "bfloat16"


class Sizing:
    """The devices and sizes of one model's engine; the memory is what was free at first.

    Args:
      llama: with the dtype that it is loaded in.
      settings, mesh: see `decoding.sizes.choose_sizes`.
      vision: of a model with a tower.
      named: what named the model, for messages.
      beside: bytes of adapters, which each device holds.
      draft: of a model that proposes tokens, as `llama`.
    """

    def __init__(
        self,
        llama: LlamaConfig,
        settings: Mapping[str, Any],
        mesh: Mapping[str, Any],
        vision: VisionConfig | SiglipVisionConfig | QwenVisionConfig | None,
        named: str,
        *,
        beside: float = 0,
        draft: LlamaConfig | None = None,
    ):
        self._named, self._draft = named, draft
        self._llama, self._settings, self._mesh = llama, settings, mesh
        self._beside = tower_bytes(llama, vision) + beside
        self._free: float | None = None

    def setting(self, name: str) -> Any:
        """A value of the settings, or EngineConfig's own."""
        return self._settings.get(name, getattr(EngineConfig, name))

    def choose(
        self, demand: Demand | None = None, mesh: Mapping[str, int] | None = None
    ) -> EngineSizes:
        """Chooses sizes for a demand, None only checks what is given; `mesh` is one that stays."""
        devices = devices_for(self._mesh)
        free = self._free
        if free is None:
            free = _least_free(devices, agreed=demand is not None)
        if demand is not None:
            self._free = free
        sizes = choose_sizes(
            self._llama,
            self._settings,
            self._mesh if mesh is None else mesh,
            devices,
            demand or UNKNOWN,
            free=free,
            beside=self._beside,
            draft=self._draft,
        )
        if len(sizes.devices) > 1:
            sizes.mesh()  # sizes that the devices do not have
        if sizes.lacking:
            raise UserError(f"{self._named}: {sizes.lacking}")
        return sizes


def _least_free(devices: Sequence[jax.Device], *, agreed: bool) -> float:
    """Bytes of the devices of this process; `agreed`: of all whose devices these are, which take
    the same sizes. Another process's device does not say."""
    me = jax.process_index()
    free = min(free_bytes(device) for device in devices if device.process_index == me)
    if agreed and any(device.process_index != me for device in devices):
        free = min(distributed.gather("free bytes", free))
    return free


def devices_for(mesh: Mapping[str, Any]) -> Sequence[jax.Device]:
    """The devices of this process, or those of the whole launch where the mesh names as many."""
    return jax.devices() if takes_all(mesh, jax.device_count()) else jax.local_devices()


def spans_processes(mesh: Mapping[str, Any]) -> bool:
    """Whether the devices of a mesh belong to several processes, which all compute the same."""
    return any(device.process_index != jax.process_index() for device in devices_for(mesh))


def _find(model: str | os.PathLike, flag: str) -> Path:
    """Where the weights are of what `open_backend` takes."""
    if str(model) in LANGUAGE_MODELS:
        return LANGUAGE_MODELS[str(model)]()
    if is_hub_name(model):
        return find_model(str(model), flag)
    if not Path(model).exists():
        raise UserError(
            f"{flag}={model}: no such file or folder, nor one of the names "
            f"{', '.join(LANGUAGE_MODELS)}, nor ORG/NAME of a model on the Hugging Face hub; check "
            "the path."
        )
    return Path(model)


def _config_of(kind: str, path: Path) -> Any:
    if is_weights_folder(path):
        return read_record(path).config
    return architecture(kind).open(path).config


def _load_in_codes(kind: str, path: Path, dtype: str, mesh: Mesh | None, apart: bool) -> nnx.Module:
    return load_in_codes(kind, path, mesh=mesh, param_dtype=dtype, layers_apart=apart, dtype=dtype)


def _load(kind: str, path: Path, dtype: str, mesh: Mesh | None, apart: bool) -> nnx.Module:
    if not is_weights_folder(path):
        return load_published(
            kind, path, mesh=mesh, param_dtype=dtype, layers_apart=apart, dtype=dtype
        )
    config = replace_fields(read_record(path).config, dtype=dtype)
    return load_converted(path, mesh=mesh, param_dtype=dtype, config=config)
