"""CLIP's ResNets."""

from mmqa_jax.weights.registry import OWN_KEYS, RESEARCH, Architecture

FAMILIES = (
    Architecture(
        name="modified_resnet",
        title="image tower of CLIP's RN50 to RN50x64",
        model="modified_resnet.network.ModifiedResNet",
        config="modified_resnet.network.ModifiedResNetConfig",
        layouts=("OpenAI's TorchScript archive (RN50x64.pt)", RESEARCH),
        exports=OWN_KEYS,
    ),
)
