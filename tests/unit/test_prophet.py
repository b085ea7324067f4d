"""Prophet's second stage: prompts as its authors write them, shuffled examples, the vote."""

from fake_llm import FakeLLM
from mavl_team import EXAMPLES, QUESTIONS, heuristics, library

from mmqa_jax.data.schema import Question
from mmqa_jax.papers.prophet import answer_first_candidate, answer_prophet, choose_prophet
from tests.refusals import refuses

HEAD = (
    "Please answer the question according to the context and candidate answers. Each candidate "
    "answer is associated with a confidence score within a bracket. The true answer may not be "
    "included in the candidate answers.\n\n"
)


def sample_make(question: str, caption: str, candidates: str, answer: str | None = None) -> str:
    """A sample as Prophet's prompt.py:73-88 composes it, restated."""
    prefix = "===\n"
    text = f"{prefix}Context: {caption}\n{prefix}Question: {question}\n"
    text += f"{prefix}Candidates: {candidates}\n{prefix}Answer:"
    return text if answer is None else f"{text} {answer}\n\n"


def test_the_prompt_is_the_authors():
    llm = FakeLLM(lambda prompt: (" soup", -1.0))
    answer_prophet(QUESTIONS[:1], llm, library(), heuristics(), shots=1, ensemble=2, candidates=2)
    listed = "soup(0.90), stew(0.12)"
    prompts = {query.id: query.prompt for query in llm.seen}
    query = sample_make("query 0 ?", "scene 0.", listed)
    shots = [HEAD + sample_make(f"ask {n} ?", f"view {n}.", listed, "red") + query for n in (0, 1)]
    assert sorted(prompts.values()) == shots
    decoding = llm.seen[0].decoding
    assert (decoding.max_new_tokens, decoding.stop, decoding.temperature) == (8, ("\n",), 0.0)


def test_the_nearest_examples_are_shuffled_over_the_prompts():
    """Every one of the shots * ensemble nearest is shown once; the order depends on the seed."""
    of = heuristics(examples={"q0": [f"e{n}" for n in range(6)]})

    def shown(seed: int, shots: int, ensemble: int) -> list[str]:
        llm = FakeLLM()
        options = {"shots": shots, "ensemble": ensemble, "seed": seed}
        answer_prophet(QUESTIONS[:1], llm, library(), of, **options)
        prompts = [query.prompt for query in sorted(llm.seen, key=lambda query: query.id)]
        return [f"e{line.split()[2]}" for p in prompts for line in p.split("\n") if "ask" in line]

    assert sorted(shown(0, 2, 3)) == [f"e{n}" for n in range(6)]
    assert sorted(shown(0, 2, 2)) == ["e0", "e1", "e2", "e3"]  # the nearest four
    assert shown(1, 2, 3) == shown(1, 2, 3)
    assert len({tuple(shown(seed, 6, 1)) for seed in range(5)}) > 1


def test_probabilities_of_equal_answers_add_up():
    said = {0: (" The tea", -0.5), 1: (" soup.", -1.0), 2: ("soup", -1.0)}

    class Told(FakeLLM):
        def answer(self, queries):
            for query in queries:
                self._say = lambda prompt, t=query.id[1]: said[t]
                yield from super().answer([query])

    options = {"shots": 1, "ensemble": 3}
    (first, *_) = answer_prophet(QUESTIONS, Told(), library(), heuristics(), **options)
    assert first.answer == "soup"  # 2 exp(-1) > exp(-.5)
    said[0] = (" The tea", -0.1)
    (first, *_) = answer_prophet(QUESTIONS, Told(), library(), heuristics(), **options)
    assert first.answer == "tea"  # exp(-.1) > 2 exp(-1)
    said |= {0: (" The tea", -0.5), 1: ("", -0.1)}
    (first, *_) = answer_prophet(QUESTIONS, Told(), library(), heuristics(), **options)
    assert first.answer == "tea"
    said |= {0: ("the", 0.0), 2: ("\n", 0.0)}
    (first, *_) = answer_prophet(QUESTIONS, Told(), library(), heuristics(), **options)
    assert first.answer == "soup"  # the first candidate
    assert first.trace["vote"] == {}


def test_missing_candidates_and_examples():
    """A question without candidates has no such line, one without examples no shots."""
    of = heuristics()
    del of.candidates["q1"], of.examples["q2"]
    llm = FakeLLM(lambda prompt: ("", 0.0))
    found = answer_prophet(QUESTIONS, llm, library(), of, shots=2, ensemble=1)
    assert [p.answer for p in found] == ["soup", "", "soup"]
    assert [p.trace["fallback"] for p in found] == ["soup", "", "soup"]
    (prompt,) = (query.prompt for query in llm.seen if query.id == ("q1", 0))
    assert prompt.endswith("Question: query 1 ?\n===\nAnswer:")
    assert found[2].trace["shots"] == [[]]


def test_failures_and_prompts_that_do_not_fit():
    llm = FakeLLM(lambda prompt: ("tea", -1.0), fail=[("q0", 0)], length=500)
    found = answer_prophet(QUESTIONS, llm, library(), heuristics(), shots=2, ensemble=1)
    assert [p.answer for p in found] == ["soup", "tea", "tea"]
    assert found[0].trace["failed"] == ["timed out"]
    assert found[1].trace["dropped_shots"] == 1
    none = answer_prophet(QUESTIONS, FakeLLM(length=10), library(), heuristics(), shots=1)
    assert [p.answer for p in none] == ["soup"] * 3
    assert len(none[0].trace["too_long"]) == 5


def test_multiple_choice():
    def score(prompt: str, option: str) -> tuple[float, ...]:
        blank = "Question: N/A" in prompt
        return {" tea": (-1.0,), " soup": (-9.0 if blank else -2.0,)}[option]

    questions = [
        Question(q.id, "val", q.question, choices=("tea", "soup"), extra=q.extra) for q in QUESTIONS
    ]
    found = choose_prophet(questions, FakeLLM(score=score), library(), heuristics(), shots=1)
    assert [p.answer for p in found] == ["tea"] * 3
    found = choose_prophet(
        questions, FakeLLM(score=score), library(), heuristics(), shots=1, calibrated=True
    )
    assert [p.choice for p in found] == [1] * 3


def test_the_vqa_model_alone():
    of = heuristics(candidates={"q0": [("The tea", 0.5), ("soup", 0.4)]})
    assert [p.answer for p in answer_first_candidate(QUESTIONS, of)] == ["tea", "", ""]
    refuses("no candidates for any of the 6 questions there", answer_first_candidate, EXAMPLES, of)


def test_files_are_compared_with_the_whole_split_not_with_a_chunk():
    of = heuristics(candidates={"q0": [("tea", 0.5)]}, examples={"q0": ["e0"]})
    refuses("no candidates for any of the", of.select, QUESTIONS[1:], library(), 1, "answer_aware")
    split = of.of_split(QUESTIONS)
    assert split.select(QUESTIONS[1:], library(), 1, "answer_aware") == [[], []]
    refuses("no candidates for any of the 2 questions there", of.of_split, QUESTIONS[1:])
    other = heuristics(candidates={"q0": [("tea", 0.5)]}, examples={"z": ["e0"]})
    refuses("none of the questions has an example there", other.of_split, QUESTIONS)
