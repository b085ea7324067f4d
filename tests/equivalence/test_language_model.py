"""Training of a language model against transformers: packed and unpacked losses, LoRA."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import copied, randomize
from flax import nnx

from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.batches.texts import RowSize, TokenExample, packed_batch
from mmqa_jax.models.llama.keys import publish_llama
from mmqa_jax.models.llama.lora import LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.tasks import language_model
from mmqa_jax.tasks.language_model import LanguageModelObjective, target_log_probs
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.state import TrainState, abstract_state, make_step, of_update, split_model
from mmqa_jax.weights.published import load_published, write_published

SIZE = RowSize(48, 24)
LORA = LoraConfig(rank=3, alpha=7.0, targets=("q", "v", "down"))
RNG = np.random.default_rng(5)
# Lengths and first targets: one alone fills a row, the others share rows.
EXAMPLES = [
    TokenExample(RNG.integers(0, 89, length).astype(np.int32), start)
    for length, start in ((48, 30), (11, 4), (20, 19), (9, 1), (7, 3))
]
PACKED = [[EXAMPLES[0]], [EXAMPLES[1], EXAMPLES[2], EXAMPLES[3]], [EXAMPLES[4]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """SmolLM2's kind: grouped heads, tied embeddings; and ours from its checkpoint."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=89, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=80, num_hidden_layers=3, max_position_embeddings=64,
        tie_word_embeddings=True, rope_theta=1234.5, attn_implementation="eager",
    )  # fmt: skip
    theirs = randomize(transformers.LlamaForCausalLM(config), 0, 0.05)
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, load_published("llama", folder, unroll=1)


