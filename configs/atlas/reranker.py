"""Atlas: MiniLM as a cross-encoder of questions and sources, pictures by captions.

The hard negatives are what the tuned retriever finds (`data.negatives`).
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """Modes as of configs/openstax/reranker.py."""
    config = config_beside(__file__, "../openstax/reranker.py").get_config(mode)
    if mode != "runlocal":
        config.batches.update({"batch_size": 16, "length": 80})
    return config
