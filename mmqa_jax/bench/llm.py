"""`mmqa bench llm`: the generation engine against transformers' `generate`.

Same weights, prompts and threads on both sides, in one process, in turn. `small` is SmolLM2-135M
in float32 (its package's weights, or random ones in its shape), `full` LLaMA-2-7B's shape with
random weights in bfloat16. Rows, all in tokens per second but the last two:

- few_shot: prompts that share their examples, as PICa's and Prophet's do, prompt tokens counted.
- different: prompts that have nothing in common.
- prefill: a full batch of prompts and one new token each.
- decode: new tokens of a full batch. The floor is what reading the weights, and the keys and
  values so far, once per step leaves possible at the measured memory bandwidth.
- int8_cache, int8_weights: decoding beside our own without them.
- perplexity_int8_cache, perplexity_int8_weights: of real text, beside that without them.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pydoc_data.topics
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmqa_jax.bench import Options
from mmqa_jax.bench.timing import device_name, read_bandwidth, stolen_share
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.progress import Progress

if TYPE_CHECKING:
    from mmqa_jax.models.llama import Llama

_AGAINST_TORCH = ("few_shot", "different", "prefill", "decode")
_INT8 = {"int8_cache": {"cache_dtype": "int8"}, "int8_weights": {"weights": "int8"}}
_PERPLEXITIES = tuple(f"perplexity_{name}" for name in _INT8)
ROWS = (*_AGAINST_TORCH, *_INT8, *_PERPLEXITIES)
_WINDOW = 512  # tokens of text that are read in one piece

Prompts = Sequence[Sequence[int]]
Answers = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Load:
    """How much is asked of both sides, in tokens where nothing else is said."""

    prompts: int = 64  # how many, of few_shot and different
    prompt: int = 600
    new: int = 10
    shared: int = 512  # of a few-shot prompt, what all have in common
    batch: int = 16  # sequences decoded together
    decode: int = 64  # new ones, of decode
    text: int = 8192  # of the perplexity


SMALL = Load()
FULL = Load(prompt=1024, new=64, shared=896, batch=64)


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those asked for; `small` on a CPU, `full` elsewhere."""
    # Two libraries share the accelerator's memory; jax alone would take three quarters of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from mmqa_jax.core.startup import start

    start()
    size = options.size or ("small" if jax.default_backend() == "cpu" else "full")
    return measure(size, SMALL if size == "small" else FULL, options)


def measure(size: str, load: Load, options: Options) -> dict[str, Any]:
    """Measures the rows of a size under a load; returns what `--json` prints."""
    wanted = options.chosen(ROWS)
    text = _text(size, load)
    stolen, bandwidth, rounds = stolen_share(), read_bandwidth(), options.rounds or 1
    rows = []
    with Progress("Measuring generation", len(wanted), "rows") as progress:
        if against_torch := [name for name in wanted if name in _AGAINST_TORCH]:
            sides = _sides(size, load)
            for name in against_torch:
                rows.append(_against_torch(name, sides, text, load, rounds, bandwidth))
                progress.advance()
            sides.clear()
        if against_ours := [name for name in wanted if name not in _AGAINST_TORCH]:
            plain = OurSide(load_model(size), load)
            for kind, changes in _INT8.items():
                names = [name for name in against_ours if name.endswith(kind)]
                other = OurSide(load_model(size), load, **changes) if names else None
                for name in names:
                    compare = _perplexities if name in _PERPLEXITIES else _decoding
                    rows.append(compare(name, other, plain, text, load, rounds))
                    progress.advance()
    return {
        "bench": "llm",
        "device": device_name(),
        "rows": sorted(rows, key=lambda row: ROWS.index(row["name"])),
        "model": {"small": "SmolLM2-135M, float32", "full": "LLaMA-2-7B's shape, bfloat16"}[size],
        "rounds": rounds,
        "bandwidth_gb": round(bandwidth / 1e9, 1),
        "stolen_share": round(stolen(), 3),
        "load": dataclasses.asdict(load),
    }


def _sides(size: str, load: Load) -> dict[str, OurSide | TorchSide]:
    model = load_model(size)
    sides: dict[str, OurSide | TorchSide] = {"peer": TorchSide(model, load.batch)}
    if size == "small":
        sides["peer_bfloat16"] = TorchSide(model, load.batch, "bfloat16")
        sides["ours_bfloat16"] = OurSide(load_model(size, "bfloat16"), load)
    return {"ours": OurSide(model, load), **sides}


