"""Solved questions as training examples of a language model: prompts with and without shots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.texts import PairSize, RowSize, TokenExample
from mmqa_jax.data.formats.chats import conversation
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.backends import Message, Picture
from mmqa_jax.prompting.examples.library import ExampleLibrary, Shot, Similarity
from mmqa_jax.prompting.few_shot import Order, PromptTemplate, few_shot, load_template
from mmqa_jax.prompting.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from mmqa_jax.prompting.picture_format import PictureFormat

_ANSWER = " The answer is"  # begins the answer behind a rationale


@dataclasses.dataclass(frozen=True)
class ExampleOptions:
    """The section `examples` of a language-model run.

    Attributes:
      templates: of the prompts; an epoch shows an example in one of them, drawn anew.
      shots: retrieved examples in front of a question, fewer where they do not fit.
      with_shots: the share of examples that have them; the others have none.
      similarity, order: as of RMR (papers/rmr.py).
      learn: the whole completion, or only the answer behind the rationale.
      turns: which of the assistant's messages of a conversation (formats/chats.py) are learned.
    """

    templates: tuple[str, ...] = ("rmr.rationale",)
    shots: int = at_least(0, 3)
    with_shots: float = 0.5
    similarity: Similarity = "bimodal"
    order: Order = "most_similar_first"
    learn: Literal["completion", "answer"] = "completion"
    turns: Literal["all", "last"] = "all"

    def __post_init__(self):
        if not self.templates:
            raise UserError("config key examples.templates is empty; name one, as rmr.rationale.")
        if not 0 <= self.with_shots <= 1:
            raise UserError(
                f"config key examples.with_shots={self.with_shots}: a share in 0..1 was expected."
            )


class Encode(Protocol):
    """Makes an example of a question's texts, as a model reads them."""

    def __call__(
        self, question: Question, prompt: str, prefix: str, completion: str, *, ended: bool
    ) -> TokenExample:
        """Makes the tokens of a question's prompt, of how its answer begins (`given`, not learned),
        and of the rest, which is learned; with `ended` the model's end token follows and is learned
        too."""


class TrainingExamples(NamedTuple):
    """Tokenized examples, as `language_model_batches` takes them.

    Attributes:
      versions: of every example: in each template without and with shots.
      shares: probability of each version.
      dropped: how many questions fit no row even without shots.
      dropped_shots: how many shots were left out so that an example fits.
      questions: that the examples are of.
    """

    versions: Sequence[Sequence[TokenExample]]
    shares: Sequence[float]
    dropped: int
    dropped_shots: int
    questions: Sequence[Question]


def training_examples(
    questions: Sequence[Question],
    library: ExampleLibrary,
    fields: Callable[[Question], Mapping[str, str]],
    options: ExampleOptions,
    encode: Encode,
    size: RowSize | PairSize,
) -> TrainingExamples:
    """Makes every question in every version, by the fields of the templates and the model's
    `encode`, as rows of `size` hold it; a question is never its own shot."""
    templates = [load_template(name) for name in options.templates]
    for name, template in zip(options.templates, templates, strict=True):
        written = "$rationale" in template.shot or "$solution" in template.shot
        if written and not any(q.rationale for q in questions):
            raise UserError(
                f"config key examples.templates: {name} writes a rationale, but no training "
                "question has one; use rmr.answer, or prepare data with rationales."
            )
    chosen = library.select(questions, options.shots, options.similarity)
    with_shots = options.with_shots if options.shots else 0.0
    examples, learned, dropped, dropped_shots = [], [], 0, 0
    for question, shots in zip(questions, chosen, strict=True):
        versions: list[TokenExample] = []
        for template in templates:
            plain, _ = _example(template, question, (), fields, options, encode, size)
            taught, missing = _example(template, question, shots, fields, options, encode, size)
            if plain is not None and taught is not None:
                versions += [plain, taught]
                dropped_shots += missing
        if len(versions) < 2 * len(templates):
            dropped += 1
            continue
        examples.append(versions)
        learned.append(question)
    shares = [x / len(templates) for _ in templates for x in (1 - with_shots, with_shots)]
    return TrainingExamples(examples, shares, dropped, dropped_shots, learned)


def _example(
    template: PromptTemplate,
    question: Question,
    shots: Sequence[Shot],
    fields: Callable[[Question], Mapping[str, str]],
    options: ExampleOptions,
    encode: Encode,
    size: RowSize | PairSize,
) -> tuple[TokenExample | None, int]:
    """The example with as many shots as fit, None if it never does; and how many were dropped."""
    completion = template.solve(fields(question))
    before = ""
    if options.learn == "answer":
        before, lead, rest = completion.rpartition(_ANSWER)
        completion = lead + rest

    def make(prompt: str) -> TokenExample:
        return encode(question, prompt, before, completion, ended=True)

    def check(example: TokenExample) -> None:
        if not size.holds(example):
            raise TooLong(question.id, example.start, example.targets, size.length)

    fitted = few_shot(template, question, shots, fields, make, check, options.order)
    return fitted.query, fitted.dropped


