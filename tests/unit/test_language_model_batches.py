"""Training batches of a language model, and how solved questions become its examples."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_llm import END, text_tokenizer

from mmqa_jax.data.batches import texts
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.texts import (
    RowSize,
    TokenExample,
    language_model_batches,
    pack_rows,
    packed_batch,
)
from mmqa_jax.data.schema import Question
from mmqa_jax.papers.rmr import fields
from mmqa_jax.prompting.examples import training
from mmqa_jax.prompting.examples.library import ExampleLibrary
from tests.refusals import refuses

SIZE = RowSize(32, 12)


def example(length: int, start: int, first: int) -> TokenExample:
    return TokenExample(np.arange(first, first + length, dtype=np.int32), start)


# Rows


@given(st.lists(st.tuples(st.integers(2, 32), st.integers(1, 12)), min_size=1, max_size=60))
def test_every_example_is_in_one_row_and_every_row_is_within_its_size(pairs):
    sizes = np.array([(max(length, targets + 1), targets) for length, targets in pairs])
    sizes[:, 0] = np.minimum(sizes[:, 0], 32)
    rows = pack_rows(sizes, SIZE)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    for row in rows:
        assert (sizes[row].sum(axis=0) <= SIZE).all()
    # First fit: no example of a later row would have fit an earlier one when it came.
    for number, row in enumerate(rows):
        for earlier in rows[:number]:
            before = [i for i in earlier if i < row[0]]
            assert (sizes[[*before, row[0]]].sum(axis=0) > SIZE).any()


def test_rows_are_those_of_a_search_through_all_rows():
    """On as many examples as the plain search takes in a moment, of which it is quadratic."""
    rng, size = np.random.default_rng(0), RowSize(2048, 512)
    lengths = rng.integers(100, 1200, 2000)
    sizes = np.stack([lengths, np.minimum(lengths // 3, 300)], axis=1)
    room, rows = np.tile(np.array(size), (len(sizes), 1)), []
    for number, needed in enumerate(sizes):
        row = int((room >= needed).all(axis=1).argmax())
        rows += [[]] * (row == len(rows))
        rows[row] = [*rows[row], number]
        room[row] -= needed
    assert pack_rows(sizes, size) == rows


def test_rows_of_many_examples_are_found_in_nearly_linear_steps():
    """The plain search would compare 2 * 10^9 rows; the time is a CPU's, whatever else it does."""
    lengths = np.random.default_rng(0).integers(100, 1200, 60_000)
    start = time.process_time()
    rows = pack_rows(np.stack([lengths, lengths // 3], axis=1), RowSize(2048, 1024))
    assert time.process_time() - start < 10
    assert sum(map(len, rows)) == 60_000


def test_an_example_in_one_version_is_packed_once(monkeypatch):
    packed = []

    def count(sizes, size):
        packed.append(len(sizes))
        return pack_rows(sizes, size)

    monkeypatch.setattr(texts, "pack_rows", count)
    for share, once in ((0.0, True), (0.5, False)):
        packed.clear()
        iterator = batches(6, share)
        for _ in range(12):  # several epochs
            next(iterator)
        assert (len(packed) == 1) is once


def test_the_arrays_of_a_row():
    rows = [[example(5, 3, 10), example(4, 1, 50)], []]
    batch = packed_batch(rows, RowSize(12, 6))
    zeros = [0] * 12
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 14, 50, 51, 52, 53, 0, 0, 0], zeros]
    assert batch["segments"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0], zeros]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0], zeros]
    # The token before a target predicts it.
    assert batch["target_positions"].tolist() == [[2, 3, 5, 6, 7, 0], [0] * 6]
    assert batch["target_ids"].tolist() == [[13, 14, 51, 52, 53, 0], [0] * 6]
    assert batch["target_segments"].tolist() == [[1, 1, 2, 2, 2, 0], [0] * 6]


def batches(count: int, share: float, rows: tuple[int, ...] | None = None, **options):
    versions = [[example(9, 6, 100 * i), example(15, 9, 100 * i + 50)] for i in range(count)]
    feed = FeedConfig(2, seed=3, threads=0, rows=rows)
    return language_model_batches(
        versions, (1 - share, share), feed, length=32, targets=12, **options
    )


