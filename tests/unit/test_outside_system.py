"""A system of a user's own: one config file outside of the package, whose rows `mmqa run` runs."""

import pytest
from cli_runs import ROOT, done, rows_of

pytestmark = pytest.mark.usefixtures("quiet")

OWN = '''
"""Answers with the title of the best source."""

from pathlib import Path

from mmqa_jax.core.config import load_module
from mmqa_jax.data.schema import Prediction
from mmqa_jax.papers.setting import Setting
from mmqa_jax.runs.row import OwnSystem

rows = load_module(Path("ROOT/configs/rows.py"))
MODES = ("bm25",)


def answer_by_title(questions, corpus, retriever, *, top_k: int = 2):
    found = retriever.search(questions, top_k)
    titles = [[corpus.sources[corpus.row[name]].title for name in one.sources] for one in found]
    return [
        Prediction(one.question_id, " ".join(own), one.sources, one.scores)
        for one, own in zip(found, titles)
    ]


class Titles(OwnSystem):
    name = "titles"
    SETTINGS = {"by_title": Setting(answer_by_title)}


def get_config(mode="bm25"):
    row = {"setting": "by_title", "parts": {"retriever": {"method": "bm25"}}}
    return rows.make_row(
        mode, row, system="titles", dataset="atlas", data="", split="test", made_by={}
    )
'''


@pytest.fixture
def own(tmp_path):
    """The config file."""
    (tmp_path / "own.py").write_text(OWN.replace("ROOT", str(ROOT)))
    return tmp_path / "own.py"


def test_its_row_is_run_and_goes_on(own, data, tmp_path):
    flags = [f"--config={own}:bm25", f"--config.data.dir={data}", f"--workdir={tmp_path / 'run'}"]
    flags.append("--config.scoring.lemmatizer=none")
    scores = done("run", *flags, "--config.options.top_k=1")
    assert scores["row"] == "bm25"
    first = rows_of(tmp_path / "run" / "predictions.jsonl")
    assert len(first) == 5
    assert all(len(row["sources"]) <= 1 for row in first)
    assert any(row["answer"] for row in first)
    assert done("run", *flags, "--config.options.top_k=1")["scores"] == scores["scores"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--config.system=title", r"system=title: use one of webqa, .*titles"),
        ("--config.options.top_k=0", r"options\.top_k=0: at least 1 was expected"),
        ("--config.parts.retriever.method=dens", r"method='dens': .*did you mean 'dense'"),
    ],
)
def test_its_mistakes_are_named_as_those_of_others(own, data, refused, tmp_path, change, message):
    flags = f"--config={own}:bm25", f"--config.data.dir={data}", f"--workdir={tmp_path / 'run'}"
    refused("run", *flags, change, message=message)
