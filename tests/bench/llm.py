"""`python -m tests.bench llm`: the generation engine against transformers' `generate`.

Same weights, prompts and threads on both sides, in one process, in turn. `small` is SmolLM2-135M
in float32 (its package's weights, or random ones in its shape), `full` LLaMA-2-7B's shape with
random weights in bfloat16. Rows, in tokens per second but for the last four:

- few_shot: prompts that share their examples, as PICa's and Prophet's do; prompt tokens count.
- different: prompts that have nothing in common.
- prefill: a full batch of prompts and one new token each.
- decode: new tokens of a full batch, without the time that the prompts take. The floor is reading
  the weights and the cached keys and values once per step at the measured memory bandwidth.
- int8_cache, int8_weights: decoding, against our own without them.
- perplexity_int8_cache, perplexity_int8_weights: of real text, against ours without them.
- total_40, total_160, total_400: a processor's seconds of whole processes, see llm_total.py; only
  where they are named by `--only`, as they take minutes, and of SmolLM2 only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pydoc_data.topics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmqa_jax.core.errors import UserError
from tests.bench import Options, llama_cpp, llm_total
from tests.bench.runner import Case, Work, measure, start_device

if TYPE_CHECKING:
    from mmqa_jax.models.llama.network import Llama

_AGAINST_TORCH = ("few_shot", "different", "prefill", "decode")
_INT8 = {"int8_cache": {"cache_dtype": "int8"}, "int8_weights": {"weights": "int8"}}
_PERPLEXITIES = tuple(f"perplexity_{name}" for name in _INT8)
ROWS = (*_AGAINST_TORCH, *_INT8, *_PERPLEXITIES)
_WINDOW = 512  # tokens of text that are scored in one piece

Prompts = Sequence[Sequence[int]]
Answers = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Load:
    """How much work both sides do; lengths are in tokens."""

    prompts: int = 64  # number of prompts, of few_shot and different
    prompt: int = 600  # length of each
    new: int = 10  # new tokens of each
    shared: int = 512  # length of what all few-shot prompts have in common
    batch: int = 16  # sequences decoded together
    decode: int = 64  # new tokens of each, of decode
    text: int = 8192  # length of the text of the perplexity


SMALL = Load()
# 1,024 columns a sequence: with twice as many, 64 sequences would not fit 80 GB.
FULL = Load(prompt=960, new=64, shared=832, batch=64)


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected; `small` on a CPU, `full` elsewhere."""
    size = start_device(options)
    return run_load(size, SMALL if size == "small" else FULL, options)


def run_load(size: str, load: Load, options: Options) -> dict[str, Any]:
    """Measures the rows of a size under a load; returns what `--json` prints."""
    totals = tuple(llm_total.ROWS) if options.only else ()
    wanted = options.chosen((*ROWS, *totals))
    whole = tuple(name for name in wanted if name in totals)
    if whole and size != "small":
        raise UserError(
            f"--only={whole[0]}: is measured with --size=small; give that, or leave it out."
        )
    rest = tuple(name for name in wanted if name not in totals)
    rounds = options.rounds or 1
    return measure(
        "llm",
        itertools.chain(
            llm_total.cases(whole, rounds=rounds, batch=load.batch) if whole else (),
            _cases(size, load, rest, _text(size, load)) if rest else (),
        ),
        wanted,
        rounds,
        model={"small": "SmolLM2-135M, float32", "full": "LLaMA-2-7B's shape, bfloat16"}[size],
        load=dataclasses.asdict(load),
        left_out=[llama_cpp.LEFT_OUT] if whole and not llama_cpp.kinds() else [],
    )