def their_loss(model, examples) -> torch.Tensor:
    """The mean over all targets, every example in a row of its own, labels -100 elsewhere."""
    longest = max(len(example.tokens) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        tokens = torch.tensor(example.tokens, dtype=torch.long)
        ids[row, : len(tokens)] = tokens
        labels[row, example.start : len(tokens)] = tokens[example.start :]
        mask[row, : len(tokens)] = 1
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_and_gradient(task: LanguageModelObjective, graphdef: nnx.GraphDef, state, batch):
    def loss(state):
        return task.loss(nnx.merge(graphdef, state), batch, None)[0]

    return jax.value_and_grad(loss)(state)


def our_loss(model: Llama, rows, lora: LoraConfig | None = None):
    """The task's loss, and its gradient by parameter name."""
    task = LanguageModelObjective(model.config, lora)
    with jax.default_matmul_precision("highest"):
        value, gradient = loss_and_gradient(task, *nnx.split(model), packed_batch(rows, SIZE))
    return float(value), {name: np.asarray(x) for name, x in flatten_named(gradient).items()}


def test_packed_unpacked_and_transformers_losses_are_the_same(pair):
    theirs, ours = pair
    want = float(their_loss(theirs, EXAMPLES))
    packed, gradient = our_loss(ours, PACKED)
    unpacked, gradient_alone = our_loss(ours, [[example] for example in EXAMPLES])
    np.testing.assert_allclose(packed, want, atol=2e-6)
    np.testing.assert_allclose(unpacked, want, atol=2e-6)
    for name, x in gradient.items():
        np.testing.assert_allclose(x, gradient_alone[name], atol=1e-6, err_msg=name)
    # The embedding table's gradient is torch's too: through inputs and the tied head.
    theirs.zero_grad()
    their_loss(theirs, EXAMPLES).backward()
    grad = theirs.model.embed_tokens.weight.grad.numpy()
    np.testing.assert_allclose(gradient["tokens/table"], grad, atol=2e-6)


def test_a_batch_in_parts_has_the_gradient_of_the_whole_batch(pair):
    """Rows of few targets and of many, so that the mean of the parts' own means would differ."""
    model = pair[1]
    task = LanguageModelObjective(model.config)
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    optimizer, schedule = make_optimizer(OptimizerOptions(), steps=10)
    rows = [*PACKED, [EXAMPLES[2]]]
    batch = jax.device_put(packed_batch(rows, SIZE))
    split, init, found = split_model(task, 0), jax.jit(optimizer.init), []
    abstract = abstract_state(split, optimizer, mesh, DEFAULT_RULES)
    for accumulate in (1, 4):
        step = make_step(
            task, split, optimizer, schedule, seed=0, accumulate=accumulate, abstract=abstract,
            mesh=mesh,
        )  # fmt: skip
        params = jax.tree.map(copied, nnx.state(model, nnx.Param))
        start = TrainState(jnp.zeros((), jnp.int32), params, init(params), split.frozen)
        state, metrics = step.begin(start), []
        with jax.default_matmul_precision("highest"):
            for number in range(accumulate):
                part = {name: x[number::accumulate] for name, x in batch.items()}
                state, values = step(state, part)
                metrics.append(jax.device_get(values))
        moments = {k: np.asarray(x) for k, x in flatten_named(state.optimizer).items()}
        found.append((of_update(metrics), moments))
    (whole, moments), (parts, moments_of_parts) = found
    assert whole["targets"] == sum(example.targets for row in rows for example in row)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6, err_msg=name)
    assert any("mu" in name for name in moments)  # the gradient, but for a factor
    for name, x in moments.items():
        np.testing.assert_allclose(moments_of_parts[name], x, rtol=0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("parts", [2, 5])
def test_logits_in_parts_change_no_loss_and_no_gradient(pair, monkeypatch, parts):
    """Targets that do not divide into the parts are padded; no array holds all logits."""
    model = pair[1]
    want, wanted = our_loss(model, PACKED)
    batch = packed_batch(PACKED, SIZE)
    rows, targets = batch["target_ids"].shape
    logits = rows * targets * model.config.vocab_size
    monkeypatch.setattr(language_model, "_LOGITS_BYTES", -(-4 * logits // parts))
    task, (graphdef, state) = LanguageModelObjective(model.config), nnx.split(model)

    def loss(state):
        return task.loss(nnx.merge(graphdef, state), batch, None)[0]

    traced = jax.jit(jax.value_and_grad(loss)).trace(state)
    sizes = [math.prod(map(int, shape.split(","))) for shape in
             re.findall(r"f32\[([\d,]+)\]", str(traced.jaxpr))]  # fmt: skip
    assert logits not in sizes
    with jax.default_matmul_precision("highest"):
        got, gradient = jax.jit(jax.value_and_grad(loss))(state)
    np.testing.assert_allclose(float(got), want, rtol=1e-6)
    for name, x in flatten_named(gradient).items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=1e-7, err_msg=name)


def test_the_log_probability_of_every_target(pair):
    """In a packed row as in transformers' logits of the example alone."""
    theirs, ours = pair
    batch = packed_batch(PACKED, SIZE)
    with jax.default_matmul_precision("highest"):
        got = np.asarray(jax.jit(target_log_probs)(ours, batch))
    for row, examples in enumerate(PACKED):
        for number, example in enumerate(examples, start=1):
            ids = torch.tensor(example.tokens, dtype=torch.long)[None]
            with torch.no_grad():
                logs = theirs(ids).logits[0].log_softmax(-1).numpy()
            positions = np.arange(example.start, len(example.tokens))
            want = logs[positions - 1, example.tokens[positions]]
            at = batch["target_segments"][row] == number
            np.testing.assert_allclose(got[row, at], want, atol=1e-5)


def with_lora(model: Llama) -> Llama:
    """The model with additions that are not zero."""
    graphdef, state = nnx.split(model)
    added = nnx.merge(graphdef, jax.tree.map(copied, state))
    add_lora(added, LORA, rngs=nnx.Rngs(2))
    for name in LORA.targets:
        linear = getattr(added.layers, name)
        drawn = np.random.default_rng(7).normal(0, 0.1, linear.lora_b.shape)
        linear.lora_b.set_value(jax.device_put(drawn.astype(np.float32)))
    return added


def their_linear(layer, name: str) -> torch.nn.Linear:
    attention = {"q": "q_proj", "v": "v_proj"}
    return getattr(layer.self_attn, attention[name]) if name in attention else layer.mlp.down_proj


def test_lora_is_the_plain_restatement(pair, tmp_path):
    """W + alpha / r B A in torch's weights, loss and gradients of A and B; and merged, exported."""
    theirs, ours = pair
    model = with_lora(ours)
    theirs = transformers.LlamaForCausalLM(theirs.config)
    theirs.load_state_dict(pair[0].state_dict())
    added = {}
    for number, layer in enumerate(theirs.model.layers):
        for name in LORA.targets:
            own = getattr(model.layers, name)
            ab = [torch.tensor(np.asarray(getattr(own, f"lora_{x}")[...])[number]) for x in "ab"]
            added[name, number] = [x.requires_grad_() for x in ab]
            linear = their_linear(layer, name)
            delta = LORA.alpha / LORA.rank * (ab[0] @ ab[1]).T
            weight = linear.weight.detach() + delta
            del linear.weight
            linear.weight = weight
    loss = their_loss(theirs, EXAMPLES)
    loss.backward()
    value, gradient = our_loss(model, PACKED, LORA)
    np.testing.assert_allclose(value, loss.item(), atol=2e-6)
    for (name, number), (a, b) in added.items():
        for x, want in (("a", a), ("b", b)):
            got = gradient[f"layers/{name}/lora_{x}"][number]
            np.testing.assert_allclose(got, want.grad.numpy(), atol=2e-6)
    merged = merge_lora(model)
    np.testing.assert_allclose(our_loss(merged, PACKED)[0], loss.item(), atol=2e-6)
    write_published(tmp_path / "merged", publish_llama(merged.config, nnx.state(merged)))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(float(their_loss(again, EXAMPLES)), loss.item(), atol=2e-6)


def test_lora_starts_as_its_base(pair):
    """The same loss, on which A has no influence yet: B is 0."""
    _, ours = pair
    graphdef, state = nnx.split(ours)
    fresh = nnx.merge(graphdef, jax.tree.map(copied, state))
    add_lora(fresh, LORA, rngs=nnx.Rngs(2))  # of its shapes above
    got, gradient = our_loss(fresh, PACKED, LORA)
    np.testing.assert_allclose(got, our_loss(ours, PACKED)[0], rtol=0, atol=1e-6)
    for name in LORA.targets:
        assert not gradient[f"layers/{name}/lora_a"].any()
        assert gradient[f"layers/{name}/lora_b"].any()
    names = set(flatten_named(nnx.state(ours, nnx.Param)))
    assert set(flatten_named(nnx.state(merge_lora(fresh), nnx.Param))) == names