def _against_torch(
    name: str,
    sides: Mapping[str, OurSide | TorchSide],
    text: Sequence[int],
    load: Load,
    rounds: int,
    bandwidth: float,
) -> dict[str, Any]:
    floor = None
    if name == "decode":
        rates, answers = _decode_rates(sides, text, load, rounds)
        floor = sides["ours"].decode_floor(bandwidth)
    else:
        count, new = (load.batch, 1) if name == "prefill" else (load.prompts, load.new)
        prompts = _cut(text, count, load.prompt, load.shared if name == "few_shot" else 0)
        seconds, answers = _timed(sides, prompts, new, rounds)
        tokens = count * (load.prompt + (0 if name == "prefill" else new))
        rates = {side: tokens / taken for side, taken in seconds.items()}
    row = {
        **_compared(name, rates, answers),
        "floor": floor and round(floor, 1),
        "of_floor": floor and round(rates["ours"] / floor, 2),
    }
    if "ours_bfloat16" in sides:
        low, theirs = rates["ours_bfloat16"], rates["peer_bfloat16"]
        row |= {"ours_bfloat16": round(low, 1), "peer_bfloat16": round(theirs, 1)}
        row["ratio_bfloat16"] = round(low / theirs, 2)
        if name == "decode":
            best = sides["ours_bfloat16"].decode_floor(bandwidth)
            row["of_floor_bfloat16"] = round(low / best, 2)
    return row


def _decoding(
    name: str, ours: OurSide, plain: OurSide, text: Sequence[int], load: Load, rounds: int
) -> dict[str, Any]:
    return _compared(name, *_decode_rates({"ours": ours, "peer": plain}, text, load, rounds))


def _decode_rates(
    sides: Mapping[str, OurSide | TorchSide], text: Sequence[int], load: Load, rounds: int
) -> tuple[dict[str, float], dict[str, Answers]]:
    """New tokens/s of a full batch, what its prompts and first tokens take left out."""
    prompts = _cut(text, load.batch, load.prompt)
    seconds, answers = _timed(sides, prompts, load.decode, rounds, decoding=True)
    tokens = load.batch * (load.decode - 1)
    return {side: tokens / taken for side, taken in seconds.items()}, answers


def _compared(
    name: str, rates: Mapping[str, float], answers: Mapping[str, Answers]
) -> dict[str, Any]:
    same = [mine == theirs for mine, theirs in zip(answers["ours"], answers["peer"], strict=True)]
    return {
        "name": name,
        "ours": round(rates["ours"], 1),
        "peer": round(rates["peer"], 1),
        "ratio": round(rates["ours"] / rates["peer"], 2),
        "unit": "tokens/s",
        "floor": None,
        "same_answers": round(sum(same) / len(same), 3),
    }


def _perplexities(
    name: str, ours: OurSide, plain: OurSide, text: Sequence[int], load: Load, rounds: int
) -> dict[str, Any]:
    mine, theirs = (side.perplexity(text[: load.text]) for side in (ours, plain))
    return {
        "name": name,
        "ours": round(mine, 4),
        "peer": round(theirs, 4),
        "ratio": round(theirs / mine, 4),
        "unit": "perplexity",
        "floor": None,
    }


def _cut(text: Sequence[int], count: int, size: int, shared: int = 0) -> Prompts:
    """`count` prompts of `size` tokens; all begin with the text's first `shared` ones."""
    own = size - shared
    starts = range(shared, shared + count * own, own)
    return [[*text[:shared], *text[start : start + own]] for start in starts]


def _timed(
    sides: Mapping[str, OurSide | TorchSide],
    prompts: Prompts,
    new: int,
    rounds: int,
    *,
    decoding: bool = False,
) -> tuple[dict[str, float], dict[str, Answers]]:
    """Median seconds of each side, in turn after a small round that compiles, and its answers.

    decoding: only of what comes after the first new tokens.
    """
    answers: dict[str, Answers] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.answers(prompts[:2], min(new, 2))
    for _ in range(rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            answers[name] = side.answers(prompts, new)
            whole = time.perf_counter() - began
            seconds[name].append(side.decode_seconds if decoding else whole)
    return {name: statistics.median(taken) for name, taken in seconds.items()}, answers


def load_model(size: str, dtype: str | None = None) -> Llama:
    """SmolLM2's real weights where its package is; otherwise random ones.

    dtype: of parameters and compute; None is float32 for SmolLM2, bfloat16 for LLaMA-2-7B.
    """
    dtype = dtype or {"small": "float32", "full": "bfloat16"}[size]
    import jax
    from flax import nnx

    from mmqa_jax.models.llama import Llama
    from mmqa_jax.models.llama_config import llama2_7b, smollm2_135m
    from mmqa_jax.weights.gguf_io import smollm2_path
    from mmqa_jax.weights.llama import load_llama

    if size == "small" and _has_smollm2():
        return load_llama(smollm2_path(), param_dtype=dtype, dtype=dtype)
    config = {"small": smollm2_135m, "full": llama2_7b}[size](dtype=dtype)

    @jax.jit
    def initial():
        state = nnx.state(Llama(config, rngs=nnx.Rngs(0)))
        return jax.tree.map(lambda x: x.astype(dtype), state)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, initial())


