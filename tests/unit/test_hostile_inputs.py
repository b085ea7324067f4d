"""Some 200 hostile inputs of every kind that comes from outside, and what each gives.

`text`: it is used as the plain text that it is. `refused`: it is left out or refused in one
sentence. `failed`: a request of many fails in one sentence, and the others go on. Whatever it is,
nothing hangs, nothing crashes and nothing else is raised. `python -m pytest -q FILE -rP -k counts`
prints how many there are of each.
"""

import collections
import json
import os
import shutil
import time

import numpy as np
import pytest
from openai_stub import Stub, answer
from safetensors.numpy import save_file
from test_serve_refusals import client
from tiny_checkpoints import make_source
from tiny_llm import by_id, write_folder

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.folder import FolderOptions, read_folder
from mmqa_jax.models.encoders.sentence_pooling import read_modules
from mmqa_jax.prompting.backends import Completion, Message
from mmqa_jax.prompting.backends.http import OpenAIBackend, ServerConfig
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, open_text_tokenizer
from mmqa_jax.weights.formats.safetensors import SafetensorsSource
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

pytestmark = pytest.mark.slow

SECONDS = 20.0  # of one input, on a busy machine
BIDI = "\u202e"


def outcome(call):
    """`text`, or `refused` in one sentence."""
    began, sentence = time.monotonic(), None
    try:
        call()
    except UserError as error:
        sentence = str(error)
    assert time.monotonic() - began < SECONDS
    if sentence is None:
        return "text"
    assert sentence.endswith((".", "..."))
    assert len(sentence) < 2000
    return "refused"


# Names of documents -> what becomes of a file with a sentence in it.

