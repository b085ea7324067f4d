"""MathVista: its files, its prompts, its extraction and scores, its result file."""

import dataclasses
import json

import pyarrow
import pyarrow.parquet
import pytest
from cli_runs import mmqa, png
from fake_llm import FakeLLM

from mmqa_jax.benchmarks import mathvista
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation import multiple_choice
from mmqa_jax.papers.mathvista import SETTINGS, answer_mathvista, extract_finished
from mmqa_jax.prompting.backends import Picture
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")
SHOWN = png((9, 9, 9))


def problem(pid: int, kind: str, answer: str, **more) -> dict:
    metadata = {
        "language": "english", "source": "made up", "category": "math-targeted-vqa",
        "task": "math word problem", "context": "table", "grade": "high school",
        "skills": ["arithmetic reasoning", "logical reasoning"],
    }  # fmt: skip
    return {
        "pid": str(pid), "question": "How much is it? ", "image": f"images/{pid}.jpg",
        "choices": None, "unit": None, "precision": None, "answer": answer,
        "question_type": "multi_choice" if kind == "text" else "free_form", "answer_type": kind,
        "metadata": metadata, **more,
    }  # fmt: skip


PROBLEMS = [
    problem(1, "text", "12 cm", choices=["9 cm", "12 cm", "a"]),
    problem(2, "integer", "12", unit="$"),
    problem(3, "float", "1.5", precision=1.0),
    problem(4, "list", "[1, 2]"),
    problem(5, "float", "0.25", precision=2),
]


def write_json(folder) -> None:
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "1.jpg").write_bytes(SHOWN)
    (folder / "testmini.json").write_text(json.dumps({one["pid"]: one for one in PROBLEMS}))
    hidden = {**problem(1001, "integer", ""), "answer": None}
    (folder / "test.json").write_text(json.dumps({"1001": hidden}))


