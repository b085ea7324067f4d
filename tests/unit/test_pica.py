"""PICa: prompts, ensembles, and its baselines without a model."""

import dataclasses

import pytest
from fake_llm import FakeLLM
from test_shots import FakeEmbedder

from mmqa_jax.data.schema import Question
from mmqa_jax.papers import pica
from mmqa_jax.prompting.examples.library import Embedders, ExampleLibrary

TAGS = [{"class": "cat", "conf": 0.9}, {"class": "mat", "conf": 0.5}]  # as the reader keeps them
ANSWERS = ("blue", "red", "red", "red", "green")


def example(n: int, **more) -> Question:
    extra = {"caption": f"picture {n}.", "tags": TAGS}
    return Question(
        f"e{n}", "train", f"ask {n} ?", answers=(ANSWERS[n % 5], *ANSWERS), extra=extra, **more
    )


EXAMPLES = [example(n) for n in range(12)]
QUERIES = [
    Question(
        f"q{n}", "val", f"query {n} ?", extra={"caption": f"scene {n}"}, choices=("a", "bb", "ccc")
    )
    for n in range(3)
]


@pytest.fixture
def library(tmp_path):
    return ExampleLibrary(EXAMPLES, Embedders(FakeEmbedder()), cache=tmp_path)


def shown(prompt: str) -> list[str]:
    """Ids of the examples in a prompt."""
    return [f"e{line.split()[2]}" for line in prompt.split("\n") if line.startswith("Q: ask")]


def test_every_prompt_shows_its_own_shots(library):
    llm = FakeLLM(lambda prompt: (" red", -1.0))
    predictions = pica.answer_pica(
        QUERIES, llm, library, shots=3, ensemble=2, similarity="question"
    )
    nearest = library.select(QUERIES, 6, "question")
    prompts = {query.id: query.prompt for query in llm.seen}
    assert len(prompts) == 6
    for query, shots, prediction in zip(QUERIES, nearest, predictions, strict=True):
        ids = [shot.question.id for shot in shots]
        assert [shown(prompts[query.id, r]) for r in range(2)] == [ids[:3], ids[3:]]
        assert prompts[query.id, 0].endswith(
            f"Context: {query.extra['caption']}\n===\nQ: {query.question}\nA:"
        )
        assert prediction.trace["prompts"] == [prompts[query.id, 0], prompts[query.id, 1]]
        assert [[s["id"] for s in own] for own in prediction.trace["shots"]] == [ids[:3], ids[3:]]
    decoding = llm.seen[0].decoding
    assert (decoding.max_new_tokens, decoding.stop, decoding.temperature) == (5, ("\n",), 0.0)


def test_shots_with_captions_by_people(tmp_path):
    """PICa's: one of a shot's captions by people, without tags; the query as it is."""
    by_people = [f"seen {n}" for n in range(5)]
    examples = [
        dataclasses.replace(e, extra={**e.extra, "coco_captions": by_people}) for e in EXAMPLES[:11]
    ]
    library = ExampleLibrary(
        [*examples, EXAMPLES[11]], Embedders(FakeEmbedder()), cache=tmp_path
    )  # the last has none

    def contexts(seed: int) -> list[list[str]]:
        llm = FakeLLM(lambda prompt: (" red", -1.0))
        found = pica.answer_pica(
            QUERIES, llm, library, shots=12, similarity="question", tags=True,
            shot_captions="people", seed=seed,
        )  # fmt: skip
        assert [p.trace["shots_with_own_caption"] for p in found] == [1, 1, 1]
        lines = [query.prompt.split("\n") for query in llm.seen]
        return [
            [x.removeprefix("Context: ") for x in own if x.startswith("Context")] for own in lines
        ]

    prompts = contexts(0)
    for query, (*shots, own) in zip(QUERIES, prompts, strict=True):
        assert own == query.extra["caption"]
        assert sorted(set(shots) - set(by_people)) == ["picture 11."]
        assert len(set(shots)) > 3  # not always the same of the five
    assert contexts(0) == prompts
    assert contexts(1) != prompts


def test_the_most_probable_prompt_answers(library):
    """Largest summed log-probability, post-processed as by PICa."""

    def say(prompt: str) -> tuple[str, float]:
        return (" The Sea.", -0.5) if "ask 3 ?" in prompt else (" a lake", -0.7)

    predictions = pica.answer_pica(
        QUERIES, FakeLLM(say), library, shots=6, ensemble=2, similarity="question"
    )
    assert {prediction.answer for prediction in predictions} == {"sea"}  # one half has example 3
    worse = FakeLLM(lambda prompt: (" a lake", -0.4) if "ask 3 ?" not in prompt else say(prompt))
    found = pica.answer_pica(QUERIES, worse, library, shots=6, ensemble=2, similarity="question")
    assert {prediction.answer for prediction in found} == {"lake"}


