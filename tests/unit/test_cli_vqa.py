"""`mmqa prepare` and `mmqa evaluate` on OK-VQA and A-OKVQA: every format, and files refused."""

import json
import re
from pathlib import Path

import pytest
from cli_runs import done, mmqa, png, succeeded, write_rows
from vqa_files import OKVQA, aokvqa_row, soft_labels, write, write_aokvqa, write_okvqa

from mmqa_jax import benchmarks
from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.okvqa import read_okvqa
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction, prediction_row
from mmqa_jax.evaluation.scores import read_answers

pytestmark = pytest.mark.usefixtures("quiet")

# The three val questions: 4 of 10; "two" is not normalized where all agree; 4 of 10.
ANSWERS = {25: "Race", 26: "2", 35: "Soup."}
OFFICIAL = (1.0 + 0.0 + 1.0) / 3


def official(answers: dict[int, str]) -> list[dict]:
    return [{"question_id": name, "answer": answer} for name, answer in answers.items()]


def test_every_file_of_a_benchmark_is_named():
    files = {file.stem for file in Path(benchmarks.__file__).parent.glob("*.py")}
    assert files - {"__init__", "benchmark"} == set(NAMES)


def test_prepare_writes_the_questions_and_says_what_is_missing(tmp_path):
    raw, out = write_okvqa(tmp_path / "raw", pictures=True), tmp_path / "out"
    ended = succeeded("prepare", "okvqa", f"--raw={raw}", f"--out={out}", "--json")
    assert ended.value["splits"] == {"train": 1, "test": 3}
    assert ended.value["published_differences"]["test questions"] == {
        "found": 3, "published": 5_046,
    }  # fmt: skip
    assert ended.value["found"]["test questions with caption"] == 2
    assert "tags_train.tsv: not found; no tags of its pictures" in ended.err
    assert ended.value["missing_files"].keys() == {
        *("tags_train.tsv", "captions_train2014.json", "captions_val2014.json"),
        *("captions_okvqa.json", "vinvl_captions_train2014.tsv"),
    }
    assert "list no sources" not in ended.err
    assert re.search(r"│ test questions +│ +3 │ +5,046 │ +-5,043 │", ended.out)
    assert re.search(r"│ picture files +│ +2 │ +– │ +– │", ended.out)
    assert "OK-VQA (Marino et al., CVPR 2019)" in ended.out
    corpus = open_corpus(out)
    assert len(corpus) == 0
    assert corpus.questions() == read_okvqa(raw).questions
    asked = corpus.questions("test")[0]
    assert corpus.question_picture(asked) == png((1, 2, 3))
    # Other verbs that need sources say so.
    ended = mmqa("search", f"--data={out}", "--method=bm25", f"--out={tmp_path / 'x.jsonl'}")
    assert (ended.code, ended.out) == (2, "")
    assert "the corpus is empty" in ended.err


def test_a_broken_picture_of_a_question_is_left_out(tmp_path):
    raw, out = write_okvqa(tmp_path / "raw", pictures=True), tmp_path / "out"
    (raw / "val2014/COCO_val2014_000000000002.jpg").write_bytes(b"no picture")
    result = done("prepare", "okvqa", f"--raw={raw}", f"--out={out}")
    assert list(result["broken_pictures"]) == ["COCO_val2014_000000000002.jpg"]
    assert [question.image for question in open_corpus(out).questions("test")] == [None] * 3


