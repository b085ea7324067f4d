"""Oscar and Oscar+: captions and tags."""

from mmqa_jax.weights.registry import Architecture

FAMILIES = (
    Architecture(
        name="oscar",
        sign="img_feature_type",
        title="Oscar and Oscar+, captioner and tagger",
        model="oscar.network.Oscar",
        config="oscar.network.OscarConfig",
        layouts=("folder of Oscar (config.json, pytorch_model.bin or safetensors)",),
        exports="safetensors under the original's keys, with the original's config.json",
    ),
)
