"""Which parameters decay, for each task as its authors have it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mmqa_jax.core.config import load_config
from mmqa_jax.core.trees import flatten_named, nest
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.training.optimizer import decay_line, make_optimizer, parameter_table
from mmqa_jax.training.state import outline

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
_BERT = {"bias", "scale"}  # VLP, pytorch_pretrained_bert: no_decay = bias, LayerNorm
# The last parts of the names that do not decay; and that must be there and do.
EXEMPT = {
    # "all weights that are not gains or biases" (Radford et al. 2021, section 2.5).
    "webqa/contrastive.py:runlocal": (
        {"bias", "scale", "logit_scale", "picture_gate"}, {"kernel", "positions", "class_token"},
    ),
    # big_vision: kernels alone.
    "webqa/contrastive.py:siglip": (
        {"bias", "scale", "logit_scale", "logit_bias", "picture_gate", "positions", "probe",
         "table"},
        {"kernel"},
    ),
    "atlas/rerank.py:runlocal": (_BERT, {"kernel", "table"}),
    "atlas/answer.py:runlocal": (_BERT, {"kernel", "table"}),
    "atlas/mcan.py:runlocal": (set(), set()),  # Adam
    "scienceqa/rmr_retriever.py:runlocal": (
        {"bias", "scale", "logit_scale", "picture_gate"}, {"kernel"},
    ),
    "scienceqa/t5_finetune.py:runlocal": ({"scale"}, {"kernel", "table"}),
    "aokvqa/vlm_finetune.py:runlocal": (set(), set()),  # LoRA's matrices alone, decay 0
    # torch.optim.AdamW of all parameters.
    "webqa/fusion_in_decoder.py:runlocal": (set(), {"kernel", "scale", "table"}),
}  # fmt: skip


def options_and_names(name: str):
    task = read_task(load_config(CONFIGS / name))
    model = nnx.eval_shape(lambda: outline(task.objective(300)))
    return task.loop.optimizer, flatten_named(nnx.state(model, nnx.Param))


def moved(options, names) -> set[str]:
    """The parameters that a step without a gradient moves."""
    optimizer, _ = make_optimizer(options, 10)
    ones = nest(dict.fromkeys(names, jnp.ones(())))

    @jax.jit
    def updates(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        # The second step: the first may have the rate 0.
        state = optimizer.update(zeros, optimizer.init(params), params)[1]
        return optimizer.update(zeros, state, params)[0]

    return {name for name, change in flatten_named(updates(ones)).items() if change != 0}


@pytest.mark.parametrize("name", EXEMPT)
def test_what_decays_is_what_the_authors_decay(name):
    options, names = options_and_names(name)
    decayed, (exempt, wanted) = moved(options, names), EXEMPT[name]
    kinds = {part: part.rpartition("/")[2] for part in names}
    assert {kinds[part] for part in decayed} >= wanted
    if decayed:
        assert decayed == {part for part in names if kinds[part] not in exempt}
    table = parameter_table(options, names)
    assert {part for part, facts in table.items() if facts["weight_decay"]} == decayed


def test_relative_positions_do_not_decay_in_multimodal_cot():
    """transformers' Trainer exempts every name with "bias" in it: relative_attention_bias too."""
    options, names = options_and_names("scienceqa/multimodal_cot.py:runlocal")
    others = set(names) - moved(options, names)
    assert {"encoder/relative/table", "decoder/relative/table"} <= others
    assert all(name.endswith(("/bias", "/scale", "relative/table")) for name in others)


def test_the_line_counts_what_decays():
    table = {
        "a/kernel": {"shape": [2, 3], "weight_decay": 0.1},
        "a/bias": {"shape": [3], "weight_decay": 0.0},
        "b/bias": {"shape": [4], "weight_decay": 0.0},
        "c/kernel": {"shape": [9], "weight_decay": None},
    }
    assert decay_line(table) == (
        "3 parameters (13 numbers) are trained; weight decay acts on 1 of them, not on bias (2)"
    )
