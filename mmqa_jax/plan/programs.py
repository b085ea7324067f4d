"""The programs that the verbs run with a config, ready to be compiled for any devices.

They are the verbs' own: the training step of training.state, the jitted functions of embedder,
reranker, reader and engine. Here they get shapes in place of arrays, which the tasks know (tasks/),
so that neither data nor weights are needed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core import mesh as meshes
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import traced_flops
from mmqa_jax.core.mesh import batch_sharding, on_shardings, state_shardings
from mmqa_jax.core.serving import AUTO, Serving, free_bytes, planned_batch_size, serving_mesh
from mmqa_jax.core.typed import nearest
from mmqa_jax.data.pictures.resize import bucket, detector_size
from mmqa_jax.decoding import sizes as sizes_of_engine
from mmqa_jax.decoding.sampling import SamplingParameters
from mmqa_jax.decoding.slot_runner import page_of, pages_of_shard, slot_shards
from mmqa_jax.decoding.t5_engine import draw, room
from mmqa_jax.evaluation.fluency import longest_text, make_likelihoods, tokens_per_batch
from mmqa_jax.inference.region_detector import KINDS, DetectorKind, detector_cost, make_find
from mmqa_jax.models.bart.network import Bart
from mmqa_jax.models.bert import network as bert
from mmqa_jax.models.bert.mpnet import MPNet
from mmqa_jax.models.bert.rotary import GTE, JINA_V3, NOMIC, RotaryBert, rotary_config
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN, Pictures
from mmqa_jax.models.encoders.heads import QwenVLEncoder, SentenceEncoder, TextDecoder
from mmqa_jax.models.encoders.pictured_gemma import GemmaEncoder, embedding_gemma_2
from mmqa_jax.models.encoders.text_encoders import for_encoding, for_reading, for_reading_prompts
from mmqa_jax.models.llama.config import RELATIVES, LlamaConfig
from mmqa_jax.models.llama.experts import reached
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.modernbert import network
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.models.qwen_vl.presets import qwen3_vl_2b, qwen3_vl_8b
from mmqa_jax.models.t5.network import T5, Texts
from mmqa_jax.plan.program import Planned, Program, shard_bytes, tree_bytes
from mmqa_jax.prompting.backends import Decoding
from mmqa_jax.prompting.backends.t5 import engine_sizes as t5_engine_sizes
from mmqa_jax.prompting.backends.t5 import mesh_of
from mmqa_jax.retrieval import vlm_encoder
from mmqa_jax.retrieval.embedder import (
    FULL_LENGTH,
    make_encode_text,
    rows_of_length,
)
from mmqa_jax.retrieval.text_encoder import encoder_cost, length_buckets
from mmqa_jax.tasks.base_llm import SCRATCH, base_path, kind_of_base
from mmqa_jax.tasks.registry import check_config, known_tasks, read_task
from mmqa_jax.tasks.solved_questions import SolvedQuestions
from mmqa_jax.tasks.task import Task
from mmqa_jax.training.optimizer import make_optimizer
from mmqa_jax.training.state import TrainState, abstract_state, make_step, split_model
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.registry import architecture, architectures

if TYPE_CHECKING:
    from mmqa_jax.retrieval.embedder import TextEncoderConfig


TEXTS = "texts"  # the program


def _xlm_roberta(
    base: Callable[..., bert.BertConfig], positions: int = 512
) -> Callable[[], bert.BertConfig]:
    """XLM-R's sizes: BERT's with a larger vocabulary."""
    sizes = {"vocab_size": 250002, "types": 1, "eps": 1e-5, "positions": positions}
    return functools.partial(base, **sizes)


def _rotary(family: RotaryBert) -> Callable[[], bert.BertConfig]:
    """The sizes that a family's config.json need not state."""
    return functools.partial(rotary_config, family, {}, "config.json")


