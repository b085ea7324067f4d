"""The paper's settings are composed in papers/webqa.py; every verb goes through them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import mmqa
from row_runs import ROWS, row_flags

import mmqa_jax
from mmqa_jax.core.workdir import Workdir
from mmqa_jax.extensions import similarity
from mmqa_jax.papers import webqa

pytestmark = pytest.mark.usefixtures("quiet")

PACKAGE = Path(mmqa_jax.__file__).parent
# Methods of retrievers, rerankers and readers, and the steps between them.
METHODS = {"search", "search_within", "score", "score_batches", "answer", "answer_batches"}
STEPS = {
    *("select_sources", "gold_ranking", "restricted_candidates", "find_candidates"),
    *("without_own_source", "top", "rescored"),
}
# The settings, our additions to them, and parts that only pass a call on.
COMPOSING = {"papers/webqa.py", "runs/resumable.py"}
ALLOWED = {
    ("runs/opened_parts.py", "_Recorded"),  # keeps what a part returned
    ("commands/evaluate.py", "scoring.score"),  # a benchmark's scores, no part
    ("runs/row.py", "benchmark.score"),  # the same
    ("commands/ask.py", "answerer.answer"),  # the demo's Answerer, no part
}
# Setting -> the function that finds its sources.
HALVES = {
    "oracle": "gold_ranking",
    "restricted": "select_restricted",
    "full_scale": "select_full_scale",
    "retrieved": "find_candidates",
    "select_restricted": "restricted_candidates",
    "select_full_scale": "find_candidates",
    "retrieve_restricted": "restricted_candidates",
    "retrieve_full_scale": "find_candidates",
}


class Reached(Exception):
    """A named setting was called."""


def verb_files() -> list[Path]:
    """What may call settings, but compose none."""
    files = sorted(
        [*PACKAGE.glob("commands/*.py"), *PACKAGE.glob("papers/*.py"), *PACKAGE.glob("runs/*.py")]
    )
    return [file for file in files if str(file.relative_to(PACKAGE)) not in COMPOSING]


def compositions(name: str, source: str) -> Iterator[str]:
    """Calls of a part's method, uses of the steps between parts, as `FILE: CALL`."""

    def walk(node: ast.AST, inside: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, child.name)
                continue
            if isinstance(child, ast.alias) and child.name in STEPS:
                yield f"{name}: import {child.name}"
            if isinstance(child, ast.Call):
                called = ast.unparse(child.func)
                method = isinstance(child.func, ast.Attribute) and child.func.attr in METHODS
                step = called.rpartition(".")[2] in STEPS
                named = not {(name, inside), (name, called)} & ALLOWED
                if (method or step) and named and not called.startswith("re."):
                    yield f"{name}: {called}"
            yield from walk(child, inside)

    return walk(ast.parse(source), "")


def test_no_setting_is_composed_elsewhere():
    assert len(verb_files()) > 25
    found = []
    for file in verb_files():
        source = file.read_text(encoding="utf-8")
        found += compositions(str(file.relative_to(PACKAGE)), source)
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("reader.answer(questions, cited)", "reader.answer"),
        ("def run():\n    return self._reranker.score(q, c)", "self._reranker.score"),
        (
            "found = open_retriever(corpus, spec).search(q, 20)",
            "open_retriever(corpus, spec).search",
        ),
        ("cited = select_sources(relevance, 0.2)", "select_sources"),
        ("webqa.restricted_candidates(q, corpus)", "webqa.restricted_candidates"),
        ("from mmqa_jax.papers.webqa import gold_ranking as gold", "import gold_ranking"),
        ("webqa.answer_oracle(questions, reader)", None),
        ("re.search('a', text)", None),
        ("class _Recorded:\n    def answer(self):\n        self.part.answer()", "self.part.answer"),
    ],
)
def test_what_counts_as_a_composition(source, expected):
    """The test above would pass if nothing did."""
    found = list(compositions("commands/new.py", source))
    assert found == ([] if expected is None else [f"commands/new.py: {expected}"])


def test_the_settings_of_run_are_the_named_functions():
    for setting in webqa.SETTINGS.values():
        assert getattr(webqa, setting.answer.__name__) is setting.answer


