"""A model that searches by tools: its calls, what comes back, budgets and searches that fail."""

import dataclasses
import json
import math

import pytest
from document_files import picture
from test_search_r1 import Script, Words

import mmqa_jax as mmqa
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.decode import decode
from mmqa_jax.data.schema import Question
from mmqa_jax.extensions.search_rewards import RewardSection
from mmqa_jax.extensions.tool_search import ToolStyle, answer_tool_search
from mmqa_jax.papers.search_r1 import SearchR1Style, answer_search_r1
from mmqa_jax.prompting import search_loop
from mmqa_jax.prompting.backends import Decoding
from mmqa_jax.prompting.search_actions import (
    Answer,
    GiveUp,
    Invalid,
    OpenPage,
    SearchByPicture,
    SearchTexts,
    Zoom,
)
from mmqa_jax.prompting.search_loop import Budget, run_episodes
from mmqa_jax.runs.traces import trace_counts, trace_tree
from tests.bench import rollouts
from tests.refusals import refuses

pytestmark = pytest.mark.slow
TEXTS = [
    *("The manual begins.", "Wash the filter.", "Dry it.", "The pump is left.", "A plan: filter."),
    "Another book.",
]
TITLES = [*["Manual"] * 4, "Plan", "Book"]
BUDGET = Budget(turns=5, text_searches=2, picture_searches=2, pages=1, zooms=1, top_k=2)


CUT = "the answer was cut where its tokens ran out; raise max_new_tokens"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(name="q", image=None):
    return Question(name, "test", "Where is the pump?", image=image)


@pytest.fixture(scope="module")
def corpus():
    return mmqa.open_corpus(TEXTS, titles=TITLES, pictures=[*[None] * 4, picture(), None])


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>so</think>" + call("search_texts", query=" pump "), SearchTexts("pump")),
        (call("open_page", source=2), OpenPage(2)),
        (call("search_picture"), SearchByPicture(0)),
        (call("zoom", picture=0, box=[0, 0, 500, 1000]), Zoom(0, (0, 0, 500, 1000))),
        (call("give_up"), GiveUp()),
        (call("answer", text="left [1]") + call("give_up"), Answer("left [1]")),
        ('<tool_call>{"name": "give_up", "arguments": "{}"}</tool_call>', GiveUp()),
        ("<think>x</think> It is left [1].", Answer("It is left [1].")),
        (call("zoom", picture=0, box=[0, 0, 500]), "box="),
        (call("zoom", picture=0, box=[500, 0, 500, 9]), "from 0 to 1000"),
        (call("open_page", source="2"), "source='2' is no int"),
        (call("open_page", source=-1), "source=-1 is no int"),
        (call("open_page"), "source is missing"),
        (call("search_texts", query="a", top_k=9), "an object with query"),
        (call("search_texts", query="  "), "is no str"),
        (call("buy", query="a"), "no tool 'buy'"),
        (call("answer"), "text is missing"),
        ("<tool_call>[]</tool_call>", "no JSON object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON object"),
        ("<tool_call>{}", "does not end"),
        ("<think>only</think>", "nothing was written"),
    ],
)
def test_calls(corpus, text, action):
    style = ToolStyle(corpus, Decoding(), BUDGET, sees=True)
    shown, read = style.read(text, stopped=False)
    assert shown == text
    if isinstance(action, str):
        assert isinstance(read, Invalid)
        assert action in read.reason
    else:
        assert read == action


def test_tools_without_a_budget_are_not_offered(corpus):
    blind = ToolStyle(corpus, Decoding(), BUDGET, sees=False)
    names = [tool.kind for tool in blind.tools]
    assert names == ["search_texts", "open_page", "answer", "give_up"]
    assert blind.read(call("zoom", picture=0, box=[0, 0, 9, 9]), stopped=False)[1].reason == (
        "zoom is not among the tools"
    )
    none = ToolStyle(corpus, Decoding(), Budget(text_searches=0), sees=True)
    assert [tool.kind for tool in none.tools] == ["answer", "give_up"]


