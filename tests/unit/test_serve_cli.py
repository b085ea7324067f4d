"""`mmqa serve` as a process: it begins, answers, and ends without losing an answer; lm_eval drives it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from cli_runs import ROOT, mmqa
from tiny_llm import llama_config, write_folder

from mmqa_jax.core.config import load_config
from mmqa_jax.core.workdir import Workdir
from tests.forks import server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("served") / "tiny", llama_config(60, 512))


@pytest.fixture(scope="module")
def served(model):
    """The process and its address."""
    code = "import sys; from mmqa_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    process = server().start(["-c", code, "serve", f"--model={model}", "--port=0"], os.environ)
    try:
        deadline, said = time.monotonic() + 240, ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", said)):
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            try:
                said, _ = process.communicate(0.1)
            except subprocess.TimeoutExpired as waiting:
                said = waiting.output.decode()
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def test_flags_that_are_refused(model, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ((f"--port={port}",), f"--port={port}: cannot be listened at"),
            (("--port=70000",), "0 to 65535"),
            (("--host=203.0.113.7",), "--host=203.0.113.7"),
            (("--key_env=MISSING_KEY",), "--key_env=MISSING_KEY"),
            (("--queue=0",), "--queue=0"),
            (("--data=nowhere",), "--data=nowhere: no such folder"),
            (("--workdir=nowhere",), "--workdir=nowhere: no such folder"),
            ((f"--data={tmp_path}", f"--workdir={tmp_path}"), "leave one"),
            (("--backend=openai",), "reads the passages of --data"),
            (("--top_k=0",), "--top_k=0"),
            (("--reranker=nowhere",), "--reranker=nowhere: no such folder, nor ORG/NAME"),
            (("--encoder=nowhere",), "--encoder=nowhere: no such folder, nor minilm"),
            (("--mcp",), "--mcp: its tools search sources"),
            (("--adapter=cook",), "--adapter=cook: NAME=FOLDER was expected"),
            (("--adapter=a=x,a=y",), "--adapter=a=y: NAME=FOLDER was expected, each name once"),
            ((f"--workdir={tmp_path}", "--adapter=a=b"), "is for a language model in this process"),
            ((f"--model={model}", "--adapter=memory=b", "--port=0"), "has this name already"),
            ((f"--model={model}", "--adapter=a=gone", "--port=0"), "gone: no such folder"),
            ((f"--workdir={tmp_path}", "--port=0"), "holds no finished demo"),
        ]
        for flags, words in cases:
            ended = mmqa("serve", *flags)
            assert (ended.code, words in ended.err) == (2, True), ended.err
    for package in ("uvicorn", "starlette", "prometheus_client"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            ended = mmqa("serve")
        message = (
            f"mmqa: mmqa serve: {package} is not installed; `pip install 'mmqa-jax[serve]'`.\n"
        )
        assert (ended.code, ended.err) == (2, message)
    ended = mmqa("serve", f"--model={tmp_path / 'nothing'}", "--port=0")
    assert (ended.code, "no such file or folder" in ended.err) == (2, True)


def test_a_row_whose_inputs_are_gone(tmp_path):
    config = load_config(
        ROOT / "configs/atlas/tables.py:bm25", {"data.dir": str(tmp_path / "gone")}
    )
    with Workdir(tmp_path / "row") as workdir:
        workdir.claim(config)
    ended = mmqa("serve", f"--workdir={tmp_path / 'row'}", "--port=0")
    message = f"row: inputs of the row are missing: {tmp_path / 'gone'}; put them back, or start"
    assert (ended.code, message in ended.err) == (2, True), ended.err


def test_lm_evaluation_harness_scores_as_prompt_does(served, model, tmp_path, monkeypatch):
    """A task on a local file: its accuracy is that of `mmqa prompt` on the same choices."""
    words = ["red", "blue", "a long road", "no", "yes", "The sea.", "pump", "left"]
    rows = [
        {"q": f"Question {'abcdefgh'[n]}: which one?", "choices": [words[n], words[n - 3], words[n - 5]],
         "answer": n % 3}
        for n in range(8)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local_choices.yaml").write_text(
        "task: local_choices\ndataset_path: json\noutput_type: multiple_choice\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        'test_split: test\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    _, address = served
    arguments = (
        f"model={model},base_url={address}/v1/completions,tokenizer_backend=huggingface,"
        f"tokenizer={model},num_concurrent=4,max_retries=1"
    )
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.tasks import TaskManager

    # It would ask a dozen programs what this machine is.
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    found = simple_evaluate(
        "local-completions", arguments, ["local_choices"], bootstrap_iters=0,
        # Thousands of tasks of its own would be read.
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    theirs = {
        sample["doc"]["q"]: [float(one[0]) for one in sample["filtered_resps"]]
        for sample in found["samples"]["local_choices"]
    }

    prompts = [
        {"id": n, "prompt": row["q"], "choices": [f" {choice}" for choice in row["choices"]]}
        for n, row in enumerate(rows)
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    ended = mmqa("prompt", f"--prompts={tmp_path / 'p.jsonl'}", f"--model={model}", "--no_cache",
                 f"--out={tmp_path / 'a.jsonl'}")  # fmt: skip
    assert ended.code == 0, ended.err
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        answer = json.loads(line)
        ours = [choice["logprob"] for choice in answer["scores"]]
        assert theirs[rows[answer["id"]]["q"]] == pytest.approx(ours, abs=1e-3)


def test_sigterm_lets_answers_end_and_takes_nothing_new(served, model):
    """The last that is asked of the process."""
    process, address = served
    body = {"model": str(model), "prompt": "go on", "max_tokens": 480, "stream": True,
            "temperature": 1.5, "seed": 3}  # fmt: skip
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        refused = False
        rest = []
        for line in lines:
            rest.append(line)
            if not refused:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(f"{address}/healthz", timeout=5)
                    continue
                refused = True
    assert first.startswith("data: {")
    assert [line for line in rest if line][-1] == "data: [DONE]"
    assert refused
    process.communicate(60)
    assert process.returncode == 0
