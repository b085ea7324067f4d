"""Which modality a question needs, and retrieval if that is known, unknown or predicted.

WebQA's questions need either snippets or pictures (section 4); section 6.2 searches with known and
with unknown modality. The baseline predicts it with a linear layer over BERT, which `mmqa train
--config=configs/webqa/modality.py` trains (encoders.heads); ours is logistic regression
over words and word pairs, which needs no BERT and is fitted when it is used.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float64

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality, Question, Ranking, category_modality
from mmqa_jax.retrieval.rankings import Retriever

MODALITIES: tuple[Modality, Modality] = ("text", "image")
_WORD = re.compile(r"\w+|[?\"]")


def gold_modality(question: Question, corpus: Corpus) -> Modality | None:
    """The modality of a question's gold sources; None if they are mixed or hidden.

    WebQA's category gives it even if the gold sources are hidden, as in the test split.
    """
    modalities = {corpus.sources[row].modality for row in corpus.positive_rows(question)}
    if len(modalities) == 1:
        return modalities.pop()
    return None if modalities else category_modality(question.category)


def one_modality(corpus: Corpus, modality: Modality) -> Corpus:
    """The sources of one modality as a corpus of their own, in order."""
    rows = corpus.modality_rows(modality)
    if not len(rows):
        raise UserError(
            f"modality: the corpus has no {modality} sources; search all of them, with "
            "--modality=unknown of `mmqa search` or parts.retriever.modality=unknown of a row."
        )
    return corpus.of_rows(rows)


class ModalityIndex:
    """The rows of one modality, ascending, of an index over the whole corpus, numbered from 0 as in
    `one_modality`'s corpus."""

    def __init__(self, index: Any, rows: Sequence[int]):
        self._index, self._rows = index, np.asarray(rows, np.int32)
        self._allowed = np.zeros(len(index), bool)
        self._allowed[self._rows] = True

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Searches as the index does, over these rows alone."""
        rows, scores = self._index.search(queries, top_k, self._allowed)
        return np.searchsorted(self._rows, rows).astype(np.int32), scores

    def search_within(
        self, queries: np.ndarray, rows: Sequence[Sequence[int]], top_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches as the index's `search_within`; padding stays -1."""
        of_index = [self._rows[np.asarray(candidates, np.int32)] for candidates in rows]
        of_whole, scores = self._index.search_within(queries, of_index, top_k)
        renumbered = np.where(of_whole < 0, -1, np.searchsorted(self._rows, of_whole))
        return renumbered.astype(np.int32), scores


class ByModality:
    """A Retriever that sends every question to the sources of the modality that it needs.

    Args:
      over: modality -> Retriever over its sources; None -> over all sources, for questions of
        unknown modality. Called once per modality that is needed.
      choose: questions -> the modality of each, or None.
    """

    def __init__(
        self,
        over: Callable[[Modality | None], Retriever],
        choose: Callable[[Sequence[Question]], Sequence[Modality | None]],
    ):
        self._over, self.choose = functools.lru_cache(over), choose

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of every question, best first."""
        needed = self.choose(questions)
        rankings: dict[int, Ranking] = {}
        for modality in dict.fromkeys(needed):
            members = [i for i, choice in enumerate(needed) if choice == modality]
            ranked = self._over(modality).search([questions[i] for i in members], top_k)
            rankings.update(zip(members, ranked, strict=True))
        return [rankings[i] for i in range(len(questions))]


class Classifier(Protocol):
    """Tells from a question's words which modality it needs."""

    def predict(self, texts: Sequence[str]) -> list[Modality]:
        """The more likely modality of every question."""


def modality_predictor(
    corpus: Corpus, classifier: Classifier | None
) -> Callable[[Sequence[Question]], list[Modality | None]]:
    """Makes a function from questions to their modalities, which the classifier predicts; None:
    they are taken from the gold sources."""
    if classifier is None:
        return lambda questions: [gold_modality(question, corpus) for question in questions]
    return lambda questions: list(classifier.predict([q.question for q in questions]))


def modality_report(
    corpus: Corpus,
    questions: Sequence[Question],
    choose: Callable[[Sequence[Question]], Sequence[Modality | None]] | None,
) -> dict[str, Any]:
    """Reports the modalities that were searched: `modality_unknown`, the number of questions of
    unknown modality, or, if `choose` predicted it, `modality_accuracy` over the questions of known
    modality (None: there are none)."""
    gold = [gold_modality(question, corpus) for question in questions]
    if choose is None:
        return {"modality_unknown": gold.count(None)}
    predicted = choose(questions)
    right = [a == b for a, b in zip(predicted, gold, strict=True) if b is not None]
    return {"modality_accuracy": sum(right) / len(right) if right else None}


