"""Which models of three published lists are read here, by their `model_type` or class."""

from __future__ import annotations

from typing import Any

from mmqa_jax.models.encoders.page_retrievers import RETRIEVERS
from mmqa_jax.weights.registry import architectures
from tests.bench import Options

# Name -> `model_type` of its config.json; of retrievers the class of its `architectures`.
LISTS = {
    "CiteVQA's open readers": {  # opendatalab/CiteVQA README.md, the results of 2026
        "Qwen3-VL-235B-A22B": "qwen3_vl_moe",
        "Gemma-4-31B": "gemma4",
        "Kimi-K2.5": "kimi_k25",
        "Qwen3.5-397B-A17B": "qwen3_5_moe",
        "Qwen3.5-27B": "qwen3_5",
        "Qwen3-VL-32B": "qwen3_vl",
        "Qwen3.5-122B-A10B": "qwen3_5_moe",
        "Qwen3.5-9B": "qwen3_5",
        "Qwen3.5-35B-A3B": "qwen3_5_moe",
        "Qwen3-VL-30B-A3B": "qwen3_vl_moe",
        "Qwen3-VL-8B": "qwen3_vl",
        "Gemma-4-26B-A4B": "gemma4",
    },
    "tpu-inference's models": {  # vllm-project/tpu-inference docs/includes/model_support.md
        "DeepSeek-V3.1": "deepseek_v3",
        "gemma-3-27b-it": "gemma3",
        "Llama-3.1-8B-Instruct": "llama",
        "Llama-3.3-70B-Instruct": "llama",
        "Llama-4-Maverick-17B-128E-Instruct": "llama4",
        "Llama-Guard-4-12B, multimodal": "llama4",
        "Llama-Guard-4-12B, text alone": "llama4",
        "Kimi-K2-Thinking": "kimi_k2",
        "gpt-oss-120b": "gpt_oss",
        "Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
        "Qwen3-30B-A3B": "qwen3_moe",
        "Qwen3-32B": "qwen3",
        "Qwen3-4B": "qwen3",
        "Qwen3-Coder-480B-A35B-Instruct": "qwen3_moe",
        "Qwen3-Omni-30B-A3B-Instruct": "qwen3_omni_moe",
    },
    "colpali_engine's retrievers": {  # illuin-tech/colpali README.md, March 2026
        **dict.fromkeys(("colpali-v1.1", "colpali-v1.2", "colpali-v1.3"), "ColPali"),
        **dict.fromkeys(("colqwen2-v0.1", "colqwen2-v1.0"), "ColQwen2"),
        **dict.fromkeys(("colqwen2.5-v0.1", "colqwen2.5-v0.2"), "ColQwen2_5"),
        **dict.fromkeys(("colSmol-256M", "colSmol-500M"), "ColIdefics3"),
        **{"tomoro-colqwen3-embed-4b": "ColQwen3", "colqwen3.5-4.5B": "ColQwen3_5"},
        **{"ColNetraEmbed": "ColGemma3", "NetraEmbed": "BiGemma3"},
    },
}


def run(options: Options) -> dict[str, Any]:
    """Looks each model's type up in the registry; it computes nothing."""
    known = {kind for entry in architectures().values() for kind in entry.known_types}
    known |= {*RETRIEVERS}
    rows = [
        {"name": name, "list": title, "type": kind, "read": kind in known}
        for title, models in LISTS.items()
        for name, kind in models.items()
    ]
    lines = ["| list | read | not read |", "| --- | ---: | --- |"]
    for title, models in LISTS.items():
        missing = [f"{name} (`{kind}`)" for name, kind in models.items() if kind not in known]
        count = f"{len(models) - len(missing)} of {len(models)}"
        lines.append(f"| {title} | {count} | {', '.join(missing) or '–'} |")
    return {"bench": "lists", "device": "none", "rows": rows, "lines": lines}
