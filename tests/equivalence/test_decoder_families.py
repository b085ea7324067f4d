"""The families of `decoder_families` against transformers: random weights, values off defaults.

To add a family, add its cases. LLaMA's own tests are in test_llama.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import LAYER, WHOLE, compiled, deviation, reloaded, same_parameters
from decoder_pair import Pair, run_torch, save_pair, torch_layers
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.language_model import RowSize, TokenExample, packed_batch
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.layer_traits import layer_traits
from mmqa_jax.models.llama import Llama
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.tasks.objectives import LanguageModelObjective
from mmqa_jax.weights.models.llama import publish_llama
from mmqa_jax.weights.published import load_published, write_published

LENGTH = 520  # short prompts hide mistakes in rotary positions
COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "max_position_embeddings": 640,
    "rms_norm_eps": 3e-4,
    "initializer_range": 0.08,
    "attn_implementation": "eager",
}
END = 11  # a token that ends answers
# Of families whose defaults are beyond this vocabulary.
TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_THETA = {"rope_type": "default", "rope_theta": 1234.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 3.0,
    "original_max_position_embeddings": 200,
    "beta_fast": 16.0,
}


class Case(NamedTuple):
    """A family's model: the prefix of its classes in transformers, and values of its config."""

    family: str
    values: Mapping[str, Any]


CASES = {
    "mistral": Case("Mistral", {"sliding_window": None, "rope_parameters": _THETA}),
    "mistral, window": Case("Mistral", {"sliding_window": 37, "head_dim": 10}),
    "ministral, some windows": Case(
        "Ministral",
        {
            "sliding_window": 19,
            "head_dim": 12,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "qwen2": Case("Qwen2", {"rope_parameters": _THETA, "tie_word_embeddings": True}),
    "qwen2, windows from layer 1, yarn": Case(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 50,
            "max_window_layers": 1,
            "rope_parameters": _YARN,
        },
    ),
    "qwen3": Case("Qwen3", {"head_dim": 12, "attention_bias": True, "rope_parameters": _THETA}),
    "qwen3, some windows, llama3 scaling": Case(
        "Qwen3",
        {
            "head_dim": 10,
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 6.0,
                "low_freq_factor": 0.5,
                "high_freq_factor": 5.0,
                "original_max_position_embeddings": 90,
            },
        },
    ),
    "smollm3": Case("SmolLM3", {"no_rope_layers": [1, 0, 0, 1], "mlp_bias": True, **TOKENS}),
    "smollm3, windows, dynamic": Case(
        "SmolLM3",
        {
            "no_rope_layer_interval": 3,
            "use_sliding_window": True,
            "sliding_window": 44,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 900.0, "factor": 2.0},
            **TOKENS,
        },
    ),
    "olmo2": Case("Olmo2", {"num_key_value_heads": 3, "rope_parameters": _THETA, **TOKENS}),
    "phi3": Case("Phi3", {"sliding_window": 60, "rope_parameters": _THETA, **TOKENS}),
    "phi3, a part of each head rotated": Case(
        "Phi3",
        {
            "hidden_size": 96,
            "rope_parameters": {**_THETA, "partial_rotary_factor": 0.75},
            **TOKENS,
        },
    ),
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 5.5,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _THETA,
        },
    ),
}


