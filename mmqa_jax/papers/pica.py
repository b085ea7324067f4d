"""PICa (Yang et al., AAAI 2022): a language model answers from captions, with in-context examples.

The picture becomes a caption, perhaps with tags; solved questions that resemble the query in text
and picture precede it; of several prompts with different examples the most probable answer wins.
PromptCap's rows are the same with its own captions, one prompt, and the most similar example last.
WebQA's, which show sources, are in pica_webqa.py.

  library.select(questions, count, similarity) -> shots of every question, most similar first
  knowledge.of_questions(questions)            -> passages for the context (as KAT; optional)
  llm.answer(queries)                          -> a continuation of every prompt
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.core.sections import Count
from mmqa_jax.data.datasets.benchmark import CAPTION, TAGS
from mmqa_jax.data.datasets.coco import PEOPLE_CAPTIONS
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.answer_text import pica_answer
from mmqa_jax.papers.pica_webqa import answer_with_sources, answer_without_sources
from mmqa_jax.prompting.backends import Choices, Completion, Decoding
from mmqa_jax.prompting.captions import (
    Captions,
    check_captions,
    check_no_tags,
    traced,
    with_captions,
)
from mmqa_jax.prompting.few_shot import (
    NO_CONTEXT,
    OWN_CAPTION,
    FewShot,
    Order,
    few_shot,
    majority_answer,
    prompts_record,
)
from mmqa_jax.prompting.multiple_choice import (
    Normalization,
    check_choices,
    choose_options,
)
from mmqa_jax.prompting.shots import ExampleLibrary, Shot, Similarity, seeded
from mmqa_jax.prompting.stream import Answers, answer_all
from mmqa_jax.prompting.templates import PromptTemplate, load_template
from mmqa_jax.retrieval.knowledge import KnowledgeBase, Passage, passages_of
from mmqa_jax.retrieval.rankings import check_gold

ShotAnswer = Literal["first", "majority"]
ShotCaptions = Literal["own", "people"]
# Answers that PromptCap's code writes as OK-VQA's annotators do.
_PROMPTCAP_ANSWERS = {
    "one world": "1 world", "takeoff": "take off", "virgin australia": "virgin"
}  # fmt: skip


def answer_pica(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 16,
    ensemble: int = 1,
    similarity: Similarity = "question_and_image",
    tags: bool = False,
    order: Order = "most_similar_first",
    shot_answer: ShotAnswer = "first",
    shot_captions: ShotCaptions = "own",
    template: str = "pica.okvqa",
    max_new_tokens: int = 5,
    seed: Count = 0,
) -> list[Prediction]:
    """PICa-Full; PICa-Base is `similarity="random"` with one prompt per question.

    Args:
      shots: examples in a prompt, fewer where the context is short.
      ensemble: prompts per question; the r-th shows the examples r * shots to (r + 1) * shots.
      tags: the picture's tags follow its caption (C+T).
      shot_answer: the first annotator's answer, or the one that most gave, of ties the first.
      shot_captions: a shot's caption is a model's as the query's (`own`), or one of COCO's by
        people, without tags (`people`, PICa's; by `seed` and the shot); the query's is then
        written as in the released file, which PICa's code cuts without reading its JSON.
    """
    decoding, fields = _decoding(max_new_tokens), _fields_of(tags, shot_answer)
    chosen = library.select(questions, shots * ensemble, similarity, seed=seed)
    if shot_captions == "people":
        chosen = [[_captioned_by_people(shot, seed) for shot in found] for found in chosen]
        questions = [_as_released(question) for question in questions]
    groups = [[found[r * shots : (r + 1) * shots] for r in range(ensemble)] for found in chosen]
    return _answer(
        questions, groups, passages_of(knowledge, questions), llm,
        load_template(template), fields, decoding, order,
    )  # fmt: skip


def answer_promptcap(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    captions: Captions | None = None,
    *,
    shots: Count = 16,
    similarity: Similarity = "question_and_image",
    tags: bool = True,
    max_new_tokens: int = 20,
    seed: Count = 0,
) -> list[Prediction]:
    """PromptCap (Hu et al., ICCV 2023; GPT3-inference/gpt3_direct_answer.py): its captions in PICa.

    The context is `caption tag, tag`, a shot's answer the majority's (of ties the last), the most
    similar shot last.

    Args:
      captions: PromptCap's, one per question; None, or where it has none: the questions' own.
    """

    def fields(question: Question) -> Mapping[str, str]:
        caption = str(question.extra.get(CAPTION, ""))
        return {
            "context": f"{caption} {_tags(question)}"
            if tags and TAGS in question.extra
            else caption,
            "question": question.question,
            "answer": majority_answer(question, last=True),
        }

    chosen = library.select(questions, shots, similarity, seed=seed)
    shown, chosen = with_captions(questions, chosen, captions)
    predictions = _answer(
        shown, [[found] for found in chosen], [None] * len(questions), llm,
        load_template("pica.okvqa"), fields, _decoding(max_new_tokens), "most_similar_last",
        read=_promptcap_answer,
    )  # fmt: skip
    return traced(predictions, questions, captions)


def choose_pica(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 8,
    similarity: Similarity = "question",
    tags: bool = False,
    order: Order = "most_similar_first",
    shot_answer: ShotAnswer = "first",
    template: str = "pica.okvqa",
    score: Normalization = "sum",
    calibrated: bool = False,
    seed: Count = 0,
) -> list[Prediction]:
    """Multiple choice: the option that is the most probable answer to PICa's prompt.

    Args:
      score: log-probability of an option's text, summed or per token.
      calibrated: less the option's log-probability after a prompt without question and context.
    """
    prompt, fields = load_template(template), _fields_of(tags, shot_answer)
    chosen = library.select(questions, shots, similarity, seed=seed)
    options = {q.id: tuple(f" {choice}" for choice in q.choices) for q in questions}
    prompts = [
        few_shot(prompt, q, found, fields, _scoring(q.id, options[q.id]), llm.check, order, known)
        for q, found, known in zip(
            questions, chosen, passages_of(knowledge, questions), strict=True
        )
    ]
    blank = prompt.render([], dict.fromkeys(("context", "question"), NO_CONTEXT))
    return choose_options(
        questions, prompts, options, llm, score=score, blank=blank if calibrated else None
    )


def copy_nearest_answer(
    questions: Sequence[Question], library: ExampleLibrary, *, similarity: Similarity = "question"
) -> list[Prediction]:
    """A baseline without a model: the answer of the most similar example."""
    return [
        Prediction(question.id, majority_answer(shots[0].question) if shots else "")
        for question, shots in zip(questions, library.select(questions, 1, similarity), strict=True)
    ]


def vote_of_nearest_answers(
    questions: Sequence[Question],
    library: ExampleLibrary,
    *,
    shots: Count = 16,
    similarity: Similarity = "question",
) -> list[Prediction]:
    """A baseline without a model: the most frequent answer of the most similar examples.

    Of equally frequent answers the one of the more similar example wins.
    """
    predictions = []
    for question, found in zip(
        questions, library.select(questions, shots, similarity), strict=True
    ):
        votes = collections.Counter(majority_answer(shot.question) for shot in found)
        predictions.append(Prediction(question.id, votes.most_common(1)[0][0] if votes else ""))
    return predictions


SETTINGS: dict[str, Callable[..., Sequence[Prediction]]] = {
    "pica": answer_pica,
    "pica_choice": choose_pica,
    "pica_promptcap": answer_promptcap,
    "pica_oracle": answer_with_sources,
    "pica_question_only": answer_without_sources,
    "copy_nearest": copy_nearest_answer,
    "vote_of_nearest": vote_of_nearest_answers,
}
PARTS = ("llm", "library", "knowledge", "captions")


def check_questions(setting: str, questions: Sequence[Question]) -> None:
    """Raises UserError for questions that a setting cannot answer; called before parts open."""
    if setting == "pica_choice":
        check_choices(setting, questions)
    if setting == "pica_oracle":
        check_gold(questions)


def check_options(setting: str, options: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raises UserError for options and parts without effect; called before anything is opened."""
    if setting == "pica_promptcap":
        check_no_tags(parts)


def check_inputs(
    setting: str,
    questions: Sequence[Question],
    options: Mapping[str, Any],
    parts: Mapping[str, Any],
) -> None:
    """Raises UserError for files that are not the questions'; called before a model is loaded."""
    if setting == "pica_promptcap":
        check_captions(questions, parts.get("captions"))


def context(question: Question, tags: bool) -> str:
    """A picture in words: `caption`, or `caption. tag, tag` (gpt3_api_okvqa.py l.184-201).

    VinVL's captions end in a period of their own, which stays, as there: `a cat.. cat, mat`.
    """
    caption = str(question.extra.get(CAPTION, ""))
    return f"{caption}. {_tags(question)}" if tags and TAGS in question.extra else caption


def _as_released(question: Question) -> Question:
    """The question with its caption's quotes as JSON writes them (`load_cachetext`)."""
    caption = str(question.extra.get(CAPTION, ""))
    extra = {**question.extra, CAPTION: json.dumps(caption)[1:-1]} if caption else question.extra
    return dataclasses.replace(question, extra=extra)


def _captioned_by_people(shot: Shot, seed: int) -> Shot:
    """The shot with one of COCO's captions by people; its own, counted, where there is none."""
    extra = {key: value for key, value in shot.question.extra.items() if key != TAGS}
    by_people = extra.get(PEOPLE_CAPTIONS)
    if by_people:
        drawn = seeded(shot.question.id, seed).integers(len(by_people))
        extra[CAPTION] = by_people[drawn]
    else:
        extra[OWN_CAPTION] = True
    return shot._replace(question=dataclasses.replace(shot.question, extra=extra))


def _tags(question: Question) -> str:
    """The picture's tags in the order of their file (data/datasets/okvqa.py)."""
    return ", ".join(tag["class"] for tag in question.extra[TAGS])


def _promptcap_answer(text: str) -> str:
    """PromptCap's post-processing (`process_answer`): PICa's, after three whole answers."""
    return pica_answer(_PROMPTCAP_ANSWERS.get(text.lower(), text))


def _fields_of(tags: bool, shot_answer: ShotAnswer) -> Callable[[Question], Mapping[str, str]]:
    def fields(question: Question) -> Mapping[str, str]:
        first = question.answers[0] if question.answers else ""
        answer = first if shot_answer == "first" and first else majority_answer(question)
        return {
            "context": context(question, tags),
            "question": question.question,
            "answer": answer,
        }

    return fields


def _answer(
    questions: Sequence[Question],
    groups: Sequence[Sequence[Sequence[Shot]]],
    knowledge: Sequence[Sequence[Passage] | None],
    llm: Any,
    template: PromptTemplate,
    fields: Callable[[Question], Mapping[str, str]],
    decoding: Decoding,
    order: Order,
    read: Callable[[str], str] = pica_answer,
) -> list[Prediction]:
    """One prompt for each group of shots of a question; the most probable answer, `read`, wins."""
    prompts: list[dict[tuple[str, int], FewShot]] = []  # of every question
    for question, own, passages in zip(questions, groups, knowledge, strict=True):
        prompts.append({})
        for r, shots in enumerate(own):
            key = (question.id, r)
            make = _completion(key, decoding)
            prompts[-1][key] = few_shot(
                template, question, shots, fields, make, llm.check, order, passages
            )
    queries = [p.query for own in prompts for p in own.values() if p.query is not None]
    answers = answer_all(llm, queries)
    return [
        _most_probable(question, own, answers, read)
        for question, own in zip(questions, prompts, strict=True)
    ]


def _decoding(max_new_tokens: int) -> Decoding:
    return Decoding(max_new_tokens=max_new_tokens, stop=("\n",), logprobs=True)


def _completion(key: Any, decoding: Decoding) -> Callable[[str], Completion]:
    return lambda text: Completion(key, text, decoding)


def _scoring(key: Any, options: tuple[str, ...]) -> Callable[[str], Choices]:
    return lambda text: Choices(key, text, options)


def _most_probable(
    question: Question,
    prompts: Mapping[tuple[str, int], FewShot],
    answers: Answers,
    read: Callable[[str], str],
) -> Prediction:
    """Of a question's prompts the answer with the largest summed log-probability."""
    found = [answers.by_id[key].candidates[0] for key in prompts if key in answers.by_id]
    failed = [answers.failed[key] for key in prompts if key in answers.failed]
    trace = prompts_record(list(prompts.values()), failed)
    trace["outputs"] = [{"text": c.text, "logprob": c.total} for c in found]
    if not found:
        return Prediction(question.id, trace=trace)
    best = max(found, key=lambda candidate: candidate.total)
    return Prediction(question.id, read(best.text or ""), trace=trace)