class ModalityClassifier:
    """Logistic regression over a question's words and word pairs: text or image.

    Made by `fit`. Attributes: `vocabulary` (feature -> column), `weights` float64[columns],
    `bias`; a positive score means image.
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
        """Minimizes the sum of log losses plus penalty / 2 * |weights|^2 (the bias is free).

        A convex problem: the result depends only on the data.

        Args:
          texts, modalities: questions and the modalities that they need.
          penalty: strength of the regularization.
          min_count: features of fewer questions are ignored.
        """
        _check_both(modalities)
        counts: dict[str, int] = {}
        rows = [_features(text) for text in texts]
        for row in rows:
            for feature in row:
                counts[feature] = counts.get(feature, 0) + 1
        frequent = sorted(feature for feature, count in counts.items() if count >= min_count)
        import scipy.optimize  # takes as long to import as jax

        vocabulary = {feature: column for column, feature in enumerate(frequent)}
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
        minimum = scipy.optimize.minimize(
            loss,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 1000, "gtol": 1e-6, "ftol": 1e-14},
        )
        return cls(vocabulary, minimum.x[:-1], float(minimum.x[-1]))

    def scores(self, texts: Sequence[str]) -> Float64[np.ndarray, " n"]:
        """Log-odds of image over text."""
        check_several(texts, "ModalityClassifier")
        inputs = _matrix([_features(text) for text in texts], self.vocabulary)
        return inputs @ self.weights + self.bias

    def predict(self, texts: Sequence[str]) -> list[Modality]:
        """The more likely modality of every question."""
        return ["image" if score > 0 else "text" for score in self.scores(texts)]


def fit_classifier(questions: Sequence[Question], corpus: Corpus) -> ModalityClassifier:
    """A classifier trained on the questions of known modality (of the train split)."""
    return ModalityClassifier.fit(*labeled_questions(questions, corpus))


def labeled_questions(
    questions: Sequence[Question], corpus: Corpus
) -> tuple[list[str], list[Modality]]:
    """The questions of known modality, without the quotes around them, and their modalities."""
    needed = [(question, gold_modality(question, corpus)) for question in questions]
    known = [(without_quotes(q.question), modality) for q, modality in needed if modality]
    texts, modalities = [text for text, _ in known], [modality for _, modality in known]
    _check_both(modalities)
    return texts, modalities


def without_quotes(text: str) -> str:
    """A question without quotes at its ends.

    WebQA wraps its image questions in quotes, which would give away the label.
    """
    return text.strip(' "')


def _check_both(modalities: Sequence[Modality]) -> None:
    missing = [name for name in MODALITIES if name not in modalities]
    if missing:
        raise UserError(
            f"modality classifier: none of the {len(modalities)} training questions needs "
            f"{missing[0]} sources; train it on a split with both kinds, or use "
            "--modality=unknown."
        )


def _features(text: str) -> list[str]:
    """Distinct lowercase words and word bigrams; the ends of the text count as words in bigrams.

    `?` and `"` are words too, but quotes at the ends are dropped.
    """
    words = ["<", *_WORD.findall(without_quotes(text.lower())), ">"]
    pairs = [f"{a} {b}" for a, b in itertools.pairwise(words)]
    return list(dict.fromkeys(words[1:-1] + pairs))


def _matrix(rows: Sequence[Sequence[str]], vocabulary: Mapping[str, int]) -> Any:
    """Rows of features as a sparse matrix of ones, [n, columns]."""
    import scipy.sparse

    columns = [[vocabulary[f] for f in row if f in vocabulary] for row in rows]
    ends = np.cumsum([0, *map(len, columns)])
    flat = np.fromiter((c for row in columns for c in row), np.int32, ends[-1])
    shape = (len(rows), len(vocabulary))
    return scipy.sparse.csr_array((np.ones(len(flat)), flat, ends), shape=shape)


def of_modality(
    questions: Sequence[Question], corpus: Corpus, modality: Modality | None
) -> list[Question]:
    """The questions whose gold sources are of one modality (VLP_I, VLP_T); None: all."""
    if modality is None:
        return list(questions)
    needing = [question for question in questions if gold_modality(question, corpus) == modality]
    if not needing:
        raise UserError(
            f"config key data.modality={modality}: none of the {len(questions)} questions needs "
            "such sources; leave it out or choose the other one."
        )
    return needing
