"""Compiles LLaMA's beam search for a TPU and prints its facts as JSON; see test_beam_program.py.

A process of its own, where JAX's platform is the CPU. Its argument is a file for the program's
text, if it is wanted.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.mesh import make_mesh, on_shardings, state_shardings
from mmqa_jax.decoding.beam_batches import beam_search
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.plan.topology import open_topology
from tests.hlo.counts import count
from tests.hlo.kept import facts_of

CONFIG = LlamaConfig(
    vocab_size=1024, hidden=512, layers=2, heads=4, kv_heads=2, mlp=1024, dtype="bfloat16"
)
QUESTIONS, BEAMS, PROMPT, STEPS = 8, 5, 128, 16


def main(out: Path | None = None) -> None:
    mesh = make_mesh({"data": 1}, devices=open_topology("v5e:2x2").devices[:1])
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0))))
    state = on_shardings(state, state_shardings(state, mesh))
    ids = jax.ShapeDtypeStruct((QUESTIONS, PROMPT), jnp.int32)
    lengths = jax.ShapeDtypeStruct((QUESTIONS,), jnp.int32)
    sizes = {"num_beams": BEAMS, "max_new_tokens": STEPS}
    with jax.set_mesh(mesh):
        lowered = beam_search.lower(graphdef, state, ids, lengths, end_id=2, **sizes)
        print(
            json.dumps(facts_of("llama_beams", lowered, functools.partial(measure, out), __file__))
        )


def measure(out: Path | None, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What the compiled search does."""
    text = compiled.as_text()
    if out is not None:
        out.write_text(text, encoding="utf-8")
    # A row per question, none per beam: its prompt, and the new tokens of all its beams.
    of_column = QUESTIONS * CONFIG.kv_heads * CONFIG.head_size
    results = [
        (math.prod(map(int, shape.split(","))), kind)
        for shape, kind in re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
    ]
    counts = count(text)
    return {
        "written": Counter(kind for size, kind in results if size == BEAMS * STEPS * of_column),
        "repeated": [kind for size, kind in results if size == BEAMS * PROMPT * of_column],
        "loops": counts.loops,
        "copied": counts.copied_bytes,
        "cache": CONFIG.layers * 2 * 2 * BEAMS * STEPS * of_column,
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
