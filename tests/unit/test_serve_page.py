"""The page of `mmqa serve`: what its systems tell and answer, and clicks in a real browser."""

import asyncio
import base64
import dataclasses
import json
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import httpx
import mcp
import pytest
from document_files import pdf, picture
from fake_llm import FakeLLM
from playwright.sync_api import sync_playwright
from served_app import openai_client, serving
from tiny_llm import tiny_backend
from word_encoder import install

from mmqa_jax.data.schema import NOT_FOUND, Question, Ranking
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.prompting.llm_reader import LLMReaderOptions
from mmqa_jax.runs.ask_folder import AskOptions, FolderAnswerer, ToRead, open_folder
from mmqa_jax.serve import ServeOptions, follow_up
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.marked_text import elements_of
from mmqa_jax.serve.run import open_parts
from mmqa_jax.serve.systems import FindPassages, FromMemory, Parts, ReadPassages, Threads
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
HTTP = httpx.Client(verify=False, timeout=60)  # each client reads the certificates of the world
ATTACK = "<img src=x onerror=document.title=1><script>document.title=2</script>"


def said(prompt: str) -> tuple[str, float]:
    """Cites the source of the filter; knows nothing of operas."""
    found = re.search(r"\[(\d+)\][^\n]*Wash the filter", prompt)
    if "opera" in prompt:
        return "Not found in the sources.", -1.0
    return (f"Every week [{found[1]}]. {ATTACK}" if found else "By heart."), -1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "manuals"
    folder.mkdir()
    pages = [[(10, 700, "The pump is on the left.")], [(10, 700, "Wash the filter every week.")]]
    (folder / "manual.pdf").write_bytes(pdf(pages))
    (folder / "red filter.png").write_bytes(picture())
    (folder / "fees.csv").write_text("item,fee\npump,3\nvalve,4\n")
    (folder / "a secret.txt").write_text(f"The filter of the boiler is secret. {ATTACK}")
    return folder


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    """A server of the folder with a language model of known answers."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, tmp_path_factory.mktemp("cache"))
        corpus = open_folder(folder)
        answerer = FolderAnswerer(corpus, None, AskOptions(top_k=3, least_similarity=0.1))
        with serving(make_app(parts_of(answerer, lambda on_text: FakeLLM(said)), OPTIONS)) as at:
            yield at


OPTIONS = ServeOptions(body=4.0, timeout=60.0)


def parts_of(answerer, backend_of, llm=None) -> Parts:
    threads, reading = Threads(4), LLMReaderOptions()
    systems = [
        ReadPassages(answerer, backend_of, reading, threads),
        FindPassages(answerer, threads),
        FromMemory(answerer.corpus, backend_of, reading, threads),
    ]
    return Parts(
        "manuals", llm, "tiny", answerer.embedder, "words",
        {system.name: system for system in systems}, answerer.corpus, threads,
    )  # fmt: skip


def asked(address, question, system="passages", **more):
    """The events of an answer, by kind."""
    body = {"question": question, "system": system, **more}
    reply = HTTP.post(f"{address}/api/ask", json=body)
    assert reply.status_code == 200, reply.text
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", reply.text)
    return {kind: json.loads(data) for kind, data in found}


def test_an_answer_with_its_sources(address):
    events = asked(address, "When to wash the filter?")
    assert list(events) == ["queries", "sources", "answer"]
    row = events["answer"]
    cited = [source for source in row["sources"] if source["cited"] is not None]
    assert [(one["file"], one["page"]) for one in cited] == [("manual.pdf", 2)]
    assert row["marked"].startswith(f"Every week [{cited[0]['number']}].")
    assert row["answer"].startswith("Every week.")
    assert [one["number"] for one in row["sources"]] == [1, 2, 3]
    assert [one["id"] for one in events["sources"]] == [one["id"] for one in row["sources"]]
    assert (row["found"], row["notes"]) == (True, [])


def test_refusals_and_the_other_systems(address):
    row = asked(address, "Who composed an opera?")["answer"]
    assert (row["answer"], row["found"]) == (NOT_FOUND, False)
    row = asked(address, "filter", system="search")["answer"]
    assert [one["cited"] for one in row["sources"]] == [None, None, None]
    assert asked(address, "filter?", system="memory")["answer"]["answer"] == "By heart."
    refused = [({"question": " ", "system": "search"}, "empty"),
               ({"question": "a", "system": "x"}, "there are: passages, search, memory"),
               ({"question": "a" * 20_001, "system": "search"}, "shorten it"),
               ({"question": "a", "system": "search", "image": "data:image/png;base64,aaaa"}, "pict"),
               ({"question": "a"}, "system is missing")]  # fmt: skip
    for body, words in refused:
        reply = HTTP.post(f"{address}/api/ask", json=body)
        assert reply.status_code in (400, 404)
        assert words in reply.json()["error"]["message"]


def test_originals_are_opened_while_they_are_what_was_read(address, folder):
    name, file = "manual.pdf#2", folder / "manual.pdf"
    kept = file.read_bytes()
    page = HTTP.get(f"{address}/api/page/{quote(name)}")
    assert (page.content[:4], page.headers["x-page-size"]) == (b"\x89PNG", "612 792")
    original = HTTP.get(f"{address}/api/original/{quote(name)}")
    assert (original.content, original.headers["content-type"]) == (kept, "application/pdf")
    text = HTTP.get(f"{address}/api/original/{quote('a secret.txt#1')}")
    assert text.headers["content-type"].startswith("text/plain")
    assert "sandbox" in text.headers["content-security-policy"]
    try:
        for change, words in [(lambda: file.write_bytes(kept + b" "), "has changed since it was read"),
                              (file.unlink, "put the file back")]:  # fmt: skip
            change()
            for route in ("page", "original"):
                reply = HTTP.get(f"{address}/api/{route}/{quote(name)}")
                assert reply.status_code == 409
                assert words in reply.json()["error"]["message"]
    finally:
        file.write_bytes(kept)
    for route in ("page", "original"):
        assert HTTP.get(f"{address}/api/{route}/{quote('../../etc/passwd')}").status_code == 404
    assert HTTP.get(f"{address}/api/page/{quote('a secret.txt#1')}").status_code == 404


def test_sources_and_pictures_are_looked_up_by_id(address, folder):
    found = HTTP.get(f"{address}/api/source/manual.pdf%232").json()
    assert (found["text"], found["page"]) == ("Wash the filter every week.", 2)
    assert [one["text"] for one in found["before"]] == ["The pump is on the left."]
    shown = HTTP.get(f"{address}/api/picture/red%20filter.png")
    assert (shown.content, shown.headers["content-type"]) == (picture(), "image/png")
    for path in ("/etc/passwd", "../a secret.txt", "a secret.txt", str(folder / "manual.pdf"), ""):
        for kind in ("source", "picture"):
            assert HTTP.get(f"{address}/api/{kind}/{path}").status_code == 404
    assert HTTP.get(f"{address}/api/picture/manual.pdf%232").status_code == 404  # has none


def test_a_chat_with_the_system(address):
    body = {"model": "passages", "messages": [{"role": "user", "content": "Wash the filter when?"}]}
    reply = HTTP.post(f"{address}/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"].startswith("Every week.")
    assert "manual.pdf" in {one["file"] for one in reply["sources"] if one["cited"] is not None}
    streamed = HTTP.post(f"{address}/v1/chat/completions", json={**body, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert "Every week." in streamed.text
    assert (reply["usage"], reply["notes"]) == (None, [])


def test_what_a_client_asks_of_an_answer_takes_effect(folder, tmp_path, monkeypatch):
    """Of a system that a language model reads for; another one says that it has no effect."""
    install(monkeypatch, tmp_path)
    answerer = FolderAnswerer(open_folder(folder), None, AskOptions(top_k=1))
    llm = FakeLLM(said)
    earlier = [{"role": "system", "content": "Answer in verse."}, {"role": "user", "content": "Hi"},
               {"role": "assistant", "content": "Hello"}]  # fmt: skip
    messages = [*earlier, {"role": "user", "content": "Wash the filter when?"}]
    body = {"messages": messages, "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3,
            "stop": "\n\n"}  # fmt: skip
    with serving(make_app(parts_of(answerer, lambda on_text: llm), OPTIONS)) as at:
        url = f"{at}/v1/chat/completions"
        read, searched = (
            HTTP.post(url, json={**body, "model": model}).json() for model in ("passages", "search")
        )
    (query,) = llm.seen
    decoding = query.decoding
    assert (decoding.temperature, decoding.top_p, decoding.max_new_tokens) == (0.5, 0.9, 7)
    assert (decoding.seed, tuple(decoding.stop)) == (3, ("\n\n",))
    texts = [message.text for message in query.messages]
    assert texts[:3] == ["Answer in verse.", "Hi", "Hello"]
    assert "Wash the filter when?" in texts[3]
    assert read["notes"] == []
    assert searched["notes"] == [
        "search answers as it is set up, without max_tokens, seed, stop, temperature, top_p, the "
        "system prompt.",
    ]


@pytest.mark.parametrize(
    ("way", "searched"),
    [
        ("both", "Where is the pump? And when is it washed?"),
        ("joined", "Where is the pump? And when is it washed?"),
        ("rewritten", "When to wash the filter?"),
        ("alone", "And when is it washed?"),
    ],
)
def test_a_follow_up_question(folder, tmp_path, monkeypatch, way, searched):
    """Of the page and of the API: what is searched for, and what the reader sees of what was said."""
    install(monkeypatch, tmp_path)
    answerer = FolderAnswerer(open_folder(folder), None, AskOptions(top_k=1, least_similarity=-1.0))

    def say(prompt):
        return (
            "When to wash the filter?" if "Rewritten question" in prompt else "Weekly [1]."
        ), -1.0

    llm = FakeLLM(say)
    system = ReadPassages(answerer, lambda on_text: llm, LLMReaderOptions(), Threads(2), way)
    parts = Parts("manuals", None, "tiny", answerer.embedder, "words", {"passages": system}, answerer.corpus, system.threads)  # fmt: skip
    turns = [{"question": "Where is the pump?", "answer": "On the left."}]
    with serving(make_app(parts, OPTIONS)) as at:
        events = asked(at, "And when is it washed?", history=turns)
        said = [
            {"role": "user", "content": "Where is the pump?"},
            {"role": "assistant", "content": "On the left."},
        ]
        body = {
            "model": "passages",
            "messages": [*said, {"role": "user", "content": "And when is it washed?"}],
        }
        reply = HTTP.post(f"{at}/v1/chat/completions", json=body).json()
        wrong = HTTP.post(
            f"{at}/api/ask",
            json={"question": "a", "system": "passages", "history": [{"question": 1}]},
        )
    assert events["queries"][-1] == searched
    assert reply["choices"][0]["message"]["content"] == events["answer"]["answer"]
    shown = [message.text for message in llm.seen[-1].messages]
    assert shown[:-1] == ([] if way == "rewritten" else ["Where is the pump?", "On the left."])
    assert (searched if way == "rewritten" else "And when is it washed?") in shown[-1]
    assert "history[0] is" in wrong.json()["error"]["message"]


def test_two_searches_in_turn():
    def result(names, is_refused=False):
        ranking = Ranking("q", tuple(names), tuple(0.1 * ord(name) for name in names))
        return ToRead(Question("q", "", "?"), ranking, is_refused)

    assert follow_up.merged([result("abc"), result("bde")]).passages.sources == ("a", "b", "d")
    assert follow_up.merged([result("ab"), result("c", is_refused=True)]).passages.sources == (
        "a",
        "b",
    )
    both = follow_up.merged([result("a", is_refused=True), result("b", is_refused=True)])
    assert (both.passages.sources, both.is_refused) == (("a",), True)


def test_several_folders(folder, tmp_path, monkeypatch):
    """Each has systems of its own, and sources under its name."""
    install(monkeypatch, tmp_path)
    other = tmp_path / "reports"
    other.mkdir()
    (other / "manual.pdf").write_bytes(pdf([[(10, 700, "Sales of pumps rose.")]]))
    parts = open_parts(None, "", OPTIONS, data=folder, also=[other])

    async def calls(at):
        async with mcp.Client(f"{at}/mcp") as client:
            results = [await client.call_tool(*call) for call in OF_FOLDERS]
        return [result.structured_content or result.content[0].text for result in results]

    with serving(make_app(parts, dataclasses.replace(OPTIONS, mcp=True))) as at:
        about = HTTP.get(f"{at}/api/about").json()
        rows = asked(at, "Sales of pumps", system="search:reports")["answer"]["sources"]
        found = HTTP.get(f"{at}/api/source/manual.pdf%231?folder=reports").json()
        assert HTTP.get(f"{at}/api/source/manual.pdf%231?folder=x").status_code == 404
        assert "pump" in HTTP.get(f"{at}/api/source/manual.pdf%231").json()["text"]
        everywhere, within, nearest, same_ids, page, file, foreign = asyncio.run(calls(at))
    assert [one["label"] for one in about["systems"]] == ["Find passages", "reports: find passages"]
    assert about["files"]["reports/manual.pdf"] == 1
    assert [(row["id"], row["folder"]) for row in rows] == [("manual.pdf#1", "reports")]
    assert found["text"] == "Sales of pumps rose."
    first = everywhere["sources"][0]
    assert (first["folder"], first["id"], first["number"]) == ("reports", "manual.pdf#1", 1)
    assert {source["folder"] for source in everywhere["sources"]} == {"reports", "manuals"}
    assert {source["folder"] for source in within["sources"]} == {"manuals"}
    assert nearest["sources"][0]["text"] == "Sales of pumps rose."
    assert "several folders have a source 'manual.pdf#1'" in same_ids
    assert page["text"] == "Sales of pumps rose."
    assert file["text"].startswith("The pump is on the left.")
    assert "there is no folder 'x', but manuals, reports." in foreign
    (tmp_path / "x" / "manuals").mkdir(parents=True)
    refuses(
        "another folder is called manuals",
        open_parts,
        None,
        "",
        OPTIONS,
        data=folder,
        also=[tmp_path / "x" / "manuals"],
    )


def test_documents_are_added_where_that_is_allowed(folder, tmp_path, monkeypatch):
    install(monkeypatch, tmp_path / "cache")
    here = tmp_path / "here"
    shutil.copytree(folder, here)
    options = dataclasses.replace(OPTIONS, uploads=2)
    parts = open_parts(None, "", options, data=here)

    def sent(name, data):
        body = {"name": name, "data": base64.b64encode(data).decode()}
        reply = HTTP.post(f"{at}/api/upload", json=body)
        return reply.json() if reply.status_code == 200 else reply.json()["error"]["message"]

    notes = b"# Notes\n\nThe turbine rests on Sundays.\n"
    with serving(make_app(parts, options)) as at:
        assert HTTP.get(f"{at}/api/about").json()["uploads"] == 2
        for name, data, message in [
            ("../notes.md", notes, "is no plain name of a file"),
            ("x\\notes.md", notes, "is no plain name of a file"),
            ("a" * 121 + ".md", notes, "is no plain name of a file"),
            (".notes.md", notes, "of no kind that is read"),
            ("notes.exe", notes, "of no kind that is read: .txt"),
            ("fees.csv", notes, "the folder has a file of this name"),
            ("empty.md", b"", "is empty"),
            ("broken.pdf", b"%PDF-1.4 no more", "broken.pdf: "),
        ]:
            assert message in sent(name, data), name
        broken = HTTP.post(f"{at}/api/upload", json={"name": "b.md", "data": "a"})
        assert "data is broken base64" in broken.json()["error"]["message"]
        foreign = HTTP.post(f"{at}/api/upload", json={}, headers={"Sec-Fetch-Site": "cross-site"})
        assert foreign.status_code == 403
        assert {path.name for path in here.iterdir()} == {path.name for path in folder.iterdir()}
        assert sent("notes.md", notes) == {"file": "notes.md", "sources": 1, "left": 1}
        (first, *_) = asked(at, "Who rests on Sundays?", "search")["answer"]["sources"]
        assert (first["file"], first["lines"]) == ("notes.md", [3, 3])
        assert sent("more.md", b"More.")["left"] == 0
        assert "takes no more documents" in sent("most.md", b"Most.")
        assert HTTP.get(f"{at}/api/source/notes.md%231").json()["text"].startswith("The turbine")
    assert (here / "notes.md").read_bytes() == notes
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "sources.jsonl").write_text('{"id": "s", "modality": "text", "text": "a"}')
    refuses(
        "documents are added to a folder of documents",
        open_parts, None, "", options, data=tmp_path / "rows",
    )  # fmt: skip


OF_FOLDERS = [("search", {"query": "Sales of pumps"}),
              ("search", {"query": "Sales of pumps", "folder": "manuals"}),
              ("ask", {"question": "Sales of pumps"}), ("open_page", {"id": "manual.pdf#1"}),
              ("open_page", {"id": "manual.pdf#1", "folder": "reports"}),
              ("read", {"file": "manual.pdf", "folder": "manuals"}),
              ("cite", {"id": "manual.pdf#1", "folder": "x"})]  # fmt: skip


def test_markdown_is_elements_without_html():
    elements = elements_of(
        f"**Every** `week` {ATTACK}\n\n- [a](javascript:x) [b](http://b.org)\n\n![c](http://c)"
    )
    paragraph, items, described = elements
    assert paragraph[1][0] == ["strong", ["Every"]]
    assert "".join(part for part in paragraph[1] if isinstance(part, str)).endswith(ATTACK)
    assert items == ["ul", [["li", [["span", ["a"]], " ", ["a", ["b"], "http://b.org"]]]]]
    assert described == ["p", [["span", ["c"]]]]


def test_tools_of_an_assistant(folder, tmp_path, monkeypatch):
    """Over HTTP, by the protocol's own client; its door is the server's."""
    install(monkeypatch, tmp_path)
    answerer = FolderAnswerer(open_folder(folder), None, AskOptions(top_k=2))
    parts = parts_of(answerer, lambda on_text: FakeLLM(said))

    async def calls(at):
        async with mcp.Client(f"{at}/mcp") as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            results = [await client.call_tool(*call) for call in CALLS]
        return names, [result.structured_content or result.content[0].text for result in results]

    with serving(make_app(parts, dataclasses.replace(OPTIONS, mcp=True))) as at:
        names, results = asyncio.run(calls(at))
        foreign = HTTP.post(f"{at}/mcp", json={}, headers={"Sec-Fetch-Site": "cross-site"})
    assert names == {"search", "ask", "open_page", "read", "cite"}
    searched, answered, page, file, no_file, no_page, cited, misquoted, unknown, empty = results
    assert searched["sources"][0]["id"] == "manual.pdf#2"
    assert answered["answer"].startswith("Every week [1].")
    assert [row["text"] for row in page["before"]] == ["The pump is on the left."]
    assert (file["pages"], file["text"]) == (
        [1, 2],
        f"{page['before'][0]['text']}\n\n{page['text']}",
    )
    assert "similar names are manual.pdf" in no_file
    assert "has no page 3; pages with text: [1, 2]" in no_page
    assert (cited["citation"], cited["quote_is_in_source"]) == ("manual, manual.pdf, page 2", True)
    assert misquoted["quote_is_in_source"] is False
    assert "there is no source '../x'" in unknown
    assert "the question is empty; write one." in empty
    assert foreign.status_code == 403


CALLS = [("search", {"query": "Wash the filter when?"}), ("ask", {"question": "Wash the filter when?"}),
         ("open_page", {"id": "manual.pdf#2"}), ("read", {"file": "manual.pdf"}),
         ("read", {"file": "manuals.pdf"}), ("read", {"file": "manual.pdf", "page": 3}),
         ("cite", {"id": "manual.pdf#2", "quote": "Wash  the filter"}),
         ("cite", {"id": "manual.pdf#2", "quote": "Wash the pump"}),
         ("open_page", {"id": "../x"}), ("ask", {"question": " "})]  # fmt: skip


def test_a_response_cites_files(address):
    """The Responses API in OpenAI's own client, whole and in pieces."""
    asked = {"model": "passages", "input": "Wash the filter when?", "instructions": "Be brief."}
    client = openai_client(address, 60)
    whole = client.responses.create(**asked)
    assert whole.output_text.startswith("Every week.")
    (citation,) = whole.output[0].content[0].annotations
    assert (citation.type, citation.filename) == ("file_citation", "manual.pdf")
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[-1].response.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == whole.output_text
    refused = HTTP.post(f"{address}/v1/responses", json={**asked, "previous_response_id": "r"})
    assert "send the messages as input" in refused.json()["error"]["message"]


