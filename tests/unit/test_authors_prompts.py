"""Prompts byte for byte as the authors' code composes them, restated here, over real questions.

PICa gpt3_api_okvqa.py, PromptCap gpt3_direct_answer.py, Prophet stage2 (prompt.py, data_utils.py),
ScienceQA models/base_prompt.py.
"""

import collections
import dataclasses
import json
from pathlib import Path

import pytest
from fake_llm import FakeLLM
from shared_data import SHARED, require, shared_benchmark

from mmqa_jax.benchmarks.aokvqa import read_aokvqa
from mmqa_jax.benchmarks.okvqa import read_okvqa
from mmqa_jax.benchmarks.scienceqa import read_scienceqa
from mmqa_jax.data.schema import Question
from mmqa_jax.papers import rmr
from mmqa_jax.papers.pica import answer_pica, answer_promptcap
from mmqa_jax.papers.prophet import answer_prophet
from mmqa_jax.prompting.examples.library import Shot
from mmqa_jax.prompting.examples.side_files import AnswerHeuristics
from mmqa_jax.prompting.few_shot import load_template, majority_answer

pytestmark = pytest.mark.slow

HEAD = "Please answer the question according to the above context.\n===\n"
QUOTED = 'a sign that says " stop ".'


def shared(name):
    require(SHARED / name)
    return SHARED / name


class Following:
    """A library whose examples of a question are those after it."""

    def __init__(self, questions):
        self._questions = list(questions)
        self._row = {question.id: row for row, question in enumerate(questions)}

    def select(self, questions, count, *_, **__):
        return [self.after(question, count) for question in questions]

    def after(self, question, count):
        size, row = len(self._questions), self._row[question.id]
        return [Shot(self._questions[(row + k) % size], 0.5) for k in range(1, count + 1)]


def tag_words(question):
    return ", ".join(tag["class"] for tag in question.extra["tags"])


def pica_prompt(shots, question, context, answer):
    solved = "".join(
        f"Context: {context(s)}\n===\nQ: {s.question}\nA: {answer(s)}\n\n===\n" for s in shots
    )
    return f"{HEAD}{solved}Context: {context(question)}\n===\nQ: {question.question}\nA:"


def last_of_the_most_frequent(question):
    """PromptCap's `answer_majority`: a stable sort by count, the last."""
    counts = question.extra.get("soft_labels") or collections.Counter(question.answers)
    return sorted(counts.items(), key=lambda item: item[1])[-1][0]


def okvqa(tagged):
    questions = shared_benchmark(read_okvqa, "okvqa").questions
    return [q for q in questions if q.split == "test" and (not tagged or "tags" in q.extra)]


def aokvqa():
    """Its val questions with the captions and tags of their pictures."""
    described = {q.extra["image_id"]: q.extra for q in okvqa(tagged=True)}
    found = []
    for question in shared_benchmark(read_aokvqa, "aokvqa").questions:
        known = described.get(question.extra["image_id"])
        if question.split == "val" and known is not None:
            extra = {**question.extra, "caption": known["caption"], "tags": known["tags"]}
            found.append(dataclasses.replace(question, extra=extra))
    return found


def hard():
    rows = [
        (QUOTED, ["cat", "mat"], ["b", "a", "b", "a"]),
        ("a cat", [], ["x", "x", "y", "y", "y", "x"]),
        ("a dog..", ["dog"], ["only"]),
    ]
    return [
        Question(
            f"h{n}", "test", f"what {n} ?", answers=tuple(answers),
            extra={"caption": caption, "tags": [{"class": name, "conf": 1.0} for name in tags]},
        )
        for n, (caption, tags, answers) in enumerate(rows)
    ]  # fmt: skip


def prompts_of(answer, questions, *parts, **options):
    llm = FakeLLM(lambda prompt: (" x", -1.0))
    answer(questions, llm, Following(questions), *parts, **options)
    return {query.id[0]: query.prompt for query in llm.seen}


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("given", [hard, lambda: okvqa(tagged=True)], ids=["hard", "OK-VQA"])
def test_pica(given, tags):
    questions = [q for q in given() if q.answers[0]]  # an empty answer is no example there

    def context(question):
        # The released TSV is cut at `caption": "` and `", "conf"`, so that escapes stay.
        caption = json.dumps(question.extra["caption"])[1:-1]
        return f"{caption}. {tag_words(question)}" if tags else caption

    seen = prompts_of(
        answer_pica, questions, shots=0, ensemble=1, tags=tags, shot_captions="people"
    )
    for question in questions:
        assert seen[question.id] == pica_prompt([], question, context, None)


def test_pica_with_examples_of_one_split():
    """Our rows: shots are captioned as the query, without the file's escapes."""
    questions = hard()
    seen = prompts_of(answer_pica, questions, shots=2, tags=True)
    for question in questions:
        shots = [shot.question for shot in Following(questions).after(question, 2)]
        assert seen[question.id] == pica_prompt(
            shots,
            question,
            lambda q: f"{q.extra['caption']}. {tag_words(q)}",
            lambda q: q.answers[0],
        )
    assert f"Context: {QUOTED}. cat, mat\n" in seen["h0"]


@pytest.mark.parametrize(
    "given", [hard, aokvqa, lambda: okvqa(tagged=True)], ids=["hard", "A-OKVQA", "OK-VQA"]
)
def test_promptcap(given):
    questions = given()
    seen = prompts_of(answer_promptcap, questions, shots=3)
    for question in questions:
        shots = [shot.question for shot in Following(questions).after(question, 3)][::-1]
        assert seen[question.id] == pica_prompt(
            shots,
            question,
            lambda q: f"{q.extra['caption']} {tag_words(q)}",
            last_of_the_most_frequent,
        )


