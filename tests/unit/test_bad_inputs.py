"""Answers, questions, libraries and servers that are not as they should be: each has an outcome
that is counted, and the run goes on. The table is in mmqa_jax/prompting/FAULTS.md."""

import io
import json
import re
import time

import pytest
import vqa_files
from cli_runs import ROOT, done, mmqa, png, rows_of
from fake_llm import FakeLLM
from openai_stub import Stub, error, said
from PIL import Image
from tiny_llm import tiny_backend

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import Unanswerable
from mmqa_jax.papers.pica import choose_pica
from mmqa_jax.papers.rmr import answer_rmr
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Message, Picture
from mmqa_jax.prompting.backends.http import OpenAIBackend, ServerConfig
from mmqa_jax.prompting.examples.library import ExampleLibrary
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

NO_SHOTS = ExampleLibrary([])
CONFIG = """
from mmqa_jax.core.config import load_config

def get_config(mode=""):
    config = load_config({row!r})
    server = {{"concurrency": 8, "timeout": 0.5, "retries": 0}}
    config.parts.llm = {{**config.parts.llm, "server": server}}
    return config
"""


def row(name, data, workdir, **values):
    """`mmqa run` of a row such as `okvqa:smollm2_random` on an impatient server's client."""
    dataset, _, mode = name.partition(":")
    config = data.parent / f"{dataset}.py"
    config.write_text(CONFIG.format(row=f"{ROOT}/configs/{dataset}/tables.py:{mode}"))
    values = {
        "data.dir": data, "parts.llm.backend": "openai", "parts.llm.model": "tiny",
        "parts.library.text_model": "", "options.similarity": "random", **values,
    }  # fmt: skip
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return ["run", f"--config={config}", f"--workdir={workdir}", *overrides]


# Runs -------------------------------------------------------------------------------------------

REFUSED = [f"refused {n}?" for n in range(30)]
# Prompts are sent in the order of their texts: the first ones are answered.
ASKED = ["a wheel?", *REFUSED, "slow?", "empty?", "blank?", "sorry?", "wheels?"]


def spoken(text):
    """An answer of /completions with the log-probability that was asked for."""
    status, headers, data = said(text)
    content = json.loads(data)
    content["choices"][0]["logprobs"] = {"tokens": ["x"], "token_logprobs": [-0.5]}
    return status, headers, json.dumps(content).encode()


