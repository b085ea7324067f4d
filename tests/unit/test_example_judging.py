"""Judging of examples, their scores' file, and the loss that a retriever learns from."""

import json

import jax
import numpy as np
import optax
import pytest
import torch
from fake_llm import FakeLLM
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.retriever import (
    ExampleScores,
    example_retrieval_batches,
    judged_questions,
    read_example_scores,
    write_example_scores,
)
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import train_wordpiece
from mmqa_jax.extensions.example_judging import JudgeOptions, judge_examples, mean_scores
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.prompting.examples.library import ExampleLibrary
from mmqa_jax.tasks.contrastive_losses import DistillationObjective
from tests.drawn_weights import drawn
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

WORDS = ["cedar", "baobab", "olive", "palm", "banyan"]
QUESTIONS = [
    Question(
        f"q{i}", "val" if i == 4 else "train", f"What is a {word}?", choices=("tree", "stone"),
        answer_index=0, extra={"caption": word},
    )
    for i, word in enumerate(WORDS)
]  # fmt: skip
LIBRARY = ExampleLibrary(QUESTIONS[:4])
OPTIONS = JudgeOptions(candidates=3, similarity="random")


def helpful(prompt: str, option: str) -> tuple[float, ...]:
    if option == " tree":
        return (-0.1, 0.0) if "olive?" in prompt.partition("\n\n")[0] else (-2.0, -1.0)
    return (-1.0, -1.0)


def test_a_candidates_score_is_the_right_options_share_of_the_likelihood():
    llm = FakeLLM(score=helpful)
    judged = judge_examples(QUESTIONS, llm, LIBRARY, OPTIONS)
    assert judged.left_out == 0
    assert len(llm.seen) == 5 * (3 + 1)
    for question, row in zip(QUESTIONS, judged.rows, strict=True):
        assert question.id not in row.candidates
        for name, score in zip(row.candidates, row.scores, strict=True):
            tree = -0.1 if name == "q2" else -3.0
            assert score == pytest.approx(tree - np.logaddexp(tree, -2.0))
    alone = {row.question_id: row.alone for row in judged.rows}
    assert alone["q0"] == pytest.approx(-3.0 - np.logaddexp(-3.0, -2.0))
    means = mean_scores(judged.rows)
    assert means["most_helpful"] > means["any"] > means["alone"] - 1
    per_token = JudgeOptions(candidates=3, similarity="random", score="mean")
    (row, *_) = judge_examples(QUESTIONS[:1], FakeLLM(score=helpful), LIBRARY, per_token).rows
    assert row.alone == pytest.approx(-1.5 - np.logaddexp(-1.5, -1.0))


def test_prompts_that_do_not_fit_or_fail_are_left_out_and_counted():
    one, two = (len(p) for p in prompt_lengths())
    assert one < two
    judged = judge_examples(QUESTIONS, FakeLLM(score=helpful, length=one + 1), LIBRARY, OPTIONS)
    assert (judged.rows, judged.left_out) == ([], 15)
    failing = FakeLLM(score=helpful, fail=["q0\tq2", "q1\t"])
    judged = judge_examples(QUESTIONS, failing, LIBRARY, OPTIONS)
    assert judged.left_out == 1
    assert "q2" not in judged.rows[0].candidates
    assert judged.rows[1].alone is None
    assert np.isfinite(mean_scores(judged.rows)["alone"])


def prompt_lengths() -> tuple[str, str]:
    """The longest prompt without an example, and the shortest with one."""
    llm = FakeLLM(score=helpful)
    judge_examples(QUESTIONS, llm, LIBRARY, OPTIONS)
    alone = [query.prompt for query in llm.seen if query.id.endswith("\t")]
    shown = [query.prompt for query in llm.seen if not query.id.endswith("\t")]
    return max(alone, key=len), min(shown, key=len)


# The file


ROWS = [
    ExampleScores("q0", -1.5, ("q1", "q2", "q3"), (0.5, 0.25, 0.125), (-2.0, -0.5, -1.0)),
    ExampleScores("q4", None, ("q1", "q2"), (0.5, 0.25), (-1.0, -3.0)),
]
CORPUS = Corpus([], QUESTIONS)


def test_the_file_is_read_as_it_was_written(tmp_path):
    write_example_scores(tmp_path / "example_scores.jsonl", ROWS)
    assert read_example_scores(tmp_path / "example_scores.jsonl") == ROWS
    assert read_example_scores(tmp_path) == ROWS
    assert judged_questions(tmp_path, CORPUS, "train") == ROWS[:1]
    assert judged_questions(tmp_path, CORPUS, "val") == ROWS[1:]
    refuses(r"holds no question of split test", judged_questions, tmp_path, CORPUS, "test")
    with pytest.raises(UserError, match=r"names the question q4, which data\.dir does not hold"):
        judged_questions(tmp_path, Corpus([], QUESTIONS[:4]), "train")