def test_the_most_similar_last(library):
    llm = FakeLLM()
    pica.answer_pica(
        QUERIES[:1], llm, library, shots=4, similarity="question", order="most_similar_last"
    )
    (nearest,) = library.select(QUERIES[:1], 4, "question")
    assert shown(llm.seen[0].prompt) == [shot.question.id for shot in nearest][::-1]


@pytest.mark.parametrize(("shot_answer", "expected"), [("first", "blue"), ("majority", "red")])
def test_the_answer_of_a_shot(library, shot_answer, expected):
    llm = FakeLLM()
    one = ExampleLibrary([EXAMPLES[0]], library._embedders, cache=library._cache)
    pica.answer_pica(QUERIES[:1], llm, one, shots=1, similarity="question", shot_answer=shot_answer)
    assert f"A: {expected}\n" in llm.seen[0].prompt


def test_tags_follow_the_caption():
    assert pica.context(EXAMPLES[0], False) == "picture 0."
    assert pica.context(EXAMPLES[0], True) == "picture 0.. cat, mat"  # its own period stays
    assert pica.context(QUERIES[0], True) == "scene 0"
    assert pica.context(Question("x", "val", "?"), True) == ""


def test_failures_and_prompts_that_do_not_fit(library):
    llm = FakeLLM(lambda prompt: (" red", -1.0), fail=[("q1", 0)])
    predictions = pica.answer_pica(QUERIES, llm, library, shots=1, similarity="question")
    assert [prediction.answer for prediction in predictions] == ["red", "", "red"]
    assert predictions[1].trace["failed"] == ["timed out"]
    short = FakeLLM(lambda prompt: (" red", -1.0), length=20)
    predictions = pica.answer_pica(QUERIES, short, library, shots=1, similarity="question")
    assert [prediction.answer for prediction in predictions] == [""] * 3
    assert not short.seen
    assert all(prediction.trace["too_long"] for prediction in predictions)


def test_zero_shots_need_no_library():
    llm = FakeLLM(lambda prompt: (" red", -1.0))
    predictions = pica.answer_pica(QUERIES, llm, ExampleLibrary([]), shots=0)
    assert [prediction.answer for prediction in predictions] == ["red"] * 3
    assert shown(llm.seen[0].prompt) == []


def test_multiple_choice(library):
    """By summed or mean log-probability, with or without the options' prior."""

    def score(prompt: str, option: str) -> tuple[float, ...]:
        text, blank = option.strip(), "Q: N/A" in prompt
        values = {"a": (-2.0,), "bb": (-1.5, -1.5), "ccc": (-4.0, -0.1, -0.1)}
        prior = {"a": (-1.0,), "bb": (-1.0, -1.0), "ccc": (-7.0, -1.0, -1.0)}
        return (prior if blank else values)[text]

    def choose(**options) -> set:
        llm = FakeLLM(score=score)
        found = pica.choose_pica(QUERIES, llm, library, shots=2, **options)
        assert all(p.answer == QUERIES[0].choices[p.choice] for p in found)
        return {prediction.choice for prediction in found}

    assert choose() == {0}
    assert choose(score="mean") == {2}  # -1.4 per token
    assert choose(calibrated=True) == {2}  # -4.2 + 9
    assert choose(score="mean", calibrated=True) == {2}


def test_baselines_without_a_model(library):
    nearest = library.select(QUERIES, 5, "question")
    copied = pica.copy_nearest_answer(QUERIES, library)
    assert [p.answer for p in copied] == ["red"] * 3  # the majority of every example's answers
    blue = [
        Question(f"b{n}", "train", f"ask {n} ?", answers=("blue",) if n < 7 else ("red",))
        for n in range(12)
    ]
    library = ExampleLibrary(blue, library._embedders, cache=library._cache)
    for query, prediction, shots in zip(
        QUERIES, pica.vote_of_nearest_answers(QUERIES, library, shots=5), nearest, strict=True
    ):
        votes = [int(shot.question.id[1:]) < 7 for shot in shots]
        assert prediction.answer == ("blue" if sum(votes) > 2 else "red"), query
