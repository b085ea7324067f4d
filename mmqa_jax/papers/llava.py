"""LLaVA-1.5 (Liu et al., CVPR 2024) on multiple choice, by its authors' own prompts.

One question with its picture, no examples; the model answers with a letter, greedily. The prompts
are those of haotian-liu/LLaVA, scripts/v1_5/eval/{sqa,mmbench,seed}.sh (templates/llava.toml).

  llm.answer(queries) -> a letter for every prompt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import LETTERS, llava_choice
from mmqa_jax.prompting.backends import Chat, Decoding, Message, Picture, Query
from mmqa_jax.prompting.few_shot import few_shot, output_record, prompts_record
from mmqa_jax.prompting.multiple_choice import check_choices
from mmqa_jax.prompting.stream import answer_all
from mmqa_jax.prompting.templates import load_template


def answer_llava(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Any,
    *,
    template: str = "llava.letter",
    read: Literal["choice", "text"] = "text",
    max_new_tokens: int = 1024,
) -> list[Prediction]:
    """The model's text; a question whose picture is absent is asked in words.

    Args:
      template: `llava.letter` (MMBench, SEED-Bench) or `llava.scienceqa`.
      read: whether the option that the text names is recorded (`choice`, by LLaVA's rule for
        ScienceQA), or the text alone, which MMBench's and SEED-Bench's scorers read.
    """
    prompt, decoding = load_template(template), Decoding(max_new_tokens=max_new_tokens)

    def asking(question: Question) -> Callable[[str], Query]:
        data = corpus.question_picture(question)
        shown = () if data is None else (Picture(data, question.image or ""),)
        return lambda text: Chat(question.id, (Message("user", (*shown, text)),), decoding)

    prompts = [few_shot(prompt, q, [], fields, asking(q), llm.check) for q in questions]
    answers = answer_all(llm, [p.query for p in prompts if p.query is not None])
    predictions = []
    for question, own in zip(questions, prompts, strict=True):
        failed = answers.failed.get(question.id)
        trace = prompts_record([own], [] if failed is None else [failed])
        text, choice = "", None
        if question.id in answers.by_id:
            candidate = answers.by_id[question.id].candidates[0]
            text = (candidate.text or "").strip()
            trace["outputs"] = [output_record(text, candidate.total)]
            if read == "choice":
                choice = llava_choice(text, len(question.choices))
        predictions.append(Prediction(question.id, text, choice=choice, trace=trace))
    return predictions


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


SETTINGS: dict[str, Callable[..., Sequence[Prediction]]] = {"llava": answer_llava}
PARTS = ("llm",)


def check_questions(setting: str, questions: Sequence[Question]) -> None:
    """Raises UserError for questions that a setting cannot answer; called before parts open."""
    check_choices(setting, questions)
