"""ScienceQA: official files of every kind, the nine columns, prediction formats, real files."""

import json
import re

import numpy as np
import pytest
from cli_runs import done, mmqa, png, write_rows
from shared_data import SHARED, shared_benchmark

from mmqa_jax.benchmarks.scienceqa import (
    parse_conversation,
    read_scienceqa,
    scienceqa_columns,
    score_scienceqa,
)
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

REAL = SHARED / "scienceqa"
needs_data = pytest.mark.skipif(
    not REAL.exists(), reason="needs ../shared/data/scienceqa (MMQA_SHARED_DATA)"
)


def problem(split: str, subject: str = "natural science", grade: str = "grade3", **fields) -> dict:
    return {
        "question": "Which is a tree?", "choices": ["oak", "rose", "moss"], "answer": 0, "hint": "",
        "image": None, "task": "closed choice", "grade": grade, "subject": subject,
        "topic": "biology", "category": "Plants", "skill": "Identify plants",
        "lecture": "Trees are tall.", "solution": "An oak is tall.", "split": split, **fields,
    }  # fmt: skip


PROBLEMS = {
    "1": problem("train", image="image.png"),
    "2": problem("val", hint="Look up."),
    "3": problem("test", image="image.png", hint="Look up."),
    "4": problem("test", "social science", "grade8", image="image.png", answer=1),
    "5": problem("test", "language science", "grade12", hint="A hint."),
    "6": problem("test", "natural science", "grade6", choices=["yes", "yes"]),
}


@pytest.fixture
def raw(tmp_path):
    """The official layout; the picture of problem 4 is absent."""
    folder = tmp_path / "raw"
    for split, pid in (("train", "1"), ("test", "3")):
        (folder / "images" / split / pid).mkdir(parents=True)
        (folder / "images" / split / pid / "image.png").write_bytes(png((0, 90, int(pid))))
    (folder / "problems.json").write_text(json.dumps(PROBLEMS))
    splits = {
        s: [k for k, p in PROBLEMS.items() if p["split"] == s] for s in ("train", "val", "test")
    }
    (folder / "pid_splits.json").write_text(json.dumps({**splits, "minitest": ["3"]}))
    captions = {"1": "a tall tree", "3": "an oak", "4": "a map"}
    (folder / "captions.json").write_text(json.dumps({"model": "m", "captions": captions}))
    return folder


def test_prepare_official_files(raw, tmp_path):
    out = tmp_path / "out"
    ended = mmqa("prepare", "scienceqa", f"--raw={raw}", f"--out={out}", "--json")
    assert ended.code == 0, ended.err
    assert "1 of 3 questions with a picture have no file of it; captions stand" in ended.err
    assert ended.value["splits"] == {"train": 1, "val": 1, "test": 4}
    assert ended.value["found"]["questions with equal choices"] == 1
    assert ended.value["published_differences"]["train questions"] == {
        "published": 12_726,
        "found": 1,
    }
    corpus = open_corpus(out)
    three, four = corpus.questions("test")[:2]
    assert corpus.question_picture(three) == png((0, 90, 3))
    assert (four.image, four.extra["has_picture"], four.extra["caption"]) == (None, True, "a map")
    assert (four.answers, four.answer_index) == (("rose",), 1)
    assert (four.category, four.rationale) == ("social science", "An oak is tall.")
    assert four.extra["lecture"] == "Trees are tall."
    assert "solution" not in four.extra


