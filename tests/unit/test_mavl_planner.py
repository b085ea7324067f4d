"""What MAVL's plans earn, and the examples that a planner learns from."""

import dataclasses

import pytest
from cli_runs import ROOT
from mavl_team import FULL, QUESTIONS, heuristics, library, team_llm
from planner_runs import write_finished
from tiny_llm import END, text_tokenizer

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.answers import prep_ans
from mmqa_jax.data.corpus import Corpus, fold_of
from mmqa_jax.data.schema import Question
from mmqa_jax.extensions import mavl_planner
from mmqa_jax.extensions.mavl_planner import PlanTable, answer_with_one_plan, read_plan_table
from mmqa_jax.papers.mavl import answer_mavl, every_plan, parse_plan
from mmqa_jax.tasks.registry import check_config
from tests.refusals import refuses


def table(scores, cost=0.1, given=(1, 2, 3)):
    return PlanTable({"q": {plan.actions: 0.0 for plan in every_plan("manager")} | scores},
                     {"q": given}, cost)  # fmt: skip


def test_a_plan_earns_its_answers_score_less_its_tool_calls():
    found = table({(1,): 0.6, (1, 3): 1.0})
    assert found.score("q", (1, 3)) == 1.0
    assert found.reward("q", (1, 3)) == pytest.approx(0.8)
    assert found.reward("q", ()) == 0.0


def test_a_tool_that_gave_nothing_changes_no_answer_and_costs_all_the_same():
    found = table({(1,): 0.6}, given=(1, 3))
    assert found.score("q", (1, 2)) == 0.6
    assert found.reward("q", (1, 2)) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("scores", "role", "best"),
    [
        ({(1,): 0.6, (1, 2): 1.0}, "manager", (1, 2)),
        ({(1,): 0.6, (1, 2): 0.65}, "manager", (1,)),  # .05 more is not worth a call
        ({(1,): 0.6, (3,): 1.0}, "senior", (1,)),  # Action_3 is above its level
        ({(): 0.3, (1,): 0.3}, "manager", ()),
        ({(2,): 1.0, (3,): 1.0}, "manager", (2,)),
        ({(3,): 1.0}, "junior", None),
        ({}, "manager", None),
    ],
)
def test_the_best_plan_is_the_cheapest_right_one(scores, role, best):
    assert table(scores).best("q", role) == best


@pytest.mark.parametrize(
    ("scores", "role", "decides"),
    [
        ({(1,): 0.6}, "junior", True),
        ({(3,): 1.0}, "senior", False),  # above its level
        ({(3,): 1.0}, "manager", True),
        ({plan.actions: 1.0 for plan in every_plan("manager")}, "manager", False),  # all are right
    ],
)
def test_plans_decide_where_their_answers_score_differently(scores, role, decides):
    assert table(scores).decides("q", role) == decides


def planner_task(**changes):
    """The task of configs/okvqa/planner.py, for a planner without a chat template."""
    config = load_config(f"{ROOT}/configs/okvqa/planner.py:runlocal")
    config.data.update({"folds": 1, "chat": False, **changes})
    config.batches.length = 2048
    with config.unlocked():
        config.model.changes.positions = 2048
    config.validate = None
    return check_config(config)


def test_prompts_whose_plans_decide_nothing_are_not_learned(capsys):
    """Of q0 Action_1 is right, of q1 every plan, of q2 none."""
    plans = [plan.actions for plan in every_plan("manager")]
    scores = {"q0": {plan: float(1 in plan) for plan in plans},
              "q1": dict.fromkeys(plans, 1.0), "q2": dict.fromkeys(plans, 0.0)}  # fmt: skip
    found = PlanTable(scores, dict.fromkeys(scores, (1, 2, 3)), 0.02)
    tokenizer = text_tokenizer()
    learned = planner_task().taught(QUESTIONS, found, tokenizer)
    assert [(one.question_id, one.role) for one in learned] == [
        ("q0", "junior"), ("q0", "senior"), ("q0", "manager"),
    ]  # fmt: skip
    assert "plans decide the score of 3 of 9 prompts" in capsys.readouterr().err
    assert len(planner_task(taught="all").taught(QUESTIONS, found, tokenizer)) == 9
    found.scores["q0"].update(scores["q2"])
    with pytest.raises(UserError, match=r"data\.taught=deciding: none of the 9 planners' prompts"):
        planner_task().taught(QUESTIONS, found, tokenizer)


