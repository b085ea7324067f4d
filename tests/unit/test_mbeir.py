"""M-BEIR: its files, its recall and errors as UniIR's code gives them, its run files."""

import json

import pytest
from cli_runs import ROOT, done, mmqa, png, write_rows

from mmqa_jax.benchmarks import mbeir
from mmqa_jax.core.config import config_beside
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.evaluation.retrieval import read_found
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

TEXTS = [
    {
        "did": "2:1",
        "txt": "the mask came out in 1985",
        "img_path": None,
        "modality": "text",
        "src_content": json.dumps({"snippet_id": "d5_1"}),
    },
    {"did": "2:2", "txt": "Bears are animals?", "modality": "text", "src_content": None},
]
PICTURES = [
    {
        "did": "2:7",
        "txt": "a bear",
        "img_path": "mbeir_images/webqa_images/30000007.jpg",
        "modality": "image,text",
        "src_content": json.dumps({"image_id": "30000007"}),
    },
    {"did": "7:3", "txt": None, "img_path": "mbeir_images/fiq/3.jpg", "modality": "image"},
]


def query(qid: str, text: str | None, positives: list[str], **more: object) -> dict:
    return {
        "qid": qid,
        "query_txt": text,
        "query_img_path": None,
        "query_modality": "text",
        "query_src_content": None,
        "pos_cand_list": positives,
        "neg_cand_list": [],
        **more,
    }


GUID = json.dumps({"Guid": "d5bc71b6", "Qcate": "text"})
WEBQA1 = [query("2:1", "when came the mask out?", ["2:1"], query_src_content=GUID)]
WEBQA2 = [query("2:4", "What is in the woods?", ["2:7"])]
FASHION = [
    query(
        "7:1",
        "is red",
        ["7:3"],
        query_img_path="mbeir_images/fiq/1.jpg",
        query_modality="image,text",
    )
]
HEADER = "query_modality\tcand_modality\tdataset_name\tdataset_id\tprompt_1\tprompt_2\n"


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "M-BEIR"
    for name in ("cand_pool/global", "cand_pool/local", "query/test", "query/val", "qrels/test"):
        (folder / name).mkdir(parents=True)
    for name in ("webqa_images/30000007.jpg", "fiq/1.jpg", "fiq/3.jpg"):
        path = folder / "mbeir_images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png((1, 2, 3)))
    pools = folder / "cand_pool"
    write_rows(pools / "global" / "mbeir_union_test_cand_pool.jsonl", [*TEXTS, *PICTURES])
    write_rows(pools / "local" / "mbeir_webqa_task1_cand_pool.jsonl", TEXTS)
    for name, rows in (
        ("webqa_task1", WEBQA1),
        ("webqa_task2", WEBQA2),
        ("fashioniq_task7", FASHION),
    ):
        write_rows(folder / "query" / "test" / f"mbeir_{name}_test.jsonl", rows)
    write_rows(folder / "query" / "val" / "mbeir_webqa_task1_val.jsonl", WEBQA1)
    judged = folder / "qrels" / "test" / "mbeir_webqa_task2_test_qrels.txt"
    judged.write_text("2:4 0 2:7 1 2\n2:4 0 2:1 0 2\n")
    lines = [
        "text\ttext\tWebQA\t2\tFind a passage\tretrieve text that answers",
        "text\timage,text\tWebQA\t2\tFind a captioned picture",
        "image,text\timage\tFashionIQ\t7\tFind such clothes",
    ]
    (folder / "instructions").mkdir()
    (folder / "instructions" / "query_instructions.tsv").write_text(HEADER + "\n".join(lines))
    return folder


def test_the_pool_of_all_sets(raw, tmp_path):
    ended = mmqa("prepare", "mbeir", f"--raw={raw}", f"--out={tmp_path / 'out'}", "--json")
    assert ended.code == 0, ended.err
    assert ended.value["found"]["candidates, image,text"] == 1
    corpus = open_corpus(tmp_path / "out")
    sources = {source.id: source for source in corpus.sources}
    assert sources["2:1"].text == "The mask came out in 1985."
    kinds = {name: mbeir.candidate_modality(source) for name, source in sources.items()}
    assert kinds == {"2:1": "text", "2:2": "text", "2:7": "image,text", "7:3": "image"}
    assert corpus.read_picture(sources["7:3"].image) == png((1, 2, 3))
    assert not corpus.questions("val")  # a pool of test
    questions = {question.id: question for question in corpus.questions("test")}
    assert questions["2:4"].question == "Find a captioned picture. What is in the woods?"
    assert questions["7:1"].question == "Find such clothes. is red."
    assert corpus.question_picture(questions["7:1"]) == png((1, 2, 3))
    assert {q.category for q in questions.values()} == {
        "webqa_task1", "webqa_task2", "fashioniq_task7",
    }  # fmt: skip
    # Its WebQA by the ids of WebQA's own release, as data/formats/webqa.py has them.
    assert questions["2:1"].extra["webqa_id"] == "d5bc71b6"
    assert (sources["2:1"].extra["webqa_id"], sources["2:7"].extra["webqa_id"]) == (
        "d5_1", "30000007",
    )  # fmt: skip