def test_the_hubs_parquet_holds_the_same_questions(raw, tmp_path):
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        rows = []
        for pid, row in PROBLEMS.items():
            if row["split"] != split:
                continue
            picture = png((0, 90, int(pid))) if row["image"] else None
            image = {"bytes": picture, "path": "image.png"} if picture else None
            rows.append({k: v for k, v in row.items() if k != "split"} | {"image": image})
        table = pyarrow.Table.from_pylist(rows)
        path = folder / f"{name}-00000-of-00001-0123456789abcdef.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=1)
    of_json = read_scienceqa(raw).questions
    found = read_scienceqa(tmp_path / "hub")
    assert [q.id for q in found.questions] == [
        *("train-0", "val-0", "test-0", "test-1", "test-2", "test-3")
    ]
    for a, b in zip(found.questions, of_json, strict=True):
        assert (a.split, a.question, a.choices, a.answer_index) == (
            *(b.split, b.question, b.choices, b.answer_index),
        )
        assert (a.rationale, a.category) == (b.rationale, b.category)
        assert a.extra["has_picture"] == b.extra["has_picture"] == (a.image is not None)
        if a.image is not None:
            assert found.read_picture(a.image) == png((0, 90, int(b.id)))
    # Pids are not in these files.
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"results": {"3": 0}}))
    flags = ("evaluate", "scienceqa", f"--references={tmp_path / 'hub'}")
    ended = mmqa(*flags, f"--predictions={results}")
    assert "answers problem 3, but the hub's Parquet has no pids; give --references" in ended.err
    # Without a column that is needed: one of the nine columns would be empty, another too full.
    path = next(folder.glob("test-*.parquet"))
    whole = pyarrow.parquet.read_table(path)
    for name in ("choices", "hint", "image", "subject", "grade"):
        pyarrow.parquet.write_table(whole.drop_columns([name]), path)
        refuses(rf"test-.*\.parquet: has no column {name}", read_scienceqa, tmp_path / "hub")


def test_conversations_are_taken_apart():
    text = (
        "<image>\nContext: A. Smith says:\nA. no option\nWhich?\nA. one\nB. two\nof them\nC. three"
    )
    assert parse_conversation(text) == (
        "Context: A. Smith says:\nA. no option\nWhich?",
        ("one", "two\nof them", "three"),
    )
    refuses("choices A, C", parse_conversation, "Which?\nA. one\nC. two", error=ValueError)
    refuses("no line", parse_conversation, "Which?\nB. one", error=ValueError)


def test_conversations_add_the_test_questions_that_problems_lack(raw):
    entry = {
        "id": "70",
        "image": "70/image.png",
        "conversations": [
            {"from": "human", "value": "<image>\nContext: No.\nWhich?\nA. one\nB. two"},
            {"from": "gpt", "value": "B"},
        ],
    }
    known = {**entry, "id": "3"}
    (raw / "test_questions_all.json").write_text(json.dumps([entry, known]))
    questions = {question.id: question for question in read_scienceqa(raw).questions}
    assert len(questions) == 7
    assert questions["3"].choices == ("oak", "rose", "moss")
    added = questions["70"]
    assert (added.question, added.choices) == ("Context: No.\nWhich?", ("one", "two"))
    assert (added.answer_index, added.extra["has_hint"], added.category) == (1, True, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 3}, r"problem 4: answer is 3; a number from 0 to 2"),
        ({"answer": "0"}, r"problem 4: answer is '0'"),
        ({"choices": "oak"}, r"problem 4: choices is 'oak'; a list of texts"),
        ({"choices": ["oak", 3]}, r"problem 4: choices is \['oak', 3\]; a list of texts"),
        ({"question": ""}, r"problem 4: question is ''; text was expected"),
        ({"lecture": 3}, r"problem 4: lecture is 3; text was expected"),
        ({"image": 3}, r"problem 4: image is 3; text was expected"),
    ],
)
def test_broken_problems(change, message, raw, tmp_path, refused):
    problems = {**PROBLEMS, "4": {**PROBLEMS["4"], **change}}
    (raw / "problems.json").write_text(json.dumps(problems))
    refused("prepare", "scienceqa", f"--raw={raw}", f"--out={tmp_path / 'out'}", message=message)