@pytest.fixture
def reaches(monkeypatch):
    """Whether a verb calls a named function, in place of which a sentinel is raised."""

    def check(module, name: str, *arguments: str | Path) -> None:
        original = getattr(module, name)

        @functools.wraps(original)  # `mmqa run` reads the signature
        def reached(*_, **__):
            raise Reached(name)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, reached)
            for name_of, setting in webqa.SETTINGS.items():
                if setting.answer is original:
                    changed = dataclasses.replace(setting, answer=reached)
                    patch.setitem(webqa.SETTINGS, name_of, changed)
            with pytest.raises(Reached, match=f"^{name}$"):
                mmqa(*arguments)

    return check


@pytest.mark.parametrize(
    ("sources", "setting"),
    [
        ("oracle", "answer_oracle"),
        ("none", "answer_question_only"),
        ("file", "answer_selected"),
    ],
)
def test_answer(sources, setting, wrong, bm25, reaches):
    given = bm25 if sources == "file" else sources
    reaches(webqa, setting, *wrong["answer"], f"--sources={given}")


@pytest.mark.parametrize(
    ("candidates", "setting"), [("restricted", "read_restricted"), ("file", "read_candidates")]
)
@pytest.mark.parametrize("second_hop", [False, True])
def test_rerank(candidates, setting, second_hop, wrong, bm25, models, index, reaches):
    given = bm25 if candidates == "file" else candidates
    flags = [*wrong["rerank"], f"--candidates={given}"]
    if second_hop:
        flags += [f"--retriever={models / 'contrastive'}", f"--index={index}"]
    reaches(similarity, setting, *flags)
    if candidates == "restricted":  # which finds them as the restricted setting does
        reaches(webqa, "restricted_candidates", *flags)


def test_rerank_of_the_whole_collection(wrong, reaches):
    reaches(similarity, "read_all", *wrong["rerank"], "--candidates=all")


@pytest.mark.parametrize(
    ("candidates", "setting"),
    [("all", "retrieve_full_scale"), ("restricted", "retrieve_restricted")],
)
@pytest.mark.parametrize("method", ["bm25", "dense"])
def test_search(method, candidates, setting, wrong, reaches):
    reaches(webqa, setting, *wrong["search"], f"--method={method}", f"--candidates={candidates}")


@pytest.mark.parametrize("name", ROWS)
def test_run(name, data, models, index, reaches, tmp_path):
    setting = webqa.SETTINGS[ROWS[name]].answer.__name__
    reaches(webqa, setting, *row_flags(name, tmp_path / "run", data, models, index))


@pytest.mark.parametrize("name", [name for name, setting in ROWS.items() if setting in HALVES])
def test_settings_share_their_halves(name, data, models, index, reaches, tmp_path):
    """Answers are from the sources that table 7's settings select."""
    half = HALVES[ROWS[name]]
    reaches(webqa, half, *row_flags(name, tmp_path / "run", data, models, index))


@pytest.fixture
def demo(data, models, index, tmp_path):
    """What `mmqa ask` needs of a finished demo."""
    folder = tmp_path / "demo"
    (folder / "retrieval").mkdir(parents=True)
    for name, target in (("data", data), ("index", index)):
        (folder / name).symlink_to(target)
    for task in ("contrastive", "rerank", "answer"):
        (folder / task).symlink_to(models / task)
    with Workdir(folder) as workdir:
        workdir.claim({"select": {"top_k": 3}})
    tuned = {"weight": 20.0, "threshold": 0.3, "vlp_threshold": 0.5}
    (folder / "retrieval" / "selection.json").write_text(json.dumps(tuned))
    return folder


def test_ask(demo, reaches, monkeypatch):
    flags = ("ask", f"--workdir={demo}", "What is the capital of Hav?")
    reaches(webqa, "answer_full_scale", *flags)
    reaches(webqa, "select_full_scale", *flags)
    # The options are the demo's, and the answer is the setting's.
    options = {}

    def full_scale(questions, retriever, reranker, reader, **given):
        options.update(given)
        return original(questions, retriever, reranker, reader, **given)

    original = webqa.answer_full_scale
    monkeypatch.setattr(webqa, "answer_full_scale", full_scale)
    ended = mmqa(*flags, "--json")
    assert ended.code == 0, ended.err
    assert options == {"top_k": 3, "threshold": 0.3, "select": "best"}
    (answer,) = ended.value["answers"]
    assert 1 <= len(answer["sources"]) <= 2
