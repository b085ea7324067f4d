"""T5, T5 1.1, Flan-T5, mT5, and Multimodal-CoT's T5, which sees pictures."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="t5",
        model_types=("t5.config.FAMILIES",),
        title="T5, T5 1.1, Flan-T5, mT5",
        model="t5.network.T5",
        config="t5.config.T5Config",
        layouts=(
            HF_FOLDER,
            "GGUF (F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q6_K ...) of t5",
            "folder of Fusion-in-Decoder or KAT (FiDT5)",
        ),
        exports="T5ForConditionalGeneration or MT5ForConditionalGeneration",
        noun="T5",
        writes="encoder-decoder",
        gguf=("t5.keys.GGUF",),
        presets="t5.config.PRESETS",
        base="t5.config.BASE",
        check="t5.keys.CHECK",
    ),
    Architecture(
        name="multimodal_t5",
        sign="T5ForMultimodalGeneration",
        title="Multimodal-CoT's T5",
        model="t5.network.MultimodalT5",
        config="t5.config.MultimodalT5Config",
        layouts=(
            "folder of mm-cot (T5ForMultimodalGeneration)",
            "a T5's folder (--set features=256: the fusion is new)",
        ),
        exports="T5ForMultimodalGeneration",
        base="t5.config.MULTIMODAL_BASE",
    ),
)
