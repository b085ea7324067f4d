"""Thoughts and answers of reasoning models, in a text and as servers give them."""

import json

import pytest

from mmqa_jax.decoding.requests import Candidate, Result
from mmqa_jax.papers.mavl import parse_plan
from mmqa_jax.prompting.backends import Chat, Decoding, Message, Usage
from mmqa_jax.prompting.backends.cache import keep, restore
from mmqa_jax.prompting.backends.openai_replies import Malformed, read_candidates, read_usage
from mmqa_jax.prompting.backends.thinking import (
    ROOM,
    Thinking,
    ThoughtStream,
    read_answer,
    read_thinking,
    split_thoughts,
    thoughts_apart,
    thoughts_of,
    why_empty,
    with_thinking_tokens,
)
from mmqa_jax.prompting.text_tokenizer import ChatTemplate
from tests.refusals import refuses

HARMONY = (
    "<|channel|>analysis<|message|>The manual<|end|><|start|>assistant<|channel|>analysis<|message|>"
    "says 14.<|end|><|start|>assistant<|channel|>final<|message|>"
)


TEXTS = pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        (" Paris.\n", "", "Paris."),
        ("<think>\nFrance, so\n</think>\n\nParis.", "France, so", "Paris."),
        ("<thinking>France</thinking>Paris.", "France", "Paris."),
        ("\n<think>\n\n</think>\n\nParis.", "", "Paris."),  # thinking is off
        ("France, so\n</think>\n\nParis.", "France, so", "Paris."),  # the template opened it
        ("<think>\nFrance, and France", "France, and France", ""),  # tokens ran out
        ("Write <think>a</think> in front.", "", "Write <think>a</think> in front."),
        ("<think>x</think>The tag is </think>.", "x", "The tag is </think>."),
        ("", "", ""),
        # gpt-oss: with and without special tokens, a tool's header, tokens that ran out
        (f"{HARMONY}Every 14 days [1].", "The manual\nsays 14.", "Every 14 days [1]."),
        (
            f"{HARMONY}A <|channel|> is a part.<|return|>",
            "The manual\nsays 14.",
            "A <|channel|> is a part.",
        ),
        (
            "analysisThe manual says 14.assistantfinalEvery 14 days.",
            "The manual says 14.",
            "Every 14 days.",
        ),
        ("analysis of water: clean", "", "analysis of water: clean"),
        ("<|channel|>final<|message|>Paris.", "", "Paris."),
        ("<|channel|>analysis<|message|>The man", "The man", ""),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=f.g "
            "<|constrain|>json<|message|>{}<|call|>",
            "a\n{}",
            "",
        ),
    ],
)


@TEXTS
def test_the_answer_is_without_thoughts(text, thoughts, answer):
    assert split_thoughts(text) == (thoughts, answer)


@TEXTS
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_are_split_as_the_whole(text, thoughts, answer, size):
    """And a text without thoughts comes as it is."""
    channels = "<|" in text or text.startswith("analysisThe")
    stream = ThoughtStream(opened=text.startswith("France"), channels=channels)
    pieces = [text[n : n + size] for n in range(0, len(text), size)] or [""]
    given = [stream.push(one, is_last=n == len(pieces) - 1) for n, one in enumerate(pieces)]
    got = tuple("".join(column) for column in zip(*given, strict=True))
    assert got == ((thoughts, answer) if thoughts or answer != text.strip() else ("", text))


@TEXTS
def test_prompted_systems_get_the_answer(text, thoughts, answer):
    """Of every completion, as `answer_all` gives them."""
    result = thoughts_apart(Result("q", (Candidate(text, (), -1.0, None, "stop"),), 3, 0))
    trace: dict = {}
    assert ((result.text or "").strip(), read_answer(result.candidates[0], trace)) == (answer,) * 2
    assert trace == ({"thinking": [thoughts]} if thoughts else {})


def test_a_plan_is_read_of_the_answer():
    assert parse_plan("senior", "<think>Action_1?</think>Action_2").actions == (2,)


def reply(message, finish="stop"):
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


PARTS = [
    {
        "type": "thinking",
        "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}],
    },
    {"type": "text", "text": "Every 14 days [1]."},
]
SHAPES = {  # a server's message -> thoughts and answer
    "tags": ({"content": "<think>\nhm\n</think>\n\nEvery 14 days [1]."}, "hm"),
    "vLLM": ({"content": "Every 14 days [1].", "reasoning_content": "hm"}, "hm"),
    "newer vLLM": ({"content": "Every 14 days [1].", "reasoning": "hm"}, "hm"),
    "Mistral": ({"content": PARTS}, "hm"),
    "parts of text": ({"content": [{"type": "text", "text": "Every 14 days [1]."}]}, ""),
    "none": ({"content": "Every 14 days [1].", "reasoning_content": None}, ""),
}


@pytest.mark.parametrize(("message", "thoughts"), SHAPES.values(), ids=list(SHAPES))
def test_servers_shapes(message, thoughts):
    (candidate,) = read_candidates(reply(message), False)
    assert thoughts_of(candidate) == thoughts
    assert split_thoughts(candidate.text)[1] == "Every 14 days [1]."
    assert why_empty(candidate) == ""


