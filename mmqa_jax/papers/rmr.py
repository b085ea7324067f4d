"""RMR (Tan et al., 2024): question-rationale-answer triplets, retrieved as in-context examples.

A query and every triplet of the library are embedded in text and picture (equation 2, as printed
`similarity=bimodal_unnormalized`); the k
nearest by cosine (equation 4) are concatenated, question, rationale and answer each (equation 6),
in front of the query (equation 5); the model continues with rationale and answer (equation 8).

  library.select(questions, count, similarity) -> triplets of every question, most similar first
  knowledge.of_questions(questions)            -> passages for the context (ours, optional)
  llm.answer(queries)                          -> a continuation, or the likelihood of each option
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import Count
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import LETTERS, letter_index, llava_choice
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting import few_shot
from mmqa_jax.prompting.backends import Backend, Chat, Completion, Decoding, Message, Picture, Query
from mmqa_jax.prompting.examples.library import ExampleLibrary, Shot, Similarity
from mmqa_jax.prompting.multiple_choice import Normalization, choose_options
from mmqa_jax.prompting.rationales import Rationale, fields
from mmqa_jax.retrieval.knowledge import KnowledgeBase


def answer_rmr(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 3,
    similarity: Similarity = "bimodal",
    order: few_shot.Order = "most_similar_first",
    template: str = "rmr.rationale",
    rationale: Rationale = "solution",
    chat: bool = False,
    pictures: bool = False,
    shot_pictures: bool = False,
    read: Literal["choice", "letter", "short"] = "choice",
    max_new_tokens: int = 256,
    seed: Count = 0,
) -> list[Prediction]:
    """Tables 1 to 4: the model writes rationale and answer, from `shots` triplets (k).

    Args:
      shots: k; 0 is the model without retrieval.
      template: `rmr.rationale`, `rmr.answer` for the letter alone, or `rmr.direct` for questions
        without options.
      rationale: of a triplet: its solution, or its lecture before it.
      chat: the prompt is a user's message to a chat model.
      pictures: the model sees the query's picture; triplets are shown as text.
      shot_pictures: it sees those of the triplets as well, each in front of its question (ours);
        for a model that takes several.
      read: what of an output is the answer: `choice` keeps the output, and the option that it
        names; `letter` and `short` are `letter_alone` and `short_answer`, without an option.
    """
    # A base model goes on with another example. A chat model ends its message by itself, and may
    # write paragraphs.
    stop = () if chat else ("\n\n", "\nQuestion:")
    # Few servers of chat models give log-probabilities, some refuse requests that ask for them.
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=stop, logprobs=not chat)
    seen = {q.id: few_shot.pictures_of(corpus, q) if pictures else () for q in questions}
    triplets = library.select(questions, shots, similarity, seed=seed)
    fields_of = functools.partial(fields, rationale=rationale)
    prompt_pictures = ShotPictures(
        questions, triplets if shot_pictures else [()] * len(questions), seen,
        library.read_picture, order,
    )  # fmt: skip

    def show(key: Hashable, question: Question, text: str) -> Query:
        if shot_pictures:
            prompt, images = few_shot.as_prompt(
                text, prompt_pictures.of_prompt(question, text), chat=chat
            )
        elif chat:
            prompt, images = (Message("user", (*seen[question.id], text)),), ()
        else:
            images = seen[question.id]
            prompt = few_shot.without_places(text, images)
        if chat:
            return Chat(key, prompt, decoding)
        return Completion(key, prompt, decoding, images)

    replies = few_shot.ask(
        questions, few_shot.one_prompt(questions, triplets), llm, few_shot.load_template(template),
        prompt_pictures.marked(fields_of) if shot_pictures else fields_of, show, order, knowledge,
    )  # fmt: skip
    predictions = []
    for question, output in zip(questions, map(few_shot.read_one, questions, replies), strict=True):
        choice = llava_choice(output.answer, len(question.choices))
        if read == "choice":
            predictions.append(dataclasses.replace(output, choice=choice))
        elif read == "letter":
            letter = letter_alone(output.answer, choice, len(question.choices))
            predictions.append(dataclasses.replace(output, answer=letter))
        else:
            predictions.append(dataclasses.replace(output, answer=short_answer(output.answer)))
    return predictions


def choose_rmr(
    questions: Sequence[Question],
    llm: Backend,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 3,
    similarity: Similarity = "bimodal",
    order: few_shot.Order = "most_similar_first",
    template: str = "rmr.text",
    rationale: Rationale = "solution",
    options: Literal["text", "letter"] = "text",
    score: Normalization = "sum",
    calibrated: bool = False,
    seed: Count = 0,
) -> list[Prediction]:
    """The option with the largest likelihood, its text or its letter (equation 8 over options); if
    calibrated less the likelihood after a prompt whose question and context are `N/A`. The
    rationale is shown where the template has a place for it, as in `answer_rmr`."""
    prompt = few_shot.load_template(template)
    triplets = library.select(questions, shots, similarity, seed=seed)
    spelled = {
        question.id: tuple(
            f" {LETTERS[i]}" if options == "letter" else prompt.spaced(f" {choice}")
            for i, choice in enumerate(question.choices)
        )
        for question in questions
    }
    blank = dict.fromkeys(("question", "context", "options"), few_shot.NO_CONTEXT)
    predictions = choose_options(
        questions, triplets, spelled, llm, prompt, functools.partial(fields, rationale=rationale),
        order=order, knowledge=knowledge, score=score, blank=blank if calibrated else None,
    )  # fmt: skip
    return list(map(_lettered, questions, predictions))


def letter_alone(output: str, choice: int | None, choices: int) -> str:
    """The letter that an output names, which MMBench's and SEED-Bench's scorers read.

    `The answer is B.`, `B. because` and `(B)` become `B`; an output that names none stays as it
    is, for the scorers' own rules.

    `choice`: that it names by LLaVA's rule, out of `choices`.
    """
    index = letter_index(output.strip(" .()"), choices) if choice is None else choice
    return output if index is None else LETTERS[index]


def short_answer(text: str) -> str:
    """Returns the text after the last `The answer is`, or else the first line.

    In lower case and without the final period: A-OKVQA's scorer compares strings.
    """
    _, lead, rest = text.rpartition("The answer is")
    line = (rest if lead else text).strip().partition("\n")[0]
    return line.strip().rstrip(".").strip().lower()


def _lettered(question: Question, chosen: Prediction) -> Prediction:
    """The chosen option as `B. its text`, which every benchmark's rule reads as B."""
    if chosen.choice is None:
        return chosen
    letter, text = LETTERS[chosen.choice], question.choices[chosen.choice]
    return dataclasses.replace(chosen, answer=f"{letter}. {text}")


