"""LLaVA-1.5's own multiple choice: its prompts byte for byte, and what is read of its answers."""

import dataclasses
import json

import pytest
from fake_llm import FakeLLM
from shared_data import SHARED, require, shared_benchmark

from mmqa_jax.benchmarks.scienceqa import read_scienceqa, score_scienceqa
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.papers.llava import SETTINGS, answer_llava
from mmqa_jax.prompting.text_tokenizer import VicunaV1

DIRECTLY = "Answer with the option's letter from the given choices directly."
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


def sent(questions, said="B", **options):
    """The texts that the model gets, as LLaVA's conversation spells them, and the predictions."""
    corpus = Corpus([], questions, read_picture=lambda name: b"\x89PNG\r\n\x1a\n" + name.encode())
    llm = FakeLLM(lambda prompt: (f" {said} ", -1.0))
    found = answer_llava(questions, corpus, llm, **options)
    assert {query.decoding.temperature for query in llm.seen} == {0.0}
    return {q.id: VicunaV1().render(q.id, q.messages) for q in llm.seen}, found


def conversation(message):
    return f"{SYSTEM} USER: {message} ASSISTANT:"


def of_its_file(text, picture):
    """model_vqa_science.py: the prompt of a conversation in llava_test_CQM-A.json."""
    asked = text.replace("<image>", "").strip()
    return conversation(f"{'<image>' + chr(10) if picture else ''}{asked}\n{DIRECTLY}")


def test_scienceqa_all_test_questions():
    path = SHARED / "scienceqa" / "test_questions_all.json"
    require(path)
    rows = {row["id"]: row for row in json.loads(path.read_text("utf-8"))}
    assert len(rows) == 4241
    questions = [
        dataclasses.replace(q, image="p.png" if "image" in rows[q.id] else None)
        for q in shared_benchmark(read_scienceqa, "scienceqa/test_questions_all.json").questions
    ]
    prompts, _ = sent(questions, template="llava.scienceqa", read="choice")
    for name, row in rows.items():
        text = row["conversations"][0]["value"]
        assert prompts[name] == of_its_file(text, "image" in row)


def test_scienceqa_problems_give_the_same_prompts():
    """problems.json has the hint apart from the question."""
    folder = SHARED / "scienceqa"
    require(folder)
    rows = {r["id"]: r for r in json.loads((folder / "test_questions_all.json").read_text("utf-8"))}
    known = shared_benchmark(read_scienceqa, "scienceqa/problems_subset.json").questions
    questions = [q for q in known if q.split == "test"]
    assert len(questions) == 361
    prompts, _ = sent(questions, template="llava.scienceqa")
    differ = set()
    for question in questions:
        text = rows[question.id]["conversations"][0]["value"]
        if prompts[question.id] != of_its_file(text, picture=False):
            differ.add(question.id)
            assert "Punnett square is" in question.extra["hint"]
    # A copy of the problems whose hints spell out the tables that LLaVA's file lacks.
    assert differ == {"42", "209", "600", "1714"}


@pytest.mark.parametrize("hint", ["", "Look closely."])
def test_mmbench_and_seed_bench(hint):
    """model_vqa_mmbench.py, restated; SEED-Bench's prompts have no hint."""
    extra = {"hint": hint} if hint else {}
    question = Question("1", "val", "What is it?", "1.png", choices=("cat", "None"), extra=extra)
    text = f"{hint}\nWhat is it?" if hint else "What is it?"
    for letter, option in zip("AB", question.choices, strict=True):
        text = f"{text}\n{letter}. {option}"
    prompts, (found,) = sent([question])
    assert prompts["1"] == conversation(f"<image>\n{text}\n{DIRECTLY}")
    assert (found.answer, found.choice) == ("B", None)


@pytest.mark.parametrize(
    ("said", "choice"), [("B", 1), ("B. yes", 1), ("The answer is A.", 0), ("b", None), ("C", None)]
)
def test_answers_are_scored_by_llavas_rule(said, choice):
    question = Question("1", "test", "Is it?", choices=("no", "yes"), answer_index=1, extra={})
    _, found = sent([question], said, template="llava.scienceqa", read="choice")
    assert (found[0].answer, found[0].choice) == (said, choice)
    scores = score_scienceqa([question], found).scored[0].scores
    assert scores["scienceqa/letter_or_wrong"] == float(choice == 1)


def test_questions_without_choices_are_refused():
    with pytest.raises(UserError, match="setting llava: 1 of 1 questions have no choices"):
        SETTINGS["llava"].check_questions("llava", [Question("q", "test", "?")])
