"""Batches that train the reader, over the small corpus."""

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest
from tiny_corpus import CORPUS, PACKING, QUESTIONS, REGIONS, ROWS, epoch_of, make_reader, text_of

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.packing import MaskingConfig, Packer
from mmqa_jax.data.batches.source_reader import AnswerSampling, answer_batches
from mmqa_jax.data.schema import Question


@pytest.fixture(scope="module")
def reader():
    return make_reader()


@pytest.fixture(scope="module")
def packer(reader):
    return Packer(reader.tokenizer, PACKING)


def test_answers_show_gold_sources_and_a_reference_wording(reader, packer):
    feed = FeedConfig(8, seed=4, threads=0)
    masking = MaskingConfig(0.5, 9)
    wordings, orders = defaultdict(set), defaultdict(set)
    for b in epoch_of(answer_batches(reader, QUESTIONS, packer, masking, feed), 30 * 60):
        slots = b["region_features"].shape[1]
        for i, place in enumerate(b["index"]):
            question, ids = QUESTIONS[place], b["input_ids"][i].copy()
            count = int(b["masked_weights"][i].sum())
            ids[b["masked_positions"][i, :count]] = b["masked_ids"][i, :count]
            answer = text_of(reader, ids[b["answer_mask"][i]])
            assert answer in question.answers
            wordings[place].add(answer)
            context = text_of(reader, ids[1 + slots :][~b["answer_mask"][i, 1 + slots :]])
            gold = [CORPUS.sources[row].text for row in ROWS[question.id]]
            orderings = [" ".join(order) for order in (gold, gold[::-1])]
            asked = f" what is {place} ?"
            assert context in [order + asked for order in orderings]
            orders[place].add(context)
            opened = int(b["context_mask"][i, 1 : 1 + slots].sum())
            assert opened == (len(gold) * REGIONS.slots if slots else 0)
    assert all(wordings[n] == set(QUESTIONS[n].answers) for n in range(30))
    assert all(len(orders[n]) == len(ROWS[f"q{n}"]) for n in range(30))


def batches_of(reader, packer, questions=QUESTIONS, *, seed=4, size=8, **sampling):
    feed = FeedConfig(size, seed=seed, threads=0)
    sampled = AnswerSampling(**sampling)
    return answer_batches(reader, questions, packer, MaskingConfig(), feed, sampled)


def test_a_distractor_joins_single_gold_sources_at_the_given_rate(reader, packer):
    counts = Counter()
    iterator = batches_of(reader, packer, distractor_prob=0.3, shuffle_sources=False)
    for b in epoch_of(iterator, 30 * 40):
        for i, place in enumerate(b["index"]):
            slots = b["region_features"].shape[1]
            visible = ~b["answer_mask"][i, 1 + slots :]
            context = text_of(reader, b["input_ids"][i, 1 + slots :][visible])
            context = context.removesuffix(f" what is {place} ?")
            gold = " ".join(CORPUS.sources[row].text for row in ROWS[f"q{place}"])
            counts[len(ROWS[f"q{place}"]), context == gold] += 1
            extra = context.removeprefix(gold).strip()
            names = [CORPUS.sources[CORPUS.row[n]].text for n in QUESTIONS[place].negatives]
            assert not extra or extra in names
    assert counts[2, False] == 0
    assert 0.22 < counts[1, False] / (counts[1, False] + counts[1, True]) < 0.38


def in_categories() -> list[Question]:
    """20 questions on texts, 10 on pictures."""
    return [
        dataclasses.replace(question, category="text" if place % 3 else "picture")
        for place, question in enumerate(QUESTIONS)
    ]


def test_shares_thin_out_a_category_anew_every_epoch(reader, packer):
    """Of 20 texts beside 10 pictures half are left out: as many texts as pictures are shown."""
    questions, seen = in_categories(), []
    for seed in range(10):
        thinned = {"seed": seed, "size": 2, "shares": {"text": 0.5}}
        iterator = batches_of(reader, packer, questions, **thinned)
        shown = [int(place) for _ in range(40) for place in next(iterator)["index"]]  # 4 epochs
        seen.append(np.mean([questions[place].category == "text" for place in shown]))
    whole = batches_of(reader, packer, questions, seed=0, size=2)
    # Of each kind one may wait for the second epoch.
    shown = {int(place) for b in epoch_of(whole, 60, 2) for place in b["index"]}
    assert shown == set(range(30))
    assert 0.42 < np.mean(seen) < 0.58  # two thirds without shares


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"txt": 0.5}, r"batches\.shares\.txt: no question .*; use one of picture, text\."),
        ({"text": 0.5, "Picture": 1.0}, r"batches\.shares\.Picture: no question is of this"),
        ({"text": 0}, r"batches\.shares\.text=0: a share above 0 and at most 1 was expected"),
        ({"text": 1.5}, r"batches\.shares\.text=1\.5: a share above 0 and at most 1"),
        ({"picture": -0.1}, r"batches\.shares\.picture=-0\.1: a share above 0"),
        ({"picture": float("nan")}, r"batches\.shares\.picture=nan: a share above 0"),
    ],
)
def test_shares_that_cannot_be(reader, packer, shares, message):
    with pytest.raises(UserError, match=message):
        batches_of(reader, packer, in_categories(), shares=shares)


def test_a_category_without_answers_has_no_share(reader, packer):
    questions = [
        q if q.category == "text" else dataclasses.replace(q, answers=()) for q in in_categories()
    ]
    with pytest.raises(UserError, match=r"shares\.picture: no question .* use one of text\."):
        batches_of(reader, packer, questions, shares={"picture": 0.5})


def test_question_only_hides_all_sources(reader, packer):
    for b in epoch_of(batches_of(reader, packer, seed=0, no_source_prob=1.0), 60):
        assert b["region_features"].shape[1] == 0
        for i, place in enumerate(b["index"]):
            context = text_of(reader, b["input_ids"][i][~b["answer_mask"][i]])
            assert context == f"what is {place} ?"
