"""MRAG-Bench: its files and pictures as sources, its prompts, its score, its prediction file."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from cli_runs import mmqa, png
from fake_llm import FakeLLM

from mmqa_jax.benchmarks.mragbench import read_mragbench, score_mragbench
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.multiple_choice import LETTERS, mmmu_choice
from mmqa_jax.papers import mragbench
from mmqa_jax.prompting.backends import Picture
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")
OWN, OTHER = png((1, 1, 1)), png((2, 2, 2))
GOLD, FOUND, SPARE = png((3, 3, 3)), png((4, 4, 4)), png((5, 5, 5))
ONE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def row(name: str, scenario: str, aspect: str, image: bytes, gold: list, found: list) -> dict:
    return {
        "id": name, "aspect": aspect, "scenario": scenario, "image": cell(image),
        "gt_images": list(map(cell, gold)), "question": "Which animal is it?", "A": "a dog",
        "B": "a cat", "C": "an ox", "D": "a bee", "answer_choice": "B", "answer": "a cat",
        "image_type": "animal", "source": "web", "retrieved_images": list(map(cell, found)),
    }  # fmt: skip


def cell(data: bytes) -> dict:
    return {"bytes": data, "path": None}


ROWS = [
    row("0", "Angle", "Perspective", OWN, [GOLD, OTHER], [FOUND, GOLD]),
    row("1", "Incomplete", "Others", OTHER, [GOLD, FOUND], [FOUND, GOLD]),
]


def write(folder, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    for name, kind in (
        *(("image", ONE), ("gt_images", pyarrow.list_(ONE))),
        ("retrieved_images", pyarrow.list_(ONE)),
    ):
        place = table.column_names.index(name)
        table = table.set_column(place, name, pyarrow.array([one[name] for one in rows], kind))
    pyarrow.parquet.write_table(table, folder / "test-00000-of-00001.parquet", row_group_size=1)


@pytest.fixture
def data(tmp_path):
    raw = tmp_path / "raw"
    write(raw / "data", ROWS)
    (raw / "image_corpus" / "cats").mkdir(parents=True)
    (raw / "image_corpus" / "cats" / "spare.png").write_bytes(SPARE)
    (raw / "image_corpus" / "gold.png").write_bytes(GOLD)
    ended = mmqa("prepare", "mragbench", f"--raw={raw}", f"--out={tmp_path / 'data'}", "--json")
    assert ended.code == 0, ended.err
    assert ended.value["found"]["pictures to retrieve from"] == 4
    return tmp_path / "data"


def test_equal_pictures_are_one_source(data):
    corpus = open_corpus(data)
    held = [corpus.picture(row) for row in range(len(corpus))]
    assert sorted(held) == sorted([GOLD, OTHER, FOUND, SPARE])
    first, second = corpus.questions("test")
    assert (first.answer_index, first.category, first.extra["aspect"]) == (
        1,
        "Angle",
        "Perspective",
    )
    assert corpus.question_picture(first) == OWN
    assert [corpus.picture(corpus.row[name]) for name in first.positives] == [GOLD, OTHER]
    assert [corpus.picture(corpus.row[name]) for name in first.extra["retrieved"]] == [FOUND, GOLD]
    assert second.positives[0] == first.positives[0]


# What the authors' bench_data_loader gives, `|` for each of its placeholders.
ASKED = "\nWhich animal is it?\n Choices:\nA: a dog\nB: a cat\nC: an ox\nD: a bee"
DIRECTLY = "Answer with the option's letter from the given choices directly. "
SEVERAL = (
    "You will be given one question concerning several images. The first image is the input image, "
    f"others are retrieved examples to help you. {DIRECTLY}"
)


class Retriever:
    """Finds the corpus's sources in their order."""

    def __init__(self, corpus):
        self._names = tuple(source.id for source in corpus.sources)

    def search(self, questions, top_k):
        names = self._names[:top_k]
        return [Ranking(q.id, names, tuple(range(len(names), 0, -1))) for q in questions]


def shown(data, answer, *parts, **options):
    """What the model is shown of both questions, and the predictions."""
    corpus, llm = open_corpus(data), FakeLLM(lambda prompt: ("B", -1.0))
    found = answer(corpus.questions("test"), corpus, *parts, llm, **options)
    seen = sorted(llm.seen, key=lambda query: query.id)
    return [query.messages[0].content for query in seen], found, corpus


