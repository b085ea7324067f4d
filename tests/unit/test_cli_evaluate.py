"""`mmqa evaluate`: scores by hand, every format it reads, and files it refuses."""

import itertools
import json

import pytest
from cli_runs import TEST, done, mmqa, rows_of, succeeded, write_rows
from shared_data import IMAGE_TSV, require

from mmqa_jax.evaluation import webqa
from mmqa_jax.evaluation.webqa import COLUMNS, read_output_tsv

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def gold() -> list[dict]:
    return [
        {"question_id": row["id"], "answer": row["answers"][0], "sources": row["positives"]}
        for row in TEST
    ]


def test_evaluate_scores_predictions_by_hand(data, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}")
    path = write_rows(tmp_path / "gold.jsonl", gold())
    result = done(*flags, f"--predictions={path}")
    assert (result["dataset"], result["n"], result["missing"]) == ("corpus", 5, 0)
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert result["scores"]["source_f1/notebook"] == pytest.approx(1.0, abs=1e-4)
    # One answer is missing, one wrong, one source too much.
    rows = gold()[1:]
    rows[0]["answer"] = "The capital of Doriath is unknown."
    rows[1]["sources"] = ["s-Erewhon", "s-Hav"]
    result = done(*flags, f"--predictions={write_rows(tmp_path / 'some.jsonl', rows)}")
    assert result["missing"] == 1
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(3 / 5, abs=1e-4)
    assert result["scores"]["source_f1/notebook"] == pytest.approx(
        (0 + 1 + 2 / 3 + 1) / 4, abs=1e-4
    )
    assert result["by_category"]["color"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert result["by_category"]["text"]["webqa_acc/no_lemma"] == pytest.approx(2 / 4, abs=1e-4)
    # Of what was answered alone.
    result = done(*flags, f"--predictions={tmp_path / 'some.jsonl'}", "--only_given")
    assert (result["n"], result["missing"]) == (4, 0)
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(3 / 4, abs=1e-4)


def test_evaluate_reads_the_leaderboards_format_and_rankings(data, bm25, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}")
    submission = {
        row["question_id"]: {"sources": row["sources"], "answer": row["answer"]} for row in gold()
    }
    (tmp_path / "submission.json").write_text(json.dumps(submission))
    result = done(*flags, f"--predictions={tmp_path / 'submission.json'}")
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    result = done(*flags, f"--predictions={bm25}")
    assert result["n"] == 4  # test4 has no gold sources
    assert result["scores"]["recall@1"] == 1.0
    assert result["scores"]["mrr"] == 1.0
    some = write_rows(tmp_path / "some.jsonl", rows_of(bm25)[1:])
    assert done(*flags, f"--predictions={some}", "--only_given")["n"] == 3


def test_two_systems_are_compared_question_by_question(data, bm25, refused, tmp_path):
    good, worse = gold(), gold()
    for row in worse[:2]:
        row["answer"] = "Nobody knows."
    good = write_rows(tmp_path / "good.jsonl", good)
    worse = write_rows(tmp_path / "worse.jsonl", worse)
    flags = ("evaluate", "corpus", f"--references={data}", "--lemmatizer=none")
    ended = mmqa(*flags, f"--predictions={good}", f"--against={worse}", "--markdown", "--json")
    found = json.loads(ended.out.splitlines()[-1])["against"]
    accuracy = found["webqa_acc/no_lemma"]
    assert accuracy["this"] == pytest.approx(1.0, abs=1e-4)
    assert accuracy["difference"] == pytest.approx(2 / 5, abs=1e-4)
    assert accuracy["low"] <= 0.4 <= accuracy["high"]
    # Two questions that differ, both for this system: half of the sign flips are as extreme.
    assert accuracy["p_permutation"] == pytest.approx(1 / 2, abs=0.03)
    assert found["source_f1/official"]["difference"] == 0.0
    line = next(line for line in ended.out.splitlines() if line.startswith("| answer accuracy"))
    assert line.startswith("| answer accuracy (WebQA, no lemmatizer) | 1.000 | 0.600 | 0.400 [")
    refused(*flags, f"--predictions={bm25}", f"--against={good}", message="--against: .* rankings")


def test_only_given_of_a_file_of_other_questions(data, bm25, refused, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}", "--split=val", "--only_given")
    path = write_rows(tmp_path / "gold.jsonl", gold())
    for file in (path, bm25):
        message = rf"--only_given: {file} holds none of the 3 questions of this split; name another"
        refused(*flags, f"--predictions={file}", message=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question_id": "other"}, r"no question has the id 'other'"),
        ({"question_id": "test0"}, r"question 'test0' is answered twice"),
        ({"question_id": 7.5}, r"bad\.jsonl, line 2: question_id is 7\.5; text or a whole number"),
        ({"question_id": None}, r"bad\.jsonl, line 2: question_id is None; text or a whole number"),
        ({"answer": 7}, r"bad\.jsonl, line 2: \"answer\" must be text"),
        ({"sources": "s-Hav"}, r"bad\.jsonl, line 2: \"sources\" must be a list of id strings"),
        ({"sources": [3]}, r"bad\.jsonl, line 2: \"sources\" must be a list of id strings"),
        ({"sources": ["s-Nowhere"]}, r"bad\.jsonl, line 2: source 's-Nowhere' is not in"),
        ("{oops", r"bad\.jsonl, line 2: not valid JSON"),
        ('{"n": ' + "9" * 5000 + "}", r"bad\.jsonl, line 2: an integer of more than 4,300 digits"),
        ("[" * 100_000, r"bad\.jsonl, line 2: lists or objects nested more than 100 deep"),
        ('"\\ud83d"', r"bad\.jsonl, line 2: holds '.ud83d', half of a character; write it whole"),
        ("[]", r"bad\.jsonl, line 2: expected an object"),
    ],
)
def test_broken_predictions(change, message, data, refused, tmp_path):
    lines = [json.dumps(row) for row in gold()]
    lines[1] = change if isinstance(change, str) else json.dumps({**gold()[1], **change})
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    flags = ("evaluate", "corpus", f"--references={data}")
    refused(*flags, f"--predictions={tmp_path / 'bad.jsonl'}", message=message)