def test_pieces_of_a_served_model(engine, folder, tmp_path, monkeypatch):
    """Users of one engine at the same time, each with the pieces of their own answer."""
    install(monkeypatch, tmp_path)
    answerer = FolderAnswerer(open_folder(folder), None, AskOptions(top_k=1))
    model = ServedModel(tiny_backend(engine), 64)
    parts = parts_of(answerer, model.session, model)
    with serving(make_app(parts, OPTIONS)) as at:
        reply = HTTP.post(f"{at}/api/ask", json={"question": "a", "system": "memory"}).text
    pieces = [json.loads(data) for data in re.findall(r"event: text\ndata: (.*)\n", reply)]
    row = json.loads(re.search(r"event: answer\ndata: (.*)\n", reply)[1])
    assert "".join(pieces).strip() == row["answer"]
    assert len(pieces) > 1


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_the_passage_before_a_small_model_s_words(folder, tmp_path, monkeypatch):
    install(monkeypatch, tmp_path)
    answerer = FolderAnswerer(open_folder(folder), None, AskOptions(top_k=3, least_similarity=0.1))
    small = parts_of(answerer, lambda on_text: FakeLLM(said, parameters=135_000_000))
    with serving(make_app(small, OPTIONS)) as at, sync_playwright() as started:
        body = {"model": "passages", "messages": [{"role": "user", "content": "Wash the filter?"}]}
        reply = HTTP.post(f"{at}/v1/chat/completions", json=body).json()
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.goto(at)
        page.wait_for_selector("#system option", state="attached")
        page.fill("#question", "When to wash the filter?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".seconds:not(:empty)")
        tops = [page.locator(f".{name}").bounding_box()["y"] for name in ("first mark", "said")]
        first = page.inner_text(".first mark")
        page.click(".first .cite")
        page.wait_for_selector("#reader mark")
        opened, width = (
            page.inner_text("#reader-place"),
            page.evaluate("document.documentElement.scrollWidth"),
        )
        browser.close()
    assert first == reply["quote"]["text"] == "Wash the filter every week."
    assert (tops, width) == (sorted(tops), 390)
    assert "page 2" in opened


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_clicks_in_a_browser(address):
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#system option", state="attached")
        page.keyboard.type("When to wash the filter?")  # the field has the focus
        page.keyboard.press("Enter")
        page.wait_for_selector(".seconds:not(:empty)")
        assert page.inner_text(".said").startswith("Every week")
        assert ATTACK in page.inner_text(".said")  # as text
        page.click(".said .cite")
        page.wait_for_selector("#reader mark")
        assert page.inner_text("#reader mark") == "Wash the filter every week."
        assert "page 2" in page.inner_text("#reader-place")
        sheet, box = (
            page.locator(f"#reader {name}").first for name in (".sheet img", ".sheet .box")
        )
        (whole, part), size = (sheet.bounding_box(), box.bounding_box()), (612, 792)
        left = (part["x"] - whole["x"]) / whole["width"] * size[0]
        bottom = (part["y"] + part["height"] - whole["y"]) / whole["height"] * size[1]
        assert (left, bottom) == (pytest.approx(72, abs=2), pytest.approx(92, abs=4))
        page.keyboard.press("Escape")
        assert not page.is_visible("#reader")
        page.click(".candidates summary")
        assert page.locator(".candidates .source").count() == 3
        assert page.locator(".candidates img").count() == 1
        page.wait_for_selector(".candidates img[src]")
        page.locator(".candidates img").evaluate("image => image.decode()")
        assert page.inner_text("#read summary") == "What was read (4 files)"
        page.select_option("#system", "memory")
        page.fill("#question", "filter?")
        page.click("#send")
        page.wait_for_selector("article:nth-child(2) .seconds:not(:empty)")
        assert page.inner_text("article:nth-child(2) .said") == "By heart."
        page.reload()  # the conversation stays
        page.wait_for_selector("article:nth-child(2) .seconds:not(:empty)")
        assert ATTACK in page.inner_text("article:nth-child(1) .said")
        with page.expect_download() as saved:
            page.click("#export")
        text = Path(saved.value.path()).read_text("utf-8")
        assert text.startswith("# manuals\n\n## When to wash the filter?\n\nEvery week [")
        assert text.endswith("## filter?\n\nBy heart.\n")
        page.context.set_offline(True)
        page.fill("#question", "And now?")
        page.keyboard.press("Enter")
        page.wait_for_selector("article:nth-child(3) .state.bad")
        assert "The server cannot be reached" in page.inner_text("article:nth-child(3) .state")
        page.click("#new")
        assert (page.locator("article").count(), page.is_visible("#empty")) == (0, True)
        page.context.set_offline(False)
        for question, place, words in [("Secret boiler", "#reader .lines li:has(mark)", ATTACK),
                                       ("The fee of the valve", "#reader .cells tr:nth-child(3)", "A3:B3")]:  # fmt: skip
            page.select_option("#system", "search")
            page.fill("#question", question)
            page.click("#send")
            page.locator("article").last.locator(".candidates summary").click()
            page.locator("article").last.locator(".candidates .source").first.click()
            page.wait_for_selector(place)
            assert words in page.inner_text(place)
            page.keyboard.press("Escape")
            page.click("#new")  # the next question is on something else
        width = page.evaluate("document.documentElement.scrollWidth")
        title = page.title()
        browser.close()
    assert (errors, width, title) == ([], 390, "manuals")