def test_the_pool_of_one_set(raw, tmp_path):
    pool = raw / "cand_pool" / "local" / "mbeir_webqa_task1_cand_pool.jsonl"
    (raw / "instructions" / "query_instructions.tsv").unlink()
    ended = mmqa("prepare", "mbeir", f"--raw={pool}", f"--out={tmp_path / 'out'}")
    assert ended.code == 0, ended.err
    assert "without instructions" in ended.err
    corpus = open_corpus(tmp_path / "out")
    assert [question.id for question in corpus.questions()] == ["val:2:1", "2:1"]
    assert corpus.questions("test")[0].question == "When came the mask out?"
    assert mbeir.dataset_of("val:2:1") == "webqa"


# format_string of UniIR's src/data/preprocessing/utils.py.
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, ""),
        (' "a bear" \r', "A bear."),
        ("who?", "Who?"),
        ("Done!", "Done!"),
        ("3 km", "3 km."),
        ('"', ""),
    ],
)
def test_sentences(text, sentence):
    assert mbeir.as_sentence(text) == sentence


# Rankings of made-up ids with what compute_recall_at_k of UniIR's mbeir_retriever.py gives of them.
GOLDEN = [
    ("webqa_task1", ["2:1", "2:5"], ["2:9", "2:5", "2:1", "2:3", "2:4"], {1: 0, 5: 1, 10: 1}),
    ("webqa_task1", ["2:6"], ["2:9", "2:8", "2:7", "2:5", "2:4", "2:6"], {1: 0, 5: 0, 10: 1}),
    ("mscoco_task0", ["9:1"], ["9:1"], {1: 1, 5: 1, 10: 1}),
    ("fashioniq_task7", ["7:6"], ["7:9", "7:8", "7:7", "7:5", "7:4", "7:6"], {1: 0, 5: 0, 10: 1}),
    ("fashion200k_task3", ["1:6"], ["1:1", "1:2"], {1: 0, 5: 0, 10: 0}),
]


def test_recall_is_the_authors():
    questions = [
        Question(f"{gold[0][0]}:{n}", "test", "?", category=name, positives=tuple(gold))
        for n, (name, gold, _, _) in enumerate(GOLDEN)
    ]
    given = [
        Prediction(question.id, "", tuple(ranked))
        for question, (_, _, ranked, _) in zip(questions, GOLDEN, strict=True)
    ]
    evaluation = mbeir.score_mbeir(questions, given)
    (scores,) = evaluation.scored
    for n, (name, _, _, recalls) in enumerate(GOLDEN):
        assert {k: scores.per_question[f"mbeir/recall@{k}"][n] for k in recalls} == recalls
        official = recalls[10 if name.startswith("fashion") else 5]
        assert scores.per_question["mbeir/official"][n] == official
    by_set = {name: row["mbeir/official"] for name, row in scores.by_category.items()}
    assert list(by_set)[:2] == ["mscoco_task0", "webqa_task1"]  # in UniIR's order
    assert (by_set["webqa_task1"], by_set["task 1: text to text"]) == (0.5, 0.5)
    # (1 + .5 + 1 + 0) / 4, each set alike
    assert any("average of 4 of 16 sets" in note and "62.50 %" in note for note in evaluation.notes)
    assert "the rankings hold 6 candidates at most" in evaluation.notes
    nothing = mbeir.score_mbeir(questions, [])
    assert set(nothing.scored[0].scores.values()) == {0}
    assert "the rankings hold 0 candidates at most" in nothing.notes


