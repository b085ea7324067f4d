"""A small corpus whose every token and pixel tells where it is from, for tests of batches."""

import numpy as np

from mmqa_jax.data.batches.packing import PackingConfig
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.regions import PatchRegions
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.tokenizers import minilm_tokenizer

SIZE, PATCH, SNIPPETS, PICTURES = 8, 4, 40, 20
REGIONS = PatchRegions(SIZE, PATCH)
PACKING = PackingConfig(
    buckets=((0, 32), (0, 64), (1, 40), (2, 48)),
    slots_per_picture=REGIONS.slots,
    region_dim=REGIONS.dim,
    position_dim=6,
    max_source_tokens=50,
    max_question_tokens=16,
    max_answer_tokens=16,
)


class FakePictures:
    """Every picture is of one gray: its row."""

    size = SIZE

    def look_ahead(self, rows):
        pass

    def pixels(self, row: int) -> np.ndarray:
        return np.full((SIZE, SIZE, 3), row, np.uint8)


def make_corpus() -> Corpus:
    words = ["river", "mountain", "anthem", "coast", "border", "valley", "island", "harbor"]
    sources = [
        Source(
            f"s{i}", "text", f"snippet {i} of " + "the long " * (i % 9) + words[i % 8], f"Land {i}"
        )
        for i in range(SNIPPETS)
    ]
    sources += [
        Source(f"p{i}", "image", f"picture {i} flag", f"Place {i}", f"{i}.png")
        for i in range(PICTURES)
    ]
    questions = []
    for n in range(30):
        text, image = (
            [f"s{(n + k) % 40}" for k in range(12)],
            [f"p{(n + k) % 20}" for k in range(9)],
        )
        one, two = (image, text) if n % 3 == 0 else (text, image)
        gold = one[: 1 + n % 2]
        negatives = (*one[2:], *two)
        answers = tuple(f"answer {n} wording {w} ." for w in range(1 + n % 3))
        questions.append(
            Question(
                f"q{n}", "train", f'what is "{n}" ?', None, answers, "", "", tuple(gold), negatives
            )
        )
    return Corpus(sources, questions)


CORPUS = make_corpus()
QUESTIONS = CORPUS.questions("train")
ROWS = {q.id: CORPUS.positive_rows(q) for q in QUESTIONS}


def make_reader() -> SourceReader:
    return SourceReader(CORPUS, minilm_tokenizer(), FakePictures(), REGIONS)


def epoch_of(iterator, examples: int, batch_size: int = 8) -> list[dict]:
    """Batches until at least `examples` were seen."""
    return [next(iterator) for _ in range(-(-examples // batch_size))]


def text_of(reader, ids) -> str:
    return reader.tokenizer.decode(ids)
