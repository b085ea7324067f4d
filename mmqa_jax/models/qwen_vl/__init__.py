"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, GLM-4.xV, PaddleOCR-VL: pictures of any size."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="qwen_vl",
        model_types=("qwen_vl.keys.PUBLISHED", "qwen_vl.omni.MODEL_TYPES"),
        title="Qwen2-VL, 2.5-VL, 3-VL, Qwen3.5 and 3.6, Qwen3-Omni, GLM-4.xV, PaddleOCR-VL",
        model="qwen_vl.network.QwenVL",
        config="qwen_vl.network.QwenVLConfig",
        layouts=(HF_FOLDER,),
        exports="Qwen2VLForConditionalGeneration and the others' classes of the same names",
        noun="Qwen-VL",
        writes="decoder",
        sees=True,
        presets="qwen_vl.presets.PRESETS",
        base="qwen_vl.presets.BASE",
        embeds=("qwen3_vl",),
        check="qwen_vl.keys.CHECK",
        lora="llama.lora",
    ),
)