@pytest.fixture
def data(tmp_path):
    write_json(tmp_path / "raw")
    ended = mmqa("prepare", "mathvista", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    assert ended.code == 0, ended.err
    return tmp_path / "data"


def test_prepare_official_files(data):
    corpus = open_corpus(data)
    questions = corpus.questions("val")
    assert [(q.id, q.answers) for q in questions] == [(p["pid"], (p["answer"],)) for p in PROBLEMS]
    assert (questions[0].choices, questions[0].answer_index) == (("9 cm", "12 cm", "a"), 1)
    assert questions[2].extra["precision"] == 1
    assert questions[0].extra["skills"] == ["arithmetic reasoning", "logical reasoning"]
    assert corpus.question_picture(questions[0]) == SHOWN
    assert questions[1].image is None
    assert corpus.questions("test")[0].answers == ()


def test_the_hubs_parquet_gives_the_same(data, tmp_path):
    raw, picture = tmp_path / "hub", {"bytes": SHOWN, "path": None}
    raw.mkdir()
    rows = [{**one, "decoded_image": picture} for one in PROBLEMS]
    rows = [
        {**one, "precision": None if one["precision"] is None else float(one["precision"])}
        for one in rows
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, raw / "testmini-00000-of-00001.parquet")
    ended = mmqa("prepare", "mathvista", f"--raw={raw}", f"--out={tmp_path / 'other'}")
    assert ended.code == 0, ended.err
    ours, others = (
        [(q.question, q.answers, q.choices, q.extra) for q in open_corpus(folder).questions("val")]
        for folder in (data, tmp_path / "other")
    )
    assert ours == others


# What the authors' query.json and create_one_query have.
PICK = "Hint: Please answer the question and provide the correct option letter, e.g., A, B, C, D, at the end."
LISTED = "Question: How much is it? \nChoices:\n(A) 9 cm\n(B) 12 cm\n(C) a"
WHOLE = "Hint: Please answer the question requiring an integer answer and provide the final value, e.g., 1, 2, 3, at the end."
REAL = "Hint: Please answer the question requiring a floating-point number with {} and provide the final value, e.g., {}, at the end."
ROW = "Hint: Please answer the question requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4], at the end."
QUERIES = {
    "1": f"{PICK}\n{LISTED}",
    "2": f"{WHOLE}\nQuestion: How much is it?  (Unit: $)",
    "3": f"{REAL.format('one decimal place', '1.2, 1.3, 1.4')}\nQuestion: How much is it?",
    "4": f"{ROW}\nQuestion: How much is it?",
    "5": f"{REAL.format('two decimal places', '1.23, 1.34, 1.45')}\nQuestion: How much is it?",
}


def asked(data, said: str = "so 12", **options):
    """What the model is asked about the questions of val, and the predictions."""
    corpus, llm = open_corpus(data), FakeLLM(lambda prompt: (answer(prompt, said), -1.0))
    found = answer_mathvista(corpus.questions("val"), corpus, llm, **options)
    return llm.seen, found


def answer(prompt: str, said: str) -> str:
    return "12" if prompt.endswith("Extracted answer: ") else said


def test_prompts_are_the_authors(data):
    seen, found = asked(data)
    content = {query.id: query.messages[0].content for query in seen}
    assert {name: parts[-1] for name, parts in content.items()} == QUERIES
    assert content["1"] == (Picture(SHOWN), QUERIES["1"])
    assert [one.answer for one in found] == ["so 12"] * 5
    seen, _ = asked(data, template="built", picture=False)
    content = {query.id: query.messages[0].content for query in seen}
    assert content["1"] == (f"{LISTED}\n{PICK}\nSolution:",)


def test_a_model_extracts_what_the_rules_do_not_find(data):
    seen, found = asked(data, extract="llm")
    assert [one.answer for one in found] == ["12"] * 5
    extracting = {query.id: query.messages[0] for query in seen[5:]}
    text = extracting["1"].text
    assert text.startswith("Please read the following example. Then extract the answer")
    assert text.endswith(f"\n\n{QUERIES['1']}\n\nso 12\n\nExtracted answer: ")
    assert extracting["1"].pictures == ()
    assert found[0].trace["outputs"] == [{"text": "so 12"}, {"text": "12", "logprob": -1.0}]
    seen, found = asked(data, "12", extract="llm")  # whole numbers need none, nor do others
    assert {query.id for query in seen[5:]} == {"1", "4"}
    assert [one.answer for one in found] == ["12", "12", "12.0", "12", "12.0"]


def test_rules_extract_without_a_model(data):
    _, found = asked(data, " 12 ")
    assert [one.answer for one in found] == ["12", "12", "12.0", "12", "12.0"]
    said = 'The answer is "B".'
    answers = [asked(data, said, extract=how)[1][0].answer for how in ("rules", "quick")]
    assert answers == [said, "B"]


def test_another_model_extracts_of_a_finished_run(data):
    _, run = asked(data)
    finished = {one.question_id: {"question_id": one.question_id, **one.trace} for one in run}
    questions, llm = open_corpus(data).questions("val"), FakeLLM(lambda prompt: ("B", -1.0))
    found = extract_finished(questions, finished, llm)
    assert [one.answer for one in found] == ["B"] * 5
    texts = {query.id: query.messages[0].text for query in llm.seen}
    assert f"{QUERIES['2']}\n\nso 12\n\n" in texts["2"]
    refuses("has no responses to question 1", extract_finished, questions, {}, llm)


def of(kind: str, precision: int = 1) -> Question:
    choices = ("increase", "it decreases", "no change") if kind == "text" else ()
    extra = {"answer_type": kind, "precision": precision}
    return Question("q", "val", "?", choices=choices, extra=extra)


@pytest.mark.parametrize("setting", ["mathvista", "extracted"])
def test_answers_without_a_hint_are_refused_before_models_load(setting):
    check, known = SETTINGS[setting].check_inputs, [of("text"), of("integer"), of("float", 2)]
    check(known, {}, {})
    for question, named in ((of("float", 3), "float with 3 decimals"), (of("date"), "date")):
        message = rf"question q: .* no hint at an answer of type {named}; leave .* data\.where"
        refuses(message, check, [*known, question], {}, {})


# What extract_answer gives before it asks a model (None).
@pytest.mark.parametrize(
    ("text", "kind", "quick", "found"),
    [
        ("", "text", False, ""),
        ("no change", "text", False, "no change"),
        ("(B)", "text", False, None),
        (" 7 ", "integer", False, "7"),
        ("7.0", "integer", False, None),
        ("7", "float", False, "7.0"),
        ("[1]", "list", False, None),
        ('The answer is "7 m".', "integer", True, "7 m"),
        ('The answer is "7 m".', "integer", False, None),
        ('The answer is "7"\nThe answer is "a". "b". c', "text", True, 'a". "b'),
        ('The answer is "' * 20_000, "text", True, None),
    ],
)
def test_extraction_by_rule(text, kind, quick, found):
    assert multiple_choice.extracted_by_rule(text, of(kind), quick=quick) == found
    if not quick:
        assert multiple_choice.extracted_by_rule(text, of(kind)) == found


# What normalize_extracted_answer gives.
@pytest.mark.parametrize(
    ("text", "kind", "result"),
    [
        ("B", "text", "it decreases"),
        ("(c) since", "text", "no change"),
        ("(x)", "text", "increase"),  # least distance, as of an empty one
        ("", "text", "increase"),
        ("it decrease", "text", "it decreases"),
        ("7.9", "integer", "7"),
        ("inf", "integer", None),
        ("seven", "integer", None),
        ("1.25", "float", "1.2"),
        ("3", "float", "3.0"),
        ("[1,2]", "list", "[1,2]"),
    ],
)
def test_normalization(text, kind, result):
    assert multiple_choice.normalized(text, of(kind)) == result


def test_an_empty_extraction_names_no_option_where_it_is_ignored():
    assert multiple_choice.normalized(" ", of("text"), ignore_empty=True) is None


# By hand: https://en.wikipedia.org/wiki/Levenshtein_distance has the first two.
@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("kitten", "sitting", 3),
        ("saturday", "sunday", 3),
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("ab", "ba", 2),
        ("△ABC", "ABC", 1),
    ],
)
def test_edit_distance(first, second, distance):
    assert (
        multiple_choice.edit_distance(first, second)
        == multiple_choice.edit_distance(second, first)
        == distance
    )