def test_prompts_are_the_authors(data):
    (first, second), found, _ = shown(data, mragbench.answer_alone)
    assert first == (DIRECTLY, Picture(OWN), ASKED)
    assert second == (DIRECTLY, Picture(OTHER), ASKED)
    assert found[0].sources == found[0].read == ()
    (first, _), _, _ = shown(data, mragbench.answer_alone, picture=False)
    assert first == (DIRECTLY + ASKED,)
    (first, second), found, corpus = shown(data, mragbench.answer_gold)
    assert first == (SEVERAL, Picture(OWN), Picture(GOLD), Picture(OTHER), ASKED)
    assert second == (SEVERAL, Picture(OTHER), Picture(GOLD), ASKED)  # Incomplete: one alone
    assert found[0].sources == found[0].read == corpus.questions("test")[0].positives
    assert len(found[1].sources) == len(found[1].source_scores) == 1
    (first, second), _, _ = shown(data, mragbench.answer_given)
    assert first == (SEVERAL, Picture(OWN), Picture(FOUND), Picture(GOLD), ASKED)
    assert second == (SEVERAL, Picture(OTHER), Picture(FOUND), ASKED)


@pytest.mark.parametrize("name", mragbench.SETTINGS)
def test_answers_are_as_long_as_the_authors(name):
    """max_new_tokens of eval/models/llava_one_vision.py."""
    assert mragbench.SETTINGS[name].options({})["max_new_tokens"] == 4096


def test_questions_without_retrieved_pictures_are_refused():
    message = "^setting given: no question has retrieved pictures; .* or use setting retrieved"
    refuses(message, mragbench.SETTINGS["given"].check_inputs, [Question("q", "test", "?")], {}, {})


def test_retrieved_pictures_are_shown_and_cited(data):
    corpus = open_corpus(data)
    (first, _), found, _ = shown(data, mragbench.answer_retrieved, Retriever(corpus), top_k=3)
    names = [source.id for source in corpus.sources][:3]
    assert first[2:-1] == tuple(Picture(corpus.picture(row)) for row in range(3))
    assert list(found[0].sources) == list(found[0].read) == names
    assert found[0].source_scores == (3, 2, 1)


# What the authors' parse_multi_choice_response gives; None: it asks GPT-3.5, or stops at more than
# five words, since it is given no contents.
@pytest.mark.parametrize(
    ("text", "letter"),
    [("B", "B"), ("The answer is (C).", "C"), ("A, or B", "B"), ("a cat", None), ("", None)],
)
def test_letters(text, letter):
    found = mmmu_choice(text, 4)
    assert (None if found is None else LETTERS[found]) == letter


def test_scores_by_scenario_and_aspect(data):
    questions = open_corpus(data).questions("test")
    evaluation = score_mragbench(questions, [Prediction("0", "(B)"), Prediction("1", "a cat")])
    (scores,) = evaluation.scored
    assert scores.scores == {"mragbench/rule": 0.5}
    assert evaluation.unparsed == {"mragbench/rule": 1}
    assert scores.counts == {
        "Angle": 1, "Incomplete": 1, "aspect: Others": 1, "aspect: Perspective": 1
    }  # fmt: skip
    assert scores.by_category["Angle"] == {"mragbench/rule": 1.0}


def test_official_lines_in_and_out(data, tmp_path):
    lines, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    lines.write_text(json.dumps({"qs_id": "0", "output": "(B) a cat", "gt_choice": "B"}) + "\n")
    flags = ("evaluate", "mragbench", f"--references={data}", f"--predictions={lines}", "--json")
    ended = mmqa(*flags, f"--submission={out}")
    assert ended.code == 0, ended.err
    assert ended.value["scores"] == {"mragbench/rule": 0.5}
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["output"], first["gt_choice"], first["scenario"]) == ("(B) a cat", "B", "Angle")
    assert (second["qs_id"], second["output"]) == ("1", "")
    lines.write_text('{"qs_id": 0, "output": "B"}\n')
    ended = mmqa(*flags)
    assert (ended.code, "line 1" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer_choice": "E"}, ("row 1", "A to D")),
        ({"scenario": ""}, ("row 1", "scenario")),
        ({"id": "0"}, ("row 1", "twice")),
    ],
)
def test_malformed_files(tmp_path, change, words):
    write(tmp_path / "raw", [ROWS[0], {**ROWS[1], **change}])
    ended = mmqa("prepare", "mragbench", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


def test_a_column_of_lists_that_holds_none(tmp_path):
    write(tmp_path, ROWS)
    path = tmp_path / "test-00000-of-00001.parquet"
    table = pyarrow.parquet.read_table(path)
    place = table.column_names.index("gt_images")
    pyarrow.parquet.write_table(table.set_column(place, "gt_images", pyarrow.array([1, 2])), path)
    found = read_mragbench(tmp_path)
    with pytest.raises(PictureError, match=r"001\.parquet, id 0: holds no picture's bytes"):
        found.read_picture("0/gt_images/0")


def test_a_folder_without_tables(tmp_path):
    (tmp_path / "train-00000-of-00001.parquet").touch()
    refuses(r"holds no test-\*\.parquet; put MRAG-Bench's Parquet", read_mragbench, tmp_path)
