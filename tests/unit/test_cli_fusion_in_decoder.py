"""Fusion-in-Decoder is trained, answers from sources, and from KAT's knowledge."""

import json
import pickle
from collections import defaultdict

import numpy as np
import pytest
from cli_runs import ROOT, done, flags_with, rows_of, write_rows
from tiny_t5 import write_folder

from mmqa_jax.benchmarks.okvqa import KATKnowledge, question_texts
from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.store import Store
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import squad_exact_match
from mmqa_jax.papers.kat import answer_kat
from mmqa_jax.runs.part import Resumable
from mmqa_jax.tasks.trained_readers import open_published_reader, open_reader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

COLOURS = ("red", "green", "blue")
THINGS = ("sun", "sea", "tree", "river", "stone")


def prepare_corpus(folder) -> str:
    """Questions on the colour of things; of each a source says it, and others say others'."""
    sources = [
        {"id": f"{c} {t}", "modality": "text", "title": t, "text": f"The {t} is {c}."}
        for c in COLOURS
        for t in THINGS
    ]
    questions = [
        {
            "id": f"{split} {c} {t}", "split": split, "question": f"Which is the {t}?",
            "answers": [c], "positives": [f"{c} {t}"], "negatives": [f"{c} {THINGS[0]}"],
        }
        for split in ("train", "val")
        for c in COLOURS
        for t in THINGS[1:]
    ]  # fmt: skip
    raw = folder.with_name("raw")
    raw.mkdir()
    write_rows(raw / "sources.jsonl", sources)
    write_rows(raw / "questions.jsonl", questions)
    done("prepare", "corpus", f"--raw={raw}", f"--out={folder}")
    return str(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("fusion")
    base = write_folder(tmp_path / "t5")
    values = {
        "init": base, "tokenizer": "", "data.dir": prepare_corpus(tmp_path / "data"),
        "passages.count": 3, "passages.length": 64, "inference.batch_size": 4,
        "inference.max_new_tokens": 8, "batches.batch_size": 4, "batches.targets": 8,
        "batches.threads": 0, "train.steps": 12, "train.log_every": 4, "train.evaluate_every": 12,
        "train.checkpoint_every": 12, "train.optimizer.learning_rate": 0.01,
        "train.optimizer.warmup": 0.0, "validate.questions": 4,
    }  # fmt: skip
    result = done(*flags_with("train", "webqa/fusion_in_decoder.py", tmp_path / "run", values))
    assert result["best"]["metric"] == "exact_match"
    losses = [row["loss"] for row in rows_of(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    return tmp_path / "run"


def test_a_reader_is_trained_and_answers_from_its_sources(run, tmp_path):
    out = tmp_path / "answers.jsonl"
    flags = (f"--data={run.parent / 'data'}", "--split=val", f"--model={run}")
    done("answer", *flags, "--sources=oracle", f"--out={out}")
    rows = rows_of(out)
    assert len(rows) == 12
    assert all(row["sources"] == row["read"] and len(row["sources"]) == 1 for row in rows)
    # What it is shown decides: it answers otherwise without sources.
    done("answer", *flags, "--sources=none", f"--out={tmp_path / 'none.jsonl'}")
    assert [row["beams"] for row in rows_of(tmp_path / "none.jsonl")] != [r["beams"] for r in rows]


def test_kats_row_reads_entities_and_answers(run, tmp_path):
    entities = {f"COCO_val2014_{n:012}.jpg": [[("sun", "star"), ("sea", None)]] for n in (7, 8)}
    answers = {f"{n}#q{n}": [("red", "the sun is red")] for n in (7, 8)}
    for name, content in (("entities.pkl", entities), ("answers.pkl", answers)):
        (tmp_path / name).write_bytes(pickle.dumps(content))
    facts = KATKnowledge(str(tmp_path / "entities.pkl"), str(tmp_path / "answers.pkl"))
    asked = Question("q7", "test", "Which is the sun?", extra={"image_id": "7"})
    # As guilk/KAT src/data.py, OkvqaDataset and OKvqaCollator, with n_context=3.
    assert question_texts(asked.question, facts.passages(asked, 3)) == [
        "question: Which is the sun? title: sun context: sun is a star",
        "question: Which is the sun? title: sea context: sea is a None",
        "question: Which is the sun? title: sun context: sun is a star",
        "question: Which is the sun? candidate: red evidence: the sun is red",
    ]
    with pytest.raises(UserError, match=r"entities.pkl: has nothing on question 'q9'"):
        facts.passages(Question("q9", "test", "?", extra={"image_id": "9"}), 3)

    (prediction,) = answer_kat([asked], facts, open_reader(run, Corpus([], [asked])), entities=2)
    assert prediction.answer == prediction.beams[0][0]
    # A published T5 reads alike, by the config that says how.
    done("convert", "--model=t5", f"--source={run}", f"--out={tmp_path / 'hf'}", "--export=hf")
    config = load_config(ROOT / "configs/webqa/fusion_in_decoder.py:runlocal")
    published = open_published_reader(tmp_path / "hf", str(run), config, Corpus([], [asked]))
    (again,) = answer_kat([asked], facts, published, entities=2)
    assert again.answer == prediction.answer
    np.testing.assert_allclose(again.beams[0][1], prediction.beams[0][1], atol=1e-4)
    assert len(prediction.trace["passages"]) == 3


PAIRS = r"expected an id with pairs of texts; give a file of KAT's"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([["sun", "star"]], r"e\.json: expected a mapping from ids to pairs; give a file of KAT's"),
        (
            {"7": [[["sun", "star"]]], "no number": [[["sun", "star"]]]},
            rf"key 'no number': {PAIRS}",
        ),
        ({"7": []}, rf"e\.json, key '7': {PAIRS}"),
        ({"7": 3}, rf"e\.json, key '7': {PAIRS}"),
        ({"7": [["sun"]]}, rf"e\.json, key '7': {PAIRS}"),
        ({"7#q7": [["red", "the sun is red"]]}, rf"e\.json, key '7#q7': {PAIRS}"),  # answers
        (None, r"keys parts\.facts\.entities and parts\.facts\.answers: are both empty; name a"),
    ],
)
def test_what_is_no_knowledge_of_kats_is_refused(tmp_path, content, message):
    file = tmp_path / "e.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        KATKnowledge("" if content is None else str(file))


def test_exact_match_is_squads():
    assert squad_exact_match("The Sun's!", ["suns"]) == 1
    assert squad_exact_match("an apple, a day", ["apple day"]) == 1
    assert squad_exact_match("apples", ["apple", "a pear"]) == 0


def test_what_was_read_is_read_no_more(tmp_path):
    asked = []

    class Reader:
        def read_batches(self, questions, passages):
            asked.extend(question.id for question in questions)
            found = zip(questions, passages, strict=True)
            yield [(n, ((f"{q.id} {own[0]}", -0.5),)) for n, (q, own) in enumerate(found)]

    questions = [Question(name, "test", f"Is it {name}?") for name in "abc"]
    passages = [[f"passage of {q.id}"] for q in questions]
    store = Store(tmp_path / "kept", {"part": "fusion_reader"})
    kept = Resumable(Reader(), store, defaultdict(float))
    first = kept.read(questions[:2], passages[:2])
    again = kept.read(questions, passages)
    assert asked == ["a", "b", "c"]
    assert again[:2] == first
    assert again[2].answer == "c passage of c"
    assert again[2].trace == {"passages": ["passage of c"]}
    kept.read(questions[:1], [["another"]])
    assert asked == ["a", "b", "c", "a"]
    store.close()