def test_results_are_numbered_opened_shown_larger_and_cited(corpus):
    names = [source.id for source in corpus.sources]
    (own,) = [source.image for source in corpus.sources if source.image]
    llm = Script(
        call("search_texts", query="filter"),
        call("open_page", source=1),
        call("zoom", picture=2, box=[0, 0, 500, 500]),
        call("search_pictures", query="plan"),
        call("answer", text="Left of the filter [1][4]."),
        takes_pictures=True,
    )
    words = Words(corpus)
    (prediction,) = answer_tool_search(
        [asked(image=own)], corpus, llm, words, turns=5, top_k=2, pages=1
    )
    first, second, third, fourth, last = (query.messages for query in llm.seen)
    assert [part.data for part in first[0].pictures] == [picture()]
    assert second[2].text == (
        "<tool_response>\n[1] Manual: Wash the filter.\n[2] Plan:  A plan: filter.\n</tool_response>"
    )
    assert [part.data for part in second[2].pictures] == [picture()]
    # Two passages around the result, of its title alone; they are shown whole.
    assert third[4].text == (
        "<tool_response>\n[3] Manual: The manual begins.\n[1] Manual: Wash the filter.\n"
        "[4] Manual: Dry it.\n[5] Manual: The pump is left.\n</tool_response>"
    )
    (part,) = fourth[6].pictures
    assert min(decode(part.data).size) == 448
    assert last[8].text == "<tool_response>\n[2] Plan (as above)\n</tool_response>"
    assert prediction.answer == "Left of the filter."
    assert prediction.sources == (names[1], names[2])
    assert prediction.read == tuple(names[n] for n in (1, 4, 0, 2, 3))
    assert prediction.trace["searches"] == 2
    nodes = trace_tree(prediction)
    assert [node.text for node in nodes] == [
        "turn 1, search texts: filter",
        "turn 2, open page: 1",
        "turn 3, zoom: 2, (0, 0, 500, 500)",
        "turn 4, search pictures: plan",
        "turn 5, answer: Left of the filter [1][4].",
    ]


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (call("open_page", source=3), "open_page: there is no result 3, but 2 of them"),
        (call("open_page", source=0), "open_page: there is no result 0, but 2 of them"),
        (call("zoom", picture=0, box=[0, 0, 9, 9]), "zoom: there is no picture 0"),
        (call("zoom", picture=2, box=[0, 0, 1, 1000]), "zoom: the box is too narrow"),
        (call("search_picture", picture=1), "search_picture: result 1 shows no picture"),
        (call("search_texts", query="nowhere"), None),
    ],
)
def test_what_has_no_result_is_told(corpus, action, told):
    lines = [call("search_texts", query="filter"), action, call("give_up", reason="none")]
    llm = Script(*lines, takes_pictures=True)
    (prediction,) = answer_tool_search([asked()], corpus, llm, Words(corpus), top_k=2)
    expected = f"Error: {told}." if told else "Nothing was found."
    assert llm.seen[2].messages[4].text == f"<tool_response>\n{expected}\n</tool_response>"
    assert (prediction.answer, prediction.trace["not_found"]) == ("", 1)
    assert trace_counts([asked()], [prediction])["not_found"] == 1


def test_search_by_a_picture_that_was_found(corpus):
    lines = [call("search_texts", query="plan"), call("search_picture", picture=1), "It is left."]
    words = Words(corpus)
    answer_tool_search([asked()], corpus, Script(*lines, takes_pictures=True), words)
    (found,) = [source for source in corpus.sources if source.image]
    assert words.asked == [[("plan", None)], [("Where is the pump?", found.image)]]


def test_tokens_are_shared_by_all_turns(corpus):
    llm = Script(*[call("search_texts", query="filter")] * 4)
    (prediction,) = answer_tool_search(
        [asked()], corpus, llm, Words(corpus), tokens=3, max_new_tokens=2
    )
    # Script's turns have a token each.
    assert [query.decoding.max_new_tokens for query in llm.seen] == [2, 2, 1]
    assert prediction.trace["failed"] == ["its tokens ran out before an answer was given"]


class Cut(Script):
    """Writes until its tokens run out."""

    def answer(self, queries):
        for result in super().answer(queries):
            (candidate,) = result.candidates
            cut = dataclasses.replace(candidate, finish="length")
            yield dataclasses.replace(result, candidates=(cut,))


