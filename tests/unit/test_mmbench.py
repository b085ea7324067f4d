"""MMBench: its tables, circular passes, both scores, spreadsheets there and back."""

import base64
import itertools
import json

import hypothesis
import openpyxl
import pytest
from cli_runs import done, mmqa, png, write_rows
from hypothesis import strategies as st

from mmqa_jax.benchmarks.mmbench import (
    circular_passes,
    read_mmbench,
    read_mmbench_predictions,
    score_mmbench,
    write_mmbench_submission,
)
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.formats.official import Entry
from mmqa_jax.data.formats.tables import read_table, write_spreadsheet
from mmqa_jax.data.formats.vlmeval import TablePictures
from mmqa_jax.data.schema import Prediction, Question
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

COLUMNS = (
    *("index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "split"),
    "l2-category",
)


def encoded(number: int) -> str:
    return base64.b64encode(png((number, 0, 90))).decode()


def row(index: int, choices: str, answer: str, image: str, **cells) -> dict:
    """A row of a table; `choices` is a text per letter, split at spaces."""
    texts = dict(itertools.zip_longest("ABCD", choices.split(), fillvalue=""))
    return {
        "index": str(index), "question": f"Question {index}?", "hint": "", **texts, "answer": answer,
        "category": "color", "image": image, "split": "dev", "l2-category": "perception", **cells,
    }  # fmt: skip


# As VLMEvalKit distributes it: later passes refer to the picture of the first.
ROWS = [
    row(7, "red blue", "A", encoded(7), hint='A "quoted"\thint\nof two lines'),
    row(8, "cat dog fox", "C", encoded(8), category="animal", **{"l2-category": "reasoning"}),
    row(1_000_007, "blue red", "B", "7"),
    row(1_000_008, "fox cat dog", "A", "8", category="animal", **{"l2-category": "reasoning"}),
    row(2_000_008, "dog fox cat", "B", "8", category="animal", **{"l2-category": "reasoning"}),
]


def by_both_rules(circular: float, vanilla: float) -> dict[str, float]:
    """Scores of answers that VLMEvalKit's two rules read alike."""
    scores = {"mmbench/circular": circular, "mmbench/vanilla": vanilla}
    return scores | {f"{name}_2026": value for name, value in scores.items()}


def write_tsv(path, rows, columns=COLUMNS):
    """As pandas writes it: cells with tabs, quotes or line ends are quoted, quotes doubled."""

    def cell(text: str) -> str:
        quoted = any(mark in text for mark in '"\t\n')
        return '"' + text.replace('"', '""') + '"' if quoted else text

    lines = ["\t".join(columns)]
    lines += ["\t".join(cell(row.get(column, "")) for column in columns) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def raw(tmp_path):
    write_tsv(tmp_path / "raw" / "MMBench_DEV_EN.tsv", ROWS)
    return tmp_path / "raw"


def test_prepare_a_table_with_its_passes(raw, tmp_path):
    result = done("prepare", "mmbench", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert result["splits"] == {"val": 5}
    assert result["found"]["val questions"] == 2
    assert (result["found"]["circular passes"], result["found"]["passes made here"]) == (5, 0)
    assert result["counts"]["pictures"] == 2  # passes share their picture
    questions = {q.id: q for q in open_corpus(tmp_path / "out").questions("val")}
    first, second = questions["7"], questions["1000007"]
    assert first.extra["hint"] == 'A "quoted"\thint\nof two lines'
    assert (second.choices, second.answer_index, second.answers) == (("blue", "red"), 1, ("red",))
    assert (second.extra["base_index"], second.extra["pass"]) == ("7", 1)
    assert (second.image, second.category) == (first.image, "color")
    corpus = open_corpus(tmp_path / "out")
    assert corpus.question_picture(second) == png((7, 0, 90))
    assert questions["2000008"].extra["l2-category"] == "reasoning"


def test_passes_are_made_where_a_table_has_none(raw, tmp_path):
    """They are those of ROWS, which rotate as VLMEvalKit's."""
    alone = write_tsv(tmp_path / "alone" / "mmbench.tsv", ROWS[:2])
    made = {q.id: q for q in read_mmbench(alone).questions}
    given = {q.id: q for q in read_mmbench(raw).questions}
    assert made.keys() == given.keys()
    for name, question in given.items():
        assert (made[name].choices, made[name].answer_index, made[name].image) == (
            *(question.choices, question.answer_index, question.image),
        )
        assert made[name].extra["pass"] == question.extra["pass"]
    assert read_mmbench(alone).counts["passes made here"] == 3


@pytest.mark.parametrize("given", [ROWS, ROWS[:2]])  # with their later passes, and without
def test_captions_stand_for_pictures_in_every_pass(given, tmp_path):
    shared = row(9, "one two", "A", "8")  # on the picture of another question
    raw = write_tsv(tmp_path / "raw" / "mmbench.tsv", [*given, shared]).parent
    captions = {"8": "a fox", "1000008": "of a later pass", "99": "of no question"}
    (raw / "captions.json").write_text(json.dumps(captions))
    found = read_mmbench(raw)
    captions = {(q.extra["base_index"], q.extra.get("caption")) for q in found.questions}
    assert captions == {("7", None), ("8", "a fox"), ("9", "a fox")}
    assert found.counts["questions with caption"] == 2
    assert read_mmbench(raw / "mmbench.tsv").questions == found.questions


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"first": "a fox"},
            r"captions\.json: none of its 1 names belongs to a question; expected",
        ),
        ({"8": 1}, r"captions\.json, 8: holds no caption"),
    ],
)
def test_bad_captions(content, message, raw, tmp_path, refused):
    (raw / "captions.json").write_text(json.dumps(content))
    refused("prepare", "mmbench", f"--raw={raw}", f"--out={tmp_path / 'out'}", message=message)


