"""Captions of a side file in prompts, and counts of what questions and examples lack."""

import dataclasses
from types import SimpleNamespace

import pytest
from fake_llm import FakeLLM
from mavl_team import EXAMPLES, FULL, QUESTIONS, FakeKnowledge, heuristics, library, team_llm

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.papers import mavl, pica, prophet
from mmqa_jax.prompting.examples.library import ExampleLibrary
from mmqa_jax.prompting.examples.side_files import Captions
from mmqa_jax.runs.reports.row import RowRun, row_cards
from mmqa_jax.runs.traces import counts_table, trace_counts

CAPTIONS = Captions({"q0": "a file's scene", "q1": "another", "e0": "a file's view"})
# q2 and every example but e0 keep their own caption.
SHOWN = {"shots": 2, "similarity": "random"}


def bare(examples) -> ExampleLibrary:
    return ExampleLibrary([dataclasses.replace(example, extra={}) for example in examples])


def test_promptcap_counts_what_the_file_lacks():
    llm = FakeLLM(lambda prompt: ("soup", -1.0))
    found = pica.answer_promptcap(QUESTIONS, llm, ExampleLibrary(EXAMPLES[:2]), CAPTIONS, **SHOWN)
    assert [p.trace["caption"] for p in found] == ["a file's scene", "another", None]
    counts = trace_counts(QUESTIONS, found, shots=2)
    assert counts["questions_with_own_caption"] == 1
    assert counts["shots_with_own_caption"] == 3  # e1 of every prompt
    assert counts["shots_without_caption"] == 0
    (table,) = counts_table(counts)
    assert ("questions with their own caption, which parts.captions lacks", 1) in table.rows
    without = pica.answer_promptcap(QUESTIONS, llm, ExampleLibrary(EXAMPLES[:2]), **SHOWN)
    assert "questions_with_own_caption" not in trace_counts(QUESTIONS, without, shots=2)


@pytest.mark.parametrize(
    ("system", "setting"), [(pica, "pica_promptcap"), (prophet, "prophet"), (mavl, "mavl")]
)
def test_captions_of_other_questions_are_refused(system, setting):
    other = {"captions": Captions({"x": "a cat"})}
    with pytest.raises(UserError, match=r"parts\.captions\.captions: no caption for any of the 3"):
        system.SETTINGS[setting].check_inputs(QUESTIONS, {}, other)
    system.SETTINGS[setting].check_inputs(QUESTIONS, {}, {"captions": CAPTIONS})
    with pytest.raises(UserError, match=r"parts\.captions\.tags=tags\.tsv: this setting"):
        system.SETTINGS[setting].check_row({}, {"captions": SimpleNamespace(tags="tags.tsv")})
    system.SETTINGS[setting].check_row({}, {"captions": SimpleNamespace(tags="")})


def test_captions_of_sources_are_no_captions_of_questions():
    by_source = {"captions": Captions({"x": "a cat"})}
    pica.SETTINGS["pica_oracle"].check_inputs(QUESTIONS, {}, by_source)
    described = {"captions": SimpleNamespace(tags="tags.tsv")}
    pica.SETTINGS["pica_oracle"].check_row({}, described)


def test_prophet_with_promptcaps_captions():
    """Context of questions and shots; the report shows the caption that the prompt has."""
    llm = FakeLLM(lambda prompt: ("soup", -1.0))
    options = {"shots": 2, "ensemble": 1}
    found = prophet.answer_prophet(QUESTIONS, llm, library(), heuristics(), CAPTIONS, **options)
    prompts = {query.id[0]: query.prompt for query in llm.seen}
    assert "Context: a file's scene.\n===\nQuestion: query 0 ?" in prompts["q0"]
    assert "Context: a file's view.\n===\nQuestion: ask 0 ?" in prompts["q0"]
    assert "Context: view 1.\n===\nQuestion: ask 1 ?" in prompts["q0"]
    assert "Context: scene 2.\n===\nQuestion: query 2 ?" in prompts["q2"]
    cards = row_cards(RowRun(Corpus([], QUESTIONS), QUESTIONS, found, {}, Evaluation()), "s")
    captions = [dict(card.rows)["caption"] for card in cards]
    assert captions == ["a file's scene", "another", "scene 2."]


