"""MCAN: questions and pictures attend to each other."""

from mmqa_jax.weights.registry import OWN_KEYS, RESEARCH, Architecture

FAMILIES = (
    Architecture(
        name="mcan",
        title="Prophet's MCAN",
        model="mcan.network.MCAN",
        config="mcan.network.MCANConfig",
        layouts=(RESEARCH,),
        exports=OWN_KEYS,
    ),
    Architecture(
        name="mcan_openvqa",
        title="openvqa's MCAN, small and large",
        model="mcan.network.MCANOpenVQA",
        config="mcan.network.MCANOpenVQAConfig",
        layouts=(RESEARCH,),
        exports=OWN_KEYS,
    ),
    Architecture(
        name="caption_mcan",
        title="MCAN on captions",
        model="mcan.patches.CaptionMCAN",
        config="mcan.patches.CaptionMCANConfig",
    ),
    Architecture(
        name="patch_mcan",
        title="MCAN on patches",
        model="mcan.patches.PatchMCAN",
        config="mcan.patches.PatchMCANConfig",
    ),
)
