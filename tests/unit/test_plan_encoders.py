"""`mmqa plan` of published encoders: their sizes, and the program that `mmqa embed` runs."""

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.plan import programs
from mmqa_jax.plan.topology import open_topology
from mmqa_jax.plan.verdict import plan
from tests.refusals import refuses

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
    program = programs.encoder_program(name, jax.devices()[:1])
    millions = program.parameters / 4 / 1e6
    config = programs.ENCODERS[name]()
    if isinstance(config, BertConfig):
        millions += config.hidden * (config.hidden + 1) / 1e6
    assert millions == pytest.approx(PARAMETERS[name], rel=2e-3)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("nomic_embed", "NomicBert"),
        ("gte_multilingual_base", "Gte"),
        ("jina_v3", "JinaEmbeddingsV3"),
    ],
)
def test_sizes_of_rotary_berts_are_those_of_transformers(name, model):
    config = getattr(transformers, f"{model}Config")()
    with torch.device("meta"):
        theirs = getattr(transformers, f"{model}Model")(config, add_pooling_layer=False)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    assert programs.encoder_program(name, jax.devices()[:1]).parameters == 4 * count


@pytest.mark.parametrize(
    ("name", "vision", "text"),
    [
        (
            "qwen3_vl_embedding_2b",
            {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "out_hidden_size": 2048,
                "deepstack_visual_indexes": [5, 11, 17],
            },
            {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
            },
        ),
        (
            "qwen3_vl_embedding_8b",
            {"out_hidden_size": 4096},
            {
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
        ),
    ],
)
def test_sizes_of_qwen3_vl_embedding_are_those_of_transformers(name, vision, text):
    config = transformers.Qwen3VLConfig(
        vision_config=vision, text_config={**text, "head_dim": 128, "vocab_size": 151936}
    )
    with torch.device("meta"):
        model = transformers.Qwen3VLModel(config)
    programs_of = programs.program_names(ConfigDict(), name)
    assert programs_of == ("texts", "pages")
    for which in programs_of:
        program = programs.make_program(which, ConfigDict(), jax.devices()[:1], name)
        assert program.parameters == 4 * sum(one.numel() for one in model.parameters())
        assert program.unit == which
    pictures = program.arguments[1].pictures
    assert pictures.order.shape == (1, 1, 2048)  # 1,800 tokens of a page, in their bucket


def test_the_program_is_planned(monkeypatch):
    tiny = BertConfig(vocab_size=50, hidden=24, layers=2, heads=3, mlp=32, positions=40)
    monkeypatch.setitem(programs.ENCODERS, "bge_base", lambda: tiny)
    planned = plan(ConfigDict(), open_topology("local"), model="bge_base").planned
    assert [one.compiled.program.name for one in planned] == ["texts"]
    program = planned[0].compiled.program
    assert program.unit == "texts"
    made = nnx.eval_shape(lambda: programs.bert.Bert(tiny, rngs=nnx.Rngs()))
    size = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(made)))
    assert program.parameters == 4 * size
    refuses("leave --config out", programs.program_names, ConfigDict({"task": "vqa"}), "bge_base")
    refuses("encoders of texts: minilm_l6", programs.program_names, ConfigDict())