def test_prophets_choice_with_promptcaps_captions():
    questions = [dataclasses.replace(q, choices=("tea", "soup")) for q in QUESTIONS]
    llm = FakeLLM()
    prophet.choose_prophet(questions, llm, library(), heuristics(), CAPTIONS, shots=1)
    assert any("Context: a file's scene." in query.prompt for query in llm.seen)
    prophet.SETTINGS["prophet_choice"].check_questions("prophet_choice", questions)
    with pytest.raises(UserError, match="have no choices"):
        prophet.SETTINGS["prophet_choice"].check_questions("prophet_choice", QUESTIONS)


def test_mavl_with_promptcaps_captions():
    llm, knowledge = team_llm(FULL), FakeKnowledge()
    found = mavl.answer_mavl(QUESTIONS, llm, library(), heuristics(), knowledge, CAPTIONS, shots=2)
    assert "a file's scene. query 0 ?" in knowledge.asked
    of_q0 = [llm.text(query) for query in llm.seen if "query 0 ?" in llm.text(query)]
    assert all("Context: a file's scene.\nQuestion: query 0 ?" in text for text in of_q0)
    assert found[2].trace["caption"] is None


def test_examples_without_caption_are_counted():
    """In every prompt that shows them; without pictures there is nothing to describe."""
    llm = FakeLLM(lambda prompt: ("soup", -1.0))
    found = pica.answer_pica(QUESTIONS, llm, bare(EXAMPLES), shots=2, similarity="random")
    assert trace_counts(QUESTIONS, found)["shots_without_caption"] == 6
    found = prophet.answer_prophet(
        QUESTIONS, llm, bare(EXAMPLES), heuristics(), shots=1, ensemble=2
    )
    assert trace_counts(QUESTIONS, found)["shots_without_caption"] == 6
    found = mavl.answer_mavl(
        QUESTIONS, team_llm(FULL), bare(EXAMPLES), heuristics(), FakeKnowledge(), shots=2
    )
    assert trace_counts(QUESTIONS, found)["shots_without_caption"] == 3 * 3 * 2
    told = ExampleLibrary([dataclasses.replace(e, extra={"has_picture": False}) for e in EXAMPLES])
    found = pica.answer_pica(QUESTIONS, llm, told, shots=2, similarity="random")
    assert trace_counts(QUESTIONS, found)["shots_without_caption"] == 0


def test_examples_without_candidates_are_counted():
    llm, of = FakeLLM(lambda prompt: ("soup", -1.0)), heuristics()
    for name in ("e0", "e1", "q2"):
        del of.candidates[name]
    found = prophet.answer_prophet(QUESTIONS, llm, library(), of, shots=2, ensemble=1)
    counts = trace_counts(QUESTIONS, found)
    assert (counts["without_candidates"], counts["shots_without_candidates"]) == (1, 2 + 1)
    found = mavl.answer_mavl(
        QUESTIONS, team_llm(dict.fromkeys(FULL, "none")), library(), of, shots=2
    )
    assert trace_counts(QUESTIONS, found)["shots_without_candidates"] == 0
    found = mavl.answer_mavl(QUESTIONS, team_llm(FULL), library(), of, shots=2, plans="all")
    assert trace_counts(QUESTIONS, found)["shots_without_candidates"] == (2 + 1) * 2


def test_counts_of_nothing_make_no_table():
    assert counts_table({}) == counts_table({"failed": 0, "too_long": 0}) == []
    (table,) = counts_table({"failed": 2, "too_long": 0, "dropped_shots": 5})
    assert [*table.rows] == [
        ("examples that did not fit", 5),
        ("questions with failed requests", 2),
    ]


def test_every_count_has_words():
    trace = {
        "prompts": [],
        "knowledge": [[]],
        "dropped_passages": 0,
        "fallback": "x",
        "caption": None,
    }
    predictions = [dataclasses.replace(p, trace=trace) for p in pica.copy_nearest_answer(
        QUESTIONS, ExampleLibrary(EXAMPLES), similarity="random")]  # fmt: skip
    counts = trace_counts(QUESTIONS, predictions)
    (table,) = counts_table(dict.fromkeys(counts, 1))
    assert len(table.rows) == len(counts)