@functools.cache
def make_pair(name: str, folder: Path) -> Pair:
    torch.manual_seed(0)
    case = CASES[name]
    config = getattr(transformers, f"{case.family}Config")(**COMMON | dict(case.values))
    return save_pair(getattr(transformers, f"{case.family}ForCausalLM")(config), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(params=list(CASES))
def pair(request, folder):
    return make_pair(request.param, folder / request.param)


def tokens(rows: int = 2, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(1).integers(0, COMMON["vocab_size"], (rows, length))


def test_every_layer_and_the_logits_equal(pair):
    theirs, ours, _, forward = pair
    ids = tokens()
    outputs, want = torch_layers(theirs, ids)

    def each_layer(model, ids):
        return model.layer_outputs(model.embed(ids))

    np.testing.assert_allclose(compiled(ours, each_layer)(ids), outputs, **WHOLE)
    np.testing.assert_allclose(forward(ids, np.ones(ids.shape, bool)), want, **WHOLE)
    assert np.abs(want).max() > 1  # the comparison is of numbers that matter


def test_packed_rows_are_texts_alone(pair):
    """Two texts in a row that do not see each other, with positions of their own."""
    theirs, _, _, forward = pair
    ids, split = tokens(1), 200
    segment = np.arange(LENGTH) >= split
    positions = np.where(segment, np.arange(LENGTH) - split, np.arange(LENGTH))[None]
    got = forward(ids, (segment[:, None] == segment)[None], positions)
    np.testing.assert_allclose(got[:, :split], run_torch(theirs, ids[:, :split]), **WHOLE)
    np.testing.assert_allclose(got[:, split:], run_torch(theirs, ids[:, split:]), **WHOLE)


@pytest.mark.parametrize("scan", [False, True])
def test_the_engine_generates_and_scores_as_transformers(pair, scan):
    """Prompts longer than windows, with a common prefix; choices in branches of one prompt; beams."""
    theirs, _, folder, _ = pair
    sizes = EngineConfig(
        slots=3, length=192, buckets=(16, 64), prefill_tokens=64, block=32, scan_layers=scan
    )
    engine = Engine(load_published("llama", folder, unroll=1), end_ids=[END], config=sizes)
    ids = tokens(3, 150)
    head = ids[0, :70]
    prompts = [ids[0, :3], ids[0], np.concatenate([head, ids[1, :40]]), ids[2, :81], ids[0, :90]]
    requests = [Request(n, prompt, 12, logprobs=True) for n, prompt in enumerate(prompts)]
    for result in engine.generate(requests):
        prompt = torch.from_numpy(prompts[result.id])[None]
        found = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )[0]
        got = result.candidates[0]
        assert got.tokens == tuple(found[prompt.shape[1] :].tolist())
        want = log_probs(theirs, found, len(got.tokens))
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)

    choices = [ids[1, :4], ids[2, :25], ids[1, 60:61]]
    (scored,) = engine.score([Scoring(0, ids[0, :100], choices)])
    for choice, score in zip(choices, scored.scores, strict=True):
        whole = np.concatenate([ids[0, :100], choice])
        want = log_probs(theirs, torch.from_numpy(whole), len(choice))
        np.testing.assert_allclose(score.logprobs, want, atol=1e-4)

    (beams,) = engine.generate([Request(0, ids[2, :60], 8, n=3, beams=3)])
    for beam in beams.candidates:
        whole = torch.tensor([*ids[2, :60], *beam.tokens])
        want = log_probs(theirs, whole, len(beam.tokens)).sum()
        np.testing.assert_allclose(beam.total, want, atol=1e-4)


def log_probs(model: torch.nn.Module, ids: torch.Tensor, last: int) -> np.ndarray:
    """Of the last tokens of a text, each after what stands before it."""
    with torch.no_grad():
        logs = model(ids[None]).logits[0].log_softmax(-1)
    return logs[-last - 1 : -1].gather(1, ids[-last:, None])[:, 0].numpy()


def test_three_training_steps_are_torchs(pair):
    """Plain gradient descent on packed examples, each of which is a row of its own in torch."""
    theirs, ours, folder, _ = pair
    theirs = type(theirs).from_pretrained(folder, attn_implementation="eager").train()
    rng, size, rate = np.random.default_rng(5), RowSize(96, 48), 0.3
    graphdef, state = nnx.split(ours)
    objective = LanguageModelObjective(ours.config)

    @jax.jit
    @jax.value_and_grad
    def step(state, batch):
        return objective.loss(nnx.merge(graphdef, state), batch, jax.random.key(0))[0]

    for _ in range(3):
        examples = [
            TokenExample(rng.integers(0, 97, length).astype(np.int32), start)
            for length, start in ((96, 50), (40, 9), (50, 44))
        ]
        batch = packed_batch([examples[:1], examples[1:]], size)
        loss, gradient = step(state, jax.tree.map(jnp.asarray, batch))
        state = jax.tree.map(lambda x, dx: x - rate * dx, state, gradient)
        theirs.zero_grad()
        want = sum(their_loss(theirs, one) for one in examples)
        want = want / sum(one.targets for one in examples)
        want.backward()
        np.testing.assert_allclose(loss, want.item(), **LAYER)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter -= rate * parameter.grad
    got = publish_llama(ours.config, state).source
    assert got.specs().keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(got.read(name), parameter.detach(), **WHOLE, err_msg=name)


