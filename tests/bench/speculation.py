"""`python -m tests.bench speculation`: steps of several tokens, proposed or looked up, against steps of one.

SmolLM2 in float32 answers questions of OpenStax (../shared/data) with paragraphs of the same book
page in front, as a reader does. A row is a number of slots and of tokens in a step: `ours` and
`peer` (a token a step) are new tokens a second of a processor, prompts being cached from the round
before; `tokens_per_step` is how many a step gives a sequence. `draft_4` has the model itself as
draft: all that it proposes is right, which is the most that a step gives, not a gain.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Sequence
from typing import Any

from mmqa_jax.core.host import host_name
from tests.bench import Options
from tests.shared_data import SHARED

_SLOTS, _TOKENS = (1, 16), (2, 4, 8)
_QUESTIONS = {"small": 6, "full": 32}
_NEW, _CONTEXT = 48, 1_600  # new tokens of an answer, characters of paragraphs
ROWS = (
    *(f"slots_{slots}_look_up_{tokens}" for slots in _SLOTS for tokens in _TOKENS),
    *(f"slots_{slots}_draft_4" for slots in _SLOTS),
)


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected, over 32 questions, of small over 6."""
    prompts, rows = _prompts(_QUESTIONS[options.size or "full"]), []
    for slots in _SLOTS:
        wanted = [x for x in options.chosen(ROWS) if x.startswith(f"slots_{slots}_")]
        if not wanted:
            continue
        answers, peer, _ = _answered(prompts, slots, 1, draft=False, rounds=options.rounds)
        for name in wanted:
            how, tokens = name.rsplit("_", 1)
            got, speed, per_step = _answered(
                prompts,
                slots,
                int(tokens),
                draft=how.endswith("draft"),
                rounds=options.rounds,
            )
            same = sum(x == y for x, y in zip(got, answers, strict=True))
            row = {"name": name, "ours": speed, "peer": peer, "ratio": speed / peer}
            row |= {"unit": "tokens/s", "tokens_per_step": round(per_step, 2)}
            rows.append(row | {"equal_answers": f"{same} of {len(answers)}"})
    return {"bench": "speculation", "device": host_name(), "rows": rows}


def _answered(
    prompts: Sequence[str], slots: int, speculate: int, *, draft: bool, rounds: int | None
) -> tuple[list[tuple[int, ...]], float, float]:
    """Answers, tokens a second of a processor (the best round), and tokens a step gave a sequence."""
    from mmqa_jax.decoding.engine import Engine
    from mmqa_jax.decoding.requests import Request
    from mmqa_jax.decoding.slot_runner import EngineConfig
    from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
    from mmqa_jax.weights.bundled import smollm2_path
    from mmqa_jax.weights.published import load_published

    path = smollm2_path()
    tokenizer = open_text_tokenizer(path)
    sizes = EngineConfig(slots=slots, length=768, speculate=speculate)
    options = {"end_ids": tokenizer.end_ids, "config": sizes}
    proposing = load_published("llama", path) if draft else None
    engine = Engine(load_published("llama", path), tokenizer, **options, draft=proposing)

    def seconds(new: int) -> tuple[float, dict[int, tuple[int, ...]]]:
        requests = [Request(n, prompt, new) for n, prompt in enumerate(prompts)]
        began = time.process_time()
        answers = {result.id: result.candidates[0].tokens for result in engine.generate(requests)}
        return time.process_time() - began, answers

    seconds(_NEW)  # compiles, and encodes the prompts
    counts = engine.throughput
    first_tokens, first_turns = counts.decode_tokens, counts.turns
    times = []
    for _ in range(rounds or 2):
        alone, _ = seconds(1)  # what each prompt's last chunk takes
        whole, answers = seconds(_NEW)
        times.append(whole - alone)
    tokens, turns = counts.decode_tokens - first_tokens, counts.turns - first_turns
    speed = tokens / len(times) / min(times)
    return [answers[n] for n in range(len(prompts))], speed, tokens / turns


def _prompts(count: int) -> list[str]:
    """Conversations as SmolLM2's template writes them: paragraphs of a page, and a question on it."""
    pages: dict[str, list[str]] = collections.defaultdict(list)
    for line in (SHARED / "openstax/sources.jsonl").open(encoding="utf-8"):
        source = json.loads(line)
        if source["modality"] == "text":
            pages[source["id"].rsplit("/", 1)[0]].append(source["text"])
    prompts = []
    for line in (SHARED / "openstax/questions.jsonl").open(encoding="utf-8"):
        question = json.loads(line)
        page = question["id"].removeprefix("mcq/").rsplit("/", 1)[0]
        if question["kind"] != "multiple_choice" or not pages[page]:
            continue
        context = "\n".join(pages.pop(page))[:_CONTEXT]
        asked = f"{context}\n\nAnswer from the text, with its words: {question['question']}"
        prompts.append(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
    return prompts[:: max(1, len(prompts) // count)][:count]
