"""Atlas: the modality classifier, MiniLM over the question; a minute on two cores.

WebQA's classifier (configs/webqa/modality.py) with MiniLM for BERT-base: its [CLS] without the
pooler, which was never trained, shorter questions, smaller batches and a higher rate.

    mmqa train --config=configs/atlas/modality.py --config.data.dir=data/atlas \\
               --workdir=runs/modality
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("frozen", "runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """`frozen`: only the linear layer is trained.

    `runlocal`: a few steps of a small model trained from scratch, for tests.
    """
    config = config_beside(__file__, "../webqa/modality.py").get_config(mode)
    if mode == "runlocal":
        return config
    config.tokenizer, config.init = "minilm:corpus", "minilm"
    config.model.trunk, config.model.pooling = "minilm_l6", "cls"
    config.model.changes = {"dropout": 0.0, "attention_dropout": 0.0}
    config.batches.update({"batch_size": 32, "length": 40})
    config.train.update({"steps": 30, "log_every": 5, "checkpoint_every": 30})
    config.train.optimizer.learning_rate = 1e-4
    if mode == "frozen":  # the linear layer alone, of random weights
        config.train.optimizer.learning_rate = 1e-2
        config.train.steps = 120
    return config
