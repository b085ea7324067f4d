"""`mmqa prompt`: files of prompts in, answers out, and what a kill or a mistake leaves."""

import base64
import os
import signal
import time

import pytest
from cli_runs import ROOT, done, mmqa, rows_of, write_rows
from openai_stub import Stub, error, said
from tiny_llm import SIZES, flag, text_tokenizer, write_folder

from mmqa_jax.decoding.requests import Request
from mmqa_jax.evaluation.scores import read_answers
from mmqa_jax.prompting.backends import Completion, Decoding
from mmqa_jax.prompting.backends.cache import ResponseCache
from mmqa_jax.prompting.run import Line, as_message, read_prompts
from tests.forks import server
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

CONFIG = f"--config={ROOT / 'configs/prompt/default.py'}"
SAME = ("slots", "length", "buckets", "prefill_tokens")
ENGINE = [CONFIG, *(f"--config.engine.{name}={getattr(SIZES, name)}" for name in SAME)]
ROWS = [
    {
        "id": "q2",
        "prompt": "The capital",
        "max_new_tokens": 5,
        "logprobs": True,
        "meta": {"k": [1]},
    },
    {"id": "q1", "messages": [{"role": "user", "content": "Why"}], "max_new_tokens": 3},
    {"id": 7, "prompt": "Seven days", "choices": [" a", " bb"]},
    {"prompt": "draws", "temperature": 1.0, "n": 2, "seed": 3, "max_new_tokens": 4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny") / "model")


def test_answers_in_the_order_of_the_prompts_and_a_rerun_asks_what_is_new(folder, engine, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", ROWS)
    out = tmp_path / "new" / "answers.jsonl"
    flags = ["prompt", "--raw", f"--prompts={prompts}", f"--model={folder}", f"--out={out}"]
    flags += [*ENGINE, f"--cache={tmp_path / 'cache'}"]
    result = done(*flags)
    assert (result["prompts"], result["answered"], result["cached"]) == (4, 4, 0)
    rows = rows_of(out)
    assert [row["id"] for row in rows] == ["q2", "q1", 7, 4]  # its line number where it has none

    # What the engine itself says.
    ids = text_tokenizer().encode_plain("<|im_start|>user\nWhy<|im_end|>\n<|im_start|>assistant\n")
    requests = [
        Request("q2", "The capital", 5, logprobs=True),
        Request("q1", ids, 3),
        Request(4, "draws", 4, temperature=1.0, n=2, seed=3),
    ]
    want = {answer.id: answer.candidates for answer in engine.generate(requests)}
    for row in (rows[0], rows[1], rows[3]):
        best = want[row["id"]][0]
        assert (row["text"], row["finish"]) == (best.text, best.finish)
        assert row["logprob"] == pytest.approx(best.total, abs=1e-4)
    assert rows[0]["logprobs"] == pytest.approx(want["q2"][0].logprobs, abs=1e-4)
    assert rows[0]["meta"] == {"k": [1]}
    assert [one["text"] for one in rows[3]["candidates"]] == [one.text for one in want[4]]
    scores = engine.loglikelihood("Seven days", [" a", " bb"])
    totals, means = ([getattr(score, name) for score in scores] for name in ("total", "mean"))
    assert [one["logprob"] for one in rows[2]["scores"]] == pytest.approx(totals, abs=1e-4)
    assert rows[2]["best"] == totals.index(max(totals))
    assert rows[2]["best_per_token"] == means.index(max(means))

    before = out.read_bytes()
    result = done(*flags)
    assert (result["answered"], result["cached"]) == (0, 4)
    assert out.read_bytes() == before
    write_rows(prompts, [*ROWS, {"id": "more", "prompt": "more", "max_new_tokens": 2}])
    result = done(*flags)
    assert (result["answered"], result["cached"]) == (1, 4)
    assert rows_of(out)[:4] == rows


def test_plain_text_is_a_prompt_a_line(folder, engine, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\r\n\ntwo\n")
    out = tmp_path / "answers.jsonl"
    result = done(
        "prompt", "--raw", f"--prompts={prompts}", f"--model={folder}", f"--out={out}", "--no_cache",
        *ENGINE, "--config.decoding.max_new_tokens=2",
    )  # fmt: skip
    assert (result["answered"], result["cached"]) == (2, 0)
    rows = rows_of(out)
    assert [row["id"] for row in rows] == [1, 3]
    (want,) = engine.generate([Request(0, "two", 2)])
    assert rows[1]["text"] == want.text


def test_a_chat_model_gets_texts_as_a_users_messages(folder, engine, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"id": "a", "prompt": "Why"}, ROWS[2]])
    out = tmp_path / "answers.jsonl"
    flags = [f"--model={folder}", f"--out={out}", "--no_cache", *ENGINE]
    done("prompt", f"--prompts={prompts}", *flags, "--config.decoding.max_new_tokens=3")
    ids = text_tokenizer().encode_plain("<|im_start|>user\nWhy<|im_end|>\n<|im_start|>assistant\n")
    (want,) = engine.generate([Request(0, ids, 3)])
    message, choices = rows_of(out)
    assert (message["text"], message["answer"]) == (want.text, want.text.strip())
    scores = engine.loglikelihood("Seven days", [" a", " bb"])  # choices continue the text
    best = max(range(2), key=lambda n: scores[n].total)
    assert (choices["choice"], choices["answer"]) == (best, ["a", "bb"][best])
    found = {one.question_id: (one.answer, one.choice) for one in read_answers(out)}
    assert found == {"a": (want.text.strip(), None), "7": (["a", "bb"][best], best)}


def test_pictures_keep_their_places_in_a_message():
    red, blue = flag(), flag((0, 0, 200))
    line = Line("here", Completion("a", "First <image>, then <image>.", images=(red, blue)))
    (message,) = as_message(line).request.messages
    assert message.content == ("First ", red, ", then ", blue, ".")
    line = Line("here", Completion("a", "What is it?", images=(red,)))
    assert as_message(line).request.messages[0].content == (red, "What is it?")


def test_lines_of_openais_batch_files(tmp_path):
    picture = f"data:image/png;base64,{base64.b64encode(flag().data).decode()}"
    parts = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": picture}},
    ]
    body = {"model": "gpt", "messages": [{"role": "user", "content": parts}], "max_tokens": 7}
    line = {"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = write_rows(tmp_path / "b.jsonl", [line])
    (read,) = read_prompts(file, Decoding(5, top_p=0.5, seed=4))
    assert read.request.id == "q"
    assert read.request.decoding == Decoding(7, top_p=0.5, seed=4)
    (message,) = read.request.messages
    assert (message.content[0], message.content[1].data) == ("What?", flag().data)
    for change, words in [
        ({"url": "/v1/embeddings"}, "url is not /v1/chat/completions"),
        ({"body": {**body, "tools": [1]}}, "tools.0. is 1, expected"),
        ({"body": {**body, "stream": True}}, "stream has no meaning in a file"),
        ({"body": {**body, "messages": []}}, "messages is"),
        ({"more": 1}, "more is no key"),
    ]:
        wrong = write_rows(tmp_path / "w.jsonl", [line, {**line, "custom_id": "r", **change}])
        refuses(f"line 2: {words}", read_prompts, wrong)


RUN = "import sys; from mmqa_jax.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_a_rerun_asks_the_rest(tmp_path, end):
    """What is kept at the kill is not asked again; the output appears whole, or not at all."""
    prompts, out, cache = (tmp_path / name for name in ("p.txt", "out.jsonl", "cache"))
    prompts.write_text("".join(f"prompt {n}\n" for n in range(1, 81)))
    flags = [
        "prompt", "--raw", f"--prompts={prompts}", "--model=tiny", "--backend=openai", f"--out={out}",
        f"--cache={cache}", CONFIG, "--config.server.concurrency=4",
    ]  # fmt: skip

    def slowly(body):
        time.sleep(0.05)
        return said(body["prompt"].upper())

    with Stub(slowly).serving() as stub:
        process = server().start(["-c", RUN, *flags], os.environ)
        deadline = time.monotonic() + 60
        while len(stub.asked) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(end)
        told, _ = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 130)
        if end == signal.SIGINT:
            assert told.splitlines()[-1].startswith("mmqa: interrupted; start the same command")
        assert not out.exists()
        kept = len(ResponseCache(cache))
        assert 10 <= kept < 80  # all but the last few of twenty
        stub.asked.clear()
        result = done(*flags)
        assert result["cached"] == kept
        assert result["answered"] == len(stub.asked) == 80 - kept
    assert [row["text"] for row in rows_of(out)] == [f"PROMPT {n}" for n in range(1, 81)]


def test_failed_requests_are_named_in_the_output(tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "good"}, {"prompt": "bad"}])
    out = tmp_path / "o"
    flags = ["prompt", "--raw", f"--prompts={prompts}", "--model=tiny", f"--out={out}"]
    flags += ["--backend=openai"]
    flags += [CONFIG, f"--cache={tmp_path / 'cache'}"]
    reply = {"good": said("yes"), "bad": error(400, "too long")}
    with Stub(lambda body: reply[body["prompt"]]).serving() as stub:
        result = done(*flags)
        assert (result["answered"], result["failed"]) == (1, 1)
        good, bad = rows_of(out)
        text = {"answer": "yes", "text": "yes", "finish": "stop"}
        assert good == {"id": 1, **text, "prompt_tokens": 3}
        assert bad["id"] == 2
        assert bad["error"].startswith("the server refuses it (400: ")
        # A failure is not kept: the next run asks again.
        reply["bad"] = said("now")
        stub.asked.clear()
        assert (done(*flags)["failed"], len(stub.asked)) == (0, 1)
        assert rows_of(out)[1]["text"] == "now"

        reply["bad"] = error(400, "too long")
        ended = mmqa(*flags, "--no_cache", "--config.server.max_failures=0")
    assert ended.code == 1
    why = "1 requests failed in a row, more than server.max_failures = 0, the last, 2, because"
    assert why in ended.err
    assert rows_of(out)[1]["text"] == "now"  # still that of the run before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: not valid JSON"),
        (['{"prompt": "a"}', '["a"]'], "line 2: not a JSON object"),
        (['{"id": 1}'], "line 1: has neither of `prompt` and `messages`"),
        (['{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}'], "line 1: has both"),
        (['{"prompt": "a", "max_tokens": 3}'], "line 1: key 'max_tokens' is unknown; did you mean"),
        (['{"prompt": 3}'], "line 1: prompt is 3, expected a string"),
        (['{"prompt": "a", "stop": "b"}'], 'line 1: stop is "b", expected a list of strings'),
        (['{"prompt": "a", "n": true}'], "line 1: n is true, expected an integer"),
        (['{"prompt": "a", "temperature": -1}'], "line 1: request 1: temperature is -1"),
        (['{"prompt": "a", "choices": []}'], r"line 1: choices is \[\], expected a list"),
        (['{"prompt": "a", "choices": ["b"], "n": 2}'], "line 1: n has no effect with"),
        (['{"prompt": "a", "images": ["no.png"]}'], "line 1: image .*no.png: cannot be read"),
        (['{"prompt": "a", "images": ["/dev/zero"]}'], "line 1: image /dev/zero: is no file"),
        (['{"messages": [{"role": "bot", "content": "a"}]}'], "line 1: message: role is 'bot'"),
        (['{"messages": [{"role": "user"}]}'], "line 1: a message has exactly the keys `role`"),
        *(
            (
                [f'{{"messages": [{{"role": {role}, "content": {content}}}]}}'],
                "line 1: a message's role must be a string, its content a string or a list of parts",
            )
            for role, content in (('"user"', "3"), ('"user"', "null"), ("3", '"a"'))
        ),
        (['{"prompt": "\\ud83d"}'], "line 1: holds '.ud83d', half of a character"),
        (['{"prompt": "a", "meta": ' + "9" * 5000 + "}"], "line 1: an integer of more than 4,300"),
        (['{"prompt": "a"}', "[" * 100_000], "line 2: lists or objects nested more than 100 deep"),
        (['{"prompt": "a", "top_k": 1099511627776}'], r"line 1: request 1: top_k is 1099511627776"),
        (['{"prompt": "a", "top_k": ' + "9" * 400 + "}"], "line 1: request 1: top_k is a huge"),
        (['{"prompt": "a", "seed": 9223372036854775808}'], "line 1: request 1: seed is 92233"),
        (['{"prompt": "a", "max_new_tokens": 2147483648}'], "line 1.*max_new_tokens is 2147483648"),
        (['{"prompt": "a", "n": 1000000000000, "temperature": 1}'], "line 1: .*n is 10+, expected"),
        (['{"prompt": "a", "beams": 1000000000000}'], r"line 1: .*beams is 10+, expected 0"),
        (['{"prompt": "a", "temperature": NaN}'], "line 1: request 1: temperature is nan, exp"),
        (['{"prompt": "a", "temperature": 1e-320}'], "line 1: request 1: temperature is 1e-320"),
        (['{"prompt": "a", "temperature": ' + "9" * 400 + "}"], "line 1: .*temperature is a huge"),
        (['{"prompt": "a", "top_p": NaN}'], "line 1: request 1: top_p is nan, expected a share"),
        (['{"prompt": "a", "length_penalty": Infinity}'], "line 1: .*length_penalty is inf"),
        (['{"id": "x", "prompt": "a"}', "", '{"id": "x", "prompt": "b"}'], "line 3: .*'x' repeats"),
        (['{"id": 3, "prompt": "a"}', "", '{"prompt": "b"}'], "line 3: the id '3' repeats that"),
        (["", ""], "has no prompts; write one per line"),
    ],
)
def test_a_mistake_in_the_file_is_named_by_its_line(refused, tmp_path, lines, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(lines))
    out = tmp_path / "out.jsonl"
    refused(
        "prompt", f"--prompts={prompts}", "--model=none", f"--out={out}", CONFIG,
        message=rf"mmqa: {prompts}[,:] ?{message}",
    )  # fmt: skip


