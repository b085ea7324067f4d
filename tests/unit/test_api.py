"""mmqa_jax from Python: its public names, with a scripted encoder and language model.

The README's own code, with MiniLM and SmolLM2, runs in test_readme_python.py.
"""

import re
import subprocess
import sys

import pytest
from document_files import picture
from fake_llm import FakeLLM
from word_encoder import install

import mmqa_jax as mmqa
from mmqa_jax.api import answers as api
from mmqa_jax.api import lists, ports
from mmqa_jax.data.schema import NOT_FOUND
from tests.refusals import refuses

pytestmark = pytest.mark.slow
TEXTS = ["Wash the filter every week.", "The pump is on the left.", "A plan of the house."]
NAMES = {"titles": ["Filter", None, ""], "ids": ["f", "p", "h"]}


@pytest.fixture(autouse=True)
def encoder(monkeypatch, fresh_cache):
    return install(monkeypatch, fresh_cache)


class Llm(FakeLLM):
    """Cites the first source that has the word filter; counts how often it was closed."""

    def __init__(self):
        super().__init__(self.say, self.judge)
        self.closed = 0

    @staticmethod
    def say(prompt):
        numbers = re.findall(r"(?m)^\[(\d+)\] .*filter", prompt)
        return (f"Every week [{numbers[0]}]." if numbers else "Not found.", -1.0)

    @staticmethod
    def judge(prompt, word):
        return (-0.1 if ("pump is" in prompt) == (word.strip() == "Yes") else -3.0,)

    def close(self):
        self.closed += 1


@pytest.fixture
def corpus():
    return mmqa.open_corpus(TEXTS, **NAMES, pictures=[None, None, picture()])


def ids(found):
    return [one.source.id for one in found]


