"""LLaVA: a tower before a language model."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="llava",
        model_types=("llava.keys.MODEL_TYPES",),
        title="LLaVA: CLIP or SigLIP, and any family of decoders",
        model="llava.network.Llava",
        config="llava.network.LlavaConfig",
        layouts=(HF_FOLDER, "haotian-liu/LLaVA's folder (--clip: its CLIP's or SigLIP's)"),
        exports="LlavaForConditionalGeneration",
        takes_clip=True,
        noun="LLaVA",
        writes="decoder",
        sees=True,
        presets="llava.network.PRESETS",
        check="llava.keys.CHECK",
    ),
)