_SMALL = functools.partial(bert.minilm_l6, layers=12)
_QWEN3 = {"positions": 32768, "vocab_size": 151665}
_QWEN3_8B = {**_QWEN3, "tied": True}  # without a head, as all of them
# By name: sizes of its config.json.
ENCODERS: Mapping[str, Callable[[], TextEncoderConfig]] = {
    "minilm_l6": bert.minilm_l6,
    "bge_small": _SMALL,
    "e5_small": _SMALL,
    **dict.fromkeys(("bge_base", "e5_base", "gte_base", "arctic_m"), bert.bert_base_uncased),
    **dict.fromkeys(("bge_large", "e5_large", "gte_large", "arctic_l"), bert.bert_large_uncased),
    "multilingual_e5_base": _xlm_roberta(bert.bert_base_uncased),
    "multilingual_e5_large": _xlm_roberta(bert.bert_large_uncased),
    "bge_m3": _xlm_roberta(bert.bert_large_uncased, positions=8192),
    "mpnet_base": functools.partial(bert.bert_base_uncased, vocab_size=30527, types=1, eps=1e-5),
    **dict.fromkeys(("modernbert_base", "gte_modernbert_base"), network.modernbert_base),
    "modernbert_large": network.modernbert_large,
    "nomic_embed": _rotary(NOMIC),
    **dict.fromkeys(("gte_multilingual_base", "arctic_m_v2"), _rotary(GTE)),
    "jina_v3": _rotary(JINA_V3),
    "qwen3_embedding_06b": functools.partial(
        RELATIVES["qwen3_06b"], positions=32768, vocab_size=151669
    ),
    "qwen3_embedding_4b": functools.partial(RELATIVES["qwen3_4b"], **_QWEN3),
    "qwen3_embedding_8b": functools.partial(RELATIVES["qwen3_8b"], **_QWEN3_8B),
}


def encoder_program(name: str, devices: Sequence[jax.Device]) -> Program:
    """A full batch of texts of 512 tokens, as `mmqa embed` makes it for one of ENCODERS."""
    config, mesh = ENCODERS[name](), serving_mesh(None, devices)
    if isinstance(config, LlamaConfig):
        config = for_reading(config, devices[0].platform)
    kind: type[nnx.Module] = MPNet if name.startswith("mpnet") else bert.Bert
    if isinstance(config, network.ModernBertConfig):
        kind = network.ModernBert
    elif isinstance(config, LlamaConfig):
        kind = TextDecoder

    def build() -> nnx.Module:
        return SentenceEncoder(kind(config, rngs=nnx.Rngs()))

    graphdef, state = nnx.split(nnx.eval_shape(build))
    if isinstance(config, LlamaConfig):  # whose parameters are of the type that it computes in
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, config.dtype), state)
    state = meshes.on_shardings(state, meshes.state_shardings(state, mesh))
    held, length = shard_bytes(state), min(FULL_LENGTH, config.positions)
    examples = planned_batch_size(AUTO, encoder_cost(config, length, TEXTS), mesh, held)
    rows = meshes.batch_sharding(mesh)
    batch = tuple(
        jax.ShapeDtypeStruct((examples, length), kind, sharding=rows)
        for kind in (np.int32, np.bool_)
    )
    return Program.of(
        TEXTS,
        make_encode_text(graphdef),
        (state, *batch),
        mesh,
        parameters=held,
        examples=examples,
        unit=TEXTS,
        input_bytes=tree_bytes(batch),
    )


# The programs that embed texts, and pages that are pictures, by one model.

PAGES = "pages"  # the program of the largest pictures; that of texts is TEXTS
_AROUND = 60  # tokens around a picture: an instruction and a title
# By name: sizes of its config.json.
VLM_ENCODERS: Mapping[str, Callable[[], QwenVLConfig | LlavaConfig]] = {
    "qwen3_vl_embedding_2b": qwen3_vl_2b,
    "qwen3_vl_embedding_8b": qwen3_vl_8b,
    "embedding_gemma_2": embedding_gemma_2,
}


