"""MMMU: its files, its prompts, its scores, its prediction file."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from cli_runs import mmqa, png
from fake_llm import FakeLLM

from mmqa_jax.benchmarks.mmmu import read_mmmu, score_mmmu, write_mmmu_submission
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import LETTERS, is_open_answer, mmmu_choice
from mmqa_jax.papers.mmmu import SETTINGS, answer_mmmu
from mmqa_jax.prompting.backends import Picture
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")
RED, BLUE = png((250, 0, 0)), png((0, 0, 250))
PICTURE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def row(name: str, answer: str, options: str, *pictures: bytes, **more: str) -> dict:
    shown = {f"image_{n}": {"bytes": data, "path": None} for n, data in enumerate(pictures, 1)}
    absent = dict.fromkeys((f"image_{n}" for n in range(len(pictures) + 1, 8)), None)
    kind = "multiple-choice" if options != "[]" else "open"
    return {
        "id": name, "question": "What is in <image 1>?", "options": options, "answer": answer,
        "question_type": kind, "explanation": "", "topic_difficulty": "Easy", **shown, **absent,
        **more,
    }  # fmt: skip


VAL = [
    row("validation_Music_2", "B", "['<image 2>', 'it\\'s \"so\"']", RED, BLUE),
    row("validation_Music_10", "A", "['True', 'False']", RED),
]
OPEN = [row("validation_Art_1", "['24/7', '3.429']", "[]", BLUE, topic_difficulty="Hard")]
TEST = [row("test_Art_1", "?", "['a', 'b', 'c']", RED)]


def write(folder, *rows: list[dict]) -> None:
    for number, part in enumerate(rows):
        path = folder / part[0]["id"].split("_")[1] / f"part-{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.Table.from_pylist(part)
        for place, name in enumerate(table.column_names):
            if name.startswith("image_"):
                table = table.set_column(
                    place, name, pyarrow.array([one[name] for one in part], PICTURE)
                )
        pyarrow.parquet.write_table(table, path)


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "raw", VAL[::-1], OPEN, TEST)
    ended = mmqa("prepare", "mmmu", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    assert ended.code == 0, ended.err
    return tmp_path / "data"


def test_prepare_official_files(data):
    corpus = open_corpus(data)
    free, first, second = corpus.questions("val")  # by subject and number, as the script's draws
    assert [q.id for q in (free, first, second)] == [one["id"] for one in (*OPEN, *VAL)]
    assert first.choices == ("<image 2>", 'it\'s "so"')
    assert (first.answer_index, first.category) == (1, "Music")
    assert corpus.question_picture(first) == RED
    assert [corpus.read_picture(name) for name in first.more_images] == [BLUE]
    assert (second.more_images, corpus.question_picture(second)) == ((), RED)
    assert (free.choices, free.answers) == ((), ("24/7", "3.429"))
    (hidden,) = corpus.questions("test")
    assert (hidden.answers, hidden.answer_index) == ((), None)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("val_Music_1", "A", "['a', 'b']")], ("row 0", "val_Music_1")),
        ([row("validation_Cooking_1", "A", "['a', 'b']")], ("row 0", "30 subjects")),
        (
            [row("validation_Art_1", "C", "['a', 'b']")],
            ("row 0", "answer is 'C'; a letter from A to B was expected"),
        ),
        ([row("validation_Art_1", "A", "open('/etc/passwd')")], ("row 0", "list of texts")),
        ([row("validation_Art_1", "A", "['a']")], ("row 0", "two at least")),
        ([VAL[0], VAL[0]], ("row 1", "twice")),
        ([{**VAL[0], "image_1": None}], ("row 0", "image_2")),
        *(
            ([{**VAL[0], key: value}], ("row 0", f"{key} is {value!r}; text was expected; fetch"))
            for key, value in (("question", ""), ("answer", None), ("explanation", 5))
        ),
        (
            [{**VAL[0], "question_type": None}],
            ("row 0", "question_type is None; text was expected"),
        ),
        ([{k: v for k, v in VAL[0].items() if k != "question_type"}], ("no column question_type",)),
    ],
)
def test_malformed_files(tmp_path, rows, words):
    write(tmp_path / "raw", rows)
    ended = mmqa("prepare", "mmmu", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


def test_tables_of_another_benchmark(tmp_path):
    refuses(r"holds no \.parquet file; put MMMU's folders of subjects", read_mmmu, tmp_path)
    table = pyarrow.table({"image_1": pyarrow.array([None], PICTURE)})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    refuses(r"x\.parquet: has no column id \(it has image_1\); fetch", read_mmmu, tmp_path)


# What the authors' construct_prompt gives with configs/llava1.5.yaml.
CHOICE = (
    'What is in <image 1>?\n(A) <image 2>\n(B) it\'s "so"\n\n'
    "Answer with the option's letter from the given choices directly."
)
FREE = "What is in <image 1>?\nAnswer the question using a single word or phrase."


def content(data, number: int, **options) -> tuple[str | Picture, ...]:
    """What the model is shown of a question of val."""
    corpus, llm = open_corpus(data), FakeLLM(lambda prompt: ("(B)", -1.0))
    question = corpus.questions("val")[number]
    (found,) = answer_mmmu([question], corpus, llm, **options)
    assert found.answer == "(B)"
    return llm.seen[0].messages[0].content


def test_prompts_are_the_authors(data):
    assert content(data, 1, pictures="none") == (CHOICE,)
    assert content(data, 1, pictures="first") == (Picture(RED), CHOICE)
    assert content(data, 0, pictures="first") == (Picture(BLUE), FREE)


def test_pictures_stand_where_they_are_named(data):
    before, between, after = CHOICE.replace("<image 1>", "|").replace("<image 2>", "|").split("|")
    assert content(data, 1) == (before, Picture(RED), between, Picture(BLUE), after)


def test_a_picture_that_no_mark_names_comes_first_and_an_absent_one_keeps_its_mark():
    question = Question("q", "val", "Which, <image 2>?", "a", more_images=("b", "c"))
    pictures = {"a": RED, "c": BLUE}
    corpus, llm = Corpus([], [question], pictures.get), FakeLLM()
    answer_mmmu([question], corpus, llm)
    first, last, text = llm.seen[0].messages[0].content
    assert (first, last) == (Picture(RED), Picture(BLUE))
    assert text.startswith("Which, <image 2>?\n")


def test_a_note_says_what_one_picture_leaves_out(data):
    questions = open_corpus(data).questions("val")
    (note,) = SETTINGS["mmmu"].notes(questions, {"pictures": "first"})
    assert "1 of 3 questions have several pictures" in note
    assert SETTINGS["mmmu"].notes(questions, {}) == []


# What parse_multi_choice_response gives of four options; None: it draws.
@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("B.", "B"),
        ("'C'!", "C"),
        ("(A) and then (D), not (B", "D"),
        ("A or B", "B"),
        ("A (C)", "C"),  # brackets first
        ("b", None),
        ("it is surely the cat", None),  # five words at most
        ("it is surely the Cat over there", "A"),
        ("cat, dog, then the cat again or dog", "B"),  # the last one
        ("it is what it is I think", None),
        ("", None),
    ],
)
def test_letters(text, letter):
    found = mmmu_choice(text, 4, ("cat", "dog", "a bird", "fish"))
    assert (None if found is None else LETTERS[found]) == letter


# What parse_open_response, then eval_open give.
@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("The answer is 1,234.5 meters", ["1234.5"], False),  # 1234 and 234.5 are read
        ("The answer is 1,234 meters", ["1234"], True),
        ("x = 3e2", ["300"], True),
        ("about 2.344", ["2.34"], True),
        ("about 2.346", ["2.34"], False),
        ("so it is Paris.", ["paris"], True),
        ("12", ["2"], False),
        ("x=5 apples\nit is no", ["5"], False),  # `=` counts on the last line
        ("The result is B or a", ["a"], True),  # with a space beside it
        ("The result is cat", ["a"], False),
        ("24/7", ["24/7", "3.429"], True),
        ("3.43", ["24/7", "3.429"], True),
    ],
)
def test_open_answers(text, answers, right):
    assert is_open_answer(text, answers) is right


def asked(number: int, answer: int, subject: str = "Art") -> Question:
    return Question(
        f"validation_{subject}_{number}", "val", "?", choices=("cat", "dog", "ox", "bee"),
        answer_index=answer, answers=("cat",), category=subject, extra={"topic_difficulty": "Easy"},
    )  # fmt: skip


def test_scores_and_the_scripts_draws():
    """`random.seed(42)` draws A, A, C of four options, subject by subject, number by number."""
    questions = [asked(10, 2), asked(9, 0), asked(1, 0, "Accounting"), asked(3, 1)]
    given = [Prediction(q.id, "?") for q in questions[:3]] + [Prediction(questions[3].id, "(B)")]
    evaluation = score_mmmu(questions, given)
    (scores,) = evaluation.scored
    assert scores.scores == {
        "mmmu/official": 1.0, "mmmu/unparsed_wrong": 0.25, "mmmu/letter": 0.0
    }  # fmt: skip
    assert evaluation.unparsed["mmmu/official"] == 3
    assert scores.counts["Overall-Business"] == scores.counts["Accounting"] == 1
    chosen = [Prediction(q.id, choice=q.answer_index) for q in questions[:2]]
    evaluation = score_mmmu(questions, chosen)
    (scores,) = evaluation.scored
    assert set(scores.scores.values()) == {0.5}
    assert set(evaluation.unparsed.values()) == {0}  # what is missing is not unparsed
    assert not evaluation.has_modalities
    assert scores.missing == 2


def test_a_draw_goes_to_responses_alone(tmp_path):
    questions = [asked(1, 0), asked(2, 2), asked(3, 0)]
    given = [Prediction(questions[1].id, "none"), Prediction(questions[2].id, "it")]
    write_mmmu_submission(questions, given, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written.values()) == ["", "A", "A"]


def test_official_files_in_and_out(data, tmp_path):
    path, out = tmp_path / "total_val_output.json", tmp_path / "submission.json"
    flags = ("evaluate", "mmmu", f"--references={data}", f"--predictions={path}", "--json")
    path.write_text(json.dumps({VAL[0]["id"]: "B", VAL[1]["id"]: "B", OPEN[0]["id"]: "3.43"}))
    ended = mmqa(*flags, "--split=validation", f"--submission={out}")
    assert ended.code == 0, ended.err
    assert ended.value["scores"]["mmmu/letter"] == pytest.approx(2 / 3)
    assert ended.value["by_category"]["difficulty: Hard"]["mmmu/official"] == 1.0
    assert json.loads(out.read_text()) == json.loads(path.read_text())
    path.write_text(json.dumps([{"id": VAL[0]["id"], "response": "It is (B)."}]))
    ended = mmqa(*flags, "--only_given")
    assert ended.value["scores"]["mmmu/official"] == 1.0
    path.write_text(json.dumps({VAL[0]["id"]: 2}))
    ended = mmqa(*flags)
    assert (ended.code, "validation_Music_2" in ended.err) == (2, True)