@pytest.fixture
def okvqa(tmp_path, monkeypatch):
    """Questions whose texts say how the server answers; one picture has no caption."""
    val = {
        100 + n: (3 if text == "wheels?" else 2, text, ["bike"] * 10, "one")
        for n, text in enumerate(ASKED)
    }
    monkeypatch.setitem(vqa_files.OKVQA, "val", val)
    vqa_files.write_okvqa(tmp_path / "raw")
    done("prepare", "okvqa", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    return tmp_path / "data"


def vqa_server(body):
    text = body["prompt"].rpartition("Q: ")[2].split("\nA:")[0]
    if text.startswith("refused"):
        return error(400, "the content is not allowed")
    if text == "slow?":
        time.sleep(1)
    answers = {"empty?": "", "blank?": " \n", "sorry?": " I'm sorry, I cannot"}
    return spoken(answers.get(text, " bike"))


def test_a_server_that_refuses_times_out_or_says_nothing(okvqa, tmp_path):
    """More requests are refused than may fail in a row; all else is answered."""
    run = row("okvqa:smollm2_random", okvqa, tmp_path / "run", **{"options.shots": 0})
    with Stub(vqa_server).serving():
        ended = mmqa(*run, "--json")
    assert ended.code == 0, ended.err
    result = ended.value
    assert ended.err.splitlines()[-1] == f"{len(REFUSED) + 3} of {len(ASKED)} answers are empty"
    assert re.search(rf"questions with failed requests +│ +{len(REFUSED) + 1} ", ended.out)
    counts = result["prompts"]
    assert counts["failed"] == len(REFUSED) + 1
    assert counts["empty_answers"] == result["empty"] == len(REFUSED) + 1 + 2
    assert (counts["without_caption"], counts["without_picture"]) == (1, len(ASKED))
    assert result["n"] == len(ASKED)
    assert result["scores"]["vqa_accuracy/official"] == pytest.approx(2 / len(ASKED))
    traces = {trace["question"]: trace for trace in rows_of(tmp_path / "run" / "trace.jsonl")}
    assert "refuses it (400: " in traces["refused 7?"]["failed"][0]
    assert "no answer within 0.5 s" in traces["slow?"]["failed"][0]
    assert traces["sorry?"]["answer"] == "i'm sorry i cannot"
    assert "\nContext: \n===\nQ: wheels?" in traces["wheels?"]["prompts"][0]
    assert "\nContext: a bike\n===\nQ: sorry?" in traces["sorry?"]["prompts"][0]


def test_the_library_is_smaller_than_k_or_empty(okvqa, tmp_path, refused):
    library = {"parts.library.split": "train", "parts.library.folds": 1}
    run = row("okvqa:smollm2_random", okvqa, tmp_path / "run", **library, **{"options.shots": 4})
    with Stub(vqa_server).serving() as stub:
        result = done(*run, "--limit=1")
        assert result["prompts"]["too_few_examples"] == 1
        assert stub.asked[-1][1]["prompt"].count("Q: ") == 2
        stub.asked.clear()
        library["parts.library.split"] = "val"
        run = row("okvqa:smollm2_random", okvqa, tmp_path / "none", **library)
        refused(*run, message="the library of examples is empty; name a split with answers")
        assert stub.asked == []


LETTERS = {
    "right": "Oaks are tall. The answer is A.",
    "empty": "",
    "refusal": "I cannot say which one it is.",
    "out of range": "The answer is D.",
    "two letters": "The answer is A. No, the answer is B. The answer is B.",
}


def scienceqa(folder):
    problems = {
        str(n): {
            "question": name, "choices": ["oak", "oak" if name == "empty" else "rose", "moss"],
            "answer": 0, "hint": "", "image": None, "task": "closed choice", "grade": "grade3",
            "subject": "natural science", "topic": "biology", "category": "Plants",
            "skill": "", "lecture": "", "solution": "It is tall.",
            "split": "train" if name == "shot" else "test",
        }
        for n, name in enumerate((*LETTERS, "shot"))
    }  # fmt: skip
    folder.mkdir()
    (folder / "problems.json").write_text(json.dumps(problems))
    splits = {"train": ["5"], "val": [], "test": [str(n) for n in range(5)]}
    (folder / "pid_splits.json").write_text(json.dumps(splits))
    done("prepare", "scienceqa", f"--raw={folder}", f"--out={folder / 'data'}")
    return folder / "data"


def test_answers_that_name_no_choice_are_counted(tmp_path):
    data = scienceqa(tmp_path / "raw")

    def server(body):
        return spoken(LETTERS[body["prompt"].rpartition("Question: ")[2].split("\n")[0]])

    values = {"options.shots": 1, "data.questions": 0}
    run = row("scienceqa:smollm2_k3_rationale", data, tmp_path / "run", **values)
    with Stub(server).serving():
        result = done(*run)
    unparsed = {"letter_or_random": 4, "letter_or_expected": 4, "letter_or_wrong": 4}
    assert {k: result["unparsed"][f"scienceqa/{k}"] for k in unparsed} == unparsed
    assert result["scores"]["scienceqa/letter_or_wrong"] == pytest.approx(1 / 5)
    assert (result["prompts"]["repeated_choices"], result["empty"]) == (1, 1)
    predictions = tmp_path / "run" / "predictions.jsonl"
    again = done("evaluate", "scienceqa", f"--references={data}", f"--predictions={predictions}")
    assert (again["unparsed"], again["empty"]) == (result["unparsed"], 1)
    assert "1 of 5 answers is empty" in again["notes"]
    assert [note for note in again["notes"] if note in result["notes"]] == again["notes"]
    assert again["scores"] == result["scores"]


# Parts ------------------------------------------------------------------------------------------

QUICK = ServerConfig(concurrency=1, retries=0, max_failures=2)


def server_of(statuses):
    """Answers by the prompt: its number in `statuses`."""

    def reply(body):
        status = statuses[int(body["prompt"])]
        return said("yes") if status == 200 else error(status, "no")

    return reply


@pytest.mark.parametrize(
    ("statuses", "ends"),
    [
        ([200, *[400] * 9, 200], None),  # refused: the requests' own fault
        ([200, *[403] * 9, 200], None),
        ([500, 500, 200, 500, 500, 200, 400], None),
        ([200, 500, 500, 500, 200], "3 requests failed in a row"),  # the server's
        ([400, 400, 400, 200], "3 requests failed in a row"),  # a setting that it does not take
    ],
)
def test_failures_end_a_run_only_where_the_server_or_the_setting_is_at_fault(statuses, ends):
    queries = [Completion(n, str(n)) for n in range(len(statuses))]
    with Stub(server_of(statuses)).serving():
        backend = OpenAIBackend("tiny", QUICK)
        if ends:
            with pytest.raises(RunError, match=ends):
                list(backend.answer(queries))
            return
        answered = {result.id for result in backend.answer(queries)}
    assert answered == {n for n, status in enumerate(statuses) if status == 200}
    assert {failure.id for failure in backend.failures} == set(range(len(statuses))) - answered


def test_refusals_after_cached_answers_end_nothing():
    with Stub(server_of([400] * 9)).serving():
        backend = OpenAIBackend("tiny", QUICK)
        backend.usage.cached = 1
        assert list(backend.answer(Completion(n, str(n)) for n in range(9))) == []
    assert len(backend.failures) == 9


def bmp():
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "BMP")
    return file.getvalue()


