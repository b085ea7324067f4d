"""A row as a typed value, and a stage answered in chunks."""

import dataclasses
import hashlib
import json
import sys

import pytest
from cli_runs import ROOT
from ml_collections import ConfigDict

from mmqa_jax.core.chunks import Part
from mmqa_jax.core.config import load_config
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus, fold_of
from mmqa_jax.data.schema import Question
from mmqa_jax.runs.part import OpenedParts, of_questions
from mmqa_jax.runs.parts import RetrieverSpec
from mmqa_jax.runs.row import Row, RowData, Scoring, read_row
from mmqa_jax.runs.run import run_row
from mmqa_jax.runs.stages import Stage, answering
from tests.refusals import refuses

LEAST = {
    "row": "own",
    "system": "webqa",
    "setting": "retrieve_full_scale",
    "dataset": "corpus",
    "data": {"dir": "data", "split": "test"},
    "parts": {"retriever": {"method": "bm25"}},
    "options": {"cited": 1},
}
SAME = Row(
    "own",
    "webqa",
    "retrieve_full_scale",
    "corpus",
    RowData("data", "test"),
    {"retriever": RetrieverSpec("bm25")},
    {"cited": 1},
)
QUESTIONS = [Question(str(n), "test", f"Question {n}?") for n in range(5)]


def test_further_pictures_change_what_a_question_is_and_their_absence_does_not():
    """The hash of a question on one picture is that of its other fields."""
    plain = Question("q", "val", "Which?", "a.png")
    row = dataclasses.asdict(plain)
    del row["more_images"]
    known = hashlib.sha256(json.dumps(row, sort_keys=True).encode() + b"\n").hexdigest()[:16]
    assert of_questions([plain]) == known
    assert of_questions([dataclasses.replace(plain, more_images=("b.png",))]) != known


def test_what_a_config_leaves_out_has_the_types_defaults():
    row = read_row(ConfigDict(LEAST))
    assert row == SAME
    assert row.scoring == Scoring("", "")
    assert (row.data.questions, row.data.modality, row.data.where) == (0, "", {})
    assert (row.as_written, SAME.as_written) == (LEAST, {})  # what config.json records
    assert (row.answers, row.finds_sources, row.needs_all, row.llm) == (False, True, False, "")


def test_a_row_may_take_a_part_of_its_questions():
    """By the hash of their ids, of those that it would take otherwise."""
    questions = [Question(str(n), "test", "?") for n in range(40)]
    corpus = Corpus([], questions)
    rows = [
        dataclasses.replace(SAME, data=RowData("data", "test", 20, folds=2, fold=fold))
        for fold in (0, 1)
    ]
    whole = dataclasses.replace(SAME, data=RowData("data", "test", 20)).questions(corpus)
    halves = [row.questions(corpus) for row in rows]
    assert all(fold_of(q.id, 2) == n for n, half in enumerate(halves) for q in half)
    assert sorted(q.id for half in halves for q in half) == sorted(q.id for q in whole)
    assert all(halves)
    refuses(r"data\.fold=2: 0 to 1 was expected", RowData, "data", "test", folds=2, fold=2)
    other = next(question for question in questions if fold_of(question.id, 2))
    refuses(r"data\.fold=0: none of the 1 questions", rows[0].questions, Corpus([], [other]))


def test_a_row_made_in_code_is_run_as_one_of_a_config(data, quiet, tmp_path):
    """What its answers depend on are its values: none of those of another row are taken."""
    made = dataclasses.replace(SAME, data=RowData(str(data), "test"), scoring=Scoring("none"))
    read = read_row(ConfigDict({**LEAST, "data": made.config["data"]}))
    assert read_row(ConfigDict(made.config)) == made
    first = run_row(made, tmp_path / "made")
    again = run_row(read, tmp_path / "read")
    assert first is not None
    assert again is not None
    assert first.predictions == again.predictions
    assert read_config(tmp_path / "made").parts.retriever.method == "bm25"
    changed = dataclasses.replace(read, options={"cited": 2})
    assert changed.config["options"] == {"cited": 2}
    refuses(r"options\.cited \(1 there, 2 now\)", run_row, changed, tmp_path / "made")


