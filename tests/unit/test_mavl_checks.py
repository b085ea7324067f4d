"""What MAVL's settings refuse before a model is loaded, and questions whose answers do not count."""

import json

import pytest
from cli_runs import ROOT
from mavl_team import FULL, QUESTIONS, FakeKnowledge, heuristics, library, team_llm
from test_mavl import by_tools

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import answer_accuracy, answer_scorer
from mmqa_jax.extensions.mavl_votes import revote
from mmqa_jax.papers.mavl import answer_mavl
from mmqa_jax.runs.row import read_row
from mmqa_jax.runs.traces import agent_summary, agent_tables
from tests.refusals import refuses


def row(name: str, **changes):
    return load_config(f"{ROOT}/configs/okvqa/tables.py:{name}", changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("options.agents", "manager,senior,junior", r"options\.agents=\('manager', 'senior', 'jun"),
        ("options.agents", "junior,junior,manager", r"junior, senior, manager at most once"),
        (
            "options.agents",
            "boss",
            r"agents=\('boss',\): a tuple whose items are each one of junior",
        ),
        ("options.votes", "1,2", r"options\.votes=\(1\.0, 2\.0\): one number of at least 0"),
        ("options.votes", "1,2,-3", r"options\.votes"),
        ("options.knowledge_template", "mavl.none", r"mavl\.none"),
        ("options.temperature", "-1.0", r"options\.temperature=-1\.0: 0 \(greedy\) or a number"),
        ("parts.knowledge.top_k", "3", r"parts\.knowledge\.top_k=3: has no .* options\.passages"),
        ("parts.knowledge.text", "question_and_caption", r"knowledge\.text=.*: has no effect"),
        ("parts.knowledge.section_key", "title", r"knowledge\.section_key=title: has no effect"),
        ("parts.knowledge.max_words", "60", r"max_words=60: .* set options\.knowledge_words"),
        (
            "options.knowledge_words",
            "120",
            r"knowledge_words=120: parts\.knowledge\.max_words cuts",
        ),
    ],
)
def test_rows_that_are_refused_before_anything_is_opened(key, value, message):
    refuses(message, read_row, row("smollm2_mavl", **{key: value}))


def test_measured_rows_keep_their_knowledge():
    """Their figures in configs/*/RESULTS.md are of these."""
    options = read_row(row("smollm2_mavl")).options
    assert {name: value for name, value in options.items() if name.startswith("knowledge")} == {
        "knowledge_words": 25,
        "knowledge_tokens": 64,
        "knowledge_template": "mavl.knowledge_short",
    }


def test_long_passages():
    uncut = {"options.knowledge_words": "120", "parts.knowledge.max_words": "0"}
    read_row(row("smollm2_mavl", **uncut))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"votes": "1,-1,1"}, r"options\.votes=\(1\.0, -1\.0, 1\.0\): one number of at least 0"),
        ({"folds": "1"}, r"options\.folds=1: .* give at least 2"),
    ],
)
def test_revotes_that_are_refused_before_anything_is_opened(changes, message):
    with pytest.raises(UserError, match=message):
        read_row(row("smollm2_mavl_fitted", **{f"options.{k}": v for k, v in changes.items()}))
    once = {"options.folds": "1", "options.weighting": "level"}
    read_row(row("smollm2_mavl_fitted", **once))


def team(questions=QUESTIONS, **options):
    options = {"shots": 1, **options}
    llm = team_llm(FULL, by_tools)
    return answer_mavl(questions, llm, library(), heuristics(), FakeKnowledge(), **options)


def finished(questions=QUESTIONS):
    return {p.question_id: json.loads(json.dumps(p.trace)) for p in team(questions)}


def test_another_vote_for_another_number_of_agents():
    with pytest.raises(UserError, match=r"options\.votes: 2 numbers, and the .* has 3 agents"):
        revote(QUESTIONS, finished(), votes=(1.0, 2.0), weighting="level")


@pytest.mark.parametrize("lost", ["answer", "probability", "fallback"])
def test_a_damaged_finished_run(lost):
    rows = finished()
    (rows["q1"] if lost == "fallback" else rows["q1"]["agents"][0]).pop(lost)
    refuses(r"parts\.finished\.run: the record of q1 .* again", revote, QUESTIONS, rows)


def test_probabilities_that_hold_the_end_of_an_answer():
    rows = finished()
    revote(QUESTIONS, rows, weighting="probability")
    del rows["q1"]["probability_of"]  # as older runs
    revote(QUESTIONS, rows, weighting="level")
    with pytest.raises(UserError, match=r"weighting=probability: .* \(q1 in its trace\.jsonl\)"):
        revote(QUESTIONS, rows, weighting="probability")


def test_a_finished_run_without_scores_is_scored_again():
    rows = finished()
    for trace in rows.values():
        for agent in trace["agents"]:
            del agent["score"]
    assert revote(QUESTIONS, rows) == revote(QUESTIONS, finished())


def test_fitting_without_references():
    unknown = [Question(q.id, "test", q.question, extra=q.extra) for q in QUESTIONS]
    refuses(r"weighting=fitted: no question of this split", revote, unknown, finished())


def aokvqa(name: str, *, difficult: bool) -> Question:
    return Question(
        name, "val", f"query {name[1:]} ?", answers=("soup",) * 10, choices=("soup", "tea"),
        answer_index=0, extra={"difficult_direct_answer": difficult, "caption": "scene"},
    )  # fmt: skip


HALF = [aokvqa("q0", difficult=True), aokvqa("q1", difficult=False)]


def test_difficult_questions_do_not_count():
    """As in a_okvqa_da/official, by which the row is scored."""
    assert [answer_accuracy(question, "soup") for question in HALF] == [None, 1.0]
    assert [answer_scorer(question) for question in HALF] == [None, "a_okvqa_da/official"]
    found = team(HALF)
    assert [p.trace["agents"][0]["score"] for p in found] == [None, 1.0]
    summary = agent_summary(found)
    assert summary["agents"]["junior"]["accuracy"] == 1.0
    assert summary["scored_by"] == "a_okvqa_da/official"
    assert "Accuracy alone: a_okvqa_da/official" in agent_tables(summary)[0].note


def test_the_oracle_has_no_favourite_plan_for_a_difficult_question():
    first, second = team(HALF, plans="oracle")
    assert [agent["plan"] for agent in first.trace["agents"]] == [[1], [1, 2], [1, 2, 3]]
    assert [agent["plan"] for agent in second.trace["agents"]] == [[1], [1], [1]]


def test_weights_are_not_fitted_to_difficult_questions():
    """A finished run may have their scores: it was made by another version."""
    questions = [aokvqa(f"q{n}", difficult=n % 2 == 0) for n in range(3)]
    rows = finished(questions)
    told = revote(questions, rows)
    for trace in rows.values():
        for agent in trace["agents"]:
            agent["score"] = float(agent["agent"] == "manager")
    assert [p.trace["agents"] for p in revote(questions, rows)] == [p.trace["agents"] for p in told]


def test_agreement_is_shown():
    (agents, _) = agent_tables(agent_summary(team(plans="none")))
    assert "All agents that answer agree in 3." in agents.note
    assert "Accuracy alone: vqa_accuracy/official" in agents.note
