"""Solved questions as training examples of a language model: prompts with and without shots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.language_model import RowSize, TokenExample
from mmqa_jax.data.batches.seq2seq import PairSize
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.few_shot import Order, few_shot
from mmqa_jax.prompting.shots import ExampleLibrary, Shot, Similarity
from mmqa_jax.prompting.templates import PromptTemplate, load_template

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
    """

    templates: tuple[str, ...] = ("rmr.rationale",)
    shots: int = 3
    with_shots: float = 0.5
    similarity: Similarity = "bimodal"
    order: Order = "most_similar_first"
    learn: Literal["completion", "answer"] = "completion"

    def __post_init__(self):
        if not self.templates:
            raise UserError("config key examples.templates is empty; name one, as rmr.rationale.")
        if not 0 <= self.with_shots <= 1:
            raise UserError(
                f"config key examples.with_shots={self.with_shots}: a share in 0..1 was expected."
            )


class TrainingExamples(NamedTuple):
    """Tokenized examples, as `language_model_batches` takes them.

    Attributes:
      versions: of every example: in each template without and with shots.
      shares: probability of each version.
      dropped: how many questions fit no row even without shots.
      dropped_shots: how many shots were left out so that an example fits.
    """

    versions: Sequence[Sequence[TokenExample]]
    shares: Sequence[float]
    dropped: int
    dropped_shots: int


def training_examples(
    questions: Sequence[Question],
    library: ExampleLibrary,
    fields: Callable[[Question], Mapping[str, str]],
    options: ExampleOptions,
    tokenizer: Any,
    size: RowSize | PairSize,
) -> TrainingExamples:
    """Every question in every version.

    Args:
      questions: with their answers.
      library: a question is never its own shot.
      fields: of the templates.
      tokenizer: of the model; see TextTokenizer.
      size: of the rows that the examples are packed into.

    Raises:
      UserError: a template that writes rationales, and no question with one.
    """
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
    kept, dropped, dropped_shots = [], 0, 0
    for question, shots in zip(questions, chosen, strict=True):
        versions: list[TokenExample] = []
        for template in templates:
            plain, _ = _example(template, question, (), fields, options, tokenizer, size)
            shown, missing = _example(template, question, shots, fields, options, tokenizer, size)
            if plain is not None and shown is not None:
                versions += [plain, shown]
                dropped_shots += missing
        if len(versions) < 2 * len(templates):
            dropped += 1
            continue
        kept.append(versions)
    shares = [x / len(templates) for _ in templates for x in (1 - with_shots, with_shots)]
    return TrainingExamples(kept, shares, dropped, dropped_shots)


def _example(
    template: PromptTemplate,
    question: Question,
    shots: Sequence[Shot],
    fields: Callable[[Question], Mapping[str, str]],
    options: ExampleOptions,
    tokenizer: Any,
    size: RowSize | PairSize,
) -> tuple[TokenExample | None, int]:
    """The example with as many shots as fit, None if it never does; and how many were dropped."""
    completion = template.solve(fields(question))
    given = ""
    if options.learn == "answer":
        given, said, rest = completion.rpartition(_ANSWER)
        completion = said + rest

    def make(prompt: str) -> TokenExample:
        return token_example(tokenizer, prompt + given, completion, ended=True)

    def check(example: TokenExample) -> None:
        if not size.holds(example):
            raise TooLong(question.id, example.start, example.targets, size.length)

    found = few_shot(template, question, shots, fields, make, check, options.order)
    return found.query, found.dropped


def token_example(
    tokenizer: Any, prompt: str, completion: str, *, ended: bool = False
) -> TokenExample:
    """A prompt and its completion as tokens.

    Args:
      ended: the model's end token follows and is learned too.
    """
    before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + completion)
    if whole[: len(before)] != before:  # the completion's first letters merge with the prompt's
        whole = before + tokenizer.encode_plain(completion)
    end = list(tokenizer.end_ids[:1]) if ended else []
    return TokenExample(np.array([*whole, *end], np.int32), len(before))