def test_every_format_of_okvqa_scores_the_same(tmp_path):
    raw, out = write_okvqa(tmp_path / "raw"), tmp_path / "out"
    done("prepare", "okvqa", f"--raw={raw}", f"--out={out}")
    listed = write(tmp_path / "results.json", official(ANSWERS))
    rows = [{"question_id": str(name), "answer": answer} for name, answer in ANSWERS.items()]
    ours = write_rows(tmp_path / "predictions.jsonl", rows)
    for references in (raw, out):
        for predictions in (listed, ours):
            flags = (f"--references={references}", f"--predictions={predictions}")
            result = done("evaluate", "okvqa", *flags)
            assert (result["dataset"], result["split"], result["n"]) == ("okvqa", "test", 3)
            assert result["scores"] == {
                "vqa_accuracy/official": pytest.approx(OFFICIAL),
                "vqa_accuracy/paper": pytest.approx(OFFICIAL),
                "vqa_accuracy/prophet": pytest.approx(8 / 15),  # `the soup` keeps its article
                "vqa_accuracy/kat": pytest.approx(2 / 3),
            }
            kind = result["by_category"]["Vehicles and Transportation"]
            assert kind["vqa_accuracy/official"] == 0.5
            assert result["notes"] == []
    flags = ("evaluate", "okvqa", f"--references={out}", f"--predictions={listed}")
    ended = mmqa(*flags, "--markdown")
    assert re.search(r"\| Cooking and Food \| 1 \| 1\.000 ", ended.out)
    assert re.search(r"\| all \| 3 \| 0\.667 ", ended.out)


def test_missing_answers_count_0_and_submissions_hold_them(tmp_path):
    raw = write_okvqa(tmp_path / "raw")
    path = write(tmp_path / "some.json", official({25: "race"}))
    submission = tmp_path / "submission.json"
    flags = ("evaluate", "okvqa", f"--references={raw}", f"--predictions={path}")
    result = done(*flags, f"--submission={submission}")
    assert (result["n"], result["missing"]) == (3, 2)
    assert result["scores"]["vqa_accuracy/official"] == pytest.approx(1 / 3)
    assert "2 of 3 questions have no prediction and count 0" in result["notes"]
    assert json.loads(submission.read_text()) == official({25: "race", 26: "", 35: ""})
    result = done(*flags, "--only_given")
    assert (result["n"], result["scores"]["vqa_accuracy/official"]) == (1, 1.0)
    # The train split by its name.
    path = write(tmp_path / "train.json", official({15: "vine"}))
    flags = ("evaluate", "okvqa", f"--references={raw}", f"--predictions={path}")
    assert done(*flags, "--split=train")["scores"]["vqa_accuracy/official"] == 1.0


def test_soft_labels_are_said_to_be_what_was_scored(tmp_path):
    raw = write_okvqa(tmp_path / "raw")
    (raw / "mscoco_val2014_annotations.json").unlink()
    write(raw / "val_soft_labels.json", soft_labels())
    path = write(tmp_path / "results.json", official({25: "ride", 26: "2", 35: "a stew"}))
    result = done("evaluate", "okvqa", f"--references={raw}", f"--predictions={path}")
    assert result["scores"] == {
        "vqa_accuracy/soft_labels": pytest.approx((0.667 + 1 + 1) / 3),
        "vqa_accuracy/official_from_soft_labels": pytest.approx((0.6 + 1 + 1) / 3),
    }
    assert re.match(r"references are soft labels, not the annotators' ten", result["notes"][0])


def test_two_systems_on_okvqa(tmp_path):
    raw = write_okvqa(tmp_path / "raw")
    good = write(tmp_path / "good.json", official({25: "race", 26: "two", 35: "stew"}))
    worse = write(tmp_path / "worse.json", official({25: "ride", 26: "two"}))
    flags = (f"--references={raw}", f"--predictions={good}", f"--against={worse}")
    found = done("evaluate", "okvqa", *flags)["against"]["vqa_accuracy/official"]
    assert (found["this"], found["other"]) == (1.0, pytest.approx(1.6 / 3))
    assert found["difference"] == pytest.approx(1.4 / 3)


