"""`mmqa run` of rows whose reader, and in two whose reranker, is a language model."""

import html
import re

import pytest
from cli_runs import LANDS, ROOT, TEST, done, mmqa, rows_of, tree
from fake_llm import FakeLLM

from mmqa_jax.core.config import load_config
from mmqa_jax.core.files import read_json
from mmqa_jax.data.schema import NOT_FOUND
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.runs import parts
from mmqa_jax.runs.row import read_row
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TABLES = f"{ROOT}/configs/atlas/tables.py"
CANDIDATES = {row["id"]: [*row["positives"], *row["negatives"]] for row in TEST}


def helps(prompt: str, option: str) -> tuple[float, ...]:
    """Yes where the source has the land that is asked for in its title."""
    asked, source = re.search(r"Question: (.*)\n\nSource: (.*)\n", prompt).groups()
    is_right = any(land in asked and source.startswith(land) for land in LANDS)
    return (-0.1 if (option.strip() == "Yes") == is_right else -4.0,)


@pytest.fixture
def llm(monkeypatch):
    """The rows' language model: it cites the first source, and finds all that it is shown good."""
    made = FakeLLM(lambda prompt: ("Pelot [1]." if "[1]" in prompt else "Pelot.", -1.0), helps)
    made.fingerprint = "fake"
    monkeypatch.setattr(
        parts, "open_llm", lambda spec, cache, flag: Cached(made, ResponseCache(cache))
    )
    return made


def flags(name: str, data, workdir, **values) -> list[str]:
    values = {"data.dir": data, **values}
    if "retriever" in load_config(f"{TABLES}:{name}").parts:
        bm25 = {"method": "bm25", "model": "", "index": "", "second_hop": False}
        values |= {f"parts.retriever.{key}": value for key, value in bm25.items()}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return ["run", f"--config={TABLES}:{name}", f"--workdir={workdir}", *overrides]


@pytest.mark.parametrize("name", ["question_only", "oracle", "retrieved", "restricted", "reranked"])
def test_webqas_settings(name, data, llm, tmp_path):
    scores = done(*flags(f"llm_{name}", data, tmp_path / "run"))
    predictions = rows_of(tmp_path / "run" / "predictions.jsonl")
    gold = {row["id"]: row["positives"] for row in TEST}
    assert len(predictions) == len(TEST) == scores["questions"]
    for one in predictions:
        if name == "restricted" and not CANDIDATES[one["question_id"]]:
            continue
        assert one["answer"] == "Pelot."
        assert one["sources"] == one["read"][:1]
        reads = {
            "question_only": one["read"] == [],
            "oracle": one["read"] == gold[one["question_id"]],
            "retrieved": 0 < len(one["read"]) <= 5,
        }
        assert reads.get(name, 1 <= len(one["read"]) <= 2), one
    assert "webqa_acc/no_lemma" in scores["scores"]
    assert ("citation_recall" in scores["scores"]) == (name != "question_only")
    assert ("source_f1/official" in scores["scores"]) == (
        name in ("retrieved", "restricted", "reranked")
    )
    asked = len([query for query in llm.seen if not isinstance(query.id, tuple)])
    assert scores["llm"]["calls"] >= asked == len(TEST)
    assert scores["prompts"]["uncited"] == 0
    report = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "Answer the question" in report


def test_a_corpus_of_ones_own(data, llm, tmp_path):
    config = f"--config={ROOT}/configs/corpus.py:llm_reranked"
    scores = done("run", config, f"--config.data.dir={data}", f"--workdir={tmp_path / 'run'}")
    assert (scores["dataset"], scores["questions"]) == ("corpus", len(TEST))
    assert scores["scores"]["citation_recall"] > 0


def test_the_reranker_decides_what_is_read(data, llm, tmp_path):
    done(*flags("llm_restricted", data, tmp_path / "run"))
    relevance = rows_of(tmp_path / "run" / "retrieval" / "relevance.jsonl")
    predictions = rows_of(tmp_path / "run" / "predictions.jsonl")
    for ranking, prediction in zip(relevance, predictions, strict=True):
        assert all(0 <= score <= 1 for score in ranking["scores"])
        kept = [n for n, s in zip(ranking["sources"], ranking["scores"], strict=True) if s >= 0.2]
        assert prediction["read"] == (kept[:2] or ranking["sources"][:1])


