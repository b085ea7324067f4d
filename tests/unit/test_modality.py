"""Known, unknown and guessed modality."""

import itertools

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.retrieval.bm25.in_memory import BM25
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.modality import (
    ByModality,
    ModalityClassifier,
    ModalityIndex,
    fit_classifier,
    gold_modality,
    one_modality,
)
from tests.refusals import refuses

SOURCES = [
    Source("p0", "image", "a red flag", image="0"),
    Source("t0", "text", "the flag is red"),
    Source("p1", "image", "a blue flag", image="1"),
    Source("t1", "text", "the sea is blue"),
    Source("t2", "text", "an old king"),
]


def ask(text, category="", positives=(), number=0):
    return Question(f"q{number}", "train", text, category=category, positives=tuple(positives))


def test_gold_modality():
    corpus = Corpus(SOURCES)
    assert gold_modality(ask("?", positives=["t0", "t2"]), corpus) == "text"
    assert gold_modality(ask("?", "text", positives=["p1"]), corpus) == "image"
    assert gold_modality(ask("?", positives=["t0", "p0"]), corpus) is None
    # WebQA's test split hides the sources, not the category.
    assert gold_modality(ask("?", "text"), corpus) == "text"
    assert gold_modality(ask("?", "color"), corpus) == "image"
    assert gold_modality(ask("?", "flags of Europe"), corpus) is None


def questions(count, seed=0):
    """Questions on looks need pictures, others snippets; names are noise."""
    rng = np.random.default_rng(seed)
    names = ["oslo", "lima", "rome", "cairo", "quito", "minsk", "hanoi", "dakar"]
    looks = ["What color has the {}", "How many stars has the {}", "Is the roof round in {}"]
    facts = ["Who founded {}", "How many people live in {}", "Is the law strict in {}"]
    made = []
    for number in range(count):
        shown = rng.random() < 0.4
        text = rng.choice(looks if shown else facts).format(f"{rng.choice(names)}?")
        made.append(ask(text, "YesNo" if shown else "text", number=number))
    return made


def test_classifier_tells_unseen_questions_apart():
    corpus = Corpus(SOURCES)
    classifier = fit_classifier(questions(300), corpus)
    unseen = [ask("What color has the harbour of Bergen?"), ask("Who founded Bergen?")]
    assert classifier.predict([q.question for q in unseen]) == ["image", "text"]
    others = questions(200, seed=1)
    guessed = classifier.predict([q.question for q in others])
    assert guessed == [gold_modality(q, corpus) for q in others]


def test_quotes_around_image_questions_are_no_hint():
    """WebQA wraps image questions in quotes: reading them would be reading the label."""
    made = questions(200)
    plain = fit_classifier(made, Corpus(SOURCES))
    quoted = [
        ask(f'"{q.question}"' if q.category != "text" else q.question, q.category) for q in made
    ]
    same = fit_classifier(quoted, Corpus(SOURCES))
    texts = [q.question for q in made]
    np.testing.assert_allclose(plain.scores(texts), same.scores(texts), atol=1e-9)


def test_fit_is_the_minimum_of_the_regularized_loss():
    """Newton's method on dense features, to machine precision, finds the same weights."""
    made = questions(80)
    texts = [q.question for q in made]
    labels = ["text" if q.category == "text" else "image" for q in made]
    found = ModalityClassifier.fit(texts, labels, penalty=0.7, min_count=1)
    size = len(found.vocabulary)
    dense = np.zeros((len(texts), size + 1))
    dense[:, -1] = 1
    for row, text in enumerate(texts):
        words = ["<", *text.lower().replace("?", " ?").split(), ">"]
        for feature in {*words[1:-1], *map(" ".join, itertools.pairwise(words))}:
            dense[row, found.vocabulary[feature]] = 1
    target = np.array([label == "image" for label in labels], float)
    ridge = np.full(size + 1, 0.7)
    ridge[-1] = 0
    parameters = np.zeros(size + 1)
    for _ in range(30):
        p = 1 / (1 + np.exp(-dense @ parameters))
        gradient = dense.T @ (p - target) + ridge * parameters
        hessian = (dense * (p * (1 - p))[:, None]).T @ dense + np.diag(ridge)
        parameters -= np.linalg.solve(hessian, gradient)
    np.testing.assert_allclose(found.weights, parameters[:-1], atol=1e-5)
    np.testing.assert_allclose(found.bias, parameters[-1], atol=1e-5)


def test_classifier_needs_both_kinds():
    with pytest.raises(UserError, match="none of the 2 training questions needs image sources"):
        ModalityClassifier.fit(["who", "when"], ["text", "text"])


def test_one_modality_index_finds_its_rows_alone():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((5, 4)).astype(np.float32)
    corpus, index = Corpus(SOURCES), ExactIndex(Embeddings(vectors, "m", "c"))
    for modality, rows in (("text", [1, 3, 4]), ("image", [0, 2])):
        part = one_modality(corpus, modality)
        assert [source.id for source in part.sources] == [SOURCES[row].id for row in rows]
        view = ModalityIndex(index, corpus.modality_rows(modality))
        alone = ExactIndex(Embeddings(vectors[rows], "m", "c"))
        queries = rng.standard_normal((6, 4)).astype(np.float32)
        for a, b in zip(
            view.search(queries, len(part)), alone.search(queries, len(part)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    refuses("no image sources", one_modality, Corpus(SOURCES[1:2]), "image")


class PlainRetriever:
    """BM25 without the systems room."""

    def __init__(self, corpus):
        self.corpus = corpus
        self.bm25 = BM25([source.text for source in corpus.sources])

    def search(self, asked, top_k):
        rows, scores = self.bm25.search([q.question for q in asked], min(top_k, len(self.corpus)))
        return [
            Ranking(q.id, tuple(self.corpus.sources[row].id for row in found), tuple(values))
            for q, found, values in zip(asked, rows, scores.tolist(), strict=True)
        ]


def test_questions_go_to_the_sources_they_need():
    corpus = Corpus(SOURCES)
    retrievers = {m: PlainRetriever(one_modality(corpus, m)) for m in ("text", "image")}
    retrievers[None] = PlainRetriever(corpus)
    asked = [
        ask("red flag", "color", number=0),
        ask("red flag", "text", number=1),
        ask("red flag", number=2),
        ask("blue sea", "shape", number=3),
    ]
    found = ByModality(
        retrievers.__getitem__, lambda some: [gold_modality(question, corpus) for question in some]
    ).search(asked, 2)
    assert [ranking.question_id for ranking in found] == ["q0", "q1", "q2", "q3"]
    assert found[0].sources == ("p0", "p1")
    assert found[1].sources[0] == "t0"
    assert set(found[2].sources) == {"p0", "t0"}
    assert found[3].sources[0] == "p1"
    # Document frequencies are those of the modality's own corpus.
    assert found[0].scores == retrievers["image"].search(asked[:1], 2)[0].scores
