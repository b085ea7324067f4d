"""MAVL: prompts of every plan, passes over the benchmark, votes, ablations and defined failures."""

import dataclasses
import json

import pytest
from fake_llm import FakeLLM
from mavl_figures import FIGURE_5
from mavl_team import (
    EXAMPLES,
    FULL,
    QUESTIONS,
    FakeKnowledge,
    Passage,
    heuristics,
    library,
    prompts_of,
    team_llm,
)

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.schema import Question
from mmqa_jax.extensions.mavl_votes import revote, vote_on_draws
from mmqa_jax.papers.mavl import answer_mavl
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.runs.traces import agent_summary, agent_tree
from tests.refusals import refuses

# What the manager's prompt for q0 must be, with the nearest example (figures 1b and 9).
MANAGERS = """Please answer the question according to the context, candidate answers, KBs_knowledge and LLM_knowledge.
=====
Context: view 1.
Question: ask 1 ?
Candidates: soup(0.90), stew(0.12)
KBs_knowledge: KB on view 1. ask 1 ?
LLM_Knowledge: Known of 1
Answer: red
=====
Context: scene 0.
Question: query 0 ?
Candidates: soup(0.90), stew(0.12)
KBs_knowledge: KB on scene 0. query 0 ?
LLM_Knowledge: Known of 0
Answer:"""


def run(llm, knowledge=None, of=None, **options):
    knowledge = FakeKnowledge() if knowledge is None else knowledge
    options = {"shots": 1, **options}
    return answer_mavl(QUESTIONS, llm, library(), of or heuristics(), knowledge, **options)


def by_tools(prompt: str) -> tuple[str, float]:
    """Another answer for every combination of tools."""
    query = prompt.rpartition("=====")[2]
    fields = [f for f in ("Candidates:", "KBs_knowledge:", "LLM_Knowledge:") if f in query]
    return {0: "bread", 1: "soup", 2: "stew", 3: "tea"}[len(fields)], -0.5


def test_prompts_by_level():
    llm = team_llm(FULL)
    predictions = run(llm)
    asked = prompts_of(llm)
    assert MANAGERS in asked["answers"]
    junior = asked["answers"][0]
    assert junior.startswith(
        "Please answer the question according to the context and candidate answers.\n=====\n"
    )
    assert "knowledge" not in junior
    assert predictions[0].trace["prompts"][2] == MANAGERS
    decoding = next(q.decoding for q in llm.seen if llm.text(q) == MANAGERS)
    assert (decoding.temperature, decoding.max_new_tokens, decoding.stop) == (0.0, 10, ("\n",))


def test_an_empty_plan_answers_from_the_base_prompt():
    llm = team_llm(dict.fromkeys(FULL, "I know this."))
    predictions = run(llm, FakeKnowledge())
    asked = prompts_of(llm)
    assert len(asked["answers"]) == 3  # one for three agents
    assert not asked["knowledge"]
    assert asked["answers"][0] == (
        "Please answer the question according to the context.\n=====\n"
        "Context: view 1.\nQuestion: ask 1 ?\nAnswer: red\n=====\n"
        "Context: scene 0.\nQuestion: query 0 ?\nAnswer:"
    )
    assert predictions[0].trace["vote"] == {"soup": 9.0}


@pytest.mark.parametrize("task", ["prompt", "test_input"])
def test_what_a_planner_reads(task):
    llm = team_llm(FULL)
    run(llm, task=task)
    block = "Context: scene 0.\nQuestion: query 0 ?\nAnswer:"
    base = (
        "Please answer the question according to the context.\n=====\n"
        f"Context: view 1.\nQuestion: ask 1 ?\nAnswer: red\n=====\n{block}"
    )
    read = base if task == "prompt" else block
    assert any(f"\ntask: {read}\nthe response" in plan for plan in prompts_of(llm)["plans"])


def test_how_much_a_planner_may_write():
    llm = team_llm(FULL)
    run(llm, plan_tokens=5)
    decodings = [q.decoding for q in llm.seen if llm.text(q).startswith("You are")]
    assert {(d.max_new_tokens, d.stop) for d in decodings} == {(5, ("===", "task:"))}


