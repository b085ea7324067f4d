"""In-context examples: which are chosen, and which never."""

from __future__ import annotations

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.shots import Embedders, ExampleLibrary, bimodal

DIM = 8


class FakeEmbedder:
    """Every content has a vector of its own, drawn from its hash; counts what it computes."""

    def __init__(self, dim: int = DIM):
        self.dim, self.fingerprint, self.computed = dim, "fake", 0

    def _vector(self, content: bytes) -> np.ndarray:
        vector = np.random.default_rng(list(content)).normal(size=self.dim).astype(np.float32)
        return vector / np.linalg.norm(vector)

    def embed_questions(self, texts):
        self.computed += len(texts)
        return np.stack([self._vector(text.encode()) for text in texts])

    def embed_pictures(self, pictures):
        self.computed += len(pictures)
        return np.stack([self._vector(picture.tobytes()) for picture in pictures])


def question(n: int, prefix: str = "e", image: bool = True) -> Question:
    name = f"{prefix}{n}"
    extra = {"caption": f"caption {name}"}
    return Question(name, "train", f"text {name} ?", f"{name}.png" if image else None, extra=extra)


def pixels(q: Question) -> np.ndarray | None:
    if q.image is None:
        return None
    return np.frombuffer(q.image.encode().ljust(12, b"."), np.uint8).reshape(2, 2, 3)


EXAMPLES = [question(n, image=n % 3 > 0) for n in range(40)]
QUERIES = [question(n, "q", image=n % 2 > 0) for n in range(7)]


@pytest.fixture
def embedder():
    return FakeEmbedder()


@pytest.fixture
def library(embedder, tmp_path):
    return ExampleLibrary(EXAMPLES, Embedders(embedder, embedder, pixels), cache=tmp_path)


def vectors(questions: list[Question], kind: str) -> np.ndarray:
    """A plain restatement, one question at a time."""
    fake, rows = FakeEmbedder(), []
    for q in questions:
        text = fake.embed_questions([q.question])[0]
        picture = pixels(q)
        image = np.zeros(DIM) if picture is None else fake.embed_pictures([picture])[0]
        if kind == "question":
            rows.append(text)
        elif kind == "caption":
            rows.append(fake.embed_questions([q.extra["caption"]])[0])
        elif kind == "image":
            rows.append(image)
        else:
            mean = text if picture is None else (text + image) / 2
            rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["question", "caption", "image", "question_and_image", "bimodal"])
def test_the_nearest_examples(library, kind):
    kinds = ("question", "image") if kind == "question_and_image" else (kind,)
    expected = sum(vectors(QUERIES, k) @ vectors(EXAMPLES, k).T for k in kinds)
    for shots, scores in zip(library.select(QUERIES, 5, kind), expected, strict=True):
        order = sorted(range(len(EXAMPLES)), key=lambda i: (-round(scores[i], 6), i))[:5]
        assert [shot.question.id for shot in shots] == [EXAMPLES[i].id for i in order]
        np.testing.assert_allclose([s.similarity for s in shots], scores[order], atol=1e-6)


def test_bimodal_is_the_mean_of_what_is_there():
    text, image = np.eye(4, dtype=np.float32)[[0, 1, 2]], np.eye(4, dtype=np.float32)[[3, 3, 3]]
    there = np.array([True, True, False]), np.array([True, False, True])
    found = bimodal(text, image, *there)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(found, [[half, 0, 0, half], [0, 1, 0, 0], [0, 0, 0, 1]], atol=1e-6)


def test_a_question_is_never_its_own_shot(library):
    for example, shots in zip(EXAMPLES, library.select(EXAMPLES, 39, "question"), strict=True):
        ids = [shot.question.id for shot in shots]
        assert sorted([*ids, example.id]) == sorted(e.id for e in EXAMPLES)


def test_folds_share_nothing(embedder, tmp_path):
    library = ExampleLibrary(EXAMPLES, Embedders(embedder), folds=2, cache=tmp_path)
    shots = library.select(EXAMPLES, 40, "question")
    chosen = {e.id: {s.question.id for s in own} for e, own in zip(EXAMPLES, shots, strict=True)}
    halves = {frozenset(own) for own in chosen.values()}
    assert len(halves) == 2
    one, other = halves
    assert one | other == {e.id for e in EXAMPLES}
    assert not one & other
    assert all(name not in own for name, own in chosen.items())


def test_random_shots_depend_on_seed_and_question_alone(library):
    together = library.select(QUERIES, 6, "random", seed=3)
    alone = [library.select([q], 6, "random", seed=3)[0] for q in reversed(QUERIES)][::-1]
    assert [[s.question.id for s in own] for own in together] == [
        [s.question.id for s in own] for own in alone
    ]
    assert together != library.select(QUERIES, 6, "random", seed=4)
    assert len({tuple(s.question.id for s in own) for own in together}) > 1
    assert all(len({s.question.id for s in own}) == 6 for own in together)


def test_ties_go_to_the_earlier_example(embedder, tmp_path):
    same = [Question(f"s{n}", "train", "the same ?") for n in range(9)]
    library = ExampleLibrary(same, Embedders(embedder), cache=tmp_path)
    (shots,) = library.select([question(0, "q")], 4, "question")
    assert [shot.question.id for shot in shots] == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize("similarity", ["random", "question"])
def test_a_library_smaller_than_the_number_of_shots(embedder, tmp_path, similarity):
    library = ExampleLibrary(EXAMPLES[:3], Embedders(embedder), cache=tmp_path)
    (shots,) = library.select(QUERIES[:1], 8, similarity)
    assert {shot.question.id for shot in shots} == {"e0", "e1", "e2"}


def test_an_empty_library(embedder):
    library = ExampleLibrary([], Embedders(embedder))
    assert library.select(QUERIES, 0, "question") == [[]] * len(QUERIES)
    with pytest.raises(UserError, match="library of examples is empty"):
        library.select(QUERIES, 1, "question")


def test_similarities_that_need_an_encoder(embedder, tmp_path):
    with pytest.raises(UserError, match="no embedder"):
        ExampleLibrary(EXAMPLES).select(QUERIES, 1, "question")
    with pytest.raises(UserError, match="encoder of pictures"):
        ExampleLibrary(EXAMPLES, Embedders(embedder), cache=tmp_path).select(QUERIES, 1, "image")
    shots = ExampleLibrary(EXAMPLES).select(QUERIES, 2, "random")
    assert all(len(own) == 2 for own in shots)


def test_embeddings_are_computed_once(tmp_path):
    first, again = FakeEmbedder(), FakeEmbedder()
    for embedder in (first, again):
        library = ExampleLibrary(EXAMPLES, Embedders(embedder), cache=tmp_path)
        library.select(QUERIES, 3, "question")
    assert first.computed == len(EXAMPLES) + len(QUERIES)
    assert again.computed == 0
    (tmp_path / next(tmp_path.iterdir()).name).write_bytes(b"broken")
    library = ExampleLibrary(EXAMPLES, Embedders(again), cache=tmp_path)
    library.select(QUERIES, 3, "question")
    assert again.computed in (len(EXAMPLES), len(QUERIES))


def test_a_question_without_text_is_like_none(tmp_path, embedder):
    library = ExampleLibrary(EXAMPLES, Embedders(embedder), cache=tmp_path)
    silent = Question("silent", "val", "what ?", extra={})
    (shots,) = library.select([silent], 2, "caption")
    assert [shot.similarity for shot in shots] == [0.0, 0.0]