def test_scores_by_the_scripts_keys(data):
    questions = open_corpus(data).questions("val")
    given = [
        *(Prediction("1", "B"), Prediction("2", "12.0"), Prediction("3", "1.46")),
        Prediction("4", "[1,2]"),
    ]
    evaluation = mathvista.score_mathvista(questions, given)
    (scores,) = evaluation.scored
    assert scores.scores == {"mathvista/official": 0.6, "mathvista/empty_wrong": 0.6}
    assert scores.missing == 1
    assert scores.by_category["answer_type: float"]["mathvista/official"] == 0.5
    assert scores.counts["skills: logical reasoning"] == scores.counts["grade: high school"] == 5
    chosen = mathvista.score_mathvista(questions, [Prediction("1", "12 cm", choice=1)])
    assert chosen.scored[0].scores["mathvista/official"] == 0.2
    # An empty extraction is the shortest option to the script, and none by the other score.
    shortest = dataclasses.replace(of("text"), answers=("increase",))
    (scores,) = mathvista.score_mathvista([shortest], [Prediction("q", "")]).scored
    assert scores.scores == {"mathvista/official": 1.0, "mathvista/empty_wrong": 0.0}


def test_extractions_that_are_no_texts_are_read_as_the_script_reads_them(tmp_path):
    """calculate_score.py: float() of a number, str() of all else; null is the text `None`."""
    path = tmp_path / "output.json"
    said = {"1": 14, "2": 2.5, "3": [1, 2], "4": None, "5": "x"}
    path.write_text(json.dumps({pid: {"extraction": one} for pid, one in said.items()}))
    found = {one.question_id: one.answer for one in mathvista.read_mathvista_predictions(path)}
    assert found == {"1": "14", "2": "2.5", "3": "[1, 2]", "4": "None", "5": "x"}
    path.write_text(json.dumps({"1": {"response": None}, "2": {"response": 7}}))
    assert [one.answer for one in mathvista.read_mathvista_predictions(path)] == ["", "7"]
    path.write_text(json.dumps({"1": {"extraction": {"value": 14}}}))
    refuses("problem 1: `extraction` or `response` was", mathvista.read_mathvista_predictions, path)


