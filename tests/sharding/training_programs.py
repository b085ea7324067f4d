"""Compiles training steps for TPUs that are not there, and prints what their programs do.

A script for test_training_programs.py, which sets the environment: it prints one JSON object,
program -> its facts. Models are small and shaped like the real ones; what is asserted of them does
not depend on their size. Layers are scanned, so that further ones would not change a program.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.encoders.dual_encoder import DualEncoderConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.two_towers.config import TextConfig, VisionConfig
from mmqa_jax.models.vlp.network import VLPConfig, VLPInputs
from mmqa_jax.tasks.contrastive_losses import ContrastiveObjective
from mmqa_jax.tasks.language_model import LanguageModelObjective
from mmqa_jax.tasks.vlp import AnswerObjective, RerankObjective
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.state import abstract_state, make_step, split_model
from tests.hlo.counts import count
from tests.hlo.kept import facts_of
from tests.hlo.text import Instruction, Module, parse

ADAM = OptimizerOptions(name="adam", schedule="constant", warmup=0.0)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bools(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


# Every entry: topology, mesh, task, batch, and FLOPs of the model's forward pass over the batch.

HIDDEN, MLP, LENGTH, REGIONS, FEATURES, PLACES = 256, 1024, 128, 32, 256, 64


def vlp_config(layers: int, dropout: float = 0.1) -> VLPConfig:
    bert = BertConfig(
        vocab_size=2048, hidden=HIDDEN, layers=layers, heads=4, mlp=MLP, types=6, eps=1e-5,
        dtype="bfloat16", dropout=dropout, attention_dropout=dropout,
    )  # fmt: skip
    return VLPConfig(bert, FEATURES, PLACES, visual_hidden=(FEATURES,))


def vlp_inputs(rows: int) -> VLPInputs:
    return VLPInputs(
        *(ints(rows, LENGTH) for _ in range(3)),
        *(bools(rows, LENGTH) for _ in range(2)),
        floats(rows, REGIONS, FEATURES),
        floats(rows, REGIONS, PLACES),
    )


def bert_flops(tokens: int, queries: int, length: int) -> float:
    """One layer: keys and values of `tokens`, all else of `queries` of them."""
    weights = 2 * HIDDEN * (2 * HIDDEN * tokens + (2 * HIDDEN + 2 * MLP) * queries)
    return weights + 4 * length * HIDDEN * queries


def region_flops(rows: int) -> float:
    return 2 * rows * REGIONS * (FEATURES * FEATURES + (FEATURES + PLACES) * HIDDEN)


def vlp_select() -> dict[str, Any]:
    layers, rows = 4, 64
    batch = {"inputs": vlp_inputs(rows), "labels": ints(rows), "weights": floats(rows)}
    tokens = rows * LENGTH
    last = bert_flops(tokens, rows, LENGTH)  # [CLS] alone
    flops = region_flops(rows) + (layers - 1) * bert_flops(tokens, tokens, LENGTH) + last
    return {
        "topology": "v5e:2x4",
        "mesh": {"data": 8},
        "layers": layers,
        "task": RerankObjective(vlp_config(layers)),
        "batch": batch,
        "flops": flops,
    }


def vlp_answer() -> dict[str, Any]:
    layers, rows, masks = 4, 64, 8
    batch = {
        "inputs": vlp_inputs(rows),
        "masked_positions": ints(rows, masks),
        "masked_ids": ints(rows, masks),
        "masked_weights": floats(rows, masks),
    }
    tokens = rows * LENGTH
    head = 2 * rows * masks * HIDDEN * (HIDDEN + 2048)
    flops = region_flops(rows) + layers * bert_flops(tokens, tokens, LENGTH) + head
    return {
        "topology": "v5e:2x4",
        "mesh": {"data": 2, "fsdp": 4},
        "task": AnswerObjective(vlp_config(layers, dropout=0.0), questions_per_mean=2),
        "batch": batch,
        "flops": flops,
    }


def contrastive() -> dict[str, Any]:
    """CLIP's towers, narrow, at 32,768 questions of a source each on 256 chips."""
    rows, sources, length, side = 32_768, 32_768, 16, 32
    vision = VisionConfig(
        image_size=side, patch_size=16, width=128, layers=2, heads=2, mlp_width=256, embed_dim=128,
        dtype="bfloat16",
    )  # fmt: skip
    text = TextConfig(
        vocab_size=2048, context=length, width=128, layers=2, heads=2, mlp_width=256,
        embed_dim=128, dtype="bfloat16",
    )  # fmt: skip
    batch = {
        "query_ids": ints(rows, length),
        "query_mask": bools(rows, length),
        "source_ids": ints(sources, length),
        "source_mask": bools(sources, length),
        "pixels": jax.ShapeDtypeStruct((sources, side, side, 3), jnp.uint8),
        "has_image": bools(sources),
        "positive": ints(rows),
        "source_rows": ints(sources),
        "gold_rows": ints(rows, 2),
    }

    def tower(items: int, length: int) -> float:
        weights = 2 * items * length * (4 * 128 * 128 + 2 * 128 * 256)
        return 2 * (weights + 4 * items * length * length * 128) + 2 * items * 128 * 128

    patches = 2 * sources * 4 * 16 * 16 * 3 * 128
    logits = 2 * 128 * rows * (sources + rows)
    flops = tower(rows + sources, length) + tower(sources, 5) + patches + logits
    mesh = {"data": 32, "fsdp": 8}
    return {
        "topology": "v5e:16x16",
        "mesh": mesh,
        "task": lambda mesh: ContrastiveObjective(DualEncoderConfig(text, vision), mesh),
        "batch": batch,
        "flops": flops,
    }