def test_broken_submission(data, refused, tmp_path):
    path = tmp_path / "submission.json"
    flags = ("evaluate", "webqa", f"--references={data}", f"--predictions={path}")
    path.write_text('{"test0":\n {"answer": "a",\n "sources": oops}}')
    refused(*flags, message=r"submission\.json, line 3, column 13: not valid JSON")
    path.write_text('{"test0": {"answer": "a"}}')
    refused(*flags, message=r"submission\.json, Guid test0: sources must be a list")
    path.write_text('{"other": {"answer": "a", "sources": []}}')
    refused(*flags, message=r"no question has the id 'other'")


# WebQA's own files


@pytest.mark.skipif(not webqa.spacy_is_installed(), reason="needs the `lemma` extra")
def test_official_validation_outputs_from_the_command_line(tmp_path):
    """The first of them; tests/unit/test_webqa_metrics.py holds the figures of all."""
    require(IMAGE_TSV)
    cut = tmp_path / "outputs.tsv"
    with IMAGE_TSV.open(encoding="utf-8") as lines:
        cut.write_text("".join(itertools.islice(lines, 121)), encoding="utf-8")
    ended = succeeded("evaluate", "webqa", f"--predictions={cut}", "--json")
    result = ended.value
    assert (result["dataset"], result["n"], result["missing"]) == ("webqa", 120, 0)
    # The official scorer's lemmas. No fluency without weights, and no sources in a TSV.
    wanted = webqa.score_answers(*read_output_tsv(cut), lemmatizer="spacy")
    assert wanted.scores.keys() == {"webqa_acc/official", "exact_match/official"}
    assert result["scores"] == pytest.approx(wanted.scores)
    assert result["by_category"].keys() == wanted.by_category.keys()
    for category, scores in wanted.by_category.items():
        assert result["by_category"][category] == pytest.approx(scores), category
    assert result["by_modality"] == {"image": result["scores"]}
    assert "no fluency (webqa_fl): give --bart the folder of BARTScore's weights" in ended.err


