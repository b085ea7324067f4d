"""LLaVA and its like: a tower before a language model."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="llava",
        model_types=("llava.families.FAMILIES", "llava.keys.MODEL_TYPES"),
        title="LLaVA, SmolVLM, InternVL, LFM2-VL, Gemma, Llama 4: a tower, any decoder",
        model="llava.network.Llava",
        config="llava.config.LlavaConfig",
        layouts=(HF_FOLDER, "haotian-liu/LLaVA's folder (--clip: its CLIP's or SigLIP's)"),
        exports="LlavaForConditionalGeneration, or the class of its family",
        takes_clip=True,
        noun="LLaVA",
        writes="decoder",
        sees=True,
        presets="llava.config.PRESETS",
        base="llava.config.BASE",
        check="llava.keys.CHECK",
    ),
)