def language_model(
    topology: str = "v5e:2x4", axis: str = "fsdp", layers: int = 4
) -> dict[str, Any]:
    """LLaMA-2's proportions at a quarter of its width, two rows a chip."""
    rows, length, targets, hidden, mlp, vocabulary = 16, 256, 128, 1024, 2816, 2048
    config = LlamaConfig(
        vocab_size=vocabulary, hidden=hidden, layers=layers, heads=8, kv_heads=8, mlp=mlp,
        positions=length, dtype="bfloat16",
    )  # fmt: skip
    batch = {name: ints(rows, length) for name in ("input_ids", "segments", "positions")} | {
        name: ints(rows, targets) for name in ("target_positions", "target_ids", "target_segments")
    }
    weights = 2 * rows * length * hidden * (4 * hidden + 3 * mlp)
    flops = layers * (weights + 4 * rows * length * length * hidden)
    flops += 2 * rows * targets * hidden * vocabulary
    return {
        "topology": topology,
        "mesh": {axis: 8},
        "layers": layers,
        "task": LanguageModelObjective(config),
        "batch": batch,
        "flops": flops,
    }


def replicated_model() -> dict[str, Any]:
    """A language model whose parameters every chip of a v5p holds whole."""
    return language_model("v5p:2x2x2", "data", layers=2)


def long_rows() -> dict[str, Any]:
    """A decoder with grouped heads, on rows of 4,096 tokens that four chips share.

    Every second layer sees the last 1,024 tokens.
    """
    rows, length, targets, hidden, mlp, vocabulary, layers = 8, 4096, 512, 1024, 2816, 2048, 4
    heads, kv_heads, size = 8, 2, 128
    config = LlamaConfig(
        vocab_size=vocabulary, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads,
        mlp=mlp, positions=length, dtype="bfloat16", windows=(1024, 0) * (layers // 2),
    )  # fmt: skip
    batch = {name: ints(rows, length) for name in ("input_ids", "segments", "positions")} | {
        name: ints(rows, targets) for name in ("target_positions", "target_ids", "target_segments")
    }
    width = 2 * hidden * hidden + 2 * hidden * kv_heads * size + 3 * hidden * mlp
    return {
        "topology": "v5e:4x4",
        "mesh": {"fsdp": 4, "sequence": 4},
        "layers": layers,
        "task": LanguageModelObjective(config),
        "batch": batch,
        "flops": 2 * rows * (layers * length * width + targets * hidden * vocabulary),
        "keys": 2 * rows * length * kv_heads * size,  # and values of a layer: elements
    }


PROGRAMS = {
    f.__name__: f
    for f in (
        *(vlp_select, vlp_answer, contrastive, language_model, replicated_model),
        long_rows,
    )
}


def facts(name: str) -> dict[str, Any]:
    """What the step compiled for its topology does on one device."""
    made = PROGRAMS[name]()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=made["topology"]).devices
    mesh = make_mesh(made["mesh"], devices=devices)
    task = made["task"](mesh) if not hasattr(made["task"], "loss") else made["task"]
    optimizer, schedule = make_optimizer(ADAM, steps=100)
    model = split_model(task, 0)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        task, model, optimizer, schedule, seed=0, accumulate=1, abstract=abstract, mesh=mesh
    )
    compiled = facts_of(
        f"training_{name}",
        step.lower(made["batch"]),
        functools.partial(_of_compiled, name, dict(mesh.shape)),
        __file__,
    )
    return {
        "mesh": dict(mesh.shape),
        "layers": made.get("layers"),
        "keys": made.get("keys"),
        # Backward, a product has two: by its factor and by its weights.
        "model_flops": 3 * made["flops"] / len(devices),
        "parameters": _elements(model.params),
        "shard": _elements(abstract.params, shards=True),
        "optimizer_shard": _elements(abstract.optimizer, shards=True),
        "parameter_types": sorted({str(x.dtype) for x in jax.tree.leaves(abstract.params)}),
        **compiled,
    }