def vlm_encoder_program(name: str, model: str, devices: Sequence[jax.Device]) -> Program:
    """A full batch as `mmqa embed` makes it on devices of one process.

    Args:
      name: TEXTS, of 512 tokens; or PAGES, pictures of as many tokens as a picture may have.
      model: of VLM_ENCODERS.
    """
    sizes = VLM_ENCODERS[model]()
    kind: type[nnx.Module] = GemmaEncoder
    if isinstance(sizes, QwenVLConfig):
        kind, config = QwenVLEncoder, for_encoding(sizes, devices[0].platform)
    else:
        config = for_reading_prompts(sizes, devices[0].platform)
    mesh = serving_mesh(None, devices)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs())))
    # Parameters are of the type that they are computed in.
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, config.llama.dtype), state)
    state = meshes.on_shardings(state, meshes.state_shardings(state, mesh))
    held, lengths = shard_bytes(state), length_buckets(vlm_encoder.LONGEST, config.llama.positions)
    cost = encoder_cost(config.llama, lengths[-1], TEXTS)
    size = planned_batch_size(AUTO, cost, mesh, held)
    prompt = vlm_encoder.PicturePrompt([0] * min(FULL_LENGTH, lengths[-1]))
    if name == PAGES:
        prompt = vlm_encoder.PicturePrompt(
            [config.image_token, *[0] * _AROUND], (_largest(config),)
        )
    alone = Serving(meshes.DEFAULT_DEVICE, 1, name)
    ((_, prompts),) = vlm_encoder.prompt_batches([prompt], config, alone, lengths, pad_token=0)
    bucket = 0 if prompts.pictures is None else prompts.pictures.order.shape[-1]
    full = Serving(meshes.RowPlacement(mesh), size, name)
    count = rows_of_length(full, vlm_encoder.attended(config, bucket, prompts.input_ids.shape[1]))
    rows = meshes.batch_sharding(mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=rows), prompts
    )
    return Program.of(
        name,
        vlm_encoder.make_encode_prompts(graphdef),
        (state, batch),
        mesh,
        parameters=held,
        examples=count,
        unit=name,
        input_bytes=tree_bytes(batch),
    )


def _largest(config: QwenVLConfig | LlavaConfig) -> np.ndarray:
    """Pixels of as many units as a picture may have, nearly square."""
    is_qwen, unit = isinstance(config, QwenVLConfig), vlm_encoder.units_of(config).unit
    most = config.vision.most_units if is_qwen else config.budget
    rows = math.isqrt(most)
    return np.zeros((rows * unit, most // rows * unit, 3), np.uint8)


REGIONS = "regions"  # the program
DETECTORS: Mapping[str, DetectorKind] = {kind.name: kind for kind in KINDS}
PHOTO = (640, 480)  # width and height before resizing; most photos are 4 to 3


def detector_program(name: str, devices: Sequence[jax.Device]) -> Program:
    """A full batch of photos, 4 wide to 3 high, for one of DETECTORS on devices of one process."""
    kind, mesh = DETECTORS[name], serving_mesh(None, devices)
    dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    backbone = dataclasses.replace(kind.config.backbone, dtype=dtype)
    config = dataclasses.replace(kind.config, backbone=backbone)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: FasterRCNN(config, rngs=nnx.Rngs())))
    state = on_shardings(state, state_shardings(state, mesh))
    held = shard_bytes(state)
    count = planned_batch_size(AUTO, detector_cost(config, kind.pictures), mesh, held)
    width, height, _ = detector_size(*PHOTO, kind.pictures)
    rows = batch_sharding(mesh)

    def of_pictures(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=rows)

    pictures = Pictures(
        pixels=of_pictures(np.float32, *bucket((height, width)), 3),
        sizes=of_pictures(np.int32, 2),
        originals=of_pictures(np.int32, 2),
        scales=of_pictures(np.float32),
    )
    return Program.of(
        REGIONS,
        make_find(graphdef),
        (state, pictures),
        mesh,
        parameters=held,
        examples=count,
        unit="pictures",
        input_bytes=tree_bytes(pictures),
    )


def check_pictures(pictures: int, programs: Sequence[str]) -> None:
    """UserError for `--pictures` of no picture, or of other programs than a detector's."""
    if pictures < 1:
        raise UserError(f"--pictures={pictures}: at least 1 was expected; correct it.")
    if tuple(programs) != (REGIONS,):
        raise UserError(
            f"--pictures={pictures}: only a detector takes pictures; name one by "
            f"--model={', '.join(DETECTORS)}, or leave the flag out."
        )