@pytest.fixture
def webqa_files(tmp_path):
    """References as WebQA's JSON and as an output TSV; the predictions of the latter."""
    questions = {
        "g1": ("text", "Where is it?", "In Paris", "Paris", "It is in Paris ."),
        "g2": ("color", "Which color?", "It is red.", "red", "Red and white ."),
        "g3": ("text", "Who is it?", "It is Ann.", "TBD", "Ann"),
    }
    official, lines = {}, ["\t".join(COLUMNS)]
    for guid, (category, asked, answer, keywords, said) in questions.items():
        official[guid] = {
            "Q": asked, "A": [answer], "Qcate": category, "split": "val", "Guid": guid,
            "txt_posFacts": [{"snippet_id": f"{guid}_0", "fact": "Same fact.", "title": "T"}],
            "txt_negFacts": [{"snippet_id": f"{guid}_1", "fact": f"Other {guid}.", "title": "T"}],
            **({} if keywords == "TBD" else {"Keywords_A": keywords}),
        }  # fmt: skip
        values = (guid, category, asked, json.dumps([answer]), keywords, "[0]", json.dumps([said]))
        lines.append("\t".join(values))
    (tmp_path / "val.json").write_text(json.dumps(official))
    (tmp_path / "out.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_references_of_every_format_give_the_same_scores(webqa_files, monkeypatch):
    monkeypatch.setattr(webqa, "spacy_is_installed", lambda: False)
    tsv, official = webqa_files / "out.tsv", webqa_files / "val.json"
    flags = ("evaluate", "webqa", f"--predictions={tsv}")
    ended = succeeded(*flags, "--json")
    result = ended.value
    expected = {
        "webqa_acc/no_lemma": (1 + 2 * 0.5 / (1.5 + 1e-5)) / 2,
        "exact_match/no_lemma": 0.5,
        "webqa_acc/approx_no_lemma": (1 + 2 * 0.5 / 1.5 + 1 / 3) / 3,
    }
    assert result["scores"] == pytest.approx(expected, abs=1e-9)
    assert result["n_by_scorer"] == dict(zip(expected, (2, 2, 3), strict=True))
    assert result["by_modality"]["text"]["webqa_acc/approx_no_lemma"] == pytest.approx(2 / 3)
    assert result["notes"] == ended.err.splitlines()
    assert [note[:20] for note in result["notes"]] == [
        "spaCy is not install", "1 of 3 questions hav", "no fluency (webqa_fl",
    ]  # fmt: skip
    again = done(*flags, f"--references={official}", "--split=val")
    assert again["scores"] == result["scores"]
    assert done(*flags, f"--references={tsv}")["scores"] == result["scores"]
    chosen = done(*flags, "--lemmatizer=none")
    assert chosen["notes"] == result["notes"][1:]


def test_a_submission_goes_by_the_questions_own_snippet_ids(webqa_files, tmp_path):
    official, path = f"--references={webqa_files / 'val.json'}", tmp_path / "leaderboard.json"
    rows = [
        {"question_id": "g2", "answer": "Red.", "sources": ["g1_0"]},  # how the corpus calls it
        {"question_id": "g3", "answer": "Ann", "sources": ["g3_1"]},
    ]
    predictions = write_rows(tmp_path / "predictions.jsonl", rows)
    flags = ("evaluate", "webqa", official, "--split=val", "--lemmatizer=none")
    result = done(*flags, f"--predictions={predictions}", f"--submission={path}")
    assert result["submission"] == str(path)
    assert json.loads(path.read_text()) == {
        "g2": {"sources": ["g2_0"], "answer": "Red."},
        "g3": {"sources": ["g3_1"], "answer": "Ann"},
    }
    assert result["missing"] == 1
    assert "1 of 3 questions have no prediction and count 0" in result["notes"]
    assert result["scores"]["source_f1/notebook"] == pytest.approx(1 / 3, abs=1e-4)
    # The written file scores the same.
    again = done(*flags, f"--predictions={path}")
    assert again["scores"] == result["scores"]


def test_unknown_sources_of_a_submission_count_as_wrong_and_are_counted(
    webqa_files, tmp_path, refused
):
    """As the authors' own submissions have them ("dummy"): CLIP_encodings.ipynb, cell 40."""
    official = f"--references={webqa_files / 'val.json'}"
    flags = ("evaluate", "webqa", official, "--split=val", "--lemmatizer=none")
    known = {"g2": {"sources": ["g2_0"], "answer": "Red."}}
    path = tmp_path / "EvalAI.json"
    path.write_text(json.dumps(known))
    right = done(*flags, f"--predictions={path}")
    assert right["unknown_sources"] == 0
    assert not [note for note in right["notes"] if "cited sources" in note]
    known["g2"]["sources"] += ["dummy", 30999999]
    known["g3"] = {"sources": ["dummy"], "answer": "Ann"}
    path.write_text(json.dumps(known))
    result = done(*flags, f"--predictions={path}")
    assert result["unknown_sources"] == 3
    (note,) = [note for note in result["notes"] if "cited sources" in note]
    assert note.startswith("3 cited sources of 2 questions are not in ")
    assert note.endswith("(such as 'dummy' of question g2): they count as wrong")
    # P of g2 falls from 1 to 1/3, R stays.
    one, third = (f1(precision) for precision in (1, 1 / 3))
    count = right["n_by_scorer"]["source_f1/notebook"]
    assert right["scores"]["source_f1/notebook"] == pytest.approx(one / count, abs=1e-5)
    assert result["scores"]["source_f1/notebook"] == pytest.approx(third / count, abs=1e-5)
    # The leaderboard would not know them either.
    out = f"--submission={tmp_path / 'out.json'}"
    message = "prediction for g2: cites 'dummy', which is not in the corpus"
    refused(*flags, f"--predictions={path}", out, message=message)


def f1(precision: float) -> float:
    return 2 * precision / (precision + 1 + 1e-5)


def test_a_submission_of_the_hidden_split(tmp_path, refused):
    hidden = {
        "h1": {
            "Q": "Where?", "Qcate": "text", "split": "test", "Guid": "h1",
            "txt_Facts": [{"snippet_id": "h1_0", "fact": "Here.", "title": "T"}],
        },
        "h2": {"Q": "Who?", "Qcate": "text", "split": "test", "Guid": "h2"},
    }  # fmt: skip
    (tmp_path / "WebQA_test.json").write_text(json.dumps(hidden))
    rows = [{"question_id": "h1", "answer": "Here", "sources": ["h1_0"]}]
    predictions = write_rows(tmp_path / "predictions.jsonl", rows)
    flags = ("evaluate", "webqa", f"--references={tmp_path / 'WebQA_test.json'}")
    path = tmp_path / "leaderboard.json"
    result = done(*flags, f"--predictions={predictions}", f"--submission={path}")
    assert (result["n"], result["missing"], result["scores"]) == (0, 1, {})
    assert result["notes"] == [
        "1 of 2 questions have no prediction and count 0",
        f"written {path}; the answers of this split are hidden, nothing was scored",
    ]
    assert json.loads(path.read_text()) == {"h1": {"sources": ["h1_0"], "answer": "Here"}}
    message = "none of the 2 questions has keyword answers"
    refused(*flags, f"--predictions={predictions}", message=message)


def test_references_and_submissions_that_cannot_be(webqa_files, data, bm25, refused, tmp_path):
    path = tmp_path / "some.json"
    path.write_text("{}")
    refused("evaluate", "webqa", f"--predictions={path}", message=r"--references: .*some\.json")
    tsv = f"--predictions={webqa_files / 'out.tsv'}"
    refused(
        "evaluate", "webqa", f"--references={webqa_files / 'out.tsv'}", f"--predictions={bm25}",
        message=r"--references: an output TSV has no gold sources to score .*bm25\.jsonl by; give",
    )  # fmt: skip
    message = r"--references: is missing; name"
    refused("evaluate", "evqa", f"--predictions={bm25}", message=message)
    out = f"--submission={tmp_path / 'leaderboard.json'}"
    refused("evaluate", "webqa", tsv, out, message=r"--submission: the references hold no sources")
    refused(
        "evaluate", "corpus", f"--references={data}", f"--predictions={bm25}", out,
        message=r"--submission: .* holds rankings; give a file with answers",
    )  # fmt: skip
    flags = ("--split=val", f"--references={webqa_files / 'val.json'}", out, "--lemmatizer=none")
    said = write_rows(tmp_path / "said.jsonl", [{"question_id": "g2", "answer": "Red."}])
    for more, message in (
        (f"--bart={tmp_path / 'nowhere'}", "nowhere: no such folder; give a folder of bart-large"),
        (f"--against={tmp_path / 'gone.jsonl'}", r"gone\.jsonl: no such file"),
    ):
        refused("evaluate", "webqa", f"--predictions={said}", *flags, more, message=message)
    nowhere = f"--references={tmp_path / 'no.json'}"
    refused("evaluate", "webqa", tsv, nowhere, message="no such folder")
