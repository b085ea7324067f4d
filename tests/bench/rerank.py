"""`python -m tests.bench rerank`: source selection by VLP, every pair in full against sources encoded once.

A BERT-base VLP with random weights scores WebQA's test set against the whole collection, which
the paper (section 6.2) calls prohibitively expensive (~3 years). `plain` is VLP as published, but
on sequences without padding; `cached_J` is models.vlp.two_sided with J joint layers. Measured are
a batch of plain pairs, a batch of sources, a batch of questions and a block of pairs, each for a
picture and for a snippet, weighted as in WebQA; the whole takes

    seconds = sources * t_source + questions * t_question + pairs * t_pair

on this one device, without reading pictures and texts from disk. `ours` is pairs over these
seconds, `peer` the same of plain VLP, `floor` what the operations take at the highest rate that
square matrices reach here. `days` and `years` are of the whole.

Lengths are the means of the paper's table 3 at 1.4 tokens a word: questions of 24 tokens, captions
of 18 after 100 regions, snippets of 56.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mmqa_jax.core.errors import RunError
from tests.bench import Options
from tests.bench.runner import Case, Peak, Work, measure, program_flops, start_device
from tests.bench.timing import interleave

if TYPE_CHECKING:
    from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs

# WebQA: test questions, pictures and snippets (notebook of the data's repository).
QUESTIONS, PICTURES, SNIPPETS = 7_540, 389_750, 544_489
SOURCES = PICTURES + SNIPPETS
PAIRS = QUESTIONS * SOURCES
_QUESTION = 24  # tokens of a question
_KINDS = {"picture": (100, 18), "snippet": (0, 56)}  # regions, tokens of text
_SHARES = {"picture": PICTURES / SOURCES, "snippet": SNIPPETS / SOURCES}
_ROUNDS = 3
_AGREEMENT = {"float32": 1e-3, "bfloat16": 0.1}  # of cached and masked log-odds


@dataclasses.dataclass(frozen=True)
class Load:
    """The model, and the size of each kind of batch."""

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


def load_of(size: str) -> Load:
    """`small` in float32 for a CPU, `full` in bfloat16 with larger batches for an accelerator."""
    from mmqa_jax.models.vlp.network import vlp_base_x101

    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    if size == "small":
        return Load(vlp_base_x101(**no_dropout))
    large = {"plain": 256, "sources": 256, "questions": 256, "matmul": 8192}
    blocks = {"alone": (256, 256), "together": (64, 32)}
    return Load(vlp_base_x101(**no_dropout, dtype="bfloat16"), **large, **blocks)


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected; `small` on a CPU, `full` elsewhere."""
    return run_load(load_of(start_device(options)), options)


def run_load(load: Load, options: Options) -> dict[str, Any]:
    """Measures the rows of a load; returns what `--json` prints."""
    wanted = options.chosen(load.rows)
    rounds, dtype = options.rounds or _ROUNDS, load.config.bert.dtype
    peak = Peak(load.matmul, dtype)
    return measure(
        "rerank",
        _cases(load, wanted, rounds, peak),
        wanted,
        rounds,
        peak=peak,
        job={"questions": QUESTIONS, "sources": SOURCES, "pairs": PAIRS, "paper": "~3 years"},
        tokens={"question": _QUESTION, **{k: sum(v) for k, v in _KINDS.items()}},
        dtype=dtype,
    )


def _cases(load: Load, wanted: tuple[str, ...], rounds: int, peak: Peak) -> Iterator[Case]:
    """Plain VLP, which all ratios are against, and the rows `wanted`."""
    import jax
    from flax import nnx

    def build() -> VLP:
        return load.config.build(rngs=nnx.Rngs(0))

    # One program: each initializer would be one of its own.
    initial = jax.jit(lambda: nnx.state(build()))()
    model = nnx.merge(nnx.graphdef(nnx.eval_shape(build)), initial)
    plain = None
    for name in load.rows:
        if name != "plain" and name not in wanted:
            continue
        joint = 0 if name == "plain" else int(name.removeprefix("cached_"))
        batches = _cached(model, load, joint) if joint else _plain(model, load)
        for batch in batches.values():
            batch.run()  # compiles
        readings = interleave({key: batch.run for key, batch in batches.items()}, rounds)
        peak.measure(rounds)
        seconds = _per_piece(
            {key: statistics.median(readings[key]) / batches[key].count for key in batches}
        )
        flops = _total(_per_piece({key: batch.flops for key, batch in batches.items()})) / PAIRS
        rate, days = PAIRS / _total(seconds), _total(seconds) / 86_400
        notes = {
            "mflop_per_pair": flops / 1e6,
            "source_ms": seconds["source"] * 1e3,
            "question_ms": seconds["question"] * 1e3,
            "pair_us": seconds["pair"] * 1e6,
            "days": days,
            "years": days / 365.25,
            "paper": "~3 years",
        }
        yield Case(name, "pairs/s", rate, plain, flops=flops, notes=notes)
        plain = plain or rate


