"""PICa (Yang et al., AAAI 2022): a language model answers from captions, with in-context examples.

The picture becomes a caption, perhaps with tags; solved questions that resemble the query in text
and picture precede it; of several prompts with different examples the most probable answer wins.
PromptCap's rows are the same with its own captions, one prompt, and the most similar example last.
On WebQA's sources (its section 6.3) the prompt shows the gold sources, put into words.

  library.select(questions, count, similarity) -> shots of every question, most similar first
  knowledge.of_questions(questions)            -> passages for the context (as KAT; optional)
  llm.answer(queries)                          -> a continuation of every prompt
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from mmqa_jax.core.typed import Count
from mmqa_jax.data.answers import pica_answer
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.coco import PEOPLE_CAPTIONS
from mmqa_jax.data.formats.official import CAPTION, TAGS
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting import few_shot
from mmqa_jax.prompting.backends import Backend, Decoding
from mmqa_jax.prompting.examples.library import ExampleLibrary, Shot, Similarity, seeded
from mmqa_jax.prompting.examples.side_files import Captions, traced, with_captions
from mmqa_jax.prompting.multiple_choice import Normalization, choose_options
from mmqa_jax.retrieval.knowledge import KnowledgeBase

ShotAnswer = Literal["first", "majority"]
ShotCaptions = Literal["own", "people"]
# Answers that PromptCap's code writes as OK-VQA's annotators do.
_PROMPTCAP_ANSWERS = {
    "one world": "1 world", "takeoff": "take off", "virgin australia": "virgin"
}  # fmt: skip


def answer_pica(
    questions: Sequence[Question],
    llm: Backend,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 16,
    ensemble: int = 1,
    similarity: Similarity = "question_and_image",
    tags: bool = False,
    order: few_shot.Order = "most_similar_first",
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
    chosen = library.select(questions, shots * ensemble, similarity, seed=seed)
    if shot_captions == "people":
        chosen = [[_captioned_by_people(shot, seed) for shot in prompt] for prompt in chosen]
        questions = [_as_released(question) for question in questions]
    replies = few_shot.ask(
        questions, few_shot.several_prompts(questions, chosen, shots, ensemble), llm,
        few_shot.load_template(template), _fields_of(tags, shot_answer), _one_line(max_new_tokens),
        order, knowledge,
    )  # fmt: skip
    return [_most_probable(*pair, pica_answer) for pair in zip(questions, replies, strict=True)]


def answer_promptcap(
    questions: Sequence[Question],
    llm: Backend,
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

    `captions`: PromptCap's, one per question; None, or where it has none: the questions' own.
    """

    def fields(question: Question) -> Mapping[str, str]:
        caption = str(question.extra.get(CAPTION, ""))
        with_tags = tags and TAGS in question.extra
        return {
            "context": f"{caption} {_tags(question)}" if with_tags else caption,
            "question": question.question,
            "answer": few_shot.majority_answer(question, last=True),
        }

    chosen = library.select(questions, shots, similarity, seed=seed)
    captioned, chosen = with_captions(questions, chosen, captions)
    replies = few_shot.ask(
        captioned, few_shot.several_prompts(captioned, chosen, shots, 1), llm,
        few_shot.load_template("pica.okvqa"), fields, _one_line(max_new_tokens),
        "most_similar_last",
    )  # fmt: skip
    predictions = [
        _most_probable(*pair, _promptcap_answer) for pair in zip(questions, replies, strict=True)
    ]
    return traced(predictions, questions, captions)


def choose_pica(
    questions: Sequence[Question],
    llm: Backend,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 8,
    similarity: Similarity = "question",
    tags: bool = False,
    order: few_shot.Order = "most_similar_first",
    shot_answer: ShotAnswer = "first",
    template: str = "pica.okvqa",
    score: Normalization = "sum",
    calibrated: bool = False,
    seed: Count = 0,
) -> list[Prediction]:
    """Multiple choice: the option that is the most probable answer to PICa's prompt, summed or per
    token, if calibrated less its log-probability after a prompt without question and context."""
    chosen = library.select(questions, shots, similarity, seed=seed)
    options = {q.id: tuple(f" {choice}" for choice in q.choices) for q in questions}
    blank = dict.fromkeys(("context", "question"), few_shot.NO_CONTEXT) if calibrated else None
    return choose_options(
        questions, chosen, options, llm, few_shot.load_template(template),
        _fields_of(tags, shot_answer), order=order, knowledge=knowledge, score=score, blank=blank,
    )  # fmt: skip


def copy_nearest_answer(
    questions: Sequence[Question], library: ExampleLibrary, *, similarity: Similarity = "question"
) -> list[Prediction]:
    """A baseline without a model: the answer of the most similar example."""
    return [
        Prediction(question.id, few_shot.majority_answer(shots[0].question) if shots else "")
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
    nearest = library.select(questions, shots, similarity)
    for question, examples in zip(questions, nearest, strict=True):
        votes = collections.Counter(few_shot.majority_answer(shot.question) for shot in examples)
        predictions.append(Prediction(question.id, votes.most_common(1)[0][0] if votes else ""))
    return predictions


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
        extra[few_shot.OWN_CAPTION] = True
    return shot._replace(question=dataclasses.replace(shot.question, extra=extra))


def _tags(question: Question) -> str:
    """The picture's tags in the order of their file (benchmarks/okvqa.py)."""
    return ", ".join(tag["class"] for tag in question.extra[TAGS])


def _promptcap_answer(text: str) -> str:
    """PromptCap's post-processing (`process_answer`): PICa's, after three whole answers."""
    return pica_answer(_PROMPTCAP_ANSWERS.get(text.lower(), text))


def _fields_of(tags: bool, shot_answer: ShotAnswer) -> few_shot.Fields:
    def fields(question: Question) -> Mapping[str, str]:
        first = question.answers[0] if question.answers else ""
        answer = first if shot_answer == "first" and first else few_shot.majority_answer(question)
        return {"context": context(question, tags), "question": question.question, "answer": answer}

    return fields


def _one_line(max_new_tokens: int) -> few_shot.MakeQuery:
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=("\n",), logprobs=True)
    return few_shot.continued(decoding)