def _cases(size: str, load: Load, wanted: tuple[str, ...], text: Sequence[int]) -> Iterator[Case]:
    """The rows `wanted`, each built when it is needed."""
    if set(wanted) & set(_AGAINST_TORCH):
        model = load_model(size)
        sides: dict[str, OurSide | TorchSide] = {"peer": TorchSide(model, load.batch)}
        if size == "small":
            sides["peer_bfloat16"] = TorchSide(model, load.batch, "bfloat16")
            sides["ours_bfloat16"] = OurSide(load_model(size, "bfloat16"), load)
        sides["ours"] = OurSide(model, load)
        for name in wanted:
            if name == "decode":
                yield _decoding(name, sides, text, load)
            elif name in _AGAINST_TORCH:
                count, new = (load.batch, 1) if name == "prefill" else (load.prompts, load.new)
                prompts = _cut(text, count, load.prompt, load.shared if name == "few_shot" else 0)
                tokens = count * (load.prompt + (0 if name == "prefill" else new))
                yield _case(name, sides, prompts, new, count=tokens)
        del sides, model  # before the next engines are built
    if not set(wanted) <= set(_AGAINST_TORCH):
        plain = OurSide(load_model(size), load)
        for kind, changes in _INT8.items():
            names = [name for name in wanted if name.endswith(kind)]
            other = OurSide(load_model(size), load, **changes) if names else None
            for name in names:
                if name in _PERPLEXITIES:
                    figures = (side.perplexity(text[: load.text]) for side in (other, plain))
                    yield Case(name, "perplexity", *figures)
                else:
                    yield _decoding(name, {"ours": other, "peer": plain}, text, load, floor=False)


def _decoding(
    name: str,
    sides: Mapping[str, OurSide | TorchSide],
    text: Sequence[int],
    load: Load,
    *,
    floor: bool = True,
) -> Case:
    """New tokens/s of a full batch, without the time of its prompts and first tokens."""
    steps = load.decode - 1
    return _case(
        name,
        sides,
        _cut(text, load.batch, load.prompt),
        load.decode,
        count=load.batch * steps,
        read_bytes=steps * sides["ours"].step_bytes() if floor else 0,
        # Sides run one at a time: what the sum grows by is the running one's.
        clock=lambda: sum(side.decode_seconds for side in sides.values()),
    )


def _case(
    name: str, sides: Mapping[str, OurSide | TorchSide], prompts: Prompts, new: int, **more: Any
) -> Case:
    """Greedy answers of `new` tokens by every side."""
    answers: dict[str, Answers] = {}

    def work(name: str, side: OurSide | TorchSide) -> Work:
        # Compiles, and runs every program more than once: a GPU records a program's launches then.
        side.answers(prompts[:2], min(new, 2))
        side.answers(prompts[: side.batch], min(new, 2))

        def answer() -> None:
            answers[name] = side.answers(prompts, new)

        return answer

    def same_answers() -> dict[str, float]:
        pairs = zip(answers["ours"], answers["peer"], strict=True)
        same = [mine == theirs for mine, theirs in pairs]
        return {"same_answers": sum(same) / len(same)}

    works = {name: work(name, side) for name, side in sides.items()}
    return Case(
        name,
        "tokens/s",
        works.pop("ours"),
        works.pop("peer"),
        others=works,
        late_notes=same_answers,
        repeat=False,
        **more,
    )


def _cut(text: Sequence[int], count: int, size: int, shared: int = 0) -> Prompts:
    """`count` prompts of `size` tokens; all begin with the text's first `shared` ones."""
    rest = size - shared
    starts = range(shared, shared + count * rest, rest)
    return [[*text[:shared], *text[start : start + rest]] for start in starts]


def load_model(size: str, dtype: str | None = None) -> Llama:
    """SmolLM2's real weights where its package is installed; otherwise random ones.

    dtype: of parameters and compute; None is float32 for SmolLM2, bfloat16 for LLaMA-2-7B.
    """
    dtype = dtype or {"small": "float32", "full": "bfloat16"}[size]
    import jax
    from flax import nnx

    from mmqa_jax.models.llama.config import llama2_7b, smollm2_135m
    from mmqa_jax.models.llama.network import Llama
    from mmqa_jax.weights.bundled import smollm2_path
    from mmqa_jax.weights.published import load_published

    if size == "small" and _has_smollm2():
        return load_published("llama", smollm2_path(), param_dtype=dtype, dtype=dtype)
    config = {"small": smollm2_135m, "full": llama2_7b}[size](dtype=dtype)

    @jax.jit
    def initial():
        state = nnx.state(Llama(config, rngs=nnx.Rngs(0)))
        return jax.tree.map(lambda x: x.astype(dtype), state)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, initial())


