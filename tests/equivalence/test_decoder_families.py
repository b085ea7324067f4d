"""The families of `decoder_families` against transformers: random weights, values off defaults.

To add a family, add its cases to decoder_cases.py. LLaMA's own tests are in test_llama.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from compare import (
    LAYER,
    WHOLE,
    compiled,
    descent,
    deviation,
    randomize,
    reloaded,
    same_parameters,
    with_config,
)
from decoder_cases import CASES, COMMON, LAYER_NORMS, LENGTH, NORM_EPS, THETA, TOKENS, YARN
from decoder_pair import Pair, run_torch, save_pair, torch_layers
from flax import nnx
from safetensors.torch import save_file

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.batches.texts import RowSize, TokenExample, packed_batch
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Result, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import RELATIVES, LlamaConfig
from mmqa_jax.models.llama.keys import publish_llama, to_rule_tensors
from mmqa_jax.models.llama.lora import LoraConfig, add_lora, merge_lora, peft_linears, peft_map
from mmqa_jax.models.llama.network import Llama, layer_traits
from mmqa_jax.tasks.language_model import LanguageModelObjective
from mmqa_jax.weights.formats.safetensors import ArraySource
from mmqa_jax.weights.keymap import load_into
from mmqa_jax.weights.published import load_published, write_published

END = 11  # a token that ends answers


@functools.cache
def make_pair(name: str, folder: Path) -> Pair:
    torch.manual_seed(0)
    case = CASES[name]
    kind = getattr(transformers, f"{case.family}ForCausalLM", None)
    made = kind.config_class if kind else getattr(transformers, f"{case.family}Config")
    kind = kind or transformers.LlamaForCausalLM  # whose code some families share
    return save_pair(kind(made(**COMMON | dict(case.values))), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(params=list(CASES))
def pair(request, folder):
    return make_pair(request.param, folder / request.param)


def tokens(rows: int = 1, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(1).integers(0, COMMON["vocab_size"], (rows, length))


def layers_and_logits(
    model: Llama, ids: jax.Array, segments: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One program for whole and packed rows, compiled once a case."""
    outputs = model.layer_outputs(model.embed(ids), None, positions, segments=segments)
    return outputs, model.logits(model.norm(outputs[-1]))