class CountingLLM(FakeLLM):
    """Counts how often it is given a stream of queries."""

    passes = 0

    def answer(self, queries):
        self.passes += 1
        yield from super().answer(queries)


def test_three_passes_over_the_benchmark():
    llm = team_llm(FULL)
    llm.__class__ = CountingLLM
    run(llm)
    assert llm.passes == 3
    asked = prompts_of(llm)
    sizes = {kind: len(prompts) for kind, prompts in asked.items()}
    # Knowledge of three questions and of the three examples shown with them.
    assert sizes == {"plans": 9, "knowledge": 6, "answers": 9}


def test_the_vote():
    """Junior and senior agree against the manager; the manager alone against two others."""
    agree = team_llm({**FULL, "senior": "Action_1"}, by_tools)
    (first, *_) = run(agree)
    assert first.answer == "soup"
    assert first.trace["vote"] == {"tea": 4.0, "soup": 5.0}
    (first, *_) = run(team_llm(FULL, by_tools))
    assert first.answer == "tea"
    (first, *_) = run(team_llm(FULL, by_tools), votes=(9.0, 3.0, 4.0))
    assert first.answer == "soup"


def test_weighted_by_probability():
    def sure(prompt):
        text, _ = by_tools(prompt)
        return text, -0.1 if text == "soup" else -3.0

    (first, *_) = run(team_llm(FULL, sure), weighting="probability", votes=(1.0, 1.0, 1.0))
    assert first.answer == "soup"


@pytest.mark.parametrize(
    ("options", "answer", "passes"),
    [
        ({"agents": ("manager",), "votes": (4.0,)}, "tea", 3),  # without multi-agents
        ({"plans": "all"}, "tea", 2),  # without planners
        ({"plans": "none"}, "bread", 1),  # without tools
        ({"plans": "none", "agents": ("manager",), "votes": (4.0,)}, "bread", 1),  # without all
        ({"plans": "all", "candidates": 0}, "stew", 2),  # figure 8
    ],
)
def test_ablations_are_options(options, answer, passes):
    llm = team_llm(FULL, by_tools)
    llm.__class__ = CountingLLM
    predictions = run(llm, **options)
    assert {p.answer for p in predictions} == {answer}
    assert llm.passes == passes


def test_the_oracle_uses_a_tool_where_it_helps():
    """stew scores .3 of 1, soup 1, the others 0."""
    llm = team_llm({}, by_tools)
    predictions = run(llm, plans="oracle")
    plans = [agent["plan"] for agent in predictions[0].trace["agents"]]
    assert plans == [[1], [1], [1]]
    assert len(prompts_of(llm)["answers"]) == 3 * 8
    effects = agent_summary(predictions)["actions"]
    assert effects["2"]["pairs"] == 3 * 4
    assert effects["2"]["better"] == 3  # from no tool to one
    assert effects["2"]["worse"] == 3 * 3  # from soup to stew, twice, and from stew to tea
    bare = [Question("q0", "val", "?", extra={"caption": "x"})]
    with pytest.raises(UserError, match=r"options\.plans=oracle: chooses plans by the reference"):
        answer_mavl(bare, llm, library(), heuristics(), None, plans="oracle")


def test_a_planner_of_its_own_is_asked_for_plans_alone():
    planner, llm = team_llm(FULL), team_llm({})  # which would have no plan
    answer_mavl(QUESTIONS, llm, library(), heuristics(), FakeKnowledge(), planner=planner, shots=1)
    of_planner, of_llm = prompts_of(planner), prompts_of(llm)
    assert [len(of_planner[kind]) for kind in ("plans", "knowledge", "answers")] == [9, 0, 0]
    assert not of_llm["plans"]
    assert MANAGERS in of_llm["answers"]


def test_plans_out_of_scope_are_refused_and_counted():
    llm = team_llm({"junior": "Action_3", "senior": "Action_2, Action_2, Action_9", "manager": ""})
    predictions = run(llm)
    found = agent_summary(predictions)["agents"]
    assert found["junior"]["refused_actions"] == found["senior"]["refused_actions"] == 3
    assert found["senior"]["planned"] == {"1": 0, "2": 3, "3": 0}
    assert [found[role]["empty_plans"] for role in FULL] == [3, 0, 3]


