"""What embeds or judges texts and pictures."""

from mmqa_jax.weights.registry import Architecture

FAMILIES = (
    Architecture(
        name="dual_encoder",
        title="dual-stream retriever",
        model="encoders.dual_encoder.DualEncoder",
        config="encoders.dual_encoder.DualEncoderConfig",
    ),
)
