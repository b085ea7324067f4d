"""Captions of questions' pictures by a vision-language model of known answers."""

import json
import types

import pytest
from cli_runs import mmqa
from fake_llm import FakeLLM
from tiny_llm import flag

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.examples.side_files import open_captions
from mmqa_jax.runs.verbs import captioning
from mmqa_jax.runs.verbs.captioning import caption_questions

QUESTIONS = [
    Question(f"q{n}", split, f"what is {n}?", image)
    for n, split, image in (
        (0, "test", "a.png"), (1, "test", "b.png"), (2, "test", None), (3, "test", "broken.png"),
        (4, "val", "c.png"),
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def corpus(monkeypatch):
    made = types.SimpleNamespace(
        questions=lambda split: [q for q in QUESTIONS if split in (None, q.split)],
        question_picture=lambda q: None if q.image == "broken.png" else flag().data,
    )
    monkeypatch.setattr(captioning, "open_corpus", lambda data: made)
    monkeypatch.setattr(captioning, "_AT_ONCE", 2)


def test_each_picture_is_described_for_its_question(tmp_path, capsys):
    llm = FakeLLM(lambda prompt: (f" <think>hm</think>seen: {prompt}\n", -1.0), takes_pictures=True)
    out = tmp_path / "captions.json"
    found = caption_questions(tmp_path, out, llm, split="test")
    counts = {"captions": 2, "without_picture": 1, "failed": 1}
    assert found == {"out": str(out), **counts}
    asked = "please describe this image according to the given question: what is"
    assert json.loads(out.read_text()) == {f"q{n}": f"seen: {asked} {n}?" for n in (0, 1)}
    assert [len(query.messages[0].pictures) for query in llm.seen] == [1, 1]
    assert "1 questions have no caption (q3: broken.png: cannot be read)" in capsys.readouterr().err
    captions = open_captions(str(out), questions=QUESTIONS)
    assert captions.of_question(QUESTIONS[1]) == f"seen: {asked} 1?"
    assert captions.of_question(QUESTIONS[4]) is None


def test_another_prompt_and_failures(tmp_path, capsys):
    out = tmp_path / "captions.json"
    llm = FakeLLM(lambda prompt: (prompt, -1.0), fail=["q1"], takes_pictures=True)
    found = caption_questions(tmp_path, out, llm, prompt="Describe it. {other}")
    assert (found["captions"], found["failed"]) == (2, 2)
    assert json.loads(out.read_text()) == dict.fromkeys(("q0", "q4"), "Describe it. {other}")
    assert "q1: timed out" in capsys.readouterr().err


def test_what_cannot_be_captioned(tmp_path):
    out = tmp_path / "captions.json"
    llm = FakeLLM(length=3, takes_pictures=True)
    with pytest.raises(UserError, match="none of its 0 questions of split train has a picture"):
        caption_questions(tmp_path, out, llm, split="train")
    with pytest.raises(
        RunError, match=r"no picture was captioned; question q0: .*is too long|tokens"
    ):
        caption_questions(tmp_path, out, llm, split="test")
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--features and --data: give one of them"),
        (("--data=a", "--features=b"), "--features and --data: give one of them"),
        (("--data=a", "--tags=b"), "--tags: is not used with --data"),
        (("--features=a", "--split=b"), "--split: is not used with --features"),
        (("--features=a",), "--tokenizer: is missing"),
        (("--data=a", "--max_new_tokens=0"), "--max_new_tokens=0: expected at least 1"),
    ],
)
def test_flags_that_contradict_each_other(flags, message, tmp_path):
    ended = mmqa("caption", *flags, "--model=m", f"--out={tmp_path / 'out'}")
    assert (ended.code, message in ended.err) == (2, True), ended.err
