"""Atlas: VLP answers (WebQA section 5.2) from gold sources, with our augmentations."""

from ml_collections import ConfigDict


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests."""
    config = ConfigDict()
    config.task = "answer"
    config.seed = 0
    config.data = {"dir": "", "split": "train"}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1}
    config.tokenizer = "minilm:corpus"  # see contrastive.py
    config.init = "minilm"
    config.pictures = {"size": 48, "resize": "squash"}
    config.model = {
        "trunk": "minilm_l6",
        "changes": {"layers": 3, "dropout": 0.0, "attention_dropout": 0.0},
        "frontend": "patches",
        "patch": 16,
        "whole": True,
        "colors": True,
        "tags": True,
        "visual_hidden": (768,),
        "copy_head": True,
    }
    config.packing = {
        "buckets": ((0, 64), (0, 96), (0, 128), (0, 176), (1, 64), (2, 96)),
        "max_source_tokens": 128,
        "max_question_tokens": 32,
        "max_answer_tokens": 28,
        "per_source": True,
        "match_type": 1,
        "positions_after_regions": False,
    }
    config.masking = {"mask_prob": 0.5, "max_pred": 24, "probes": True}
    config.augment = {"entities": 0.7, "palette": 0.7}
    config.batches = {
        "batch_size": 32,
        "max_sources": 2,
        "distractor_prob": 0.2,
        "no_source_prob": 0.1,
        "slack": 8,
        "threads": 2,
    }
    config.train = {
        "steps": 400,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 7e-4,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
            "multipliers": (("^region_", 3.0),),
        },
        "log_every": 10,
        "checkpoint_every": 100,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    config.inference = {
        "batch_size": 64,
        "num_beams": 5,
        "max_new_tokens": 28,
        "length_penalty": 0.0,
        "only_best": True,  # a question stops once its best beam is certain
    }

    if mode == "runlocal":
        config.tokenizer, config.init = "corpus:2000", "scratch"
        config.model.changes = {"hidden": 64, "layers": 2, "heads": 4, "mlp": 128}
        config.batches.batch_size = 8
        config.train.steps, config.train.checkpoint_every = 4, 2
        config.train.log_every = 2
        config.inference.max_new_tokens = 8
    return config
