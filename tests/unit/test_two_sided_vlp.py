"""The two-sided VLP: cached scores are those of the masked sequence, in value and gradient."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_corpus import CORPUS, PACKING, QUESTIONS, make_reader

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.atlas.reader import AtlasPackingConfig
from mmqa_jax.data.batches.packing import INPUT_FIELDS, Example, Packer, RawExample, batch
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.common.layers import attention
from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides
from mmqa_jax.tasks.rerank import two_sides
from mmqa_jax.tasks.vlp import RerankObjective
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

LAYERS = 3
TRUNK = BertConfig(
    vocab_size=30522, hidden=24, layers=LAYERS, heads=4, mlp=40, positions=96, types=6, eps=1e-5,
    init_stddev=0.3, dropout=0.0, attention_dropout=0.0, unroll=1,
)  # fmt: skip
ATLAS = AtlasPackingConfig(**vars(PACKING))
CONFIG = VLPConfig(TRUNK, PACKING.region_dim, PACKING.position_dim, visual_hidden=())
SOURCES = (4, 8, 17, 40, 43, 59)  # corpus rows: snippets of 11 to 19 words, and pictures
ASKED = [q.question for q in QUESTIONS[:3]] + [
    "which snippet of the long border mentions picture 3 ?", "",
]  # fmt: skip


@functools.cache
def parameters() -> nnx.State:
    return nnx.state(drawn(lambda: VLP(CONFIG, rngs=nnx.Rngs())))


def with_parameters(build: Callable[[], VLP]) -> VLP:
    graphdef, _ = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graphdef, parameters())


def model_of(joint_layers: int, match_type: int | None = None, **trunk) -> TwoSidedVLP:
    config = dataclasses.replace(CONFIG, bert=dataclasses.replace(TRUNK, **trunk))
    sides = TwoSides(joint_layers, 5, match_type)
    return with_parameters(lambda: TwoSidedVLP(config, sides, rngs=nnx.Rngs()))


def arrays_of(packed: list[dict]) -> VLPInputs:
    arrays = batch(packed)
    return VLPInputs(**{name: arrays[name] for name in INPUT_FIELDS})


@functools.cache
def sequences() -> tuple[list[VLPInputs], list[VLPInputs], VLPInputs]:
    """All pairs by source (in the shape that VLP gives them); sources; questions.

    Shapes differ between the three on purpose: nothing may depend on padding.
    """
    reader = make_reader()
    packer = Packer(reader.tokenizer, PACKING)
    tokens = [reader.tokenizer.encode(text) for text in ASKED]
    joint, alone = [], []
    for row in SOURCES:
        raw, picture = RawExample("", (reader.raw(row),)), reader.is_image[row]
        example = reader.example(raw, (), ())
        bucket, short = (2, 2) if picture else (1, 0)
        joint.append(
            arrays_of(
                [packer.pack_for_selection(example._replace(question=t), bucket) for t in tokens]
            )
        )
        alone.append(arrays_of([packer.pack_for_selection(example, short)]))
    questions = arrays_of([packer.pack_for_selection(Example((), t), 0) for t in tokens])
    return joint, alone, questions


@functools.partial(jax.jit, static_argnums=0)
def _masked(graphdef, state, inputs: VLPInputs) -> jax.Array:
    return nnx.merge(graphdef, state).source_logits(inputs)


@functools.partial(jax.jit, static_argnums=0)
def _kept(graphdef, state, sources: VLPInputs, questions: VLPInputs) -> jax.Array:
    model = nnx.merge(graphdef, state)
    return model.pair_logits(model.encode_sources(sources), model.encode_questions(questions))


SNIPPETS, PICTURES = slice(0, 3), slice(3, 6)  # of SOURCES: their shapes, a program each


def joined(model: TwoSidedVLP, *kinds: slice) -> np.ndarray:
    """logits of the masked sequences [sources, questions, 2]."""
    inputs = [one for kind in kinds for one in sequences()[0][kind]]
    return np.stack([_masked(*nnx.split(model), one) for one in inputs])


def cached(model: TwoSidedVLP, *kinds: slice) -> np.ndarray:
    """The same from what is kept of both sides, the sources of a kind at a time."""
    _, alone, questions = sequences()
    found = []
    for kind in kinds:
        sources = jax.tree.map(lambda *x: np.concatenate(x), *alone[kind])
        found.append(_kept(*nnx.split(model), sources, questions))
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("joint_layers", "match_type", "kinds"), [(2, 1, (SNIPPETS, PICTURES)), (3, None, (PICTURES,))]
)
def test_cached_scores_are_those_of_the_masked_sequence(joint_layers, match_type, kinds):
    model = model_of(joint_layers, match_type)
    expected, found = joined(model, *kinds), cached(model, *kinds)
    assert found.shape == (3 * len(kinds), len(ASKED), 2)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Scores depend on both sides, so that no mix-up of pairs could pass.
    odds = expected[..., 0] - expected[..., 1]
    assert (
        min(np.ptp(odds, axis=0).min(), np.ptp(odds, axis=1).min()) > 1e-3
    )  # a hundred times the tolerance


def test_both_are_what_the_description_says():
    """One pair, unpadded, with the layers' own pieces and no mask at all."""
    model = model_of(2, 1)
    joint, _, questions = sequences()
    place = 1
    inputs = jax.tree.map(lambda x: np.asarray(x)[3:4], joint[place])
    end = int(np.flatnonzero(inputs.context_mask[0])[-1]) + 1
    count = int(questions.context_mask[3].sum()) - 2  # tokens of question 3
    split = end - count - 1  # where [SEP] stands

    ids = np.asarray(inputs.input_ids[0])
    words = np.array([ids[0], *ids[split + 1 : end]])
    shared = np.isin(words, ids[1:split]) & (np.arange(1 + count) > 0)
    assert 2 < shared.sum() < count
    graphdef, state = nnx.split(model)

    @jax.jit
    def by_hand(state):
        model = nnx.merge(graphdef, state)

        def embedded(ids, positions, types):
            return model.bert.embeddings(*(jnp.array([x]) for x in (ids, positions, types)))

        source = embedded(ids[:split], range(split), [4] * split)
        question, marked = (
            embedded(words, range(1 + count), np.where(which, 1, [4] + [5] * count))
            for which in (np.zeros(1 + count, bool), shared)
        )
        mark = marked - question
        for number in range(LAYERS):
            layer = model._layer(number)
            if number == 1:
                question = question + mark
            of_source, of_question = layer.project(source), layer.project(question)
            _, *seen = of_question
            if number >= 1:
                seen = [jnp.concatenate(x, axis=1) for x in zip(of_source[1:], seen, strict=True)]
            question = layer.finish(question, attention(of_question[0], *seen))
            source = layer.finish(source, attention(*of_source))
        return model.source_head(question[:, 0])

    expected = by_hand(state)
    np.testing.assert_allclose(joined(model, SNIPPETS)[place, 3], expected[0], atol=1e-5)