NAMES = {
    **dict.fromkeys(
        [
            b"-rf.txt", b"--help.txt", b"CON.txt", b"NUL.txt", b"aux.md", b"a" * 200 + b".txt",
            b"..hidden.txt"[2:], b"a..b.txt", b"%2e%2e%2f.txt", b"a;rm -rf ~.txt", b"$(id).txt",
            b"`id`.txt", b"a|b.txt", b"a&b.txt", b"a>b.txt", b"'quote'.txt", b'"quote".txt',
            b"a\\..\\b.txt", b"C:\\a.txt", b"file:a.txt", b"http:a.txt", b"a?b#c.txt", b"a b  c.txt",
            b" lead.txt", b"{0.__class__}.txt", b"{{ 7*7 }}.txt", b"<script>.txt", b"*.txt",
            b"=cmd.txt", b"@a.txt", b"a.txt.txt", b"a.TXT", "日本語.txt".encode(), "é.txt".encode(),
            "e\u0301.txt".encode(), "😀.txt".encode(), b"%s%n.txt", b"null.txt", b"nan.txt",
        ],
        "text",
    ),
    **dict.fromkeys(
        [
            b"a\nb.txt", b"a\rb.txt", b"a\tb.txt", b"a\x1b[2Jb.txt", b"a\x07.txt", b"a\x7f.txt",
            b"\xff\xfe.txt", b"a\xe9.txt", f"a{BIDI}txt.txt".encode(), "a\u200b.txt".encode(),
            "a\u2028b.txt".encode(), "a\u0085.txt".encode(), "a\u00ad.txt".encode(),
            "\ufeffa.txt".encode(),
        ],
        "refused",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """One folder with all of the names, each file with a sentence of its own."""
    root = tmp_path_factory.mktemp("names")
    folder = os.fsencode(root / "documents")
    os.mkdir(folder)
    for number, name in enumerate(NAMES):
        with open(folder + b"/" + name, "wb") as file:
            file.write(f"The pump number {number} stands on the left.".encode())
    content = read_folder(root / "documents", root / "kept", FolderOptions())
    assert sorted(path.name for path in root.iterdir()) == ["documents", "kept"]
    return content


@pytest.mark.parametrize(
    ("number", "name"), list(enumerate(NAMES)), ids=lambda value: ascii(value)[:40]
)
def test_names_of_documents(documents, number, name):
    sources = [s for s in documents.sources if f"number {number} stands" in s.text]
    if NAMES[name] == "text":
        (source,) = sources
        assert source.extra["file"] == name.decode()
        assert source.title.isprintable()
    else:
        assert sources == []
        shown = name.decode("utf-8", "backslashreplace")
        assert documents.report.bad[shown] == "its name is no plain text; rename it"


# Requests to `mmqa serve` -> status.

CHAT, ASK = "/v1/chat/completions", "/api/ask"
SAID = [{"role": "user", "content": "a"}]


def asked(**more):
    return CHAT, json.dumps({"model": "blind", "messages": SAID} | more)


def page(**more):
    return ASK, json.dumps({"question": "a", "system": "blind"} | more)


REQUESTS = [
    *(
        (asked(messages=messages), 400)
        for messages in (
            [], None, {}, "a", 1, [1], [[]], [None], [{}], [{"role": "user"}],
            [{"content": "a"}], [{"role": "root", "content": "a"}], [{"role": 1, "content": "a"}],
            [{"role": "user", "content": 1}], [{"role": "user", "content": None}],
            [{"role": "user", "content": [{}]}], [{"role": "user", "content": [1]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "x", "x": 1}]}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
             for url in ("file:///etc/passwd",)],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url":
              "http://169.254.169.254/latest/meta-data"}}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url":
              "data:image/png;base64,%%%"}}]}],
        )
    ),
    *(
        (asked(**{key: value}), 400)
        for key, value in (
            ("max_tokens", -1), ("max_tokens", 2.5), ("max_tokens", "9"), ("n", 10**9), ("n", 0),
            ("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("stop", [1]), ("stop", {}),
            ("stream", "yes"), ("seed", "x"), ("no_such_key", 1),
        )
    ),
    *(((CHAT, body), 400) for body in (
        "", "{", "[]", "null", "1", '"a"', "[" * 100_000, '{"a":' * 5000, "\ud83d".encode(
            "utf-8", "surrogatepass"), b"\xff\xfe", b"\x1f\x8b\x08", '{"model": "blind"}',
        '{"model": ' + "9" * 5000 + "}", '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    )),
    *((page(**{key: value}), 400) for key, value in (
        ("question", None), ("question", 1),
        ("question", []), ("system", None), ("image", "x"),
        ("image", "data:text/html;base64,AAAA"), ("image", 1),
    )),
    ((CHAT, json.dumps({"model": "none", "messages": SAID})), 404),
    (page(system="../seeing"), 404),
    ((CHAT, " " * (3 << 20)), 413),
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with client() as opened:  # its systems fail the test if they are asked
        yield opened


@pytest.mark.parametrize(("request_", "status"), REQUESTS, ids=lambda value: ascii(value)[-40:])
def test_requests_to_a_server(server, request_, status):
    url, body = request_
    reply = server.post(url, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text[:300]
    message = reply.json()["error"]["message"]
    assert message
    assert len(message) < 2000


@pytest.mark.parametrize(
    "path",
    ["/..%2f..%2fetc/passwd", "/%2e%2e/etc/passwd", "/static/../../etc/passwd", "/api/%00",
     "/api/sources/..%2F..%2Fetc%2Fpasswd", "/api/picture?id=../../etc/passwd", "//etc/passwd",
     "/v1/models/../../x", "/\ud7ff", "/api/ask", "/v1/chat/completions"],
)  # fmt: skip
def test_addresses_that_a_server_does_not_have(server, path):
    reply = server.get(path)
    assert reply.status_code in (400, 403, 404, 405, 422), reply.text[:200]
    assert "root:" not in reply.text


# Replies of a language-model server -> what the request gives.


def choice(**fields):
    return answer({"choices": [{"text": "x", "finish_reason": "stop"} | fields]})


REPLIES = {
    **{f"text {value!r}": (choice(text=value), "failed") for value in (
        1, 1.5, True, [], {}, [["x"]], {"text": "x"})},
    **{f"choices {value!r}": (answer({"choices": value}), "failed") for value in (
        None, 1, "x", {}, [], [[]], [None], [1], {"0": {"text": "x"}}, [{}], [{"text": None}])},
    **{f"body {value!r}": ((200, {"Content-Type": "application/json"}, value), "failed")
       for value in (b"", b"{", b"nul", b"NaN", b"\x00", b"\xff", b'"x"', b"[1," * 200,
                     b"[" + b"1" * 5000 + b"]", b"\xef\xbb\xbf", b"{}" * 2)},
    **{f"status {status}": ((status, {"Content-Type": "application/json"}, b"{}"), "failed")
       for status in (204, 400, 418, 422, 500, 599)},
    **{f"escapes {value!r}": (choice(text=value), "text") for value in (
        "\x1b[2J\x1b]0;owned\x07", BIDI + "txt", "a\x00b", "\r\n" * 50, " " * 20_000,
        "<script>alert(1)</script>", "<|im_end|>", "{{ 7*7 }}", "[" + "9" * 5000 + "]")},
    **{f"usage {value!r}": (answer({"choices": [{"text": "x"}], "usage": value}), "text")
       for value in (None, 1, "x", [], {"prompt_tokens": -1}, {"prompt_tokens": 1e400})},
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES, ids=lambda value: ascii(value)[:40])
def test_replies_of_a_language_model_server(name):
    reply, expected = REPLIES[name]
    quick = ServerConfig(timeout=5.0, retries=0, max_failures=5)
    with Stub(lambda asked: choice() if asked["prompt"] == "good" else reply).serving():
        backend = OpenAIBackend("tiny", quick)
        results = by_id(backend.answer(Completion(p, p) for p in ("bad", "good")))
    assert results["good"].text == "x"
    if expected == "failed":
        (failure,) = backend.failures
        assert failure.id == "bad"
        assert failure.reason.isprintable()
        assert len(failure.reason) < 1000
    else:
        assert isinstance(results["bad"].text, str)
        assert backend.failures == []


# Chat templates -> what a prompt of two messages gives.

LOOP = "{% for i in range(99999) %}"
TEMPLATES = {
    **dict.fromkeys(
        [
            "{{ messages[0].content }}", "{{ 'a' * 1000 }}", "{{ '{0}'.format(1) }}", "x" * 100_000,
            "{{ messages | tojson(indent=4) }}", "{{ messages|attr('__class__') }}",
            "{{ '%s' | format('a') }}", "{{ cycler('a', 'b').next() }}", "{{ lipsum.__globals__ }}",
            "{{ strftime_now('%Y') }}", "{% set x = namespace(a=1) %}{% set x.a = 2 %}{{ x.a }}",
            "{{ '{x.__class__}'.format_map({'x': 1}) }}", "{{ raise_exception.__globals__ }}",
            "{{ self }}", "{{ undefined_name }}", "{% for i in range(1000) %}{{ i }}{% endfor %}",
        ],
        "text",
    ),
    **dict.fromkeys(
        [
            LOOP * 3 + "{% endfor %}" * 3, "{{ 'a' * 10 ** 12 }}", "{{ [0] * 10 ** 10 }}",
            "{{ 'a'|center(10 ** 10) }}", "{{ '{:>9999999999}'.format(1) }}", "{{ 9 ** (9 ** 9) }}",
            "{{ ('a' * 10 ** 6)|replace('a', 'b' * 10 ** 6) }}", "{{ 'a ' * 10 ** 7 }}",
            "{{ strftime_now('%Y' * 10 ** 9) }}", "{{ range(10 ** 18)|list }}", "{{ 1 / 0 }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.clear() }}",
            "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}", "{{", "{% if %}",
            "{% import 'os' as os %}", "{% extends '/etc/passwd' %}", "{{ raise_exception('no') }}",
            "{{ joiner.__init__.__globals__.os.popen('id').read() }}", "{% endfor %}",
            "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ " + "(" * 5000 + ")" * 5000 + "}}",
            "{{ dict.mro() }}", "{% set n = namespace(__class__=1) %}",
        ],
        "refused",
    ),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda value: ascii(value)[:40])
def test_chat_templates(template):
    made = ChatTemplate(template, {"bos_token": "<s>"}, name="model, chat_template")
    messages = [Message("user", "hi"), Message("assistant", "{{ 7*7 }}")]
    assert outcome(lambda: made.render("r", messages)) == TEMPLATES[template]


DIGITS = "DIGITS"  # more of them than Python reads

# Files of a checkpoint -> what opening it gives.

CHECKPOINTS = {
    ("generation_config.json", "eos_token_id"): {
        "text": [0, [0, 1], None],
        "refused": ["</s>", -1, [[0]], 1.5, list(range(10**6)), True],
    },
    ("tokenizer_config.json", "chat_template"): {
        "text": [None, "", "{{ messages[0].content }}"],
        "refused": [1, [1], {"a": 1}, [{"name": "default"}]],
    },
    ("tokenizer_config.json", "model_max_length"): {"text": [10**30, 1e30, None, -1], "refused": []},
    ("tokenizer_config.json", "added_tokens_decoder"): {
        "text": [{}],
        "refused": [1, [1], {"x": {"content": "a"}}, {"0": 1}, {"7000000000": {"content": "<a>"}}],
    },
    ("config.json", "num_hidden_layers"): {
        "text": [], "refused": [10**9, 2**70, 0, -1, 1.5, "3", None, [3], True, DIGITS],
    },
    ("config.json", "num_attention_heads"): {"text": [], "refused": [10**9, 0, 3, "4"]},
    ("config.json", "rope_theta"): {"text": [1e6], "refused": [float("nan"), float("inf"), "x"]},
    ("config.json", "vocab_size"): {"text": [], "refused": [10**12, 0, 41]},
    ("config.json", "quantization_config"): {"text": [{}, None], "refused": [{"bits": 4}, 1]},
    ("config.json", "auto_map"): {"text": [{"AutoConfig": "evil.C"}], "refused": []},
    ("config.json", "model_type"): {"text": [], "refused": ["evil", None, 1, ["llama"]]},
}  # fmt: skip
CASES = [
    (file, key, value, expected)
    for (file, key), values in CHECKPOINTS.items()
    for expected in ("text", "refused")
    for value in values[expected]
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_source("llama", tmp_path_factory.mktemp("checkpoint") / "llama").path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "folder"
    return write_folder(folder)


@pytest.mark.parametrize(
    ("file", "key", "value", "expected"), CASES, ids=lambda value: ascii(value)[:20]
)
def test_files_of_a_checkpoint(checkpoint, model_folder, tmp_path, file, key, value, expected):
    of_model = file == "config.json"
    folder = shutil.copytree(checkpoint if of_model else model_folder, tmp_path / "copy")
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {key: value}).replace('"DIGITS"', "1" * 5000))
    opened = (
        (lambda: load_published("llama", folder))
        if of_model
        else lambda: open_text_tokenizer(folder)
    )
    assert outcome(opened) == expected
    assert not (folder / "PWNED").exists()


PATHS = ["../x", "../../etc/passwd", "/etc/passwd", "a/../../x", "a\0b"]


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_paths_that_lead_out_of_a_checkpoint(tmp_path, path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "x")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": path}}))
    modules = [{"type": "sentence_transformers.models.Dense", "path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))
    refuses(r"index\.json: names the file '.*', which is not in its", SafetensorsSource, folder)
    with pytest.raises(UserError, match=r"modules\.json: names the file '.*', which is not in its"):
        list(read_modules(folder))


def test_counts():
    counts = {
        "names of documents": collections.Counter(NAMES.values()),
        "requests to a server": collections.Counter(str(status) for _, status in REQUESTS),
        "replies of a server": collections.Counter(expected for _, expected in REPLIES.values()),
        "chat templates": collections.Counter(TEMPLATES.values()),
        "files of a checkpoint": collections.Counter(expected for *_, expected in CASES),
        "paths of a checkpoint": collections.Counter(refused=2 * len(PATHS)),
    }
    for kind, found in counts.items():
        print(f"| {kind} | {found.total()} | {', '.join(f'{n} {k}' for k, n in found.items())} |")
    assert sum(found.total() for found in counts.values()) >= 200
