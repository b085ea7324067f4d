"""Atlas with held-out entities and foreign questions: what is gone, and what is asked."""

import pytest

from mmqa_jax.data.atlas.build import foreign_questions, strangers, with_unanswerable
from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.schema import Question, Source, is_answerable

LANDS = [f"Land {n}" for n in range(12)]
GONE = {land for land in LANDS if fold_of(land, 3) == 0}
SOURCES = [
    Source(f"{land} {part}", "text", f"{part} of {land}", land)
    for land in (*LANDS, "Trained")
    for part in ("a", "b")
]


def question(name: str, *gold: str, split: str = "test", **more) -> Question:
    others = tuple(s.id for s in SOURCES if s.id not in gold)
    return Question(name, split, "?", None, ("x",), "x", "text", gold, others, **more)


def made(*questions: Question) -> tuple[set[str], dict[str, Question]]:
    sources, asked = with_unanswerable(SOURCES, questions)
    return {s.title for s in sources}, {q.id: q for q in asked if not q.id.startswith("foreign")}


def test_sources_of_held_out_entities_are_gone():
    questions = [question(land, f"{land} a") for land in LANDS]
    assert 0 < len(GONE) < len(LANDS)
    titles, asked = made(*questions)
    assert titles == {*LANDS, "Trained"} - GONE
    for land in LANDS:
        one = asked[land]
        assert is_answerable(one) == (land not in GONE)
        assert one.positives == (() if land in GONE else (f"{land} a",))
        assert (one.keywords, one.answers) == (("", ()) if land in GONE else ("x", ("x",)))
        assert not {name for name in one.negatives if name.rpartition(" ")[0] in GONE}
        assert len(one.negatives) > 10


def test_entities_of_training_alone_stay():
    gone = min(GONE)
    titles, asked = made(question("t", f"{gone} a", split="train"))
    assert gone in titles
    assert is_answerable(asked["t"])


def test_half_of_the_gold_sources_is_no_answer():
    gone, kept = min(GONE), min(set(LANDS) - GONE)
    _, asked = made(question("both", f"{gone} a", f"{kept} a"))
    assert not is_answerable(asked["both"])
    assert asked["both"].positives == ()
    assert f"{kept} a" in asked["both"].negatives


@pytest.mark.parametrize("template", ["longest_border", "anthem>longest_border"])
def test_what_neighbors_tell_is_not_asked(template):
    gone, kept = min(GONE), min(set(LANDS) - GONE)
    of = {"extra": {"template": template}}
    _, asked = made(question("gone", f"{gone} a", **of), question("kept", f"{kept} a", **of))
    assert asked.keys() == {"kept"}


def test_foreign_questions():
    asked = foreign_questions()
    texts = {q.question for q in asked}
    assert len(asked) == len(texts) == 200
    assert not texts & {q.question for q in strangers()}  # by which the demo's threshold is chosen
    assert all(text.endswith("?") for text in texts)
    assert not any(map(is_answerable, asked))
    _, everything = with_unanswerable(SOURCES, [])
    assert everything == asked