@pytest.mark.parametrize(
    ("message", "finish", "sentence"),
    [
        ({"content": None, "reasoning_content": "hm"}, "length", "went into thoughts.*--thinking"),
        ({"content": "<think>hm"}, "length", "went into thoughts.*--thinking=TOKENS"),
        ({"content": None}, "length", "thoughts are hidden.*--thinking=TOKENS"),
        ({"content": "Every 14"}, "length", "cut where its tokens ran out; raise max_new_tokens"),
        ({"content": None, "reasoning": "hm"}, "stop", "wrote nothing; ask it otherwise"),
    ],
)
def test_half_an_answer_says_why(message, finish, sentence):
    import re

    (candidate,) = read_candidates(reply(message, finish), False)
    assert re.search(sentence, why_empty(candidate))


@pytest.mark.parametrize("content", [None, 3, [], [3]])
def test_no_text_and_no_reason_is_malformed(content):
    refuses("no text", read_candidates, reply({"content": content}), False, error=Malformed)


def test_thoughts_are_kept_and_older_answers_are_read():
    query = Chat("q", (Message("user", "?"),), Decoding())
    answer = Result("q", (Candidate("a", (), -1.0, None, "stop", "hm"),), 3, 0)
    value = json.loads(json.dumps(keep(query, answer)))
    assert restore("", query, value) == answer
    del value["candidates"][0]["thinking"], value["candidates"][0]["thinking_tokens"]
    older = restore("", query, value).candidates[0]
    assert (older.thinking, older.thinking_tokens) == ("", None)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("<think>ab</think>\n\nParis.", 19),
        (f"{HARMONY}Paris.", len(HARMONY)),
        ("<think>ab", 9),  # tokens ran out
        ("Paris.", None),
    ],
)
def test_tokens_before_the_answer_are_counted(text, count):
    """Here a token is a character, and the last ends the answer."""
    tokens = (*map(ord, text), 0)
    result = Result("q", (Candidate(text, tokens, -1.0, None, "end"),), 3, 0)
    counted = with_thinking_tokens(result, lambda ids: "".join(map(chr, ids)))
    if text == "<think>ab":
        count += 1
    assert counted.candidates[0].thinking_tokens == count
    usage, trace = Usage(), {}
    usage.add(counted)
    assert (usage.completion_tokens, usage.thinking_tokens) == (len(tokens), count or 0)
    read_answer(counted.candidates[0], trace)
    assert trace.get("thinking_tokens") == count


def test_a_server_says_its_tokens_of_thoughts():
    usage = {"prompt_tokens": 3, "completion_tokens": 9}
    assert read_usage({"usage": usage}).thinking is None
    for details, count in (({"reasoning_tokens": 7}, 7), ({"reasoning_tokens": "7"}, None)):
        assert (
            read_usage({"usage": usage | {"completion_tokens_details": details}}).thinking == count
        )


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        ("auto", Thinking()),
        ("off", Thinking(False)),
        ("on", Thinking(True, ROOM)),
        ("500", Thinking(True, 500)),
        ("high", Thinking(True, 8192, "high")),
    ],
)
def test_the_option(text, thinking):
    assert read_thinking(text, "--thinking") == thinking


@pytest.mark.parametrize("text", ["", "yes", "0", "-3", "1.5", "9" * 5000, "٣"])
def test_other_values_are_refused(text):
    refuses(r"^--thinking=.*: expected auto, off, on, .* or the", read_thinking, text, "--thinking")


QWEN3 = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)


def test_a_template_is_told_where_an_answer_begins():
    turns = [Message("user", "?")]
    for thinking, end in ((None, ":"), (False, "<think></think>"), (True, ":")):
        template = ChatTemplate(QWEN3, thinking=Thinking(thinking)).shielding(str)
        assert (
            template.render("q", turns) == f"user: ?\nassistant{end if end == ':' else ':' + end}"
        )
    assert ChatTemplate("{{ messages }}", thinking=Thinking(False)).switches == {}


@pytest.mark.parametrize("verb", ["prompt", "ask", "serve", "caption"])
def test_verbs_name_the_flag(verb, refused):
    refused(verb, "--thinking=maybe", message=r"--thinking=maybe: expected auto, off, on, low")


GPT_OSS = (
    "Reasoning: {{ reasoning_effort | default('medium') }}\n"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("thinking", "effort", "begun"),
    [
        ("auto", "medium", ""),
        ("on", "medium", ""),
        ("high", "high", ""),
        ("off", "low", "<|channel|>final<|message|>"),  # the answer begins in its channel
    ],
)
def test_gpt_oss_is_told_its_effort(thinking, effort, begun):
    turns = [Message("user", "?"), Message("assistant", f"{HARMONY}14."), Message("user", "Why?")]
    told = read_thinking(thinking, "--thinking")
    text = ChatTemplate(GPT_OSS, thinking=told).shielding(str).render("q", turns)
    assert text == (
        f"Reasoning: {effort}\n<|start|>user<|message|>?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>14.<|end|>"
        f"<|start|>user<|message|>Why?<|end|><|start|>assistant{begun}"
    )
