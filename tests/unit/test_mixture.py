"""Mixtures of corpora: shares, passes, order, and batches that any host can make."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpus import PACKING, QUESTIONS, make_reader
from tiny_llm import flag

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.feed import (
    BatchPlan,
    FeedConfig,
    interleaved,
    mixture_counts,
    mixture_epoch,
)
from mmqa_jax.data.batches.packing import Bucket, Packer
from mmqa_jax.data.batches.retriever import ContrastSampling, contrastive_batches
from mmqa_jax.data.batches.source_reader import PairSampling, rerank_batches
from mmqa_jax.data.batches.texts import TokenExample, example_batches, language_model_batches
from mmqa_jax.data.corpus import member_of, open_mixture
from mmqa_jax.data.records.corpus_records import write_records
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.tasks.task import MixedData
from tests.refusals import refuses

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
WEIGHTS = st.integers(1, 50).map(float) | st.floats(1e-3, 1e3)


@given(st.integers(0, 500), st.lists(WEIGHTS | st.just(0.0), min_size=1, max_size=5))
def test_counts_are_within_one_of_the_shares(total, weights):
    if not sum(weights):
        weights[0] = 1.0
    counts = mixture_counts(total, weights)
    shares = total * np.array(weights) / sum(weights)
    assert counts.sum() == total
    assert (np.abs(counts - shares) < 1 + 1e-9).all()
    assert not counts[np.array(weights) == 0].any()


@given(SIZES, st.data(), st.integers(0, 3))
@settings(max_examples=40)
def test_epochs_have_the_shares_and_passes_show_each_example_once(sizes, data, seed):
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    members = np.repeat(np.arange(len(sizes)), sizes)
    counts, shown = mixture_counts(len(members), weights), Counter()
    if not counts.all():
        refuses(r"less than one of the \d+ examples", mixture_epoch, members, weights, seed, 0)
        return
    for epoch in range(4):
        of_epoch = mixture_epoch(members, weights, seed, epoch)
        chosen = np.concatenate([part for _, part in of_epoch])
        assert np.bincount(members[chosen], minlength=len(sizes)).tolist() == counts.tolist()
        shown.update(chosen.tolist())
        for member, size in enumerate(sizes):  # no example a second time before all have been shown
            times = [shown[i] for i in np.flatnonzero(members == member)]
            assert max(times) - min(times) <= 1
            assert sum(times) == counts[member] * (epoch + 1), size


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200))
def test_every_beginning_of_the_order_has_the_shares(members):
    members = np.array(members)
    order = interleaved(members)
    assert sorted(order.tolist()) == list(range(len(members)))
    for member in np.unique(members):
        own = members[order] == member
        assert (np.diff(order[own]) > 0).all()
        expected = own.mean() * np.arange(1, len(own) + 1)
        assert np.abs(own.cumsum() - expected).max() <= 0.5 + own.mean() * len(set(members)) / 2


EXAMPLES = [TokenExample(np.array([n, n], np.int32), 1) for n in range(12)]
MEMBERS = [0] * 9 + [1] * 3


def feed(rows=None, **more) -> FeedConfig:
    return FeedConfig(batch_size=4, threads=0, seed=3, rows=rows, mixture=(1.0, 1.0), **more)


def batches_of(rows=None):
    return example_batches(
        [[one] for one in EXAMPLES],
        [1.0],
        feed(rows),
        shapes=[Bucket(0, 2)],
        bucket_of=lambda one: 0,
        make=lambda own, bucket: {"ids": np.stack([one.tokens for one in own])},
        members=MEMBERS,
    )


def taken(batches, count):
    return [next(batches)["index"].tolist() for _ in range(count)]


def test_a_batch_depends_on_seed_and_position_alone():
    """Other hosts have its other rows, and a run goes on in the middle of an epoch on other hosts."""
    whole = taken(batches_of(), 9)
    for batch in whole:
        assert np.bincount(np.array(MEMBERS)[batch], minlength=2).tolist() == [2, 2]
    halves = [taken(batches_of(rows), 9) for rows in ((0, 1), (2, 3))]
    assert [[*a, *b] for a, b in zip(*halves, strict=True)] == whole
    first = batches_of((0, 1))
    taken(first, 4)
    state = first.get_state()
    later = [batches_of((n,)) for n in range(4)]
    for one in later:
        one.set_state(state)
    found = zip(*(taken(one, 5) for one in later), strict=True)
    assert [[i for part in parts for i in part] for parts in found] == whole[4:]
    shown = Counter(i for batch in whole[:3] for i in batch)
    assert [sum(shown[i] for i in range(12) if MEMBERS[i] == member) for member in (0, 1)] == [6, 6]


def test_packed_rows_are_of_the_mixture():
    made = language_model_batches(
        [[one] for one in EXAMPLES], [1.0], feed(), length=2, targets=1, members=MEMBERS
    )
    shown = Counter(i for batch in taken(made, 3) for (i,) in batch)
    assert sum(shown[i] for i in range(9, 12)) == 6


def test_a_plan_without_a_mixture_is_as_it_was():
    """The order of the first epoch of a plan, as NumPy's generator draws it."""
    table = {"bucket": np.zeros(8, np.int64), "question": np.arange(8)}
    plan = BatchPlan(lambda epoch: table, [Bucket(0, 1)], 4, 7)
    rng = np.random.default_rng((10, 7, 0))
    wanted = rng.permutation(8).reshape(2, 4)
    found = [plan[i].table["question"].tolist() for i in range(2)]
    assert found == wanted.tolist()


