"""Batches made by worker processes: those of one process, in its order, whatever happens."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from tiny_corpus import PACKING, QUESTIONS, make_reader

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.answers import AnswerVocabulary
from mmqa_jax.data.batches.feed import FeedConfig, feed_batches
from mmqa_jax.data.batches.packing import Bucket, MaskingConfig, Packer
from mmqa_jax.data.batches.retriever import ContrastSampling, contrastive_batches
from mmqa_jax.data.batches.source_reader import answer_batches, rerank_batches
from mmqa_jax.data.batches.texts import TokenExample, language_model_batches
from mmqa_jax.data.batches.vqa import CaptionInputs, vqa_batches
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.tasks.modality import modality_batches
from tests.refusals import refuses

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Then workers import neither this file nor pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def built(feed: FeedConfig) -> dict:
    """The batches of the tasks with an unpicklable part: a closure, a tokenizer, a lock."""
    reader = make_reader()
    packer = Packer(reader.tokenizer, PACKING)
    texts = [question.question for question in QUESTIONS]
    examples = [[TokenExample(np.arange(n + 2, dtype=np.int32), 1)] for n in range(20)]
    words = [CaptionInputs(reader.tokenizer, length) for length in (12, 24)]
    answers = AnswerVocabulary(sorted({a for q in QUESTIONS for a in q.answers}))
    masking = MaskingConfig(0.5, 9)
    return {
        "contrastive": contrastive_batches(
            reader, QUESTIONS, feed, ContrastSampling(query_length=24, source_lengths=(12, 40))
        ),
        "rerank": rerank_batches(reader, QUESTIONS, packer, feed),
        "answer": answer_batches(reader, QUESTIONS, packer, masking, feed),
        "modality": modality_batches(reader.tokenizer, texts, [0] * 30, feed, length=16),
        "language_model": language_model_batches(examples, [1.0], feed, length=64, targets=60),
        "vqa": vqa_batches(words, QUESTIONS, answers, feed, lengths=(12, 24)),
    }


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def marked(raw, rng):
    """An augmentation after which question and sources are tokenized anew."""
    question = f"{raw.question} [SEP] {rng.integers(9)}"
    sources = [
        dataclasses.replace(s, text=f"{s.text} [MASK] {rng.integers(9)}") for s in raw.sources
    ]
    return dataclasses.replace(raw, question=question, sources=tuple(sources))


@pytest.mark.parametrize(
    "task", ["contrastive", "rerank", "answer", "modality", "language_model", "vqa"]
)
def test_a_copy_in_another_process_makes_the_same_batches(task):
    """What is sent to a worker: nothing of it may be lost on the way."""
    feed = FeedConfig(4, seed=5, threads=0, augment=marked, slack=8)
    here = built(feed)[task]
    there = cloudpickle.loads(
        cloudpickle.dumps(built(dataclasses.replace(feed, workers=1))[task]._make)
    )
    for position in range(20):
        batch, found = there(position)
        assert_same(batch, next(here))
        assert not any(found)


def test_batches_do_not_depend_on_the_workers():
    feed = FeedConfig(4, seed=5, augment=marked, slack=8)
    reference = built(dataclasses.replace(feed, threads=0))["rerank"]
    expected = [next(reference) for _ in range(17)]
    position, state = 0, None
    for workers, until in ((0, 7), (2, 12), (0, 16)):
        batches = built(dataclasses.replace(feed, workers=workers))["rerank"]
        if state is not None:
            batches.set_state(state)
            assert batches.get_state() == state
        for batch in expected[position:until]:
            assert_same(next(batches), batch)
        position, state = until, json.loads(json.dumps(batches.get_state()))
        assert_same(next(batches), expected[until])
        batches.close()
    assert multiprocessing.active_children() == []


def counting(workers: int):
    """Batches of one number each, with a broken picture in every third, and its counter."""
    broken = BrokenPictures(0, 10)

    def make(planned, table):
        if planned.index % 3 == 0:
            broken.add(f"picture {planned.index}", "it is torn")
        if planned.index == 8:
            raise UserError("records: cannot be read; run `mmqa prepare` again.")
        return {"index": np.full(2, planned.index)}

    table = {"example": np.arange(40), "bucket": np.zeros(40, int)}
    feed = FeedConfig(2, threads=1, workers=workers)
    return feed_batches(lambda epoch: table, [Bucket(0, 8)], make, feed, (broken,)), broken


def test_what_workers_count_and_refuse_is_what_the_run_counts_and_refuses():
    batches, broken = counting(workers=1)
    assert [next(batches)["index"][0] for _ in range(3)] == [0, 1, 2]
    broken.limit = 1  # of the run: what all workers count; the worker's own is ten
    refuses("2 pictures cannot be decoded, more than the 1 allowed", next, batches, error=RunError)
    broken.limit = 10
    assert [next(batches)["index"][0] for _ in range(4)] == [4, 5, 6, 7]
    assert {"picture 0", "picture 3", "picture 6"} <= set(broken.reasons)
    refuses("records: cannot be read; run `mmqa prepare` again", next, batches)
    batches.close()


def test_workers_end_with_a_run_that_is_killed():
    """They take no notice of the signals that a job's processes get together."""
    script = (
        "import multiprocessing, os, sys\n"
        "sys.path.insert(0, 'tests/unit')\n"
        "from test_input_workers import counting\n"
        "batches, _ = counting(1)\n"
        "next(batches)\n"
        "print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "print([int(next(batches)['index'][0]) for _ in range(6)], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    worker = int(run.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker, number)
    out, _ = run.communicate("\n", timeout=60)
    assert (out.strip(), run.returncode) == ("[1, 2, 3, 4, 5, 6]", -signal.SIGKILL)
    deadline = time.monotonic() + 30
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)


def is_alive(process: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_bad_workers():
    refuses("workers=-1 is negative", counting, workers=-1)