def _has_smollm2() -> bool:
    from mmqa_jax.weights.gguf_io import smollm2_path

    try:
        return smollm2_path().exists()
    except UserError:
        return False


def _text(size: str, load: Load) -> list[int]:
    """Token ids of real English: the Python language's reference, which every Python brings."""
    needed = max(load.prompts * load.prompt, load.text)
    if size == "small" and _has_smollm2():
        import transformers

        from mmqa_jax.weights.gguf_io import smollm2_path

        path = smollm2_path()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        prose = "\n".join(pydoc_data.topics.topics.values())
        ids = tokenizer(prose[: 8 * needed])["input_ids"]
        if len(ids) < needed:
            raise UserError(f"bench llm: {len(ids)} tokens of text, {needed} are asked for.")
        return ids[:needed]
    return np.random.default_rng(0).integers(3, 30_000, needed).tolist()


class OurSide:
    """The engine; takes the model over.

    Attributes:
      decode_seconds: of the last `answers`, what came after the first new tokens.
    """

    decode_seconds: float

    def __init__(self, model: Llama, load: Load, **changes: Any):
        import jax
        from flax import nnx

        from mmqa_jax.decoding.engine import Engine
        from mmqa_jax.decoding.slot_runner import EngineConfig

        sizes: dict[str, Any] = {"slots": load.batch, "length": load.prompt + load.decode}
        if jax.default_backend() != "cpu":
            sizes |= {"buckets": (128, 1024), "prefill_tokens": 16384, "block": 0}
        config, self._load = model.config, load
        self._weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
        if not config.tied:
            self._weights -= model.tokens.table[...].nbytes  # a step reads a row per slot of it
        size = np.dtype(config.dtype).itemsize
        self._of_token = 2 * config.layers * config.kv_heads * config.head_size * size
        self.engine = Engine(model, config=EngineConfig(**sizes, **changes))

    def decode_floor(self, bandwidth: float) -> float:
        """Tokens/s at which reading weights, keys and values takes up the memory bandwidth."""
        load = self._load
        held = load.batch * (load.prompt + load.decode / 2) * self._of_token
        return load.batch * bandwidth / (self._weights + held)

    def answers(self, prompts: Prompts, new: int) -> Answers:
        """Greedy answers of exactly `new` tokens, nothing known from earlier calls."""
        from mmqa_jax.decoding.requests import Request

        self.engine.forget()
        before = self.engine.throughput.decode_seconds
        requests = (Request(n, prompt, new) for n, prompt in enumerate(prompts))
        found = {
            result.id: result.candidates[0].tokens for result in self.engine.generate(requests)
        }
        self.decode_seconds = self.engine.throughput.decode_seconds - before
        return [found[n] for n in range(len(prompts))]

    def perplexity(self, text: Sequence[int]) -> float:
        """exp of the mean negative log-probability of a text's tokens, in windows."""
        from mmqa_jax.decoding.requests import Scoring

        self.engine.forget()
        windows = [text[n : n + _WINDOW] for n in range(0, len(text), _WINDOW)]
        asked = [Scoring(n, part[:1], [part[1:]]) for n, part in enumerate(windows)]
        scores = [scores.scores[0] for scores in self.engine.score(asked)]
        count = sum(len(score.logprobs) for score in scores)
        return math.exp(-sum(score.total for score in scores) / count)


class TorchSide:
    """transformers' LlamaForCausalLM with the weights of ours, in batches of `batch`.

    Attributes:
      decode_seconds: as OurSide's.
    """

    decode_seconds: float

    def __init__(self, model: Llama, batch: int, dtype: str | None = None):
        import torch

        from mmqa_jax.bench.peers import torch_llama

        self._model, self._batch = torch_llama(model), batch
        if dtype is not None:
            self._model.to(getattr(torch, dtype))

    def answers(self, prompts: Prompts, new: int) -> Answers:
        """Greedy answers of exactly `new` tokens to prompts of one length."""
        import torch
        from transformers import StoppingCriteriaList

        times: list[float] = []  # of every new token

        def mark(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """A stopping criterion, called behind every token, that never stops."""
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        found: Answers = []
        self.decode_seconds = 0.0
        for start in range(0, len(prompts), self._batch):
            ids = torch.tensor(prompts[start : start + self._batch], device=self._model.device)
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    pad_token_id=0,
                    stopping_criteria=StoppingCriteriaList([mark]),
                )
            self.decode_seconds += times[-1] - times[-new]
            found += [tuple(row) for row in out[:, ids.shape[1] :].tolist()]
        return found
