"""What prompts encoded inside decode steps would gain, by the roofline; nothing runs.

    python -m tests.bench.mixed_steps

10,000 prompts of 1,000 tokens with 200 new ones on a v5e-8, with the sizes that `auto` chooses. Today
prompts are batches of 2,048 tokens between steps (`apart`). In mixed steps each has its share of the
prompts' tokens, whose products read the weights for both; a TPU's kernels run one after the other, so
that attention of slots still waits for the cache (`mixed`). Were its reads hidden beside products, too,
a step would take the longest of all parts (`at best`), as no program of XLA does.
"""

from __future__ import annotations

import dataclasses
import types

from mmqa_jax.core.chips import chip_of_kind
from mmqa_jax.decoding.sizes import SIZES, Demand, _Cost, choose_sizes
from mmqa_jax.decoding.slot_runner import page_of
from mmqa_jax.plan.programs import preset

COUNT, PROMPT, NEW, BATCH = 10_000, 1_000, 200, 2_048


def seconds(name: str, weights: str, mesh: dict[str, int]) -> tuple[str, float, float, float]:
    """The sizes, and seconds of the job apart, mixed and at best."""
    chip, kind = "TPU v5e", types.SimpleNamespace
    devices = [kind(platform="tpu", device_kind=chip, process_index=0, id=n) for n in range(8)]
    model = dataclasses.replace(preset(name), dtype="bfloat16")
    demand = Demand(COUNT, PROMPT + NEW, PROMPT * COUNT, NEW * COUNT)
    cache = "int8" if weights == "int8" else None
    settings = dict.fromkeys(SIZES, "auto") | {"weights": weights, "cache_dtype": cache}
    sizes = choose_sizes(model, settings, mesh, devices, demand, free=15.75 * 2**30)
    engine, tensor = sizes.engine, sizes.shape["tensor"]
    copies = len(devices) // tensor
    cost = _Cost(model, engine, engine.length, engine.length, page_of(engine, devices[0]), False)
    copy, slots = cost.copy(tensor, chip_of_kind(chip)), engine.slots // copies
    steps = COUNT / copies / slots * NEW
    of_step = COUNT / copies * PROMPT / steps  # tokens of prompts
    columns = PROMPT + NEW / 2

    prompts = copy.prefill(BATCH, BATCH / PROMPT, PROMPT / 2)
    decode = copy.decode(slots, columns)
    apart = COUNT / copies * PROMPT / BATCH * max(prompts)
    apart += steps * (max(decode.compute, decode.hbm) + decode.exchange)

    read = slots * columns * copy.token_bytes
    tokens = of_step + slots
    seen = (of_step * PROMPT / 2 + slots * columns) / tokens
    products = copy._call(tokens, of_step / PROMPT + slots, seen, of_step * copy.token_bytes)
    of_cache = read / copy.chip.hbm_rate
    mixed = steps * (max(products) + of_cache)
    best = steps * max(products.compute, products.hbm + of_cache, products.exchange)
    return str(sizes), apart, mixed, best


def main():
    for name, weights, mesh in (
        ("qwen3_8b", "given", {}),
        ("qwen3_8b", "given", {"data": 1, "tensor": 8}),
        ("llama2_7b", "int8", {}),
        ("llama2_7b", "int8", {"data": 1, "tensor": 8}),
    ):
        sizes, apart, mixed, best = seconds(name, weights, mesh)
        print(
            f"{name} {weights}: {sizes}: {apart:.0f} s apart, {mixed:.0f} s mixed ({mixed / apart:.3f}), "
            f"{best:.0f} s at best ({best / apart:.3f})"
        )


if __name__ == "__main__":
    main()