def test_files_that_do_not_fit(raw, tmp_path, refused):
    flags = ("prepare", "scienceqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    (raw / "pid_splits.json").write_text(json.dumps({"train": ["1"], "val": ["2"], "test": ["3"]}))
    refused(*flags, message=r"problem 4: .*pid_splits\.json does not name it")
    (raw / "pid_splits.json").write_text(json.dumps({"train": ["1"], "val": ["2"], "test": ["1"]}))
    refused(*flags, message=r"problem 1 is in train and in test")
    (raw / "pid_splits.json").write_text(json.dumps({"train": [[1]]}))
    refused(*flags, message=r"pid_splits\.json: train is \[\[1\]\]; a list of texts was expected")
    (raw / "problems.json").rename(raw / "kept.json")
    for name in ("pid_splits.json", "captions.json"):
        refused(
            "evaluate", "scienceqa", f"--references={raw / name}", "--predictions=p.json",
            message=rf"{name}: holds no problem with a question .*; give ScienceQA's problems\.json",
        )  # fmt: skip
    (raw / "kept.json").rename(raw / "problems.json")
    (raw / "pid_splits.json").unlink()
    assert len(read_scienceqa(raw).questions) == 6  # problems name their split
    text = json.dumps(PROBLEMS)
    (raw / "problems.json").write_text(text[:-1] + ', "4": {}}')
    refused(*flags, message=r"key '4' appears twice")
    (raw / "problems.json").unlink()
    refused(*flags, message=r"holds none of ScienceQA's questions; put problems\.json")
    for name in ("problems_a.json", "problems_b.json"):
        (raw / name).write_text(text)
    refused(*flags, message=r"holds 2 files problems_\*\.json")


# An empty text begins with every letter, and is none.
@pytest.mark.parametrize("answer", ["", "AB", "Z"])
def test_an_answer_of_llavas_that_is_no_letter(answer, tmp_path):
    turns = [{"value": "Which?\nA. oak\nB. rose"}, {"value": answer}]
    path = tmp_path / "test_questions_all.json"
    path.write_text(json.dumps([{"id": "9", "conversations": turns}]))
    refuses(
        r"all\.json, entry 1: .*conversation of .*; fetch the file again", read_scienceqa, tmp_path
    )


def test_a_table_whose_name_says_no_split(raw, tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "questions.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["Which?"]}), path)
    message = (
        r"questions\.parquet: its name says no split; call it train-\*, validation-\*, test-\*\."
    )
    refuses(message, read_scienceqa, path)


# Scores


def test_scores_by_hand(raw):
    questions = [q for q in read_scienceqa(raw).questions if q.split == "test"]
    said = {
        "3": "The answer is A.",  # right
        "4": "B",  # right by LLaVA's rule, nothing by ScienceQA's
        "5": "The answer is E.",  # out of range: wrong
        "6": "I do not know.",
    }
    evaluation = score_scienceqa(questions, [Prediction(k, v) for k, v in said.items()])
    (scores,) = evaluation.scored
    found = scores.per_question
    assert found["scienceqa/letter_or_wrong"].tolist() == [1, 1, 0, 0]
    assert found["scienceqa/letter_or_expected"].tolist() == [1, 1 / 3, 1 / 3, 1 / 2]
    assert found["scienceqa/letter_or_random"][0] == 1
    assert set(found["scienceqa/letter_or_random"]) <= {0, 1}
    assert "scienceqa/recorded_choice" not in found
    assert evaluation.unparsed == {
        "scienceqa/letter_or_random": 3,
        "scienceqa/letter_or_expected": 3,
        "scienceqa/letter_or_wrong": 2,
    }
    by_column = {k: v["scienceqa/letter_or_wrong"] for k, v in scores.by_category.items()}
    assert by_column == {
        "NAT": 1 / 2, "SOC": 1, "LAN": 0, "TXT": 1 / 2, "IMG": 1, "NO": 0, "G1-6": 1 / 2,
        "G7-12": 1 / 2,
    }  # fmt: skip
    # A missing prediction is wrong by every rule, not a draw.
    (scores,) = score_scienceqa(questions, [Prediction("3", "The answer is B.")]).scored
    assert all(not values.any() for values in scores.per_question.values())
    assert scores.missing == 3


def test_the_expectation_is_the_mean_of_the_draws(raw):
    """Over many questions without a letter, the random score is near the expected one."""
    import dataclasses

    (question,) = [q for q in read_scienceqa(raw).questions if q.id == "3"]
    many = [dataclasses.replace(question, id=str(n)) for n in range(3000)]
    (scores,) = score_scienceqa(many, [Prediction(q.id, "no letter") for q in many]).scored
    assert scores.scores["scienceqa/letter_or_expected"] == pytest.approx(1 / 3)
    drawn = scores.scores["scienceqa/letter_or_random"]
    assert abs(drawn - 1 / 3) < 4 * (2 / 9 / 3000) ** 0.5  # 4 sigma


def test_columns_overlap_where_a_question_has_hint_and_picture(raw):
    questions = read_scienceqa(raw).questions
    columns = scienceqa_columns(questions)
    hint = np.array([bool(PROBLEMS[q.id]["hint"]) for q in questions])
    picture = np.array([bool(PROBLEMS[q.id]["image"]) for q in questions])
    np.testing.assert_array_equal(columns["TXT"], hint)
    np.testing.assert_array_equal(columns["IMG"], picture)
    np.testing.assert_array_equal(columns["NO"], ~(hint | picture))
    assert (columns["TXT"] & columns["IMG"]).sum() == 1
    assert (columns["NAT"] ^ columns["SOC"] ^ columns["LAN"]).all()
    assert (columns["G1-6"] ^ columns["G7-12"]).all()


# Prediction files


def test_every_format_gives_the_same_choices(raw, tmp_path):
    letters = {"3": "A", "4": "B", "5": "C", "6": "A"}
    indices = {pid: "ABC".index(letter) for pid, letter in letters.items()}
    texts = {pid: f"The answer is {letter}." for pid, letter in letters.items()}
    files = {
        "results.json": {"acc": 50.0, "results": indices},
        "outputs.json": {"outputs": texts},
        "both.json": {"results": indices, "outputs": texts},
    }
    for name, data in files.items():
        (tmp_path / name).write_text(json.dumps(data))
    rows = [{"question_id": pid, "text": text, "prompt": "p"} for pid, text in texts.items()]
    write_rows(tmp_path / "llava.jsonl", rows)
    rows = [{"question_id": pid, "choice": choice} for pid, choice in indices.items()]
    write_rows(tmp_path / "ours.jsonl", rows)
    flags = ("evaluate", "scienceqa", f"--references={raw}")
    for name in (*files, "llava.jsonl", "ours.jsonl"):
        result = done(*flags, f"--predictions={tmp_path / name}")
        assert set(result["scores"].values()) == {0.75}, name
        assert result["by_category"]["TXT"]["scienceqa/letter_or_wrong"] == 1 / 2
        assert result["n_by_category"]["TXT"] == 2
        assert set(result["unparsed"].values()) == {0}


def test_submissions_are_read_back_with_the_same_choices(raw, tmp_path):
    rows = [
        {"question_id": "3", "answer": "B. rose"},
        {"question_id": "4", "choice": 1},
        {"question_id": "5", "answer": "no idea"},
    ]
    path = write_rows(tmp_path / "ours.jsonl", rows)
    out = tmp_path / "submission.json"
    flags = ("evaluate", "scienceqa", f"--references={raw}")
    result = done(*flags, f"--predictions={path}", f"--submission={out}")
    written = json.loads(out.read_text())["results"]
    assert (written["3"], written["4"], written["6"]) == (1, 1, -1)
    assert written["5"] in (0, 1, 2)  # drawn, as in the original
    again = done(*flags, f"--predictions={out}")
    assert again["scores"]["scienceqa/recorded_choice"] == (1 + (written["5"] == 0)) / 4
    assert result["missing"] == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"results": {"99": 0}}, r"no question has the id '99'"),
        ({"results": {"3": "A"}}, r"results, problem 3: 'A' was found and a choice's number"),
        ({"outputs": {"3": 1}}, r"outputs, problem 3: 1 was found and text expected"),
        ({"3": 1}, r"\{\"results\": \{pid: index\}\} was expected"),
        ([], r"\{\"results\": \{pid: index\}\} was expected"),
        ({"results": {}}, r"holds no predictions; give predictions\.jsonl"),
    ],
)
def test_broken_predictions(data, message, raw, tmp_path, refused):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    refused(
        "evaluate", "scienceqa", f"--references={raw}", f"--predictions={path}", message=message
    )


