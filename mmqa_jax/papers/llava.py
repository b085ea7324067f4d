"""LLaVA-1.5 (Liu et al., CVPR 2024) on multiple choice, by its authors' own prompts.

One question with its picture, no examples; the model answers with a letter, greedily. The prompts
are those of haotian-liu/LLaVA, scripts/v1_5/eval/{sqa,mmbench,seed}.sh (templates/llava.toml).

  llm.answer(queries) -> a letter for every prompt
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import LETTERS, llava_choice
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.backends import Backend, Chat, Decoding, Message
from mmqa_jax.prompting.few_shot import ask, load_template, pictures_of, read_one


def answer_llava(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    *,
    template: str = "llava.letter",
    read: Literal["choice", "text"] = "text",
    max_new_tokens: int = 1024,
) -> list[Prediction]:
    """The model's text, by the template `llava.letter` (MMBench, SEED-Bench) or `llava.scienceqa`;
    a question whose picture is absent is asked in words. The option that the text names is recorded
    (`choice`, by LLaVA's rule for ScienceQA), or the text alone, which MMBench's and SEED-Bench's
    scorers read."""
    decoding = Decoding(max_new_tokens=max_new_tokens)
    pictures = {question.id: pictures_of(corpus, question) for question in questions}

    def show(key: Hashable, question: Question, text: str) -> Chat:
        return Chat(key, (Message("user", (*pictures[question.id], text)),), decoding)

    replies = ask(questions, None, llm, load_template(template), fields, show)
    predictions = list(map(read_one, questions, replies))
    if read == "text":
        return predictions
    return [
        dataclasses.replace(p, choice=llava_choice(p.answer, len(question.choices)))
        for question, p in zip(questions, predictions, strict=True)
    ]


def fields(question: Question) -> Mapping[str, str]:
    """The fields of LLaVA's templates; a question of its own file holds its hint itself."""
    hint = str(question.extra.get("hint", ""))
    listed = (f"{LETTERS[n]}. {choice}" for n, choice in enumerate(question.choices))
    return {
        "context": f"Context: {hint}\n" if hint else "",
        "hint": f"{hint}\n" if hint else "",
        "question": question.question,
        "options": "\n".join(listed),
    }


SETTINGS = {"llava": Setting(answer_llava, of_choices=True)}
