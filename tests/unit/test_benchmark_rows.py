"""`mmqa run` of a row of each benchmark of search and embedding, on files as the authors publish them.

A tiny language model stands for SmolLM2. ViDoRe's row is run in test_vidore.py.
"""

import json

import pytest
from cli_runs import done, flags_with, of_engine
from document_files import pdf
from test_bright import write_task
from test_citevqa import SAMPLE as CITED
from test_citevqa import tag
from test_mmeb import CLASSES, FOUND, task
from test_mmlongbench import SAMPLE, UNANSWERABLE, write
from test_search_benchmarks import ENGLISH, FACT, NEWS, PICTURE, SEARCH, write_lines, write_table
from tiny_llm import write_folder

from mmqa_jax.benchmarks.benchmark import open_benchmark
from mmqa_jax.benchmarks.citevqa import read_citevqa, score_citevqa
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def dynvqa(raw):
    write_lines(raw / "DynVQA_en/DynVQA_en.202502.jsonl", ENGLISH)


def mmsearch(raw):
    write_table(raw / "end2end.parquet", [SEARCH, {**SEARCH, "sample_id": "news_2"}])


def fvqa(raw):
    write_table(raw / "fvqa_test.parquet", [FACT])


def livevqa(raw):
    news = raw / "liveVQA_benchmarks/News"
    (news / "News_imgs").mkdir(parents=True)
    (news / "News_imgs/cnn_1.png").write_bytes(PICTURE)
    (news / "benchmark.json").write_text(json.dumps([NEWS]))


def run(dataset, row, workdir, data, **values):
    """The result of a row."""
    flags = flags_with("run", f"{dataset}/tables.py:{row}", workdir, {"data.dir": data, **values})
    return done(*flags, "--json")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "llm"
    write_folder(folder)
    return {"parts.llm.model": folder, **of_engine()}


@pytest.mark.parametrize(
    ("write_files", "questions", "scorer"),
    [
        (dynvqa, 1, "dynvqa/recall"),
        (mmsearch, 2, "mmsearch/f1"),
        (fvqa, 1, "fvqa/em"),
        (livevqa, 2, "livevqa/em"),
    ],
    ids=["dynvqa", "mmsearch", "fvqa", "livevqa"],
)
def test_a_model_alone(write_files, questions, scorer, llm, tmp_path):
    name, raw = write_files.__name__, tmp_path / "raw"
    raw.mkdir()
    write_files(raw)
    done("prepare", name, f"--raw={raw}", f"--out={tmp_path / 'data'}")
    values = {**llm, "options.max_new_tokens": 2}
    result = run(name, "smollm2", tmp_path / "run", tmp_path / "data", **values)
    assert (result["dataset"], result["row"], result["n"]) == (name, "smollm2", questions)
    assert 0 <= result["scores"][scorer] <= 1


def test_documents_are_found_and_read(llm, tmp_path):
    raw = write(tmp_path / "raw", [SAMPLE, UNANSWERABLE])
    documents = raw / "data/documents"
    documents.mkdir()
    (documents / "report.txt").write_text("How many boats are there? There are 8 boats.\n")
    done("prepare", "mmlongbench", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    done("prepare", "folder", f"--raw={documents}", f"--out={tmp_path / 'documents'}")
    values = {**llm, "data.sources": tmp_path / "documents"}
    result = run("mmlongbench", "bm25_smollm2", tmp_path / "run", tmp_path / "data", **values)
    assert (result["n"], result["row"]) == (2, "bm25_smollm2")
    assert 0 <= result["scores"]["mmlongbench/score"] <= 1


def test_the_rectangles_of_cited_passages(llm, tmp_path):
    """Each answer cites the passage with its words."""
    raw = tmp_path / "CiteVQA"
    documents = raw / "data/pdf"
    documents.mkdir(parents=True)
    (documents / "a.pdf").write_bytes(pdf([[(20, 500, "There are eight green boats.")]]))
    (documents / "b.pdf").write_bytes(pdf([[(20, 300, "Nothing but sand and wind.")]]))
    done("prepare", "folder", f"--raw={documents}", f"--out={tmp_path / 'documents'}")
    (passage,) = [s for s in open_corpus(tmp_path / "documents").sources if "boats" in s.text]
    (place,), (width, height) = passage.extra["places"], passage.extra["page_size"]
    left, top, right, bottom = place["box"]
    gold = tag(1, *(1000 * n for n in (left / width, top / height, right / width, bottom / height)))
    asked = {**CITED, "Question": "How many green boats?", "answer_bboxes": f"Eight {gold}"}
    second = gold.replace("<bbox ", '<bbox doc="2" ')
    items = [
        {**asked, "index": 1, "PDF_Source": ["data/pdf/b.pdf", "data/pdf/a.pdf"],
         "answer_bboxes": f"Eight {second}"},
        {**asked, "index": 2, "PDF_Source": ["data/pdf/b.pdf"]},
        {**asked, "index": 3, "PDF_Source": ["data/pdf/a.pdf"], "answer_bboxes": tag(1, 0, 900, 9, 999)},
    ]  # fmt: skip
    (raw / "CiteVQA.json").write_text(json.dumps(items))
    done("prepare", "citevqa", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    values = {**llm, "data.sources": tmp_path / "documents", "options.top_k": 1}
    result = run("citevqa", "bm25_smollm2", tmp_path / "run", tmp_path / "data", **values)
    found = open_benchmark("citevqa").read_predictions(tmp_path / "run/predictions.jsonl", ())
    cited = [len(prediction.sources) for prediction in found]
    assert result["scores"]["citevqa/recall"] == pytest.approx(cited[0] / 3)
    # However many were cited by the model, the first source's rectangle is the gold one.
    questions = read_citevqa(raw).questions
    rows = [
        {
            "id": passage.id,
            "file": "a.pdf",
            "page": 1,
            "boxes": [place["box"]],
            "page_size": [width, height],
        }
    ]
    recalls = score_citevqa(
        questions, [Prediction(q.id, "8", trace={"evidence": rows}) for q in questions]
    )
    assert list(recalls.scored[0].per_question["citevqa/recall"]) == [1, 0, 0]


def test_bright_by_words(tmp_path):
    done(
        "prepare",
        "bright",
        f"--raw={write_task(tmp_path / 'BRIGHT')}",
        f"--out={tmp_path / 'data'}",
    )
    result = run("bright", "bm25_biology", tmp_path / "run", tmp_path / "data")
    # "plants" leads to the first question's document; the second shares no word with its own.
    assert result["scores"]["bright/ndcg@10"] == 0.5


def test_mmeb_by_words(tmp_path):
    """The candidate that shares the most words with the query is its first, of its own alone."""
    raw = task(tmp_path, "WebQA", {**FOUND, "tgt_img_path": [""] * 3}, CLASSES)
    done("prepare", "mmeb", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    result = run("mmeb", "bm25_WebQA", tmp_path / "run", tmp_path / "data")
    assert (result["n"], result["scores"]["mmeb/hit@1"]) == (2, 0.5)
