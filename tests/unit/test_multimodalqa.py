"""MultimodalQA: its files as a corpus, both scores, prediction formats, a row's scores."""

import dataclasses
import gzip
import json

import pytest
from cli_runs import ROOT, done, mmqa, png, write_rows

from mmqa_jax.benchmarks import multimodalqa
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.official import line_entries
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.schema import Prediction
from mmqa_jax.evaluation import multiple_choice
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

TEXTS = [
    {"id": "t1", "title": "Mask", "url": "u", "text": "Mask came out in 1985."},
    {"id": "t2", "title": "The Bad News Bears", "url": "u", "text": "It came out in 1976."},
]
TABLES = [
    {
        "id": "b1",
        "title": "Ben Piazza",
        "url": "u",
        "table": {
            "table_name": "Filmography",
            "header": [{"column_name": "Year"}, {"column_name": "Title"}],
            "table_rows": [
                [{"text": "1985"}, {"text": "Mask"}],
                [{"text": "1976"}, {"text": ""}, {"text": "more"}],
            ],
        },
    }
]
IMAGES = [{"id": "i1", "title": "Bears", "url": "u", "path": "i1.png"}]


def question(name: str, kind: str, answers: list, gold: list[str], modality: str = "text") -> dict:
    return {
        "qid": name,
        "question": f"{name}?",
        "answers": [{"answer": one, "type": "string", "modality": modality} for one in answers],
        "metadata": {
            "type": kind,
            "modalities": [modality],
            "text_doc_ids": ["t1", "t2"],
            "image_doc_ids": ["i1"],
            "table_id": "b1",
        },
        "supporting_context": [{"doc_id": one, "doc_part": "text"} for one in gold],
    }


QUESTIONS = [
    {**question("q1", "TextQ", ["1985"], ["t1"]), "question": "When came Mask out?"},
    question("q2", "Compose(TextQ,TableQ)", ["Mask", "The Bad News Bears"], ["b1", "t2"], "table"),
    question("q3", "ImageQ", ["yes"], ["i1"], "image"),
]
HIDDEN = {
    "qid": "h1",
    "question": "Who?",
    "metadata": {"text_doc_ids": ["t1"], "image_doc_ids": [], "table_id": "b1"},
}


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    (folder / "final_dataset_images").mkdir(parents=True)
    (folder / "final_dataset_images" / "i1.png").write_bytes(png((1, 0, 0)))
    files = {"dev": QUESTIONS, "texts": TEXTS, "tables": TABLES, "images": IMAGES}
    for name, rows in {**files, "test": [HIDDEN]}.items():
        packed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
        (folder / f"MMQA_{name}.jsonl.gz").write_bytes(packed)
    return folder


@pytest.fixture
def data(raw, tmp_path):
    ended = mmqa("prepare", "multimodalqa", f"--raw={raw}", f"--out={tmp_path / 'out'}", "--json")
    assert ended.code == 0, ended.err
    assert ended.value["found"]["pictures"] == 1
    return tmp_path / "out"


def test_sources_and_questions(data):
    corpus = open_corpus(data)
    sources = {source.id: source for source in corpus.sources}
    assert sorted(sources) == ["b1", "i1", "t1", "t2"]
    assert (sources["b1"].title, sources["b1"].modality) == ("Ben Piazza", "text")
    assert sources["b1"].text == "Filmography\nYear: 1985, Title: Mask\nYear: 1976, more"
    assert (sources["i1"].image, sources["i1"].title) == ("i1.png", "Bears")
    assert corpus.read_picture("i1.png") == png((1, 0, 0))
    questions = {q.id: q for q in corpus.questions("val")}
    assert questions["q2"].answers == ("Mask; The Bad News Bears",)
    assert (questions["q2"].positives, questions["q2"].negatives) == (("b1", "t2"), ("t1", "i1"))
    (hidden,) = corpus.questions("test")
    assert (hidden.answers, hidden.positives, hidden.negatives) == ((), (), ("t1", "b1"))