def test_official_files_in_and_out(data, tmp_path):
    path, out = tmp_path / "output.json", tmp_path / "submission.json"
    flags = ("evaluate", "mathvista", f"--references={data}", f"--predictions={path}", "--json")
    results = {"1": {"response": "it is 9", "extraction": "B"}, "2": {"response": " 12 "}}
    path.write_text(json.dumps(results))
    ended = mmqa(*flags, "--split=testmini", f"--submission={out}")
    assert ended.code == 0, ended.err
    assert ended.value["scores"]["mathvista/official"] == 0.4
    written = json.loads(out.read_text())
    assert [written[pid]["extraction"] for pid in "123"] == ["B", "12", ""]
    assert written["3"]["precision"] == 1
    assert written["1"]["metadata"]["task"] == "math word problem"
    path.write_text(json.dumps({"1": {"answer": "B"}}))
    ended = mmqa(*flags)
    assert (ended.code, "problem 1" in ended.err) == (2, True)
    path.write_text(json.dumps([results]))
    ended = mmqa(*flags)
    assert ended.code == 2
    assert "output.json: {pid: problem} was expected, with `extraction` in each;" in ended.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer_type": "text"}, "answer_type 'text'"),
        ({"answer_type": "float"}, "precision is None"),
        ({"choices": [1, 2]}, "list of texts"),
        ({"metadata": None}, "metadata is None; an object"),
        ({"question": ""}, "question"),
    ],
)
def test_malformed_files(tmp_path, change, words):
    write_json(tmp_path / "raw")
    rows = {"2": {**PROBLEMS[1], **change}}
    (tmp_path / "raw" / "testmini.json").write_text(json.dumps(rows))
    ended = mmqa("prepare", "mathvista", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    assert ended.code == 2
    assert "problem 2" in ended.err
    assert words in ended.err


_TWICE = {"1": {**PROBLEMS[1], "pid": "1001"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], r"testmini\.json: \{pid: problem\} was expected; fetch the file again"),
        ({"7": [1]}, r"testmini\.json, problem 7: an object was expected; fetch the file again"),
        (_TWICE, r"test\.json, problem 1001: pid '1001' is there twice; keep one of them"),
        ({}, "raw: holds none of MathVista's questions; put testmini.json and images/"),
        ({"2": {**PROBLEMS[1], "image": "../2.jpg"}}, r"raw: picture '2' .*; fetch"),
    ],
)
def test_files_of_another_form(tmp_path, content, message):
    write_json(tmp_path / "raw")
    (tmp_path / "raw" / "testmini.json").write_text(json.dumps(content))
    if content == {}:
        (tmp_path / "raw" / "test.json").unlink()
    refuses(message, mathvista.read_mathvista, tmp_path / "raw")


def test_a_picture_whose_name_no_disk_takes_is_none(tmp_path):
    write_json(tmp_path / "raw")
    rows = {"2": {**PROBLEMS[1], "image": 300 * "x"}}
    (tmp_path / "raw" / "testmini.json").write_text(json.dumps(rows))
    assert mathvista.read_mathvista(tmp_path / "raw").questions[0].image is None