@hypothesis.given(st.integers(2, 6), st.data())
def test_circular_passes_rotate_and_keep_the_answer(count, data):
    index = data.draw(st.integers(0, count - 1))
    choices = tuple(f"choice {n}" for n in range(count))
    question = Question("12", "val", "Q?", choices=choices, answer_index=index)
    passes = circular_passes(question)
    assert passes[0].choices == choices
    assert [p.id for p in passes] == [str(12 + k * 1_000_000) for k in range(count)]
    # The answer's text stays, and stands once at every place.
    assert {p.choices[p.answer_index] for p in passes} == {choices[index]}
    assert sorted(p.answer_index for p in passes) == list(range(count))
    cycle = choices * 2
    assert all(p.choices in (cycle[k : k + count] for k in range(count)) for p in passes)


def test_tables_without_answers_or_pictures(tmp_path):
    rows = [{k: v for k, v in r.items() if k not in ("answer", "image", "split")} for r in ROWS]
    columns = [c for c in COLUMNS if c not in ("answer", "image", "split")]
    found = read_mmbench(write_tsv(tmp_path / "test.tsv", rows, columns))
    assert {q.split for q in found.questions} == {"test"}
    assert {(q.answer_index, q.image) for q in found.questions} == {(None, None)}
    assert found.counts["questions without an answer"] == 2
    assert "image" in found.missing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({3: {"image": "9"}}, r"row 5: image refers to index '9', and no row of that index holds"),
        ({3: {"image": "1000007"}}, r"row 5: image refers to index '1000007'"),
        ({3: {"image": "seven"}}, r"row 5: image refers to index 'seven'"),
        ({1: {"index": "7"}}, r"row 3: index 7 is already in .*row 2"),
        ({1: {"index": "7a"}}, r"row 3: index is '7a'; a whole number"),
        ({1: {"answer": "D"}}, r"row 3: answer is 'D'; a letter from A to C"),
        ({1: {"B": ""}}, r"row 3: its choices are A, C; choices A, B, \.\.\. without a gap"),
        ({1: {"question": ""}}, r"row 3: question is ''; text was expected"),
        ({1: {"split": "half"}}, r"row 3: split is 'half'; one of dev, val, test, train"),
    ],
)
def test_broken_rows(changes, message, tmp_path, refused):
    rows = [{**ROWS[n], **changes.get(n, {})} for n in range(len(ROWS))]
    raw = write_tsv(tmp_path / "raw" / "mmbench.tsv", rows).parent
    refused("prepare", "mmbench", f"--raw={raw}", f"--out={tmp_path / 'out'}", message=message)


