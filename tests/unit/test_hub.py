"""Models by name: the Hugging Face cache as huggingface_hub lays it out, and a hub on loopback."""

import contextlib
import http.server
import json
import sys
import threading
import types

import pytest
from cli_runs import ROOT, done, mmqa
from huggingface_hub import constants
from tiny_llm import SIZES, write_folder

from mmqa_jax.core.config import load_config
from mmqa_jax.runs.row import read_row
from mmqa_jax.weights.hub import download_model, find_model, is_hub_name
from tests.forks import server
from tests.refusals import refuses

COMMIT = "a" * 40
NAME = "tiny-org/tiny.llama-1b"
SIZE_FLAGS = [
    f"--config={ROOT / 'configs/prompt/default.py'}",
    *(
        f"--config.engine.{name}={getattr(SIZES, name)}"
        for name in ("slots", "length", "buckets", "prefill_tokens")
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny LLaMA as transformers publishes it."""
    return write_folder(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache and no way to the hub."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


def fill(cache, model, revision="main", name=NAME):
    """Puts a model's files into the cache; returns the snapshot's folder."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for folder in (home / "refs", home / "blobs", snapshot):
        folder.mkdir(parents=True)
    (home / "refs" / revision).write_text(COMMIT)
    for file in model.iterdir():
        blob = home / "blobs" / file.name
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def test_what_reads_as_a_name(tmp_path, monkeypatch):
    for name in ("meta-llama/Llama-2-7b-hf", "org/name@v1.0", "org/name@refs/pr/3", NAME):
        assert is_hub_name(name)
    for other in ("smollm2", "/weights/llama", "./org/name", "a/b/c", "org/", "../org/name", ""):
        assert not is_hub_name(other)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    assert not is_hub_name("runs/tiny")  # a path that exists is a path


def test_the_snapshot_of_a_revision_is_found(cache, model):
    snapshot = fill(cache, model, revision="v2")
    for revision in ("v2", COMMIT):
        assert find_model(f"{NAME}@{revision}") == snapshot
    refuses(f"--model={NAME}: .* no revision main .* --download", find_model, NAME)


@pytest.mark.parametrize(
    ("dropped", "missing"),
    [
        (["config.json"], "without config.json; add --download"),
        (["model.safetensors"], r"without weights \(model.safetensors or pytorch_model.bin\)"),
    ],
)
def test_missing_files_are_named(cache, model, dropped, missing):
    snapshot = fill(cache, model)
    for name in dropped:
        (snapshot / name).unlink()
    refuses(f"--source={NAME}: .* revision main {missing}", find_model, NAME, "--source")


def test_missing_shards_are_named(cache, model):
    snapshot = fill(cache, model)
    (snapshot / "model.safetensors").unlink()
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / shards[0]).write_text("")
    refuses(f"without {shards[1]}; add --download", find_model, NAME)


def test_a_gguf_file_alone_is_a_model(cache, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "tiny.Q8_0.gguf").write_bytes(b"GGUF")
    snapshot = fill(cache, files)
    assert find_model(NAME) == snapshot / "tiny.Q8_0.gguf"


@pytest.mark.slow
def test_prompt_and_convert_take_a_name(cache, model, tmp_path, engine):
    fill(cache, model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital\n")
    answers = []
    for name in (NAME, str(model)):
        out = tmp_path / "answers.jsonl"
        flags = ["prompt", f"--prompts={prompts}", f"--model={name}", f"--out={out}", "--no_cache"]
        done(*flags, *SIZE_FLAGS, "--config.decoding.max_new_tokens=4")
        answers.append(out.read_text())
    assert answers[0] == answers[1]
    out = tmp_path / "converted"
    result = done("convert", "--model=llama", f"--source={NAME}", f"--out={out}")
    assert COMMIT in result["source"]["path"]
    assert "tokenizer.json" in result["files"]


def test_what_the_cache_lacks_is_one_sentence_of_every_verb(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital\n")
    out = f"--out={tmp_path / 'out'}"
    row = f"--config={ROOT}/configs/okvqa/tables.py:smollm2_zero_shot"
    for flags, what in [
        (["prompt", f"--prompts={prompts}", f"--model={NAME}", out, *SIZE_FLAGS], "--model"),
        (["convert", "--model=llama", f"--source={NAME}", out], "--source"),
    ]:
        ended = mmqa(*flags)
        assert ended.code == 2
        assert f"mmqa: {what}={NAME}: no such file or folder, and the Hugging Face" in ended.err
    assert not (tmp_path / "out").exists()
    run = ["run", row, f"--workdir={tmp_path / 'run'}", "--download"]
    ended = mmqa(*run)
    assert ended.code == 2
    assert "--download: config key parts.llm.model=smollm2 is not a model's name" in ended.err


def test_a_row_takes_a_name_for_its_language_model_alone():
    config = load_config(f"{ROOT}/configs/okvqa/tables.py:smollm2_random")
    config.parts.llm.model = NAME
    config.parts.library.image_model = "runs/clip"
    missing = read_row(config).missing_inputs()
    assert NAME not in missing
    assert "runs/clip" in missing
    config.parts.llm.model = "no/such/folder"
    assert "no/such/folder" in read_row(config).missing_inputs()


@pytest.mark.slow
def test_the_cache_is_that_of_hf_home(model, tmp_path):
    """HF_HOME is read when huggingface_hub is imported, which the server of forks has not done."""
    snapshot = fill(tmp_path / "home" / "hub", model)
    code = f"from mmqa_jax.weights.hub import find_model; print(find_model({NAME!r}))"
    fork = server().start(["-c", code], {"HF_HOME": str(tmp_path / "home"), "PATH": ""})
    said, _ = fork.communicate()
    assert said.strip() == str(snapshot)


# A hub ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hub(files, *, status=200, code=None):
    """Serves a repository's files as the hub does; yields (address, list of what was asked)."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            asked.append((self.command, self.path, self.headers.get("Authorization")))
            if status != 200:
                return self.say(status, b"{}", **{"X-Error-Code": code} if code else {})
            path = self.path.partition("?")[0]
            if path.endswith(("/revision/main", f"/revision/{COMMIT}")):
                listed = [{"rfilename": name} for name in files]
                return self.say(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": listed}))
            if "/tree/" in path:
                listed = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in files.items()
                ]
                return self.say(200, json.dumps(listed))
            name = path.rpartition(f"/resolve/{COMMIT}/")[2]
            if name not in files:
                return self.say(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
            tag = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
            return self.say(200, files[name], **tag)

        def say(self, status, body, **headers):
            body = body.encode() if isinstance(body, str) else body
            self.send_response(status)
            for name, value in {**headers, "Content-Length": len(body)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
            patch.setattr(
                constants,
                "HUGGINGFACE_CO_URL_TEMPLATE",
                constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}",
            )
            yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_download_fetches_what_is_read_and_no_more(cache, model, monkeypatch):
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    more = ("pytorch_model.bin", "README.md", "consolidated.safetensors", "onnx/model.onnx")
    with hub(files | dict.fromkeys(more, b"x")) as asked:
        download_model(NAME)
        first = len(asked)
        download_model(NAME)
    snapshot = find_model(NAME)
    assert {file.name: file.read_bytes() for file in snapshot.rglob("*.*")} == files
    fetched = [path for command, path, _ in asked[first:] if command == "GET" and "resolve" in path]
    assert fetched == []  # is there
    assert {token for _, _, token in asked} == {None}

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with hub(files) as asked:
        download_model(f"{NAME}@main")
    assert asked
    assert {token for _, _, token in asked} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("files", "left_out"),
    [
        # How sentence-transformers makes a vector, without which it would be a mean in any case.
        (
            (
                *("config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"),
                *("1_LogitScore/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
            ),
            ("2_Dense/pytorch_model.bin", "3_Own/model.safetensors"),
        ),
        # open_clip's own layout.
        (
            ("open_clip_config.json", "open_clip_model.safetensors", "vocab.json", "merges.txt"),
            ("open_clip_pytorch_model.bin",),
        ),
    ],
)
def test_a_download_fetches_what_says_how_it_is_read(files, left_out, cache):
    with hub(dict.fromkeys((*files, *left_out), b"{}")):
        download_model(NAME)
    snapshot = find_model(NAME)
    found = {str(file.relative_to(snapshot)) for file in snapshot.rglob("*.*")}
    assert found == set(files)


@pytest.fixture
def waits(monkeypatch):
    """The seconds that huggingface_hub would wait before it tries again; it does not wait here."""
    seconds = []
    clock = types.SimpleNamespace(sleep=seconds.append)
    monkeypatch.setattr(sys.modules["huggingface_hub.utils._http"], "time", clock)
    return seconds


def test_what_a_download_cannot_do_is_one_sentence(tmp_path, waits):
    def refused(message, files=(), **answer):
        with hub(dict.fromkeys(files, b"x"), **answer):
            ended = mmqa(
                "convert",
                "--model=llama",
                f"--source={NAME}",
                f"--out={tmp_path}/out",
                "--download",
            )
        assert ended.code == 2
        assert f"mmqa: --source={NAME}: {message}" in ended.err
        assert "http" not in ended.err

    refused("access to it has to be granted", status=403, code="GatedRepo")
    refused("the Hugging Face hub shows no such model", status=401, code="RepoNotFound")
    refused("the model has no revision main", status=404, code="RevisionNotFound")
    refused("has neither model.safetensors nor pytorch_model.bin", ["config.json", "vocab.txt"])
    refused("has 2 GGUF files (a.Q4.gguf, a.Q8.gguf)", ["a.Q4.gguf", "a.Q8.gguf"])
    assert waits == []  # an answer of the hub is final
    ended = mmqa(
        "convert", "--model=llama", f"--source={NAME}", f"--out={tmp_path}/out", "--download"
    )
    assert ended.code == 1  # nothing listens
    assert len(waits) > 1  # and it was tried again
    assert f"--source={NAME}: the Hugging Face hub cannot be reached (ConnectError)" in ended.err
    assert "127.0.0.1" not in ended.err


@pytest.mark.parametrize(
    ("verb", "flags", "where"),
    [
        ("embed", ("--model=minilm", "--out=x"), "--model=minilm"),
        ("search", ("--method=dense", "--model=minilm", "--out=x"), "--model=minilm"),
        ("rerank", ("--model=runs/rerank/best", "--out=x"), "--model=runs/rerank/best"),
        ("ask", ("--encoder=minilm", "why?"), "--encoder=minilm"),
    ],
)
def test_verbs_fetch_encoders_and_rerankers_by_name(waits, tmp_path, verb, flags, where):
    """What is no name is refused; of several flags those are fetched that are names."""
    ended = mmqa(verb, f"--data={tmp_path}", *flags, "--download")
    assert (ended.code, f"--download: {where} is not a model's name" in ended.err) == (2, True)
    named = [flag.replace(where.partition("=")[2], NAME) for flag in flags]
    ended = mmqa(verb, f"--data={tmp_path}", *named, "--download")
    assert ended.code == 1
    assert f"={NAME}: the Hugging Face hub cannot be reached" in ended.err


def test_nothing_to_download():
    ended = mmqa("search", "--data=nowhere", "--method=bm25", "--out=x", "--download")
    message = "mmqa: --download: fetches what --model names; give ORG/NAME there, or leave --downlo"
    assert (ended.code, ended.err[: len(message)]) == (2, message)