def pictures_cost(planned: Planned, pictures: int, devices: int) -> dict[str, Any]:
    """Bounds the time that so many pictures take: `pictures`, `hours_bound` and `chip_hours_bound`.

    And `pictures_per_second_bound`, how many there are a second at most, on all devices.

    `devices`: of all hosts, each of which does its share.

    Returns:
      None for hours and rate where the program does not fit.
    """
    program, hours, chips, rate = planned.compiled.program, None, None, None
    if planned.bound is not None:
        calls = pictures / program.examples * program.devices / devices
        hours = calls * planned.bound.seconds / 3600
        chips = hours * devices / planned.chip.of_chip
        rate = pictures / (3600 * hours)
    return {
        "pictures": pictures,
        "hours_bound": hours,
        "chip_hours_bound": chips,
        "pictures_per_second_bound": rate,
    }


# The program of `mmqa evaluate webqa --bart`, as it makes it; see programs.py.

FLUENCY = "fluency"
# BARTs whose sizes are known without their weights.
BARTS = dict(architecture("bart").part("presets"))


def fluency_program(model: str, devices: Sequence[jax.Device]) -> Program:
    """BARTScore of a batch of the longest texts, which needs the most memory.

    Scores are computed on the first device of a process.

    `model`: a name of BARTS.
    """
    config, mesh = BARTS[model](), meshes.make_mesh({"data": 1}, devices[:1])
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Bart(config, rngs=nnx.Rngs())))
    state = meshes.on_shardings(state, meshes.state_shardings(state, mesh))
    length = longest_text(config)
    pairs = max(1, tokens_per_batch(devices[0].platform) // length)
    texts = jax.ShapeDtypeStruct((pairs, length), np.int32)
    lengths = jax.ShapeDtypeStruct((pairs,), np.int32)
    batch = (texts, lengths, texts, lengths)
    return Program.of(
        FLUENCY,
        make_likelihoods(graphdef),
        (state, *batch),
        mesh,
        parameters=shard_bytes(state),
        examples=pairs,
        unit="pairs",
        input_bytes=tree_bytes(batch),
    )


ENGINE = ("decode", "prefill")


def _presets(writes: str, sees: bool) -> dict[str, Callable[..., Any]]:
    """Models whose sizes are known without their weights."""
    entries = [x for x in architectures().values() if (x.writes, x.sees) == (writes, sees)]
    return {name: made for entry in entries for name, made in entry.part("presets").items()}


PRESETS = _presets("decoder", sees=False)  # language models
WITH_PICTURES = _presets("decoder", sees=True)  # those with a tower for pictures in front
T5S = _presets("encoder-decoder", sees=False)
_LANGUAGE_MODELS = PRESETS | WITH_PICTURES | T5S
TOWER = "tower"
UPDATE = "update"  # of a training whose moments lie on the host: `train` has the gradients alone
TRAINING = ("train", UPDATE)
GENERATE = "generate"
# Programs without a size of their own in a config.
FIXED = (TOWER, FLUENCY, GENERATE, TEXTS, PAGES, REGIONS)


_LISTED = "give a size that `mmqa models` lists, the nearest to the model that is meant."


def preset(name: str) -> LlamaConfig:
    """The sizes of a language model by name, also of one with a tower; UserError if unknown."""
    if name in WITH_PICTURES:
        return WITH_PICTURES[name]().llama
    if name not in PRESETS:
        raise UserError(
            f"--model={name}: sizes are not known; {nearest(name, _LANGUAGE_MODELS, _LISTED)}"
        )
    return PRESETS[name]()


def engine_of(model: str | None) -> ConfigDict:
    """The config of a model that is planned without one: an engine whose sizes are chosen; empty
    for what is no language model."""
    if model not in _LANGUAGE_MODELS:
        return ConfigDict()
    axes = dict.fromkeys(("data", "fsdp", "tensor"), AUTO)
    sizes = dict.fromkeys(sizes_of_engine.SIZES, AUTO)
    decoding = {"max_new_tokens": Decoding.max_new_tokens}
    model_section = {"dtype": AUTO, "mesh": axes}
    return ConfigDict({"model": model_section, "engine": sizes, "decoding": decoding})


def program_names(config: ConfigDict, model: str | None = None) -> tuple[str, ...]:
    """The programs of a config, of `mmqa train` (with what its model is used for) or `prompt`.

    Args:
      config: empty for a model of BARTS, ENCODERS, VLM_ENCODERS or DETECTORS, which are used
        without one.
      model: that an engine serves: one that takes pictures has its tower, too, a T5 one program.
    """
    alone = {
        **dict.fromkeys(BARTS, (FLUENCY,)),
        **dict.fromkeys(ENCODERS, (TEXTS,)),
        **dict.fromkeys(VLM_ENCODERS, (TEXTS, PAGES)),
        **dict.fromkeys(DETECTORS, (REGIONS,)),
    }
    if model in alone:
        if config:
            raise UserError(f"--model={model}: no config decides its program; leave --config out.")
        return alone[model]
    if not config:
        if model is not None:
            raise UserError(
                f"--model={model}: sizes are not known; "
                f"{nearest(model, alone | _LANGUAGE_MODELS, _LISTED)}"
            )
        raise UserError(
            "--config is missing: name a config of `mmqa train` or configs/prompt/default.py; "
            f"without one plan knows --model={', '.join(BARTS)} (fluency of `mmqa evaluate webqa`) "
            f"and encoders of texts: {', '.join(ENCODERS)}; of pictures, too: "
            f"{', '.join(VLM_ENCODERS)}; and detectors: {', '.join(DETECTORS)}."
        )
    if "task" in config:
        kind = known_tasks().get(config.task)
        used = () if kind is None or kind.program is None else (kind.program,)
        apart = (UPDATE,) if config.get("train", {}).get("offload") else ()
        return ("train", *apart, *used)
    if "engine" in config:
        if model in T5S:
            return (GENERATE,)
        return (*ENGINE, TOWER) if model in WITH_PICTURES else ENGINE
    raise UserError(
        "--config: has neither a `task` to train nor an `engine`; name a config of `mmqa train` or "
        "configs/prompt/default.py."
    )


def make_program(
    name: str, config: ConfigDict, devices: Sequence[jax.Device], model: str | None = None
) -> Program:
    """One of `program_names(config)`.

    Args:
      devices: possibly compile-only ones, all of which the program takes; see `on_one_host`.
      model: of a language model, a name of PRESETS in place of its weights.
    """
    if name in ENGINE:
        return _engine(config, devices, model)[name]
    if name == TOWER and model is not None:
        return _tower(config, devices, model)
    if name == GENERATE and model is not None:
        return generation_program(config, devices, model)
    if name == FLUENCY and model is not None:
        return fluency_program(model, devices)
    if model in VLM_ENCODERS:
        return vlm_encoder_program(name, model, devices)
    if name == REGIONS and model is not None:
        return detector_program(model, devices)
    if name == TEXTS and model is not None:
        return encoder_program(model, devices)
    if name in TRAINING:
        return _train(config, devices, model)[name]
    task = read_task(config)
    task.check_sizes(files=False)
    return program_in_use(name, task, devices)


def on_one_host(name: str, config: ConfigDict, devices: int) -> bool:
    """Whether each process runs a program on its own devices, and does its share of a job.

    Only training, and an engine whose mesh is given for all devices, span the hosts of a launch.
    """
    if name in (*ENGINE, TOWER, GENERATE):
        return not sizes_of_engine.takes_all(config.model.mesh.to_dict(), devices)
    return name not in TRAINING


def settled(
    name: str, config: ConfigDict, devices: Sequence[jax.Device], model: str | None = None
) -> ConfigDict:
    """The config with the numbers that `auto` stands for in a program's mesh and sizes."""
    if name in (*TRAINING, *FIXED):
        return config
    if name not in ENGINE and config.inference.batch_size != AUTO:
        return config
    copy = ConfigDict(config.to_dict())
    if name in ENGINE:
        sizes = engine_sizes(config, devices, model)
        for key in sizes_of_engine.SIZES:
            set_key(copy, f"engine.{key}", getattr(sizes.engine, key))
        for axis, size in sizes.shape.items():
            set_key(copy, f"model.mesh.{axis}", size)
        return copy
    set_key(copy, "inference.batch_size", make_program(name, config, devices).examples)
    return copy


def _train(
    config: ConfigDict, devices: Sequence[jax.Device], model: str | None
) -> dict[str, Program]:
    """The jitted step of training, over all devices, and its update where that is apart."""
    task = check_config(_with_preset(config, model), devices, files=False).part()
    options, mesh = task.loop, meshes.make_mesh(task.mesh, devices)
    objective = task.objective(task.vocabulary_size(), mesh)
    optimizer, schedule = make_optimizer(options.optimizer, options.steps)
    split = split_model(objective, task.seed, options.precision, options.ema, options.offload)
    abstract = abstract_state(split, optimizer, mesh, options.rules)
    step = make_step(
        objective,
        split,
        optimizer,
        schedule,
        seed=task.seed,
        accumulate=options.accumulate,
        abstract=abstract,
        mesh=mesh,
        trainable=options.optimizer.trainable,
    )
    batch = task.batch()
    moments = (abstract.optimizer, abstract.average)
    held = {
        "weights": (abstract.params, abstract.frozen),
        "parameters": shard_bytes((abstract.params, abstract.frozen)),
        "optimizer": shard_bytes(moments),
        "host": shard_bytes(abstract, on_host=True),
        "examples": task.batches.batch_size,
        "unit": task.unit,
    }
    programs = {
        "train": Program.of(
            "train",
            step.jitted,
            step.abstract_arguments(batch),
            mesh,
            model_flops=functools.cache(lambda: _gradient_flops(_with_preset(config, model))),
            trained=_trained(abstract),
            input_bytes=tree_bytes(batch),
            steps=options.steps * options.accumulate,
            **held,
        )
    }
    if step.update is not None:
        programs[UPDATE] = Program.of(UPDATE, step.update, step.abstract_update(), mesh, **held)
    return programs


def _trained(state: TrainState) -> list[Any]:
    """The parameters for which the optimizer keeps moments: frozen ones get no gradient."""
    moments = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(state.optimizer)
    }
    return [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state.params)
        for name in [jax.tree_util.keystr(path, simple=True, separator="/")]
        if any(moment.endswith(f"/{name}") for moment in moments)
    ]


