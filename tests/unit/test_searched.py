"""`mmqa prepare searched`: conversations whose prompts are Search-R1's loop's own."""

import json

import pytest
from cli_runs import done, png

from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.papers.search_r1 import SearchR1Style
from mmqa_jax.prompting.backends import Decoding
from mmqa_jax.prompting.search_actions import Answer, SearchTexts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]
SOURCES = {
    "code": ("Peru", "Internet addresses of Peru end in .pe"),
    "power": ("Peru", "The power capacity is 15 million kW"),
    "other": ("Chile", "The power capacity is 27 million kW"),
    "code2": ("Chile", "Internet addresses of Chile end in .cl"),
    "code3": ("Bolivia", "Internet addresses of Bolivia end in .bo"),
    "code4": ("Ecuador", "Internet addresses of Ecuador end in .ec"),
}
TWO_HOPS = "What is the capacity where internet addresses end in .pe ?"


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched")
    (folder / "flag.png").write_bytes(png((200, 30, 40)))
    sources = [
        {"id": name, "modality": "text", "title": title, "text": text}
        for name, (title, text) in SOURCES.items()
    ]
    sources.append({"id": "flag", "modality": "image", "text": "A flag", "image": "flag.png"})
    rows = [
        ("two", TWO_HOPS, ["15 million kW"], ["code", "power"]),
        ("one", "Which internet addresses end in .cl ?", ["Those of Chile"], ["code2"]),
        ("far", "Who sings?", ["Nobody"], ["power"]),
        ("seen", "Which flag?", ["Red"], ["flag"]),
        ("unknown", "Why?", [], ["code"]),
    ]
    keys = ("id", "question", "answers", "positives")
    questions = [{"split": "train", **dict(zip(keys, row, strict=True))} for row in rows]
    for name, lines in (("sources", sources), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done("prepare", "corpus", f"--raw={folder}", f"--out={folder / 'corpus'}")
    return folder / "corpus"


def test_conversations_search_until_the_gold_sources_are_read(raw, tmp_path):
    done("prepare", "searched", f"--raw={raw}", f"--out={tmp_path}")
    corpus = open_corpus(tmp_path)
    assert corpus.manifest["origin"]["left_out"] == {
        "no answer": 1, "a gold source is a picture": 1, "gold source not found": 1
    }  # fmt: skip
    two, one = corpus.questions()
    messages = two.extra["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    style = SearchR1Style(open_corpus(raw), Decoding(), True, "user")
    actions = [style.read(m["content"], stopped=False)[1] for m in messages[1::2]]
    assert actions == [
        SearchTexts(TWO_HOPS),
        SearchTexts("Peru What is the capacity where in ?"),
        Answer("15 million kW"),
    ]
    assert messages[0]["content"].endswith(f"Question: {TWO_HOPS}\n")
    assert messages[2]["content"].startswith("<information>Doc 1(Title: Peru) Internet addresses")
    assert messages[5]["content"].startswith("<think>Doc 1 says it.</think>")
    assert len(one.extra["messages"]) == 4
    done("prepare", "searched", f"--raw={raw}", f"--out={tmp_path}", "--overwrite", "--balanced")
    assert len(open_corpus(tmp_path).questions()) == 2  # one of each length


def test_a_corpus_without_any_is_refused(raw, tmp_path, refused):
    done("prepare", "searched", f"--raw={raw}", f"--out={tmp_path / 'a'}")
    refused(
        "prepare",
        "searched",
        f"--raw={tmp_path / 'a'}",
        f"--out={tmp_path / 'b'}",
        message="no question has an answer and gold snippets",
    )
    refused(
        "prepare",
        "searched",
        f"--raw={raw}",
        f"--out={tmp_path / 'c'}",
        "--top_k=2",
        message="--top_k",
    )
