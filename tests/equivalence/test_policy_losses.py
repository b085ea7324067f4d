"""GRPO's relatives beside TRL's GRPOTrainer and DPO's equation: losses and gradients of episodes
in which the policy wrote two turns, and read what came back in between."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from test_grpo import with_additions
from test_language_model import LORA, pair, with_lora  # noqa: F401
from trl.trainer.grpo_trainer import GRPOTrainer

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.batches.texts import RowSize, TokenExample, packed_batch
from mmqa_jax.tasks.policy import GrpoSection, PolicyObjective, learned_rows, make_log_probs

pytestmark = pytest.mark.slow

SIZE = RowSize(40, 12)
RNG = np.random.default_rng(9)
PROMPT = 8
# (tokens of the first turn, of what came back, of the second turn); the last row has one turn.
TURNS = ((4, 9, 5), (2, 12, 8), (1, 3, 1), (6, 0, 0))
REWARDS = np.array([[1.0, 0.0], [0.25, 0.75]])
MOVED = RNG.normal(0, 0.3, (len(TURNS), SIZE.targets)).astype(np.float32)


def _episode(first: int, back: int, second: int) -> TokenExample:
    tokens = RNG.integers(0, 89, PROMPT + first + back + second).astype(np.int32)
    drawn = [*range(PROMPT, PROMPT + first), *range(PROMPT + first + back, len(tokens))]
    return TokenExample(tokens, PROMPT, learned=np.array(drawn, np.int32))


ROWS = [_episode(*turns) for turns in TURNS]


def their_inputs() -> dict[str, torch.Tensor]:
    """The rows as TRL has them: completions, and which of their tokens the policy wrote."""
    width = max(len(row.tokens) for row in ROWS) - PROMPT
    completions = np.zeros((len(ROWS), width), np.int64)
    mask, tool_mask = np.zeros_like(completions), np.zeros_like(completions)
    for number, row in enumerate(ROWS):
        completions[number, : len(row.tokens) - PROMPT] = row.tokens[PROMPT:]
        mask[number, : len(row.tokens) - PROMPT] = 1
        tool_mask[number, row.places - PROMPT] = 1
    prompts = np.stack([row.tokens[:PROMPT] for row in ROWS]).astype(np.int64)
    return {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(prompts.shape, dtype=torch.long),
        "completion_ids": torch.tensor(completions),
        "completion_mask": torch.tensor(mask),
        "tool_mask": torch.tensor(tool_mask),
    }


def their_log_probs(model, inputs) -> torch.Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = model(ids, attention_mask=attended).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]


def moved_there() -> torch.Tensor:
    """How far the policy has moved, by completion token."""
    moved = np.zeros(their_inputs()["completion_ids"].shape, np.float32)
    for number, row in enumerate(ROWS):
        moved[number, row.places - PROMPT] = MOVED[number, : row.targets]
    return torch.tensor(moved)


def their_loss(policy, reference, options: GrpoSection, advantages, loss_type: str):
    """GRPOTrainer's loss of the rows."""
    inputs = their_inputs()
    with torch.no_grad():
        inputs["old_per_token_logps"] = their_log_probs(policy, inputs) + moved_there()
        inputs["ref_per_token_logps"] = their_log_probs(reference, inputs)
    inputs["advantages"] = torch.tensor(advantages)
    inputs["num_items_in_batch"] = inputs["tool_mask"].sum()
    log_probs = their_log_probs(policy, inputs)
    above = options.clip if options.clip_above is None else options.clip_above
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            log_probs,
            torch.zeros_like(log_probs),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.ratio,
        beta=options.kl_weight,
        loss_type=loss_type,
        epsilon_low=options.clip,
        epsilon_high=above,
        use_vllm=False,
        model=SimpleNamespace(training=False),
        max_completion_length=SIZE.targets,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        _entropy_bonus_enabled=False,
        _metrics={"eval": _Anything()},
        _metrics_window={"eval": _Anything()},
    )
    return GRPOTrainer._compute_loss(trainer, policy, inputs)


class _Anything(dict):
    """Metrics, which nobody reads."""

    def __missing__(self, key):
        self[key] = []
        return self[key]