def program_in_use(name: str, task: Task, devices: Sequence[jax.Device]) -> Program:
    """The program that uses what a task trains, as its verb makes it; `devices` of one process.

    Mesh and batch size are those that the verb chooses, by the same functions (core/serving.py).
    """
    used, mesh = task.in_use(), serving_mesh(task.inference.mesh, devices)
    graphdef, state = nnx.split(nnx.eval_shape(used.build))
    state = meshes.on_shardings(state, meshes.state_shardings(state, mesh))
    held = shard_bytes(state)
    examples = planned_batch_size(task.inference.batch_size, used.cost, mesh, held)
    batch = used.inputs(examples)
    rows = meshes.batch_sharding(mesh)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
    return Program.of(
        name,
        used.make(graphdef),
        (state, *placed),
        mesh,
        used.options,
        parameters=held,
        examples=examples,
        unit=used.cost.unit,
        input_bytes=tree_bytes(batch),
    )


def _with_preset(config: ConfigDict, model: str | None) -> ConfigDict:
    """A language model's config whose base is a preset: from scratch, with its sizes."""
    kind = known_tasks().get(config.get("task"))
    if kind is None or not issubclass(kind, SolvedQuestions):
        if model is not None:
            raise UserError(
                f"--model={model}: is the language model of a config of `mmqa prompt` or of task "
                "language_model, vision_language or seq2seq; leave it out."
            )
        return config
    family = kind.architecture
    if not isinstance(family, str):  # that of `init`; the sizes that have names are a Qwen-VL's
        family = (kind_of_base(config.init) if Path(config.init).exists() else "") or "qwen_vl"
    entry = architecture(family)
    named, known = model or config.init, entry.part("presets") or {}
    if named == SCRATCH:
        return config
    if model is None and named not in known:
        try:
            base_path(named, family)
        except UserError as error:
            if Path(named).exists():  # and is something else
                raise
            raise UserError(
                f"config key init={named}: is not on this machine; plan with the sizes of --model="
                f"NAME instead, one of {', '.join(sorted(known))}."
            ) from error
        return config
    if named in known:
        sizes = known[named]()
    elif entry.writes == "decoder" and not entry.sees:
        sizes = preset(named)
    else:
        raise UserError(f"--model={named}: sizes are not known; {nearest(named, known, _LISTED)}")
    parts = entry.part("base").parts or {"changes": ""}
    parts = {section: getattr(sizes, part) if part else sizes for section, part in parts.items()}
    changed = ConfigDict(config.to_dict())
    with changed.unlocked(), changed.model.ignore_type():
        changed.init = SCRATCH
        for section, part in parts.items():
            fields = {key: value for key, value in vars(part).items() if value is not None}
            fields.pop("rope_scaling", None)  # changes no shape
            changed.model[section] = {**fields, **config.model[section].to_dict()}
    return changed


