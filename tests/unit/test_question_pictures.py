"""Pictures of questions: their own or their gold sources', and questions that bring those."""

import numpy as np
import pytest
from cli_runs import png

from mmqa_jax.data.answers import make_vocabulary
from mmqa_jax.data.atlas.augment import AtlasAugment
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.vqa import PatchInputs, QuestionPictures, stacked, vqa_batches
from mmqa_jax.data.corpus import Corpus, with_gold_sources
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.tokenizers import minilm_tokenizer
from tests.refusals import refuses

# Atlas's flag colors.
FLAGS = {"red": (0xD2, 0x2F, 0x27), "blue": (0x1E, 0x50, 0xA0), "white": (255, 255, 255)}
SOURCES = [
    Source("s", "text", "Arvania is\nsmall"),
    *(Source(f"p-{name}", "image", f"Flag of {name}", image=f"{name}.png") for name in FLAGS),
    Source("p-broken", "image", "Lost", image="broken.png"),
]


def question(name: str, *positives: str, image: str | None = None, **fields) -> Question:
    return Question(name, "train", f"ask {name} ?", image, positives=positives, **fields)


QUESTIONS = [
    question("text", "s", keywords="small"),
    question("one", "p-red", keywords="Red"),
    question("both", "s", "p-blue", "p-red", keywords="blue"),
    question("own", "p-red", image="white.png", keywords="white"),
    question("broken", "p-broken", "p-white", keywords="white"),
]


def read(name: str) -> bytes:
    color = FLAGS.get(name.removesuffix(".png"))
    return b"no picture" if color is None else png(color)


CORPUS = Corpus(SOURCES, QUESTIONS, read)


@pytest.fixture
def pictures():
    return QuestionPictures(PictureStore(CORPUS, size=8, max_broken=5))


def test_a_questions_own_picture_or_those_of_its_gold_sources(pictures):
    shown = {q.id: [tuple(p[0, 0]) for p in pictures.of(q)] for q in QUESTIONS}
    assert shown == {
        "text": [],
        "one": [FLAGS["red"]],
        "both": [FLAGS["blue"], FLAGS["red"]],
        "own": [FLAGS["white"]],
        "broken": [FLAGS["white"]],
    }
    assert pictures.missing.names == ["broken.png"]
    assert [pictures.count(q) for q in QUESTIONS] == [0, 1, 2, 1, 2]


def test_slots(pictures):
    found = [pictures.of(q) for q in QUESTIONS]
    arrays = stacked(found, slots=1, size=8)
    assert arrays["shown"].tolist() == [[False], [True], [True], [True], [True]]
    assert arrays["pixels"].shape == (5, 1, 8, 8, 3)
    assert not arrays["pixels"][0].any()
    assert tuple(arrays["pixels"][2, 0, 0, 0]) == FLAGS["blue"]  # the first of two


@pytest.mark.parametrize(
    ("context", "captions"),
    [
        (
            "sources",
            [
                "Arvania is small.",
                "Flag of red.",
                "Arvania is small. Flag of blue. Flag of red.",
                "Flag of red.",
                "Lost. Flag of white.",
            ],
        ),
        (
            "pictures",
            [
                "",
                "Flag of red.",
                "Flag of blue. Flag of red.",
                "Flag of red.",
                "Lost. Flag of white.",
            ],
        ),
    ],
)
def test_questions_that_bring_their_gold_sources(context, captions):
    brought = with_gold_sources(CORPUS, context).questions()
    assert [q.extra["caption"] for q in brought] == captions
    assert [q.image for q in brought] == [None, "red.png", "blue.png", "red.png", "broken.png"]
    assert [q.question for q in brought] == [q.question for q in QUESTIONS]


def test_questions_without_gold_sources_bring_none():
    bare = Corpus(SOURCES, [question("none")], read)
    refuses(r"data\.context=sources: no question .* leave it", with_gold_sources, bare, "sources")


def test_exchanged_colors_are_the_targets():
    """Where an augmentation recolors a flag, the answer is its new color."""
    rows = [
        question(f"{name}{n}", f"p-{name}", keywords=name, extra={"palette_safe": True})
        for n in range(4)
        for name in FLAGS
    ]
    colors = {**FLAGS, "green": None, "yellow": None, "black": None, "orange": None}
    vocabulary = make_vocabulary([question(c, keywords=c) for c in colors], 1)
    reader = QuestionPictures(PictureStore(Corpus(SOURCES, rows, read), size=8))
    part = PatchInputs(minilm_tokenizer(), reader, 16, slots=2)
    feed = FeedConfig(batch_size=6, augment=AtlasAugment(palette=1.0), threads=0)
    batches = vqa_batches([part], rows, vocabulary, feed, lengths=(16,))
    seen = set()
    for _ in range(4):
        batch = next(batches)
        assert (batch["targets"].sum(axis=1) == 1).all()
        for pixels, target in zip(batch["image"]["pixels"], batch["targets"], strict=True):
            answer = vocabulary.answers[int(target.argmax())]
            seen.add(answer)
            if answer in FLAGS and answer != "blue":  # blue has two shades
                assert tuple(pixels[0, 0, 0]) == FLAGS[answer]
    assert len(seen) > 3  # others than the flags' own


def test_what_is_lost_is_counted_without_reading_pictures():
    class Unread(PictureStore):
        def pixels(self, row):
            raise AssertionError("was read")

    reader = QuestionPictures(Unread(CORPUS, size=8))
    part = PatchInputs(minilm_tokenizer(), reader, 4, slots=1)
    assert part.lost(QUESTIONS).tolist() == [0, 0, 0, 0, 0]
    long = [question("of many words indeed", "p-red")]
    assert part.lost(long).tolist() == [3]
    assert np.array_equal(part.lost(long), PatchInputs(
        minilm_tokenizer(), QuestionPictures(PictureStore(CORPUS, size=8)), 4, slots=1
    )(long)["truncated"])  # fmt: skip
