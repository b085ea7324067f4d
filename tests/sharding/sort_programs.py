"""Compiles programs that choose the best of many for a TPU; prints what each sorts, a line of JSON.

A process of its own, where JAX's platform is the CPU; see test_sort_programs.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import make_mesh, on_shardings, state_shardings
from mmqa_jax.decoding import masked_lm, t5_engine
from mmqa_jax.decoding.sampling import SamplingParameters, choose
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.oscar.network import Oscar, OscarConfig, OscarInputs
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.network import T5, Texts
from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs
from mmqa_jax.plan.topology import open_topology
from mmqa_jax.retrieval.indexes.exact import _best_with_block
from mmqa_jax.retrieval.indexes.mesh import abstract_search
from tests.hlo.kept import facts_of
from tests.hlo.text import parse

QUESTIONS, BEAMS, STEPS, LENGTH = 8, 5, 4, 32
VOCABULARY, RESULTS, BLOCK = 4096, 20, 65_536
_BERT = BertConfig(
    vocab_size=VOCABULARY, hidden=128, layers=1, heads=2, mlp=256, types=6, dtype="bfloat16"
)
_T5 = T5Config(
    **{"vocab_size": VOCABULARY, "hidden": 128, "heads": 2, "mlp": 256, "dtype": "bfloat16"},
    **{"encoder_layers": 1, "decoder_layers": 1},
)


def lowered() -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The programs by name."""
    devices = open_topology("v5e:2x2").devices
    mesh = make_mesh({"data": 1}, devices=devices[:1])
    whole = NamedSharding(mesh, PartitionSpec())

    def split(make: Any) -> tuple[nnx.GraphDef, Any]:
        graphdef, state = nnx.split(nnx.eval_shape(make))
        return graphdef, on_shardings(state, state_shardings(state, mesh))

    def shape(*sizes: int, kind: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, kind, sharding=whole)

    tokens, seen = shape(QUESTIONS, LENGTH), shape(QUESTIONS, LENGTH, kind=bool)
    search = {"num_beams": BEAMS, "max_new_tokens": STEPS}
    of_bert = {"region_features": 16}
    vlp = split(lambda: VLP(VLPConfig(_BERT, region_positions=8, **of_bert), rngs=nnx.Rngs()))
    oscar = split(lambda: Oscar(OscarConfig(_BERT, **of_bert), rngs=nnx.Rngs()))
    t5 = split(lambda: T5(_T5, rngs=nnx.Rngs()))
    contents, places = (shape(QUESTIONS, 4, size, kind=jnp.float32) for size in (16, 8))
    sources = VLPInputs(tokens, tokens, tokens, seen, seen, contents, places)
    picture = OscarInputs(
        tokens, tokens, tokens, seen, seen, contents, shape(QUESTIONS, 4, kind=bool)
    )
    rows = (shape(QUESTIONS, kind=kind) for kind in (jnp.float32, jnp.int32, jnp.float32))
    parameters = SamplingParameters(*rows, shape(QUESTIONS, 2, kind=jnp.uint32))
    logits = shape(QUESTIONS, VOCABULARY, kind=jnp.float32)
    best = (shape(QUESTIONS, RESULTS, kind=kind) for kind in (jnp.float32, jnp.int32))
    queries, block = (shape(size, 64, kind=jnp.float32) for size in (QUESTIONS, BLOCK))
    scored = (queries, block, shape(BLOCK, kind=bool), shape(), *best)
    with jax.set_mesh(mesh):
        ids = {"mask_id": 103, "sep_id": 102}
        yield "vlp_beams", masked_lm.beam_search.lower(*vlp, sources, **ids, **search)
        yield "oscar_beams", masked_lm.write_captions.lower(*oscar, picture, **search)
        texts = Texts(tokens, shape(QUESTIONS))
        yield "t5_beams", t5_engine.beam_search.lower(*t5, texts, end_id=1, **search)
        drawn = (logits, parameters, shape(QUESTIONS), shape(QUESTIONS, kind=bool))
        yield "sampling", jax.jit(choose).lower(*drawn)
        yield "exact", _best_with_block.lower(*scored)
    for name, approximate in (("mesh", False), ("mesh_approx", True)):
        trace, _, _ = abstract_search(devices, 8 * BLOCK, 64, RESULTS, approximate=approximate)
        yield name, trace().lower()


def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """How many elements each sort of a compiled program sorts, and whether it takes TopK."""
    text = compiled.as_text()
    sorts = [
        one.arrays[0].size
        for computation in parse(text).computations.values()
        for one in computation.instructions.values()
        if one.opcode == "sort"
    ]
    return {"sorts": sorted(sorts), "top_k": 'custom_call_target="TopK"' in text}


def main() -> None:
    for name, program in lowered():
        print(json.dumps({"name": name, **facts_of(f"sorts_{name}", program, measure, __file__)}))


if __name__ == "__main__":
    main()
