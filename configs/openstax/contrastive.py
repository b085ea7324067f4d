"""OpenStax: the dual encoder on links from a paragraph to the figure that it speaks of.

MiniLM reads paragraphs and captions, a small vision tower from scratch the pictures. The hard
negatives are what BM25 finds for the training paragraphs (`data.negatives`, files of
`mmqa search --split=train`). bfloat16: on a CPU with AMX three times faster than float32.
"""

from ml_collections import ConfigDict

MODES = ("runlocal", "zero_shot")


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests.

    `zero_shot`: MiniLM as published, pictures by their captions alone (one step of no length).
    """
    config = ConfigDict()
    config.task = "contrastive"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "negatives": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1}
    config.tokenizer = "minilm"
    config.init = "minilm"
    config.pictures = {"size": 64, "resize": "squash"}
    config.model = {
        "clip": "",
        "trunk": "minilm_l6",
        "changes": {"dropout": 0.0, "attention_dropout": 0.0, "dtype": "bfloat16"},
        "vision": {"image_size": 64, "patch_size": 16, "dtype": "bfloat16"},
        "fusion": "mean",
        "picture_gate": 0.1,
    }
    config.batches = {
        "batch_size": 48,
        "query_length": 128,  # half of the paragraphs have at most 150 tokens
        "source_lengths": (96,),
        "num_negatives": 1,
        "two_pass": False,
        "slack": 0,
        "threads": 2,
    }
    config.train = {
        "steps": 75,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 1e-4,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
            "multipliers": (("^vision/", 5.0),),
        },
        "log_every": 5,
        "checkpoint_every": 25,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    config.inference = {"batch_size": 64, "buckets": (32, 64, 96, 128, 192, 256)}

    if mode == "zero_shot":
        config.model.picture_gate = 0.0
        config.batches.batch_size, config.batches.query_length = 8, 16
        config.batches.source_lengths = (16,)
        config.train.steps, config.train.optimizer.learning_rate = 1, 1e-30
    if mode == "runlocal":
        config.tokenizer, config.init = "corpus:2000", "scratch"
        config.model.changes = {"hidden": 64, "layers": 2, "heads": 4, "mlp": 128}
        config.model.vision.update(width=64, layers=2, heads=4, mlp_width=128, embed_dim=64)
        config.batches.batch_size = 8
        config.train.steps, config.train.checkpoint_every = 4, 2
        config.train.log_every = 2
    return config
