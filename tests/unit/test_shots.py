"""In-context examples: which are chosen, and which never."""

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.pictures.store import EncodedPicture
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.examples.library import Embedders, ExampleLibrary, bimodal
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.index import ScannIndex, ScannParameters, scann_available
from tests.refusals import refuses

DIM = 8


class FakeEmbedder:
    """Every content has a vector of its own, drawn from its hash; counts what it computes."""

    def __init__(self, dim: int = DIM):
        self.dim, self.fingerprint, self.computed = dim, "fake", 0

    def _vector(self, content: bytes) -> np.ndarray:
        vector = np.random.default_rng(list(content)).normal(size=self.dim).astype(np.float32)
        return vector / np.linalg.norm(vector)

    def unscaled(self):
        return UnscaledEmbedder(self.dim)

    def embed_questions(self, texts):
        self.computed += len(texts)
        return np.stack([self._vector(text.encode()) for text in texts])

    def embed_pictures(self, pictures):
        self.computed += len(pictures)
        return np.stack([self._vector(picture.tobytes()) for picture in pictures])


class UnscaledEmbedder(FakeEmbedder):
    """The same vectors, texts of length 2 and pictures of 5."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.fingerprint = "fake, unscaled"

    def embed_questions(self, texts):
        return 2 * super().embed_questions(texts)

    def embed_pictures(self, pictures):
        return 5 * super().embed_pictures(pictures)


def question(n: int, prefix: str = "e", image: bool = True) -> Question:
    name = f"{prefix}{n}"
    extra = {"caption": f"caption {name}"}
    return Question(name, "train", f"text {name} ?", f"{name}.png" if image else None, extra=extra)


def pixels(q: Question) -> np.ndarray | None:
    if q.image is None:
        return None
    return np.frombuffer(q.image.encode().ljust(12, b"."), np.uint8).reshape(2, 2, 3)


def encoded(q: Question) -> EncodedPicture | None:
    return q.image and EncodedPicture(q.image.encode(), lambda: pixels(q))


EXAMPLES = [question(n, image=n % 3 > 0) for n in range(40)]
QUERIES = [question(n, "q", image=n % 2 > 0) for n in range(7)]


@pytest.fixture
def embedder():
    return FakeEmbedder()


@pytest.fixture
def library(embedder, tmp_path):
    return ExampleLibrary(EXAMPLES, Embedders(embedder, embedder, encoded), cache=tmp_path)


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
            longer, shorter = (5, 2) if kind == "bimodal_unnormalized" else (1, 1)
            mean = text if picture is None else (shorter * text + longer * image) / 2
            rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


@pytest.mark.parametrize(
    "kind",
    ["question", "caption", "image", "question_and_image", "bimodal", "bimodal_unnormalized"],
)
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
    refuses("library of examples is empty", library.select, QUERIES, 1, "question")


def test_similarities_that_need_an_encoder(embedder, tmp_path):
    refuses("no embedder", ExampleLibrary(EXAMPLES).select, QUERIES, 1, "question")
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
    next(tmp_path.glob("*/[0-9]*.jsonl")).write_bytes(b"broken")
    library = ExampleLibrary(EXAMPLES, Embedders(again), cache=tmp_path)
    library.select(QUERIES, 3, "question")
    assert again.computed in (len(EXAMPLES), len(QUERIES))


def test_a_question_without_text_is_like_none(tmp_path, embedder):
    library = ExampleLibrary(EXAMPLES, Embedders(embedder), cache=tmp_path)
    silent = Question("silent", "val", "what ?", extra={})
    (shots,) = library.select([silent], 2, "caption")
    assert [shot.similarity for shot in shots] == [0.0, 0.0]


def test_queries_of_another_corpus_may_have_the_ids_of_examples(embedder, tmp_path):
    """Such a query keeps its own picture, and the example of its id may be its shot."""
    queries = [question(n, image=n % 3 == 0) for n in range(6)]  # EXAMPLES have the others

    def shown(q):
        return q.image and EncodedPicture(b"q" + q.image.encode(), lambda: pixels(q))

    library = ExampleLibrary(
        EXAMPLES,
        Embedders(embedder, embedder, encoded),
        of_queries=Embedders(embedder, embedder, shown),
        same_ids=False,
        folds=2,
        cache=tmp_path,
    )
    expected = vectors(queries, "bimodal") @ vectors(EXAMPLES, "bimodal").T
    for row, shots in zip(expected, library.select(queries, 40, "bimodal"), strict=True):
        assert len(shots) == len(EXAMPLES)
        found = {shot.question.id: shot.similarity for shot in shots}
        assert found == pytest.approx(
            {e.id: s for e, s in zip(EXAMPLES, row, strict=True)}, abs=1e-6
        )
    assert [len(own) for own in library.select(queries, 40, "random")] == [40] * 6
    assert library.named(queries[1], ["e1"], 1)[0].question is EXAMPLES[1]


def test_kept_pictures_are_not_decoded_again(tmp_path):
    """A picture that cannot be decoded is none, in the first run as in the second."""
    decoded = []

    def shown(q):
        def decode():
            decoded.append(q.id)
            return None if q.id == "e4" else pixels(q)

        return q.image and EncodedPicture(q.image.encode(), decode)

    found = []
    for _ in range(2):
        fake = FakeEmbedder()
        library = ExampleLibrary(EXAMPLES, Embedders(fake, fake, shown), cache=tmp_path)
        (shots,) = library.select([EXAMPLES[1]], 39, "image")
        found.append({shot.question.id: shot.similarity for shot in shots})
    assert found[0] == found[1]
    assert sorted(decoded) == sorted([*(e.id for e in EXAMPLES if e.image), "e1"])
    assert found[0]["e4"] == 0 != found[0]["e5"]


def test_few_pictures_are_decoded_at_once(monkeypatch, tmp_path):
    """Never more than a block of them are in memory, whatever the size of the library."""
    at_once = []

    class Batched(FakeEmbedder):
        def embed_pictures(self, pictures):
            at_once.append(len(pictures))
            return super().embed_pictures(pictures)

    monkeypatch.setattr("mmqa_jax.prompting.examples.library._DECODED", 8)
    fake = Batched()
    ExampleLibrary(EXAMPLES, Embedders(fake, fake, encoded), cache=tmp_path).select(
        QUERIES, 1, "image"
    )
    assert max(at_once) == 8
    assert sum(at_once) == sum(q.image is not None for q in (*EXAMPLES, *QUERIES))


def scann(parameters=None):
    return lambda own: ScannIndex.build(Embeddings(own, "", ""), parameters)


@pytest.mark.skipif(not scann_available(), reason="ScaNN cannot be imported here")
@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize("kind", ["question", "image", "question_and_image", "bimodal"])
def test_an_index_finds_what_products_do(embedder, tmp_path, kind, folds):
    """Without the query itself or its fold; below 20,000 examples ScaNN scores all of them."""
    asked = [*QUERIES, *EXAMPLES]
    exact, indexed = (
        ExampleLibrary(
            EXAMPLES, Embedders(embedder, embedder, encoded), folds=folds, index=index,
            cache=tmp_path,
        ).select(asked, 6, kind)
        for index in (None, scann())
    )  # fmt: skip
    for query, one, other in zip(asked, exact, indexed, strict=True):
        similarities = [[shot.similarity for shot in shots] for shots in (one, other)]
        np.testing.assert_allclose(*similarities, atol=1e-6)
        distinct = {round(s, 5) for s in similarities[0] if s}
        if len(distinct) == 6:  # no ties
            assert [s.question.id for s in one] == [s.question.id for s in other]
        assert query.id not in [shot.question.id for shot in other]


@pytest.mark.skipif(not scann_available(), reason="ScaNN cannot be imported here")
@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_index_gives_all_of_a_small_library(embedder, tmp_path, size, folds):
    few = EXAMPLES[:size]
    exact, indexed = (
        ExampleLibrary(few, Embedders(embedder), folds=folds, index=index, cache=tmp_path)
        .select(EXAMPLES[:8], 6, "question")
        for index in (None, scann())
    )  # fmt: skip
    assert [[s.question.id for s in own] for own in indexed] == [
        [s.question.id for s in own] for own in exact
    ]


@pytest.mark.skipif(not scann_available(), reason="ScaNN cannot be imported here")
def test_the_recall_of_an_approximate_index(tmp_path):
    """ScaNN's partitions and quantization, over vectors of which a tenth are zeros."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(40, 32))
    rows = centers[rng.integers(40, size=4000)] + 0.6 * rng.normal(size=(4000, 32))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    class Numbered(FakeEmbedder):
        def embed_questions(self, texts):
            return rows[[int(text or 0) for text in texts]]

    examples = [
        Question(str(n), "train", "" if n % 10 == 0 else str(n), image=None) for n in range(3900)
    ]
    queries = [Question(str(n), "train", str(n)) for n in range(3800, 4000)]
    parameters = ScannParameters(leaves=60, leaves_to_search=30, reorder=100)
    exact, indexed = (
        ExampleLibrary(examples, Embedders(Numbered(32)), folds=2, index=index, cache=tmp_path)
        .select(queries, 10, "question")
        for index in (None, scann(parameters))
    )  # fmt: skip
    shared = [
        len({s.question.id for s in one} & {s.question.id for s in other}) / 10
        for one, other in zip(exact, indexed, strict=True)
    ]
    assert np.mean(shared) >= 0.97
    assert all(len(shots) == 10 for shots in indexed)
    for query, shots in zip(queries, indexed, strict=True):
        assert all(fold_of(s.question.id, 2) != fold_of(query.id, 2) for s in shots)
