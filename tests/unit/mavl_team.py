"""A tiny knowledge-based VQA problem, and a language model that plans, knows and answers."""

import re
from typing import NamedTuple

from fake_llm import FakeLLM

from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.examples.library import ExampleLibrary
from mmqa_jax.prompting.examples.side_files import AnswerHeuristics

EXAMPLES = [
    Question(f"e{n}", "train", f"ask {n} ?", answers=("red",), extra={"caption": f"view {n}"})
    for n in range(6)
]
QUESTIONS = [
    Question(
        f"q{n}", "val", f"query {n} ?", answers=("soup", "soup", "stew") * 3 + ("soup",),
        extra={"caption": f"scene {n}."},
    )
    for n in range(3)
]  # fmt: skip


def heuristics(**changes) -> AnswerHeuristics:
    """Two candidates per question and example; two answer-aware examples per question."""
    known = {q.id: [("soup", 0.9), ("stew", 0.125)] for q in (*EXAMPLES, *QUESTIONS)}
    examples = {f"q{n}": [f"e{n + 1}", f"e{n}"] for n in range(3)}
    return AnswerHeuristics(**{"candidates": known, "examples": examples, **changes})


def library() -> ExampleLibrary:
    """Examples without embedders."""
    return ExampleLibrary(EXAMPLES)


class Passage(NamedTuple):
    """As a knowledge base's."""

    text: str
    id: str = "kb"
    score: float = 1.0


class FakeKnowledge:
    """Finds a passage for every text but those that `without` matches."""

    def __init__(self, without: str = r"$^"):
        self.without, self.asked = re.compile(without), []

    def find(self, texts, top_k):
        self.asked += texts
        return [[] if self.without.search(t) else [Passage(f"KB on {t}")] * top_k for t in texts]


def team_llm(plans: dict[str, str], answers=lambda prompt: ("soup", -0.5), **more) -> FakeLLM:
    """Plans by role, knowledge that names its question, answers by the prompt's text."""

    def say(prompt: str) -> tuple[str, float]:
        if found := re.match(r"You are (\w+) planner", prompt):
            return plans[found[1]], -1.0
        if prompt.endswith("LLM_Knowledge:"):
            return f" Known of {prompt.split()[-3]}", -1.0
        text, logprob = answers(prompt)
        return f" {text}", logprob

    return FakeLLM(say, **more)


FULL = {
    "junior": "Action_1",
    "senior": "Action_1, Action_2",
    "manager": "Action_1, Action_2, Action_3",
}


def prompts_of(llm: FakeLLM) -> dict[str, list[str]]:
    """What an LLM was asked, by kind."""
    texts = [llm.text(query) for query in llm.seen]
    return {
        "plans": [t for t in texts if t.startswith("You are")],
        "knowledge": [t for t in texts if t.endswith("LLM_Knowledge:")],
        "answers": [t for t in texts if t.endswith("Answer:")],
    }