def encode_text(tokenizer: TextTokenizer) -> Encode:
    """Examples of a language model: its answer follows the prompt's text."""

    def encode(
        question: Question, prompt: str, prefix: str, completion: str, *, ended: bool
    ) -> TokenExample:
        before, answer = tokenizer.shield(prompt + prefix), tokenizer.shield(completion)
        return token_example(tokenizer, before, answer, ended=ended)

    return encode


def encode_conversation(tokenizer: TextTokenizer, pictures: PictureFormat) -> Encode:
    """Examples of a vision-language model: a user shows the question's picture, if it has one, and
    asks, by the model's chat template; the model's message is the answer.
    """
    chat = pictures.chat_format
    if chat is None:
        raise UserError(
            "config key tokenizer: it has no chat template, by which questions are asked; name one "
            "that has (chat_template.jinja), or the model's own."
        )

    def encode(
        question: Question, prompt: str, prefix: str, completion: str, *, ended: bool
    ) -> TokenExample:
        pictures_of_question = () if question.image is None else (Picture(b"", question.image),)
        asked = (
            chat.render(question.id, [Message("user", (*pictures_of_question, prompt))])
            + chat.before_answer
        )
        prefix = prefix.lstrip()  # a message begins with a word
        before = asked + tokenizer.shield(prefix)
        answer = tokenizer.shield(completion if prefix else completion.lstrip())
        example = _joined(pictures.encode, pictures.encode, before, before + answer)
        names = () if question.image is None else (question.image,)
        return _ended(tokenizer, example, ended)._replace(pictures=names)

    return encode


def chat_example(
    tokenizer: TextTokenizer,
    question: Question,
    turns: Literal["all", "last"],
    image_token: int | None = None,
) -> TokenExample:
    """Writes a conversation by the model's chat template, of which the assistant's messages are
    learned with the end tokens behind them, by ExampleOptions' `turns`; one of weight 0 never is.
    The image token stands for a picture; None: the model sees none."""
    where = f"question {question.id}"
    chat, template = conversation(question.extra, where), tokenizer.template
    if template is None:
        raise UserError(
            "config key tokenizer: it has no chat template, by which conversations are written; "
            "name one that has (chat_template.jinja), or the model's own."
        )
    if chat.pictures and image_token is None:
        raise UserError(
            f"{where}: shows pictures, which the model does not see; use a vision-language model "
            "(task vision_language), or leave them out."
        )
    text, spans = template.turns(where, chat)
    ids, characters = tokenizer.encode_located(text)
    tokens, learned = np.array(ids, np.int32), np.zeros(len(ids), bool)
    answers = [message for message in chat.messages if message["role"] == "assistant"]
    ends = np.flatnonzero(np.isin(tokens, tokenizer.end_ids))
    for number, (message, (first, behind)) in enumerate(zip(answers, spans, strict=True)):
        start = int((characters[:, 1] <= first).sum())
        if behind is not None:
            stop = int((characters[:, 0] < behind).sum())
        else:
            later = ends[ends >= start]
            stop = int(later[0]) + 1 if len(later) else len(tokens) + 1
            following = spans[number + 1][0] if number + 1 < len(spans) else len(text)
            if stop > len(tokens) or characters[stop - 1, 1] > following:
                raise UserError(
                    f"{where}: the chat template writes none of the model's end tokens behind an "
                    "answer; name it in eos_token_id of the tokenizer's generation_config.json."
                )
        if message.get("weight", 1) and (turns == "all" or message is answers[-1]):
            learned[start:stop] = True
    if not learned.any():
        raise UserError(
            f"{where}: its last answer has weight 0, so that nothing is learned; set "
            "examples.turns to all, or leave the conversation out."
        )
    pictures = int((tokens == image_token).sum())
    if pictures != len(chat.pictures):
        raise UserError(
            f"{where}: shows {len(chat.pictures)} pictures, of which its prompt by the model's "
            f"chat template has {pictures}; use the model's own tokenizer."
        )
    places = np.flatnonzero(learned).astype(np.int32)
    return TokenExample(tokens, int(places[0]), chat.pictures, places)


def token_example(
    tokenizer: Any, prompt: str, completion: str, *, ended: bool = False
) -> TokenExample:
    """Makes tokens of a prompt and its completion; special tokens are recognized in what is not
    shielded. With `ended` the model's end token follows and is learned too."""
    example = _joined(tokenizer.encode, tokenizer.encode_plain, prompt, prompt + completion)
    return _ended(tokenizer, example, ended)


def _joined(
    encode: Callable[[str], list[int]], plain: Callable[[str], list[int]], prompt: str, whole: str
) -> TokenExample:
    """A text that begins with a prompt; `plain` encodes a piece of it."""
    before, tokens = encode(prompt), encode(whole)
    if tokens[: len(before)] != before:  # the completion's first letters merge with the prompt's
        tokens = before + plain(whole[len(prompt) :])
    return TokenExample(np.array(tokens, np.int32), len(before))


def _ended(tokenizer: Any, example: TokenExample, ended: bool) -> TokenExample:
    end = list(tokenizer.end_ids[:1]) if ended else []
    return example._replace(tokens=np.array([*example.tokens, *end], np.int32))
