"""The official output TSV and the two JSON formats of predictions."""

import json

import pytest
from shared_data import GOLDEN, require

from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.webqa import COLUMNS, read_output_tsv, read_prediction_json
from tests.refusals import refuses

ROWS = [
    {
        "Guid": "g1", "Qcate": "YesNo", "Q": 'Is "it" red ?', "A": '["No, it is \\"blue\\"."]',
        "Keywords_A": 'No "', "Output_conf": '"[-0.5, -2]"', "Output": '["Yes .", "No ."]',
    },
    {
        "Guid": "g2", "Qcate": "text", "Q": "Where ?", "A": '["Here", "There"]',
        "Keywords_A": "TBD", "Output_conf": "?", "Output": '["Here"]',
    },
]  # fmt: skip


def write(path, rows, columns=COLUMNS):
    lines = ["\t".join(columns), *("\t".join(row[name] for name in columns) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_an_output_tsv_holds_references_and_predictions(tmp_path):
    path = write(tmp_path / "out.tsv", ROWS)
    questions, predictions = read_output_tsv(path)
    assert questions == [
        # Quotes are characters: the official script cuts at tabs and does nothing else.
        Question(
            "g1", "val", 'Is "it" red ?', answers=('No, it is "blue".',), keywords='No "',
            category="YesNo",
        ),
        Question("g2", "val", "Where ?", answers=("Here", "There"), keywords="TBD", category="text"),
    ]  # fmt: skip
    assert predictions == [
        Prediction("g1", "Yes .", beams=(("Yes .", -0.5), ("No .", -2.0))),
        Prediction("g2", "Here"),  # unreadable confidences are left out
    ]
    # Columns go by their names.
    moved = write(tmp_path / "moved.tsv", ROWS, (*COLUMNS[3:], *COLUMNS[:3]))
    assert read_output_tsv(moved) == (questions, predictions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": "Here"}, r"line 3: A is 'Here', not a JSON list of strings; fix that line"),
        ({"Output": "[1]"}, r"line 3: Output is '\[1\]', not a JSON list of strings"),
        ({"Output": "[]"}, r"line 3: Output holds no answer; at least one was expected"),
        ({"Qcate": "colour"}, r"line 3: Qcate is 'colour'; expected one of YesNo, choose"),
        ({"Guid": "g1"}, r"line 3: Guid g1 is repeated; remove one line"),
        ({"Q": "a\tb"}, r"line 3: 8 columns, but the header has 7; fix that line"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, change, message):
    path = write(tmp_path / "out.tsv", [ROWS[0], {**ROWS[1], **change}])
    refuses(r"out\.tsv, " + message, read_output_tsv, path)


def test_a_tsv_without_its_columns_is_refused(tmp_path):
    path = write(tmp_path / "out.tsv", ROWS, ("Guid", "Q", "A"))
    refuses(r"out\.tsv, line 1: no column Qcate, Keywords_A, Output;", read_output_tsv, path)
    path.write_text("")
    refuses(r"out\.tsv, line 1: no column Guid, Qcate", read_output_tsv, path)


def test_the_baselines_end_to_end_json(tmp_path):
    path = tmp_path / "out.json"
    row = {
        "predicted sources": [30000001, "g1_0"],
        "predicted answers": ["Yes .", "No ."],
        "answer confidence": "[-0.5, -2.0]",
    }
    empty = {"predicted sources": [], "predicted answers": [], "answer confidence": []}
    path.write_text(json.dumps({"g1": row, "g2": empty}))
    assert read_prediction_json(path) == [
        Prediction(
            "g1", "Yes .", ("30000001", "g1_0"), beams=(("Yes .", -0.5), ("No .", -2.0))
        ),
        Prediction("g2"),
    ]  # fmt: skip
    for change, message in (
        ({"predicted answers": "Yes"}, "Guid g2: 'predicted answers' must be a list of strings"),
        ({"predicted sources": None}, "Guid g2: sources must be a list of image_id and"),
    ):
        path.write_text(json.dumps({"g1": row, "g2": {**row, **change}}))
        refuses(rf"out\.json, {message}", read_prediction_json, path)


def test_official_files():
    # Counted in the official files.
    require(GOLDEN)
    submission = read_prediction_json(GOLDEN / "WebQA_evalai_baseline_x101fpn_predictions.json")
    assert len(submission) == 7540
    lengths = [len(p.sources) for p in submission]
    assert (min(lengths), max(lengths), lengths.count(0)) == (0, 18, 433)
    kinds = [{name.isdecimal() for name in p.sources} for p in submission]
    assert sum(len(kind) == 2 for kind in kinds) == 117
    ended = read_prediction_json(GOLDEN / "VLP_x101_combinedTraining_val_end2end_predictions.json")
    assert len(ended) == 4966
    assert all(p.beams and p.answer == p.beams[0][0] for p in ended)
    assert all(p.beams[0][1] == max(value for _, value in p.beams) for p in ended)
