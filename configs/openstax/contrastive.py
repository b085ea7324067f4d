"""OpenStax: the dual encoder on links from a paragraph to the figure that it speaks of.

MiniLM reads paragraphs and captions, a small vision tower from scratch the pictures. The hard
negatives are what BM25 finds for the training paragraphs (`data.negatives`, files of
`mmqa search --split=train`). bfloat16: on a CPU with AMX three times faster than float32.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("runlocal", "zero_shot")


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests.

    `zero_shot`: pictures by their captions alone; `mmqa train --only_start` takes MiniLM as it is.
    """
    config = ConfigDict()
    config.task = "contrastive"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "negatives": (), "mixture": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = "minilm"
    config.init = "minilm"
    config.pictures = {"size": 64, "resize": "squash"}
    config.model = {
        "clip": "",
        "trunk": "minilm_l6",
        "changes": {"dropout": 0.0, "attention_dropout": 0.0, "dtype": "bfloat16"},
        "vision": {
            "image_size": 64,
            "patch_size": 16,
            "width": 192,
            "layers": 4,
            "heads": 3,
            "mlp_width": 768,
            "dtype": "bfloat16",
        },
        "fusion": "mean",
        "picture_gate": 0.1,
    }
    config.batches = {
        "batch_size": 48,
        "query_length": 128,  # half of the paragraphs have at most 150 tokens
        "source_lengths": (96,),
        "num_negatives": 1,
        "second_hop": False,
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
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    # With train.evaluate_every above 0: logged as eval/..., the best step's weights kept.
    config.validate = {"split": "val", "questions": 200, "sources": 2000, "metric": "recall@10"}
    config.inference = {"batch_size": auto(), "buckets": (32, 64, 96, 128, 192, 256)}

    if mode == "zero_shot":
        config.model.picture_gate = 0.0
    if mode == "runlocal":
        config_beside(__file__, "../small.py").make_small(config)
    return config
