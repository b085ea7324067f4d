"""CLIP and SigLIP: two towers, of texts and of pictures."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="clip",
        model_types=("clip",),
        title="CLIP with vision transformers",
        model="two_towers.network.CLIP",
        config="two_towers.config.CLIPConfig",
        layouts=(
            HF_FOLDER,
            "OpenAI's TorchScript archive (ViT-B-32.pt), or its state dict",
            "open_clip's folder, or its file beside open_clip_config.json",
        ),
        exports="CLIPModel",
        takes_preprocessing=True,
        presets="two_towers.config.CLIPS",
        embeds=("clip",),
        check="two_towers.keys.CLIP_CHECK",
    ),
    Architecture(
        name="siglip",
        model_types=("siglip", "siglip2"),
        title="SigLIP and SigLIP 2, also NaFlex",
        model="two_towers.network.Siglip",
        config="two_towers.config.SiglipConfig",
        layouts=(HF_FOLDER,),
        exports="SiglipModel, Siglip2Model (NaFlex)",
        presets="two_towers.config.SIGLIPS",
        embeds=("siglip", "siglip2"),
        check="two_towers.keys.SIGLIP_CHECK",
    ),
)
