"""What runs in a process of its own: budgets, crashes, forks, and what is left of it."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest

from mmqa_jax.core import box
from mmqa_jax.core.box import Box, Budget, Failed, OverBudget
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.chat_template import TemplateOverBudget, rendered
from mmqa_jax.prompting.backends import Message
from mmqa_jax.prompting.text_tokenizer import ChatTemplate
from tests.refusals import refuses

pytestmark = pytest.mark.slow

CODE = """
import os, time
HELD = []

def echo(value):
    return value
def environment():
    return sorted(os.environ), os.getpid()
def loop():
    while True:
        pass
def hold(size):
    HELD.append(b"x" * size)
    return os.getpid()
def load(size):
    return len(b"x" * size), os.getpid()
def starve(size):
    HELD.append(b"x" * size)
    raise ImportError("failed to map segment")
def grow(size):
    return len(b"x" * size)
def wait(seconds):
    time.sleep(seconds)
def crash():
    os.abort()
def write(path):
    with open(path, "w") as file:
        file.write("x" * 100_000)
def fail():
    raise LookupError("no such row")
def refuse(data):
    fail()
def halves(data, name):
    return name, [data[: len(data) // 2], b"", data[len(data) // 2 :]]
def endless(data):
    loop()
def connect():
    import socket
    socket.create_connection(("127.0.0.1", 9))
def start():
    import subprocess
    subprocess.run(["true"])
def fork():
    os.fork()
"""


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(CODE)
    return file


@pytest.fixture
def boxed(code):
    return Box(code)


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(process, seconds=20):
    end = time.monotonic() + seconds
    while runs(process) and time.monotonic() < end:
        time.sleep(0.05)
    return not runs(process)


def test_values_pass_as_they_are_and_exceptions_by_name(boxed):
    value = {"text": 'a "quote"\n\ud800 \u2028 é', "list": [1, None, True, 2.5]}
    assert boxed.call("echo", value=value) == value
    with pytest.raises(Failed, match="no such row") as failed:
        boxed.call("fail")
    assert failed.value.kind == "LookupError"
    assert boxed.call("grow", size=200 << 20) == 200 << 20  # within the budget


SECONDS, MEMORY = "it takes over 3 seconds of processor time", "it takes over 256 MiB of memory"


@pytest.mark.parametrize(
    ("function", "request_", "limit"),
    [
        ("loop", {}, SECONDS),
        ("grow", {"size": 1 << 30}, MEMORY),
        ("crash", {}, f"it crashes, as it may where {MEMORY}"),
    ],
)
def test_a_limit_is_named_and_the_next_call_works(boxed, function, request_, limit):
    refuses(f"^{limit}$", boxed.call, function, error=OverBudget, **request_)
    assert boxed.call("echo", value=1) == 1


def test_bytes_go_in_and_come_out_within_the_budget(boxed):
    data = bytes(range(256)) * 40_000
    value, blobs = boxed.call_on(data, Budget(), "halves", name="é\n")
    assert (value, blobs) == ("é\n", [data[: len(data) // 2], b"", data[len(data) // 2 :]])
    with pytest.raises(OverBudget, match=r"^over 1 MiB come out of it$"):
        boxed.call_on(data, Budget(output=1 << 20), "halves", name="")
    with pytest.raises(OverBudget, match=r"^it takes over 1 seconds of processor time$"):
        boxed.call_on(data, Budget(seconds=1), "endless")
    with pytest.raises(Failed, match="no such row"):
        boxed.call_on(data, Budget(), "refuse")
    assert boxed.call_on(b"", Budget(), "halves", name="x") == ("x", [b"", b"", b""])


def test_what_a_call_leaves_behind_takes_no_memory_from_the_next_ones(boxed):
    boxed.call("hold", size=200 << 20)
    assert boxed.call("grow", size=150 << 20) == 150 << 20


@pytest.mark.parametrize("function", ["connect", "start", "fork"])
def test_it_opens_no_socket_and_starts_no_program(boxed, function):
    with pytest.raises(Failed, match="not in a box") as failed:
        boxed.call(function)
    assert failed.value.kind == "PermissionError"


def test_a_call_whose_processor_timer_stands_still_ends_too(boxed, monkeypatch):
    boxed.call("echo", value=1)
    monkeypatch.setattr(box, "_PATIENCE", 0.2)
    with pytest.raises(OverBudget):
        boxed.call("wait", seconds=60)
    assert boxed.call("echo", value=2) == 2


def test_memory_that_earlier_calls_took_is_not_missing(boxed):
    first = boxed.call("hold", size=200 << 20)
    size, process = boxed.call("load", size=200 << 20)
    assert (size, process != first) == (200 << 20, True)
    refuses("over 256 MiB of memory", boxed.call, "starve", error=OverBudget, size=240 << 20)


def test_a_large_request_may_take_more(boxed):
    text = "x" * (8 << 20)
    assert boxed.call("echo", value=text) == text
    boxed.call("grow", size=100 << 20)


def test_it_has_no_secrets_and_writes_no_files(boxed, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    names, _ = boxed.call("environment")
    assert set(names) <= {*box._ENVIRONMENT, "OPENBLAS_NUM_THREADS", "LC_CTYPE"}
    refuses("File too large", boxed.call, "write", error=Failed, path=str(tmp_path / "file"))


def test_an_interrupted_call_is_not_taken_for_the_next_ones_answer(boxed):
    boxed.call("echo", value="first")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        boxed.call("wait", seconds=30)
    assert boxed.call("echo", value="second") == "second"


def test_a_box_that_is_closed_while_its_process_starts_ends_at_once(tmp_path):
    code = tmp_path / "slow.py"
    code.write_text("import time\ntime.sleep(30)\n")
    box = Box(code)
    threading.Timer(0.3, box.close).start()
    began = time.monotonic()
    for _ in range(2):  # the second call comes after it was closed
        refuses("no process for it starts", box.call, "echo", error=RuntimeError, value=1)
    assert time.monotonic() - began < 15


def test_threads_share_it(boxed):
    boxed.call("echo", value=0)
    with ThreadPoolExecutor(4) as pool:
        echoed = pool.map(lambda n: [boxed.call("echo", value=n) for _ in range(50)], range(4))
    assert list(echoed) == [[n] * 50 for n in range(4)]


def test_a_fork_that_ends_leaves_it(code):
    boxed = Box(code)
    boxed.call("echo", value=1)
    fork = os.fork()
    if not fork:
        try:
            boxed.__dict__.clear()
            weakref.finalize._exitfunc()  # what an interpreter runs at its end
        finally:
            os._exit(0)
    os.waitpid(fork, 0)
    assert boxed.call("echo", value=2) == 2


def test_it_ends_with_its_object(code):
    _, process = Box(code).call("environment")
    assert ends(process)


PARENT = """
import sys, time
from pathlib import Path
from mmqa_jax.core.box import Box
boxed = Box(Path(sys.argv[1]))
print(boxed.call("environment")[1], flush=True)
if sys.argv[2] == "busy":
    boxed.call("loop")
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_its_parent(code, state, with_signal):
    root = Path(box.__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(code), state],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    child = int(parent.stdout.readline())
    assert runs(child)
    time.sleep(0.3)
    os.kill(parent.pid, with_signal)
    parent.wait()
    parent.stdout.close()
    assert ends(child)


# Chat templates.

SAID = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", SECONDS),
        ("{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
         "{% endfor %}{{ ns.x|length }}", MEMORY),
        ("{{ 'a' * 2000000000 }}", MEMORY),
        ("{{ '%3000000000d' % 1 }}", MEMORY),
        ("{{ messages|tojson(indent=1000000000) }}", MEMORY),
        ("{{ 'a' * 2000000 }}", r"makes 2,000,000 characters of \d+, at most 1,048,\d\d\d are"),
    ],
)  # fmt: skip
def test_chat_templates_that_loop_or_grow(template, message):
    message = rf"^model, chat_template: a prompt cannot be made \(.*{message}"
    with pytest.raises(UserError, match=message) as refused:
        ChatTemplate(template, name="model, chat_template").render("r1", [Message("user", "hi")])
    assert isinstance(refused.value.__cause__, TemplateOverBudget)


