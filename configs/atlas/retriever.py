"""Atlas: MiniLM tuned in 40 steps on questions and gold sources, pictures by captions."""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("runlocal", "token")


def get_config(mode: str = "") -> ConfigDict:
    """Modes as of configs/openstax/retriever.py."""
    config = config_beside(__file__, "../openstax/retriever.py").get_config(mode)
    if mode != "runlocal":
        config.batches.update({"batch_size": 16, "query_length": 32, "source_lengths": (48,)})
        config.train.update({"steps": 40, "checkpoint_every": 40})
    return config