def test_an_index_out_of_range_is_no_choice(raw, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"results": {"3": -1, "4": 1, "5": 7, "6": 0}}))
    result = done("evaluate", "scienceqa", f"--references={raw}", f"--predictions={path}")
    assert result["scores"]["scienceqa/recorded_choice"] == 2 / 4
    assert result["unparsed"]["scienceqa/recorded_choice"] == 2


def test_numbers_that_the_official_script_takes_and_null(raw, tmp_path):
    """tools/evaluate_acc.py takes `int(results[pid])`."""
    path = tmp_path / "results.json"
    results = {"3": "0", "4": 1.0, "5": None, "6": float("nan")}
    path.write_text(json.dumps({"results": results, "outputs": {"5": None}}))
    flags = ("evaluate", "scienceqa", f"--references={raw}", f"--predictions={path}", "--json")
    ended = mmqa(*flags)
    assert ended.value["scores"]["scienceqa/recorded_choice"] == 2 / 4
    assert ended.value["unparsed"]["scienceqa/recorded_choice"] == 2
    assert ended.value["empty"] == 1
    assert ended.value["notes"] == ended.err.splitlines()
    assert ended.value["notes"][0] == "1 of 4 answers is empty"
    assert re.fullmatch(
        r"2 predictions name no choice \(.*recorded_choice\)", ended.value["notes"][1]
    )