def whole_texts(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of `layers_and_logits` where each row is one text."""
    rows, length = ids.shape
    positions = np.broadcast_to(np.arange(length), (rows, length))
    return ids, np.zeros((rows, length), np.int32), positions


def test_every_layer_and_the_logits_equal(pair):
    theirs, ours, _, _ = pair
    ids = tokens()
    outputs, want = torch_layers(theirs, ids)
    got_outputs, got = compiled(ours, layers_and_logits)(*whole_texts(ids))
    np.testing.assert_allclose(got_outputs, outputs, **WHOLE)
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1  # the comparison is of numbers that matter


def test_packed_rows_are_texts_alone(pair):
    """Two texts in a row that do not see each other, with positions of their own."""
    theirs, ours, _, _ = pair
    ids, split = tokens(), 200
    segment = np.arange(LENGTH) >= split
    positions = np.where(segment, np.arange(LENGTH) - split, np.arange(LENGTH))
    both = (row[None] for row in (segment.astype(np.int32), positions))
    _, got = compiled(ours, layers_and_logits)(ids, *both)
    np.testing.assert_allclose(got[:, :split], run_torch(theirs, ids[:, :split]), **WHOLE)
    np.testing.assert_allclose(got[:, split:], run_torch(theirs, ids[:, split:]), **WHOLE)


# Few programs: one bucket, one segment of the cache. With more of both: `MANY`.
FEW = {"slots": 3, "length": 192, "buckets": (32,), "prefill_tokens": 64}
MANY = FEW | {"buckets": (16, 64)}
OF_MANY = "gemma2"
GEMMA4 = ("gemma4_text", "gemma4_text, heads alike, experts", "gemma4_text, E2B")
IN_CHUNKS = "llama4_text, of long chunks"
# Choices: branches of a prompt, with windows, scanned or not, and with rotations.
BRANCHING = (("gemma2", False), ("gemma2", True), ("gemma3_text", False), ("qwen3_5", False))
# Engines run the layer that the forward runs, and the model's own embeddings and logits. Code of
# their own have windows and caps (gemma2, with beams), layers that differ in rotation (gemma3_text)
# or have none (smollm3), sinks (gpt_oss), and rotations that are fitted to the longest text (longrope,
# in a test of its own); experts are given padding; layers of the gated delta rule have states. Scanned
# layers have their own code of windows, caps and rotations alone. An MLP of the same input as attention
# (cohere2), one without a gate (apertus) and queries of latents (deepseek_v3) are in the layer.
ENGINES = [
    *((name, scan) for name in ("gemma2", "gemma3_text") for scan in (False, True)),
    *((name, False) for name in ("smollm3, windows, dynamic", "qwen3_moe", "qwen3_5", *GEMMA4)),
    *((name, False) for name in ("glm4_moe", "lfm2", "lfm2_moe", "lfm3")),
    *((name, scan) for name in ("gpt_oss", IN_CHUNKS) for scan in (False, True)),
    ("llama4_text, every other layer a mixture", False),
    *(("cohere2", scan) for scan in (False, True)),
    ("apertus", False),
    *(("deepseek_v3", False), ("youtu", True)),
]


@pytest.mark.parametrize(("pair", "scan"), ENGINES, indirect=["pair"])
def test_the_engine_generates_and_scores_as_transformers(pair, request, scan):
    """Prompts longer than windows, with a common prefix; choices in branches of one prompt; beams."""
    theirs, _, folder, _ = pair
    name = request.node.callspec.params["pair"]
    several = name == OF_MANY and not scan  # buckets and segments are alike in both engines
    sizes = EngineConfig(**(MANY if several else FEW), scan_layers=scan)
    model = load_published("llama", folder, unroll=1, layers_apart=not scan)
    engine = Engine(model, end_ids=[END], config=sizes)
    ids = tokens(3, 150)
    head = ids[0, :70]
    prompts = [ids[0, :3], ids[0], np.concatenate([head, ids[1, :40]]), ids[2, :81], ids[0, :90]]
    requests = [Request(n, prompt, 12, logprobs=True) for n, prompt in enumerate(prompts)]
    for result in engine.generate(requests):
        same_answer(result, theirs, prompts[result.id])

    if (name, scan) not in BRANCHING:
        return
    choices = [ids[1, :4], ids[2, :25], ids[1, 60:61]]
    (scored,) = engine.score([Scoring(0, ids[0, :100], choices)])
    for choice, score in zip(choices, scored.scores, strict=True):
        whole = np.concatenate([ids[0, :100], choice])
        want = log_probs(theirs, torch.from_numpy(whole), len(choice))
        np.testing.assert_allclose(score.logprobs, want, atol=1e-4)

    if not several:  # so are beams
        return
    (beams,) = engine.generate([Request(0, ids[2, :60], 8, n=3, beams=3)])
    for beam in beams.candidates:
        whole = torch.tensor([*ids[2, :60], *beam.tokens])
        want = log_probs(theirs, whole, len(beam.tokens)).sum()
        np.testing.assert_allclose(beam.total, want, atol=1e-4)


def same_answer(result: Result, theirs: torch.nn.Module, prompt: np.ndarray) -> None:
    """Compares a greedy answer of up to 12 tokens, and their log-probabilities: one forward over
    prompt and answer shows after each token which one transformers takes next."""
    got = result.candidates[0]
    assert len(got.tokens) == 12 or got.tokens[-1] == END
    assert END not in got.tokens[:-1]
    logs = next_log_probs(theirs, torch.tensor([*prompt, *got.tokens]), len(got.tokens))
    assert got.tokens == tuple(logs.argmax(-1).tolist())
    want = logs[range(len(got.tokens)), got.tokens]
    np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


@pytest.mark.parametrize("pair", ["phi3, longrope"], indirect=True)
def test_longrope_of_an_engine_is_that_of_its_longest_text(pair):
    """More tokens than in pretraining: the long factors, as transformers has them for such texts."""
    theirs, _, folder, _ = pair
    ours = load_published("llama", folder, unroll=1)  # an engine frees the stacks of its model
    scaling = ours.config.rope_scaling
    assert ours.config.within(400).rope_scaling.long_factor == scaling.short_factor  # fewer
    config = copy.deepcopy(theirs.config)
    config.original_max_position_embeddings = 100
    config.rope_parameters["original_max_position_embeddings"] = 100
    longer = type(theirs)(config).eval()
    longer.load_state_dict(theirs.state_dict())
    scaling = dataclasses.replace(scaling, original_positions=100)
    model = with_config(ours, dataclasses.replace(ours.config, rope_scaling=scaling))
    engine = Engine(model, end_ids=[END], config=EngineConfig(**FEW))
    ids = tokens(2, 150)
    for result in engine.generate(
        [Request(n, ids[n, : 150 - n], 12, logprobs=True) for n in (0, 1)]
    ):
        same_answer(result, longer, ids[result.id, : 150 - result.id])


def next_log_probs(model: torch.nn.Module, ids: torch.Tensor, last: int) -> torch.Tensor:
    """[last, V] in the places of the last tokens of a text, each after what stands before it."""
    with torch.no_grad():
        return model(ids[None]).logits[0, -last - 1 : -1].log_softmax(-1)


def log_probs(model: torch.nn.Module, ids: torch.Tensor, last: int) -> np.ndarray:
    """Of the last tokens of a text, each after what stands before it."""
    return next_log_probs(model, ids, last).gather(1, ids[-last:, None])[:, 0].numpy()


@pytest.mark.parametrize("layout", ["as published", "transformers 5"], ids="gemma3_text, {}".format)
def test_gemma3_with_a_vision_tower_is_its_language_model(tmp_path, caplog, layout):
    """Read with a warning that names what is left out."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = COMMON | dict(CASES["gemma3_text"].values)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, attn_implementation="eager"
    )
    theirs = randomize(transformers.Gemma3ForConditionalGeneration(config), 0, 0.05)
    theirs.save_pretrained(tmp_path)
    if layout == "as published":
        tensors = {
            key.replace("model.language_model.", "language_model.model.", 1)
            .replace("model.vision_tower.", "vision_tower.", 1)
            .replace("model.multi_modal_projector.", "multi_modal_projector.", 1): tensor
            for key, tensor in theirs.state_dict().items()
            if key != "lm_head.weight"
        }
        save_file(tensors, tmp_path / "model.safetensors")
    ours = load_published("llama", tmp_path, unroll=1)
    assert ours.config.family == "gemma3_text"
    assert "its multi_modal_projector and vision_tower are left out" in caplog.text
    ids = tokens()
    _, got = compiled(ours, layers_and_logits)(*whole_texts(ids))
    np.testing.assert_allclose(got, run_torch(theirs, ids), **WHOLE)


