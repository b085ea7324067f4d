"""LLaVA-OneVision: pictures in tiles."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="onevision",
        model_types=("llava_onevision",),
        title="LLaVA-OneVision",
        model="onevision.network.Onevision",
        config="onevision.network.OnevisionConfig",
        layouts=(HF_FOLDER,),
        exports="LlavaOnevisionForConditionalGeneration",
        noun="LLaVA-OneVision",
        writes="decoder",
        sees=True,
        presets="onevision.network.PRESETS",
        base="onevision.network.BASE",
        check="onevision.keys.CHECK",
    ),
)
