"""One long prompt among many short ones, by the roofline: what the engine's pages leave the others.

    python -m tests.bench.mixed_lengths

Sizes are those that `auto` chooses for Qwen3-8B on a v5e-8; slots and pages are given by the engine's
own pool, step by step; a step and a batch of prompts take what `job_time` says. Nothing runs.
"""

from __future__ import annotations

import collections
import dataclasses
import types

from mmqa_jax.core.chips import chip_of_kind
from mmqa_jax.decoding.page_pool import PagePool
from mmqa_jax.decoding.sizes import SIZES, Demand, _Cost, choose_sizes
from mmqa_jax.decoding.slot_runner import most_pages, page_of
from mmqa_jax.plan.programs import preset

SHORT, LONG, NEW, COUNT = 936, 15_936, 64, 10_000


def tokens_per_second(long: int, *, paged: bool = True) -> tuple[str, float]:
    """The sizes chosen, and new tokens a second, with so many long prompts among all.

    paged: whether mean lengths are known; else each slot is as long as the longest.
    """
    chip, kind = "TPU v5e", types.SimpleNamespace
    devices = [kind(platform="tpu", device_kind=chip, process_index=0, id=n) for n in range(8)]
    model = dataclasses.replace(preset("qwen3_8b"), dtype="bfloat16")
    prompts = [SHORT] * (COUNT - long) + [LONG] * long
    demand = Demand(COUNT, max(prompts) + NEW)
    if paged:
        demand = dataclasses.replace(demand, prompt_tokens=sum(prompts), new_tokens=NEW * COUNT)
    auto = dict.fromkeys(SIZES, "auto")
    sizes = choose_sizes(model, auto, {}, devices, demand, free=15.75 * 2**30)
    engine, tensor = sizes.engine, sizes.shape["tensor"]
    copies, page = len(devices) // tensor, page_of(sizes.engine, devices[0])
    cost = _Cost(model, engine, engine.length, engine.length, page, False)
    copy, slots = cost.copy(tensor, chip_of_kind(chip)), engine.slots // copies
    pages = engine.pages // copies or slots * most_pages(engine, page)
    # The copy that has the long prompts, in the middle of its own.
    short = COUNT // copies - long
    waiting = collections.deque(
        [SHORT] * (short // 2) + [LONG] * long + [SHORT] * (short - short // 2)
    )
    pool = PagePool(slots, pages, page, engine.buckets[-1])
    count, seconds, running, ends = len(waiting), 0.0, {}, collections.defaultdict(list)
    step = 0
    while waiting or running:
        while waiting and (placed := pool.place([], waiting[0] + NEW, 0)) is not None:
            prompt = waiting.popleft()
            batch = copy.prefill(2048, 2048 / prompt, prompt / 2)
            seconds += prompt / 2048 * max(batch)
            running[placed.slot] = prompt
            ends[step + NEW].append(placed.slot)
        call = copy.decode(len(running), sum(running.values()) / len(running) + NEW / 2)
        seconds += max(call.compute, call.hbm) + call.exchange
        step += 1
        for slot in ends.pop(step, ()):
            pool.release(slot)
            del running[slot]
    return str(sizes), copies * count * NEW / seconds


def main():
    first = None
    for name, long, paged in (
        ("10,000 prompts of 936 tokens", 0, True),
        ("one of them 15,936, slots as long", 1, False),
        ("one of them 15,936, pages", 1, True),
    ):
        sizes, rate = tokens_per_second(long, paged=paged)
        first = first or rate
        print(f"{name}: {sizes}: {rate:,.0f} tokens/s with their prompts, x {rate / first:.2f}")


if __name__ == "__main__":
    main()