def test_without_pictures_their_titles_stand(raw, tmp_path):
    (raw / "final_dataset_images" / "i1.png").unlink()
    ended = mmqa("prepare", "multimodalqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 0
    assert "no pictures" in ended.err
    (picture,) = [s for s in open_corpus(tmp_path / "out").sources if s.modality == "image"]
    assert (picture.image, picture.title) == (None, "Bears")


# Values that the authors' baselines/evaluate.py (list_em, list_f1) gives.
@pytest.mark.parametrize(
    ("predicted", "gold", "em", "f1"),
    [
        (["the Mask"], ["Mask"], 1.0, 1.0),
        (["twenty-one"], ["20 1"], 1.0, 1.0),
        (["two"], ["2.0"], 1.0, 1.0),
        (["1,000"], ["1000"], 1.0, 1.0),
        (["in 1985"], ["in 1986"], 0.0, 0.0),
        (["Bears", "Mask"], ["Mask", "Bears"], 1.0, 1.0),
        (["Mask", "Mask"], ["Mask"], 0.0, 0.5),
        (["Bad News"], ["The Bad News Bears", "Mask"], 0.0, 0.4),
        ([""], ["Mask"], 0.0, 0.0),
        (["the"], ["a"], 1.0, 1.0),
    ],
)
def test_scores_are_the_authors(predicted, gold, em, f1):
    assert (multiple_choice.list_em(predicted, gold), multiple_choice.list_f1(predicted, gold)) == (
        em,
        f1,
    )


def test_groups_and_missing_answers(data):
    questions = open_corpus(data).questions("val")
    given = [Prediction("q1", "1985"), Prediction("q2", "The Bad News Bears; Mask")]
    (scores,) = multimodalqa.score_multimodalqa(questions, given).scored
    assert scores.scores == {
        "multimodalqa/list_em": pytest.approx(2 / 3),
        "multimodalqa/list_f1": pytest.approx(2 / 3),
    }
    by_group = {name: row["multimodalqa/list_em"] for name, row in scores.by_category.items()}
    assert by_group["multi-modal"] == 1.0
    assert by_group["single-modal"] == 0.5
    assert by_group["answer in image"] == 0.0
    assert by_group["ImageQ"] == 0.0
    assert scores.missing == 1


def test_official_files_in_and_out(data, tmp_path):
    official = tmp_path / "official.json"
    official.write_text(json.dumps({"q1": "1985", "q2": ["Mask", "The Bad News Bears"]}))
    submission = tmp_path / "submission.json"
    ended = mmqa(
        "evaluate", "multimodalqa", f"--references={data}", f"--predictions={official}",
        f"--submission={submission}", "--split=dev", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.value["scores"]["multimodalqa/list_em"] == pytest.approx(2 / 3)
    assert json.loads(submission.read_text()) == {
        "q1": "1985", "q2": ["Mask", "The Bad News Bears"], "q3": "",
    }  # fmt: skip
    lines = tmp_path / "predictions.jsonl"
    write_rows(lines, [{"question_id": "q3", "answer": "Yes."}])
    flags = f"--references={data}", f"--predictions={lines}", "--json"
    assert done("evaluate", "multimodalqa", *flags)["scores"]["multimodalqa/list_f1"] == (
        pytest.approx(1 / 3)
    )


def test_a_text_of_the_official_file_is_kept_whole(data, tmp_path):
    """allenai/multimodalqa's evaluate.py gives list_em 0 and list_f1 .43 for this text."""
    path, submission = tmp_path / "official.json", tmp_path / "submission.json"
    path.write_text(json.dumps({"q2": "Mask; The Bad News Bears", "q3": [0]}))
    flags = f"--references={data}", f"--predictions={path}", f"--submission={submission}", "--json"
    scores = done("evaluate", "multimodalqa", *flags)["scores"]
    assert scores == {"multimodalqa/list_em": 0.0, "multimodalqa/list_f1": pytest.approx(0.43 / 3)}
    assert json.loads(submission.read_text()) == {
        "q1": "", "q2": "Mask; The Bad News Bears", "q3": "0",
    }  # fmt: skip


_UNKNOWN = {**QUESTIONS[0], "supporting_context": [{"doc_id": "zz"}]}
_NO_TABLE = {**TABLES[0], "table": {"header": 1}}


def _with(key: str, value: object) -> str:
    """A question whose metadata has this."""
    return json.dumps({**QUESTIONS[0], "metadata": {**QUESTIONS[0]["metadata"], key: value}})


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("dev", ["[1]"], ("line 1", "an object")),
        ("dev", ["{"], ("line 1",)),
        ("dev", [json.dumps(_UNKNOWN)], ("line 1", "source zz")),
        ("dev", 2 * [json.dumps(QUESTIONS[0])], ("line 2", "q1", "twice")),
        ("tables", [json.dumps(_NO_TABLE)], ("MMQA_tables", "line 1", "`table`")),
        ("texts", 2 * [json.dumps(TEXTS[0])], ("MMQA_texts", "line 2", "id 't1' is there twice")),
        (
            "texts",
            [json.dumps({**TEXTS[0], "text": 5})],
            ("line 1", "text is 5; text was expected"),
        ),
        (
            "dev",
            [json.dumps({**QUESTIONS[0], "metadata": 1})],
            ("line 1", "metadata is 1; an object was expected"),
        ),
        ("dev", [json.dumps({**QUESTIONS[0], "answers": [1]})], ("line 1", "`answers` or")),
        ("dev", [_with("type", "Guess")], ("line 1", "type is 'Guess'; one of the release's was")),
        ("dev", [_with("text_doc_ids", "t1")], ("line 1", "text_doc_ids is 't1'; a list of texts")),
        ("dev", [_with("modalities", 5)], ("line 1", "modalities is 5; a list of texts")),
    ],
)
def test_malformed_lines(raw, tmp_path, name, rows, words):
    packed = gzip.compress("".join(f"{row}\n" for row in rows).encode())
    (raw / f"MMQA_{name}.jsonl.gz").write_bytes(packed)
    ended = mmqa("prepare", "multimodalqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err
    assert not (tmp_path / "out").exists()


def test_missing_and_foreign_files(raw, tmp_path):
    prepare = ("prepare", "multimodalqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    (raw / "MMQA_texts.jsonl.gz").write_bytes(b"no gzip")
    ended = mmqa(*prepare)
    assert ended.code == 2
    assert "is damaged after line 0" in ended.err
    (raw / "MMQA_texts.jsonl.gz").unlink()
    ended = mmqa(*prepare)
    assert ended.code == 2
    assert "MMQA_texts.jsonl.gz: no such file" in ended.err


def test_a_folder_without_questions(raw):
    for split in ("dev", "test"):
        (raw / f"MMQA_{split}.jsonl.gz").unlink()
    refuses(
        r"raw: holds none of MultimodalQA's questions; put", multimodalqa.read_multimodalqa, raw
    )


def test_pictures_that_are_not_there_or_no_longer(raw):
    read_picture = multimodalqa.read_multimodalqa(raw).read_picture
    refuses(r"i2\.png: no such file; fetch", read_picture, "i2.png", error=PictureError)
    (raw / "final_dataset_images" / "i1.png").unlink()
    with pytest.raises(PictureError, match=r"images/i1\.png: No such file or directory; fetch it"):
        read_picture("i1.png")


def test_lines_that_no_memory_or_disk_gives(raw, monkeypatch):
    refuses(r"raw: cannot be read \(Is a directory\); check the file", list, line_entries(raw))
    monkeypatch.setattr(official, "_LONGEST_LINE", 64)
    with pytest.raises(UserError, match=r"_dev.*, line 1: is longer than 64 bytes; fetch the file"):
        list(line_entries(raw / "MMQA_dev.jsonl.gz"))


def test_a_cut_file_is_refused(raw, tmp_path):
    path = raw / "MMQA_texts.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    ended = mmqa("prepare", "multimodalqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 2
    assert "damaged" in ended.err


def test_a_row_is_scored_by_its_gold_sources(data, tmp_path):
    config = f"{ROOT}/configs/multimodalqa/tables.py:bm25_restricted"
    flags = f"--config.data.dir={data}", f"--workdir={tmp_path / 'run'}", "--json"
    scores = done("run", f"--config={config}", *flags)["scores"]
    # Of three questions one shares words with sources: its paragraph, and the table.
    assert scores["source_f1/official"] == pytest.approx(2 / 3 / 3, abs=1e-4)
    assert not any(name.startswith("multimodalqa") for name in scores)
    again = mmqa("report", f"--workdir={tmp_path / 'run'}")
    assert again.code == 0, again.err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "source F1 (WebQA)" in page
    assert "exact match (MultimodalQA)" not in page


def test_predictions_of_another_shape_are_refused(data, tmp_path):
    path = tmp_path / "p.json"
    for content, words in (([1], "one object"), ({"q1": {"answer": 1}}, "q1")):
        path.write_text(json.dumps(content))
        flags = f"--references={data}", f"--predictions={path}"
        ended = mmqa("evaluate", "multimodalqa", *flags)
        assert ended.code == 2
        assert words in ended.err


def test_a_row_of_a_table_without_columns_names():
    assert multimodalqa.table_text("", [], [["a", " "], ["b"]]) == "a\nb"


def test_scores_of_a_hidden_split_are_refused(data):
    hidden = open_corpus(data).questions("test")
    assert not any(dataclasses.asdict(q)["answers"] for q in hidden)
    refuses("an answer", multimodalqa.score_multimodalqa, hidden, [], error=Exception)