def test_a_picture_that_cannot_be_sent_fails_its_question_alone():
    questions = [
        Question(f"q{n}", "val", f"Q{n}?", image=f"{n}", choices=("a", "b")) for n in "012"
    ]
    pictures = {"0": png((1, 2, 3)), "1": bmp(), "2": None}
    corpus = Corpus([], questions, pictures.get)
    with Stub(lambda body: said("The answer is B.")).serving() as stub:
        llm = OpenAIBackend("tiny", QUICK)
        options = {"shots": 0, "chat": True, "pictures": True}
        predictions = answer_rmr(questions, corpus, llm, NO_SHOTS, **options)
    assert [prediction.choice for prediction in predictions] == [1, None, 1]
    assert "not a PNG, JPEG, GIF or WebP picture" in predictions[1].trace["failed"][0]
    assert predictions[1].trace["too_long"] == []
    # The one whose picture is absent is asked in words.
    shown = [isinstance(body["messages"][0]["content"], list) for _, body in stub.asked]
    assert sorted(shown) == [False, True]


def test_what_the_engine_cannot_take_is_told_from_a_wrong_setting(engine):
    backend = tiny_backend(engine)
    user = (Message("user", ("Why?",)),)
    for query, reason in [
        (Completion("q", ""), "its prompt is empty"),
        (Choices("q", "Why", (" a", "")), "continuation '' adds no token"),
        (Choices("q", user, (" a", "")), "continuation '' adds no token"),
    ]:
        refuses(reason, backend.check, query, error=Unanswerable)
    picture = Message("user", (Picture(png((1, 2, 3))), "Why?"))
    with pytest.raises(UserError, match="the model is a text-only LLaMA") as caught:
        backend.check(Chat("q", (picture,)))
    assert not isinstance(caught.value, Unanswerable)  # so of every question: the run ends at once
    backend.check(Choices("q", "Why ", (" a", "b")))


def test_choices_that_repeat_are_empty_or_absent():
    """Of equal options the first; a question whose options cannot be scored is not answered."""

    class Strict(FakeLLM):
        def check(self, query):
            if " " in query.continuations:
                raise Unanswerable("continuation ' ' adds no token")

    questions = [
        Question("same", "val", "?", choices=("red", "red", "blue")),
        Question("none", "val", "?"),
        Question("void", "val", "?", choices=("red", "")),
    ]
    score = {" red": (-1.0,), " blue": (-2.0,)}
    llm = Strict(score=lambda prompt, option: score[option])
    for calibrated in (False, True):
        same, none, void = choose_pica(questions, llm, NO_SHOTS, shots=0, calibrated=calibrated)
        assert (same.choice, same.answer) == (0, "red")
        assert (none.choice, none.trace["failed"]) == (
            None, ["request 'none': it has no choices; give at least one."],
        )  # fmt: skip
        assert (void.choice, void.trace["failed"]) == (None, ["continuation ' ' adds no token"])


def test_an_option_without_a_prior_is_not_taken_for_a_certain_one():
    """A failed prior counted as log 1 would make its option the least likely."""
    questions = [
        Question("whole", "val", "?", choices=("red", "blue")),
        Question("lost", "val", "?", choices=("red", "green")),
    ]

    class WithoutGreen(FakeLLM):
        def check(self, query):
            if query.continuations == (" green",):
                raise Unanswerable("continuation ' green' adds no token")

    llm = WithoutGreen(score=lambda prompt, option: (-1.0,))
    whole, lost = choose_pica(questions, llm, NO_SHOTS, shots=0, calibrated=True)
    assert whole.choice == 0
    missing = ["the score of an option without the question is missing"]
    assert (lost.choice, lost.trace["failed"]) == (None, missing)
    llm = FakeLLM(score=lambda prompt, option: (-1.0,), fail=["prior 0"])
    found = choose_pica(questions, llm, NO_SHOTS, shots=0, calibrated=True)
    assert [(one.choice, one.trace["failed"]) for one in found] == [(None, missing)] * 2