def test_pairs_without_a_score_are_counted(data, llm, tmp_path):
    pairs = [(TEST[0]["id"], source) for source in CANDIDATES[TEST[0]["id"]][:2]]
    llm.fail(pairs)
    scores = done(*flags("llm_restricted", data, tmp_path / "run"))
    (note,) = (note for note in scores["notes"] if "without a score" in note)
    assert note.endswith("count as 0: 2")


def test_questions_without_sources_may_be_refused(data, llm, tmp_path):
    """A threshold that no source reaches, and a reader that then asks nothing."""
    changes = {"options.select": "above", "options.threshold": 0.99}
    run = flags("llm_restricted", data, tmp_path / "run", **changes)
    scores = done(*run, "--config.parts.reader.refuse_without_sources=True")
    assert scores["prompts"]["refused"] == len(TEST)
    for one in rows_of(tmp_path / "run" / "predictions.jsonl"):
        assert (one["answer"], one["sources"]) == (NOT_FOUND, [])
    assert {type(query).__name__ for query in llm.seen} == {"Choices"}


def test_a_finished_run_asks_nothing_again(data, llm, tmp_path):
    run = flags("llm_oracle", data, tmp_path / "run")
    first = done(*run)
    llm.seen.clear()
    (tmp_path / "run" / "scores.json").unlink()
    assert done(*run) == first == read_json(tmp_path / "run" / "scores.json")
    assert llm.seen == []


def test_a_row_that_only_reranks_does_not_answer():
    config = load_config(f"{TABLES}:llm_restricted")
    config.setting = "select_restricted"
    with config.unlocked():
        del config.parts["reader"]
    row = read_row(config)
    assert not row.answers
    assert row.finds_sources
    assert row.llm == "smollm2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reader.template=reader.sight", "reader.sight: no such prompt template; use one of"),
        ("reader.pictures=all", "parts.reader.pictures='all': one of auto, pixels, captions"),
        ("reranker.template=reader.sight", "reader.sight: no such prompt template; use one of"),
    ],
)
def test_bad_values_are_refused(change, message, data, llm, tmp_path, refused):
    run = flags("llm_restricted", data, tmp_path / "run")
    refused(*run, f"--config.parts.{change}", message=re.escape(message))
    assert llm.seen == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reader": {"model": "m"}, "llm": {"model": "x"}}, "parts.llm: unknown"),
        ({"reader": {}}, "parts.reader.model is missing"),
        ({"reader": {"model": 5}, "llm": {"model": "x"}}, "parts.llm: unknown"),
        ({"reader": {"modle": "m"}, "llm": {"model": "x"}}, "parts.reader.modle: unknown"),
        ({"reader": 5, "llm": {"model": "x"}}, "parts.llm: unknown|parts.reader=5"),
    ],
)
def test_a_reader_is_trained_or_the_rows_model(sections, message):
    config = load_config(f"{TABLES}:llm_oracle")
    with config.unlocked():
        config.parts = sections
    refuses(message, read_row, config)


def test_a_trained_reranker_and_a_model_that_reads():
    row = read_row(load_config(f"{TABLES}:llm_full_vlp"))
    kinds = {name: type(part).__name__ for name, part in row.parts.items()}
    assert kinds == {
        "retriever": "RetrieverSpec",
        "reranker": "RerankerSpec",
        "reader": "LLMReaderSpec",
        "llm": "LLMSpec",
    }


def test_no_such_model_leaves_nothing(data, tmp_path):
    before = tree(tmp_path)
    run = flags("llm_oracle", data, tmp_path / "run", **{"parts.llm.model": tmp_path / "none"})
    ended = mmqa(*run)
    assert (ended.code, tree(tmp_path)) == (2, before)
    assert "none" in ended.err