def firsts(batch) -> list[int]:
    """The first token of every example, by which `batches` tells them apart."""
    at = (batch["segments"] > 0) & (batch["positions"] == 0)
    return batch["input_ids"][at].tolist()


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (1.0, 50, 50), (0.5, 0, 50)])
def test_an_epoch_shows_every_example_in_one_version(share, low, high):
    iterator, seen = batches(12, share), []
    while len({first // 100 for first in seen}) < 12:
        seen += firsts(next(iterator))
    assert {first % 100 for first in seen} == {low, high}
    assert len(seen) <= 12 + 6  # the last batch is filled up with rows of the epoch


def test_each_epoch_packs_and_chooses_anew_and_hosts_take_their_slices():
    whole = batches(6, 0.5)
    first = [firsts(next(whole)) for _ in range(8)]
    assert [firsts(b) for b, _ in zip(batches(6, 0.5), range(8), strict=False)] == first
    assert len({tuple(sorted(own)) for own in first}) > 3
    halves = [batches(6, 0.5, (row,)) for row in (0, 1)]
    for own in first:
        assert [x for half in halves for x in firsts(next(half))] == own


def test_bad_steps_name_their_examples():
    batch = next(batches(6, 0.5))
    named = {int(i) for row in batch["index"] for i in row}
    assert named == {first // 100 for first in firsts(batch)}


# Examples


def questions(count: int = 4) -> list[Question]:
    return [
        Question(
            f"q{i}", "train", f"Which letter is {letter}?", choices=(letter, "Z"), answer_index=0,
            rationale=f"It  is {letter}.",
        )
        for i, letter in enumerate("ABCD"[:count])
    ]  # fmt: skip


LARGE = RowSize(512, 128)


def make(size: RowSize = LARGE, own=None, **options):
    options = training.ExampleOptions(**{"similarity": "random", "shots": 2, **options})
    own = questions() if own is None else own
    encode = training.encode_text(text_tokenizer())
    return training.training_examples(own, ExampleLibrary(own), fields, options, encode, size)


def text(tokens) -> str:
    return text_tokenizer().decode(tokens)


def parts(one: TokenExample) -> tuple[str, str]:
    return text(one.tokens[: one.start]), text(one.tokens[one.start :])


def test_prompts_end_where_the_model_answers_and_its_answer_ends():
    made = make(templates=("rmr.rationale", "rmr.text"), with_shots=0.25)
    assert made.shares == [0.375, 0.125, 0.375, 0.125]
    assert (made.dropped, made.dropped_shots) == (0, 0)
    for question, versions in zip(questions(), made.versions, strict=True):
        letter = question.choices[0]
        rationale, with_shots, option, _ = map(parts, versions)
        # The tiny tokenizer has no slash and no parentheses.
        asked = f"Question: {question.question}\nContext: NA\nOptions: A {letter} B Z\nAnswer:"
        assert rationale[0] == asked
        assert rationale[1] == f" It is {letter}. The answer is A.<|im_end|>"
        assert with_shots[0].endswith(rationale[0])
        assert with_shots[0].count("Question:") == 3
        assert with_shots[1] == rationale[1]
        assert f"Which letter is {letter}" not in with_shots[0].removesuffix(rationale[0])
        assert option[1] == f" {letter}<|im_end|>"
        assert all(version.tokens[-1] == END for version in versions)


def test_the_answer_alone_can_be_learned():
    (plain, _), *_ = make(learn="answer").versions
    prompt, learned = parts(plain)
    assert prompt.endswith("Answer: It is A.")
    assert learned == " The answer is A.<|im_end|>"


def test_shots_are_dropped_until_an_example_fits_and_long_examples_are_left_out():
    plain, shown = make(shots=1).versions[0]
    between = RowSize((len(plain.tokens) + len(shown.tokens)) // 2, 128)
    made = make(between, shots=1)
    assert [len(versions) for versions in made.versions] == [2] * 4
    assert (made.dropped, made.dropped_shots) == (0, 4)
    assert all((a.tokens == b.tokens).all() for a, b in made.versions)
    long = Question("long", "train", "x" * 600, choices=("A",), answer_index=0, rationale="no.")
    made = make(own=[*questions(), long], shots=0)
    assert (len(made.versions), made.dropped) == (4, 1)
    few_targets = RowSize(512, plain.targets - 1)
    assert make(few_targets).dropped == 4


def test_what_cannot_be_learned_from_is_refused():
    bare = [Question("a", "train", "Which?", choices=("A",), answer_index=0)]
    refuses(r"rmr\.rationale writes a rationale, but no training", make, own=bare)
    assert len(make(own=bare, templates=("rmr.answer",)).versions) == 1
    refuses("does not begin with its query", make, templates=("rmr.text_rationale",))
    refuses(r"examples\.templates is empty", training.ExampleOptions, templates=())


class Merging:
    """A tokenizer in which a completion's first letter merges with the prompt's last."""

    end_ids = (9,)

    def encode(self, text: str) -> list[int]:
        return [1, *([7] if text.endswith("ab") else [ord(letter) for letter in text])]

    def encode_plain(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_completion_does_not_change_its_prompts_tokens():
    """A model that answers has the prompt's tokens, not those of prompt and answer."""
    one = training.token_example(Merging(), "a", "b", ended=True)
    assert one.tokens.tolist() == [1, ord("a"), ord("b"), 9]
    assert one.start == 2
