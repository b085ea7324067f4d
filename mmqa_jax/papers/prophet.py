"""Prophet (Shao et al., CVPR 2023), stage 2: answer heuristics in a language model's prompt.

Stage 1, a VQA model, gives candidate answers with confidences and, by the similarity of its latent
answers, the examples of each prompt. Several prompts with different examples vote.

  heuristics.select(questions, library, count, selection) -> shots of every question
  llm.answer(queries)                                     -> a continuation of every prompt
"""

import math
from collections.abc import Mapping, Sequence

from mmqa_jax.core.typed import Count
from mmqa_jax.data.answers import prep_ans
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting import few_shot
from mmqa_jax.prompting.backends import Backend, Decoding
from mmqa_jax.prompting.examples import side_files
from mmqa_jax.prompting.examples.library import ExampleLibrary, Shot, seeded
from mmqa_jax.prompting.multiple_choice import Normalization, choose_options

_TEMPLATE = "prophet.okvqa"


def answer_prophet(
    questions: Sequence[Question],
    llm: Backend,
    library: ExampleLibrary,
    heuristics: side_files.AnswerHeuristics,
    captions: side_files.Captions | None = None,
    *,
    shots: Count = 20,
    candidates: Count = 10,
    ensemble: int = 5,
    similarity: side_files.ShotSelection = "answer_aware",
    max_new_tokens: int = 8,
    seed: Count = 0,
) -> list[Prediction]:
    """Direct answers: prophet/stage2/prompt.py of the authors.

    The shots * ensemble nearest examples of a question are shuffled and dealt to its prompts; the
    probabilities of equal answers add up. Where all answers are empty it is the first candidate.

    Args:
      captions: shown in place of the questions' own: PromptCap's in MAVL's tables.
      shots, candidates, ensemble: N, K and T of the paper.
      seed: of the shuffle, which depends on the question as well.
    """
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=("\n",), logprobs=True)
    nearest = heuristics.select(questions, library, shots * ensemble, similarity, seed=seed)
    captioned, nearest = side_files.with_captions(questions, nearest, captions)
    chosen = [_shuffled(near, q, seed) for q, near in zip(captioned, nearest, strict=True)]
    replies = few_shot.ask(
        captioned, few_shot.several_prompts(captioned, chosen, shots, ensemble), llm,
        few_shot.load_template(_TEMPLATE), _fields_of(heuristics, candidates),
        few_shot.continued(decoding),
    )  # fmt: skip
    predictions = [
        _elected(question, replies_to_it, heuristics.best(question))
        for question, replies_to_it in zip(questions, replies, strict=True)
    ]
    return side_files.traced(predictions, questions, captions)


def choose_prophet(
    questions: Sequence[Question],
    llm: Backend,
    library: ExampleLibrary,
    heuristics: side_files.AnswerHeuristics,
    captions: side_files.Captions | None = None,
    *,
    shots: Count = 20,
    candidates: Count = 10,
    similarity: side_files.ShotSelection = "answer_aware",
    score: Normalization = "sum",
    calibrated: bool = False,
    seed: Count = 0,
) -> list[Prediction]:
    """Multiple choice (A-OKVQA): the option that is the most probable answer to one prompt (ours),
    summed or per token, if calibrated less its log-probability after a prompt without question and
    context. The captions stand in place of the questions' own."""
    nearest = heuristics.select(questions, library, shots, similarity, seed=seed)
    captioned, nearest = side_files.with_captions(questions, nearest, captions)
    chosen = [_shuffled(near, q, seed) for q, near in zip(captioned, nearest, strict=True)]
    options = {q.id: tuple(f" {choice}" for choice in q.choices) for q in questions}
    blank = {"context": few_shot.NO_CONTEXT, "question": few_shot.NO_CONTEXT, "candidates": ""}
    predictions = choose_options(
        captioned, chosen, options, llm,
        few_shot.load_template(_TEMPLATE), _fields_of(heuristics, candidates),
        score=score, blank=blank if calibrated else None,
    )  # fmt: skip
    return side_files.traced(predictions, questions, captions)


def answer_first_candidate(
    questions: Sequence[Question], heuristics: side_files.AnswerHeuristics
) -> list[Prediction]:
    """The VQA model alone: its first candidate."""
    heuristics.check(questions)
    return [Prediction(q.id, prep_ans(heuristics.best(q))) for q in questions]


def _fields_of(heuristics: side_files.AnswerHeuristics, count: int) -> few_shot.Fields:
    def fields(question: Question) -> Mapping[str, str]:
        listed = heuristics.listed(question, count)
        return {
            "context": side_files.caption_sentence(question),
            "question": question.question,
            "candidates": f"===\nCandidates: {listed}\n" if listed else "",
            "answer": few_shot.majority_answer(question),
        }

    return fields


def _shuffled(shots: Sequence[Shot], question: Question, seed: int) -> list[Shot]:
    return [shots[i] for i in seeded(question.id, seed).permutation(len(shots))]


def _elected(question: Question, replies: few_shot.Replies, first_candidate: str) -> Prediction:
    """The answer with the largest sum of probabilities, normalized; else the first candidate."""
    trace = few_shot.prompts_record(replies.prompts)
    trace["outputs"] = few_shot.outputs_record(replies.best)
    if replies.failed:
        trace["failed"] = replies.failed
    ballots = [(best.text.strip(), math.exp(best.total)) for best in replies.best]
    answer, trace["vote"] = vote(ballots)
    trace["fallback"] = prep_ans(first_candidate)
    return Prediction(question.id, answer or trace["fallback"], trace=trace)


SETTINGS = {
    "prophet": Setting(answer_prophet, captions_of="questions"),
    "prophet_choice": Setting(choose_prophet, of_choices=True, captions_of="questions"),
    "prophet_candidate": Setting(answer_first_candidate),
}


# A weighted vote among short answers.


def vote(ballots: Sequence[tuple[str, float]]) -> tuple[str, dict[str, float]]:
    """The answer with the largest sum of weights, and the sums.

    Answers are equal if Prophet's `prep_ans` makes them so; empty ones lose their vote. Of equal
    sums the answer that comes first wins. "" if no answer is left.

    `ballots`: (answer, weight of at least 0).
    """
    sums: dict[str, float] = {}
    for answer, weight in ballots:
        if answer := prep_ans(answer):
            sums[answer] = sums.get(answer, 0.0) + weight
    return max(sums, key=lambda answer: sums[answer], default=""), sums