def test_a_corpus_without_examples_is_refused():
    with pytest.raises(UserError, match=r"data\.mixture: corpus 2 has no example to train on"):
        mixture_epoch(np.zeros(3, np.int64), (1.0, 1.0), 0, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mixture": (("a", 0.0), ("b", 0.0))}, "the weights sum to 0, so that nothing is trained"),
        ({"mixture": (("a", -1.0),)}, "weights from 0 was expected"),
        ({"mixture": (("a", float("nan")),)}, "weights from 0 was expected"),
        ({"mixture": (("a", float("inf")),)}, "weights from 0 was expected"),
        ({"mixture": (("a", 1.0), ("a", 2.0))}, "each folder once was expected"),
        ({"mixture": (("a", 1.0),), "dir": "b"}, "data.dir=b and data.mixture: give one of them"),
    ],
)
def test_wrong_mixtures_are_refused(values, message):
    with pytest.raises(UserError) as error:
        MixedData(**{"dir": "", "split": "train", **values})
    assert message in str(error.value)


def test_corpora_with_the_same_ids_become_one(tmp_path):
    colors = ((200, 30, 40), (9, 9, 9))
    for number, color in enumerate(colors):
        data = flag(color).data
        source = Source("s", "image", f"flag {number}", image="p.png")
        question = Question("q", "train", "Which?", image="p.png", positives=("s",))
        write_records(
            tmp_path / str(number), [source], [question], lambda name, data=data: data, name="x"
        )
    both = open_mixture([tmp_path / "0", tmp_path / "1"])
    questions = both.questions("train")
    assert list(map(member_of, questions)) == [0, 1]
    for number, question in enumerate(questions):
        assert both.sources[both.positive_rows(question)[0]].text == f"flag {number}"
        assert both.question_picture(question) == flag(colors[number]).data
    other = open_mixture([tmp_path / "1", tmp_path / "0"])
    assert other.fingerprint != both.fingerprint


def test_sources_are_learned_in_the_shares():
    """Of 30 questions the first 24 are of one corpus, the others of another of thrice the weight."""
    reader = make_reader()
    packer = Packer(reader.tokenizer, PACKING)
    members = [0] * 24 + [1] * 6
    config = FeedConfig(batch_size=5, threads=0, mixture=(1.0, 3.0))
    contrast = ContrastSampling(query_length=16, source_lengths=(64,))
    iterator = contrastive_batches(reader, QUESTIONS, config, contrast, members)
    shown = Counter(i for batch in taken(iterator, 6 * 4) for i in batch)  # four epochs
    assert sum(shown[i] for i in range(24)) == 4 * 8  # 7.5 and 22.5 an epoch
    assert {shown[i] for i in range(24)} == {1, 2}
    assert {shown[i] for i in range(24, 30)} == {14, 15}
    table = rerank_batches(
        reader, QUESTIONS, packer, config, PairSampling(choices_per_question=4), members
    )
    pairs = Counter(i for batch in taken(table, 100) for i in batch)
    of_second = sum(pairs[i] for i in range(24, 30)) / 500
    assert abs(of_second - 0.75) < 0.03
