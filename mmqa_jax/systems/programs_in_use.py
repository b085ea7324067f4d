"""The programs of the verbs that use a trained model, as those make them; see programs.py.

Their mesh and batch size are those that the verbs choose, of the same functions (core/serving.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mmqa_jax.bench.plan.program import Program, shard_bytes, tree_bytes
from mmqa_jax.core.mesh import batch_sharding, on_shardings, state_shardings
from mmqa_jax.core.serving import RowCost, planned_batch_size, serving_mesh
from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.inference.from_config import make_packing, make_vlp_config
from mmqa_jax.inference.question_classifier import make_probabilities
from mmqa_jax.inference.reranker import make_relevance
from mmqa_jax.inference.row_costs import (
    answer_cost,
    candidates_cost,
    embed_cost,
    modality_cost,
    rerank_cost,
)
from mmqa_jax.inference.vqa_model import make_answer_scores
from mmqa_jax.models.dual_encoder import DualEncoder
from mmqa_jax.models.presets import dual_encoder_from_config
from mmqa_jax.models.vlp_extensions import ExtendedVLP
from mmqa_jax.retrieval.embedder import make_encode_source, make_encode_text
from mmqa_jax.systems.batch_shapes import (
    VQA_ANSWERS,
    Struct,
    vlp_batch,
    vocabulary_size,
    vqa_inputs,
)
from mmqa_jax.training import tasks

# Task -> the program that uses what it trains.
OF_TASK = {
    "contrastive": "embed",
    "rerank": "rerank",
    "answer": "answer",
    "vqa": "candidates",
    "modality": "modality",
    "example_retrieval": "embed",
}


def program_in_use(name: str, config: ConfigDict, devices: Sequence[jax.Device]) -> Program:
    """The program of a name of OF_TASK; `devices` are those of one process."""
    makers: dict[str, Callable[[ConfigDict, Mesh], Program]] = {
        "embed": _embed,
        "rerank": _rerank,
        "answer": _answer,
        "candidates": _candidates,
        "modality": _modality,
    }
    mesh = serving_mesh(config.inference.get("mesh"), devices)
    return makers[name](config, mesh)


def _in_use(
    name: str,
    config: ConfigDict,
    mesh: Mesh,
    cost: RowCost,
    make: Callable[[Any], Any],
    build: Callable[[], nnx.Module],
    inputs: Callable[[int], tuple[Any, ...]],
    **options: Any,
) -> Program:
    """A jitted function (state, *inputs) of a model in use, with the batches that its verb makes.

    Args:
      make: graphdef -> the jitted function.
      inputs: examples of a call -> their shapes.
      options: static arguments.
    """
    graphdef, state = nnx.split(nnx.eval_shape(build))
    state = on_shardings(state, state_shardings(state, mesh))
    held = shard_bytes(state)
    examples = planned_batch_size(config.inference.batch_size, cost, mesh, held)
    batch = inputs(examples)
    rows = batch_sharding(mesh)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
    return Program.of(
        name,
        make(graphdef),
        (state, *placed),
        mesh,
        options,
        parameters=held,
        examples=examples,
        unit=cost.unit,
        input_bytes=tree_bytes(batch),
    )


def _embed(config: ConfigDict, mesh: Mesh) -> Program:
    """Sources: captions with pictures, or texts where the config trains on texts alone."""
    model = dual_encoder_from_config(config.model, vocabulary_size(config))
    length, side = max(config.inference.buckets), config.pictures.size
    has_pictures = config.task == "contrastive"

    def inputs(rows: int) -> tuple[Struct, ...]:
        texts = Struct((rows, length), np.int32), Struct((rows, length), np.bool_)
        pictures = Struct((rows, side, side, 3), np.uint8), Struct((rows,), np.bool_)
        return (*texts, *pictures) if has_pictures else texts

    make = make_encode_source if has_pictures else make_encode_text
    build = functools.partial(_dual_encoder, model)
    return _in_use("embed", config, mesh, embed_cost(config), make, build, inputs)


def _dual_encoder(model: Any) -> DualEncoder:
    return DualEncoder(model, rngs=nnx.Rngs(0))


def _rerank(config: ConfigDict, mesh: Mesh) -> Program:
    model = make_vlp_config(config, vocabulary_size(config))
    build, inputs = functools.partial(_vlp, model), functools.partial(_vlp_inputs, config)
    return _in_use("rerank", config, mesh, rerank_cost(config), make_relevance, build, inputs)


def _vlp_inputs(config: ConfigDict, rows: int) -> tuple[Any]:
    return (vlp_batch(config, rows, inference=True),)


def _answer(config: ConfigDict, mesh: Mesh) -> Program:
    """Beam search; its loop is counted to `max_new_tokens`, the longest answer."""
    model, options = make_vlp_config(config, vocabulary_size(config)), config.inference

    def make(graphdef: Any) -> Any:
        return _WithGraph(beam_search, graphdef)

    return _in_use(
        "answer",
        config,
        mesh,
        answer_cost(config),
        make,
        functools.partial(_vlp, model),
        functools.partial(_vlp_inputs, config),
        mask_id=103,  # any token: ids change no shape
        sep_id=102,
        num_beams=options.num_beams,
        max_new_tokens=options.max_new_tokens,
        token_type=make_packing(config, inference=True).segments[1],
        length_penalty=options.length_penalty,
        no_repeat_ngram=options.get("no_repeat_ngram", 0),
        only_best=options.get("only_best", False),
    )


class _WithGraph:
    """A jitted function whose first argument is the graph of the model."""

    def __init__(self, function: Any, graphdef: Any):
        self._function, self._graphdef = function, graphdef

    def trace(self, *arguments: Any, **options: Any) -> jax.stages.Traced:
        return self._function.trace(self._graphdef, *arguments, **options)


def _vlp(model: Any) -> ExtendedVLP:
    return ExtendedVLP(model, rngs=nnx.Rngs(0))


def _candidates(config: ConfigDict, mesh: Mesh) -> Program:
    task = tasks.vqa(config, vocabulary_size(config), VQA_ANSWERS)

    def build() -> nnx.Module:
        return task.init(jax.random.key(0))

    cost, inputs = candidates_cost(config), functools.partial(vqa_inputs, config)
    return _in_use("candidates", config, mesh, cost, make_answer_scores, build, inputs)


def _modality(config: ConfigDict, mesh: Mesh) -> Program:
    task = tasks.modality(config, vocabulary_size(config))
    length = config.batches.length

    def inputs(rows: int) -> tuple[Struct, Struct]:
        return Struct((rows, length), np.int32), Struct((rows, length), np.bool_)

    def build() -> nnx.Module:
        return task.init(jax.random.key(0))

    cost = modality_cost(config)
    return _in_use("modality", config, mesh, cost, make_probabilities, build, inputs)
