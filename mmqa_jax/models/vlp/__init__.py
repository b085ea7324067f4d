"""VLP, WebQA's baseline, and what we add to it."""

from mmqa_jax.weights.registry import OWN_KEYS, RESEARCH, Architecture

FAMILIES = (
    Architecture(
        name="vlp",
        title="VLP and WebQA_Baseline",
        model="vlp.network.VLP",
        config="vlp.network.VLPConfig",
        has_variants=True,
        layouts=(RESEARCH,),
        exports=OWN_KEYS,
    ),
)