def test_importing_the_package_imports_no_jax():
    code = (
        "import sys, mmqa_jax as mmqa; dir(mmqa); assert mmqa.__version__\n"
        "print([m for m in ('jax', 'transformers', 'numpy', 'mmqa_jax.api.answers') if m in sys.modules])\n"
        "import types, mmqa_jax.core; given = sys.modules['mmqa_jax.api.answers'] = types.ModuleType('api')\n"
        "given.ask = 'asked'; print(mmqa.ask)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["[]", "asked"]


def test_the_public_names():
    defined = {
        name: value
        for module in (api, lists, ports)
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    elsewhere = {"UserError", "read_rankings", "write_rankings"}
    assert mmqa.__all__ == sorted(defined.keys() | elsewhere)
    assert all(getattr(mmqa, name) is value for name, value in defined.items())
    assert all(getattr(mmqa, name).__doc__ for name in mmqa.__all__)
    with pytest.raises(AttributeError, match="no attribute 'open_corpse'"):
        _ = mmqa.open_corpse


def test_a_corpus_of_lists(corpus, tmp_path):
    assert [(s.id, s.modality, s.title, s.text) for s in corpus.sources] == [
        ("f", "text", "Filter", TEXTS[0]), ("p", "text", "", TEXTS[1]), ("h", "image", "", TEXTS[2]),
    ]  # fmt: skip
    assert [corpus.picture(row) for row in range(3)] == [None, None, picture()]
    (tmp_path / "plan.png").write_bytes(picture())
    same = mmqa.open_corpus(TEXTS, **NAMES, pictures=[None, None, tmp_path / "plan.png"])
    assert same.picture(2) == picture()
    assert same.fingerprint == corpus.fingerprint
    others = [
        mmqa.open_corpus(TEXTS),
        mmqa.open_corpus(TEXTS, **NAMES),
        mmqa.open_corpus(TEXTS, **NAMES, pictures=[None, None, picture("blue")]),
        mmqa.open_corpus(TEXTS, ids=NAMES["ids"]),
    ]
    assert len({corpus.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert ids_of(others[0]) == ["0", "1", "2"]


def ids_of(corpus):
    return [source.id for source in corpus.sources]


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "datasets"])
def test_tables_are_taken_by_their_columns(library):
    columns = {
        "title": ["Peru", None],
        "text": ["Lima is the capital.", "Nairobi is."],
        "id": [7, 8],
    }
    table, queries, wrong = (
        {
            "pandas": lambda rows: pytest.importorskip("pandas").DataFrame(rows),
            "pyarrow": lambda rows: pytest.importorskip("pyarrow").table(rows),
            "datasets": lambda rows: pytest.importorskip("datasets").Dataset.from_dict(rows),
        }[library](rows)
        for rows in (columns, {"question": ["Nairobi"]}, {"body": ["a"]})
    )
    corpus = mmqa.open_corpus(table)
    rows = [(source.id, source.title, source.text) for source in corpus.sources]
    assert rows == [("7", "Peru", "Lima is the capital."), ("8", "", "Nairobi is.")]
    retriever = mmqa.open_retriever(corpus, "bm25")
    for asked in (queries, {"q1": "Nairobi"}, ["Nairobi"]):
        assert [[row.source.id for row in rows] for rows in retriever.search_many(asked)] == [["8"]]
    refuses("no column text .its columns are body", mmqa.open_corpus, wrong)
    refuses("no column question or query", retriever.search_many, wrong)


def test_a_folder_is_opened_as_ask_opens_it(tmp_path):
    folder = tmp_path / "manuals"
    folder.mkdir()
    (folder / "filter.txt").write_text(TEXTS[0])
    (folder / "empty.pdf").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"1 file is left out: empty\.pdf"):
        corpus = mmqa.open_corpus(folder)
    assert ids_of(corpus) == ["filter.txt#1"]
    assert mmqa.open_retriever(corpus).search("wash", 3)[0].source.extra["file"] == "filter.txt"


@pytest.mark.parametrize("method", ["bm25", "dense", "fused", "rrf"])
def test_every_method_finds(corpus, method):
    retriever = mmqa.open_retriever(corpus, method)
    found = retriever.search("Which filter to wash?", 2)
    assert ids(found)[0] == "f"
    assert found[0].score > 0
    assert len(found) == (1 if method == "bm25" else 2)  # no word in common: no result
    assert found[0].cited is None
    assert retriever.search_many(["wash", "pump"], 1) == [
        retriever.search("wash", 1), retriever.search("pump", 1)
    ]  # fmt: skip
    assert len(retriever.search("wash the pump of the house", 99)) == 3


def test_rankings_go_to_other_tools_and_back(corpus, tmp_path):
    rankings = mmqa.open_retriever(corpus, "bm25").rank({"q1": "pump", "q2": "unheard"}, 2)
    assert rankings[0].sources == ("p",)
    for name in ("run.trec", "run.jsonl"):
        mmqa.write_rankings(tmp_path / name, rankings)
        assert mmqa.read_rankings(tmp_path / name, ["q1", "q2"]) == rankings


def test_an_answer_cites_its_sources(corpus):
    llm = Llm()
    reader = mmqa.open_reader(corpus, llm)
    answer = mmqa.ask("When to wash the filter?", mmqa.open_retriever(corpus), reader, top_k=2)
    assert (answer.text, answer.found) == ("Every week.", True)
    assert [(one.cited, one.source.id) for one in answer.sources] == [(1, "f")]
    assert (ids(answer.read)[0], len(answer.read), answer.notes) == ("f", 2, ())
    assert answer.read[0].score == answer.sources[0].score == pytest.approx(0.67, abs=0.1)  # cosine
    assert f"[1] Filter: {TEXTS[0]}" in llm.text(llm.seen[0])
    assert answer.quote is None  # a model of unknown size
    llm.parameters, retriever = 1, mmqa.open_retriever(corpus)
    for below, count in ((None, 1), (0.0, 0)):
        asked = mmqa.ask("When to wash the filter?", retriever, reader, quote_below=below)
        assert [quote["text"] for quote in [asked.quote] if quote] == [TEXTS[0]] * count
    # The same from what a search has found, in the order that it is given in.
    found = mmqa.open_retriever(corpus, "dense").search("house", 3)[::-1]
    answer = reader.answer("When?", found)
    assert [(one.cited, one.source.id) for one in answer.sources] == [(1, "f")]
    assert ids(answer.read) == ids(found)


def test_a_question_that_nothing_answers_is_refused_unread(corpus):
    llm = Llm()
    reader = mmqa.open_reader(corpus, llm)
    for retriever, read in (("bm25", []), ("dense", ["f"])):
        answer = mmqa.ask("Composed?", mmqa.open_retriever(corpus, retriever), reader)
        assert (answer.text, answer.found, answer.sources) == (NOT_FOUND, False, ())
        assert ids(answer.read) == read  # the nearest, if there is one
        by_words = [note for note in answer.notes if note.startswith("Found by words alone")]
        assert bool(by_words) is (retriever == "bm25")
    assert not reader.answer("Composed?", []).found
    assert llm.seen == []
    retriever = mmqa.open_retriever(corpus, "dense")
    assert mmqa.ask("Composed?", retriever, reader, least_similarity=-1.0).found
    assert len(llm.seen) == 1


def test_a_questions_picture_reaches_the_model(corpus, tmp_path):
    llm = Llm()
    (tmp_path / "asked.png").write_bytes(picture("blue"))
    reader = mmqa.open_reader(corpus, llm, pictures="pixels")
    mmqa.ask("Composed?", mmqa.open_retriever(corpus), reader, picture=tmp_path / "asked.png")
    shown = [part.data for part in llm.seen[0].messages[0].pictures]
    assert shown == [picture(), picture("blue")]
    answer = mmqa.ask(
        "Wash?", mmqa.open_retriever(corpus), mmqa.open_reader(corpus, llm), picture=picture()
    )
    assert "was not shown the question's picture" in answer.notes[0]


def test_a_reranker_orders_what_was_found(corpus):
    reranker = mmqa.open_reranker(corpus, Llm())
    retriever = mmqa.open_retriever(corpus, "bm25", reranker=reranker)
    found = retriever.search("wash the filter of the pump", 2)
    assert (ids(found)[0], found[0].score) == ("p", pytest.approx(0.948, abs=1e-3))
    assert [
        one.source.id
        for one in mmqa.open_retriever(corpus, "bm25").search("wash the filter of the pump", 2)
    ] == ["f", "p"]


def test_a_reader_closes_the_model_that_it_has_opened(corpus, monkeypatch):
    opened = []

    def open_cached(spec, cache, flag):
        opened.append((Llm(), spec))
        return opened[-1][0]

    monkeypatch.setattr(api, "open_cached", open_cached)
    with mmqa.open_reader(corpus, "gpt", "openai") as reader:
        assert reader.llm.closed == 0
    ((llm, spec),) = opened
    assert (llm.closed, spec.model, spec.backend) == (1, "gpt", "openai")
    shared = mmqa.open_llm("smollm2")
    with mmqa.open_reader(corpus, shared):
        pass
    assert shared.closed == 0


def refusals(corpus):
    retriever, reader = mmqa.open_retriever(corpus, "bm25"), mmqa.open_reader(corpus, Llm())
    other = mmqa.open_corpus(TEXTS)
    wrong, mistyped = mmqa.UserError, TypeError
    return {
        "no such folder": (lambda: mmqa.open_corpus("nowhere"), wrong, r"open_corpus: texts=nowhere: no such folder"),
        "titles of a folder": (lambda: mmqa.open_corpus("x", titles=["y"]), wrong, "titles belong to a list of texts"),
        "pages of texts": (lambda: mmqa.open_corpus(["a"], pages="both"), wrong, "a list of texts was given"),
        "unknown pages": (lambda: mmqa.open_corpus("x", pages="all"), wrong, "--pages=all: one of text, pictures, both"),
        "no texts": (lambda: mmqa.open_corpus([]), wrong, "there are no texts"),
        "fewer titles": (lambda: mmqa.open_corpus(TEXTS, titles=["x"]), wrong, "3 texts but 1 titles"),
        "titles of one text": (lambda: mmqa.open_corpus(TEXTS, titles="abc"), mistyped, "titles: one text was given"),
        "a dict": (lambda: mmqa.open_corpus({"x": "y"}), mistyped, "texts are a dict, a list was expected"),
        "an empty text": (lambda: mmqa.open_corpus(["a", " "]), wrong, r"texts\[1\] is empty"),
        "a number": (lambda: mmqa.open_corpus(["a", 7]), mistyped, r"texts\[1\] is 7, a text was"),
        "the same id": (lambda: mmqa.open_corpus(["a", "b"], ids=["x", "x"]), wrong, r"ids\[1\] is 'x', as another"),
        "an empty id": (lambda: mmqa.open_corpus(["a"], ids=[""]), wrong, r"ids\[0\] is empty"),
        "no picture": (lambda: mmqa.open_corpus(["a"], pictures=["no.png"]), wrong, r"no\.png: no such picture file"),
        "a broken picture": (lambda: mmqa.open_corpus(["a"], pictures=[b"PNG"]), wrong, r"open_corpus: pictures\[0\]"),
        "a picture of another type": (lambda: mmqa.open_corpus(["a"], pictures=[7]), mistyped, r"pictures\[0\] is int"),
        "a folder's name as corpus": (lambda: mmqa.open_retriever("x"), mistyped, r"open one with open_corpus"),
        "unknown method": (lambda: mmqa.open_retriever(corpus, "minilm"), wrong, "'minilm' is not known; use one of bm25, dense"),
        "index of another method": (lambda: mmqa.open_retriever(corpus, index="runs/index"), wrong, "index=runs/index is of bm25, the method is fused; leave it out"),
        "unknown method with an index": (lambda: mmqa.open_retriever(corpus, "BM25", index="x"), wrong, "'BM25' is not known; use one of bm25, dense"),
        "weight": (lambda: mmqa.open_retriever(corpus, weight=2), wrong, "weight=2: a weight from 0"),
        "no words": (lambda: mmqa.open_retriever(mmqa.open_corpus(["?"]), "bm25"), wrong, "contains a word"),
        "many at once": (lambda: retriever.search(["a", "b"]), mistyped, "many to Retriever.search_many"),
        "one as many": (lambda: retriever.search_many("abc"), mistyped, "one text was given"),
        "rank without ids": (lambda: retriever.rank(["a"]), mistyped, "a dict of id -> query"),
        "top_k": (lambda: retriever.search("a", 0), wrong, "top_k=0: at least 1"),
        "empty query": (lambda: retriever.search(" "), wrong, "the question is empty"),
        "unknown backend": (lambda: mmqa.open_reader(corpus, "x", "vllm"), wrong, "backend 'vllm' is not known"),
        "no such model": (lambda: mmqa.open_reader(corpus, "nowhere"), wrong, "model=nowhere: no such file"),
        "a model's name to rerank": (lambda: mmqa.open_reranker(corpus, "x"), mistyped, r"open_llm\('x'\)"),
        "parts swapped": (lambda: mmqa.ask("a", reader, retriever), mistyped, "Reader and Retriever were given"),
        "two corpora": (lambda: mmqa.ask("a", mmqa.open_retriever(other, "bm25"), reader), wrong, "of two corpora"),
        "sources of another corpus": (
            lambda: reader.answer("a", mmqa.open_retriever(other, "bm25").search("pump")), wrong, "source '1' is not in the reader's corpus",
        ),
        "a text as sources": (lambda: reader.answer("a", "b"), mistyped, "one text was given"),
        "a broken picture of a question": (lambda: mmqa.ask("a", retriever, reader, picture=b"x"), wrong, "ask: the picture"),
    }  # fmt: skip


def test_wrong_calls_say_what_to_do(corpus):
    for call, error, message in refusals(corpus).values():
        with pytest.raises(error, match=message):
            call()
