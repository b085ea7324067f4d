"""PICa on WebQA (section 6.3): a language model answers from the gold sources, put into words.

A snippet is its text; a picture its description, and a caption and tags where a captioner's are at
hand. XML-style brackets tell them apart (figure 4 is a picture only; see templates/pica.toml).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmqa_jax.core.sections import Count
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.prompting.backends import Completion, Decoding
from mmqa_jax.prompting.captions import Captions
from mmqa_jax.prompting.few_shot import FewShot, Order, few_shot, prompts_record
from mmqa_jax.prompting.shots import ExampleLibrary, Similarity
from mmqa_jax.prompting.stream import Answers, answer_all
from mmqa_jax.prompting.templates import load_template


def answer_with_sources(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Any,
    library: ExampleLibrary,
    captions: Captions | None = None,
    *,
    shots: Count = 8,
    similarity: Similarity = "question_and_sources",
    order: Order = "most_similar_first",
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
        shown = "".join(f"{source_text(source, captions)}\n" for source in sources)
        return {**_fields(question), "sources": shown}

    prompts = _prompts(
        questions, llm, library, fields, shots, similarity, order, template, max_new_tokens, seed
    )
    return [
        _read(question, prompt, answers, question.positives)
        for question, prompt, answers in prompts
    ]


def answer_without_sources(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    *,
    shots: Count = 8,
    similarity: Similarity = "question",
    order: Order = "most_similar_first",
    template: str = "pica.webqa",
    max_new_tokens: int = 64,
    seed: Count = 0,
) -> list[Prediction]:
    """Table 6, `PICa (Q-only)`: neither the question nor its shots show a source."""

    def fields(question: Question) -> Mapping[str, str]:
        return {**_fields(question), "sources": ""}

    prompts = _prompts(
        questions, llm, library, fields, shots, similarity, order, template, max_new_tokens, seed
    )
    return [_read(question, prompt, answers, ()) for question, prompt, answers in prompts]


def source_text(source: Source, captions: Captions | None) -> str:
    """A source in brackets, on one line."""
    if source.modality == "text":
        return _bracketed("Text", source.text)
    caption, tags = captions.of_source(source) if captions else ("", ())
    parts = {"Description": source.text, "Caption": caption, "Tags": ", ".join(tags)}
    return "".join(_bracketed(name, text) for name, text in parts.items() if text)


def _bracketed(name: str, text: str) -> str:
    return f"<{name}>{' '.join(text.split())}</{name}>"


def _fields(question: Question) -> dict[str, str]:
    answer = question.answers[0] if question.answers else ""
    return {"question": question.question.strip(), "answer": " ".join(answer.split())}


def _prompts(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    fields: Callable[[Question], Mapping[str, str]],
    shots: int,
    similarity: Similarity,
    order: Order,
    template: str,
    max_new_tokens: int,
    seed: int,
) -> list[tuple[Question, FewShot, Answers]]:
    """Every question with its prompt and the answers to all."""
    prompt = load_template(template)
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=("</Answer>", "\n"), logprobs=True)

    def asking(question: Question) -> Callable[[str], Completion]:
        return lambda text: Completion(question.id, text, decoding)

    chosen = library.select(questions, shots, similarity, seed=seed)
    made = [
        few_shot(prompt, question, found, fields, asking(question), llm.check, order)
        for question, found in zip(questions, chosen, strict=True)
    ]
    answers = answer_all(llm, [one.query for one in made if one.query is not None])
    return [(question, one, answers) for question, one in zip(questions, made, strict=True)]


def _read(
    question: Question, prompt: FewShot, answers: Answers, cited: tuple[str, ...]
) -> Prediction:
    trace = prompts_record([prompt])
    scores = (1.0,) * len(cited)
    if question.id not in answers.by_id:
        trace["failed"] = [answers.failed.get(question.id, prompt.reason)]
        return Prediction(question.id, "", cited, scores, trace=trace)
    best = answers.by_id[question.id].candidates[0]
    text = (best.text or "").strip()
    trace["outputs"] = [{"text": text, "logprob": best.total}]
    return Prediction(question.id, text, cited, scores, trace=trace)