def their_loss(model: torch.nn.Module, example: TokenExample) -> torch.Tensor:
    ids = torch.from_numpy(example.tokens).long()
    logs = model(ids[None]).logits[0].log_softmax(-1)
    at = torch.arange(example.start, len(ids))
    return -logs[at - 1, ids[at]].sum()


def test_export_is_read_by_transformers_and_back(pair, tmp_path):
    theirs, ours, _, _ = pair
    write_published(tmp_path, publish_llama(ours.config, nnx.state(ours)), more=TOKENS)
    again = reloaded(type(theirs), tmp_path, attn_implementation="eager")
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name
    ids = tokens(1)
    np.testing.assert_array_equal(run_torch(again, ids), run_torch(theirs, ids))
    back = load_published("llama", tmp_path, unroll=1)
    assert dataclasses.replace(back.config, init_stddev=0.02) == dataclasses.replace(
        ours.config, init_stddev=0.02
    )
    same_parameters(back, ours)


def test_the_switches_of_a_case_matter(pair):
    """Without a family's switches the same tensors give something else, so that tests can fail."""
    _, ours, _, forward = pair
    plain = {"windows": (), "rotated": (), "rope_scaling": None, "attention_scale": None}
    plain |= {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0}
    config = ours.config
    if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
        del plain["rope_scaling"]  # up to the model's positions it is none
    for name, value in plain.items():
        if getattr(config, name) != value:
            changed = dataclasses.replace(config, **{name: value})
            model = nnx.eval_shape(lambda c=changed: Llama(c, rngs=nnx.Rngs(0)))
            other = nnx.merge(nnx.graphdef(model), nnx.state(ours))
            ids = tokens(1)
            mask = np.ones(ids.shape, bool)
            assert deviation(compiled(other, _forward)(ids, mask), forward(ids, mask)) > 1e-3


def _forward(model: Llama, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return model(ids, mask)


SIZES = {key: value for key, value in COMMON.items() if key != "attn_implementation"}
REFUSED = [
    ("qwen2", {"attention_bias": True}, "key 'attention_bias'"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is .* for each of 4 layers"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types is .*chunked"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "no sliding_window is in use"),
    ("qwen2", {"num_experts": 8}, "key 'num_experts'"),
    ("mistral", {"use_sliding_window": True}, "key 'use_sliding_window'"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected a whole number of at least"),
    ("mistral", {"layer_types": ["full_attention"] * 4}, "key 'layer_types'"),
    ("mistral", {"attention_bias": True}, "key 'attention_bias'"),
    ("llama", {"sliding_window": 4}, "key 'sliding_window'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supp"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "x": 1}}, "the key 'x'"),
    ("phi3", {"resid_pdrop": 0.1}, r"resid_pdrop is 0\.1"),
    ("phi3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supp"),
    ("qwen3", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .* for each of 4 layers"),
    ("olmo2", {"clip_qkv": 8.0}, "key 'clip_qkv'"),
    ("granite", {"num_local_experts": 8}, "key 'num_local_experts'"),
    ("gemma2", {}, "model_type is 'gemma2', expected one of llama, "),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_a_family_does_not_know_is_refused(family, change, message):
    with pytest.raises(UserError, match=message):
        LlamaConfig.from_hf({"model_type": family, **SIZES, **change})


def test_a_window_that_nothing_is_outside_of_is_none():
    """Mistral 7B v0.1 with the positions of its window has the programs of a LLaMA."""
    published = {"model_type": "mistral", **SIZES, "sliding_window": 640}
    config = LlamaConfig.from_hf(published)
    assert config.windows == ()
    shorter = LlamaConfig.from_hf(published | {"sliding_window": 100})
    assert shorter.windows == (100,) * 4
    assert layer_traits(shorter, 100).window is None
    assert (layer_traits(shorter, 101).window == 100).all()


def test_what_a_family_has_no_key_for_is_not_exported():
    config = LlamaConfig(qk_norm="head")
    with pytest.raises(UserError, match="qk_norm is 'head', for which LlamaForCausalLM has no key"):
        config.to_hf()
    with pytest.raises(UserError, match=r"model\.windows has 1 values"):
        LlamaConfig(windows=(3,))
    json.dumps(LlamaConfig(family="mistral").to_hf())
