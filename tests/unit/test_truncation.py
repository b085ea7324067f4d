"""Tokens that do not fit: what is cut keeps its end, and is counted and said."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmqa_jax.core.config import load_config
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.texts import PassagesSize, passage_batches
from mmqa_jax.data.tokenizers import cut_before_end
from mmqa_jax.tasks.registry import read_task

END = 1


@given(st.lists(st.integers(2, 9), max_size=9), st.integers(1, 9))
def test_what_is_cut_ends_as_it_did(tokens, budget):
    cut = list(cut_before_end([*tokens, END], budget))
    assert len(cut) == min(len(tokens) + 1, budget)
    assert cut == [*tokens[: len(cut) - 1], END]


def test_a_long_answer_of_fusion_in_decoder_is_learned_with_its_end():
    """Without it the model learns to go on; what is lost is counted with the passages' tokens."""
    answers = [[[11, 12, 13, 14, 15, END]], [[21, 22, END]]]
    feed = FeedConfig(2, seed=0, threads=0)
    batch = next(
        passage_batches(lambda q: ([[5, 6, 7]], 40 * q), answers, feed, PassagesSize(1, 8, 4))
    )
    rows = {int(question): row for row, question in enumerate(batch["index"])}
    targets = [batch["target_ids"][rows[question]].tolist() for question in (0, 1)]
    assert targets == [[11, 12, 13, END], [21, 22, END, 0]]
    assert [int(batch["truncated"][rows[question]]) for question in (0, 1)] == [2, 40]


@pytest.mark.parametrize(
    "name",
    ["atlas/contrastive", "atlas/rerank", "atlas/answer", "atlas/modality", "atlas/mcan",
     "okvqa/mcan", "scienceqa/rmr_retriever", "webqa/fusion_in_decoder", "webqa/vlp_qa"],
)  # fmt: skip
def test_the_keys_that_the_line_names_are_those_of_the_config(name):
    config = load_config(Path(__file__).parents[2] / f"configs/{name}.py")
    limits = read_task(config).limits
    assert limits
    for key in limits:
        section, _, last = key.partition(".")
        assert last in config[section], key
