"""OpenAI's API of `mmqa serve` with a T5: transformers' answers, and what it cannot do."""

import concurrent.futures

import pytest
import torch
import transformers
from served_app import openai_client, serving
from tiny_t5 import EXTRA, VOCABULARY, write_folder

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.run import _served
from mmqa_jax.serve.systems import Parts, Threads

pytestmark = pytest.mark.slow

PROMPTS = ["Which red is the sun of blue?", "Which sea is one?", "stone"]
LONGEST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("t5") / "model")


@pytest.fixture(scope="module")
def backend(folder):
    return open_backend(folder, engine={"length": 64})


@pytest.fixture(scope="module")
def client(backend):
    model = _served(backend, 8)
    parts = Parts(
        "tiny", model, "tiny", None, "vectors", {}, AskedCorpus(Corpus([])),
        Threads(4),
    )  # fmt: skip
    options = ServeOptions(timeout=300.0)
    with serving(make_app(parts, options), options) as address:
        yield openai_client(address, 300)


@pytest.fixture(scope="module")
def wanted(folder):
    """transformers' greedy answers: tokens of each prompt with their log-probabilities."""
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    tokenizer = transformers.T5Tokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = theirs.generate(
            ids, do_sample=False, max_new_tokens=LONGEST, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        tokens = made.sequences[0, 1:]
        logprobs = torch.cat(made.logits).log_softmax(-1)[range(len(tokens)), tokens]
        found.append((ids[0].tolist(), tokens.tolist(), logprobs.tolist()))
    return found


def test_completions_and_chats_are_transformers_answers(client, backend, wanted):
    own = backend.tokenizer
    texts = [own.decode([token for token in tokens if token > 1]) for _, tokens, _ in wanted]
    given = {"model": "tiny", "temperature": 0, "max_tokens": LONGEST}
    for prompt in (PROMPTS, [ids for ids, _, _ in wanted]):
        found = client.completions.create(prompt=prompt, logprobs=1, **given)
        assert [choice.text for choice in found.choices] == texts
        for choice, (_, _, logprobs) in zip(found.choices, wanted, strict=True):
            assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert found.usage.prompt_tokens == sum(len(ids) for ids, _, _ in wanted)

    def chat(prompt):
        messages = [{"role": "user", "content": prompt}]
        return client.chat.completions.create(messages=messages, **given).choices[0]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:  # at once, and each its own
        choices = list(pool.map(chat, PROMPTS))
    assert [choice.message.content for choice in choices] == texts
    reasons = {1: "stop"}
    assert [choice.finish_reason for choice in choices] == [
        reasons.get(tokens[-1], "length") for _, tokens, _ in wanted
    ]


def test_draws_and_a_chat_without_a_bound(client):
    given = {"model": "tiny", "prompt": PROMPTS[1], "temperature": 2.0, "n": 3, "seed": 5}
    first, again = (client.completions.create(**given, max_tokens=LONGEST) for _ in range(2))
    assert [one.text for one in first.choices] == [one.text for one in again.choices]
    assert len({one.text for one in first.choices}) > 1
    messages = [{"role": "user", "content": PROMPTS[0]}]
    found = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert found.usage.completion_tokens <= 64


def test_what_it_cannot_do_is_refused_with_the_reason(client):
    import openai

    def refused(message, call, **options):
        with pytest.raises(openai.BadRequestError) as error:
            call(model="tiny", **options)
        assert message in str(error.value)

    complete, chat = client.completions.create, client.chat.completions.create
    asked = [{"role": "user", "content": "Why?"}]
    system = [{"role": "system", "content": "Be brief."}]
    refused("there are no pieces to send", complete, prompt="stone", stream=True)
    refused("there are no pieces to send", chat, messages=asked, stream=True)
    refused("gives its tokens no log-probabilities", complete, prompt="stone", echo=True)
    refused("has no chat template", chat, messages=[*system, *asked])
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    refused("picture", chat, messages=[{"role": "user", "content": [picture]}])
    refused("more than engine.length = 64", complete, prompt="stone " * 60)
    refused("up to 65 tokens", complete, prompt="stone", max_tokens=65)
    refused("a token that the model lacks", complete, prompt=[3, VOCABULARY + EXTRA])
    refused("its prompt is empty", complete, prompt=" ")
    refused("temperature 0", complete, prompt="stone", temperature=1.0, logprobs=1)
    refused("neither min_p", complete, prompt="stone", presence_penalty=1.0)
    form = {"type": "json_object"}
    refused("forms of answers", chat, messages=asked, response_format=form)