def _gradient_flops(config: ConfigDict) -> float:
    """Products of the loss and its gradient on the whole batch, nothing computed twice."""
    plain = ConfigDict(config.to_dict())
    for path in read_task(config).remat_keys():
        with plain.unlocked(), plain.ignore_type():
            set_key(plain, path, "none")
    if "tower_parts" in plain:
        plain.tower_parts = 1
    task = read_task(plain).part()
    objective = task.objective(task.vocabulary_size())
    split = split_model(objective, task.seed)
    batch = task.batch()

    def loss(params: Any, frozen: Any, constants: Any, batch: Any) -> jax.Array:
        module = nnx.merge(split.graphdef, params, frozen, constants)
        return objective.loss(module, batch, jax.random.key(0))[0]

    # For a CPU layers are unrolled, and nothing is recomputed (layers.scan_layers).
    with jax.set_mesh(meshes.make_mesh({"data": 1}, jax.devices("cpu")[:1])):
        fixed = split.frozen, split.constants
        return traced_flops(jax.value_and_grad(loss), split.params, *fixed, batch)


def remat_keys(config: ConfigDict) -> list[str]:
    """The keys that say what a config's model computes again in the backward pass."""
    return list(read_task(config).remat_keys()) if "task" in config else []


def set_key(config: ConfigDict, path: str, value: Any) -> None:
    """Sets `a.b.c`, also where the config leaves it out."""
    *sections, last = path.split(".")
    section = config
    with config.unlocked():
        for name in sections:
            if name not in section:
                section[name] = ConfigDict()
            section = section[name]
        with section.unlocked(), section.ignore_type():
            section[last] = value