def test_a_config_beyond_32_bits_is_refused_before_a_model_is_loaded(refused, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital\n")
    flags = ("prompt", f"--prompts={prompts}", "--model=none", f"--out={tmp_path / 'out'}", CONFIG)
    for key, message in (
        ("top_k=1000000000000", r"config key decoding.top_k=1000000000000: at most 4,294,967"),
        ("top_k=2147483648", r"config section decoding: .*top_k is 2147483648, expected 0"),
        ("seed=-1", r"config section decoding: .*seed is -1, expected 0 to"),
        ("n=20000", r"config section decoding: .*n is 20000, expected 1 to 10,000"),
    ):
        refused(*flags, f"--config.decoding.{key}", message=message)


def test_a_mark_of_byte_order_is_not_sent_to_the_model(tmp_path):
    """Notepad writes it; as text it took three tokens of the first prompt and changed its answer."""
    path = tmp_path / "prompts.txt"
    for name, text in (("txt", "One\r\nTwo\n"), ("jsonl", '{"prompt": "One"}\n{"prompt": "Two"}')):
        path = tmp_path / f"prompts.{name}"
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert [line.request.prompt for line in read_prompts(path)] == ["One", "Two"]
    path.write_bytes('{"prompt": "One"}'.encode("utf-16"))
    refuses(r"prompts\.jsonl: is UTF-16 text, UTF-8 was expected; save", read_prompts, path)


def test_what_the_model_cannot_take_is_named_by_its_line(refused, folder, tmp_path):
    prompts = write_rows(
        tmp_path / "prompts.jsonl", [{"prompt": "short"}, {"prompt": "long " * 40}]
    )
    (tmp_path / "notes.txt").write_text("no weights")
    flags = ["prompt", "--raw", f"--prompts={prompts}", f"--out={tmp_path / 'out'}", *ENGINE]
    long = r"line 2: request 2: its prompt of 200 tokens .* engine.length = 160; shorten it"
    refused(*flags, f"--model={folder}", message=rf"{prompts}, {long}")
    refused(*flags, "--model=missing", message="--model=missing: no such file .* names smollm2")
    refused(*flags, f"--model={tmp_path / 'notes.txt'}", message="notes.txt: not a checkpoint")
    message = "neither tokenizer.json"
    refused(*flags, f"--model={folder}", f"--tokenizer={tmp_path}", message=message)
    message = "config key model.dtype='float64': expected auto"
    refused(*flags, f"--model={folder}", "--config.model.dtype=float64", message=message)
    refused(
        *flags, f"--model={folder}", "--config.model.mesh.data=4", "--config.engine.slots=6",
        message="engine.slots is 6: expected a multiple of 4, .* data=4; set it to 8,",
    )  # fmt: skip
    message = "--tokenizer=.*: a server has its own; leave it out"
    refused(*flags, "--backend=openai", "--model=gpt-4", f"--tokenizer={folder}", message=message)
    missing = tmp_path / "none.txt"
    for asked, out, message in (
        (missing, tmp_path / "o", f"{missing}: no such file"),
        (prompts, tmp_path, "--out=.*: is a folder"),
    ):
        flags = (f"--prompts={asked}", "--model=x", f"--out={out}", CONFIG)
        refused("prompt", *flags, message=message)