def _of_compiled(name: str, mesh: dict[str, int], compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What the compiled step does on one device."""
    text = compiled.as_text()
    if folder := os.environ.get("PROGRAMS_TEXT"):  # to look at
        Path(folder, f"{name}.hlo").write_text(text)
    counts = count(text)
    return {
        "flops": counts.total_flops,
        "collectives": [one._asdict() for one in counts.on_mesh(mesh)],
        "gathered": _gathered(text),
        "products_beside_reductions": _beside(text),
        "factor_types": sorted(counts.flops),
        "f32_flops": counts.flops["f32"],
        "largest": _largest(text),
        "scores": sorted(set(re.findall(rf"(?:f32|bf16)\[(?:\d+,)+{LENGTH},{LENGTH}\]", text))),
        "kernels": sorted(set(re.findall(r"%((?:fused_attention|splash_mha)\w*)[.\d]* = ", text))),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "batch_shardings": sorted(
            {str(x.spec) for x in jax.tree.leaves(compiled.input_shardings[0][2])}
        ),
        "loops": counts.loops,
    }


def _elements(tree: Any, *, shards: bool = False) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape) if shards else x.shape)
        for x in jax.tree.leaves(tree)
    )


def _gathered(text: str) -> dict[str, int]:
    """Elements of the program's all-gathers, each once: those that run beside products, and others.

    The TPU's compiler takes a collective apart into steps, and fuses each with other work.
    """
    beside, alone, inside = {}, {}, False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside = "async_collective_fusion" in line.split("(")[0]
        found = re.search(r"= \w+\[([\d,]+)\].* all-gather(?:-start)?\(.*channel_id=(\d+)", line)
        if found is not None:
            size = math.prod(map(int, found[1].split(",")))
            (beside if inside else alone)[found[2], size] = size
    rest = {key: size for key, size in alone.items() if key not in beside}
    return {"beside": sum(beside.values()), "alone": sum(rest.values())}


def _beside(text: str) -> list[int]:
    """Of every all-reduce on SparseCores, how many products the schedule has until it is awaited."""
    module, found = parse(text), []
    for computation in module.computations.values():
        scheduled = list(computation.instructions.values())
        for n, one in enumerate(scheduled):
            if (
                one.opcode != "call-start"
                or 'async_execution_thread="sparsecore"' not in one.attributes
            ):
                continue
            last = next(m for m, x in enumerate(scheduled) if one.name in x.operands)
            found.append(
                sum(x.opcode == "fusion" and _has_product(module, x) for x in scheduled[n:last])
            )
    return found


def _has_product(module: Module, one: Instruction) -> bool:
    inner = module.computations[one.called["calls"]].instructions.values()
    return any(
        x.opcode in ("dot", "convolution") or (x.opcode == "fusion" and _has_product(module, x))
        for x in inner
    )


def _largest(text: str) -> int:
    """Elements of the largest array of the program."""
    shapes = set(re.findall(r"\b(?:f32|bf16|s32|pred|u16|u32)\[([\d,]+)\]", text))
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def main() -> None:
    """Prints the facts of the programs that the command line names, by default of all."""
    found = {}
    for name in sys.argv[1:] or PROGRAMS:
        found[name] = facts(name)
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