def test_plans_read_leniently():
    plans = {"junior": "action 1", "senior": "1, 2", "manager": "Actions 1, 2 and 3"}
    for reading, empty in (("strict", 3), ("lenient", 0)):
        found = agent_summary(run(team_llm(plans), plan_reading=reading))["agents"]
        assert [found[role]["empty_plans"] for role in FULL] == [empty] * 3


def test_tools_that_find_nothing_are_as_if_not_planned():
    """A knowledge base without hits, and candidates missing for some questions."""
    of = heuristics()
    del of.candidates["q1"]
    predictions = run(team_llm(FULL, by_tools), FakeKnowledge(without="scene 0"), of)
    used = [[agent["used"] for agent in p.trace["agents"]] for p in predictions]
    assert used == [[[1], [1], [1, 3]], [[], [2], [2, 3]], [[1], [1, 2], [1, 2, 3]]]
    summary = agent_summary(predictions)["agents"]["manager"]
    assert summary["planned"] == {"1": 3, "2": 3, "3": 3}
    assert summary["used"] == {"1": 2, "2": 2, "3": 3}
    assert "KBs_knowledge" not in predictions[0].trace["prompts"][1].rpartition("=====")[2]
    none = answer_mavl(QUESTIONS, team_llm(FULL), library(), heuristics(), shots=0)
    assert all(agent["used"] != [1, 2] for p in none for agent in p.trace["agents"])


def test_all_empty_answers_give_the_first_candidate():
    of = heuristics()
    del of.candidates["q1"]
    predictions = run(team_llm(FULL, lambda prompt: (" the", -1.0)), of=of)
    assert [p.answer for p in predictions] == ["soup", "", "soup"]
    assert predictions[0].trace["vote"] == {}


def test_failed_steps_are_named():
    llm = team_llm(FULL, fail=[("q0", "manager"), "q1", ("q2", (1, 2))])
    predictions = run(llm)
    assert predictions[0].trace["failed"] == ["the manager's planner: timed out"]
    assert predictions[0].trace["agents"][2]["plan"] == []
    assert predictions[1].trace["failed"] == ["LLM_Knowledge: timed out"]
    assert predictions[1].trace["agents"][2]["used"] == [1, 2]
    assert predictions[2].trace["failed"] == ["timed out"]
    assert predictions[2].trace["agents"][1]["answer"] == ""
    assert [p.answer for p in predictions] == ["soup"] * 3


def test_prompts_that_do_not_fit_have_fewer_shots():
    class Long(FakeKnowledge):
        def find(self, texts, top_k):
            return [[Passage("word " * 200)] for _ in texts]

    short = {"knowledge_words": 200, "knowledge_template": "mavl.knowledge_short"}
    predictions = run(team_llm(FULL, length=2000), Long(), **short)
    assert [len(shots) for shots in predictions[0].trace["shots"]] == [1, 0, 0]
    assert predictions[0].trace["dropped_shots"] == 2


def test_a_prompt_for_knowledge_that_does_not_fit():
    predictions = run(team_llm(FULL, length=800), task="test_input")
    (reason,) = [r for r in predictions[0].trace["failed"] if r.startswith("LLM_Knowledge")]
    assert "more than engine.length" in reason
    assert predictions[0].trace["agents"][2]["used"] == [1, 2]


def test_passages_of_key_words_share_the_words():
    class Knowledge(FakeKnowledge):
        def find(self, texts, top_k):
            return [[Passage("one two three four", id=text)] for text in texts]

    llm = team_llm(FULL)
    run(llm, Knowledge(), key_words=2, knowledge_words=4)
    assert "KBs_knowledge: one two one two\n" in "".join(prompts_of(llm)["answers"])


def test_long_knowledge_is_cut():
    llm = team_llm(FULL)
    run(llm, knowledge_words=2, knowledge_tokens=7)
    assert "KBs_knowledge: KB on\nLLM_Knowledge: Known of\n" in "".join(prompts_of(llm)["answers"])
    written = next(q for q in llm.seen if llm.text(q).endswith("LLM_Knowledge:"))
    assert written.decoding.max_new_tokens == 7


