"""Atlas: source selection with cached sources (models/vlp/two_sided.py).

As rerank.py, but the question attends to its source in the upper layers alone, and tokens that
both share are marked on the question's side. `data.negatives` names rankings of the training
questions, whose sources are further negatives: a model that ranks the whole collection sees more
than the candidates that a question comes with.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests."""
    config = config_beside(__file__, "rerank.py").get_config(mode)
    config.data.negatives = ()
    config.model.joint_layers = 1
    config.model.match_type = 1
    config.packing.match_types = ()
    return config
