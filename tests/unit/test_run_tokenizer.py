"""What the tokenizer of a run is made of: which texts, in which order, in which letters."""

import pytest

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.tasks.task import make_tokenizer

CORPUS = Corpus(
    [
        Source("s1", "text", "It grows in Kenya.", "Baobab"),
        Source("s2", "text", "It burns.", "Oak"),
    ],
    [
        Question("q1", "train", "Which plant?", answers=("Yes: quinine", "no")),
        Question("q2", "val", "A zebra %", answers=("@",)),
    ],
    fingerprint="plants",
)


@pytest.fixture
def make(tmp_path):
    return lambda name: make_tokenizer(name, CORPUS, tmp_path)


def test_one_that_is_trained(make):
    """On titles, texts, questions and answers of the training split, in lower case."""
    tokenizer = make("corpus:100")
    known = ["Baobab", "kenya", "WHICH", "quinine", "yes", "oak", "it grows in"]
    assert all(tokenizer.unk_id not in tokenizer.encode(text) for text in known)
    assert tokenizer.encode("KENYA") == tokenizer.encode("kenya")
    for text in ("zebra", "%", "@"):  # of no training question
        assert tokenizer.unk_id in tokenizer.encode(text)
    assert len(tokenizer.encode("it grows in kenya")) == 4


def test_one_of_a_published_vocabulary(make):
    """Only what the same texts need; the answers' tokens first."""
    tokenizer = make("minilm:corpus")
    first = [tokenizer.token(n) for n in range(5, 10)]
    assert set(first) >= {"yes", "no", ":"}
    assert {"kenya", "plant", "oak"} <= {tokenizer.token(n) for n in range(tokenizer.vocab_size)}
    assert tokenizer.token_id("zebra") is None


def test_one_of_words(make):
    """Of all questions, of every split, as openvqa has it."""
    tokenizer = make("words")
    assert set(tokenizer.words[3:]) == {"which", "plant", "a", "zebra", "%"}