def ours(model, options: GrpoSection, rewards=REWARDS):
    """Value, metrics, gradient, and the advantages of the rows."""
    numbers, advantages = learned_rows(rewards, options)
    groups = np.arange(rewards.size).reshape(rewards.shape)
    rows = np.take_along_axis(groups, numbers, axis=1).ravel()
    objective = PolicyObjective(model.config, LORA, options)
    batch = packed_batch([[ROWS[row]] for row in rows], SIZE)
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    graphdef, state = nnx.split(model)
    with jax.default_matmul_precision("highest"):
        batch |= make_log_probs(objective, mesh)(model, batch)
        if "old_log_probs" in batch:
            batch["old_log_probs"] = np.asarray(batch["old_log_probs"]) + MOVED
        batch |= {"advantages": advantages.ravel(), "measured": {}}

        def loss(state):
            return objective.loss(nnx.merge(graphdef, state), batch, None)

        (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    return float(value), metrics, gradient, advantages.ravel()


def assert_gradients(gradient, added, atol):
    named = {name: np.asarray(x) for name, x in flatten_named(gradient).items()}
    for (name, number), matrices in added.items():
        for letter, want in zip("ab", matrices, strict=True):
            got = named[f"layers/{name}/lora_{letter}"][number]
            np.testing.assert_allclose(got, want.grad.numpy(), atol=atol)
            assert np.abs(got).max() > 10 * atol


CASES = {
    "GRPO": ("grpo", {"kl_weight": 0.3, "clip": 0.15}),
    "DAPO": ("dapo", {"kl_weight": 0.0, "clip_above": 0.28, "average": "tokens"}),
    "Dr. GRPO": ("dr_grpo", {"kl_weight": 0.0, "scaled": False, "average": "budget"}),
    "GSPO": ("grpo", {"kl_weight": 0.0, "clip": 0.03, "clip_above": 0.04, "ratio": "sequence"}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_groups(pair, name):  # noqa: F811
    theirs, model = pair
    model = with_lora(model)
    policy, added = with_additions((theirs, model))
    loss_type, fields = CASES[name]
    options = GrpoSection(group=2, updates=2, **fields)
    value, metrics, gradient, advantages = ours(model, options)
    loss = their_loss(policy, theirs, options, advantages, loss_type)
    loss.backward()
    np.testing.assert_allclose(value, loss.item(), atol=1e-6)
    assert 0 < float(metrics["clipped"]) < 1
    assert_gradients(gradient, added, 1e-6)


def test_advantages_are_less_the_mean_and_scaled_where_it_says_so():
    rewards = torch.tensor(REWARDS)
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    scaled = centered / (rewards.std(dim=1, keepdim=True) + 1e-4)
    for is_scaled, wanted in ((True, scaled), (False, centered)):
        _, advantages = learned_rows(REWARDS, GrpoSection(group=2, scaled=is_scaled))
        np.testing.assert_allclose(advantages, wanted.numpy(), rtol=1e-6)


def test_preferences_are_dpos(pair):  # noqa: F811
    theirs, model = pair
    model = with_lora(model)
    policy, added = with_additions((theirs, model))
    options = GrpoSection(group=2, learn="preference", kl_weight=0.7)
    value, metrics, gradient, _ = ours(model, options)

    inputs = their_inputs()
    gained = their_log_probs(policy, inputs)
    with torch.no_grad():
        reference = their_log_probs(theirs, inputs)
    totals = ((gained - reference) * inputs["tool_mask"]).sum(dim=1).reshape(2, 2)
    better = torch.tensor(REWARDS.argmax(axis=1))
    margins = totals.gather(1, better[:, None]) - totals.gather(1, 1 - better[:, None])
    loss = -torch.nn.functional.logsigmoid(options.kl_weight * margins).mean()
    loss.backward()
    np.testing.assert_allclose(value, loss.item(), atol=1e-6)
    assert float(metrics["pairs"]) == 1
    assert_gradients(gradient, added, 2e-6)


def test_the_best_answer_alone_is_learned_and_equal_ones_teach_nothing(pair):  # noqa: F811
    theirs, model = pair
    model = with_lora(model)
    policy, _ = with_additions((theirs, model))
    options = GrpoSection(group=2, learn="best", kl_weight=0.0, average="rows")
    rewards = np.array([[1.0, 0.0], [0.5, 0.5]])
    value, _, _, _ = ours(model, options, rewards)
    inputs = their_inputs()
    mask = inputs["tool_mask"][0]
    log_probs = their_log_probs(policy, inputs)[0]
    wanted = -(log_probs * mask).sum() / mask.sum() / 2  # of two groups one decides
    np.testing.assert_allclose(value, wanted.item(), atol=1e-6)