def test_knowledge_as_long_as_the_papers():
    llm = team_llm(FULL)
    run(llm)
    prompt = prompts_of(llm)["knowledge"][0]
    shown = [line for line in prompt.splitlines() if line.startswith("LLM_Knowledge: ")]
    assert shown[0] == f"LLM_Knowledge: {' '.join(FIGURE_5)}"
    longest = max(len(line.split()) for line in shown) - 1
    assert len(" ".join(FIGURE_5).split()) <= longest <= 100  # an answer as long is not cut
    (decoding,) = {q.decoding for q in llm.seen if llm.text(q) == prompt}
    assert (decoding.max_new_tokens, decoding.stop) == (160, ("\n",))
    short = team_llm(FULL)
    run(short, knowledge_template="mavl.knowledge_short")
    assert len(prompts_of(short)["knowledge"][0]) < len(prompt) / 2


class DrawingLLM(FakeLLM):
    """Answers by the seed of the query, as a model that draws tokens."""

    fingerprint = "drawing"

    def answer(self, queries):
        for query in queries:
            for result in super().answer([query]):
                drawn = ("soup", "stew", "tea")[query.decoding.seed % 3]
                (one,) = result.candidates
                yield dataclasses.replace(
                    result, candidates=(dataclasses.replace(one, text=f" {drawn}"),)
                )


def test_agents_that_draw_differ_without_tools():
    """Table 3: without tools and without all are not the same row any more."""

    def drawn(**options):
        llm = team_llm(FULL)
        llm.__class__ = DrawingLLM
        return run(llm, plans="none", temperature=0.7, **options), llm

    predictions, llm = drawn()
    answers = [[agent["answer"] for agent in p.trace["agents"]] for p in predictions]
    assert any(len(set(team)) > 1 for team in answers)
    asked = {(q.id[0], q.id[2]): q.decoding for q in llm.seen}
    assert set(asked) == {(q.id, role) for q in QUESTIONS for role in FULL}
    assert {d.temperature for d in asked.values()} == {0.7}
    assert len({d.seed for d in asked.values()}) == 9
    assert [p.trace["by_actions"][2]["agent"] for p in predictions] == ["manager"] * 3
    again, _ = drawn()
    assert again == predictions
    alone, few = drawn(agents=("manager",), votes=(4.0,))  # without all: the manager's own draw
    assert [p.answer for p in alone] == [team[2] for team in answers]
    assert {q.decoding.seed for q in few.seen} == {
        d.seed for (_, role), d in asked.items() if role == "manager"
    }
    other, _ = drawn(seed=1)
    assert [p.trace["agents"] for p in other] != [p.trace["agents"] for p in predictions]
    tree = agent_tree(predictions[0].trace, predictions[0].answer)
    prompts = [step.long for node in tree[:3] for step in node.children if step.text == "prompt"]
    assert prompts == predictions[0].trace["prompts"]


def test_plans_and_knowledge_are_greedy():
    llm = team_llm(FULL)
    run(llm, temperature=0.7)
    drawn = {llm.text(query) for query in llm.seen if query.decoding.temperature}
    assert drawn == set(prompts_of(llm)["answers"])


class StoppingLLM(FakeLLM):
    """Answers so many queries, then the server is gone."""

    left = 10**6
    fingerprint = "stopping"

    def answer(self, queries):
        for query in queries:
            if not self.left:
                raise RunError("the server stopped")
            self.left -= 1
            yield from super().answer([query])


def test_a_restart_asks_only_what_is_missing(tmp_path):
    """The server stops in the second stage, after nine plans and two of six generations."""

    def llm(left: int) -> Cached:
        backend = team_llm(FULL, by_tools)
        backend.__class__ = StoppingLLM
        backend.left = left
        return Cached(backend, ResponseCache(tmp_path / "responses.sqlite"))

    stopped = llm(11)
    refuses("the server stopped", run, stopped, error=RunError)
    stopped.close()
    again = llm(10**6)
    predictions = run(again)
    assert len(again._backend.seen) == 9 + 6 + 9 - 11
    fresh = team_llm(FULL, by_tools)
    assert predictions == run(fresh)
    assert again.work.calls == 9 + 6 + 9  # what it costs does not depend on what was kept
    assert again.work.prompt_tokens == 3 * 24


