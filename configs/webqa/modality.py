"""WebQA's modality classifier: BERT-base over the question, text or image (section 6.2, footnote).

Facts: WebQA_Baseline vlp/CLIP_retrieval_experiments/bert_classifier.py. One epoch of batches of
512, 64 tokens a question, AdamW (transformers': eps 1e-6, no weight decay, constant rate 2e-5), the
gradient clipped to 1. The script means to freeze BERT, but freezes a copy that it does not use
(lines 30, 217, 272-278): what ran is fine-tuning, the default here; `frozen` is what it meant.

    mmqa train --config=configs/webqa/modality.py --config.data.dir=data/webqa \\
               --workdir=runs/modality

The quotes around WebQA's image questions are left out, since they give the label away.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("frozen", "runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """`frozen`: only the linear layer is trained.

    `runlocal`: a few steps of a small model trained from scratch, for tests.
    """
    config = ConfigDict()
    config.task = "modality"
    config.seed = 0
    config.data = {"dir": "", "split": "train"}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = "downloads/bert-base-cased/tokenizer.json"
    config.init = "downloads/bert-base-cased"
    config.model = {
        "trunk": "bert_base_cased",
        "changes": {"dtype": "float32", "remat": "none"},
        "pooling": "pooler",
        "frozen": mode == "frozen",
    }
    config.batches = {"batch_size": 512, "length": 64, "threads": 2}
    config.train = {
        "steps": 72,  # one epoch of 36,766 questions
        "optimizer": {
            "name": "transformers_adamw",
            "learning_rate": 2e-5,
            "schedule": "constant",
            "warmup": 0.0,
            "eps": 1e-6,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
        },
        "log_every": 1,
        "checkpoint_every": 36,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    config.inference = {"batch_size": auto()}

    if mode == "runlocal":
        config_beside(__file__, "../small.py").make_small(config)
    return config