def test_errors_at_the_first_rank():
    """As run_automatic_error_analysis: modality first, then domain (wiki, news)."""
    sources = [
        Source("2:1", "text", "right."),
        Source("2:2", "text", "same domain."),
        Source("0:1", "text", "news."),
        Source("2:3", "image", "a picture.", image="x.jpg"),
        Source("6:1", "text", "InfoSeek is wiki too."),
    ]
    names = ["2:1", "2:2", "0:1", "2:3", "6:1"]
    questions = [
        Question(f"2:{n}", "test", "?", category="webqa_task1", positives=("2:1",))
        for n in range(len(names) + 1)
    ]
    given = [Prediction(q.id, "", (name,)) for q, name in zip(questions, names, strict=False)]
    (table,) = mbeir.first_errors(Corpus(sources), questions, given)
    assert table.rows == [["webqa_task1", 4, 0.25, 0.25, 0.5]]
    with pytest.raises(Exception, match="not in that pool"):
        mbeir.first_errors(Corpus(sources[:1]), questions, given)


def test_uniirs_runs_in_and_out(raw, tmp_path):
    data, runs = tmp_path / "out", tmp_path / "run_files"
    mmqa("prepare", "mbeir", f"--raw={raw}", f"--out={data}")
    runs.mkdir()
    (runs / "mbeir_webqa_task1_union_pool_test_k2_run.txt").write_text(
        "2:1 Q0 2:2 1 0.5 mbeir_webqa 1\n2:1 Q0 2:1 2 0.25 mbeir_webqa 1\n"
    )
    (runs / "mbeir_webqa_task2_union_pool_test_k2_run.txt").write_text(
        "2:4 Q0 2:1 1 0.5 mbeir_webqa 2\n"
    )
    flags = "evaluate", "mbeir", f"--references={data}", f"--predictions={runs}"
    written = tmp_path / "all_run.txt"
    ended = mmqa(*flags, f"--submission={written}", "--json")
    assert ended.code == 0, ended.err
    assert ended.value["scores"]["mbeir/official"] == pytest.approx(1 / 3)
    assert ended.value["by_category"]["webqa_task1"]["mbeir/recall@1"] == 0
    assert "wrong modality" in ended.out
    assert written.read_text().splitlines() == [
        "2:1 Q0 2:2 1 0.5 mbeir_webqa_task1_test 1",
        "2:1 Q0 2:1 2 0.25 mbeir_webqa_task1_test 1",
        "2:4 Q0 2:1 1 0.5 mbeir_webqa_task2_test 2",
    ]
    again = done("evaluate", "mbeir", f"--references={raw}", f"--predictions={written}", "--json")
    assert again["scores"] == ended.value["scores"]
    (runs / "other_run.txt").write_text("2:4 Q0 2:7 1 0.5 x 2\n")
    ended = mmqa(*flags)
    assert ended.code == 2
    assert "ranks question '2:4'" in ended.err
    qrels = raw / "qrels" / "test" / "mbeir_webqa_task2_test_qrels.txt"
    (runs / "other_run.txt").write_text("2:4 Q0 2:7 1 0.5 x 2\n")
    flags = f"--references={qrels}", f"--predictions={runs / 'other_run.txt'}", "--json"
    assert done("evaluate", "corpus", *flags)["scores"]["mrr"] == 1


def test_a_row_over_one_pool(raw, tmp_path):
    data, run = tmp_path / "out", tmp_path / "run"
    pool = raw / "cand_pool" / "local" / "mbeir_webqa_task1_cand_pool.jsonl"
    mmqa("prepare", "mbeir", f"--raw={pool}", f"--out={data}")
    config = f"--config={ROOT}/configs/mbeir/tables.py:bm25_webqa_task1"
    scores = done("run", config, f"--config.data.dir={data}", f"--workdir={run}", "--json")[
        "scores"
    ]
    assert scores["mbeir/official"] == 1
    assert not any(name.startswith("source_f1") for name in scores)
    assert mmqa("report", f"--workdir={run}").code == 0
    flags = f"--references={data}", f"--predictions={run / 'pred*.jsonl'}", "--json"
    ended = mmqa("evaluate", "mbeir", *flags)
    assert ended.code == 0, ended.err
    assert ended.value["scores"]["mbeir/recall@1"] == 1
    assert "empty" not in ended.err


def test_runs_of_val_have_the_official_ids(raw, tmp_path):
    pool = raw / "cand_pool" / "local" / "mbeir_webqa_task1_cand_pool.jsonl"
    run, written = tmp_path / "a_run.txt", tmp_path / "b_run.txt"
    run.write_text("2:1 Q0 2:1 1 0.5 x 1\n")
    flags = "--split=val", f"--predictions={run}", f"--submission={written}", "--json"
    scores = done("evaluate", "mbeir", f"--references={pool}", *flags)["scores"]
    assert scores["mbeir/recall@1"] == 1
    assert written.read_text() == "2:1 Q0 2:1 1 0.5 mbeir_webqa_task1_val 1\n"