def test_no_agents():
    refuses(r"data\.agents=\(\): some of junior, senior, .*; name one", planner_task, agents=())


@pytest.mark.parametrize(
    ("score", "targets"),
    [(0.0, 16), (1.0, 1)],  # none is right; none fits
)
def test_plans_of_which_none_can_be_learned(score, targets, tmp_path):
    run = write_finished(tmp_path / "run", lambda n, plan: score)
    task = planner_task(split="val", outcomes=str(run), taught="all")
    task = dataclasses.replace(task, batches=dataclasses.replace(task.batches, targets=targets))
    message = rf"data\.outcomes=.*run: no plan .*length=2048 tokens, {targets} .*; take more ques"
    refuses(message, task.recipe, Corpus([], QUESTIONS), text_tokenizer())


def test_actions_whose_tools_gave_nothing_decide_nothing():
    assert not table({(2,): 1.0, (1, 2): 1.0}, given=(1, 3)).decides("q", "senior")


@pytest.mark.parametrize("plan", [plan.actions for plan in every_plan("manager")])
@pytest.mark.parametrize("reading", ["strict", "lenient"])
def test_what_is_learned_is_read_as_that_plan(plan, reading):
    assert parse_plan("manager", mavl_planner.written_plan(plan), reading).actions == plan
    assert parse_plan("manager", mavl_planner.written_plan(plan), reading).refused == ()


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_those_that_a_row_asks(chat):
    """Byte by byte: learned on one half, used on the other."""
    llm = team_llm(FULL)
    options = {"shots": 0, "task": "test_input", "chat": chat}
    answer_mavl(QUESTIONS, llm, library(), heuristics(), **options)
    tokenizer = text_tokenizer()
    asked = [
        tuple(tokenizer.encode_plain(tokenizer.template.render("", query.messages)))
        if chat
        else tuple(tokenizer.encode(query.prompt))
        for query in llm.seen
        if llm.text(query).startswith("You are")
    ]
    assert len(asked) == 9
    found = mavl_planner.plan_prompts(
        QUESTIONS, ("junior", "senior", "manager"), tokenizer, chat=chat
    )
    assert sorted(prompt.tokens for prompt in found) == sorted(asked)
    assert [(p.question_id, p.role) for p in found[:4]] == [
        ("q0", "junior"), ("q0", "senior"), ("q0", "manager"), ("q1", "junior"),
    ]  # fmt: skip


def test_examples_end_with_the_plan_and_its_end_token():
    tokenizer = text_tokenizer()
    prompts = [mavl_planner.PlanPrompt("q", role, (3, 4)) for role in ("junior", "manager")]
    (example,) = mavl_planner.plan_examples(prompts, table({(2, 3): 1.0}), tokenizer)
    assert list(example.tokens[:2]) == [3, 4]
    assert example.start == 2
    assert example.tokens[-1] == END
    assert list(example.tokens[2:-1]) == tokenizer.encode_plain(mavl_planner.written_plan((2, 3)))


def test_how_often_plans_are_the_best():
    prompts = [mavl_planner.PlanPrompt("q", role, ()) for role in ("junior", "senior", "manager")]
    assert mavl_planner.learned_plans(prompts, table({(1,): 0.5, (1, 3): 1.0})) == (
        "2 Action_1; 1 Action_1, Action_3"
    )
    assert (
        mavl_planner.learned_plans(prompts, table({(2,): 1.0})) == "2 Action_2"
    )  # none of the junior's


def test_what_plans_earn_by_agent():
    found = table({(1,): 1.0})
    prompts = [mavl_planner.PlanPrompt("q", role, ()) for role in ("junior", "manager")]
    assert mavl_planner.earned(found, prompts, [(1,), (1, 2, 3)]) == pytest.approx(
        {"score": 0.5, "reward": 0.3, "calls": 2.0, "score_junior": 1.0, "score_manager": 0.0}
    )


def finished_team(score, count=20):
    """Questions, and lines of a finished row whose answers are named by their actions.

    Args:
      score: (part of the question, actions) -> of the answer.
    """
    questions = [Question(f"n{n}", "val", "?", answers=("x",) * 4) for n in range(count)]
    lines = {
        q.id: {
            "question_id": q.id, "tools": {str(action): "known" for action in (1, 2, 3)},
            "fallback": "cup",
            "by_actions": [
                {"actions": list(plan.actions), "answer": str(plan.actions),
                 "score": score(fold_of(q.id, 2), plan.actions)}
                for plan in every_plan("manager")
            ],
        }
        for q in questions
    }  # fmt: skip
    return questions, lines


