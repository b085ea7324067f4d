"""A language model that learns by reward from groups of its own answers: GRPO and its relatives.

For every prompt the policy draws a group of answers; an answer's advantage is its reward less the
group's mean, over the group's spread (Shao et al. 2024, DeepSeekMath, section 4.1).

  GRPO     the default: the mean of each row's clipped gain, less the divergence (equations 3 and 4)
  DAPO     clip_above=0.28, average="tokens", draws=2 or more, kl_weight=0 (Yu et al. 2025)
  Dr. GRPO scaled=False, average="budget", kl_weight=0 (Liu et al. 2025)
  GSPO     ratio="sequence", kl_weight=0 (Zheng et al. 2025, equations 5 to 7)
  DPO      learn="preference": the best answer of a group against its worst (Rafailov et al. 2023)
  rejection sampling: learn="best": maximum likelihood of the best answer of a group
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import RowPlacement, fetch, mesh_in_use, state_shardings
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.texts import RowSize, TokenExample, packed_batch
from mmqa_jax.decoding.engine import serve_ready
from mmqa_jax.decoding.policy_scores import policy_logprobs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.lora import merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.tasks.language_model import LanguageModelObjective, target_log_probs
from mmqa_jax.tasks.task import floats, ints
from mmqa_jax.training.state import WEIGHT

Arrays = dict[str, Any]  # a batch, of NumPy
LogProbs = Callable[[Llama, Arrays], Arrays]
Learn = Literal["clipped", "preference", "best"]

_LEAST_SPREAD = 1e-4  # added to a group's spread, as TRL's GRPOTrainer does
_ROW = ("input_ids", "segments", "positions", "target_positions", "target_ids", "target_segments")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoSection:
    """The section `grpo`.

    Attributes:
      group: answers that are drawn to a prompt.
      temperature: at which they are drawn; the policy is softmax(logits / temperature).
      learn: what is learned of a group: all answers by their advantages, the best one against the
        worst, or the best one alone. Groups whose rewards are equal teach nothing.
      updates: steps that learn from the same answers.
      clip: how far a probability may fall below the one that it was drawn with, as a share of it.
      clip_above: how far it may rise; None: as `clip`.
      ratio: of the probabilities of each token, or of the whole answer, as its tokens' geometric
        mean.
      average: over each row's tokens and then the rows; over all tokens; or over the tokens that
        the rows may have.
      scaled: whether advantages are divided by the group's spread.
      kl_weight: beta, of the divergence from the model without its additions (DeepSeekMath's is
        .04); with learn="preference" DPO's beta.
      draws: how often prompts are asked for a batch until enough groups have different rewards; a
        batch that is still short has groups without.
    """

    group: int = at_least(2, 8)
    temperature: float = at_least(1e-3, 1.0)
    learn: Learn = "clipped"
    updates: int = at_least(1, 1)
    clip: float = at_least(0, 0.2)
    clip_above: float | None = None
    ratio: Literal["token", "sequence"] = "token"
    average: Literal["rows", "tokens", "budget"] = "rows"
    scaled: bool = True
    kl_weight: float = at_least(0, 0.04)
    draws: int = at_least(1, 1)

    def __post_init__(self):
        if self.clip_above is not None and self.clip_above < 0:
            raise UserError(
                f"config key grpo.clip_above={self.clip_above}: a share from 0 was expected; "
                "change it, or set it to None to clip as grpo.clip does."
            )
        if self.learn == "preference" and not self.kl_weight:
            raise UserError(
                "config key grpo.kl_weight=0: it is the beta of learn=preference, which needs one; "
                "set it to 0.1."
            )

    @property
    def rows(self) -> int:
        """Rows of a batch that a group has."""
        return {"clipped": self.group, "preference": 2, "best": 1}[self.learn]

    @property
    def needs_reference(self) -> bool:
        """Whether the model without its additions is asked, too."""
        return self.kl_weight > 0 and self.learn != "best"


def group_advantages(rewards: np.ndarray, *, scaled: bool = True) -> np.ndarray:
    """A_i = (r_i - mean) / std within each group; rewards and advantages are float [P, G]."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    if not scaled:
        return centered
    return centered / (rewards.std(axis=1, ddof=1, keepdims=True) + _LEAST_SPREAD)


