"""Statistics of a corpus: counted by hand, and WebQA's own figures on its authors' val files."""

import csv
import json

import pytest
from cli_runs import done, write_documents
from cli_runs import question as asked
from shared_data import IMAGE_TSV, require

from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.evaluation.corpus_statistics import (
    PUBLISHED_QUESTIONS,
    Spread,
    corpus_statistics,
    keyword_coverage,
    statistics_plots,
    statistics_tables,
)
from mmqa_jax.evaluation.tables import to_markdown

SOURCES = [
    Source("p1", "image", "a red flag"),
    Source("p2", "image", "one two three four five"),
    Source("t1", "text", "snippet of four words"),
    Source("t2", "text", "two words"),
]
QUESTIONS = [
    Question(
        "a", "train", 'Is the "flag" red ?', answers=("Yes, it is.", "Yes"), keywords="Yes",
        category="YesNo", positives=("p1", "p2"), negatives=("t1", "t2"), extra={"topic": "flags"},
    ),
    Question(
        "b", "train", "Is the flag blue?", answers=("No.",), keywords="no", category="YesNo",
        positives=("p1",), negatives=("p2", "t1"), extra={"topic": "flags"},
    ),
    Question("c", "train", "How many?", keywords="no", category="number", positives=("p1",)),
    Question("d", "val", "Who?", keywords=" NO ", category="Others", positives=("p2",)),
    Question("e", "val", "What?", keywords="unseen", category="Others", positives=("p2",)),
    Question("f", "test", "Where is it?", category="shape", negatives=("p1", "t1")),  # hidden
    Question("g", "val", "Where?", answers=("There it is.",), positives=("t1",)),  # by its gold
]  # fmt: skip


def test_by_hand():
    found = corpus_statistics(Corpus(SOURCES, QUESTIONS))
    assert found.questions == {
        "image": {"train": 3, "val": 2, "test": 1},
        "text": {"train": 0, "val": 1, "test": 0},
    }
    lengths = found.lengths["image"]
    assert lengths["question"] == Spread(6, pytest.approx(16 / 6), pytest.approx(1.4907, abs=1e-4))
    assert lengths["answer"] == Spread(2, 2.0, 1.0)  # the first answer of each
    assert lengths["gold descriptions"] == Spread(6, pytest.approx(4.0), 1.0)
    assert lengths["other descriptions"] == Spread(1, 5.0, 0.0)  # not those of f: gold is hidden
    assert lengths["gold snippets"] is None
    assert lengths["other snippets"] == Spread(
        3, pytest.approx(10 / 3), pytest.approx(0.9428, abs=1e-4)
    )
    assert found.sources["image"] == (6 / 5, 3 / 5, 1 / 5, 1 / 5)
    assert found.sources["text"] == (1.0, 0.0, 0.0, 0.0)
    assert found.prefixes["image"][0] == ("is the flag", 2)
    assert found.topics == {"image": [("flags", 2)]}


def test_keywords_that_train_covers():
    """`no` is train's most frequent, before `yes`: half of val; test hides its keywords."""
    found = corpus_statistics(Corpus(SOURCES, QUESTIONS))
    assert (found.coverage_of, found.coverage) == ("val", {1: 0.5, 2: 0.5})
    assert keyword_coverage([q for q in QUESTIONS if q.split != "train"]) == ("", {})
    (plot,) = statistics_plots(found)
    assert plot.log


def test_the_tables():
    found = corpus_statistics(Corpus(SOURCES, QUESTIONS))
    plain, beside = ("\n".join(map(to_markdown, statistics_tables(found, published=own)))
                     for own in (False, True))  # fmt: skip
    assert "| image | 3 | 2 | 1 |" in plain
    assert "published" not in plain
    assert "| image, published | 18,954 | 2,511 | 3,464 |" in beside
    assert (
        "| text, published | 18.6 ± 8 | 10.7 ± 10 | – | 14.1 ± 13 | 45.3 ± 12 | 38.3 ± 10 |"
        in beside
    )
    assert json.loads(json.dumps(found.to_json()))["coverage_of"] == "val"


@pytest.mark.usefixtures("quiet")
def test_prepare_with_a_report(tmp_path, refused):
    rows = [asked(0, "train", "Hav"), asked(0, "val", "Gondal")]
    raw, out = write_documents(tmp_path / "raw", rows), tmp_path / "out"
    prepare = ("prepare", "corpus", f"--raw={raw}", f"--out={out}")
    result = done(*prepare, "--report")
    assert result["counts"]["questions"] == 2
    found = result["statistics"]
    assert found["questions"]["text"] == {"train": 1, "val": 1, "test": 0}
    assert found["prefixes"]["text"] == [["what is the", 2]]
    assert read_json(out / "statistics.json")["sources"] == {"text": found["sources"]["text"]}
    page = (out / "report.html").read_text()
    assert "Lengths in words (table 3)" in page
    assert "published" not in page
    (out / "report.html").unlink()
    again = done(*prepare, "--report")  # of the corpus that is there
    assert again["statistics"] == found
    assert (out / "report.html").read_text() == page
    refused(*prepare, message=r"already holds a prepared corpus")
    refused("prepare", "webqa", f"--raw={raw}", f"--out={out}", "--report",
            message=r"holds the corpus raw, not webqa")  # fmt: skip


def test_the_papers_figures_on_the_authors_val_files():
    """Table 4's val column, and table 3's length of answers to image questions (all splits)."""
    require(IMAGE_TSV)
    with IMAGE_TSV.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    questions = [
        Question(row["Guid"], "val", row["Q"], answers=tuple(json.loads(row["A"])),
                 keywords=row["Keywords_A"], category=row["Qcate"])
        for row in rows
    ]  # fmt: skip
    found = corpus_statistics(Corpus([], questions))
    assert found.questions["image"]["val"] == PUBLISHED_QUESTIONS["image"][1]
    answers = found.lengths["image"]["answer"]
    assert answers.mean == pytest.approx(14.4, abs=0.5)
    assert round(answers.deviation) == 6
