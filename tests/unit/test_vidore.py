"""ViDoRe: its sets as Parquet, nDCG equal to pytrec_eval's with ties, MTEB's results."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_runs import ROOT, done, mmqa, png

from mmqa_jax.benchmarks.vidore import read_vidore, score_vidore
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction, Question
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

PAGES = ["The plant made 5 GW of power.", "Staff costs rose in 2023.", "Holidays and leave."]
LANGUAGES = ("english", "french")


def write_set(folder: Path, key: str = "corpus_id", query: str = "query_id") -> Path:
    """A tiny set in the layout of v3, or with hyphens of v1 and v2."""
    new = key == "corpus_id"
    pages = {
        key: list(range(len(PAGES))),
        "image": [{"bytes": png((n, 0, 0)), "path": None} for n in range(len(PAGES))],
        **(
            {"markdown": PAGES, "doc_id": ["d"] * 3, "page_number_in_doc": [1, 2, 3]} if new else {}
        ),
    }
    queries = {
        query: [0, 1, 2],
        "query": ["How much power?", "Combien de puissance?", "nobody asks"],
        "language": ["english", "french", "english"],
        **({"answer": ["5 GW", "5 GW", None], "query_types": [["open"]] * 3} if new else {}),
    }
    qrels = {query: [0, 0, 1, 1], key: [0, 2, 0, 1], "score": [2, 1, 2, 0]}
    for name, columns in (("corpus", pages), ("queries", queries), ("qrels", qrels)):
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / name / "test-00000-of-00001.parquet")
    return folder


@pytest.fixture
def raw(tmp_path):
    return write_set(tmp_path / "vidore_v3_hr")


def test_pages_as_pictures_text_or_both(raw, tmp_path):
    found = {}
    for pages in ("", "text", "both"):
        flag = [f"--pages={pages}"] if pages else []
        out = tmp_path / f"out{pages}"
        ended = mmqa("prepare", "vidore", f"--raw={raw}", f"--out={out}", *flag, "--json")
        assert ended.code == 0, ended.err
        found[pages] = open_corpus(out)
    page = found[""].sources[1]
    assert (page.id, page.modality, page.text) == ("vidore_v3_hr/1", "image", "")
    assert page.extra == {"file": "d", "page": 2}
    assert found[""].picture(1) == png((1, 0, 0))
    page = found["text"].sources[1]
    assert (page.modality, page.text, page.image) == ("text", PAGES[1], None)
    page = found["both"].sources[1]
    assert (page.modality, page.text, found["both"].picture(1)) == (
        "image", PAGES[1], png((1, 0, 0)),
    )  # fmt: skip
    first, french, unjudged = found[""].questions("test")
    assert (first.positives, first.extra["grades"]) == (
        ("vidore_v3_hr/0", "vidore_v3_hr/2"), [2, 1],
    )  # fmt: skip
    assert (first.answers, first.extra["query_types"]) == (("5 GW",), ["open"])
    assert (french.positives, french.extra["language"]) == (("vidore_v3_hr/0",), "french")
    assert (unjudged.positives, unjudged.answers) == ((), ())


def test_the_hubs_cache_and_the_older_layout(tmp_path):
    cache = tmp_path / "datasets--vidore--esg_reports_v2" / "snapshots" / "abc"
    write_set(cache, "corpus-id", "query-id")
    ended = mmqa("prepare", "vidore", f"--raw={cache}", f"--out={tmp_path / 'out'}")
    assert ended.code == 0, ended.err
    assert open_corpus(tmp_path / "out").questions()[0].category == "esg_reports_v2"
    flags = f"--raw={cache}", f"--out={tmp_path / 'text'}", "--pages=text"
    ended = mmqa("prepare", "vidore", *flags)
    assert ended.code == 2
    assert "no text of its pages" in ended.err


def test_box_f1_is_counted_in_pixels(tmp_path):
    """A page's rectangles as masks, one an annotator; the best of them counts."""
    rng = np.random.default_rng(3)

    def draw():
        corners, sizes = rng.integers(0, 20, 2), rng.integers(1, 20, 2)
        return [int(edge) for edge in (*corners, *(corners + sizes))]

    def mask(rectangles):
        grid = np.zeros((40, 40), bool)
        for left, top, right, bottom in rectangles:
            grid[top:bottom, left:right] = True
        return grid

    folder = write_set(tmp_path / "vidore_v3_hr")
    file = folder / "qrels/test-00000-of-00001.parquet"
    drawn = [[[who, *draw()] for who in (0, 0, 1, 2)] for _ in range(3)] + [[]]
    names = ("annotator", "x1", "y1", "x2", "y2")
    column = [[dict(zip(names, box, strict=True)) for box in page] for page in drawn]
    pq.write_table(pq.read_table(file).append_column("bounding_boxes", pa.array(column)), file)
    done("prepare", "vidore", f"--raw={folder}", f"--out={tmp_path / 'out'}")
    cited = [[draw(), draw()], [], [draw()]]  # of the second page: nothing
    pages = [("0", "0"), ("0", "2"), ("1", "0")]
    expected = []
    for (_, _), boxes, page in zip(pages, cited, drawn[:3], strict=True):
        ours, best = mask(boxes), 0.0
        for who in (0, 1, 2):
            theirs = mask([box[1:] for box in page if box[0] == who])
            best = max(best, 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()))
        expected.append(best)
    assert 0 < np.mean(expected) < 1
    lines = [
        {"question_id": f"vidore_v3_hr/{n}", "sources": ["vidore_v3_hr/0"],
         "boxes": {f"vidore_v3_hr/{page}": boxes for (query, page), boxes in zip(pages, cited, strict=True) if query == n}}
        for n in ("0", "1")
    ]  # fmt: skip
    file = tmp_path / "predictions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    flags = f"--references={tmp_path / 'out'}", f"--predictions={file}"
    (note,) = [n for n in done("evaluate", "vidore", *flags, "--json")["notes"] if "box F1" in n]
    assert note == f"box F1 of 3 pages with rectangles: {np.mean(expected):.4f}"
    file.write_text(json.dumps({**lines[0], "boxes": {"vidore_v3_hr/0": [[5, 0, 1, 9]]}}))
    ended = mmqa("evaluate", "vidore", *flags)
    assert (ended.code, "left before right" in ended.err) == (2, True)