def learned_rows(rewards: np.ndarray, options: GrpoSection) -> tuple[np.ndarray, np.ndarray]:
    """Which answers of each group are learned, and their advantages.

    Args:
      rewards: float [P, G].

    Returns:
      Answers int [P, R] by their number in the group, and advantages float32 [P, R], R as
      `options.rows`. Of a preference the first answer is the better one and has the advantage 1;
      of the best answer it is 1; of a group with equal rewards 0.
    """
    if options.learn == "clipped":
        advantages = group_advantages(rewards, scaled=options.scaled)
        numbers = np.broadcast_to(np.arange(rewards.shape[1]), rewards.shape)
        return numbers, advantages.astype(np.float32)
    ends = [rewards.argmax(axis=1), rewards.argmin(axis=1)][: options.rows]
    differs = (rewards.max(axis=1) > rewards.min(axis=1)).astype(np.float32)
    return np.stack(ends, axis=1), np.stack([differs, -differs][: options.rows], axis=1)


@dataclasses.dataclass(frozen=True)
class PolicyObjective(LanguageModelObjective):
    """The loss of drawn tokens by their answers' advantages; see the module.

    Attributes:
      options: see GrpoSection.
      engine: the engine's sizes: log-probabilities then have its bits (decoding/policy_scores.py)
        in a program that is compiled as `exact` says, and ratios are those to what it drew; None:
        they are those of training.
      mesh: of the engine.
    """

    options: GrpoSection = GrpoSection()
    engine: EngineConfig | None = None
    mesh: Mesh | None = None

    @property
    def exact(self) -> bool:
        """Whether the step is compiled so that a CPU's bits do not depend on the batch."""
        return self.engine is not None

    def policy(
        self, model: Llama, batch: dict[str, jax.Array], key: jax.Array | None = None
    ) -> jax.Array:
        """The policy's log-probability of every target, float32 [B, T]."""
        if self.engine is None:
            return target_log_probs(model, batch, key, self.options.temperature)
        served = merge_lora(model)
        serve_ready(served, self.engine, self.mesh)
        lengths = (batch["segments"] > 0).sum(axis=1, dtype=jnp.int32)
        every = policy_logprobs(served, batch["input_ids"], lengths, self.engine, self.mesh)
        return jnp.take_along_axis(every, batch["target_positions"], axis=1)

    def loss(
        self, model: Llama, batch: dict[str, Any], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss and metrics of a batch of one answer a row.

        A batch: the arrays of `data.batches.texts`, `advantages` [B], `measured`: further
        values [B] by name, which become metrics; and [B, T], where they are needed,
        `reference_log_probs`, `old_log_probs` (without them the answers were drawn from this very
        model) and `drawn_log_probs`, those of the engine that drew them.
        """
        log_probs = self.policy(model, batch, dropout_key)  # [B, T]
        is_token = batch["target_segments"] > 0
        if self.options.learn == "preference":
            loss, metrics = self._preference(log_probs, is_token, batch)
        elif self.options.learn == "best":
            loss, metrics = self._mean(-log_probs * batch["advantages"][:, None], is_token), {}
        else:
            loss, metrics = self._clipped(log_probs, is_token, batch)
        metrics |= {name: values.mean() for name, values in batch["measured"].items()}
        metrics["tokens"] = is_token.sum(axis=1).mean(dtype=jnp.float32)
        if "drawn_log_probs" in batch:
            gap = jnp.abs(log_probs - batch["drawn_log_probs"])
            metrics["engine_gap"] = _of_rows(gap, is_token)
        if self.options.average == "tokens":  # by which the parts of an update count
            metrics[WEIGHT] = is_token.sum().astype(jnp.float32)
        return loss, metrics

    def _clipped(
        self, log_probs: jax.Array, is_token: jax.Array, batch: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Equation 3, or its relatives."""
        options = self.options
        if self.exact:
            old = batch["drawn_log_probs"]
        else:
            old = batch.get("old_log_probs", jax.lax.stop_gradient(log_probs))
        moved = jnp.where(is_token, log_probs - old, 0.0)
        if options.ratio == "sequence":
            moved = moved.sum(axis=1, keepdims=True) / _count(is_token)[:, None]
            moved = jnp.broadcast_to(moved, is_token.shape)
        ratio = jnp.exp(moved)
        above = options.clip if options.clip_above is None else options.clip_above
        within = jnp.clip(ratio, 1 - options.clip, 1 + above)
        advantages = batch["advantages"][:, None]
        loss = -jnp.minimum(ratio * advantages, within * advantages)
        is_clipped = (ratio < 1 - options.clip) | (ratio > 1 + above)
        metrics = {"clipped": _of_rows(jnp.where(is_clipped, 1.0, 0.0), is_token)}
        if options.needs_reference:
            # Equation 4: unbiased, and never negative.
            below = jnp.where(is_token, batch["reference_log_probs"] - log_probs, 0.0)
            kl = jnp.exp(below) - below - 1
            loss, metrics["kl"] = options.kl_weight * kl + loss, _of_rows(kl, is_token)
        return self._mean(loss, is_token), metrics

    def _preference(
        self, log_probs: jax.Array, is_token: jax.Array, batch: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """DPO's equation 7 over the pairs of rows, the better one first."""
        gained = jnp.where(is_token, log_probs - batch["reference_log_probs"], 0.0).sum(axis=1)
        better, worse = gained.reshape(-1, 2).T
        margins = self.options.kl_weight * (better - worse)  # [B / 2]
        differs = batch["advantages"][::2] > 0
        pairs = jnp.maximum(differs.sum(), 1)
        losses = jnp.where(differs, -jax.nn.log_sigmoid(margins), 0.0)
        preferred = jnp.where(differs, margins > 0, False).sum() / pairs
        return losses.sum() / pairs, {"preferred": preferred, "pairs": differs.mean()}

    def _mean(self, values: jax.Array, is_token: jax.Array) -> jax.Array:
        """The mean of values [B, T] that `average` names."""
        if self.options.average == "rows":
            return _of_rows(values, is_token)
        total = jnp.where(is_token, values, 0.0).sum()
        if self.options.average == "tokens":
            return total / jnp.maximum(is_token.sum(), 1)
        return total / is_token.size


def _of_rows(values: jax.Array, is_token: jax.Array) -> jax.Array:
    """The mean over the rows of the mean over a row's tokens, of [B, T]."""
    return (jnp.where(is_token, values, 0.0).sum(axis=1) / _count(is_token)).mean()


def _count(is_token: jax.Array) -> jax.Array:
    """Tokens of each row, 1 of a row without [B]."""
    return jnp.maximum(is_token.sum(axis=1), 1)


# What the policy and its reference say of answers that were drawn.


def make_log_probs(objective: PolicyObjective, mesh: Mesh) -> LogProbs:
    """Makes (model, batch) -> the batch's `reference_log_probs` and, where answers are learned from
    more than once, `old_log_probs`, float32 [B, T], as the loss needs them."""
    options = objective.options
    has_old = options.updates > 1 and options.learn == "clipped" and not objective.exact

    def judged(model: Llama, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        models = (
            {"reference_log_probs": without_additions(model)} if options.needs_reference else {}
        )
        models |= {"old_log_probs": model} if has_old else {}
        return {
            name: target_log_probs(judge, batch, temperature=options.temperature)
            for name, judge in models.items()
        }

    compiled: dict[nnx.GraphDef, Any] = {}

    def log_probs(model: Llama, batch: Arrays) -> Arrays:
        if not (options.needs_reference or has_old):
            return {}
        graphdef, state = nnx.split(model)
        if graphdef not in compiled:
            compiled[graphdef] = jax.jit(lambda state, x: judged(nnx.merge(graphdef, state), x))
        place = RowPlacement(mesh)
        mine = place.rows(len(batch["input_ids"]))
        rows = place.put({name: batch[name][mine] for name in _ROW})
        return fetch(place.call(compiled[graphdef], state, rows))

    return log_probs


def without_additions(model: Llama) -> Llama:
    """The reference: the same model, its additions zero."""
    graphdef, state = nnx.split(model)
    named = [
        (path, value.replace(jnp.zeros_like(value.get_value())) if path[-1] == "lora_b" else value)
        for path, value in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(named))


def engine_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh of the engine beside a training run's; None: it serves on one device."""
    return None if mesh is None or mesh.size == 1 else mesh_in_use(mesh)


def served_copy(model: Llama, mesh: Mesh | None) -> Llama:
    """A copy of a model, its additions merged, for the engine, which frees what it is given; on the
    engine's mesh."""
    plain = nnx.eval_shape(lambda: Llama(model.config, rngs=nnx.Rngs()))
    copy = _merged_copy(*nnx.split(model))
    if mesh is not None:
        copy = jax.device_put(copy, state_shardings(copy, mesh))
    return nnx.merge(nnx.graphdef(plain), copy)


def seeing(model: Any, llama: Llama) -> Any:
    """A model that sees for the engine: a copy of the trained one's tower, and this LLaMA."""
    graphdef, state = nnx.split(model)
    copies = [
        (path, value if path[0] == "llama" else value.replace(jnp.copy(value.get_value())))
        for path, value in nnx.to_flat_state(state)
    ]
    whole = nnx.merge(graphdef, nnx.from_flat_state(copies))
    whole.llama = llama
    return whole


@functools.partial(jax.jit, static_argnums=0)  # one program for all steps of a run
def _merged_copy(graphdef: nnx.GraphDef, state: nnx.State) -> nnx.State:
    merged = merge_lora(nnx.merge(graphdef, state))
    return jax.tree.map(jnp.copy, nnx.state(merged))


# Batches of answers that the policy draws itself.


class Answer(NamedTuple):
    """An answer that the policy drew.

    Attributes:
      example: its tokens behind its prompt, those drawn are learned.
      reward: what it earned.
      measured: further values, which are logged.
      log_probs: of the drawn tokens, by the engine; (): not asked for.
    """

    example: TokenExample
    reward: float
    measured: Mapping[str, float]
    log_probs: Sequence[float] = ()


class Group(NamedTuple):
    """The answers to one prompt."""

    answers: Sequence[Answer]

    @property
    def rewards(self) -> list[float]:
        """Returns what each answer earned."""
        return [answer.reward for answer in self.answers]

    @property
    def decides(self) -> bool:
        """Whether the rewards differ."""
        return len(set(self.rewards)) > 1


class PolicyBatches(abc.ABC):
    """Draws groups of answers from the current model, batch after batch; see `ModelBatches`.

    An epoch asks every prompt once, in an order of its own. Which prompts are asked, and the seeds
    of the draws, depend on the run's seed and on what was asked before alone. The state holds the
    answers that are still to be learned from, which the model of a later step would not draw.
    Every process of a launch knows the whole batch, and hands over its rows.

    Args:
      prompts: how many there are.
      log_probs: of `make_log_probs`.
      per_batch: prompts of a batch.
      size: of a row, one answer each.
      options: see GrpoSection.
      seed: of the run.
      mesh: over which the rows are split; None: of one process.
    """

    def __init__(
        self,
        prompts: int,
        log_probs: LogProbs,
        *,
        per_batch: int,
        size: RowSize,
        options: GrpoSection,
        seed: int,
        mesh: Mesh | None = None,
    ):
        self._mine = RowPlacement(mesh).rows(per_batch * options.rows)
        self._prompts, self._log_probs, self._per_batch = prompts, log_probs, per_batch
        self._size, self._options, self._seed = size, options, seed
        self._model: Llama | None = None
        # Batches and prompts so far; how often the last batch is still learned.
        self._drawn = self._asked = self._left = 0
        self._batch: Arrays = {}

    def use(self, model: Llama) -> None:
        """Takes the model that the next answers are drawn from."""
        self._model = model

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Arrays:
        if not self._left:
            self._batch, self._left = self._draw(), self._options.updates
            self._drawn += 1
        self._left -= 1
        rows = len(self._batch["advantages"])

        def mine(x: np.ndarray) -> np.ndarray:  # of each row one, or as many of what it shows
            of_rows = x.reshape(rows, len(x) // rows, *x.shape[1:])[self._mine]
            return of_rows.reshape(-1, *x.shape[1:])

        return jax.tree.map(mine, self._batch)

    def get_state(self) -> dict[str, Any]:
        batch = _plain(self._batch) if self._left else {}
        return {"drawn": self._drawn, "asked": self._asked, "left": self._left, "batch": batch}

    def set_state(self, state: dict[str, Any]) -> None:
        self._drawn, self._asked = int(state["drawn"]), int(state["asked"])
        self._left, self._batch = int(state["left"]), _arrays(state["batch"])

    def close(self) -> None:  # noqa: B027
        """Ends what makes the batches: nothing."""

    @abc.abstractmethod
    def _groups(self, model: Llama, prompts: Sequence[int], seeds: Sequence[int]) -> list[Group]:
        """Draws a group of answers to each prompt, by number."""

    def _draw(self) -> Arrays:
        """The next batch: answers, their advantages, and log-probabilities."""
        assert self._model is not None, "`use` comes first"
        groups: list[Group] = []
        for number in range(self._options.draws):
            missing = self._per_batch - sum(group.decides for group in groups)
            if not missing:
                break
            again = (number,) if number else ()
            rng = np.random.default_rng((27, self._seed, self._drawn, *again))
            seeds = rng.integers(2**31, size=missing).tolist()
            groups += self._groups(self._model, self._next_prompts(missing), seeds)
        first = sorted(range(len(groups)), key=lambda place: not groups[place].decides)
        groups = [groups[place] for place in sorted(first[: self._per_batch])]
        batch = self._arrays(groups)
        return {**batch, **self._log_probs(self._model, batch)}

    def _next_prompts(self, count: int) -> list[int]:
        """The prompts that are asked next, by number."""
        prompts = []
        for position in range(self._asked, self._asked + count):
            epoch, place = divmod(position, self._prompts)
            order = np.random.default_rng((28, self._seed, epoch)).permutation(self._prompts)
            prompts.append(int(order[place]))
        self._asked += count
        return prompts

    def _arrays(self, groups: Sequence[Group]) -> Arrays:
        """The batch without further log-probabilities; see `PolicyObjective.loss`."""
        rewards = np.array([group.rewards for group in groups])
        numbers, advantages = learned_rows(rewards, self._options)
        pairs = list(zip(groups, numbers, strict=True))
        answers = [group.answers[number] for group, chosen in pairs for number in chosen]
        batch = self._rows_of([answer.example for answer in answers])
        batch["advantages"] = advantages.ravel()
        # Of a group of which some answers are learned every row has the mean of all.
        each = self._options.learn == "clipped"
        measured = {
            name: [
                group.answers[number].measured[name]
                if each
                else np.mean([answer.measured[name] for answer in group.answers])
                for group, chosen in pairs
                for number in chosen
            ]
            for name in answers[0].measured
        }
        rows = self._options.rows
        measured["reward"] = rewards.ravel() if each else np.repeat(rewards.mean(axis=1), rows)
        measured["deciding"] = np.repeat([float(group.decides) for group in groups], rows)
        batch["measured"] = {name: np.array(x, np.float32) for name, x in measured.items()}
        if any(answer.log_probs for answer in answers):
            drawn = np.zeros(batch["target_ids"].shape, np.float32)
            for row, answer in enumerate(answers):
                drawn[row, : len(answer.log_probs)] = answer.log_probs
            batch["drawn_log_probs"] = drawn
        return batch

    def _rows_of(self, examples: Sequence[TokenExample]) -> Arrays:
        """The arrays of rows of one example each."""
        return packed_batch([[example] for example in examples], self._size)


def _plain(batch: Arrays) -> dict[str, Any]:
    """A batch as JSON values."""
    return {
        name: _plain(x) if isinstance(x, dict) else [str(x.dtype), x.tolist()]
        for name, x in batch.items()
    }


def _arrays(values: Mapping[str, Any]) -> Arrays:
    return {
        name: _arrays(x) if isinstance(x, dict) else np.array(x[1], x[0])
        for name, x in values.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRows:
    """The section `batches`: rows of a batch, one drawn answer each, and tokens of a row."""

    batch_size: int = at_least(1)
    length: int = at_least(2)


def check_groups(task: Any) -> None:
    """Refuses sections `grpo`, `batches` and `train` of a task that do not fit together."""
    options, accumulate = task.grpo, task.loop.accumulate
    if task.model.lora is None and options.needs_reference:
        raise UserError(
            "config key model.lora=none: the reference is the model without its additions, which "
            f"grpo.kl_weight={options.kl_weight} needs; give it a rank, or set that to 0."
        )
    if task.batches.batch_size % (accumulate * options.rows):
        raise UserError(
            f"config key batches.batch_size={task.batches.batch_size}: a multiple of "
            f"{options.rows}, the rows of a prompt (grpo.group={options.group}, "
            f"grpo.learn={options.learn}), times train.accumulate={accumulate} was expected; "
            "change it."
        )
    if accumulate > 1 and options.updates > 1:
        raise UserError(
            f"config key train.accumulate={accumulate}: the parts of an update are drawn anew, and "
            f"grpo.updates={options.updates} learns from each again; set one of them to 1."
        )


def batch_shapes(
    options: GrpoSection,
    size: RowSize,
    rows: int,
    measured: Sequence[str],
    *,
    drawn: bool = False,
    exact: bool = False,
) -> dict[str, Any]:
    """Shapes of a batch of `PolicyBatches`.

    Args:
      rows: of the batch.
      measured: names of an answer's values.
      drawn: whether the engine's log-probabilities are asked for.
      exact: see PolicyObjective.
    """
    wide, few = (rows, size.length), (rows, size.targets)
    names = ["reference_log_probs"] if options.needs_reference else []
    names += ["drawn_log_probs"] if drawn else []
    if options.updates > 1 and options.learn == "clipped" and not exact:
        names.append("old_log_probs")
    return {
        **{name: ints(*wide) for name in _ROW[:3]},
        **{name: ints(*few) for name in _ROW[3:]},
        "advantages": floats(rows),
        "measured": {name: floats(rows) for name in (*measured, "reward", "deciding")},
        **{name: floats(*few) for name in names},
    }
