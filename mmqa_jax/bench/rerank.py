"""`mmqa bench rerank`: source selection by VLP, every pair anew against sources read once.

A BERT-base VLP with random weights scores WebQA's test set against the whole collection, which
the paper (section 6.2) calls prohibitively expensive (~3 years). `plain` is VLP as published, but
on sequences without padding; `cached_J` is models.two_sided_vlp with J joint layers. Measured are
a batch of plain pairs, a batch of sources, a batch of questions and a block of pairs, each for a
picture and for a snippet, weighted as WebQA has them; the whole takes

    seconds = sources * t_source + questions * t_question + pairs * t_pair

on this device, all on one, without reading pictures and texts from disk. `ours` is pairs over
these seconds, `peer` what plain VLP does, `floor` what the products take at the highest rate that
square matrices reach here. `days` and `years` are of the whole.

Lengths are the means of the paper's table 3 at 1.4 tokens a word: questions of 24 tokens, captions
of 18 behind 100 regions, snippets of 56.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmqa_jax.bench import Options
from mmqa_jax.bench.timing import device_name, interleave, stolen_share
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.progress import Progress

if TYPE_CHECKING:
    from mmqa_jax.models.vlp import VLP, VLPConfig, VLPInputs

# WebQA: test questions, pictures and snippets (notebook of the data's repository).
QUESTIONS, PICTURES, SNIPPETS = 7_540, 389_750, 544_489
SOURCES = PICTURES + SNIPPETS
PAIRS = QUESTIONS * SOURCES
_ASKED = 24  # tokens of a question
_KINDS = {"picture": (100, 18), "snippet": (0, 56)}  # regions, tokens of text
_SHARES = {"picture": PICTURES / SOURCES, "snippet": SNIPPETS / SOURCES}
_ROUNDS = 3
_AGREEMENT = {"float32": 1e-3, "bfloat16": 0.1}  # of cached and masked log-odds
_DAY = 86_400.0


@dataclasses.dataclass(frozen=True)
class Load:
    """The model, and how much of each kind of work is done at a time."""

    config: VLPConfig
    joint_layers: tuple[int, ...] = (1, 2, 4, 12)
    match_type: int | None = 1
    plain: int = 4  # pairs of plain VLP
    sources: int = 4
    questions: int = 32
    alone: tuple[int, int] = (64, 64)  # sources and questions of a block with one joint layer
    together: tuple[int, int] = (8, 8)  # with more
    matmul: int = 2048  # side of the square matrices

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows."""
        return ("plain", *(f"cached_{joint}" for joint in self.joint_layers))


def small() -> Load:
    """For a CPU: float32."""
    from mmqa_jax.models.vlp import vlp_base_x101

    return Load(vlp_base_x101(dropout=0.0, attention_dropout=0.0))


def full() -> Load:
    """For an accelerator: bfloat16, larger batches."""
    from mmqa_jax.models.vlp import vlp_base_x101

    return Load(
        vlp_base_x101(dropout=0.0, attention_dropout=0.0, dtype="bfloat16"),
        plain=256,
        sources=256,
        questions=256,
        alone=(256, 256),
        together=(64, 32),
        matmul=8192,
    )


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those asked for; `small` on a CPU, `full` elsewhere."""
    import jax

    from mmqa_jax.core.startup import start

    start()
    size = options.size or ("small" if jax.default_backend() == "cpu" else "full")
    return measure(small() if size == "small" else full(), options)


def measure(load: Load, options: Options) -> dict[str, Any]:
    """Measures the rows of a load; returns what `--json` prints."""
    import jax
    from flax import nnx

    from mmqa_jax.models.vlp import VLP

    # Ratios are against plain VLP: it is measured whatever is asked for.
    wanted = options.chosen(load.rows)
    rounds, stolen = options.rounds or _ROUNDS, stolen_share()
    model = VLP(load.config, rngs=nnx.Rngs(0))
    costs: dict[str, Cost] = {}
    with Progress("Measuring source selection", len({"plain", *wanted}) + 1, "rows") as progress:
        square = _matmul(load)
        peak = [2 * load.matmul**3 / second for second in _seconds({"": square}, rounds)[""]]
        progress.advance()
        for name in load.rows:
            if name != "plain" and name not in wanted:
                continue
            joint = 0 if name == "plain" else int(name.removeprefix("cached_"))
            works = _plain(model, load) if not joint else _cached(model, load, joint)
            flops = {key: work.flops for key, work in works.items()}
            readings = _seconds({key: work.run for key, work in works.items()}, rounds)
            seconds = {key: statistics.median(readings[key]) / works[key].count for key in works}
            costs[name] = Cost.of(seconds, flops)
            peak.append(2 * load.matmul**3 / min(_seconds({"": square}, 1)[""]))
            progress.advance()
    return {
        "bench": "rerank",
        "device": device_name(),
        "rows": [_row(name, costs[name], costs["plain"], max(peak)) for name in wanted],
        "job": {"questions": QUESTIONS, "sources": SOURCES, "pairs": PAIRS, "paper": "~3 years"},
        "tokens": {"question": _ASKED, **{k: sum(v) for k, v in _KINDS.items()}},
        "dtype": load.config.bert.dtype,
        "rounds": rounds,
        "matmul_gflops": _digits(max(peak) / 1e9),
        "stolen_share": round(stolen(), 3),
        "versions": {"jax": jax.__version__},
    }


class Cost(NamedTuple):
    """Seconds, and operations of matrix products, per piece of work, averaged over the kinds."""

    source: float
    question: float
    pair: float
    source_flops: float
    question_flops: float
    pair_flops: float

    @classmethod
    def of(cls, seconds: Mapping[str, float], flops: Mapping[str, float]) -> Cost:
        """From values of `source/picture`, `pair/snippet`, `question`; what is absent is 0."""
        found = []
        for values in (seconds, flops):
            source, pair = (
                sum(share * values.get(f"{what}/{kind}", 0.0) for kind, share in _SHARES.items())
                for what in ("source", "pair")
            )
            found += [source, values.get("question", 0.0), pair]
        return cls(*found)

    @property
    def total_seconds(self) -> float:
        """Of WebQA's test set against the whole collection."""
        return SOURCES * self.source + QUESTIONS * self.question + PAIRS * self.pair

    @property
    def total_flops(self) -> float:
        """The same in operations."""
        return (
            SOURCES * self.source_flops + QUESTIONS * self.question_flops + PAIRS * self.pair_flops
        )