def test_every_format_of_aokvqa_scores_the_same(tmp_path):
    raw, out = write_aokvqa(tmp_path / "raw"), tmp_path / "out"
    done("prepare", "aokvqa", f"--raw={raw}", f"--out={out}")
    given = {
        "q1": {"direct_answer": "moon", "multiple_choice": "moon"},
        "q2": {"direct_answer": "moon", "multiple_choice": "moon"},
        "q3": {"direct_answer": "the moon", "multiple_choice": "B"},  # no option's text
    }
    listed = write(tmp_path / "results.json", given)
    rows = [
        {"question_id": "q1", "answer": "moon", "choice": 1},
        {"question_id": "q2", "answer": "moon", "choice": 1},
        {"question_id": "q3", "answer": "the moon", "choice": None},
    ]
    ours = write_rows(tmp_path / "predictions.jsonl", rows)
    for references in (raw, out, raw / "aokvqa_v1p0_val.json"):
        for predictions in (listed, ours):
            flags = (f"--references={references}", f"--predictions={predictions}")
            result = done("evaluate", "aokvqa", *flags)
            assert (result["split"], result["missing"], result["by_category"]) == ("val", 0, {})
            assert result["scores"] == {
                "a_okvqa_da/official": pytest.approx((2 / 3 + 1) / 2),
                "a_okvqa_mc/official": pytest.approx(2 / 3),
            }
            assert result["n_by_scorer"] == {"a_okvqa_da/official": 2, "a_okvqa_mc/official": 3}
            assert result["unparsed"] == {"a_okvqa_mc/official": 1}
            assert result["notes"] == ["1 prediction names no choice (a_okvqa_mc/official)"]
    submission = tmp_path / "submission.json"
    flags = (f"--references={out}", f"--predictions={ours}", f"--submission={submission}")
    done("evaluate", "aokvqa", *flags)
    assert json.loads(submission.read_text()) == {
        **given, "q3": {"direct_answer": "the moon"},
    }  # fmt: skip
    chosen = {name: {"multiple_choice": row["multiple_choice"]} for name, row in given.items()}
    path = write(tmp_path / "chosen.json", chosen)
    result = done("evaluate", "aokvqa", f"--references={out}", f"--predictions={path}")
    assert result["scores"] == {"a_okvqa_mc/official": pytest.approx(2 / 3)}


def test_a_submission_of_aokvqas_hidden_split(tmp_path, refused):
    raw = write_aokvqa(tmp_path / "raw")
    path = write(tmp_path / "test.json", {"t1": {"direct_answer": "sun", "multiple_choice": "sky"}})
    flags = ("evaluate", "aokvqa", f"--references={raw}", "--split=test", f"--predictions={path}")
    submission = tmp_path / "submission.json"
    result = done(*flags, f"--submission={submission}")
    assert (result["n"], result["scores"]) == (0, {})
    assert json.loads(submission.read_text()) == json.loads(path.read_text())
    refused(*flags, message="none of the 1 questions has published direct answers")