def test_broken_tables(tmp_path, refused):
    raw = tmp_path / "raw"
    flags = ("prepare", "mmbench", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    raw.mkdir()
    refused(*flags, message=r"holds no \.tsv or \.xlsx table; put MMBench's official file there")
    path = write_tsv(raw / "mmbench.tsv", ROWS, [c for c in COLUMNS if c != "B"])
    refused(*flags, message=r"mmbench\.tsv: has no column B \(it has index, question, hint, A, C")
    write_tsv(path, [])
    refused(*flags, message=r"mmbench\.tsv: holds no rows")
    path.write_text("index\tquestion\tA\tB\n1\tQ\ta\tb\tc\n")
    refused(*flags, message=r"row 2: 5 cells, but the header has 4")
    path.write_text('index\tquestion\tA\tB\n1\t"Q\ta\tb\n')
    refused(*flags, message=r"line 2: not tab-separated text")
    path.write_bytes(b"index\tquestion\tA\tB\n1\t\xff\ta\tb\n")
    refused(*flags, message=r"not UTF-8 text")
    path.rename(raw / "mmbench.xlsx")
    refused(*flags, message=r"mmbench\.xlsx: cannot be read as a spreadsheet")


def test_pictures_that_are_no_base64_are_named_and_limited(tmp_path):
    rows = [row(n, "a b", "A", encoded(n) if n else "!" * 100) for n in range(12)]
    raw = write_tsv(tmp_path / "raw" / "mmbench.tsv", rows).parent
    ended = mmqa("prepare", "mmbench", f"--raw={raw}", f"--out={tmp_path / 'out'}", "--json")
    assert ended.code == 0, ended.err
    assert list(ended.value["broken_pictures"]) == ["0"]
    assert "1 picture is broken and left out: 0" in ended.err
    (first,) = [q for q in open_corpus(tmp_path / "out").questions("val") if q.id == "0"]
    assert first.image is None
    flags = (f"--raw={raw}", f"--out={tmp_path / 'other'}", "--max_broken_pictures=0")
    ended = mmqa("prepare", "mmbench", *flags)
    assert ended.code == 1
    assert "index 0: its image is no base64" in ended.err


# Scores


def test_scores_by_hand(raw):
    questions = read_mmbench(raw).questions
    right = {"7": "A", "8": "(C)", "1000007": "B. red", "1000008": "fox", "2000008": "It is B"}
    evaluation = score_mmbench(questions, [Prediction(k, v) for k, v in right.items()])
    (scores,) = evaluation.scored
    assert scores.scores == by_both_rules(1.0, 1.0)
    assert scores.question_ids == ("7", "8")
    assert not evaluation.has_modalities  # no question is one of snippets
    assert list(scores.by_category) == [
        *("l2-category: perception", "l2-category: reasoning"),
        *("category: animal", "category: color"),
    ]
    # One pass wrong, a refusal in another question's later pass: circular falls, vanilla stays.
    wrong = right | {"1000008": "A or B", "1000007": "Cannot determine the answer"}
    evaluation = score_mmbench(questions, [Prediction(k, v) for k, v in wrong.items()])
    assert evaluation.scored[0].scores == by_both_rules(0.0, 1.0)
    assert evaluation.unparsed == by_both_rules(2, 0)
    # A pass without a prediction is wrong.
    fewer = {k: v for k, v in right.items() if k != "2000008"}
    evaluation = score_mmbench(questions, [Prediction(k, v) for k, v in fewer.items()])
    by_category = evaluation.scored[0].by_category
    assert by_category["category: animal"] == by_both_rules(0.0, 1.0)
    assert by_category["category: color"] == by_both_rules(1.0, 1.0)
    # First passes alone.
    firsts = [Prediction("7", "A"), Prediction("8", "A")]
    evaluation = score_mmbench(questions, firsts)
    assert evaluation.scored[0].scores == {"mmbench/vanilla": 0.5, "mmbench/vanilla_2026": 0.5}
    assert "mmbench/circular is not scored" in evaluation.notes[0]


@hypothesis.given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_circular_is_the_share_of_questions_with_all_passes_right(hits):
    questions, predictions = [], []
    for number, passes in enumerate(hits):
        first = Question(str(number), "val", "Q?", choices=("x", "y", "z"), answer_index=0)
        first.extra.update({"base_index": str(number), "pass": 0})
        for question, hit in zip(circular_passes(first), passes, strict=True):
            questions.append(question)
            said = question.answer_index if hit else (question.answer_index + 1) % 3
            predictions.append(Prediction(question.id, "ABC"[said]))
    (scores,) = score_mmbench(questions, predictions).scored
    assert scores.scores["mmbench/circular"] == pytest.approx(sum(map(all, hits)) / len(hits))
    vanilla = sum(passes[0] for passes in hits) / len(hits)
    assert scores.scores["mmbench/vanilla"] == pytest.approx(vanilla)
    assert scores.n == len(hits)


# Prediction files


@pytest.fixture
def ours(tmp_path):
    rows = [
        {"question_id": "7", "answer": "= A, surely"},  # no formula in the spreadsheet
        {"question_id": "8", "choice": 2},
        {"question_id": "1000007", "answer": "B"},
        {"question_id": "1000008", "answer": "the fox"},
        {"question_id": "2000008", "answer": "A"},
    ]
    return write_rows(tmp_path / "ours.jsonl", rows)


def test_a_submission_is_a_spreadsheet_that_scores_itself(raw, ours, tmp_path):
    out = tmp_path / "submission.xlsx"
    flags = ("evaluate", "mmbench", f"--references={raw}")
    result = done(*flags, f"--predictions={ours}", f"--submission={out}")
    assert result["scores"] == by_both_rules(0.5, 1.0)
    sheet = openpyxl.load_workbook(out).active
    header, *rows = sheet.iter_rows(values_only=True)
    assert header == (
        *("index", "question", "hint", "A", "B", "C", "D", "answer", "category", "l2-category"),
        *("split", "prediction"),
    )
    assert rows[0][0] == 7
    assert [r[-1] for r in rows] == ["= A, surely", "C", "B", "the fox", "A"]
    assert [r[6] for r in rows] == [None] * 5
    again = done("evaluate", "mmbench", f"--predictions={out}")
    for key in ("scores", "by_category", "unparsed", "n"):
        assert again[key] == result[key]
    # With references of its own, and as a table.
    assert done(*flags, f"--predictions={out}")["scores"] == result["scores"]
    table = write_tsv(
        tmp_path / "predictions.tsv",
        [{"index": str(r[0]), "prediction": r[-1]} for r in rows],
        ("index", "prediction"),
    )
    assert done(*flags, f"--predictions={table}")["scores"] == result["scores"]
    # The table of a file that predicts first passes alone gets no others made.
    firsts = write_tsv(
        tmp_path / "firsts.tsv",
        [{**ROWS[0], "prediction": "A"}, {**ROWS[1], "prediction": "A"}],
        (*COLUMNS, "prediction"),
    )
    result = done("evaluate", "mmbench", f"--predictions={firsts}")
    assert (result["scores"], result["missing"]) == (
        {"mmbench/vanilla": 0.5, "mmbench/vanilla_2026": 0.5},
        0,
    )


def test_llavas_lines(raw, tmp_path):
    rows = [{"question_id": int(r["index"]), "text": r["answer"]} for r in ROWS]
    path = write_rows(tmp_path / "answers.jsonl", rows)
    result = done("evaluate", "mmbench", f"--references={raw}", f"--predictions={path}")
    assert result["scores"] == by_both_rules(1.0, 1.0)


def test_llavas_rounds_are_the_circular_passes(raw, tmp_path):
    """Choices cat, dog, fox: round 1 of LLaVA shows dog, fox, cat, which is pass 2 here.

    What model_vqa_mmbench.py writes for a model that finds `red` and `fox` wherever they stand, but
    says `C` where it is shown fox, cat, dog.
    """
    shown = {
        (7, 0): ("red blue", "A"),
        (7, 1): ("blue red", "B"),
        (8, 0): ("cat dog fox", "C"),
        (8, 1): ("dog fox cat", "B"),
        (8, 2): ("fox cat dog", "C"),
    }
    rows = [
        {"question_id": name, "round_id": turn, "text": said, "options": options.split()}
        for (name, turn), (options, said) in shown.items()
    ]
    path = write_rows(tmp_path / "answers.jsonl", rows)
    alone = write_tsv(tmp_path / "alone" / "mmbench.tsv", ROWS[:2]).parent  # passes are made
    for references in (raw, alone):
        flags = (f"--references={references}", f"--predictions={path}")
        result = done("evaluate", "mmbench", *flags)
        assert result["missing"] == 0
        assert result["scores"] == by_both_rules(0.5, 1.0)
        assert result["by_category"]["category: animal"]["mmbench/circular"] == 0.0
    # Official passes that rotate to the left are found by what they show.
    left = [*ROWS[:3], {**ROWS[4], "index": "1000008"}, {**ROWS[3], "index": "2000008"}]
    other = write_tsv(tmp_path / "left" / "mmbench.tsv", left).parent
    again = done("evaluate", "mmbench", f"--references={other}", f"--predictions={path}")
    assert again["scores"] == result["scores"]


def test_rotated_passes_alone_are_no_questions(raw, tmp_path, refused):
    path = write_rows(tmp_path / "p.jsonl", [{"question_id": "1000007", "answer": "B"}])
    flags = (f"--references={raw}", f"--predictions={path}", "--only_given")
    message = r"all 1 questions are rotated passes \(index 1,000,000 and above\), but a question is"
    refused("evaluate", "mmbench", *flags, message=message)


def test_dev_is_the_split_that_prepare_calls_val(raw, ours, tmp_path):
    flags = ("evaluate", "mmbench", f"--references={raw}", f"--predictions={ours}")
    result, again = done(*flags, "--split=dev"), done(*flags)
    assert (result["split"], result["scores"]) == ("val", again["scores"])


def test_hidden_answers_are_submitted_but_not_scored(ours, tmp_path):
    rows = [{**r, "answer": "", "split": "test"} for r in ROWS]
    raw = write_tsv(tmp_path / "raw" / "mmbench.tsv", rows).parent
    out = tmp_path / "submission.xlsx"
    flags = (f"--references={raw}", f"--predictions={ours}", "--split=test")
    ended = mmqa("evaluate", "mmbench", *flags, f"--submission={out}", "--json")
    assert ended.value["scores"] == {}
    note = f"written {out}; the answers of this split are hidden, nothing was scored"
    assert ended.value["notes"] == [note] == ended.err.splitlines()
    assert [cells["prediction"] for _, cells in read_table(out, ())][1] == "C"


def test_broken_prediction_tables(raw, ours, tmp_path, refused):
    flags = ("evaluate", "mmbench", f"--references={raw}")
    path = tmp_path / "p.xlsx"
    write_spreadsheet(path, ("index", "answer"), [(7, "A")])
    refused(*flags, f"--predictions={path}", message=r"p\.xlsx: has no column prediction \(it has")
    write_spreadsheet(path, ("index", "prediction"), [(7, "A"), (7, "B")])
    refused(*flags, f"--predictions={path}", message=r"question '7' is answered twice")
    write_spreadsheet(path, ("index", "prediction"), [(9, "A")])
    refused(*flags, f"--predictions={path}", message=r"no question has the id '9'")
    write_spreadsheet(path, ("index", "prediction"), [("x", "A")])
    refused(*flags, f"--predictions={path}", message=r"row 2: index is 'x'")
    refused(
        "evaluate",
        "mmbench",
        f"--predictions={ours}",
        message=r"--references: is missing; name the",
    )
    out = f"--submission={tmp_path / 'out.csv'}"
    refused(*flags, f"--predictions={ours}", out, message=r"name a file \.xlsx")


def test_a_submission_has_columns_for_the_longest_choices(tmp_path):
    questions = [Question(str(n), "val", "?", choices=("x",) * n) for n in (2, 5)]
    write_mmbench_submission(questions, [], tmp_path / "out.xlsx")
    (header, *_) = openpyxl.load_workbook(tmp_path / "out.xlsx").active.iter_rows(values_only=True)
    assert [name for name in header if name in "ABCDEFGH"] == [*"ABCDE"]


def test_other_pictures_of_a_table_are_other_inputs():
    """So that records of earlier pictures are not taken for theirs."""
    rows = [Entry("row 1", {"index": "1", "image": encoded(number)}) for number in (1, 1, 2)]
    first, same, other = (TablePictures([row]).signature() for row in rows)
    assert first == same != other


def test_cells_survive_a_spreadsheet(tmp_path):
    texts = ["=1+1", "None", "NaN", "a\tb\nc", "0012", "é", "bell\x07", "nan", ""]
    path = tmp_path / "cells.xlsx"
    write_spreadsheet(path, ("index", "text"), list(enumerate(texts)))
    found = [cells["text"] for _, cells in read_table(path, ("index", "text"))]
    assert found == ["=1+1", "None", "NaN", "a\tb\nc", "0012", "é", "bell", "nan", ""]
    refuses("has no column answer", read_table, path, ("answer",))
    refuses(r"gone\.xlsx: no such file; check the", read_table, tmp_path / "gone.xlsx", ("answer",))


def test_predictions_of_json_lines_are_checked(raw, tmp_path, refused):
    flags = ("evaluate", "mmbench", f"--references={raw}")
    path = tmp_path / "bad.jsonl"
    for line, message in (
        ({"question_id": 7, "text": 3}, r"line 1: text is 3; text was expected"),
        ({"question_id": 7, "text": "A", "round_id": 2}, r"line 1: round_id is 2; .* 0 to 1 were"),
        ({"question_id": 7, "text": "A", "round_id": "1"}, r"line 1: round_id is '1'; question 7"),
        ({"text": "A"}, r"line 1: question_id is None; text or a whole number was expected"),
        ([], r"bad\.jsonl: holds no predictions; give predictions\.jsonl"),
        (["A"], r"line 1: expected an object"),
    ):
        path.write_text(json.dumps(line) + "\n")
        refused(*flags, f"--predictions={path}", message=message)


def test_vlmevalkits_json_rows_and_ids_as_floats(raw, tmp_path, refused):
    """PRED_FORMAT=json: records of a DataFrame, whose indices are floats beside a missing value."""
    flags = ("evaluate", "mmbench", f"--references={raw}")
    answers = dict(zip([r["index"] for r in ROWS], "ACBAB", strict=True))
    records = [
        {"index": float(index), "question": "?", "C": float("nan"), "prediction": letter}
        for index, letter in answers.items()
    ]
    path = tmp_path / "model_MMBench.json"
    path.write_text(json.dumps(records, indent=4))
    assert done(*flags, f"--predictions={path}")["scores"] == by_both_rules(1.0, 1.0)
    records[0]["prediction"], records[1]["prediction"] = float("nan"), 3
    path.write_text(json.dumps(records))
    result = done(*flags, f"--predictions={path}")
    assert (result["empty"], result["unparsed"]["mmbench/vanilla"]) == (1, 2)
    records[2]["index"] = 11.5
    path.write_text(json.dumps(records))
    refused(*flags, f"--predictions={path}", message=r"entry 3: question_id is 11\.5; text or a wh")
    table = write_tsv(
        tmp_path / "p.tsv",
        [{"index": f"{index}.0", "prediction": letter} for index, letter in answers.items()],
        ("index", "prediction"),
    )
    assert done(*flags, f"--predictions={table}")["scores"] == by_both_rules(1.0, 1.0)
    for bad in ("11.5", "9" * 5000, "", "-1", "1e3"):
        write_tsv(table, [{"index": bad, "prediction": "A"}], ("index", "prediction"))
        refused(*flags, f"--predictions={table}", message=r"p\.tsv, row 2: index is '")
    lines = [{"question_id": float(index), "text": letter} for index, letter in answers.items()]
    write_rows(tmp_path / "lines.jsonl", lines)
    found = done(*flags, f"--predictions={tmp_path / 'lines.jsonl'}")["scores"]
    assert found == by_both_rules(1.0, 1.0)


@pytest.mark.parametrize("text", ["nan", "NaN", "None", "NA", "N/A", "null", "<NA>"])
def test_a_choice_may_read_as_pandas_missing_value(tmp_path, text):
    """pandas' defaults drop it: VLMEvalKit then shows no such choice, and cannot score its letter."""
    rows = [
        row(7, f"red {text}", "B", encoded(7)),
        row(1_000_007, f"{text} red", "A", "7"),
        row(8, f"cat dog {text}", "A", encoded(8)),
    ]
    benchmark = read_mmbench(write_tsv(tmp_path / "raw" / "t.tsv", rows).parent)
    assert [q.choices for q in benchmark.questions] == [
        ("red", text), (text, "red"), ("cat", "dog", text)
    ]  # fmt: skip
    given = [Prediction("7", "B"), Prediction("1000007", text), Prediction("8", "A")]
    assert score_mmbench(benchmark.questions, given).scored[0].scores == by_both_rules(1.0, 1.0)


def test_nan_in_every_empty_cell_is_no_choice(tmp_path):
    """As lmms-lab/MMBench on the hub writes missing hints and choices."""
    rows = [
        row(7, "red blue nan nan", "A", encoded(7), hint="nan"),
        row(8, "cat dog fox nan", "C", encoded(8), hint="a hint"),
    ]
    write_tsv(tmp_path / "raw" / "t.tsv", rows)
    first, second = (q for q in read_mmbench(tmp_path / "raw").questions if q.extra["pass"] == 0)
    assert (first.choices, second.choices) == (("red", "blue"), ("cat", "dog", "fox"))
    assert ("hint" in first.extra, second.extra["hint"]) == (False, "a hint")
    path = write_tsv(
        tmp_path / "p.tsv", [{"index": "7", "prediction": "nan"}], ("index", "prediction")
    )
    assert read_mmbench_predictions(path, [first, second]) == [Prediction("7", "")]


def test_the_rule_of_2026_has_scores_of_its_own(tmp_path):
    rows = [row(7, "red blue", "B", encoded(7)), row(8, "cat dog fox", "A", encoded(8))]
    write_tsv(tmp_path / "raw" / "t.tsv", rows)
    questions = read_mmbench(tmp_path / "raw").questions
    said = "The answer is B because of what the picture shows beside it"
    given = [Prediction("7", said), Prediction("8", "the answer is apparent, but I do not see it")]
    evaluation = score_mmbench(questions, given)
    assert evaluation.scored[0].scores == {"mmbench/vanilla": 0.0, "mmbench/vanilla_2026": 1.0}
    assert evaluation.unparsed == {"mmbench/vanilla": 2, "mmbench/vanilla_2026": 0}