def _row(name: str, cost: Cost, plain: Cost, peak: float) -> dict[str, Any]:
    """What is printed; peak in FLOP/s."""
    rate, flops = PAIRS / cost.total_seconds, cost.total_flops / PAIRS
    is_plain = cost is plain
    days = cost.total_seconds / _DAY
    return {
        "name": name,
        "ours": _digits(rate),
        "peer": None if is_plain else _digits(PAIRS / plain.total_seconds),
        "ratio": None if is_plain else _digits(plain.total_seconds / cost.total_seconds),
        "unit": "pairs/s",
        "floor": _digits(peak / flops),
        "mflop_per_pair": _digits(flops / 1e6),
        "gflops": _digits(rate * flops / 1e9),
        "of_peak": round(rate * flops / peak, 3),
        "source_ms": _digits(cost.source * 1e3),
        "question_ms": _digits(cost.question * 1e3),
        "pair_us": _digits(cost.pair * 1e6),
        "days": _digits(days),
        "years": _digits(days / 365.25),
        "paper": "~3 years",
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


class _Work(NamedTuple):
    """What is timed, how many pieces one call makes, and the operations of a piece."""

    run: Callable[[], Any]
    count: int
    flops: float


def _seconds(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    for work in sides.values():
        work()  # compiles
    return interleave(sides, rounds)


def _matmul(load: Load) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (load.matmul, load.matmul))
    x = x.astype(load.config.bert.dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    return lambda: product(x).block_until_ready()


def _plain(model: VLP, load: Load) -> dict[str, _Work]:
    logits = _jitted(model, "source_logits")
    return {
        f"pair/{kind}": _Work(
            _ready(logits, _inputs(load.config, load.plain, *sizes, _ASKED)),
            load.plain,
            plain_flops(load.config, *sizes, _ASKED),
        )
        for kind, sizes in _KINDS.items()
    }


def _cached(model: VLP, load: Load, joint: int) -> dict[str, _Work]:
    """The works of one number of joint layers, checked against the masked sequence."""
    import jax
    import jax.numpy as jnp

    from mmqa_jax.models.two_sided_vlp import TwoSidedVLP, TwoSides

    config, sides = load.config, TwoSides(joint, match_type=load.match_type)
    two = TwoSidedVLP.of(model, sides)
    encode_sources, encode_questions, pair_logits = (
        _jitted(two, name) for name in ("encode_sources", "encode_questions", "pair_logits")
    )
    sources, questions = load.alone if joint == 1 else load.together
    ask = _inputs(config, load.questions, 0, 0, _ASKED)
    asked = _filled(encode_questions(ask), questions)
    flops = question_flops(config, sides, _ASKED)
    works = {"question": _Work(_ready(encode_questions, ask), load.questions, flops)}
    for kind, sizes in _KINDS.items():
        read = _inputs(config, load.sources, *sizes, 0)
        memory = encode_sources(read)
        works[f"source/{kind}"] = _Work(
            _ready(encode_sources, read), load.sources, source_flops(config, *sizes)
        )
        works[f"pair/{kind}"] = _Work(
            _ready(pair_logits, _filled(memory, sources), asked),
            sources * questions,
            pair_flops(config, sides, *sizes, _ASKED),
        )
        if kind == "snippet":
            pair = _inputs(config, 1, *sizes, _ASKED)
            one = jax.tree.map(lambda x: x[:1], (memory, asked))
            _agree(_jitted(two, "source_logits")(pair)[0], jnp.ravel(pair_logits(*one)), load)
    return works


def _agree(expected: Any, found: Any, load: Load) -> None:
    difference = float(abs((expected[0] - expected[1]) - (found[0] - found[1])))
    most = _AGREEMENT[load.config.bert.dtype]
    if not difference <= most:
        raise RunError(
            f"bench rerank: cached and masked log-odds differ by {difference:.2g}, at most "
            f"{most:g} was expected, so they do not compute the same; run "
            "tests/unit/test_two_sided_vlp.py."
        )


def _jitted(model: Any, method: str) -> Callable[..., Any]:
    import jax
    from flax import nnx

    graphdef, state = nnx.split(model)
    call = jax.jit(lambda state, *given: getattr(nnx.merge(graphdef, state), method)(*given))
    return lambda *given: call(state, *given)


def _ready(call: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    import jax

    return lambda: jax.block_until_ready(call(*given))


def _filled(tree: Any, rows: int) -> Any:
    """The tree with its first axis repeated to `rows`."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.resize(x, (rows, *x.shape[1:])), tree)


def _inputs(config: VLPConfig, rows: int, regions: int, text: int, asked: int) -> VLPInputs:
    """Packed sequences of these sizes: [CLS] regions, text [SEP] question, all alike in shape.

    Row 0 has the same source and question whatever else the sequence has.
    """
    import jax.numpy as jnp
    import numpy as np

    from mmqa_jax.models.vlp import VLPInputs

    def words(seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(
            config.bert.vocab_size // 2, config.bert.vocab_size, (rows, count)
        )

    length = 1 + regions + text + 1 + asked
    slots = np.zeros((rows, 1 + regions), int)
    ids = np.concatenate([slots, words(1, text), slots[:, :1] + 1, words(2, asked)], axis=1)
    rng = np.random.default_rng(3)
    return VLPInputs(
        input_ids=jnp.asarray(ids),
        token_type_ids=jnp.asarray(np.where(np.arange(length) < length - asked, 4, 5) + 0 * ids),
        position_ids=jnp.asarray(np.arange(length) + 0 * ids),
        context_mask=jnp.ones((rows, length), bool),
        answer_mask=jnp.zeros((rows, length), bool),
        region_features=jnp.asarray(rng.random((rows, regions, config.region_features), "f4")),
        region_positions=jnp.asarray(rng.random((rows, regions, config.region_positions), "f4")),
    )


# Operations of the matrix products, two per multiplication and addition.


def plain_flops(config: VLPConfig, regions: int, text: int, asked: int) -> float:
    """Of one pair in VLP: [CLS] regions, text [SEP] question; the last layer for [CLS] alone."""
    length, before = 2 + regions + text + asked, config.bert.layers - 1
    whole = before * _layer(config, length, length, length)
    return _frontend(config, regions) + whole + _layer(config, length, 1, length)


def source_flops(config: VLPConfig, regions: int, text: int) -> float:
    """Of one source: all layers but the last, of which it needs keys and values only."""
    length, before = 2 + regions + text, config.bert.layers - 1
    whole = before * _layer(config, length, length, length)
    return _frontend(config, regions) + whole + _layer(config, length, 0, 0)


def question_flops(config: VLPConfig, sides: Any, asked: int) -> float:
    """Of one question: its lower layers, and the projections of the first joint one."""
    length, width = 2 + asked, config.bert.hidden
    tokens = (1 + asked) * (1 if sides.match_type is None else 2)
    rows = 1 if sides.joint_layers == 1 else tokens
    lower = (config.bert.layers - sides.joint_layers) * _layer(config, length, length, length)
    return lower + 2 * width**2 * (2 * tokens + rows)


def pair_flops(config: VLPConfig, sides: Any, regions: int, text: int, asked: int) -> float:
    """Of one pair whose source and question are kept."""
    trunk, source, tokens = config.bert, 2 + regions + text, 1 + asked
    own = tokens * (1 if sides.match_type is None else 2)
    rows = 1 if sides.joint_layers == 1 else tokens
    first = rows * (_after(config) + 4 * trunk.hidden * (source + own))
    if sides.joint_layers == 1:
        return first
    between = (sides.joint_layers - 2) * _layer(config, tokens, tokens, source + tokens)
    return first + between + _layer(config, tokens, 1, source + tokens)


def _layer(config: VLPConfig, columns: int, rows: int, seen: int) -> float:
    """Keys and values of `columns` tokens; all else of `rows` tokens that see `seen` columns."""
    width = config.bert.hidden
    query = 2 * width**2
    return columns * 4 * width**2 + rows * (query + 4 * width * seen + _after(config))


def _after(config: VLPConfig) -> float:
    """Of one token behind the attention: its output projection and the MLP."""
    return 2 * config.bert.hidden**2 + 4 * config.bert.hidden * config.bert.mlp


def _frontend(config: VLPConfig, regions: int) -> float:
    sizes: Sequence[int] = (config.region_features, *config.visual_hidden, config.bert.hidden)
    content = sum(2 * a * b for a, b in itertools.pairwise(sizes))
    return regions * (content + 2 * config.region_positions * config.bert.hidden)