def test_llama4_with_a_vision_tower_is_its_language_model(tmp_path, caplog):
    """As published; `attn_temperature_tuning` is a number there."""
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {key: value for key, value in COMMON.items() if key != "attn_implementation"}
    text |= dict(CASES["llama4_text"].values)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    theirs = randomize(transformers.Llama4ForConditionalGeneration(config), 0, 0.05)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    published = json.loads(file.read_text())
    published["text_config"]["attn_temperature_tuning"] = 4
    file.write_text(json.dumps(published))
    ours = load_published("llama", tmp_path, unroll=1)
    assert "its multi_modal_projector and vision_model are left out" in caplog.text
    ids = tokens()
    _, got = compiled(ours, layers_and_logits)(*whole_texts(ids))
    np.testing.assert_allclose(got, run_torch(theirs.language_model, ids), **WHOLE)


# A case of each kind of operation that is differentiated: norms of heads, biases and experts; norms
# behind the parts and caps; the gated delta rule, convolutions and gates, those of heads; a router of
# sigmoids, norms of whole queries of which a part is rotated; latents, groups of experts.
# Windows, rotations and multipliers have no parameters.
TRAINED = (
    "qwen3_moe",
    "gemma2",
    "gpt_oss",
    "llama4_text",
    "qwen3_5",
    *GEMMA4[1:],
    "nemotron",
    "glm4_moe",
    "lfm2",
    "lfm3",
    "minimax_m2",
    "apertus",
    "deepseek_v2",
    "deepseek_v3",
)


