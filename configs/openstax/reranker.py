"""OpenStax: MiniLM as a cross-encoder of paragraphs and captions, by a head of its own.

The hard negatives are files of `mmqa search --split=train` (`data.negatives`).
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: two steps, for tests."""
    config = ConfigDict()
    config.task = "reranker"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "negatives": (), "mixture": ()}
    config.data.update({"examples": "", "teacher": ""})
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = ""  # that of `init`
    config.init = "minilm"  # or a cross-encoder, an encoder, a Qwen3-Reranker, a Qwen3-VL-Reranker
    config.model = {"dropout": "none", "changes": {"dtype": "float32"}}
    config.loss = "listwise"  # pointwise, lambda; margin_mse and divergence with data.teacher
    config.batches = {"batch_size": 8, "length": 160, "num_negatives": 3, "threads": 2}
    config.train = {
        "steps": 100,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 2e-4,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
        },
        "log_every": 5,
        "checkpoint_every": 50,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    # With train.evaluate_every above 0. rankings: a file of `mmqa search --split=val`.
    config.validate = {
        "split": "val",
        "questions": 200,
        "rankings": "",
        "top_k": 20,
        "metric": "mrr",
    }
    config.inference = {"batch_size": auto()}

    if mode == "runlocal":
        config.batches.update({"batch_size": 2, "length": 48})
        config.train.update({"steps": 2, "log_every": 1, "checkpoint_every": 1})
    return config
