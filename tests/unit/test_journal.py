"""A journal after a kill, with other inputs, and damaged."""

from __future__ import annotations

import json

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.journal import Journal
from mmqa_jax.runs.identity import of_folders


@pytest.fixture
def path(tmp_path):
    """A journal of two batches, three results."""
    path = tmp_path / "journals" / "reader.jsonl"
    with Journal(path, "model 1") as journal:
        journal.add({"q0": {"answer": "Zürich"}, "q1": [0.25, 1.5]})
        journal.add({"q2": None})
    return path


def test_what_was_added_is_read_back(path):
    journal = Journal(path, "model 1")
    assert [key in journal for key in ("q0", "q1", "q2", "q3")] == [True, True, True, False]
    assert (journal["q0"], journal["q1"], journal["q2"]) == (
        {"answer": "Zürich"},
        [0.25, 1.5],
        None,
    )
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4  # the fingerprint, three results


def test_results_are_on_disk_when_add_returns(tmp_path):
    path = tmp_path / "journal.jsonl"
    writing = Journal(path, "model 1")
    assert not path.exists()  # nothing was added yet
    writing.add({"q0": 1})
    assert Journal(path, "model 1")["q0"] == 1  # read while the writer is still open
    writing.add({"q1": 2})
    assert "q1" in Journal(path, "model 1")
    writing.close()


def test_a_closed_journal_takes_more(path):
    journal = Journal(path, "model 1")
    journal.add({"q3": 3})
    journal.close()
    journal.close()
    assert journal["q3"] == 3
    journal.add({"q4": 4})
    journal.close()
    again = Journal(path, "model 1")
    assert (again["q0"], again["q3"], again["q4"]) == ({"answer": "Zürich"}, 3, 4)


def test_a_later_result_counts(path):
    with Journal(path, "model 1") as journal:
        journal.add({"q2": "new"})
    assert Journal(path, "model 1")["q2"] == "new"


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_last_line_cut_by_a_kill_is_dropped(path, cut):
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    journal = Journal(path, "model 1")
    assert "q1" in journal
    assert "q2" not in journal
    with journal:
        journal.add({"q2": None})
    assert path.read_bytes() == whole  # the cut line is replaced, not continued


def test_a_cut_inside_a_character(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path, "model 1") as journal:
        journal.add({"q0": 1, "q1": "ü"})
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index("ü".encode()) + 1])  # half of a UTF-8 character
    journal = Journal(path, "model 1")
    assert "q0" in journal
    assert "q1" not in journal


@pytest.mark.parametrize("kept", [0, 7])
def test_a_journal_killed_in_its_first_line_is_empty(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with Journal(path, "model 1") as journal:
        assert "q0" not in journal
        journal.add({"q0": 1})
    assert Journal(path, "model 1")["q0"] == 1


def test_results_of_other_inputs_are_discarded(path):
    with Journal(path, "model 2") as journal:
        assert "q0" not in journal
        journal.add({"q5": 5})
    assert "q5" in Journal(path, "model 2")
    assert "q0" not in Journal(path, "model 2")
    assert "q5" not in Journal(path, "model 1")


@pytest.mark.parametrize(
    "line", ["{oops", "[1, 2]", '{"key": "q1"}', '{"value": 1}', '{"key": ["q1"], "value": 1}', ""]
)
def test_a_damaged_line_in_the_middle(path, line):
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"reader\.jsonl: is damaged .*; remove it, and its work"):
        Journal(path, "model 1")
    assert path.read_bytes() == before


def test_no_flipped_bit_is_read(path):
    """Every bit of the file: refused, or what is read is what was added."""
    whole = path.read_bytes()
    added = {"q0": {"answer": "Zürich"}, "q1": [0.25, 1.5], "q2": None}
    refused = 0
    for at in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            journal = Journal(path, "model 1")
        except UserError:
            refused += 1
        else:
            found = {key: journal[key] for key in added if key in journal}
            assert found == {key: added[key] for key in found}, at
    assert refused > 0.9 * 8 * (len(whole) - whole.index(b"\n"))


def test_journals_of_older_versions_are_read(path):
    rows = ({"fingerprint": "model 1"}, {"key": "q0", "value": 3})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with Journal(path, "model 1") as journal:
        assert journal["q0"] == 3
        journal.add({"q1": 4})
    assert [Journal(path, "model 1")[key] for key in ("q0", "q1")] == [3, 4]


def test_a_file_that_is_no_journal(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes\n")
    with pytest.raises(UserError, match=r"notes\.txt: is damaged"):
        Journal(path, "model 1")
    path.write_text(json.dumps([1]) + "\n")
    with pytest.raises(UserError, match=r"notes\.txt: is damaged"):
        Journal(path, "model 1")
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(UserError, match=r"notes\.txt: is damaged"):
        Journal(path, "model 1")


def test_weights_written_again_have_another_fingerprint(tmp_path):
    """Their JSON may be the same to the letter: another checkpoint, converted to the same folder."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.json").write_text("{}")
    manifest = tmp_path / "weights" / "manifest.ocdbt"
    manifest.write_bytes(b"one")
    first = of_folders(tmp_path, text="reader")
    assert of_folders(tmp_path, "", text="reader") == first
    manifest.write_bytes(b"two")
    assert of_folders(tmp_path, text="reader") != first