def test_the_split_of_a_flag_is_recorded():
    row = read_row(ConfigDict(LEAST), split="val")
    assert row.data.split == row.as_written["data"]["split"] == "val"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": {"retriever": RetrieverSpec("dense")}}, r"needs parts\.retriever\.model and"),
        ({"parts": {"retriever": RetrieverSpec("bm25", fusion_weight=1.0)}}, r"works only with"),
        ({"options": {"threshold": 2.0}}, r"options\.threshold=2\.0: a probability"),
        ({"scoring": Scoring(bem="x")}, r"key scoring\.bem: BEM judges answers of evqa; leave it"),
        (
            {"dataset": "evqa", "scoring": Scoring("none")},
            r"config key scoring\.lemmatizer=none: is part of WebQA's scores; leave it out for evqa",
        ),
        ({"dataset": "evqa", "scoring": Scoring(bart="x")}, r"scoring\.bart=x: is part of WebQA's"),
    ],
)
def test_a_row_that_contradicts_itself_cannot_be_made(change, message):
    refuses(message, dataclasses.replace, SAME, **change)


def test_a_row_that_needs_spacy_is_refused_before_it_answers(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    row = dataclasses.replace(SAME, scoring=Scoring("spacy"))
    refuses(r"key scoring\.lemmatizer=spacy: .*run `pip install spacy", row.check_inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.dir": 3}, r"config key data\.dir=3: text was expected"),
        ({"data.where": 3}, r"config key data\.where=3: a section was expected"),
        ({"data.contxt": ""}, r"config key data\.contxt: unknown; did you mean 'context'"),
        ({"scoring": {"brat": ""}}, r"config key scoring\.brat: unknown; did you mean 'bart'"),
        ({"published": 3}, r"config key published=3: a tuple"),
        ({"parts": {}}, r"config key parts\.retriever is missing; add it"),
        ({"options.cited": 2**40}, r"options\.cited=.*: at most 4,294,967,295"),
        ({"setting": "retrieve"}, r"config key setting=retrieve: use one of question_only"),
    ],
)
def test_wrong_keys_and_values_are_refused_at_the_door(change, message):
    config = ConfigDict(LEAST)
    with config.unlocked(), config.ignore_type():
        for key, value in change.items():
            *parents, last = key.split(".")
            section = config
            for name in parents:
                section = section[name]
            with section.unlocked(), section.ignore_type():
                section[last] = value
    refuses(message, read_row, config)


def test_the_smallest_value_of_an_option_is_that_of_its_annotation():
    def prompted(**options):
        changes = {f"options.{name}": value for name, value in options.items()}
        return read_row(load_config(f"{ROOT}/configs/okvqa/tables.py:smollm2_random", changes))

    assert prompted(shots=0, seed=0).options["shots"] == 0
    for name in ("shots", "seed"):
        refuses(rf"options\.{name}=-1: at least 0 was expected", prompted, **{name: -1})
    refuses(r"options\.max_new_tokens=0: at least 1 was expected", prompted, max_new_tokens=0)


@dataclasses.dataclass(frozen=True)
class Named:
    """A part that notes when it is opened."""

    name: str
    log: list
    turn: str

    def paths(self):
        return []

    def open(self, row):
        self.log.append(self.name)
        return self.name.upper()


def stage_of(log: list) -> Stage:
    def answer(questions, parts):
        log.append([question.id for question in questions])
        assert parts["llm"] == "LLM"
        return Part([[q.id, n] for q, n in zip(questions, parts["numbers"], strict=True)])

    turns = {"llm": "last", "retriever": "model", "captions": "file"}
    parts = {name: Named(name, log, turn) for name, turn in turns.items()}
    return Stage(
        {"verb": "test"},
        parts,
        answer,
        {"numbers": range(10, 15)},
        lambda files: log.append(dict(files)),
    )


def test_files_are_opened_and_checked_before_models(tmp_path):
    log: list = []
    opened = OpenedParts(Corpus([]))
    with answering(stage_of(log), tmp_path / "parts", QUESTIONS, opened, chunk=2) as job:
        rows = job.rows()
    assert log[:4] == ["captions", {"captions": "CAPTIONS"}, "retriever", "llm"]
    assert log[4:] == [["0", "1"], ["2", "3"], ["4"]]
    assert rows == [[str(n), 10 + n] for n in range(5)]
    # All chunks are there: nothing is opened.
    log.clear()
    with answering(stage_of(log), tmp_path / "parts", QUESTIONS, opened, chunk=2) as job:
        assert job.rows() == rows
    assert log == []