@pytest.mark.parametrize("pair", TRAINED, indirect=True)
def test_three_training_steps_are_torchs(pair, request):
    """Plain gradient descent on packed examples, each of which is a row of its own in torch."""
    theirs, ours, folder, _ = pair
    theirs = type(theirs).from_pretrained(folder, attn_implementation="eager").train()
    rng, size = np.random.default_rng(5), RowSize(96, 48)
    # Five layers of undivided scores enlarge what is rounded in longer steps.
    rate = 0.03 if request.node.callspec.params["pair"] == GEMMA4[2] else 0.3
    graphdef, state = nnx.split(ours)
    step = descent(LanguageModelObjective(ours.config), graphdef, rate)
    for _ in range(3):
        examples = [
            TokenExample(rng.integers(0, 97, length).astype(np.int32), start)
            for length, start in ((96, 50), (40, 9), (50, 44))
        ]
        batch = packed_batch([examples[:1], examples[1:]], size)
        loss, state = step(state, batch)
        theirs.zero_grad()
        want = sum(their_loss(theirs, example) for example in examples)
        want = want / sum(example.targets for example in examples)
        want.backward()
        np.testing.assert_allclose(loss, want.item(), **LAYER)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter -= rate * parameter.grad
    published = theirs.state_dict()  # with buffers of layers that are published too
    named = (*theirs.named_parameters(), *theirs.named_buffers())
    arrays = {name: x.detach().numpy() for name, x in named if name in published}
    # transformers keeps all experts of a layer in one parameter, files do not.
    want = to_rule_tensors(ArraySource(arrays), ours.config)
    got = to_rule_tensors(publish_llama(ours.config, state).source, ours.config)
    assert got.specs().keys() == want.specs().keys()
    for name in want.specs():
        np.testing.assert_allclose(got.read(name), want.read(name), **WHOLE, err_msg=name)


@pytest.mark.parametrize("pair", ["qwen3_5", "starcoder2", "lfm2"], indirect=True)
def test_three_steps_of_lora_are_those_of_pefts_names(pair):
    """Of attention's projections and MLPs of layers of several kinds; A and B in PEFT's tensors."""
    theirs, ours, _, _ = pair
    targets = [x for x in ("k", "v", "out", "gate", "up", "down") if x in ours.config.linears]
    lora = LoraConfig(2, 6.0, tuple(targets), base="float32")
    model = nnx.merge(*nnx.split(ours))
    add_lora(model, lora, rngs=nnx.Rngs(0))
    key_map, rate, torch_rng = peft_map(ours.config, lora.targets), 0.3, torch.manual_seed(3)
    linears = peft_linears(ours.config).items()
    ends = tuple(f".{name}" for name, linear in linears if linear in lora.targets)
    added = {
        name: [
            torch.randn(shape, generator=torch_rng).mul_(0.1).requires_grad_()
            for shape in ((2, linear.in_features), (linear.out_features, 2))
        ]
        for name, linear in theirs.named_modules()
        if name.endswith(ends) and not any(part in name for part in (".linear_attn.", ".conv."))
    }

    def in_peft() -> ArraySource:
        pairs = [
            (f"base_model.model.{name}.lora_{letter}.weight", x.detach().numpy().copy())
            for name, ab in added.items()
            for letter, x in zip("AB", ab, strict=True)
        ]
        return ArraySource(dict(pairs))

    graphdef, state, rest = nnx.split(model, lambda path, _: path[-1] in ("lora_a", "lora_b"), ...)
    state = load_into(state, key_map, in_peft())
    ids = tokens(1, 40)

    def loss(state: nnx.State) -> jax.Array:
        logs = jax.nn.log_softmax(nnx.merge(graphdef, state, rest)(ids)[0, :-1])
        return -jax.numpy.take_along_axis(logs, ids[0, 1:, None], 1).mean()

    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(3):
        got, gradient = step(state)
        state = jax.tree.map(lambda x, dx: x - rate * dx, state, gradient)
        weights = {
            f"{name}.weight": theirs.get_submodule(name).weight.detach() + 3 * (b @ a)
            for name, (a, b) in added.items()
        }
        logits = torch.func.functional_call(theirs, weights, (torch.from_numpy(ids),)).logits[0]
        want = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(ids[0, 1:]))
        want.backward()
        np.testing.assert_allclose(got, want.item(), **LAYER)
        with torch.no_grad():
            for x in (x for ab in added.values() for x in ab):
                x -= rate * x.grad
                x.grad = None
    want = flatten_named(load_into(state, key_map, in_peft()))
    for name, x in flatten_named(state).items():
        np.testing.assert_allclose(x, want[name], **WHOLE, err_msg=name)
    whole = merge_lora(nnx.merge(graphdef, state, rest))
    np.testing.assert_allclose(whole(ids), nnx.merge(graphdef, state, rest)(ids), **WHOLE)


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