def check_bad(benchmark, raw, text, message, refused) -> None:
    path = raw.parent / "bad.json"
    path.write_text(text)
    flags = (f"--references={raw}", f"--predictions={path}")
    refused("evaluate", benchmark, *flags, message=message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"bad\.json, line 1, column 1: not valid JSON"),
        ("[]", r"bad\.json: holds no predictions; give predictions\.jsonl, or the official list"),
        ("{}", r"bad\.json: a list of \{question_id, answer\} was expected"),
        ('["race"]', r'bad\.json, entry 1: \{"question_id": number, "answer": text\} was expected'),
        ('[{"question_id": 25, "answer": 2}]', r"bad\.json, entry 1: .* was expected"),
        ('[{"question_id": true, "answer": "a"}]', r"bad\.json, entry 1: .* was expected"),
        (json.dumps(official({99: "a"})), r"no question has the id '99' among the 3"),
        (json.dumps(official({25: "a"}) * 2), r"bad\.json, entry 2: question 25 is answered twice"),
        ('[{"question_id": 25, "answer": "\\ud83d"}]', r"line 1, column 33: holds '\\ud83d', half"),
    ],
)
def test_bad_predictions_of_okvqa(text, message, refused, tmp_path):
    check_bad("okvqa", write_okvqa(tmp_path / "raw"), text, message, refused)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"bad\.json: one object of question_id -> \{direct_answer, multiple_choice\} was"),
        ("{}", r"bad\.json: holds no predictions; give predictions\.jsonl, or the official \{id"),
        ('{"q1": "moon"}', r'bad\.json, q1: \{"direct_answer": text, "multiple_choice": text\} w'),
        ('{"q1": {"multiple_choice": 1}}', r"bad\.json, q1: .* was expected; correct that entry"),
        ('{"q1": {"multiple_choice": "B"}}', r"bad\.json: every multiple_choice is a letter or"),
        ('{"q1": {"multiple_choice": "(2)"}}', r"bad\.json: every multiple_choice is a letter or"),
        ('{"q1": {}, "q1": {}}', r"bad\.json: key 'q1' appears twice in one object; remove one"),
        ('{"t1": {"direct_answer": "a"}}', r"no question has the id 't1' among the 3"),
    ],
)
def test_bad_predictions_of_aokvqa(text, message, refused, tmp_path):
    check_bad("aokvqa", write_aokvqa(tmp_path / "raw"), text, message, refused)


def test_choices_come_back_from_predictions_jsonl(tmp_path):
    rows = [Prediction("q1", choice=2), Prediction("q2", "moon"), Prediction("q3", choice=0)]
    write_jsonl(tmp_path / "predictions.jsonl", map(prediction_row, rows))
    assert read_answers(tmp_path / "predictions.jsonl") == rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"choice": "1"}, r'rows\.jsonl, line 1: "choice" must be the number of an option'),
        ({"choice": True}, r'rows\.jsonl, line 1: "choice" must be the number of an option'),
    ],
)
def test_bad_choices(row, message, refused, tmp_path):
    raw = write_aokvqa(tmp_path / "raw")
    path = write_rows(tmp_path / "rows.jsonl", [{"question_id": "q1", **row}])
    flags = (f"--references={raw}", f"--predictions={path}")
    refused("evaluate", "aokvqa", *flags, message=message)


def test_flags_and_folders_that_do_not_fit(refused, tmp_path):
    raw, out = write_okvqa(tmp_path / "raw"), tmp_path / "out"
    done("prepare", "okvqa", f"--raw={raw}", f"--out={out}")
    path = write(tmp_path / "results.json", official(ANSWERS))
    predictions = f"--predictions={path}"
    refused("evaluate", "okvqa", predictions, message=r"--references: is missing; name the")
    flags = ("evaluate", "okvqa", f"--references={out}", predictions)
    refused(*flags, "--lemmatizer=none", message=r"--lemmatizer: is part of WebQA's scores")
    refused(*flags, "--split=val", message=r"--split=val: .* has no such questions; choose one")
    message = r"was prepared from okvqa; evaluate okvqa instead of aokvqa, or give the refer"
    refused("evaluate", "aokvqa", f"--references={out}", predictions, message=message)
    message = r"no: no such folder, a folder with the benchmark's official files was expected"
    refused("evaluate", "okvqa", f"--references={tmp_path / 'no'}", predictions, message=message)
    refused(*flags, f"--submission={tmp_path / 'raw'}", message="raw: is a folder, a file to write")


def test_prepare_refuses_what_it_cannot_read(refused, tmp_path):
    raw = write_aokvqa(tmp_path / "raw")
    write(raw / "aokvqa_v1p0_val.json", [aokvqa_row("q1"), aokvqa_row("q1")])
    flags = (f"--raw={raw}", f"--out={tmp_path / 'out'}")
    refused("prepare", "aokvqa", *flags, message=r"entry 2: question_id 'q1' is there twice")
    refused("prepare", "okvqa", *flags, message=r"holds none of OK-VQA's questions")
    assert len(OKVQA["val"]) == 3
