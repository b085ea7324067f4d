"""What agents did: the tree of a question, summaries, and long texts kept once in the report."""

import pytest
from mavl_team import FULL, QUESTIONS, FakeKnowledge, heuristics, library, team_llm
from report_pages import card_data
from test_mavl import by_tools

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.evaluation.report import Card, CardAnswer, ReportData, TraceNode, render_report
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.papers.mavl import answer_mavl
from mmqa_jax.runs.reports.row import RowRun, row_cards
from mmqa_jax.runs.traces import agent_summary, agent_tables, agent_tree, trace_counts


@pytest.fixture(scope="module")
def predictions():
    plans = {**FULL, "senior": "Action_1, Action_3"}
    return answer_mavl(
        QUESTIONS, team_llm(plans, by_tools), library(), heuristics(), FakeKnowledge(), shots=1
    )


def test_the_tree_of_a_question(predictions):
    junior, senior, manager, voted = agent_tree(predictions[0].trace, predictions[0].answer)
    assert junior.text == "junior: soup (2 votes, probability 0.61)"
    assert junior.score == 1.0
    assert [step.text for step in senior.children] == [
        "plan: Action_1; refused: Action_3",
        "Candidates: soup(0.90), stew(0.12)",
        "prompt",
    ]
    assert senior.children[0].long == "the planner said: Action_1, Action_3"
    (read,) = senior.children[0].children
    assert (read.text, read.long) == (
        "the planner's prompt", predictions[0].trace["planner_prompts"]["senior"]
    )  # fmt: skip
    assert [step.text for step in manager.children[2].children] == ["passages: kb (1.00)"]
    assert manager.children[3].text == "LLM_Knowledge: Known of 0"
    (asked,) = manager.children[3].children
    assert asked.long.endswith("Question: query 0 ?\nLLM_Knowledge:")
    assert manager.children[-1].long == predictions[0].trace["prompts"][-1]
    assert manager.score == 0.0
    assert voted.text == "vote: soup 5, tea 4 → soup"
    # Without junior or senior the manager's four votes win.
    assert [step.text for step in voted.children] == ["without the junior: tea",
                                                      "without the senior: tea"]  # fmt: skip


def test_what_the_trace_keeps_of_the_steps(predictions):
    trace = predictions[0].trace
    assert [*trace["planner_prompts"]] == ["junior", "senior", "manager"]
    assert trace["planner_prompts"]["senior"].startswith("You are senior planner.")
    assert "Question: query 0 ?" in trace["planner_prompts"]["senior"]
    assert trace["knowledge_prompt"].endswith("Question: query 0 ?\nLLM_Knowledge:")
    assert trace["passages"] == [{"id": "kb", "score": 1.0}]
    bare = answer_mavl(
        QUESTIONS, team_llm({}, by_tools), library(), heuristics(), shots=0, plans="none"
    )
    assert not {"planner_prompts", "knowledge_prompt", "passages"} & bare[0].trace.keys()


def test_a_models_own_words_are_in_the_tree():
    def says(prompt: str) -> tuple[str, float]:
        return ("The soup.", -1.0) if "Candidates:" in prompt else ("tea", -1.0)

    plans = {**FULL, "senior": "none"}
    found = answer_mavl(QUESTIONS, team_llm(plans, says), library(), heuristics(), shots=0)
    junior, senior, *_ = agent_tree(found[0].trace, found[0].answer)
    assert junior.text.startswith("junior: soup")
    assert [(s.text, s.long) for s in junior.children[-1:]] == [("output", " The soup.")]
    assert [step.text for step in senior.children] == ["plan: no action", "prompt"]


def test_a_trace_of_an_earlier_version_is_shown(predictions):
    later = ("planner_prompts", "knowledge_prompt", "passages", "scored_by")
    old = {k: v for k, v in predictions[0].trace.items() if k not in later}
    assert len(agent_tree(old, "soup")) == 4


def test_the_summary(predictions):
    summary = agent_summary(predictions)
    assert summary["agents"]["senior"]["refused_actions"] == 3
    assert summary["agents"]["senior"]["used"] == {"1": 3, "2": 0, "3": 0}
    assert summary["agents"]["manager"]["accuracy"] == 0.0
    assert summary["changed_by_leaving_out"] == {"junior": 3, "senior": 3, "manager": 0}
    assert summary["all_agree"] == 0
    agents, actions = agent_tables(summary)
    assert [row[0] for row in agents.rows] == ["junior", "senior", "manager"]
    assert [row[1] for row in actions.rows] == [0, 0, 0]  # no two prompts differ in one action
    assert agent_summary([]) == {}
    assert agent_tables({}) == []


def test_nothing_found_and_nobody_answers():
    of = heuristics()
    del of.candidates["q1"]
    found = answer_mavl(
        QUESTIONS, team_llm(FULL, lambda prompt: ("", -1.0)), library(), of, shots=0
    )
    *_, voted = agent_tree(found[0].trace, found[0].answer)
    assert voted.text == "vote: – → soup"
    assert [step.text for step in voted.children] == ["no agent answered: the first candidate"]
    junior = agent_tree(found[1].trace, found[1].answer)[0]
    assert junior.text.startswith("junior: (no answer)")
    assert "Candidates: nothing found" in [step.text for step in junior.children]
    counts = trace_counts(QUESTIONS, found)
    assert counts["answered_by_first_candidate"] == 2
    assert counts["without_candidates"] == 1


def test_the_report_holds_the_tree_and_each_line_once(predictions):
    cards = row_cards(RowRun(Corpus([], QUESTIONS), QUESTIONS, predictions, {}, Evaluation()), "s")
    data = card_data(render_report(ReportData("run", cards=cards)))
    lines = data["lines"]
    assert len(lines) == len(set(lines))
    names = [name for name, _ in data["cards"][0]["details"]]
    assert names == [f"shots of prompt {n} and their similarity" for n in (1, 2)]
    prompt = data["cards"][0]["tree"][0]["children"][-1]
    assert "\n".join(lines[n] for n in prompt["long"]) == predictions[0].trace["prompts"][0]


def test_no_text_of_a_tree_is_markup():
    evil = "</script><script>alert('x')</script>"
    node = TraceNode(evil, long=evil, children=[TraceNode(evil)])
    card = Card("?", [CardAnswer("", "")], tree=[node])
    page = render_report(ReportData("run", cards=[card]))
    assert page.count("<script") == page.count("</script>") == 3
    assert card_data(page)["cards"][0]["tree"][0]["children"][0]["text"] == evil


def test_five_thousand_questions_stay_small(predictions):
    """Every question shows the same shots: their lines are kept once."""
    shots = "\n".join(f"Question: {n}, and some more words of it ?" for n in range(60))
    cards = [
        Card(
            f"ask {n}",
            [CardAnswer("", "", 0.0)],
            details=[("prompt", f"{shots}\nQuestion: own {n}")] * 3,
        )
        for n in range(5000)
    ]
    assert len(render_report(ReportData("run", cards=cards))) < 6_000_000
    assert 5000 * 3 * len(shots) > 30_000_000