def _per_piece(values: Mapping[str, float]) -> dict[str, float]:
    """`source`, `question` and `pair` from `source/picture`, `pair/snippet`, ...: the means over
    the kinds of source; missing values are 0."""
    means = {
        what: sum(share * values.get(f"{what}/{kind}", 0.0) for kind, share in _SHARES.items())
        for what in ("source", "pair")
    }
    return {**means, "question": values.get("question", 0.0)}


def _total(values: Mapping[str, float]) -> float:
    """Of WebQA's test set against the whole collection."""
    return SOURCES * values["source"] + QUESTIONS * values["question"] + PAIRS * values["pair"]


class _Batch(NamedTuple):
    """A call that is timed, how many pieces it works on, and the operations of one piece."""

    run: Work
    count: int
    flops: float


def _batch(model: VLP, method: str, count: int, *inputs: Any) -> _Batch:
    run = functools.partial(_jitted(model, method), *inputs)
    return _Batch(run, count, flops(model, method, *inputs) / count)


def flops(model: VLP, method: str, *inputs: Any) -> float:
    """Operations of a method, with its layers unrolled."""
    from flax import nnx

    config = model.config
    config = dataclasses.replace(config, bert=dataclasses.replace(config.bert, unroll=True))
    rest = [model.sides] if hasattr(model, "sides") else []
    unrolled = nnx.eval_shape(lambda: type(model)(config, *rest, rngs=nnx.Rngs()))
    graphdef, state = nnx.split(unrolled)
    return program_flops(
        lambda state, *inputs: getattr(nnx.merge(graphdef, state), method)(*inputs), state, *inputs
    )


def _plain(model: VLP, load: Load) -> dict[str, _Batch]:
    return {
        f"pair/{kind}": _batch(
            model, "source_logits", load.plain, _inputs(load.config, load.plain, *sizes, _QUESTION)
        )
        for kind, sizes in _KINDS.items()
    }


def _cached(model: VLP, load: Load, joint: int) -> dict[str, _Batch]:
    """The batches of one number of joint layers, checked against the masked sequence."""
    import numpy as np

    from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides

    config = load.config
    two = TwoSidedVLP.of(model, TwoSides(joint, match_type=load.match_type))
    sources, questions = load.alone if joint == 1 else load.together
    question = _batch(
        two, "encode_questions", load.questions, _inputs(config, load.questions, 0, 0, _QUESTION)
    )
    encoded = _filled(question.run(), questions)
    batches = {"question": question}
    for kind, sizes in _KINDS.items():
        source = _batch(
            two, "encode_sources", load.sources, _inputs(config, load.sources, *sizes, 0)
        )
        memory = _filled(source.run(), sources)
        pair = _batch(two, "pair_logits", sources * questions, memory, encoded)
        batches |= {f"source/{kind}": source, f"pair/{kind}": pair}
        if kind == "snippet":
            packed = _jitted(two, "source_logits")(_inputs(config, 1, *sizes, _QUESTION))
            _agree(np.asarray(packed)[0], np.asarray(pair.run())[0, 0], load)
    return batches


def _agree(expected: Any, computed: Any, load: Load) -> None:
    difference = float(abs((expected[0] - expected[1]) - (computed[0] - computed[1])))
    most = _AGREEMENT[load.config.bert.dtype]
    if not difference <= most:
        raise RunError(
            f"cached and masked log-odds differ by {difference:.2g}, at most "
            f"{most:g} was expected, so they do not compute the same; run "
            "tests/unit/test_two_sided_vlp.py."
        )


def _jitted(model: Any, method: str) -> Callable[..., Any]:
    import jax
    from flax import nnx

    graphdef, state = nnx.split(model)
    call = jax.jit(lambda state, *inputs: getattr(nnx.merge(graphdef, state), method)(*inputs))
    return lambda *inputs: jax.block_until_ready(call(state, *inputs))


def _filled(tree: Any, rows: int) -> Any:
    """The tree with its first axis repeated to `rows`."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def fill(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.resize(x, (rows, *x.shape[1:])), tree)

    return fill(tree)


def _inputs(config: VLPConfig, rows: int, regions: int, text: int, question: int) -> VLPInputs:
    """Packed sequences of these sizes: [CLS] regions, text [SEP] question.

    Row 0 has the same source and question whichever other parts the sequence has.
    """
    import jax
    import numpy as np

    from mmqa_jax.models.vlp.network import VLPInputs

    def tokens(seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(
            config.bert.vocab_size // 2, config.bert.vocab_size, (rows, count)
        )

    length = 1 + regions + text + 1 + question
    slots = np.zeros((rows, 1 + regions), int)
    ids = np.concatenate([slots, tokens(1, text), slots[:, :1] + 1, tokens(2, question)], axis=1)
    rng = np.random.default_rng(3)
    inputs = VLPInputs(
        input_ids=ids,
        token_type_ids=np.where(np.arange(length) < length - question, 4, 5) + 0 * ids,
        position_ids=np.arange(length) + 0 * ids,
        context_mask=np.ones((rows, length), bool),
        answer_mask=np.zeros((rows, length), bool),
        region_features=rng.random((rows, regions, config.region_features), "f4"),
        region_positions=rng.random((rows, regions, config.region_positions), "f4"),
    )
    return jax.device_put(inputs)
