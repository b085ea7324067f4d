"""LLaMA and its relatives: one network with switches."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="llama",
        model_types=("llama.families.FAMILIES",),
        title="LLaMA, SmolLM, Mistral, Ministral, Qwen2 and 3, Phi-3, OLMo 2, Granite, Cohere",
        model="llama.network.Llama",
        config="llama.config.LlamaConfig",
        layouts=(
            HF_FOLDER,
            "Meta's folder (params.json, consolidated.*.pth)",
            "llama2.c's .bin",
            "GGUF (F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q6_K ...) of llama, qwen2, qwen3",
        ),
        exports="LlamaForCausalLM, Qwen3ForCausalLM, ...: the family's class",
        noun="LLaMA",
        writes="decoder",
        gguf=("llama.gguf.ARCHITECTURES",),
        presets="llama.config.PRESETS",
        base="llama.config.BASE",
        check="llama.keys.CHECK",
        lora="llama.lora",
        peft=True,
        layers_apart="llama.keys.layers_apart",
    ),
)
