"""Trainable RMR: the retriever of triplets learns from what helped a language model to answer.

    mmqa judge --config=configs/scienceqa/rmr_retriever.py:judge --config.data.dir=data/scienceqa \\
               --workdir=runs/example-scores
    mmqa train --config=configs/scienceqa/rmr_retriever.py --config.data.dir=data/scienceqa \\
               --config.data.scores=runs/example-scores --workdir=runs/rmr-retriever

The run's folder, or its folder best, is then `--config.parts.library.text_model` of a row. The
text tower is MiniLM, or with `model.clip` and `init` a converted CLIP's.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("judge", "runlocal")
_TEXT = "question_and_choices"  # what is embedded, as in the rows


def get_config(mode: str = "") -> ConfigDict:
    """`judge`: the language model scores the candidates, for `mmqa judge`.

    `runlocal`: a few steps of a small model from scratch, for tests.
    """
    return _judging() if mode == "judge" else _training(mode)


def _judging() -> ConfigDict:
    rows = config_beside(__file__, "../rows.py")
    config = ConfigDict()
    config.data = {"dir": "", "splits": ("train", "val")}
    config.parts = {
        "llm": rows.language_model("smollm2", length=2048),
        "library": rows.library(text=_TEXT),
    }
    config.judge = {
        "candidates": 8,
        "similarity": "bimodal",
        "template": "rmr.text",
        "score": "sum",
        "questions": 0,
    }
    return config


def _training(mode: str) -> ConfigDict:
    config = ConfigDict()
    config.task = "example_retrieval"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "scores": "", "text": _TEXT}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = "minilm"
    config.init = "minilm"
    # Read by the row that uses the run; the vision tower is not trained.
    config.pictures = {"size": 32, "resize": "squash"}
    config.model = {
        "clip": "",
        "trunk": "minilm_l6",
        "changes": {"dropout": 0.0, "attention_dropout": 0.0},
        "vision": {
            "image_size": 32,
            "patch_size": 16,
            "width": 32,
            "layers": 1,
            "heads": 2,
            "mlp_width": 64,
        },
        "fusion": "mean",
        "picture_gate": 1.0,
    }
    config.target_temperature = 0.5
    config.batches = {"batch_size": 16, "length": 128, "candidates": 8, "threads": 2}
    config.train = {
        "steps": 200,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 2e-5,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
        },
        "log_every": 5,
        "checkpoint_every": 100,
        "checkpoint_local_every": 0,
        "evaluate_every": 20,
        "accumulate": 1,
        "keep": 1,
    }
    config.validate = {"split": "val", "metric": "score_of_nearest"}
    config.inference = {"batch_size": auto(), "buckets": (16, 24, 32, 48, 64, 128)}

    if mode == "runlocal":
        config_beside(__file__, "../small.py").make_small(config)
        config.batches.update({"batch_size": 4, "candidates": 2})
    return config
