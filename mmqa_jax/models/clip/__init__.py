"""CLIP: two towers, of texts and of pictures."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="clip",
        model_types=("clip",),
        title="CLIP with vision transformers",
        model="clip.network.CLIP",
        config="clip.network.CLIPConfig",
        layouts=(
            HF_FOLDER,
            "OpenAI's TorchScript archive (ViT-B-32.pt), or its state dict",
            "open_clip's folder, or its file beside open_clip_config.json",
        ),
        exports="CLIPModel",
        check="clip.keys.CHECK",
    ),
)
