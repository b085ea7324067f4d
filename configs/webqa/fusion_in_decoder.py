"""Fusion-in-Decoder: a T5 answers from many passages at once, each encoded with the question.

    mmqa search --data=data/webqa --split=train --method=bm25 --out=runs/train.jsonl
    mmqa train --config=configs/webqa/fusion_in_decoder.py --config.data.dir=data/webqa \\
               --config.passages.knowledge.rankings=runs/train.jsonl --workdir=runs/fid
    mmqa answer --data=data/webqa --model=runs/fid --sources=oracle --out=predictions.jsonl

Without rankings a question's own gold sources are read, then its negatives. Any row with a reader
takes the run as `--config.parts.reader.model=runs/fid`. The values are those of
facebookresearch/FiD (README.md:112-126), whose 64 GPUs have one question each.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a tiny model from scratch, for tests."""
    config = ConfigDict()
    config.task = "fusion_in_decoder"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "titles": True}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.init = "weights/t5-base"  # or scratch (then model.changes are its sizes)
    config.tokenizer = ""  # the model's own
    config.model = {"changes": {"dtype": "float32", "remat": "none"}}
    config.passages = {
        "count": 100,
        "length": 250,
        "entities": 40,
        "end_token": False,
        "knowledge": {"rankings": "", "entities": "", "answers": ""},
    }
    config.batches = {"batch_size": 64, "targets": 64, "threads": 2}
    config.train = {
        "steps": 15000,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 5e-5,
            "schedule": "linear",
            "warmup": 1000 / 15000,
            "weight_decay": 0.01,
            "no_decay": r"(?!)",  # torch's AdamW over model.parameters(): src/util.py:134
            "clip_norm": 1.0,
        },
        "log_every": 20,
        "checkpoint_every": 500,
        "checkpoint_local_every": 0,
        "evaluate_every": 500,
        "accumulate": 1,
        "keep": 1,
    }
    config.validate = {
        "split": "val",
        "questions": 500,
        "metric": "exact_match",
        "knowledge": {"rankings": "", "entities": "", "answers": ""},
    }
    config.inference = {
        "batch_size": auto(),
        "num_beams": 1,  # greedy
        "max_new_tokens": 49,
        "length_penalty": 1.0,
    }
    if mode == "runlocal":
        config.init, config.tokenizer = "scratch", "corpus:400"
        config.model.changes = {
            "hidden": 32,
            "head_size": 8,
            "heads": 4,
            "mlp": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
        }
        config.passages.update({"count": 3, "length": 64})
        config.batches.update({"batch_size": 2, "targets": 24})
        config.train.update({"steps": 4, "checkpoint_every": 2, "evaluate_every": 2})
        config.validate.questions = 4
        config.inference.batch_size, config.inference.max_new_tokens = 2, 8
    return config