_FULL = {"layer_types": ["full_attention"] * 2}
# What each switch changes in a config of transformers; every switch, and rotations that are scaled.
SWITCHES = {
    "mistral, window": [{"sliding_window": None}],
    "qwen2, windows from layer 1, yarn": [
        {"use_sliding_window": False},
        {"rope_parameters": THETA | {"rope_theta": 3000.0}},
    ],
    "qwen3, some windows, llama3 scaling": [
        _FULL,
        {"rope_parameters": THETA | {"rope_theta": 5000.0}},
    ],
    "qwen3_moe": [{"norm_topk_prob": False}],
    "glm4_moe": [{"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}],
    "gpt_oss": [_FULL, {"swiglu_limit": 7.0}],
    "deepseek_v2": [
        {"topk_method": "greedy"},
        {"routed_scaling_factor": 1.0},
        {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.0}},
    ],
    "deepseek_v3": [{"n_group": 1, "topk_group": 1}, {"rope_parameters": THETA}],
    "qwen3_5": [{"rope_parameters": THETA | {"partial_rotary_factor": 1.0}}],
    "qwen3_next": [{"norm_topk_prob": True}],
    "llama4_text": [
        {"no_rope_layers": [1, 1, 1]},
        {"attention_chunk_size": 600},
        {"attn_temperature_tuning": False},
        {"use_qk_norm": False},
    ],
    "smollm3": [{"no_rope_layers": [1, 1]}],
    "phi3, longrope": [{"rope_parameters": THETA | {"rope_theta": 2345.0}}],
    "granite": [
        {"embedding_multiplier": 1.0},
        {"attention_multiplier": 8**-0.5},
        {"residual_multiplier": 1.0},
        {"logits_scaling": 1.0},
    ],
    "cohere": [{"logit_scale": 1.0}],
    "cohere2": [_FULL, {"logit_scale": 1.0}],
    "gemma2": [
        _FULL,
        {"query_pre_attn_scalar": 12},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
    ],
    GEMMA4[0]: [
        {"final_logit_softcapping": None},
        {"sliding_window": 200},
        {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), THETA)},
    ],
    "gemma3_text": [
        _FULL,
        {"query_pre_attn_scalar": 12},
        {"final_logit_softcapping": None},
        {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), THETA)},
    ],
}


@pytest.mark.parametrize("pair", SWITCHES, indirect=True)
def test_the_switches_of_a_case_matter(pair, request):
    """Without a family's switches the same tensors give something else, so that tests can fail."""
    theirs, ids = pair.theirs, tokens(1, 120)
    name = request.node.callspec.params["pair"]
    want = run_torch(theirs, ids)
    for change in SWITCHES[name]:
        plain = type(theirs)(theirs.config_class(**COMMON | dict(CASES[name].values) | change))
        plain.load_state_dict(theirs.state_dict())
        assert deviation(run_torch(plain.eval(), ids), want) > 1e-3, change