@pytest.mark.parametrize(
    ("template", "kind", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", jinja2.TemplateError, "unsafe"),
        ("{{ messages.append(1) }}", jinja2.TemplateError, "unsafe"),
        ("{% include '/etc/passwd' %}", jinja2.TemplateError, "no loader"),
        ("{{ raise_exception('roles must alternate') }}", jinja2.TemplateError,
         "^roles must alternate$"),
        ("{{ 1 // 0 }}", jinja2.TemplateError, "division"),
        ("a\n{{ messages", jinja2.TemplateSyntaxError, "^unexpected end .*'\\.$"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", jinja2.TemplateError, "recursion"),
    ],
)  # fmt: skip
def test_chat_templates_that_fail_are_named_as_in_process(template, kind, message):
    with pytest.raises(kind, match=message) as failed:
        rendered(template, SAID, {}, True)
    assert type(failed.value) is kind


def test_long_texts_and_odd_characters_are_rendered_as_by_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{% for m in messages %}{{ bos_token + m.role }}\n{{ m.content | trim }}{{ m | tojson }}"
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    messages = [
        {"role": "user", "content": "x" * 3_000_000},
        {"role": "assistant", "content": " \ud800 \x00 \u2028 \U0001f600\r\n", "thinking": None},
        {"role": "tool", "content": [{"type": "text", "text": "é"}, {"type": "image"}], "n": 1.5},
    ]
    for answer in (True, False):
        options = {"add_generation_prompt": answer, "bos_token": "<s>"}
        (want,), _ = render_jinja_template([messages], chat_template=template, **options)
        assert rendered(template, messages, {"bos_token": "<s>", "other": 1}, answer) == want


def test_a_fork_renders_by_a_child_of_its_own():
    def echoes(name):
        texts = [f"{name} {i}" for i in range(20)]
        template = "{{ messages[0].content }}"
        return [rendered(template, [{"content": text}], {}, True) for text in texts] == texts

    assert rendered("{{ messages[0].content }}", SAID, {}, True) == "hi"
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, repr(echoes("fork")).encode())
        finally:
            os._exit(0)
    assert echoes("parent")
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"True"
