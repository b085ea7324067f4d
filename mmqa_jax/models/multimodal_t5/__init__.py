"""Multimodal-CoT's T5, which sees pictures."""

from mmqa_jax.weights.registry import Architecture

FAMILIES = (
    Architecture(
        name="multimodal_t5",
        sign="T5ForMultimodalGeneration",
        title="Multimodal-CoT's T5",
        model="multimodal_t5.network.MultimodalT5",
        config="multimodal_t5.network.MultimodalT5Config",
        layouts=(
            "folder of mm-cot (T5ForMultimodalGeneration)",
            "a T5's folder (--set features=256: the fusion is new)",
        ),
        exports="T5ForMultimodalGeneration",
        base="multimodal_t5.network.BASE",
    ),
)
