"""`mmqa plan` of published encoders: their sizes, and the program that `mmqa embed` runs."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.plan import encoders, programs
from mmqa_jax.plan.topology import open_topology
from mmqa_jax.plan.verdict import plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

# Millions of parameters, as their pages on the hub count them (with BERT's and XLM-R's poolers,
# which no vector is made of: hidden * (hidden + 1); XLM-R's two rows of positions before the first).
PARAMETERS = {
    "minilm_l6": 22.7,
    "bge_small": 33.4,
    "bge_base": 109.5,
    "bge_large": 335.1,
    "multilingual_e5_base": 278.0,
    "multilingual_e5_large": 559.9,
    "bge_m3": 567.8,
    "mpnet_base": 109.5,
    "gte_modernbert_base": 149.0,
    "modernbert_large": 394.8,
    "qwen3_embedding_06b": 595.8,
    "qwen3_embedding_4b": 4021.8,
    "qwen3_embedding_8b": 7567.3,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_the_published_ones(name):
    program = encoders.encoder_program(name, jax.devices()[:1])
    millions = program.parameters / 4 / 1e6
    config = encoders.ENCODERS[name]()
    if isinstance(config, BertConfig):
        millions += config.hidden * (config.hidden + 1) / 1e6
    assert millions == pytest.approx(PARAMETERS[name], rel=2e-3)


def test_the_program_is_planned(monkeypatch):
    tiny = BertConfig(vocab_size=50, hidden=24, layers=2, heads=3, mlp=32, positions=40)
    monkeypatch.setitem(encoders.ENCODERS, "bge_base", lambda: tiny)
    planned = plan(ConfigDict(), open_topology("local"), model="bge_base").planned
    assert [one.compiled.program.name for one in planned] == ["texts"]
    program = planned[0].compiled.program
    assert program.unit == "texts"
    made = nnx.eval_shape(lambda: encoders.Bert(tiny, rngs=nnx.Rngs(0)))
    size = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(made)))
    assert program.parameters == 4 * size
    with pytest.raises(UserError, match="leave --config out"):
        programs.program_names(ConfigDict({"task": "vqa"}), "bge_base")
    with pytest.raises(UserError, match="encoders of texts: minilm_l6"):
        programs.program_names(ConfigDict())
