"""The report of a row: by which scorer an answer is called right, and what the row is."""

import re

import pytest
from ml_collections import ConfigDict
from report_pages import cards_of

from mmqa_jax.benchmarks.benchmark import open_benchmark
from mmqa_jax.benchmarks.mmbench import BASE, PASS
from mmqa_jax.core.workdir import Workdir
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import random_choice
from mmqa_jax.runs.reports.row import RowRun, verdict_scorer, write_row_report

TRACE = {"prompts": ["Q"], "shots": [[]], "outputs": [{"text": "said"}]}
RANKED = {"prompts": ["Q"], "shots": [[]], "option_scores": [-1.0, -2.0]}
CHOICES = ("a cat", "a dog")


def question(name: str, **fields) -> Question:
    known = {"choices": CHOICES, "answer_index": 0, "answers": ("a cat",) * 10}
    known |= {"extra": {"pass": 0, "question_type_id": 1, "data_type": "image"}}
    return Question(name, "test", "What ?", **(known | fields))


@pytest.mark.parametrize(
    ("dataset", "prediction", "scorer"),
    [
        (
            "scienceqa",
            Prediction("q", "The answer is A.", choice=0, trace=TRACE),
            "letter_or_wrong",
        ),
        ("scienceqa", Prediction("q", "A. a cat", choice=0, trace=RANKED), "recorded_choice"),
        ("aokvqa", Prediction("q", "a cat", trace=TRACE), "a_okvqa_da/official"),
        ("aokvqa", Prediction("q", "a cat", choice=0, trace=RANKED), "a_okvqa_mc/official"),
        ("mmbench", Prediction("q", "A", trace=TRACE), "mmbench/vanilla"),
        ("seedbench", Prediction("q", "A", trace=TRACE), "seed_bench/letter"),
        ("seedbench", Prediction("q", "A. a cat", choice=0, trace=RANKED), "seed_bench/likelihood"),
        ("okvqa", Prediction("q", "a cat", trace=TRACE), "vqa_accuracy/official"),
    ],
)
def test_the_scorer_of_each_benchmark(dataset, prediction, scorer):
    evaluation = open_benchmark(dataset).score([question("q")], [prediction])
    assert verdict_scorer(dataset, evaluation, [prediction]).endswith(scorer)


def test_a_benchmark_of_passes_is_judged_by_the_one_that_is_shown():
    """The first pass is right, the rotated one wrong."""
    extra = {PASS: 1, BASE: "1"}
    asked = [
        question("1", extra={PASS: 0, BASE: "1"}),
        question("1000001", extra=extra, choices=CHOICES[::-1], answer_index=1),
    ]
    given = [Prediction(q.id, "A", trace=TRACE) for q in asked]
    evaluation = open_benchmark("mmbench").score(asked, given)
    scores = evaluation.per_question()["1"]
    assert (scores["mmbench/circular"], scores["mmbench/vanilla"]) == (0.0, 1.0)
    assert verdict_scorer("mmbench", evaluation, given) == "mmbench/vanilla"


def test_no_scores_no_scorer():
    evaluation = open_benchmark("scienceqa").score([question("q")], [])
    evaluation.scored.clear()
    assert verdict_scorer("scienceqa", evaluation, []) == ""


@pytest.fixture
def page(tmp_path):
    """The report of a row whose answer names no letter, and is right by a random draw."""
    name = next(n for n in map(str, range(99)) if random_choice(n, 2) == 0)
    asked = [question(name, extra={})]
    given = [Prediction(name, "I cannot say.", trace=TRACE)]
    evaluation = open_benchmark("scienceqa").score(asked, given)
    assert evaluation.per_question()[name]["scienceqa/letter_or_random"] == 1.0
    config = {
        "row": "smollm2_k0", "system": "rmr", "setting": "rmr",
        "parts": {"llm": {"model": "my-model"}, "library": {"text_model": "minilm"}},
        "options": {"shots": 1, "chat": True},
    }  # fmt: skip
    with Workdir(tmp_path) as workdir:
        workdir.claim(ConfigDict(config))
    scores = {
        "dataset": "scienceqa", "split": "test", "row": "smollm2_k0", "setting": "rmr",
        "limit": None, "notes": [], **evaluation.summary(),
    }  # fmt: skip
    write_row_report(tmp_path, RowRun(Corpus([], asked), asked, given, {}, evaluation, scores))
    return (tmp_path / "report.html").read_text()


def test_a_random_draw_makes_no_answer_right(page):
    """The card lists what every scorer says."""
    (card,) = cards_of(page)
    (answer,) = card["answers"]
    assert (answer["score"], answer["verdict"]) == (0.0, "wrong")
    assert "Right: accuracy (ScienceQA, no letter is wrong) of 1" in page
    assert [[identifier, value] for _, identifier, value in answer["scores"][:3]] == [
        ["scienceqa/letter_or_random", 1.0],
        ["scienceqa/letter_or_expected", 0.5],
        ["scienceqa/letter_or_wrong", 0.0],
    ]


def test_the_facts_say_what_was_run(page):
    """Changes of a row's config included: its name may say another number of shots."""
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts["setting"] == "rmr, rmr"
    assert facts["options"] == "chat=True, shots=1"
    assert facts["model of llm"] == "my-model"


def test_what_scienceqas_columns_leave_out_is_said():
    of_no_subject = [question("q0", category="natural science"), question("q1")]
    evaluation = open_benchmark("scienceqa").score(of_no_subject, [])
    (note,) = (note for note in evaluation.notes if "subject and grade" in note)
    assert note.startswith("subject and grade of 1 of 2 questions are known")
    whole = open_benchmark("scienceqa").score(of_no_subject[:1], [])
    assert not [note for note in whole.notes if "subject and grade" in note]
