"""MRAG-Bench (Hu et al., ICLR 2025): a vision-language model answers with pictures as evidence.

The model sees the question's picture and, behind it, those of the sources: none, the ones that the
authors retrieved by CLIP, the gold ones, or a retriever's own. Prompts are the authors'
(templates/mragbench.toml); the model answers with a letter.

  retriever.search(questions, top_k) -> one Ranking per question, from the corpus of pictures
  llm.answer(queries)                -> a letter for every prompt

A letter does not say which picture it rests on: an answer cites all that the model was shown.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mmqa_jax.benchmarks.mragbench import INCOMPLETE, RETRIEVED
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.multiple_choice import LETTERS
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting import few_shot
from mmqa_jax.prompting.backends import Backend, Chat, Decoding, Picture
from mmqa_jax.retrieval.rankings import Retriever, find_candidates, gold_ranking

MOST_NEW = 4096  # tokens of an answer, as in the authors' eval/models/llava_one_vision.py


def answer_alone(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    *,
    picture: bool = True,
    max_new_tokens: int = MOST_NEW,
) -> list[Prediction]:
    """No retrieval; `picture` says whether the question's own picture is shown."""
    rankings = [Ranking(question.id, (), ()) for question in questions]
    return _answer(questions, rankings, corpus, llm, max_new_tokens, picture=picture)


def answer_given(
    questions: Sequence[Question], corpus: Corpus, llm: Backend, *, max_new_tokens: int = MOST_NEW
) -> list[Prediction]:
    """The pictures that the authors retrieved by CLIP."""
    rankings = [_given(question) for question in questions]
    return _answer(questions, rankings, corpus, llm, max_new_tokens)


def answer_gold(
    questions: Sequence[Question], corpus: Corpus, llm: Backend, *, max_new_tokens: int = MOST_NEW
) -> list[Prediction]:
    """The gold pictures."""
    rankings = [gold_ranking(question) for question in questions]
    return _answer(questions, rankings, corpus, llm, max_new_tokens)


def answer_retrieved(
    questions: Sequence[Question],
    corpus: Corpus,
    retriever: Retriever,
    llm: Backend,
    *,
    top_k: int = 5,
    max_new_tokens: int = MOST_NEW,
) -> list[Prediction]:
    """The retriever's first `top_k` pictures."""
    rankings = find_candidates(questions, retriever, top_k)
    return _answer(questions, rankings, corpus, llm, max_new_tokens)


class _Shown(NamedTuple):
    """The model's view of a question: pictures, and their sources."""

    pictures: Sequence[Picture]
    sources: Ranking


def _answer(
    questions: Sequence[Question],
    rankings: Sequence[Ranking],
    corpus: Corpus,
    llm: Backend,
    max_new_tokens: int,
    *,
    picture: bool = True,
) -> list[Prediction]:
    decoding = Decoding(max_new_tokens=max_new_tokens)
    evidence = {
        question.id: _pictures(corpus, question, ranking, with_own=picture)
        for question, ranking in zip(questions, rankings, strict=True)
    }

    def show(key: Hashable, question: Question, text: str) -> Chat:
        prompt, _ = few_shot.as_prompt(text, evidence[question.id].pictures, chat=True)
        return Chat(key, prompt, decoding)

    def fields(question: Question) -> dict[str, str]:
        listed = (f"{LETTERS[n]}: {choice}" for n, choice in enumerate(question.choices))
        return {
            "pictures": few_shot.MARK * len(evidence[question.id].pictures),
            "question": question.question.replace(few_shot.MARK, " "),
            "options": "\n".join(listed).replace(few_shot.MARK, " "),
        }

    def template(question: Question) -> few_shot.PromptTemplate:
        kind = "sources" if evidence[question.id].sources.sources else "alone"
        return few_shot.load_template(f"mragbench.{kind}")

    replies = few_shot.ask(questions, None, llm, template, fields, show)
    return [
        _citing(prediction, evidence[prediction.question_id].sources)
        for prediction in map(few_shot.read_one, questions, replies)
    ]


def _pictures(corpus: Corpus, question: Question, ranking: Ranking, *, with_own: bool) -> _Shown:
    """Returns the pictures to show: one for a question of one gold picture, as the authors do."""
    most = 1 if question.category == INCOMPLETE else None
    pictures = list(few_shot.pictures_of(corpus, question)) if with_own else []
    cited = []
    for name, score in list(zip(ranking.sources, ranking.scores, strict=True))[:most]:
        picture = few_shot.source_picture(corpus, corpus.row[name], True)
        if picture is not None:
            pictures.append(picture)
            cited.append((name, score))
    names, scores = tuple(name for name, _ in cited), tuple(score for _, score in cited)
    return _Shown(pictures, Ranking(question.id, names, scores))


def _citing(prediction: Prediction, ranking: Ranking) -> Prediction:
    """The prediction with all that the model was shown as its sources, if it answered."""
    cited = ranking if prediction.answer.strip() else Ranking(ranking.question_id, (), ())
    return dataclasses.replace(
        prediction, sources=cited.sources, source_scores=cited.scores, read=ranking.sources
    )


def _given(question: Question) -> Ranking:
    """The retrieved sources that the benchmark gives; they have ranks and no scores."""
    names = tuple(question.extra.get(RETRIEVED, ()))
    return Ranking(question.id, names, tuple(1 / rank for rank in range(1, len(names) + 1)))


def _check_given(questions: Sequence[Question], options: object) -> None:
    if not any(question.extra.get(RETRIEVED) for question in questions):
        raise UserError(
            "setting given: no question has retrieved pictures; prepare mragbench from its Parquet "
            "files, or use setting retrieved."
        )


SETTINGS = {
    "alone": Setting(answer_alone, of_choices=True),
    "given": Setting(answer_given, of_choices=True, rule_of_inputs=_check_given),
    "gold": Setting(answer_gold, of_choices=True, of_gold=True),
    "retrieved": Setting(answer_retrieved, of_choices=True),
}
