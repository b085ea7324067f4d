"""Atlas: source selection with sources that are read once (models/two_sided_vlp.py).

As rerank.py, but the question sees its source in the upper layers alone, and words that both
sides share are marked on the question's side. `data.negatives` names rankings of the training
questions, whose sources are further negatives: a model that ranks the whole collection meets more
than the candidates a question comes with.
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