def test_another_vote_on_a_finished_run():
    """Read back from JSON, as from trace.jsonl."""
    predictions = run(team_llm(FULL, by_tools))
    finished = {p.question_id: json.loads(json.dumps(p.trace)) for p in predictions}
    same = revote(QUESTIONS, finished, weighting="level")
    assert [p.answer for p in same] == [p.answer for p in predictions]
    assert [json.loads(json.dumps(p.trace)) for p in same] == list(finished.values())
    junior = revote(QUESTIONS, finished, votes=(9.0, 1.0, 1.0), weighting="level")
    assert {p.answer for p in junior} == {"soup"}
    # soup is best everywhere: the other part's questions show it
    fitted = revote(QUESTIONS, finished, weighting="fitted")
    assert {p.answer for p in fitted} == {"soup"}
    with pytest.raises(UserError, match=r"no agents' answers to 1 of 3 questions .* is q2"):
        revote(QUESTIONS, {k: v for k, v in finished.items() if k != "q2"})


def test_fitted_weights_come_from_the_other_half():
    """Where the junior is right in one half and the manager in the other, both halves lose."""
    questions = [Question(f"n{n}", "val", "?", answers=("soup",) * 4) for n in range(20)]
    finished = {}
    for question in questions:
        right = "junior" if fold_of(question.id, 2) else "manager"
        finished[question.id] = {
            "fallback": "", "agents": [
                {"answer": "soup" if name == right else name, "probability": 0.5, "agent": name}
                for name in ("junior", "senior", "manager")
            ],
        }  # fmt: skip
    elected = {p.question_id: p.answer for p in revote(questions, finished)}
    for question in questions:
        assert elected[question.id] == ("manager" if fold_of(question.id, 2) else "junior")
    fitted = {tuple(a["votes"] for a in p.trace["agents"]) for p in revote(questions, finished)}
    assert len(fitted) == 2


def test_self_consistency():
    class Drawing(FakeLLM):
        def answer(self, queries):
            for query in queries:
                self.seen.append(query)
                texts = ["tea", " soup", "Soup.", " stew"]
                from mmqa_jax.decoding.requests import Candidate, Result

                found = [Candidate(t, (1, 2), -1.0 - n, None, "stop") for n, t in enumerate(texts)]
                yield Result(query.id, tuple(found), 5, 0)

    llm = Drawing()
    predictions = vote_on_draws(QUESTIONS, llm, library(), heuristics(), shots=1, draws=4, seed=3)
    assert {p.answer for p in predictions} == {"soup"}
    decoding = llm.seen[0].decoding
    assert (decoding.n, decoding.temperature, decoding.seed) == (4, 0.7, 3)
    assert "Candidates: soup(0.90), stew(0.12)\nAnswer:" in llm.seen[0].prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"votes": (1.0, 2.0)}, r"options\.votes=\(1\.0, 2\.0\): one number"),
        ({"votes": (1.0, 2.0, -1.0)}, r"options\.votes"),
        ({"of": heuristics(candidates={"x": [("a", 1.0)]})}, r"no candidates for any of the 3"),
        ({"of": heuristics(examples={"q0": ["z"]})}, r"none of the questions has an example"),
    ],
)
def test_wrong_input(options, message):
    refuses(message, run, team_llm(FULL), **options)


def test_examples_of_the_own_half_are_never_shown():
    from mmqa_jax.prompting.examples.library import ExampleLibrary

    halves = ExampleLibrary(EXAMPLES, folds=2)
    names = [e.id for e in EXAMPLES]
    for question in QUESTIONS:
        shots = halves.named(question, [*names, "unknown"], 9)
        assert {s.question.id for s in shots} == {
            n for n in names if fold_of(n, 2) != fold_of(question.id, 2)
        }
