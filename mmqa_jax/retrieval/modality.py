"""Which modality a question needs, and retrieval where that is known, unknown or guessed.

WebQA's questions need either snippets or pictures (section 4); section 6.2 searches with the
modality known, and unknown. The baseline guesses it by a linear layer on a frozen or fine-tuned
BERT; here logistic regression over words and word pairs does: the question's wording tells.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse
from jaxtyping import Float64

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import WEBQA_CATEGORIES, Modality, Question, Ranking

MODALITIES: tuple[Modality, Modality] = ("text", "image")
_WORD = re.compile(r"\w+|[?\"]")


def gold_modality(question: Question, corpus: Corpus) -> Modality | None:
    """The modality of a question's gold sources; None where they are mixed or hidden.

    WebQA's category tells it also where the gold sources are hidden, as in the test split.
    """
    found = {corpus.sources[row].modality for row in corpus.positive_rows(question)}
    if len(found) == 1:
        return found.pop()
    if not found and question.category in WEBQA_CATEGORIES:
        return "text" if question.category == "text" else "image"
    return None


def one_modality(corpus: Corpus, modality: Modality) -> Corpus:
    """The sources of one modality as a corpus of their own, in order."""
    rows = corpus.modality_rows(modality)
    if not rows:
        raise UserError(
            f"modality: the corpus has no {modality} sources; search with --modality=unknown."
        )
    return Corpus([corpus.sources[row] for row in rows], read_picture=corpus.read_picture)


class ModalityIndex:
    """The rows of one modality of an index, numbered from 0 as in `one_modality`'s corpus.

    Args:
      index: an ExactIndex or ScannIndex over the whole corpus.
      rows: rows of the modality, ascending.
    """

    def __init__(self, index: Any, rows: Sequence[int]):
        self._index, self._rows = index, np.asarray(rows, np.int32)
        self._allowed = np.zeros(len(index), bool)
        self._allowed[self._rows] = True

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """As the index's `search`, over these rows alone."""
        rows, scores = self._index.search(queries, top_k, self._allowed)
        return np.searchsorted(self._rows, rows).astype(np.int32), scores


class ByModality:
    """Sends every question to the retriever of the modality that it needs.

    Args:
      retrievers: modality -> retriever of its sources; None: of all, for questions whose
        modality is not known.
      choose: questions -> the modality of each, or None.
    """

    def __init__(
        self,
        retrievers: Mapping[Modality | None, Any],
        choose: Callable[[Sequence[Question]], Sequence[Modality | None]],
    ):
        self.retrievers, self.choose = dict(retrievers), choose

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of every question, best first."""
        needed = self.choose(questions)
        rankings: dict[int, Ranking] = {}
        for modality, retriever in self.retrievers.items():
            places = [i for i, wanted in enumerate(needed) if wanted == modality]
            found = retriever.search([questions[i] for i in places], top_k) if places else []
            rankings.update(zip(places, found, strict=True))
        return [rankings[i] for i in range(len(questions))]


class ModalityClassifier:
    """Logistic regression over a question's words and word pairs: text or image.

    Made by `fit`. Attributes: `vocabulary` (feature -> column), `weights` float64[columns],
    `bias`; a positive score says image.
    """

    def __init__(self, vocabulary: Mapping[str, int], weights: np.ndarray, bias: float):
        self.vocabulary, self.weights, self.bias = dict(vocabulary), weights, bias

    @classmethod
    def fit(
        cls,
        texts: Sequence[str],
        modalities: Sequence[Modality],
        *,
        penalty: float = 1.0,
        min_count: int = 2,
    ) -> ModalityClassifier:
        """Minimises the sum of log-losses plus penalty / 2 * |weights|^2 (the bias is free).

        A convex problem: the result depends on nothing but the data.

        Args:
          texts, modalities: questions and what they need.
          penalty: strength of the regularisation.
          min_count: a feature must stand in so many questions.

        Raises:
          UserError: not both modalities are there.
        """
        missing = [name for name in MODALITIES if name not in modalities]
        if missing:
            raise UserError(
                f"modality classifier: none of the {len(texts)} training questions needs "
                f"{missing[0]} sources; train it on a split with both kinds, or use "
                "--modality=unknown."
            )
        counts: dict[str, int] = {}
        rows = [_features(text) for text in texts]
        for row in rows:
            for feature in row:
                counts[feature] = counts.get(feature, 0) + 1
        kept = sorted(feature for feature, count in counts.items() if count >= min_count)
        vocabulary = {feature: column for column, feature in enumerate(kept)}
        inputs = _matrix(rows, vocabulary)  # [n, columns]
        signs = np.array([1.0 if modality == "image" else -1.0 for modality in modalities])

        def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
            margins = signs * (inputs @ parameters[:-1] + parameters[-1])
            # d/dm log(1 + exp(-m)) = -sigmoid(-m)
            slopes = -signs * np.exp(-np.logaddexp(0, margins))
            value = (
                np.logaddexp(0, -margins).sum() + penalty / 2 * parameters[:-1] @ parameters[:-1]
            )
            gradient = np.append(inputs.T @ slopes + penalty * parameters[:-1], slopes.sum())
            return value, gradient

        start = np.zeros(len(vocabulary) + 1)
        found = scipy.optimize.minimize(
            loss,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 1000, "gtol": 1e-6, "ftol": 1e-14},
        )
        return cls(vocabulary, found.x[:-1], float(found.x[-1]))

    def scores(self, texts: Sequence[str]) -> Float64[np.ndarray, " n"]:
        """Log-odds of image against text."""
        inputs = _matrix([_features(text) for text in texts], self.vocabulary)
        return inputs @ self.weights + self.bias

    def predict(self, texts: Sequence[str]) -> list[Modality]:
        """The likelier modality of every question."""
        return ["image" if score > 0 else "text" for score in self.scores(texts)]


def fit_classifier(questions: Sequence[Question], corpus: Corpus) -> ModalityClassifier:
    """Learns from all questions whose modality is known (the train split)."""
    needed = [gold_modality(question, corpus) for question in questions]
    known = [i for i, modality in enumerate(needed) if modality is not None]
    return ModalityClassifier.fit(
        [questions[i].question for i in known], [needed[i] for i in known]
    )


def _features(text: str) -> list[str]:
    """Distinct words and pairs of neighbours, lower case; the ends of the text are words.

    `?` and `"` are words too: WebQA wraps its image questions in quotes, so they are dropped at
    the ends, or the classifier would read the label.
    """
    words = ["<", *_WORD.findall(text.lower().strip(' "')), ">"]
    pairs = [f"{a} {b}" for a, b in itertools.pairwise(words)]
    return list(dict.fromkeys(words[1:-1] + pairs))


def _matrix(rows: Sequence[Sequence[str]], vocabulary: Mapping[str, int]) -> Any:
    """Rows of features as a sparse matrix of ones, [n, columns]."""
    columns = [[vocabulary[f] for f in row if f in vocabulary] for row in rows]
    ends = np.cumsum([0, *map(len, columns)])
    flat = np.fromiter((c for row in columns for c in row), np.int32, ends[-1])
    shape = (len(rows), len(vocabulary))
    return scipy.sparse.csr_array((np.ones(len(flat)), flat, ends), shape=shape)