def test_llavas_lines_may_be_named_json(raw, tmp_path):
    rows = [{"question_id": pid, "text": "A"} for pid in ("3", "4", "5", "6")]
    path = write_rows(tmp_path / "answers.json", rows)
    result = done("evaluate", "scienceqa", f"--references={raw}", f"--predictions={path}")
    assert result["scores"]["scienceqa/letter_or_wrong"] == 3 / 4


# Real files


@needs_data
@pytest.mark.parametrize("references", ["test_questions_all.json", "."])
def test_the_13b_models_official_predictions(references):
    """The file says 3,855 right (90.90), and its results are right in 3,856 (90.92).

    The answer to problem 3247 is D, of two choices: LLaVA's script of that time drew one at random,
    once for the count and once more for the results.
    """
    path = REAL / "predictions_llava13b.json"
    flags = (f"--references={REAL / references}", f"--predictions={path}")
    result = done("evaluate", "scienceqa", *flags)
    stated = json.loads(path.read_text())
    assert (result["n"], result["missing"]) == (4241, 0)
    scores = {name.split("/")[1]: value * 4241 for name, value in result["scores"].items()}
    assert scores["letter_or_wrong"] == pytest.approx(stated["correct"])
    assert scores["letter_or_wrong"] == pytest.approx(3855)
    assert scores["recorded_choice"] == pytest.approx(3856)
    assert scores["letter_or_expected"] == pytest.approx(3855.5)
    assert scores["letter_or_random"] in (pytest.approx(3855), pytest.approx(3856))
    assert result["unparsed"]["scienceqa/letter_or_wrong"] == 1
    counts = result["n_by_category"]
    assert (counts["TXT"], counts["IMG"], counts["NO"]) == (2046, 2017, 1435)
    if references == ".":
        assert counts["NAT"] + counts["SOC"] + counts["LAN"] == 361
        assert counts["G1-6"] + counts["G7-12"] == 361


@needs_data
def test_real_problems_and_conversations_agree():
    """LLaVA's 4,241 prompts are taken apart into the problems' own texts and choices."""
    problems = {
        q.id: q
        for q in shared_benchmark(read_scienceqa, "scienceqa/problems_subset.json").questions
    }
    conversations = shared_benchmark(read_scienceqa, "scienceqa/test_questions_all.json").questions
    assert len(conversations) == 4241
    both = [q for q in conversations if q.id in problems]
    assert len(both) == 361
    for question in both:
        known = problems[question.id]
        assert question.choices == known.choices
        assert question.answer_index == known.answer_index
        assert question.question.endswith(known.question)
        for key in ("has_hint", "has_picture"):
            assert question.extra[key] == known.extra[key]
