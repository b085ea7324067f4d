"""SigLIP and SigLIP 2: two towers, of texts and of pictures."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="siglip",
        model_types=("siglip", "siglip2"),
        title="SigLIP and SigLIP 2, also NaFlex",
        model="siglip.network.Siglip",
        config="siglip.network.SiglipConfig",
        layouts=(HF_FOLDER,),
        exports="SiglipModel, Siglip2Model (NaFlex)",
        check="siglip.keys.CHECK",
    ),
)
