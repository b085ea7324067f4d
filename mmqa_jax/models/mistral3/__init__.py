"""Mistral Small 3.1 and Ministral 3 with pictures."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="mistral3",
        model_types=("mistral3",),
        title="Mistral Small 3.1, Ministral 3: pictures of any size, row by row",
        model="mistral3.network.Mistral3",
        config="mistral3.network.Mistral3Config",
        layouts=(HF_FOLDER,),
        exports="Mistral3ForConditionalGeneration",
        noun="Mistral 3",
        writes="decoder",
        sees=True,
        presets="mistral3.network.PRESETS",
        check="mistral3.keys.CHECK",
    ),
)