def _engine(
    config: ConfigDict, devices: Sequence[jax.Device], model: str | None
) -> dict[str, Program]:
    """The engine's step of all slots, and its batch of chunks of prompts, with sequences as long
    as `engine.length`."""
    if model is None:
        raise UserError(
            "--model is missing: the config's engine serves any language model; name one of "
            f"{', '.join(sorted(PRESETS | WITH_PICTURES | T5S))}."
        )
    from mmqa_jax.decoding.sizes import engine_programs

    chosen, llama = engine_sizes(config, devices, model), _llama(config, devices, model)
    mesh, sizes = chosen.mesh(), chosen.engine
    made, shards = engine_programs(llama, sizes, mesh), slot_shards(sizes.slots, mesh)
    pages = pages_of_shard(sizes, page_of(sizes, devices[0]), shards)

    def program(name: str, examples: int) -> Program:
        function, arguments = made[name]
        state, cache = arguments[:2]
        weights, held = shard_bytes(state), shard_bytes(cache)
        # Of an embedding table that is no output head only the rows of the tokens are read.
        unread = 0 if llama.tied else shard_bytes(nnx.to_pure_dict(state)["tokens"])
        if llama.experts:  # and of its experts those that no token goes to
            experts = [leaf for path, leaf in nnx.to_flat_state(state) if "experts" in path]
            of_device = examples * mesh.shape["tensor"] / mesh.size
            unread += shard_bytes(experts) * (1 - reached(llama, of_device))
        return Program.of(
            name,
            function,
            arguments,
            mesh,
            parameters=weights,
            cache=held,
            # Of the cache all but the page that is no sequence's.
            floor_bytes=weights - unread + (name == "decode") * held * pages / (pages + 1),
            examples=examples,
            unit="tokens",
            input_bytes=examples * 4,
        )

    bucket = sizes.buckets[-1]
    rows = sizes.rows(bucket, shards)
    return {"decode": program("decode", sizes.slots), "prefill": program("prefill", bucket * rows)}