def test_tags_that_never_end(corpus):
    """What was cut ends its episode; what ended by itself is told what is missing."""
    (cut,) = answer_search_r1([asked()], corpus, Cut("<search>filter"), Words(corpus))
    assert cut.trace["failed"] == [CUT]
    line = '<tool_call>{"name": "search_texts"'
    (cut,) = answer_tool_search([asked()], corpus, Cut(line), Words(corpus))
    assert cut.trace["failed"] == [CUT]
    llm = Script(line, "left")
    (told,) = answer_tool_search([asked()], corpus, llm, Words(corpus))
    assert "Error: <tool_call> does not end." in llm.seen[1].messages[2].text
    assert told.answer == "left"


def test_a_budget_without_searches(corpus):
    words = Words(corpus)
    line = "<search>filter</search>"
    budget = Budget(turns=3, text_searches=0)
    style = SearchR1Style(corpus, Decoding(), True)
    (episode,) = run_episodes([asked()], style, Script(line), words, budget)
    assert (episode.prediction().answer, words.asked) == ("", [])


def test_a_model_without_messages_is_refused(corpus):
    llm = Script(takes_messages=False)
    refuses("continues texts alone", answer_tool_search, [asked()], corpus, llm, Words(corpus))


class Failing(Words):
    """Fails for as many calls as it is told to, and always for one query."""

    def __init__(self, corpus, times=0, never="nothing", error=ConnectionError):
        super().__init__(corpus)
        self.times, self.never, self.error = times, never, error

    def search(self, questions, top_k):
        if self.times or any(self.never in question.question for question in questions):
            self.times = max(self.times - 1, 0)
            raise self.error("reset by peer")
        return super().search(questions, top_k)


@pytest.fixture
def _at_once(monkeypatch):
    monkeypatch.setattr(search_loop, "_PAUSES", (0.0, 0.0))


@pytest.mark.usefixtures("_at_once")
def test_a_search_that_fails_now_and_then_is_made_again(corpus):
    llm = Script("<search>filter</search>", "<answer>left</answer>")
    (prediction,) = answer_search_r1([asked()], corpus, llm, Failing(corpus, times=2))
    assert (prediction.answer, prediction.trace["search_retries"]) == ("left", 2)
    assert trace_counts([asked()], [prediction])["search_retries"] == 2
    llm = Script("<search>filter</search>")
    with pytest.raises(UserError, match="reset"):  # a user's mistake is none of the network's
        answer_search_r1([asked()], corpus, llm, Failing(corpus, times=1, error=UserError))


@pytest.mark.usefixtures("_at_once")
def test_a_search_that_always_fails_loses_its_episode_alone(corpus):
    lines = ["<search>filter</search>", "<search>broken</search>", "<answer>left</answer>"]
    questions, words = [asked("a"), asked("b")], Failing(corpus, never="broken")
    first, second = answer_search_r1(questions, corpus, Script(*lines), words)
    assert (first.answer, second.answer) == ("left", "")
    assert second.trace["failed"] == ["the search failed: ConnectionError('reset by peer')"]
    style = ToolStyle(corpus, Decoding(), BUDGET, sees=False)
    line = call("search_texts", query="broken")
    (episode,) = run_episodes([asked()], style, Script(line), words, BUDGET)
    earned = RewardSection(search=0.1).of(episode)
    assert episode.is_lost
    assert math.isnan(earned["reward"])


@pytest.mark.parametrize(
    ("batch", "slots", "by_turns", "of_any"),
    [
        ([[4, 1], [2, 3]], 2, 7, 5),  # 4 and 2, then 1 and 3: the second waits for the first
        ([[4, 1], [2, 3]], 1, 10, 10),
        ([[2], [2], [2]], 2, 4, 4),
        ([[3, 3], [1]], 2, 6, 6),
    ],
)
def test_steps_of_simulated_slots(batch, slots, by_turns, of_any):
    assert rollouts.steps_by_turns(batch, slots) == by_turns
    assert rollouts.steps_of_any(batch, slots) == of_any
    busy = sum(map(sum, batch))
    assert rollouts.waiting(batch, slots, of_any) == pytest.approx(1 - busy / slots / of_any)


def test_planned_steps_of_equal_episodes_wait_for_nothing():
    one, halves, ahead = rollouts.planned_rows([[80, 80]] * 4)
    assert one["ours"] == 0
    assert halves["ours"] == 50
    assert ahead["ours"] < 20
    uneven, *_ = rollouts.planned_rows([[80, 80], [8, 80]])
    assert uneven["ours"] > 5
