"""`mmqa plan` of the fluency that `mmqa evaluate webqa --bart` scores."""

import sys

import jax
import pytest
from cli_runs import ROOT
from flax import nnx
from ml_collections import ConfigDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mmqa_jax.core.chips import GPUS
from mmqa_jax.evaluation.fluency import BartScorer
from mmqa_jax.models.bart.network import Bart, BartConfig
from mmqa_jax.plan import programs
from mmqa_jax.plan.programs import make_program
from mmqa_jax.plan.topology import Topology, open_topology
from mmqa_jax.plan.verdict import plan
from tests.drawn_weights import drawn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

LARGE = "bart_large_cnn"
TINY = BartConfig(
    vocab_size=5, hidden=32, encoder_layers=2, decoder_layers=2, encoder_heads=2, decoder_heads=2,
    encoder_mlp=48, decoder_mlp=48, positions=40,
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(programs.BARTS, LARGE, lambda: TINY)


@pytest.fixture
def tokenizer():
    words = Tokenizer(
        models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return words


def test_what_is_planned_is_what_evaluation_compiles(tiny, tokenizer, monkeypatch):
    scorer, lowered = BartScorer(drawn(lambda: Bart(TINY, rngs=nnx.Rngs())), tokenizer), []
    means = scorer._means

    def recorded(*arguments):
        lowered.append(means.lower(*arguments))
        return means(*arguments)

    monkeypatch.setattr(scorer, "_means", recorded)
    scorer.score(["a " * 60] * 70, ["a " * 60] * 70)  # longer than its positions, two batches
    planned = make_program("fluency", ConfigDict(), jax.devices()[:1], LARGE)
    assert planned.examples == 2048 // TINY.positions
    mine = planned.trace().lower()
    for theirs in lowered:
        shapes = [
            [(x.shape, x.dtype) for x in jax.tree.leaves(one.in_avals)] for one in (mine, theirs)
        ]
        assert shapes[0] == shapes[1]
        precise = [one.as_text().count("precision = [HIGHEST, HIGHEST]") for one in (mine, theirs)]
        assert precise[0] == precise[1] > 0
    assert len(lowered) == 2


def test_fluency_is_planned_for_one_device(tiny):
    chips = Topology("local", tuple(jax.devices()[:1]), (0,), GPUS["h100"])
    (row,) = plan(ConfigDict(), chips, model=LARGE).to_json()["programs"]
    assert (row["name"], row["fits"], row["collectives"]) == ("fluency", True, [])
    tokens = 2048 // TINY.positions * TINY.positions
    mlp = 2 * 2 * TINY.hidden * TINY.encoder_mlp * (TINY.encoder_layers + TINY.decoder_layers)
    assert row["model_flops"] > tokens * (mlp + 2 * TINY.hidden * TINY.vocab_size)
    if sys.platform == "linux":  # for which the TPU's compiler is made
        on_tpu = make_program("fluency", ConfigDict(), open_topology("v5e:2x2").devices, LARGE)
        assert on_tpu.devices == 1
        assert on_tpu.examples == 16_384 // TINY.positions
        assert on_tpu.trace().lower().as_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"--config is missing: .*--model=bart_large_cnn \(fluency"),
        (["--model=llama_7bb"], r"--model=llama_7bb: .*did you mean 'llama_7b'"),
        (["--config.train.steps=5"], r"--config.train.steps=5: of which --config"),
        (
            [f"--config={ROOT}/configs/prompt/default.py", f"--model={LARGE}"],
            r"--model=bart_large_cnn: .*leave --config out",
        ),
        ([f"--model={LARGE}", "--only=train"], r"--only=train: the config has .* fluency"),
        ([f"--model={LARGE}", "--search"], r"--search: .*no setting of .* fluency"),
        ([f"--model={LARGE}", "--sources=10M"], r"--sources: the config trains no encoder"),
    ],
)
def test_bad_input(arguments, message, refused):
    refused("plan", *arguments, message=message)