def _has_smollm2() -> bool:
    from mmqa_jax.weights.bundled import smollm2_path

    try:
        return smollm2_path().exists()
    except UserError:
        return False


def _text(size: str, load: Load) -> list[int]:
    """Token ids of real English: the Python language reference, which comes with Python."""
    needed = max(load.prompts * load.prompt, load.text)
    if size == "small" and _has_smollm2():
        import transformers

        from mmqa_jax.weights.bundled import smollm2_path

        path = smollm2_path()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        prose = "\n".join(pydoc_data.topics.topics.values())
        ids = tokenizer(prose[: 8 * needed])["input_ids"]
        if len(ids) < needed:
            raise UserError(f"bench llm: {len(ids)} tokens of text, {needed} are needed.")
        return ids[:needed]
    return np.random.default_rng(0).integers(3, 30_000, needed).tolist()


class OurSide:
    """The engine, which takes over the model's arrays."""

    def __init__(self, model: Llama, load: Load, **changes: Any):
        import jax
        from flax import nnx

        from mmqa_jax.core.mesh import platform
        from mmqa_jax.decoding.engine import Engine
        from mmqa_jax.decoding.slot_runner import EngineConfig

        sizes: dict[str, Any] = {"slots": load.batch, "length": load.prompt + load.decode}
        if platform() != "cpu":
            sizes |= {"buckets": (128, 1024), "prefill_tokens": 16384}
        config, self._load, self.batch = model.config, load, load.batch
        self._weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
        if not config.tied:
            self._weights -= model.tokens.table[...].nbytes  # a step reads one row per slot
        size = np.dtype(config.dtype).itemsize
        self._of_token = 2 * config.layers * config.kv_heads * config.head_size * size
        self.engine = Engine(model, config=EngineConfig(**sizes, **changes))

    def step_bytes(self) -> float:
        """Bytes that a decoding step reads: weights, and keys and values of the whole batch."""
        load = self._load
        held = load.batch * (load.prompt + load.decode / 2) * self._of_token
        return self._weights + held

    @property
    def decode_seconds(self) -> float:
        """Time spent so far on what came after the first new tokens."""
        return self.engine.throughput.decode_seconds

    def answers(self, prompts: Prompts, new: int) -> Answers:
        """Greedy answers of exactly `new` tokens, with nothing cached from earlier calls."""
        from mmqa_jax.decoding.requests import Request

        self.engine.forget()
        requests = (Request(n, prompt, new) for n, prompt in enumerate(prompts))
        answers = {
            result.id: result.candidates[0].tokens for result in self.engine.generate(requests)
        }
        return [answers[n] for n in range(len(prompts))]

    def perplexity(self, text: Sequence[int]) -> float:
        """exp of the mean negative log-probability of a text's tokens, in windows."""
        from mmqa_jax.decoding.requests import Scoring

        self.engine.forget()
        windows = [text[n : n + _WINDOW] for n in range(0, len(text), _WINDOW)]
        requests = [Scoring(n, part[:1], [part[1:]]) for n, part in enumerate(windows)]
        scores = [scores.scores[0] for scores in self.engine.score(requests)]
        count = sum(len(score.logprobs) for score in scores)
        return math.exp(-sum(score.total for score in scores) / count)


class TorchSide:
    """transformers' LlamaForCausalLM with the weights of ours, in batches of `batch`.

    Attributes:
      decode_seconds: as OurSide's.
    """

    def __init__(self, model: Llama, batch: int, dtype: str | None = None):
        import torch

        from tests.bench.torch_reference import torch_llama

        self._model, self.batch, self.decode_seconds = torch_llama(model), batch, 0.0
        if dtype is not None:
            self._model.to(getattr(torch, dtype))

    def answers(self, prompts: Prompts, new: int) -> Answers:
        """Greedy answers of exactly `new` tokens to prompts of one length."""
        import torch
        from transformers import StoppingCriteriaList

        times: list[float] = []  # when each new token was ready

        def mark(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """A stopping criterion, called after every token, that never stops."""
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        answers: Answers = []
        for start in range(0, len(prompts), self.batch):
            ids = torch.tensor(prompts[start : start + self.batch], device=self._model.device)
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
            answers += [tuple(row) for row in out[:, ids.shape[1] :].tolist()]
        return answers