def test_a_tied_majority():
    questions = shared_benchmark(read_aokvqa, "aokvqa").questions
    tied = [q for q in questions if q.split == "val"]
    assert sum(last_of_the_most_frequent(q) != majority_answer(q) for q in tied) == 154
    for question in tied:
        assert majority_answer(question, last=True) == last_of_the_most_frequent(question)
        assert majority_answer(question) == most_answer(question)


@pytest.mark.parametrize(
    ("said", "answer"),
    [(" Takeoff", "take off"), ("virgin australia", "virgin"), ("One World", "1 world")],
)
def test_promptcaps_own_answers(said, answer):
    questions = hard()
    llm = FakeLLM(lambda prompt: (said.strip(), -1.0))
    found = answer_promptcap(questions, llm, Following(questions), shots=1)
    assert {prediction.answer for prediction in found} == {answer}


def most_answer(question):
    """Prophet's: the first of the most frequent that is not empty."""
    counts = question.extra.get("soft_labels") or collections.Counter(question.answers)
    ranked = sorted(counts.items(), key=lambda item: item[1], reverse=True)
    return next(answer for answer, _ in ranked if answer)


@pytest.mark.parametrize("given", [hard, aokvqa, lambda: okvqa(tagged=False)[::5]],
                         ids=["hard", "A-OKVQA", "OK-VQA"])  # fmt: skip
def test_prophet(given):
    questions = given()
    candidates = {q.id: [("a", 0.996), ("b c", 0.125), ("d", len(q.id) / 99)] for q in questions}
    nearest = {
        q.id: [shot.question.id for shot in Following(questions).after(q, 1)] for q in questions
    }

    def sample(question, answer=None):
        caption = question.extra["caption"].strip()
        caption += "" if caption.endswith(".") else "."
        listed = ", ".join(f"{a}({p:.2f})" for a, p in candidates[question.id])
        lines = [f"Context: {caption}", f"Question: {question.question}", f"Candidates: {listed}"]
        text = "".join(f"===\n{line}\n" for line in lines) + "===\nAnswer:"
        return text if answer is None else f"{text} {answer}\n\n"

    class Named(Following):
        def named(self, question, names, count):
            return self.after(question, count)

    llm = FakeLLM(lambda prompt: (" x", -1.0))
    options = {"shots": 1, "ensemble": 1}
    heuristics = AnswerHeuristics(candidates, nearest)
    answer_prophet(questions, llm, Named(questions), heuristics, **options)
    head = load_template("prophet.okvqa").head
    seen = {query.id[0]: query.prompt for query in llm.seen}
    for question in questions:
        (shot,) = (shot.question for shot in Following(questions).after(question, 1))
        assert seen[question.id] == head + sample(shot, most_answer(shot)) + sample(question)


def base_prompt(problem, form, solved):
    """ScienceQA's `create_one_example` of QCM-EA and QCM-A."""
    listed = " ".join(f"({'ABCDE'[n]}) {text}" for n, text in enumerate(problem["choices"]))
    context = f"{problem['hint']} {problem['caption']}".strip() or "N/A"
    solution = problem["solution"].replace("\n", "\\n")
    reason = f"{solution} " if form == "EA" else ""
    answer = f" {reason}The answer is {'ABCDE'[problem['answer']]}." if solved else ""
    text = (
        f"Question: {problem['question']}\nContext: {context}\nOptions: {listed}\nAnswer:{answer}"
    )
    return text.replace("  ", " ").strip()


def problems():
    data = json.loads(Path(shared("scienceqa"), "problems_subset.json").read_text("utf-8"))
    captions = json.loads(Path(shared("scienceqa"), "captions.json").read_text("utf-8"))["captions"]
    questions = {q.id: q for q in shared_benchmark(read_scienceqa, "scienceqa").questions}
    return [(questions[p], {**row, "caption": captions.get(p, "")}) for p, row in data.items()]


def hard_problems():
    row = {
        "question": "Which?\nLook.", "choices": ["a  b", "c"], "answer": 1, "hint": "One.\nTwo. ",
        "caption": "A  map.", "solution": "First   this.\n\n- then  that\nend.",
    }  # fmt: skip
    question = Question(
        "p", "train", row["question"], choices=tuple(row["choices"]), answer_index=1,
        rationale=row["solution"], extra={"hint": row["hint"], "caption": row["caption"]},
    )  # fmt: skip
    bare = {**row, "hint": "", "caption": "", "solution": ""}
    return [(question, row), (dataclasses.replace(question, rationale="", extra={}), bare)]


@pytest.mark.parametrize("given", [hard_problems, problems], ids=["hard", "ScienceQA"])
def test_scienceqas_format(given):
    reasoned, short = load_template("rmr.rationale"), load_template("rmr.answer")
    for question, problem in given():
        fields = rmr.fields(question)
        asked = base_prompt(problem, "EA", solved=False)
        solved = base_prompt(problem, "EA", solved=True)
        assert reasoned.render([fields], fields) == f"{solved}\n\n{asked}"
        # The shots of rmr.answer are QCM-A's; its query is ours.
        solved = base_prompt(problem, "A", solved=True)
        assert short.render([fields], fields) == f"{solved}\n\n{asked} The answer is"
