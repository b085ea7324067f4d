"""Training and inference batches over a small corpus whose every token tells where it is from."""

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest
from tiny_corpus import (
    CORPUS,
    PACKING,
    QUESTIONS,
    REGIONS,
    ROWS,
    SIZE,
    epoch_of,
    make_reader,
    text_of,
)

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.packing import INPUT_FIELDS, MaskingConfig, Packer, RawExample
from mmqa_jax.data.batches.retriever import ContrastSampling, contrastive_batches
from mmqa_jax.data.batches.source_reader import (
    AnswerSampling,
    PairSampling,
    answer_batches,
    rerank_batches,
)
from mmqa_jax.inference.batches import answer_inputs, rerank_pairs
from tests.refusals import refuses


@pytest.fixture(scope="module")
def reader():
    return make_reader()


@pytest.fixture(scope="module")
def packer(reader):
    return Packer(reader.tokenizer, PACKING)


def assert_equal_batches(one: list[dict], other: list[dict]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert set(a) == set(b)
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def builders(reader, packer):
    """The batches of the three tasks as functions of a FeedConfig."""
    return {
        "contrastive": lambda feed: contrastive_batches(
            reader,
            QUESTIONS,
            feed,
            ContrastSampling(query_length=24, source_lengths=(12, 40), second_hop=True),
        ),
        "rerank": lambda feed: rerank_batches(reader, QUESTIONS, packer, feed),
        "answer": lambda feed: answer_batches(
            reader,
            QUESTIONS,
            packer,
            MaskingConfig(0.5, 9),
            feed,
            AnswerSampling(distractor_prob=0.4),
        ),
    }


def blotted(raw: RawExample, rng: np.random.Generator) -> RawExample:
    """An augmentation that renames one word everywhere and blackens the pictures."""
    name = ["lake", "desert", "glacier"][rng.integers(3)]

    def renamed(text: str) -> str:
        return text.replace("what", name).replace("snippet", name).replace("answer", name)

    sources = tuple(
        dataclasses.replace(
            s, text=renamed(s.text), pixels=None if s.pixels is None else s.pixels * 0
        )
        for s in raw.sources
    )
    return dataclasses.replace(
        raw, question=renamed(raw.question), sources=sources, answer=renamed(raw.answer)
    )


@pytest.mark.parametrize("task", ["contrastive", "rerank", "answer"])
def test_batches_depend_on_seed_and_position_alone(reader, packer, task):
    build = builders(reader, packer)[task]
    feed = FeedConfig(8, seed=5, augment=blotted, slack=2, threads=0)
    reference = build(feed)
    batches = [next(reference) for _ in range(24)]

    threaded = build(dataclasses.replace(feed, threads=3))
    assert_equal_batches([next(threaded) for _ in range(9)], batches[:9])
    state = threaded.get_state()
    resumed = build(feed)
    resumed.set_state(state)
    assert_equal_batches([next(resumed) for _ in range(15)], batches[9:])

    other = build(dataclasses.replace(feed, seed=6))
    assert [next(other)["index"].tolist() for _ in range(5)] != [
        b["index"].tolist() for b in batches[:5]
    ]
    # Two processes make the rows of the batch that one makes, wherever their rows are.
    taken = np.array([0, 3, 5, 6]), np.array([1, 2, 4, 7])
    halves = [build(dataclasses.replace(feed, rows=tuple(rows.tolist()))) for rows in taken]
    for whole in batches[:4]:
        for rows, half in zip(taken, halves, strict=True):
            part = next(half)
            for name, array in whole.items():
                # A question of a contrastive batch has several sources.
                group = len(array) // 8
                own = (rows[:, None] * group + np.arange(group)).reshape(-1)
                assert_equal_batches([{name: part[name]}], [{name: array[own]}])


@pytest.mark.parametrize("task", ["contrastive", "rerank", "answer"])
def test_shapes_are_those_of_the_buckets(reader, packer, task):
    feed = FeedConfig(8, threads=0)
    iterator = builders(reader, packer)[task](feed)
    name = "source_ids" if task == "contrastive" else "input_ids"
    columns = {next(iterator)[name].shape[1] for _ in range(40)}
    allowed = {b.text + b.pictures * REGIONS.slots for b in PACKING.buckets}
    assert columns <= ({12, 40} if task == "contrastive" else allowed)
    assert len(columns) > 1


def test_contrastive_targets_negatives_and_pictures(reader):
    feed = FeedConfig(8, seed=1, threads=0)
    iterator = contrastive_batches(
        reader,
        QUESTIONS,
        feed,
        ContrastSampling(query_length=24, source_lengths=(40,), num_negatives=3),
    )
    targets, seen = defaultdict(set), Counter()
    for b in epoch_of(iterator, 60 * 8):
        rows = b["source_rows"].reshape(8, 4)
        for i, place in enumerate(b["index"]):
            question = QUESTIONS[place]
            seen[place] += 1
            assert text_of(reader, b["query_ids"][i]) == f'what is " {place} " ?'
            gold = ROWS[question.id]
            targets[question.id].add(int(rows[i, 0]))
            assert rows[i, 0] in gold
            assert b["gold_rows"][i].tolist() == gold + [-1] * (2 - len(gold))
            names = {CORPUS.sources[row].id for row in rows[i, 1:]}
            assert names <= set(question.negatives)
            assert len(names) == 3
        assert b["positive"].tolist() == list(range(0, 32, 4))
        for k, row in enumerate(b["source_rows"]):
            source = CORPUS.sources[row]
            assert text_of(reader, b["source_ids"][k]) == source.text
            assert b["source_mask"][k].sum() == (b["source_ids"][k] > 0).sum()
            assert b["has_image"][k] == (source.modality == "image")
            assert (b["pixels"][k] == (row if source.modality == "image" else 0)).all()
        assert (b["truncated"] == 0).all()
    assert set(seen) == set(range(30))
    assert all(targets[q.id] == set(ROWS[q.id]) for q in QUESTIONS)


def test_second_hop_queries_carry_the_first_hops_title(reader):
    feed = FeedConfig(10, seed=2, threads=0)
    iterator = contrastive_batches(
        reader,
        QUESTIONS,
        feed,
        ContrastSampling(query_length=24, source_lengths=(40,), second_hop=True),
    )
    kinds, firsts = Counter(), defaultdict(set)
    for b in epoch_of(iterator, 60 * 10, 10):
        for i, place in enumerate(b["index"]):
            question, target = QUESTIONS[place], int(b["source_rows"][2 * i])
            query, gold = text_of(reader, b["query_ids"][i]), ROWS[question.id]
            asked = text_of(reader, reader.tokenizer.encode(question.question))
            title = query.removeprefix(asked).strip()
            if not title:
                kinds["plain", len(gold)] += 1
                assert target == gold[0] or reader.is_image[gold[0]]
                continue
            kinds["second hop", len(gold)] += 1
            (other,) = set(gold) - {target}
            assert title == CORPUS.sources[other].title.lower()
            firsts[bool(reader.is_image[other])].add(gold.index(other))
    assert ("second hop", 1) not in kinds
    hops, plain = kinds["second hop", 2], kinds["plain", 2]
    assert 0.4 < hops / (hops + plain) < 0.6
    assert firsts == {False: {0}, True: {0, 1}}  # snippets in order, pictures in any


def test_missing_negatives_come_from_the_corpus_but_are_never_gold(reader):
    bare = [dataclasses.replace(q, negatives=q.negatives[:1]) for q in QUESTIONS]
    iterator = contrastive_batches(
        reader,
        bare,
        FeedConfig(8, threads=0),
        ContrastSampling(query_length=24, source_lengths=(40,), num_negatives=4),
    )
    for b in epoch_of(iterator, 80):
        for i, place in enumerate(b["index"]):
            rows = b["source_rows"].reshape(8, 5)[i, 1:]
            assert CORPUS.sources[rows[0]].id == bare[place].negatives[0]
            assert not set(rows.tolist()) & set(ROWS[bare[place].id])


def test_rerank_shows_every_gold_source_and_fresh_negatives(reader, packer):
    feed = FeedConfig(4, seed=1, threads=0)
    iterator = rerank_batches(reader, QUESTIONS, packer, feed, PairSampling(choices_per_question=6))
    pairs = Counter()
    for b in epoch_of(iterator, 30 * 6 * 3 + 60, 4):
        slots = b["region_features"].shape[1]
        assert slots in (0, REGIONS.slots)
        for i, place in enumerate(b["index"]):
            question = QUESTIONS[place]
            ids = b["input_ids"][i]
            text = text_of(reader, ids[1 + slots :])
            source = next(
                s for s in CORPUS.sources if text.startswith(s.text + " what is")
            )  # [CLS] slots text [SEP] question
            assert text == f"{source.text} what is {place} ?"  # quotes are stripped
            assert (source.modality == "image") == (slots > 0)
            assert bool(b["labels"][i]) == (source.id in question.positives)
            assert source.id in question.positives + question.negatives
            assert b["weights"][i] == pytest.approx(1)  # as many choices each
            pairs[place, source.id] += 1
            if slots:
                gray = CORPUS.row[source.id] / 127.5 - 1
                np.testing.assert_allclose(b["region_features"][i], gray, atol=1e-6)
    for place, question in enumerate(QUESTIONS):
        shown = {name: n for (p, name), n in pairs.items() if p == place}
        assert all(shown[name] >= 3 for name in question.positives)  # in each of three epochs
        assert len(shown) > 6  # more than one epoch's draw
        alike = [name for name in shown if name[0] == question.positives[0][0]]
        assert 0 < len(alike) < len(shown)  # negatives of both modalities


def test_an_epochs_mean_over_pairs_is_the_mean_over_questions(reader, packer):
    """Of questions with 2 to 8 choices, in batches that mix them."""
    counts = [2, 8, 3, 8, 6, 5]
    questions = [
        dataclasses.replace(q, positives=q.positives[:1], negatives=q.negatives[: count - 1])
        for q, count in zip(QUESTIONS, counts, strict=False)
    ]
    one_shape = Packer(reader.tokenizer, dataclasses.replace(PACKING, buckets=((1, 64),)))
    iterator = rerank_batches(
        reader, questions, one_shape, FeedConfig(4, threads=0), PairSampling(alike_share=1.0)
    )
    batches = epoch_of(iterator, sum(counts), 4)
    place, labels, weights = (
        np.concatenate([b[name] for b in batches]) for name in ("index", "labels", "weights")
    )
    assert np.bincount(place).tolist() == counts
    assert max(len(set(b["index"])) for b in batches) > 2
    losses = np.random.default_rng(0).random(len(place))  # of any model
    of_questions = [losses[place == n].mean() for n in range(len(counts))]
    np.testing.assert_allclose((losses * weights).mean(), np.mean(of_questions), rtol=1e-6)
    assert labels.sum() == len(counts)


def test_rerank_halves_its_choices_between_the_modalities(reader, packer):
    feed = FeedConfig(4, seed=1, threads=0)
    choices = rerank_batches(
        reader, QUESTIONS[:4], packer, feed, PairSampling(choices_per_question=6)
    )
    seen = Counter()
    plan_length = 0
    while plan_length < 24:  # one epoch: 4 questions * 6 choices, in whole buckets or wrapped
        b = next(choices)
        plan_length += 4
        for place in b["index"]:
            seen[int(place), b["region_features"].shape[1] > 0] += 1
    assert seen[0, True] >= 3
    assert seen[0, False] >= 3


@pytest.mark.parametrize("task", ["contrastive", "rerank", "answer"])
def test_augmentation_changes_all_parts_alike(reader, packer, task):
    build = builders(reader, packer)[task]
    names, tokenizer = {"lake", "desert", "glacier"}, reader.tokenizer
    found = Counter()
    iterator = build(FeedConfig(8, seed=5, augment=blotted, slack=2, threads=0))
    for b in epoch_of(iterator, 400):
        for i in range(8):
            if task == "contrastive":
                texts = [text_of(reader, b["query_ids"][i])]
                texts += [text_of(reader, ids) for ids in b["source_ids"][2 * i : 2 * i + 2]]
                assert not b["pixels"].any()
            else:
                ids = b["input_ids"][i].copy()
                if task == "answer":
                    count = int(b["masked_weights"][i].sum())
                    ids[b["masked_positions"][i, :count]] = b["masked_ids"][i, :count]
                texts = [tokenizer.decode(ids)]
                assert set(b["region_features"].ravel().tolist()) <= {-1.0, 0.0}
            words = " ".join(texts).split()
            used = names & set(words)
            assert len(used) == 1  # one name for question, sources and answer
            assert not {"what", "snippet", "answer"} & set(words)
            found.update(used)
    assert len(found) == 3
    assert min(found.values()) > 80


def test_unchanged_texts_are_not_tokenized_again(reader, packer, monkeypatch):
    iterator = builders(reader, packer)["answer"](
        FeedConfig(8, augment=lambda raw, rng: dataclasses.replace(raw), threads=0)
    )
    calls = []
    monkeypatch.setattr(reader.tokenizer.pieces, "encode_texts", calls.append)
    for _ in range(6):
        next(iterator)
    assert calls == []


def test_vlp_arrays_can_come_as_the_models_inputs(reader, packer):
    from mmqa_jax.models.vlp.network import VLPInputs

    build = builders(reader, packer)["answer"]
    flat = next(build(FeedConfig(8, threads=0)))
    nested = next(build(FeedConfig(8, threads=0, inputs=VLPInputs)))
    for name in INPUT_FIELDS:
        np.testing.assert_array_equal(getattr(nested["inputs"], name), flat[name])
    assert set(nested) == set(flat) - set(INPUT_FIELDS) | {"inputs"}


def test_rerank_pairs_cover_all_candidates_once(reader, packer):
    questions = [q.question for q in QUESTIONS[:7]]
    candidates = [[*range(5 * n, 5 * n + n), *range(40, 40 + n)] for n in range(7)]
    flat = [(n, row) for n, rows in enumerate(candidates) for row in rows]
    done = np.zeros(len(flat), int)
    for b in rerank_pairs(reader, packer, questions, candidates, batch_size=4):
        assert len(b["index"]) == 4
        real = b["weights"] > 0
        np.add.at(done, b["index"][real], 1)
        slots = b["region_features"].shape[1]
        for i, pair in enumerate(b["index"]):
            n, row = flat[pair]
            text = text_of(reader, b["input_ids"][i, 1 + slots :])
            assert text == f"{CORPUS.sources[row].text} what is {n} ?"
            assert (slots > 0) == (row >= 40)
    assert (done == 1).all()
    assert list(rerank_pairs(reader, packer, ["a"], [[]], batch_size=4)) == []


def test_answer_inputs_keep_the_order_of_the_sources(reader, packer):
    questions = [q.question for q in QUESTIONS[:5]]
    sources = [[3, 1], [45], [], [50, 41], [7, 44]]
    seen = {}
    for b in answer_inputs(reader, packer, questions, sources, batch_size=2):
        slots = b["region_features"].shape[1]
        for i in np.flatnonzero(b["weights"]):
            n = int(b["index"][i])
            length = b["length"][i]
            seen[n] = text_of(reader, b["input_ids"][i, 1 + slots : length])
            assert (b["input_ids"][i, length:] == 0).all()
            grays = [row for row in sources[n] if row >= 40]
            shown = b["region_features"][i, :: REGIONS.slots, 0][: len(grays)]
            np.testing.assert_allclose(shown, np.array(grays) / 127.5 - 1, atol=1e-6)
    expected = [
        " ".join([*(CORPUS.sources[row].text for row in rows), f"what is {n} ?"])
        for n, rows in enumerate(sources)
    ]
    assert [seen[n] for n in range(5)] == expected


def test_a_questions_own_picture_is_its_first_source(reader, packer):
    pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
    (b,) = answer_inputs(
        reader, packer, ["which flag?"], [[45]], batch_size=1, question_pixels=[pixels]
    )
    assert b["region_features"][0, :: REGIONS.slots, 0].tolist() == pytest.approx(
        [1.0, 45 / 127.5 - 1]
    )
    assert b["context_mask"][0, 1 : 1 + 2 * REGIONS.slots].all()


def test_bad_input(reader, packer):
    feed, masking = FeedConfig(8), MaskingConfig()
    goldless = [dataclasses.replace(q, positives=(), answers=()) for q in QUESTIONS]
    with pytest.raises(UserError, match="contrastive training: no question lists a gold source"):
        contrastive_batches(
            reader, goldless, feed, ContrastSampling(query_length=8, source_lengths=(8,))
        )
    refuses("rerank training: no question lists a", rerank_batches, reader, goldless, packer, feed)
    with pytest.raises(UserError, match="answer training: no question has a reference answer"):
        answer_batches(reader, goldless, packer, masking, feed)
    with pytest.raises(UserError, match=r"distractor_prob=1\.5"):
        answer_batches(
            reader, QUESTIONS, packer, masking, feed, AnswerSampling(distractor_prob=1.5)
        )
    refuses("seed=-1", FeedConfig, 8, seed=-1)
    with pytest.raises(AssertionError):
        next(rerank_pairs(reader, packer, ["a", "b"], [[1]], batch_size=2))
