"""BART, which scores fluency."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="bart",
        model_types=("bart",),
        title="BART",
        model="bart.network.Bart",
        config="bart.network.BartConfig",
        layouts=(HF_FOLDER, "BARTScore's bart.pth (bart-large-cnn's sizes)"),
        exports="BartForConditionalGeneration",
        presets="bart.network.PRESETS",
        check="bart.keys.CHECK",
    ),
)