def _most_probable(
    question: Question, replies: few_shot.Replies, read: Callable[[str], str]
) -> Prediction:
    """Returns the answer with the largest summed log-probability among a question's prompts."""
    trace = few_shot.prompts_record(replies.prompts, replies.failed)
    trace["outputs"] = few_shot.outputs_record(replies.best)
    if not replies.best:
        return Prediction(question.id, trace=trace)
    best = max(replies.best, key=lambda candidate: candidate.total)
    prediction = Prediction(question.id, read(best.text or ""), trace=trace)
    return few_shot.citing_passages(prediction, replies.prompts)


# On WebQA's sources (WebQA, section 6.3). A snippet is its text; a picture its description, and a
# caption and tags where a captioner's are at hand. XML-style brackets tell them apart (figure 4 is
# a picture only; see templates/pica.toml).


def answer_with_sources(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    library: ExampleLibrary,
    captions: Captions | None = None,
    *,
    shots: Count = 8,
    similarity: Similarity = "question_and_sources",
    order: few_shot.Order = "most_similar_first",
    template: str = "pica.webqa",
    max_new_tokens: int = 64,
    seed: Count = 0,
) -> list[Prediction]:
    """Table 6, `PICa`, oracle sources: 8 shots, fewer where the context is short.

    Args:
      captions: of the pictures; None: their descriptions stand alone.
      similarity: shots are similar in question and sources; of several sources the mean of the
        pairwise similarities counts.
    """

    def fields(question: Question) -> Mapping[str, str]:
        sources = (corpus.sources[row] for row in corpus.positive_rows(question))
        texts = "".join(f"{source_text(source, captions)}\n" for source in sources)
        return {**_webqa_fields(question), "sources": texts}

    chosen = library.select(questions, shots, similarity, seed=seed)
    predictions = _answer_webqa(questions, chosen, llm, fields, order, template, max_new_tokens)
    return [
        dataclasses.replace(
            p, sources=q.positives, source_scores=(1.0,) * len(q.positives), read=q.positives
        )
        for p, q in zip(predictions, questions, strict=True)
    ]


def answer_without_sources(
    questions: Sequence[Question],
    llm: Backend,
    library: ExampleLibrary,
    *,
    shots: Count = 8,
    similarity: Similarity = "question",
    order: few_shot.Order = "most_similar_first",
    template: str = "pica.webqa",
    max_new_tokens: int = 64,
    seed: Count = 0,
) -> list[Prediction]:
    """Table 6, `PICa (Q-only)`: neither the question nor its shots show a source."""

    def fields(question: Question) -> Mapping[str, str]:
        return {**_webqa_fields(question), "sources": ""}

    chosen = library.select(questions, shots, similarity, seed=seed)
    return _answer_webqa(questions, chosen, llm, fields, order, template, max_new_tokens)


def source_text(source: Source, captions: Captions | None) -> str:
    """A source in brackets, on one line."""
    if source.modality == "text":
        return _bracketed("Text", source.text)
    caption, tags = captions.of_source(source) if captions else ("", ())
    parts = {"Description": source.text, "Caption": caption, "Tags": ", ".join(tags)}
    return "".join(_bracketed(name, text) for name, text in parts.items() if text)


def _bracketed(name: str, text: str) -> str:
    return f"<{name}>{' '.join(text.split())}</{name}>"


def _webqa_fields(question: Question) -> dict[str, str]:
    answer = question.answers[0] if question.answers else ""
    return {"question": question.question.strip(), "answer": " ".join(answer.split())}


def _answer_webqa(
    questions: Sequence[Question],
    shots: Sequence[Sequence[Shot]],
    llm: Backend,
    fields: few_shot.Fields,
    order: few_shot.Order,
    template: str,
    max_new_tokens: int,
) -> list[Prediction]:
    """The model's sentence up to the end of its bracket or line."""
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=("</Answer>", "\n"), logprobs=True)
    replies = few_shot.ask(
        questions, few_shot.one_prompt(questions, shots), llm,
        few_shot.load_template(template), fields, few_shot.continued(decoding), order,
    )  # fmt: skip

    def read(question: Question, replies: few_shot.Replies) -> Prediction:
        prediction, (prompt,) = few_shot.read_one(question, replies), replies.prompts
        if not prompt.too_long:
            return prediction
        trace = {**prediction.trace, "failed": [prompt.reason]}
        return dataclasses.replace(prediction, trace=trace)

    return list(map(read, questions, replies))


SETTINGS = {
    "pica": Setting(answer_pica),
    "pica_choice": Setting(choose_pica, of_choices=True),
    "pica_promptcap": Setting(answer_promptcap, captions_of="questions"),
    "pica_oracle": Setting(answer_with_sources, of_gold=True),
    "pica_question_only": Setting(answer_without_sources),
    "copy_nearest": Setting(copy_nearest_answer),
    "vote_of_nearest": Setting(vote_of_nearest_answers),
}