def test_one_plan_for_all_is_the_best_of_the_other_half():
    """Where the halves' best plans differ, both lose; the cost decides among equal ones."""
    best = {0: (1,), 1: (2, 3)}
    questions, lines = finished_team(lambda part, plan: float(set(best[part]) <= set(plan)))
    found = answer_with_one_plan(questions, lines, agents=("manager",), votes=(1.0,))
    plans = {(fold_of(p.question_id, 2), *p.trace["plans"]["manager"]) for p in found}
    assert plans == {(0, 2, 3), (1, 1)}
    for one in found:
        assert one.answer == prep_ans(str(best[1 - fold_of(one.question_id, 2)]))
    dear = answer_with_one_plan(questions, lines, agents=("manager",), votes=(1.0,), cost=0.6)
    plans = {(fold_of(p.question_id, 2), *p.trace["plans"]["manager"]) for p in dear}
    assert plans == {(0,), (1, 1)}


def test_one_plan_for_each_agent_and_their_vote():
    questions, lines = finished_team(lambda part, plan: float(plan == (3,) or plan == (1,)))
    lines["n0"]["tools"]["1"] = ""
    lines["n1"]["by_actions"][0]["score"] = None  # it does not count, and is answered all the same
    found = {p.question_id: p for p in answer_with_one_plan(questions, lines)}
    team = {"junior": [1], "senior": [1], "manager": [1]}
    assert found["n2"].trace["plans"] == found["n0"].trace["plans"] == team
    assert found["n0"].trace["answers"]["junior"] == "()"  # its tool gave nothing
    assert found["n1"].answer == found["n2"].answer == prep_ans("(1,)")
    assert found["n2"].trace["fallback"] == "cup"


@pytest.mark.parametrize(("taught", "cited"), [(2, ("s1",)), (1, ())])
def test_one_plan_cites_the_passages_of_the_answer(taught, cited):
    """Action 2 retrieves; an answer without it was shown nothing."""
    questions, lines = finished_team(lambda part, plan: float(taught in plan))
    for line in lines.values():
        line["passages"] = [{"id": "s1", "score": 0.5}]
        for one in line["by_actions"]:
            one["answer"] = "tea" if taught in one["actions"] else "cup"
    for prediction in answer_with_one_plan(questions, lines):
        assert (prediction.answer, prediction.sources) == ("tea", cited)
        assert prediction.source_scores == (0.5,) * len(cited)


def test_one_plan_needs_answers_and_another_half():
    questions, lines = finished_team(lambda part, plan: 1.0, count=3)
    with pytest.raises(UserError, match=r"no answers to 1 of 3 questions there, .* is n2"):
        answer_with_one_plan(questions, {k: v for k, v in lines.items() if k != "n2"})
    refuses(r"options\.folds=1: the finished row", answer_with_one_plan, questions, lines, folds=1)
    del lines["n1"]["by_actions"][3:]
    refuses(r"question n1: 5 of 8 plans .*plans=oracle", answer_with_one_plan, questions, lines)


def test_the_table_of_a_finished_row(tmp_path):
    run = write_finished(tmp_path / "run", lambda n, plan: len(plan) / 3, lost=(2,))
    found = read_plan_table(str(run), 0.0)
    assert len(found.scores) == 8
    assert found.available["q3"] == (1, 3)
    assert found.score("q3", (1, 2, 3)) == pytest.approx(2 / 3)


def test_questions_that_do_not_count_are_left_out(tmp_path):
    run = write_finished(tmp_path / "run", lambda n, plan: None if n == 2 else 1.0)
    assert sorted(read_plan_table(str(run), 0.0).scores) == [f"q{n}" for n in (0, 1, 3, 4, 5, 6, 7)]


def test_a_row_that_has_not_executed_all_plans_is_refused(tmp_path):
    run = write_finished(tmp_path / "run", lambda n, plan: 1.0, missing=2)
    refuses(r"line 8: 2 of 8 plans of question q7 .*plans=oracle", read_plan_table, str(run), 0.0)
    with pytest.raises(UserError, match=r"data\.outcomes=.*none: has no trace\.jsonl"):
        read_plan_table(str(tmp_path / "none"), 0.0)
    (run / "trace.jsonl").write_text('{"question_id": "q0"}\n')
    refuses("line 1: not of a row of mavl", read_plan_table, str(run), 0.0)
