"""OpenSearch-VL: its calls, what comes back, and the prompt of a clone of its repository."""

import json

import pytest
from document_files import picture
from test_search_r1 import Script, Words

import mmqa_jax as mmqa
from mmqa_jax.data.schema import Question
from mmqa_jax.papers.opensearch_vl import (
    OpenSearchStyle,
    answer_opensearch_vl,
    published_prompt,
)
from mmqa_jax.prompting.backends import Decoding
from mmqa_jax.prompting.search_actions import Answer, Crop, Invalid, SearchByPicture, SearchTexts
from tests.refusals import refuses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus():
    texts = ["The pump is on the left.", "A pump of 1950.", "A plan of the pump."]
    return mmqa.open_corpus(texts, titles=["A", "B", "C"], pictures=[None, None, picture()])


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CROP = {"image": "img_1", "x": 1, "y": 2}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (call("text_search", q="pump", top_k=5), SearchTexts("pump")),
        (call("web_search", query=" pump "), SearchTexts("pump")),
        (call("text_search"), Invalid("'q' is required for text_search.")),
        (call("image_search", url="img_1"), SearchByPicture()),
        (
            call("image_search", url="img_9"),
            Invalid("Image reference 'img_9' not found. Available: ['img_1']"),
        ),
        (call("crop", **CROP, width=3, height=4), Crop(0, (1, 2, 4, 6))),
        (
            call("crop", **CROP, width=0, height=4),
            Invalid("width and height must be positive integers, x and y 0 or more."),
        ),
        (call("crop", **CROP), Invalid("x, y, width and height must be integers.")),
        (call("sharpen", image="img_1"), Invalid("Unknown tool: 'sharpen'")),
        ("<tool_call>{no}</tool_call>", Invalid("Invalid tool call payload")),
        ("<think>a</think><response>It is so. boxed{50%}</response>", Answer("50%")),
        ("<response> left", Answer("left")),
        ("<tool_call> that never ends", Answer("")),
    ],
)
def test_actions(corpus, text, action):
    assert OpenSearchStyle(corpus, Decoding()).read(text, stopped=False) == (text, action)


def test_turns_are_what_the_authors_pipeline_sends(corpus):
    lines = [
        call("crop", image="img_1", x=0, y=0, width=2, height=2),
        call("image_search", url="img_1"),
        call("text_search", q="pump"),
        call("layout_parsing", image="img_1"),
        call("text_search", q="nowhere"),
        "<response>left</response>",
    ]
    llm, words = Script(*lines, takes_pictures=True), Words(corpus)
    image = next(source.image for source in corpus.sources if source.image)
    asked = Question("q", "test", "pump of what?", image=image)
    (prediction,) = answer_opensearch_vl([asked], corpus, llm, words, top_k=2)
    assert (prediction.answer, prediction.trace["searches"]) == ("left", 3)
    first, last = llm.seen[0].messages, llm.seen[-1].messages
    assert [message.role for message in first] == ["system", "user"]
    assert [part.data for part in first[1].pictures] == [picture()]
    assert first[1].text.endswith("</tools>\n\npump of what?")
    crop, by_picture, texts, missing, none = (message for message in last[3::2])
    assert "New image ID: img_2." in crop.text
    assert len(crop.pictures) == 1
    assert json.loads(by_picture.text.split("\n", 2)[2].rsplit("\n", 1)[0])[0]["title"] == "A"
    assert texts.text.startswith(
        "<observation>\nTool execution result:\n[Passage 1]\nTitle: A\nURL: "
    )
    assert texts.text.count("=" * 60) == 1
    assert missing.text.splitlines()[1:3] == [
        "Tool execution error:", "Unknown tool: 'layout_parsing'",
    ]  # fmt: skip
    assert "No relevant web pages found for the query." in none.text


def test_the_prompt_of_a_clone(tmp_path):
    (tmp_path / "prompts.py").write_text('SYSTEM_PROMPT = """\nYou are.\n"""\n')
    refuses(r"option published=.*tools\.py.*; name the folder", published_prompt, str(tmp_path))
    (tmp_path / "tools.py").write_text(
        'def get():\n    tools = [{"name": "cr" "op"}]\n    return tools\n'
    )
    prompt, tools = published_prompt(str(tmp_path))
    assert prompt == "\nYou are.\n"
    assert tools == '[\n  {\n    "name": "crop"\n  }\n]'
