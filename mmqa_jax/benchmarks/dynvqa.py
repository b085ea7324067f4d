"""Dyn-VQA's files (https://github.com/Alibaba-NLP/OmniSearch, dataset/): answers that change.

    DynVQA_en.YYYYMM.jsonl     question_id, question, answer, image_url, golden_query; here or in
    DynVQA_zh.YYYYMM.jsonl     DynVQA_en/, DynVQA_zh/. Of several versions the newest is read
    images/QUESTION_ID.*       optional: what the reader fetched from each `image_url`

Dyn-VQA's score (src/Omnisearch_gpt/evaluate.py), F1-Recall: the share of an answer's words that the
prediction has, of the answer that gives most. Predictions are normalized by VQA's rules first, the
answers are not. Words are NLTK's in English, jieba's in Chinese.

    dynvqa/recall    from 0 to 1; 0 without a prediction
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.data.answers import normalize_answer
from mmqa_jax.data.formats import official
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.scores import groups_by, paired, read_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers

# Keys of Question.extra: the picture's address, and what to search for.
IMAGE_URL, GOLDEN_QUERY = "image_url", "golden_query"
SCORER = "dynvqa/recall"
LANGUAGES = {"en": "English", "zh": "Chinese"}
MATERIALS = (
    Material("Dyn-VQA", "Li et al., ICLR 2025"),
    Material("Dyn-VQA's pictures, of the web", license="under their own licenses"),
)
_QUERY_KEYS = (GOLDEN_QUERY, "gloden_query")  # the second one up to 202412
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_NO_WORDS = {"en": ",.?!:;'\"", "zh": "，、。 ,.《》"}


def read_dynvqa(folder: Path) -> official.BenchmarkFiles:
    """Reads the newest version of each language; all questions are of the split `test`,
    `Question.category` is the language."""
    files = official.OfficialFiles(folder)
    questions: dict[str, Question] = {}
    for code in LANGUAGES:
        name = f"DynVQA_{code}"
        versions = {path.name: path for path in folder.glob(f"{name}/{name}.*.jsonl")}
        versions |= {path.name: path for path in folder.glob(f"{name}.*.jsonl")}
        if not versions:
            files.missing[f"{name}.*.jsonl"] = f"there are no {LANGUAGES[code]} questions"
            continue
        newest = versions[max(versions)]
        files.read_files.append(newest)
        rows = official.line_entries(newest)
        read = functools.partial(_question, code)
        questions |= official.read_entries(rows, read, "question_id")
    files.check_questions(questions, "Dyn-VQA", "the repository's DynVQA_en.202502.jsonl")
    places = {name: [f"images/{name}{suffix}" for suffix in _SUFFIXES] for name in questions}
    pictures = official.PictureFiles(folder, places)
    pictured = official.with_present_pictures(questions.values(), pictures)
    if not official.picture_names(pictured):
        files.missing["images/"] = "no pictures, without which few can be answered"
    kinds = {f"{code} questions": lambda q, code=code: q.category == code for code in LANGUAGES}
    kinds["questions with a picture"] = lambda q: q.image is not None
    counts = official.counts_of(pictured, ("test",), kinds)
    return files.content(pictured, counts, {}, pictures)


def _question(code: str, row: official.Entry) -> Question:
    name, answers = row.text("question_id"), row.get("answer")
    if not isinstance(answers, list) or not answers:
        raise row.wrong("answer", "a list of answers")
    if not all(type(answer) in (str, int, float) for answer in answers):
        raise row.wrong("answer", "a list of texts and numbers")
    query = next((row[key] for key in _QUERY_KEYS if isinstance(row.get(key), str)), "")
    return Question(
        id=name,
        split="test",
        question=row.text("question"),
        image=name,
        answers=tuple(map(str, answers)),
        category=code,
        extra={IMAGE_URL: row.text(IMAGE_URL), GOLDEN_QUERY: query},
    )


def word_recall(answer: str, references: Sequence[str], language: str) -> float:
    """The share of a reference's words that an answer has, of the best reference.

    `language`: `en` or `zh`.
    """
    words = _words_of(language)
    predicted = normalize_answer(answer)
    if not predicted:
        return 0.0
    has = Counter(words(predicted))
    return max(_recall(Counter(words(reference)), has) for reference in references)


def _recall(wanted: Counter[str], has: Counter[str]) -> float:
    if not wanted or not has:
        return float(wanted == has)
    return (wanted & has).total() / wanted.total()


@functools.cache
def _words_of(language: str) -> Callable[[str], list[str]]:
    """The function that splits texts of a language into the words that count."""
    try:
        split = _english() if language == "en" else _chinese()
    except ImportError as error:
        raise UserError(
            f"Dyn-VQA: its words need the package {error.name}; install it with "
            "`pip install 'mmqa-jax[dynvqa]'`."
        ) from error
    # A part of the marks' string is left out, as the authors' `in` has it.
    return lambda text: [word for word in split(text) if word not in _NO_WORDS[language]]


def _english() -> Callable[[str], list[str]]:
    from nltk.tokenize import NLTKWordTokenizer
    from punkt import sent_tokenize

    tokenize = NLTKWordTokenizer().tokenize
    return lambda text: [
        word for sentence in sent_tokenize(text.lower()) for word in tokenize(sentence)
    ]


def _chinese() -> Callable[[str], list[str]]:
    import logging

    import jieba

    jieba.setLogLevel(logging.WARNING)
    return lambda text: " ".join(jieba.cut(text)).split()


def score_dynvqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """F1-Recall by language; a missing prediction counts 0."""
    scored = scored_split(questions, predictions, has_answers, "answers")
    recall = scored.values(lambda q, p: word_recall(p.answer, q.answers, q.category))
    groups = groups_by(scored.counted, lambda q: q.category, list(LANGUAGES))
    return scored.evaluation({SCORER: recall}, groups)


def write_dynvqa_results(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the lines that evaluate.py reads, of one language or both."""
    rows: list[dict[str, Any]] = [
        {
            "question_id": question.id,
            "question": question.question,
            "answer": list(question.answers),
            "prediction": prediction.answer,
        }
        for question, prediction in paired(questions, predictions)
    ]
    write_jsonl(path, rows)


BENCHMARK = Benchmark(
    read=read_dynvqa,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats='predictions.jsonl, or the authors\' lines {"question_id", "prediction"}',
    read_predictions=functools.partial(read_lines, id_key="question_id", text_key="prediction"),
    has_reference=has_answers,
    score=score_dynvqa,
    headline="dynvqa",
    write_submission=write_dynvqa_results,
    submission="results.jsonl",
    boards=read_boards("dynvqa"),
)