@pytest.mark.parametrize(
    "row",
    [
        [],
        {"question_id": "q0", "alone": None},
        {"question_id": "q0", "alone": None, "candidates": [{"id": "q1", "similarity": 0.5}]},
        {"question_id": "q0", "alone": None,
         "candidates": [{"id": "q1", "similarity": 0.5, "score": float("nan")}]},
        {"question_id": "q0", "alone": 10**400, "candidates": []},
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_its_line(tmp_path, row):
    file = tmp_path / "scores.jsonl"
    write_example_scores(file, ROWS)
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    refuses(r"scores\.jsonl, line 3: ", read_example_scores, file)


# Batches and loss


TOKENIZER = train_wordpiece([q.question for q in QUESTIONS], 80, lowercase=True)


def batches(rows, candidates: int):
    by_id = {question.id: question for question in QUESTIONS}
    feed = FeedConfig(2, seed=1, threads=0)
    return example_retrieval_batches(
        TOKENIZER, by_id, rows, lambda q: q.question, feed, length=16, candidates=candidates
    )


def test_batches_hold_candidates_with_their_scores():
    rows = [ROWS[0], ROWS[1]._replace(candidates=("q3", "q1"))]
    iterator, drawn = batches(rows, 2), set()
    for _ in range(12):
        batch = next(iterator)
        for b, row in enumerate(batch["index"]):
            names = [word_of(ids, mask) for ids, mask in
                     zip(batch["candidate_ids"][b], batch["candidate_mask"][b], strict=True)]  # fmt: skip
            assert word_of(batch["query_ids"][b], batch["query_mask"][b]) == rows[row].question_id
            scores = dict(zip(rows[row].candidates, rows[row].scores, strict=True))
            assert [scores[name] for name in names] == batch["scores"][b].tolist()
            drawn.add((int(row), *names))
    assert (
        len({names for row, *names in map(tuple, drawn) if row == 0 for names in [tuple(names)]})
        > 3
    )
    assert {int(i) for i in next(batches(rows, 3))["index"]} == {0}  # the other has two alone
    refuses(r"batches\.candidates=4: no judged question has so many", batches, rows, 4)


def word_of(ids, mask) -> str:
    found = [int(i) for i in ids[mask]][1:-1]
    (name,) = (q.id for q in QUESTIONS if TOKENIZER.encode(q.question) == found)
    return name


def task(temperature: float = 0.5) -> DistillationObjective:
    bert = BertConfig(vocab_size=80, hidden=16, layers=1, heads=2, mlp=16, positions=16, dropout=0.0,
                      attention_dropout=0.0, types=2)  # fmt: skip
    vision = VisionConfig(
        image_size=8, patch_size=8, width=16, layers=1, heads=2, mlp_width=16, embed_dim=16
    )
    return DistillationObjective(DualEncoderConfig(bert, vision), temperature)


def start(made: DistillationObjective) -> DualEncoder:
    model = drawn(lambda: made.init(jax.random.key(0)))
    model.logit_scale[...] = np.log(1 / 0.07, dtype=np.float32)
    return model


def test_the_loss_is_torchs_divergence():
    made, batch = task(), next(batches(ROWS, 2))
    model = start(made)

    def both(model, batch):
        count, _, length = batch["candidate_ids"].shape
        names = ("candidate_ids", "candidate_mask")
        examples = model.encode_text(*(batch[name].reshape(-1, length) for name in names))
        queries = model.encode_text(batch["query_ids"], batch["query_mask"])
        return made.loss(model, batch, None), queries, examples.reshape(count, 2, -1)

    (loss, metrics), queries, examples = jax.jit(both)(model, batch)
    cosines = np.einsum("bd,bmd->bm", np.asarray(queries), np.asarray(examples))
    scale = float(metrics["temperature"])
    assert scale == pytest.approx(1 / 0.07)
    found = torch.log_softmax(torch.tensor(cosines * scale), dim=1)
    targets = torch.softmax(torch.tensor(batch["scores"]) / 0.5, dim=1)
    want = torch.nn.functional.kl_div(found, targets, reduction="batchmean")
    np.testing.assert_allclose(float(loss), want.item(), atol=1e-5)
    nearest = cosines.argmax(axis=1)
    chosen = batch["scores"][np.arange(2), nearest]
    assert float(metrics["score_of_nearest"]) == pytest.approx(chosen.mean())
    assert float(metrics["accuracy"]) == (nearest == batch["scores"].argmax(axis=1)).mean()


def test_what_helped_becomes_the_nearest():
    """A few steps on one batch; the vision tower has no gradient."""
    made, batch = task(), next(batches(ROWS, 2))
    graphdef, state = nnx.split(start(made))
    adam = optax.adam(0.01)

    @jax.jit
    def step(state, moments):
        def loss(state):
            return made.loss(nnx.merge(graphdef, state), batch, None)

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state)
        updates, moments = adam.update(gradient, moments)
        return optax.apply_updates(state, updates), moments, (value, metrics, gradient["vision"])

    moments, seen = jax.eval_shape(adam.init, state), []
    moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), moments)  # as `init` makes them
    for _ in range(40):
        state, moments, (value, metrics, of_vision) = step(state, moments)
        seen.append(float(value))
    assert seen[-1] < 0.2 * seen[0]
    assert float(metrics["accuracy"]) == 1.0
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(of_vision))