def test_training_through_either_is_the_same():
    """Losses, and how they change along random directions: a program of its gradients is twice as large."""
    model = model_of(2, 1)
    graphdef, state = nnx.split(model)
    joint, alone, questions = sequences()
    labels = np.array([0, 1, 1, 0, 1])

    def loss(logits):
        return -jax.nn.log_softmax(logits)[np.arange(len(labels)), labels].mean()

    def masked(state):
        return loss(nnx.merge(graphdef, state).source_logits(joint[4]))

    def kept(state):
        model = nnx.merge(graphdef, state)
        sources, asked = model.encode_sources(alone[4]), model.encode_questions(questions)
        return loss(model.pair_logits(sources, asked)[0])

    @jax.jit
    def both(state, direction):
        return [jax.jvp(of, (state,), (direction,)) for of in (masked, kept)]

    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), state)
        expected, found = jax.device_get(both(state, direction))
        assert abs(expected[1]) > 1e-2
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_its_parameters_are_vlps():
    """A checkpoint of one fits the other, and source selection of VLP itself is untouched."""
    plain = with_parameters(lambda: VLP(CONFIG, rngs=nnx.Rngs()))
    model = TwoSidedVLP.of(plain, TwoSides(2, 5, 1))
    ours, theirs = (
        {path: np.asarray(variable[...]) for path, variable in nnx.to_flat_state(nnx.state(one))}
        for one in (model, plain)
    )
    assert ours.keys() == theirs.keys()
    for path in ours:
        np.testing.assert_array_equal(ours[path], theirs[path])
    np.testing.assert_array_equal(cached(model, PICTURES), cached(model_of(2, 1), PICTURES))