def test_ndcg_is_pytrec_evals():
    """Graded pages, ties and scores that only float64 tells apart; MTEB takes its means of these."""
    import pytrec_eval

    rng = np.random.default_rng(0)
    questions, given, qrels, run = [], [], {}, {}
    for n in range(60):
        name = ("vidore_v3_hr", "esg_reports_v2")[n % 2]
        ids = [f"{name}/{one}" for one in rng.permutation(40)]
        grades = [int(one) for one in rng.integers(1, 4, size=rng.integers(1, 15))]
        scores = rng.integers(0, 6, size=30) / 6 + rng.choice([0, 1e-12], size=30)
        gold = dict(zip(rng.permutation(ids).tolist(), grades, strict=False))
        order = np.argsort(-scores, kind="stable")
        ranked, values = [ids[i] for i in order], tuple(float(scores[i]) for i in order)
        extra = {"language": LANGUAGES[n // 2 % 2], "grades": list(gold.values())}
        questions.append(
            Question(f"q{n}", "test", "?", category=name, positives=tuple(gold), extra=extra)
        )
        given.append(Prediction(f"q{n}", "", tuple(ranked), values))
        qrels[f"q{n}"], run[f"q{n}"] = gold, dict(zip(ranked, values, strict=True))
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.5,10"}).evaluate(run)
    evaluation = score_vidore(questions, given)
    (scores,) = evaluation.scored
    for k in (5, 10):
        expected = [theirs[question.id][f"ndcg_cut_{k}"] for question in questions]
        np.testing.assert_allclose(scores.per_question[f"vidore/ndcg@{k}"], expected, atol=1e-9)
    hr = [theirs[q.id]["ndcg_cut_10"] for q in questions if q.category == "vidore_v3_hr"]
    assert scores.by_category["vidore_v3_hr"]["vidore/official"] == pytest.approx(np.mean(hr))
    esg = [theirs[q.id]["ndcg_cut_5"] for q in questions if q.category == "esg_reports_v2"]
    assert scores.by_category["esg_reports_v2"]["vidore/official"] == pytest.approx(np.mean(esg))
    # The same number of questions in each language: MTEB's mean over languages is that of all.
    assert any(
        f"v2, average of 1 of 4 sets, nDCG@5: {100 * np.mean(esg):.2f} %" == note
        for note in evaluation.notes
    )


def test_sets_are_averaged_and_written_for_mteb(raw, tmp_path):
    other = write_set(tmp_path / "esg_reports_v2", "corpus-id", "query-id")
    data, runs = tmp_path / "data", tmp_path / "runs"
    runs.mkdir()
    for folder in (raw, other):
        mmqa("prepare", "vidore", f"--raw={folder}", f"--out={data / folder.name}")
        lines = [
            f"{folder.name}/0 Q0 {folder.name}/2 1 0.9 x",
            f"{folder.name}/0 Q0 {folder.name}/0 2 0.5 x",
            f"{folder.name}/1 Q0 {folder.name}/0 1 0.9 x",
        ]
        (runs / f"{folder.name}.trec").write_text("\n".join(lines))
    flags = f"--predictions={runs}", "--json"
    ended = mmqa("evaluate", "vidore", f"--references={data}", *flags)
    assert ended.code == 0, ended.err
    first = (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))
    assert ended.value["by_category"]["english"]["vidore/ndcg@5"] == pytest.approx(first)
    assert f"v3, average of 1 of 8 sets, nDCG@10: {50 * (1 + first):.2f} %" in ended.err
    written = tmp_path / "results.json"
    ended = mmqa("evaluate", "vidore", f"--references={data}", *flags, f"--submission={written}")
    assert ended.code == 2
    assert "MTEB has a file for each set" in ended.err
    flags = f"--predictions={runs / 'vidore_v3_hr.trec'}", f"--submission={written}", "--json"
    done("evaluate", "vidore", f"--references={data / 'vidore_v3_hr'}", *flags)
    content = json.loads(written.read_text())
    assert content["task_name"] == "Vidore3HrRetrieval"
    english, french = content["scores"]["test"]
    assert english == {
        "ndcg_at_5": round(first, 5), "ndcg_at_10": round(first, 5), "main_score": round(first, 5),
        "hf_subset": "english", "languages": ["eng-Latn"],
    }  # fmt: skip
    assert (french["hf_subset"], french["main_score"]) == ("french", 1)


def test_a_row_reads_the_text_of_pages(raw, tmp_path):
    data, run = tmp_path / "out", tmp_path / "run"
    mmqa("prepare", "vidore", f"--raw={raw}", f"--out={data}", "--pages=text")
    config = f"--config={ROOT}/configs/vidore/tables.py:bm25_vidore_v3_hr"
    ended = done("run", config, f"--config.data.dir={data}", f"--workdir={run}", "--json")
    # Page 0 alone shares words with the English question; none with the French one.
    assert ended["scores"]["vidore/official"] == pytest.approx(1 / (1 + 0.5 / np.log2(3)) / 2)
    assert ended["n"] == 2


@pytest.mark.parametrize(
    ("part", "columns", "words"),
    [
        ("qrels", {"query_id": [0], "corpus_id": [9], "score": [1]}, ("row 0", "page", "/9")),
        ("qrels", {"query_id": [0], "corpus_id": [0], "score": [0.5]}, ("row 0", "0.5")),
        ("qrels", {"query_id": [0], "corpus_id": [0], "score": [np.nan]}, ("row 0", "is nan; a")),
        ("qrels", {"query_id": [0], "corpus_id": [0], "score": [np.inf]}, ("row 0", "is inf; a")),
        ("queries", {"query_id": [""], "query": ["a"]}, ("row 0", "query_id is ''; a number or")),
        (
            "corpus",
            {"corpus_id": [0, 0], "image": 2 * [{"bytes": b"", "path": None}]},
            ("row 1", "corpus_id 'vidore_v3_hr/0' is there twice"),
        ),
        ("queries", {"query_id": [0], "query": [""]}, ("row 0", "query is ''")),
        ("queries", {"query_id": [0, 0], "query": ["a", "b"]}, ("row 1", "twice")),
        (
            "queries",
            {"query_id": [0], "query": ["a"], "language": [["french"]]},
            ("row 0", "language is ['french']; text was expected; fetch"),
        ),
        ("corpus", {"corpus_id": [0]}, ("no column image",)),
    ],
)
def test_malformed_files(raw, tmp_path, part, columns, words):
    pq.write_table(pa.table(columns), raw / part / "test-00000-of-00001.parquet")
    ended = mmqa("prepare", "vidore", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


def test_a_folder_that_lacks_a_part(raw):
    (raw / "qrels" / "test-00000-of-00001.parquet").unlink()
    refuses(r"vidore_v3_hr/qrels: holds no \.parquet file; fetch the", read_vidore, raw)


def test_text_that_is_no_utf8_is_refused(raw):
    texts = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    path = raw / "queries" / "test-00000-of-00001.parquet"
    pq.write_table(pa.table({"query_id": [0], "query": texts}), path)
    refuses(r"\.parquet: cannot be read as Parquet \('utf-8' codec", read_vidore, raw)


def test_a_row_group_that_lacks_rows_is_refused(raw, monkeypatch):
    """As of a file whose counts of values are damaged."""
    whole = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda *args, **more: whole(*args, **more).slice(1)
    )
    refuses(r"\(row group 0 has other rows than it says", read_vidore, raw)


def test_another_set_or_flag_is_refused(raw, tmp_path):
    ended = mmqa("prepare", "vidore", f"--raw={raw.rename(tmp_path / 'x')}", "--out=o")
    assert ended.code == 2
    assert "is not named as a set of ViDoRe" in ended.err
    ended = mmqa("prepare", "vidore", f"--raw={tmp_path / 'x'}", "--out=o", "--chunk_words=9")
    assert ended.code == 2
    assert "--chunk_words" in ended.err