def _tower(config: ConfigDict, devices: Sequence[jax.Device], model: str) -> Program:
    """A full batch of pictures, beside the language model."""
    from mmqa_jax.decoding.sizes import feature_bytes, tower_programs

    chosen = engine_sizes(config, devices, model)
    mesh, sizes = chosen.mesh(), chosen.engine
    llama = _llama(config, devices, model)
    whole = replace_fields(WITH_PICTURES[model](), dtype=llama.dtype)  # as it is loaded
    function, arguments = tower_programs(whole, sizes, mesh)[TOWER]
    state, pixels = arguments
    return Program.of(
        TOWER,
        function,
        arguments,
        mesh,
        parameters=shard_bytes(state),
        cache=feature_bytes(whole, sizes, mesh),
        examples=jax.tree.leaves(pixels)[0].shape[0],
        unit="pictures",
        input_bytes=tree_bytes(pixels),
    )


def _llama(config: ConfigDict, devices: Sequence[jax.Device], model: str) -> LlamaConfig:
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    return dataclasses.replace(preset(model), dtype=dtype)


def engine_sizes(
    config: ConfigDict, devices: Sequence[jax.Device], model: str
) -> sizes_of_engine.EngineSizes:
    """Mesh and sizes as `mmqa prompt` takes them for prompts up to `engine.length`."""
    mesh, settings = config.model.mesh.to_dict(), config.engine.to_dict()
    tokens = None if settings["length"] == AUTO else settings["length"]
    new = config.decoding.max_new_tokens if "decoding" in config else None
    llama = _llama(config, devices, model)
    vision = WITH_PICTURES[model]().vision if model in WITH_PICTURES else None
    return sizes_of_engine.choose_sizes(
        llama,
        settings,
        mesh,
        devices,
        sizes_of_engine.Demand(tokens=tokens, new_tokens=new),
        free=min(free_bytes(device, 0.0) for device in devices),
        beside=sizes_of_engine.tower_bytes(llama, vision),
    )


def whole_meshes(devices: int, model: str) -> list[dict[str, int]]:
    """Meshes that split an engine's weights over all devices, the one of faster steps first.

    On `tensor` alone nothing is gathered, but fewer key heads than devices are repeated in the
    cache (decoding/sizes.py). With as many as divide the heads, and `fsdp` for the rest, the
    cache is split by heads and slots, and every step gathers weights.
    """
    by_heads = math.gcd(devices, preset(model).kv_heads)
    return [
        {"data": 1, "fsdp": devices // tensor, "tensor": tensor}
        for tensor in sorted({devices, by_heads}, reverse=True)
    ]


# The program of `mmqa prompt` with a T5: a batch of the longest prompts, answered.


def generation_program(config: ConfigDict, devices: Sequence[jax.Device], model: str) -> Program:
    """Encoding and decoding of a batch, with sources as long as `engine.length`.

    Its loop is counted once: FLOPs and time are those of the encoder and of one token.

    Args:
      config: as configs/prompt/default.py.
      model: a name of T5S.
    """
    on_cpu = devices[0].platform == "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    shape = dataclasses.replace(T5S[model](), dtype=dtype)
    sizes = t5_engine_sizes(config.engine.to_dict(), on_cpu=on_cpu)
    mesh = mesh_of(config.model.mesh.to_dict(), devices) or meshes.make_mesh(
        {"data": 1}, devices[:1]
    )
    graphdef, state = nnx.split(nnx.eval_shape(lambda: T5(shape, rngs=nnx.Rngs())))
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)
    state = meshes.on_shardings(state, meshes.state_shardings(state, mesh))
    length, blocks = sizes.padded(sizes.length), meshes.batch_blocks(mesh)
    rows = -(-max(1, min(sizes.slots, sizes.tokens // length)) // blocks) * blocks
    sharding = meshes.batch_sharding(mesh)

    def array(*more: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *more), dtype, sharding=sharding)

    drawn = SamplingParameters(
        array(dtype=jnp.float32), array(), array(dtype=jnp.float32), array(2, dtype=jnp.uint32)
    )
    batch = (Texts(array(length), array()), drawn, array())
    most = room(config.decoding.max_new_tokens)
    return Program.of(
        GENERATE,
        draw,
        (graphdef, state, *batch),
        mesh,
        {"end_ids": (1,), "max_new_tokens": most},
        parameters=shard_bytes(state),
        examples=rows,
        unit="answers",
        input_bytes=tree_bytes(batch),
    )
