"""What the VQA models read: answers, words, pairs of question and caption, pictures' features."""

import json

import numpy as np
import pytest

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.answers import AnswerVocabulary, make_vocabulary, read_vocabulary
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.vqa import CaptionInputs, GridInputs, RegionInputs, vqa_batches
from mmqa_jax.data.corpus import fold_of, trains_on
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.published_tokenizers import (
    QuestionWords,
    make_words,
    open_tokenizer,
    read_glove,
    read_words,
)
from mmqa_jax.data.records.grid_records import NpzFiles, open_features
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import train_wordpiece
from mmqa_jax.tasks.vqa import FoldedData, GridModel, PictureFeaturesSection, RegionsModel
from tests.refusals import refuses

GRID = GridModel(image="grid", trunk="minilm_l6", grid=2, image_features=3)
REGIONS = RegionsModel(image="regions", word_features=4, region_features=3)


def ask(number: int, text: str = "What is this?", answers=("cat",) * 10, **extra) -> Question:
    extra = {"image_id": number, **extra}
    return Question(f"q{number}", "train", text, answers=tuple(answers), extra=extra)


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["what is this animal", "a cat sleeps on the mat and a dog sees it"]
    return train_wordpiece(texts, 200, lowercase=True)


def test_vocabulary_counts_questions_not_annotators():
    questions = [ask(1, answers=["The cat"] * 9 + ["dog"]), ask(2, answers=["cat", "Dog."] * 5)]
    questions.append(ask(3, answers=["emu"] * 10))
    assert make_vocabulary(questions, 2).answers == ("cat", "dog")
    assert make_vocabulary(questions, 1).answers == ("cat", "dog", "emu")
    extended = make_vocabulary(questions, 1, base=["dog", "zebra"])
    assert extended.answers == ("dog", "zebra", "cat", "emu")
    refuses(r"answers\.min_questions=4: no answer", make_vocabulary, questions, 4)


def test_vocabulary_files(tmp_path):
    AnswerVocabulary(["cat", "dog"]).save(tmp_path / "answers.json")
    assert json.loads((tmp_path / "answers.json").read_text()) == ["cat", "dog"]
    assert read_vocabulary(tmp_path).answers == ("cat", "dog")  # a run's folder
    openvqa = [{"no": 1, "yes": 0}, {"0": "yes", "1": "no"}]
    (tmp_path / "openvqa.json").write_text(json.dumps(openvqa))
    assert read_vocabulary(tmp_path / "openvqa.json").answers == ("yes", "no")
    for text, told in (('["a", "a"]', "'a' appears twice"), ('{"a": 1}', "a list of answers")):
        (tmp_path / "bad.json").write_text(text)
        refuses(told, read_vocabulary, tmp_path / "bad.json")


def test_openvqas_words(tmp_path):
    """vqa_loader.py: lower case, punctuation gone, `-` and `/` part words."""
    words = make_words(["What's the man's T-shirt?", "Is it a cat/dog (or both)?"])
    assert words.words[:6] == ("PAD", "UNK", "CLS", "whats", "the", "mans")
    assert words.encode("Is the t-shirt GREEN?") == [
        words.words.index("is"), words.words.index("the"), words.words.index("t"),
        words.words.index("shirt"), 1,
    ]  # fmt: skip
    words.save(tmp_path / "tokenizer.json")
    again = open_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(again, QuestionWords)
    assert again.words == words.words
    (tmp_path / "token_dict.json").write_text('{"PAD": 0, "UNK": 1, "CLS": 2, "cat": 3}')
    assert read_words(tmp_path / "token_dict.json").words == ("PAD", "UNK", "CLS", "cat")
    (tmp_path / "bad.json").write_text('["cat"]')
    refuses("begins with PAD, UNK, CLS", read_words, tmp_path / "bad.json")


def test_glove(tmp_path):
    words = QuestionWords(["PAD", "UNK", "CLS", "cat", "emu"])
    (tmp_path / "glove.txt").write_text("the 1 2\ncat 0.5 -1\n")
    np.testing.assert_array_equal(
        read_glove(tmp_path / "glove.txt", words), [[0, 0], [0, 0], [0, 0], [0.5, -1], [0, 0]]
    )
    (tmp_path / "glove.txt").write_text("cat 0.5 -1\nemu 1\n")
    refuses(r"glove\.txt, line 2: a word and 2 numbers", read_glove, tmp_path / "glove.txt", words)


def test_question_and_caption_are_a_pair(tokenizer):
    inputs = CaptionInputs(tokenizer, 12)
    rows = [ask(1, "What is THIS?", caption="a cat"), ask(2, "what is this animal")]
    arrays = inputs(rows)
    ids = arrays["question_ids"]
    question = tokenizer.encode("what is this")
    expected = [tokenizer.cls_id, *question, tokenizer.sep_id, *tokenizer.encode("a cat")]
    assert ids[0, : len(expected) + 1].tolist() == [*expected, tokenizer.sep_id]
    # The caption's part: its tokens and [SEP]; without a caption, [SEP].
    assert ids[0][arrays["image"][0]].tolist() == [*tokenizer.encode("a cat"), tokenizer.sep_id]
    assert ids[1][arrays["image"][1]].tolist() == [tokenizer.sep_id]
    assert arrays["truncated"].tolist() == [0, 0]


def test_long_pairs_lose_tails(tokenizer):
    question, caption = "what is this animal " * 5, "a cat sleeps " * 9
    arrays = CaptionInputs(tokenizer, 10)([ask(1, question, caption=caption)])
    asked, shown = tokenizer.encode(question), tokenizer.encode(caption)
    ids = arrays["question_ids"][0].tolist()
    assert ids[1:6] == asked[:5]
    assert ids[7:9] == shown[:2]
    assert arrays["truncated"].tolist() == [len(asked) - 5 + len(shown) - 2]