_POOL = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
_TASK1 = "query/test/mbeir_webqa_task1_test.jsonl"


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (_POOL, [{**TEXTS[0], "did": "x"}], ("line 1", "did is 'x'")),
        (_POOL, [TEXTS[0], TEXTS[0]], ("line 2", "twice")),
        (_POOL, [{**TEXTS[0], "modality": "video"}], ("line 1", "video")),
        (_POOL, [{**TEXTS[0], "txt": ""}], ("line 1", "neither")),
        (_POOL, PICTURES, ("mbeir_webqa_task1", "line 1", "none of the positives")),
        ("query/test/mbeir_webqa_task1_test.jsonl", WEBQA1 * 2, ("line 2", "2:1", "twice")),
        (
            "query/test/mbeir_webqa_task2_test.jsonl",
            [query("2:5", "?", ["2:7"])],
            ("line 1", "judges nothing for 2:5"),
        ),
        (
            "query/test/mbeir_webqa_task1_test.jsonl",
            [query("2:1", "?", ["7:3"])],
            ("line 1", "no prompt for 2, text, image"),
        ),
        (
            _TASK1,
            [query("2:1", "?", "2:1")],
            ("line 1", "pos_cand_list is '2:1'; a list of ids", "fetch"),
        ),
        (_TASK1, [query("2:1", 5, ["2:1"])], ("line 1", "query_txt is 5; text was", "fetch")),
        (
            _TASK1,
            [query("7:2", "", ["2:7"], query_modality="image")],
            ("line 1", "asks from 'image' to 'image,text', no task of M-BEIR; fetch"),
        ),
    ],
)
def test_malformed_files(raw, tmp_path, name, rows, words):
    write_rows(raw / name, rows)
    ended = mmqa("prepare", "mbeir", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "qrels/test/mbeir_webqa_task2_test_qrels.txt",
            "2:4 0 2:7 1 2\n2:4 0 2:7\n",
            r"webqa_task2_test_qrels\.txt, line 2: has 3 columns, 4 were expected",
        ),
        (
            "qrels/test/mbeir_webqa_task2_test_qrels.txt",
            f"2:4 0 2:7 {5000 * '1'} 2\n",  # more digits than Python reads
            r"webqa_task2_test_qrels\.txt, line 1: relevance is '1111",
        ),
        (
            "instructions/query_instructions.tsv",
            f"{HEADER}text\ttext\tWebQA\t2",
            r"query_instructions\.tsv, row 2: prompt_1 is ''; text was expected",
        ),
    ],
)
def test_malformed_lines(raw, name, text, message):
    (raw / name).write_text(text)
    refuses(message, mbeir.read_mbeir, raw)


# M-BEIR has no queries of the union: what to fetch are those of its sets.
@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            "global/mbeir_union_test_cand_pool",
            r"M-BEIR: .*; put query/test/mbeir_SET_test\.jsonl there",
        ),
        ("local/mbeir_cirr_task7_cand_pool", r"put query/test/mbeir_cirr_task7_test\.jsonl there"),
        ("local/mbeir_cirr_task7_val_cand_pool", r"put query/val/mbeir_cirr_task7_val\.jsonl"),
        ("local/pool", r"pool\.jsonl: is not named as M-BEIR's pools are .*; give it its name"),
    ],
)
def test_a_pool_without_its_queries_or_its_name(raw, pool, message):
    for path in (raw / "query" / "test").iterdir():
        path.unlink()
    path = raw / "cand_pool" / f"{pool}.jsonl"
    write_rows(path, TEXTS)
    refuses(message, mbeir.read_mbeir, path)


def test_a_pool_outside_its_folder_is_refused(tmp_path):
    path = tmp_path / "mbeir_webqa_task1_cand_pool.jsonl"
    write_rows(path, TEXTS)
    refuses("lies in no folder of M-BEIR", mbeir.read_mbeir, path, error=Exception)


@pytest.mark.parametrize("place", [".", "*.trec"])
def test_a_place_without_rankings_is_refused(place, tmp_path):
    refuses("no file of rankings is there; give rankings of `mmqa", read_found, tmp_path / place)


def test_published_figures_are_those_of_pyserini():
    """Sums over the sixteen sets in pyserini/2cr/m_beir.yaml of castorini/pyserini at f1e6c840."""
    tables = config_beside(f"{ROOT}/configs/mbeir/tables.py", "tables.py")
    columns = zip(*tables.PUBLISHED.values(), strict=True)
    assert [round(sum(column), 4) for column in columns] == [8.0282, 7.6016, 7.4323, 7.0928]
