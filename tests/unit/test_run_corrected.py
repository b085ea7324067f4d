"""`mmqa run` of a language model: a first run that was refused or failed blocks no corrected one."""

import re

import pytest
from cli_runs import ENGINE, ROOT, done, mmqa, rows_of
from openai_stub import Stub, answer, error, said
from science import prepare_science
from tiny_llm import write_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SERVER = {
    "parts.llm.backend": "openai", "parts.llm.model": "tiny", "parts.llm.engine": {},
    "parts.llm.server.retries": 0, "options.chat": True, "options.max_new_tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corrected")
    prepare_science(folder)
    write_folder(folder / "llm")
    return folder


def flags(inputs, workdir, row="smollm2_k1", **values):
    values = {
        "data.dir": inputs / "data", "parts.library.text_model": "",
        "options.similarity": "random", "parts.llm.model": inputs / "llm",
        **{f"parts.llm.engine.{key}": value for key, value in ENGINE.items()}, **values,
    }  # fmt: skip
    if values.get("parts.llm.backend") == "openai":
        values = {k: v for k, v in values.items() if not k.startswith("parts.llm.engine")}
    config = f"--config={ROOT}/configs/scienceqa/tables.py:{row}"
    return [
        "run",
        config,
        f"--workdir={workdir}",
        *(f"--config.{k}={v}" for k, v in values.items()),
    ]


def test_refused_values_are_corrected_in_the_same_workdir(inputs, tmp_path):
    """No row of the run has seconds: none are known."""
    for key, wrong, message in (
        ("parts.library.split", "vall", r"config key parts\.library\.split=vall"),
        ("parts.llm.engine.length", 100_000, r"engine\.length is 100000"),
        ("parts.llm.model", "nobody/nothing", r"^mmqa: config key parts\.llm\.model=nobody/not"),
    ):
        ended = mmqa(*flags(inputs, tmp_path / "run", **{key: wrong}))
        assert ended.code == 2
        assert re.search(message, ended.err.splitlines()[-1]), ended.err
        assert not (tmp_path / "run").exists()
    assert done(*flags(inputs, tmp_path / "run"))["questions"] == 4
    rows = rows_of(tmp_path / "run" / "per_question.jsonl")
    assert len(rows) == 4
    assert not any("seconds" in row for row in rows)


def test_a_model_that_a_server_does_not_know(inputs, tmp_path):
    """Named by the key that the user set; the right name continues in the workdir."""

    def reply(body):
        return said("The answer is A.") if body["model"] == "tiny" else error(404, "no such model")

    run = ("smollm2_k3_rationale",)
    with Stub(reply).serving():
        wrong = {**SERVER, "parts.llm.model": "tinny"}
        ended = mmqa(*flags(inputs, tmp_path / "run", *run, **wrong))
        assert ended.code == 2
        assert "mmqa: config key parts.llm.model=tinny: the server of OPENAI_BASE" in ended.err
        assert not (tmp_path / "run").exists()
        assert done(*flags(inputs, tmp_path / "run", *run, **SERVER))["questions"] == 4


def test_a_server_that_is_not_there(inputs, tmp_path, monkeypatch):
    """Exit 1; the same command and one with another model continue in the workdir."""
    with Stub(said).serving() as gone:
        pass
    monkeypatch.setenv("OPENAI_BASE_URL", gone.url)
    run = flags(inputs, tmp_path / "run", "smollm2_k3_rationale", **SERVER)
    for _ in range(2):
        ended = mmqa(*run)
        assert ended.code == 1
        assert "no connection to it" in ended.err
    assert not (tmp_path / "run").exists()
    with Stub(lambda body: said("The answer is A.")).serving():
        other = {**SERVER, "parts.llm.model": "other"}
        assert done(*flags(inputs, tmp_path / "run", "smollm2_k3_rationale", **other))["row"]


def test_a_server_that_fails_on_the_way(inputs, tmp_path):
    """The answers are kept: the same command continues, also with another timeout; no other row."""
    asked = []

    def reply(body):
        asked.append(body)
        return said("The answer is A.") if len(asked) == 1 else error(500, "oops")

    options = {**SERVER, "parts.llm.server.max_failures": 0, "parts.llm.server.concurrency": 1}
    run = flags(inputs, tmp_path / "run", "smollm2_k3_rationale", **options)
    with Stub(reply).serving() as stub:
        ended = mmqa(*run)
        assert ended.code == 1
        assert "1 requests failed in a row" in ended.err
        assert (tmp_path / "run" / "journals" / "responses").exists()
        ended = mmqa(*run, "--config.options.shots=1")
        assert ended.code == 2
        assert "options.shots (3 there, 1 now)" in ended.err
        stub.reply = lambda body: asked.append(body) or said("The answer is A.")
        asked.clear()
        result = done(*run, "--config.parts.llm.server.timeout=5.0")
    assert (result["questions"], result["prompts"]["failed"]) == (4, 0)
    assert len(asked) == 3  # the first answer was kept


def test_shots_are_dropped_until_a_prompt_fits_a_server_that_counts_tokens(inputs, tmp_path):
    """vLLM gives its context in /v1/models, and counts tokens in /tokenize: here its letters."""
    length, counted, sent = 400, [], []

    def text_of(body):
        return body["messages"][0]["content"] if "messages" in body else body["prompt"]

    def reply(body):
        sent.append(text_of(body))
        return said("The answer is A.")

    def count(body):
        counted.append(text_of(body))
        return answer({"count": len(counted[-1]), "max_model_len": length, "tokens": []})

    options = {**SERVER, "options.shots": 3}
    with Stub(reply, max_model_len=length, count=count).serving():
        result = done(*flags(inputs, tmp_path / "run", "smollm2_k3_rationale", **options))
    assert len(sent) == 4
    assert all(len(text) + 8 <= length < len(max(counted, key=len)) + 8 for text in sent)
    prompts = result["prompts"]
    assert prompts["dropped_shots"] == sum(4 - text.count("Question:") for text in sent) > 0
    assert (prompts["failed"], prompts["too_long"]) == (0, 0)