def write_npz(folder, image_id, array, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"COCO_train2014_{image_id:012d}{suffix}.npz", x=array)


def test_authors_grids(tmp_path, tokenizer):
    """Prophet's npz: key x, [grid, grid, features], the grid row by row."""
    rng = np.random.default_rng(0)
    grids = {n: rng.normal(size=(2, 2, 3)).astype("f4") for n in (7, 9)}
    for number, grid in grids.items():
        write_npz(tmp_path / "train2014_feats", number, grid)
    features = open_features(PictureFeaturesSection(root=str(tmp_path)), GRID)
    arrays = GridInputs(tokenizer, features, 8)([ask(9), ask(8), ask(7)])
    np.testing.assert_array_equal(arrays["image"][0], grids[9].reshape(4, 3))
    np.testing.assert_array_equal(arrays["image"][2], grids[7].reshape(4, 3))
    assert not arrays["image"][1].any()  # missing: zeros, and counted
    assert features.missing.names == ["8"]


def test_grids_of_another_shape(tmp_path):
    write_npz(tmp_path, 7, np.zeros((4, 4, 3), "f4"))
    features = open_features(PictureFeaturesSection(root=str(tmp_path)), GRID)
    message = r"000000000007\.npz: features of shape 4 x 4 x 3, the model takes 2 x 2 x 3; extract"
    refuses(message, features.batch, [7])


def test_openvqas_regions(tmp_path):
    """x is [features, regions]; cut at the slots, zeros behind the last."""
    rng = np.random.default_rng(0)
    few, many = rng.normal(size=(3, 2)).astype("f4"), rng.normal(size=(3, 9)).astype("f4")
    write_npz(tmp_path, 7, few, ".jpg")
    write_npz(tmp_path, 8, many, ".jpg")
    features = open_features(PictureFeaturesSection(root=str(tmp_path), slots=4), REGIONS)
    words = make_words(["what is this"])
    arrays = RegionInputs(words, features, 2)([ask(7), ask(8)])
    np.testing.assert_array_equal(arrays["image"][0, :2], few.T)
    assert not arrays["image"][0, 2:].any()
    np.testing.assert_array_equal(arrays["image"][1], many.T[:4])
    assert arrays["question_ids"].tolist() == [[3, 4]] * 2
    assert arrays["truncated"].tolist() == [1, 1]
    write_npz(tmp_path, 9, np.zeros((5, 2), "f4"), ".jpg")
    with pytest.raises(UserError, match=r"shape 5 x 2, 3 x a number of regions"):
        open_features(PictureFeaturesSection(root=str(tmp_path)), REGIONS).batch([9])


def test_too_many_missing_pictures(tmp_path):
    write_npz(tmp_path, 7, np.zeros((2, 2, 3), "f4"))
    features = open_features(PictureFeaturesSection(root=str(tmp_path), max_missing=1), GRID)
    with pytest.raises(RunError, match="2 pictures have no features, more than the 1 allowed"):
        features.batch([1, 2])
    assert NpzFiles(tmp_path).read(7)[0].shape == (2, 2, 3)
    (tmp_path / "COCO_train2014_000000000010.npz").write_bytes(b"PK\x03\x04 cut")
    broken = open_features(PictureFeaturesSection(root=str(tmp_path)), GRID)
    assert not broken.batch([10]).any()
    assert broken.missing.count == 1
    with pytest.raises(UserError, match=r"features\.root=.*: no npz files"):
        open_features(PictureFeaturesSection(root=str(tmp_path / "none")), GRID)
    assert isinstance(broken.missing, BrokenPictures)


def test_batches(tokenizer):
    """A question is in the shortest length that fits; its targets are its own."""
    questions = [ask(n, answers=["cat"] * n + ["dog"] * (10 - n)) for n in range(4)]
    questions += [ask(n, caption="a cat sleeps on the mat", answers=["emu"] * 10) for n in (4, 5)]
    vocabulary = AnswerVocabulary(["cat", "dog"])
    inputs = [CaptionInputs(tokenizer, length) for length in (9, 24)]
    batches = vqa_batches(inputs, questions, vocabulary, FeedConfig(2), lengths=(9, 24))
    seen: dict[int, np.ndarray] = {}
    for _ in range(6):
        batch = next(batches)
        short = batch["index"] < 4
        assert short.all() or not short.any()
        assert batch["question_ids"].shape == (2, 9 if short.all() else 24)
        assert not batch["truncated"].any()
        seen |= dict(zip(batch["index"].tolist(), batch["targets"], strict=True))
    np.testing.assert_allclose(
        [seen[n] for n in range(6)],
        [[0, 1], [0.3, 1], [0.6, 1], [0.9, 1], [0, 0], [0, 0]], rtol=1e-6,
    )  # fmt: skip


def test_folds_are_those_of_the_library_of_examples():
    """A run never trains on a question for which ExampleLibrary takes shots from its fold."""
    data = FoldedData(dir="", split="test", folds=2, fold=1, more_splits=("train",))
    for number in range(40):
        held = Question(str(number), "test", "?")
        assert trains_on(data, held) == (fold_of(held.id, 2) == 1)
        assert trains_on(data, Question(str(number), "train", "?"))
        assert not trains_on(data, Question(str(number), "val", "?"))
    assert trains_on(FoldedData(dir="", split="train"), Question("1", "train", "?"))