def _check_row(options: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raises UserError for options without effect: pictures of triplets alone, a rationale."""
    template, rationale = options["template"], options["rationale"]
    shot = few_shot.load_template(template).shot
    if rationale != "solution" and "$solution" not in shot and "$rationale" not in shot:
        raise UserError(
            f"config key options.rationale={rationale}: options.template={template} shows no "
            "rationale; set that to rmr.rationale or rmr.text_rationale."
        )
    if options.get("shot_pictures") and not options["pictures"]:
        raise UserError(
            "config key options.shot_pictures=True: shows the triplets' pictures beside the "
            "question's own; set options.pictures to True, too."
        )


SETTINGS = {
    "rmr": Setting(answer_rmr, rule_of_row=_check_row),
    "rmr_letter": Setting(
        functools.partial(answer_rmr, read="letter"), of_choices=True, rule_of_row=_check_row
    ),
    "rmr_direct": Setting(
        functools.partial(answer_rmr, template="rmr.direct", read="short", max_new_tokens=128),
        rule_of_row=_check_row,
    ),
    "rmr_choice": Setting(choose_rmr, of_choices=True, rule_of_row=_check_row),
}


# Few-shot prompts that show the pictures of shots and query, each in front of its question.


class ShotPictures:
    """The pictures of few-shot prompts: fields with a mark for each, and the pictures in order.

    Args:
      questions, shots: the queries and the shots of each, most similar first.
      of_queries: query id -> its pictures, none or one.
      read: the encoded picture of a shot's question; None where it has none.
      order: of the shots in the prompt.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        shots: Sequence[Sequence[Shot]],
        of_queries: Mapping[str, Sequence[Picture]],
        read: Callable[[Question], bytes | None],
        order: few_shot.Order,
    ):
        self._order = order
        self._of_shots: dict[str, list[Picture]] = {}
        self._of_queries = of_queries
        # By object: an example of another corpus may have a query's id.
        self._with_picture = {id(q) for q in questions if of_queries[q.id]}
        for question, chosen in zip(questions, shots, strict=True):
            self._of_shots[question.id] = []
            for shot in chosen:
                encoded = read(shot.question)
                if encoded is not None:
                    self._with_picture.add(id(shot.question))
                    self._of_shots[question.id].append(Picture(encoded, shot.question.image or ""))

    def marked(self, fields: few_shot.Fields) -> few_shot.Fields:
        """Fields whose question has a mark in front where there is a picture."""

        def with_mark(question: Question) -> Mapping[str, str]:
            plain = {
                name: text.replace(few_shot.MARK, " ") for name, text in fields(question).items()
            }
            if id(question) in self._with_picture:
                plain["question"] = f"{few_shot.MARK} {plain['question']}"
            return plain

        return with_mark

    def of_prompt(self, question: Question, text: str) -> list[Picture]:
        """Returns the pictures of a query's prompt in the order of their marks; the least similar
        shots may have been dropped from its text."""
        of_query = list(self._of_queries[question.id])
        of_shots = self._of_shots[question.id][: text.count(few_shot.MARK) - len(of_query)]
        return [*(of_shots if self._order == "most_similar_first" else of_shots[::-1]), *of_query]
