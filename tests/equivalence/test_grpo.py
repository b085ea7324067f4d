"""GRPO's loss and gradients beside PyTorch: DeepSeekMath's equations 3 and 4, restated there."""

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from test_language_model import LORA, pair, their_linear, with_lora  # noqa: F401

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.batches.texts import RowSize, TokenExample, packed_batch
from mmqa_jax.tasks.policy import (
    GrpoSection,
    PolicyObjective,
    group_advantages,
    make_log_probs,
)

pytestmark = pytest.mark.slow

SIZE = RowSize(40, 9)
TEMPERATURE, CLIP, BETA = 0.7, 0.15, 0.3
RNG = np.random.default_rng(8)
# Two groups of three plans; tokens of their prompt and of each plan.
ROWS = [
    TokenExample(RNG.integers(0, 89, prompt + plan).astype(np.int32), prompt)
    for prompt, plan in ((8, 9), (8, 3), (8, 1), (31, 4), (31, 9), (31, 2))
]
REWARDS = RNG.normal(size=(2, 3))
# How far the policy has moved since it drew the plans: beyond the clip, to both sides.
MOVED = RNG.normal(0, 0.3, (len(ROWS), SIZE.targets)).astype(np.float32)


def with_additions(model, names=("q", "v", "down")):
    """A torch LLaMA with A and B of its own beside the named linears; (name, layer) -> (A, B)."""
    theirs, ours = model
    plain = transformers.LlamaForCausalLM(theirs.config)
    plain.load_state_dict(theirs.state_dict())
    added = {}
    for number, layer in enumerate(plain.model.layers):
        for name in names:
            linear = getattr(ours.layers, name)
            ab = [torch.tensor(np.asarray(getattr(linear, f"lora_{x}")[...])[number]) for x in "ab"]
            added[name, number] = a, b = [x.requires_grad_() for x in ab]
            of_layer = their_linear(layer, name)
            weight = of_layer.weight.detach() + LORA.alpha / LORA.rank * (a @ b).T
            del of_layer.weight
            of_layer.weight = weight
    return plain, added


def their_log_probs(model, row: TokenExample) -> torch.Tensor:
    """Of the drawn tokens, at the temperature."""
    ids = torch.tensor(row.tokens, dtype=torch.long)
    logits = model(ids[None]).logits[0, row.start - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[row.start :, None])[:, 0]


def equation_3(policy, reference, moved: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and divergence; `moved` None: the plans were drawn from this very policy."""
    rewards = torch.tensor(REWARDS)
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = (centered / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()
    losses, divergences = [], []
    for number, row in enumerate(ROWS):
        log_probs = their_log_probs(policy, row)
        old = log_probs.detach()
        if moved is not None:
            old = old + torch.tensor(moved[number, : row.targets])
        ratio = (log_probs - old).exp()
        gain = torch.minimum(
            ratio * advantages[number], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[number]
        )
        with torch.no_grad():
            below = their_log_probs(reference, row)
        kl = below.exp() / log_probs.exp() - (below.exp() / log_probs.exp()).log() - 1
        losses.append(-(gain - BETA * kl).mean())
        divergences.append(kl.mean())
    return torch.stack(losses).mean(), torch.stack(divergences).mean()


@pytest.mark.parametrize("moved", [None, MOVED], ids=["drawn now", "drawn before"])
def test_loss_and_gradients(pair, moved):  # noqa: F811
    theirs, ours = pair
    model = with_lora(ours)
    policy, added = with_additions((theirs, model))
    loss, divergence = equation_3(policy, theirs, moved)
    loss.backward()

    options = GrpoSection(
        temperature=TEMPERATURE, clip=CLIP, kl_weight=BETA, updates=1 if moved is None else 2
    )
    objective = PolicyObjective(model.config, LORA, options)
    batch = packed_batch([[row] for row in ROWS], SIZE)
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        found = make_log_probs(objective, mesh)(model, batch)
    assert ("old_log_probs" in found) == (moved is not None)
    batch |= found
    if moved is not None:
        batch["old_log_probs"] = np.asarray(batch["old_log_probs"]) + MOVED
    batch["advantages"] = group_advantages(REWARDS).ravel().astype(np.float32)
    batch["measured"] = {"reward": REWARDS.ravel().astype(np.float32)}
    graphdef, state = nnx.split(model)

    def of(state):
        merged = nnx.merge(graphdef, state)
        return objective.loss(merged, batch, None)

    with jax.default_matmul_precision("highest"):
        (value, metrics), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(state)
    np.testing.assert_allclose(float(value), loss.item(), atol=1e-5)
    np.testing.assert_allclose(float(metrics["kl"]), divergence.item(), atol=1e-5)
    assert (float(metrics["clipped"]) > 0.1) == (moved is not None)
    assert float(metrics["tokens"]) == pytest.approx(np.mean([row.targets for row in ROWS]))
    named = {name: np.asarray(x) for name, x in flatten_named(gradient).items()}
    for (name, number), (a, b) in added.items():
        for x, want in (("a", a), ("b", b)):
            got = named[f"layers/{name}/lora_{x}"][number]
            np.testing.assert_allclose(got, want.grad.numpy(), atol=1e-5)
            assert np.abs(got).max() > 1e-3