SIZES = {key: value for key, value in COMMON.items() if key != "attn_implementation"}
_DEEP = {"first_k_dense_replace": 1}
REFUSED = [
    ("qwen2", {"attention_bias": True}, "key 'attention_bias'"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is .* for each of 2 layers"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types is .*chunked"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window is in use"),
    ("qwen2", {"num_experts": 8}, "key 'num_experts'"),
    ("qwen2", {"sliding_windows": 8}, "key 'sliding_windows' .*, unlike 'sliding_window', and may"),
    ("mistral", {"use_sliding_window": True}, "key 'use_sliding_window'"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected a whole number of at least"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "key 'layer_types'"),
    ("mistral", {"attention_bias": True}, "key 'attention_bias'"),
    ("llama", {"sliding_window": 4}, "key 'sliding_window'"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "lacks its `short_factor",
    ),
    ("llama", {"rope_scaling": {"rope_type": "axial"}}, "'axial' is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "x": 1}}, "the key 'x'"),
    ("phi3", {"resid_pdrop": 0.1}, r"resid_pdrop is 0\.1"),
    (
        "phi3",
        {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
        "short_factor is .* for each of the 4 pairs",
    ),
    ("qwen3", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is .* for each of 2 layers"),
    ("olmo2", {"clip_qkv": 8.0}, "key 'clip_qkv'"),
    ("granite", {"num_local_experts": 8}, "key 'num_local_experts'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma2", {"sliding_window": None}, "no sliding_window is in use"),
    (
        "gemma2",
        {"attn_logit_softcapping": 0.0},
        r"attention_cap is 0\.0: expected a number above 0",
    ),
    ("gemma2", {"sliding_window_pattern": 6}, "key 'sliding_window_pattern'"),
    ("gemma2", {"hidden_activation": "mish"}, "hidden_activation"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention is scaled",
    ),
    ("gemma4_text", {"num_kv_shared_layers": 1}, r"model\.borrowers is 1: expected so many"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ("gemma4_text", {"global_head_dim": 0}, "global_head_dim is 0, expected a whole number"),
    ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is "),
    (
        "gemma4_text",
        {"per_layer_config": {"1": {"head_dim": "8"}}},
        "expected whole numbers from 1",
    ),
    ("gemma4_text", {"layer_types": ["sliding_attention"] * 2}, "layer_types ends with sliding"),
    ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block is true, and num_experts"),
    ("gemma4_text", {"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input is 5"),
    ("gemma4_text", {"hidden_size_per_layer_input": -1}, "side is -1: expected a width from 1"),
    ("gemma4_text", {"rope_scaling": {"type": "linear"}}, "rope_scaling is {'type': 'linear'}"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], .* \(only \[\]\)"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "key 'shared_expert_intermediate_size'"),
    ("qwen3_moe", {"output_router_logits": True}, "set output_router_logits to false"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts is 0, expected a whole number of at least 1"),
    ("qwen3_moe", {"num_experts": 4}, "active_experts is 8: expected 1 to model.experts = 4"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha is 1\.5"),
    ("gpt_oss", {"swiglu_limit": 0.0}, r"gate_limit is 0\.0: expected a number above 0"),
    ("gpt_oss", {"mlp_bias": False}, "key 'mlp_bias'"),
    (
        "qwen3_5_text",
        {"layer_types": ["sliding_attention"] * 2},
        "layer_types is .*, expected linear_attention or full_attention for each of 2 layers",
    ),
    ("qwen3_5_text", {"output_gate_type": "swish"}, "output_gate_type is 'swish'"),
    ("qwen3_5_text", {"linear_num_value_heads": 24}, "delta.key_heads is 16: expected a divisor"),
    ("qwen3_5_text", {"num_experts": 8}, "key 'num_experts'"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("llama4_text", {"moe_layers": [2]}, r"moe_layers is \[2\], expected numbers .* below 2"),
    ("llama4_text", {"interleave_moe_layer_step": 3}, "moe_layers is None, .* one at least"),
    (
        "llama4_text",
        {"layer_types": ["full_attention"] * 2},
        "layer_types is .* expected .*chunked",
    ),
    ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    ("llama4_text", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
    ("glm4_moe", {"n_group": 2}, "n_group is 2"),
    ("lfm2", {**NORM_EPS, "conv_bias": True}, "conv_bias is True"),
    (
        "lfm2",
        {**NORM_EPS, "layer_types": ["linear_attention"] * 2},
        "layer_types is .*, expected conv or full",
    ),
    (
        "lfm2_moe",
        {**NORM_EPS, "num_dense_layers": 1, "conv_L_cache": 1},
        "conv_taps is 1: expected",
    ),
    ("glm4_moe", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window is in use"),
    ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
    ("cwm", {"layer_types": ["chunked_attention"] * 2}, "layer_types is .*chunked"),
    ("internlm3", {"qkv_bias": True}, "qkv_bias is True"),
    ("iquestcoder", {"clip_qkv": 6.0}, r"clip_qkv is 6\.0"),
    ("hyperclovax", {"use_post_norm": False}, "use_post_norm is False"),
    ("hyperclovax", {"logits_scaling": 0.0}, r"logits_scaling is 0\.0, expected more"),
    ("granite_swa", {"layer_rope_theta": [5.0, 7.0]}, r"layer_rope_theta is .* 0 or one other"),
    ("granite_swa", {"layer_rope_theta": [5.0]}, "layer_rope_theta is .* for each of 2 layers"),
    ("mellum", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types is .*, expected dense"),
    ("hy_v3", {"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types is 2, expected less than"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1"),
    ("exaone_moe", {"n_group": 2}, "n_group is 2"),
    ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax'"),
    ("deepseek_v3", {**_DEEP, "attention_bias": True}, "attention_bias is True"),
    ("deepseek_v3", {**_DEEP, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("deepseek_v3", {**_DEEP, "n_group": 3}, "expert_groups is 3: expected a divisor of model.exp"),
    ("deepseek_v3", {**_DEEP, "topk_group": 9}, "active_groups is 9: expected 1 to .* = 8"),
    ("deepseek_v3", {**_DEEP, "qk_rope_head_dim": 33}, "turning 33: expected even numbers"),
    ("deepseek_v32", {}, "model_type is 'deepseek_v32', expected one of llama, .*, qwen3_moe"),
    ("mpt", {}, "model_type is 'mpt', expected one of llama, "),
    ("cohere", {**LAYER_NORMS, "use_qk_norm": True}, "use_qk_norm is True"),
    ("cohere", {**LAYER_NORMS, "logit_scale": 0.0}, r"logit_scale is 0\.0, expected more"),
    ("stablelm", {**LAYER_NORMS, "qk_layernorm": True}, "qk_layernorm is True"),
    ("apertus", {"post_norm": True}, "post_norm is True"),
    ("llama", {"hidden_act": "xielu"}, "hidden_act"),
    ("gemma", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("gemma3n", {}, "model_type is 'gemma3n', expected one of llama, "),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_a_family_does_not_know_is_refused(family, change, message):
    with pytest.raises(UserError, match=message):
        LlamaConfig.from_hf({"model_type": family, **SIZES, **change})


@pytest.mark.parametrize("layout", ["in memory", "published"], ids="qwen3_moe, {}".format)
def test_both_layouts_of_experts_are_read(layout, folder, tmp_path):
    """All experts of a layer in one tensor, as transformers 5 computes, or each in its own, beside
    the keys that the hub's config.json has."""
    theirs, ours, saved, _ = make_pair("qwen3_moe", folder / "qwen3_moe")
    config = json.loads((saved / "config.json").read_text())
    if layout == "in memory":
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    else:
        (tmp_path / "model.safetensors").symlink_to(saved / "model.safetensors")
        config["num_experts"] = config.pop("num_local_experts")
        config |= {"max_window_layers": 48, "router_aux_loss_coef": 0.001}
    (tmp_path / "config.json").write_text(json.dumps(config))
    same_parameters(load_published("llama", tmp_path, unroll=1), ours)


def test_kimi_k2_is_read_and_written_as_deepseek_v3(folder, tmp_path):
    theirs, ours, saved, _ = make_pair("deepseek_v3", folder / "deepseek_v3")
    published = json.loads((saved / "config.json").read_text())
    published |= {"model_type": "kimi_k2", "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "model.safetensors").symlink_to(saved / "model.safetensors")
    kimi = load_published("llama", tmp_path, unroll=1)
    same_parameters(kimi, ours)
    out = tmp_path / "out"
    write_published(out, publish_llama(kimi.config, nnx.state(kimi)), more=TOKENS)
    again = type(theirs).from_pretrained(out, attn_implementation="eager")
    ids = tokens(1, 30)
    assert deviation(run_torch(again, ids), run_torch(theirs, ids)) == 0


def test_a_window_that_nothing_is_outside_of_is_none():
    """Mistral 7B v0.1 with the positions of its window has the programs of a LLaMA."""
    published = {"model_type": "mistral", **SIZES, "sliding_window": 640}
    config = LlamaConfig.from_hf(published)
    assert config.windows == ()
    shorter = LlamaConfig.from_hf(published | {"sliding_window": 100})
    assert shorter.windows == (100,) * 2
    assert layer_traits(shorter, 100).window is None
    assert (layer_traits(shorter, 101).window == 100).all()


def test_what_a_family_has_no_key_for_is_not_exported():
    config = LlamaConfig(qk_norm="head")
    with pytest.raises(UserError, match="qk_norm is 'head', for which LlamaForCausalLM has no key"):
        config.to_hf()
    with pytest.raises(UserError, match=r"model\.windows has 1 values"):
        LlamaConfig(windows=(3,))
    json.dumps(LlamaConfig(family="mistral").to_hf())


GEMMA4_31B = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True,
    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
    "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
    "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024, "tie_word_embeddings": True, "use_double_wide_mlp": False,
    "vocab_size": 262144,
}  # fmt: skip
# Of google/gemma-4-31B and gemma-4-26B-A4B; the latter's parameters are 25.2e9.
GEMMA4_26B = GEMMA4_31B | {
    "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "intermediate_size": 2112,
    "layer_types": GEMMA4_31B["layer_types"][:30], "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip


# Of google/gemma-4-12B, with the keys of what it has not; of gemma-4-E2B and E4B.
GEMMA4_12B = GEMMA4_31B | {
    "hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 1, "intermediate_size": 15360,
    "layer_types": GEMMA4_31B["layer_types"][:48], "model_type": "gemma4_unified_text",
    "moe_intermediate_size": None, "num_experts": None, "top_k_experts": None,
    "use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GEMMA4_E4B = GEMMA4_31B | {
    "hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_global_key_value_heads": None, "intermediate_size": 10240,
    "layer_types": GEMMA4_31B["layer_types"][:42], "attention_k_eq_v": False,
    "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256, "sliding_window": 512,
    "vocab_size_per_layer_input": 262144, "max_position_embeddings": 131072,
}  # fmt: skip
GEMMA4_E2B = GEMMA4_E4B | {
    "hidden_size": 1536, "num_hidden_layers": 35, "num_key_value_heads": 1,
    "intermediate_size": 6144, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published", "parameters"),
    [
        *(("gemma4_31b", GEMMA4_31B, 30.7e9), ("gemma4_26b_a4b", GEMMA4_26B, 25.2e9)),
        *(("gemma4_12b", GEMMA4_12B, 11.9e9), ("gemma4_e4b", GEMMA4_E4B, 7.46e9)),
        ("gemma4_e2b", GEMMA4_E2B, 4.63e9),
    ],
)
def test_gemma4s_presets_have_the_published_sizes(name, published, parameters):
    config = RELATIVES[name]()
    assert LlamaConfig.from_hf(published) == config
    shapes = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert abs(count - parameters) < 0.05e9


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("lfm3_17b", "Lfm3"), ("granite_swash_2b", "GraniteSWA"), ("cwm_32b", "Cwm")),
        *(("glm4_9b_chat", "Glm"), ("qwen15_moe_a27b", "Qwen2Moe")),
        ("solar_open_100b", "SolarOpen"),
    ],
)
def test_presets_of_a_familys_first_model_are_transformers_defaults(name, kind):
    published = getattr(transformers, f"{kind}Config")().to_dict()
    assert LlamaConfig.from_hf(published) == RELATIVES[name]()


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("cwm_32b", 32), ("glm4_9b_chat", 9.4), ("qwen15_moe_a27b", 14.3), ("hy3", 295)),
        *(("minimax_m2", 230), ("trinity_nano", 6), ("trinity_mini", 26)),
        *(("deepseek_v2_lite", 15.7), ("deepseek_v2", 236), ("deepseek_v3", 671)),
        *(("kimi_k2", 1040), ("glm47_flash", 30), ("youtu_2b", 1.96)),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    shapes = nnx.state(nnx.eval_shape(lambda: Llama(RELATIVES[name](), rngs=nnx.Rngs(0))))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    np.testing.assert_allclose(count / 1e9, billions, rtol=0.025)