def test_in_bfloat16_it_is_near():
    models = model_of(2, 1), model_of(2, 1, dtype="bfloat16")
    exact, coarse = (cached(model, PICTURES) for model in models)
    assert exact.dtype == coarse.dtype == np.float32
    difference = np.abs(exact - coarse).max()
    assert 0 < difference < 0.05 * np.abs(exact).max()


def test_training_drops_and_inference_does_not():
    inputs = sequences()[0][0]
    (graphdef, state), plain = (
        nnx.split(model_of(2, 1, dropout=share, attention_dropout=share)) for share in (0.2, 0.0)
    )

    @jax.jit
    def logits(state, seed):
        key = jax.random.key(seed)
        return nnx.merge(graphdef, state).source_logits(inputs, dropout_key=key)

    one, again, other = (jax.device_get(logits(state, seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3
    without_key = [
        jax.make_jaxpr(lambda state, of=of: nnx.merge(of, state).source_logits(inputs))(state)
        for of in (graphdef, plain[0])
    ]
    assert str(without_key[0]) == str(without_key[1])  # the same operations


def test_the_rerank_task_trains_it():
    task = RerankObjective(CONFIG, TwoSides(2, 5, 1))
    model = with_parameters(lambda: task.init(jax.random.key(0)))
    assert type(model) is TwoSidedVLP
    graphdef, state = nnx.split(model)
    rows = len(ASKED)
    ones = np.ones(rows, np.float32)
    data = {"inputs": sequences()[0][0], "labels": ones.astype(int), "weights": ones}
    loss, metrics = jax.jit(lambda state: task.loss(nnx.merge(graphdef, state), data, None))(state)
    first, second = joined(model, SNIPPETS)[0].T  # logits of source 0 with each question
    np.testing.assert_allclose(loss, np.logaddexp(0, second - first).mean(), rtol=1e-5)
    assert 0 <= float(metrics["accuracy"]) <= 1


@pytest.mark.parametrize(
    ("section", "packing", "message"),
    [
        ({"joint_layers": 4}, {}, r"model\.joint_layers=4: 1 to the 3 layers"),
        ({"joint_layers": 0}, {}, r"model\.joint_layers=0: 1 to the 3 layers"),
        ({"joint_layers": 1, "match_type": 6}, {}, r"model\.match_type=6: .*use 0 to 5"),
        ({"match_type": 1}, {}, r"model\.match_type=1: .*model\.joint_layers"),
        ({"joint_layers": 1}, {"match_types": (1,)}, r"packing\.match_types=\(1,\): .*match_type"),
        ({"joint_layers": 1}, {"segments": (4, 4)}, r"packing\.segments=\(4, 4\): .*type 4"),
        ({"joint_layers": 1}, {"segments": (4, 2), "per_source": True}, r"\(4, 2\): .*type 2"),
        ({"joint_layers": 1}, {"segments": (4, 9)}, r"packing\.segments: .*token type 9"),
    ],
)
def test_a_config_that_cannot_be_cached_is_refused(section, packing, message):
    with pytest.raises(UserError, match=message):
        two_sides(
            section.get("joint_layers"),
            section.get("match_type"),
            dataclasses.replace(ATLAS, **packing),
            CONFIG,
        )


def test_a_config_without_joint_layers_is_plain_vlp():
    assert two_sides(None, None, ATLAS, CONFIG) is None
    init = RerankObjective(CONFIG).init
    assert type(nnx.eval_shape(lambda: init(jax.random.key(0)))) is VLP
    sides = two_sides(2, None, ATLAS, CONFIG)
    assert sides == TwoSides(2, 5, None)
    assert len(CORPUS) == 60  # SOURCES are rows of it
