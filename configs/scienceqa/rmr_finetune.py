"""Trainable RMR: SmolLM2 (or any LLaMA) learns to answer with and without retrieved triplets.

    mmqa train --config=configs/scienceqa/rmr_finetune.py --config.data.dir=data/scienceqa \\
               --workdir=runs/rmr-finetune

The run's folder, or its folder best, is then `--config.parts.llm.model` of a row and `--model` of
`mmqa prompt`. `init` is any LLaMA that `mmqa prompt --model` takes. LLaMA-2-7B:

    mmqa train --config=configs/scienceqa/rmr_finetune.py:pod --config.data.dir=data/scienceqa \\
               --config.init=weights/llama2-7b --workdir=runs/rmr-finetune-7b
"""

from ml_collections import ConfigDict

MODES = ("full", "pod", "cpu", "runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """LoRA on every projection.

    `full`: all parameters are trained.

    `pod`: all parameters of LLaMA-2-7B, on a v5e-256, a v5p-64 or 64 H100s: 256 rows of 2,048
    tokens an update, parameters and optimizer state split over all devices, products in bfloat16.
    8 H100s take the same update in 8 parts (`--config.train.accumulate=8`). Batch and rate are
    ours, as RMR trains nothing.

    `cpu`: a quarter of an hour on two cores, on the answers' texts alone (`rmr.text`), which the
    rows that choose by likelihood ask for.

    `runlocal`: a few steps of a tiny model from scratch, for tests.
    """
    config = ConfigDict()
    config.task = "language_model"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "mixture": ()}
    config.mesh = {
        **{"data": -1, "fsdp": 1, "sequence": 1, "tensor": 1},
        **{"dcn_data": -1, "dcn_fsdp": -1},
    }
    config.init = "smollm2"  # or a path, or scratch (then model.changes are its sizes)
    config.tokenizer = ""  # the model's own
    config.model = {
        "changes": {"dtype": "float32", "remat": "none"},
        "lora": {
            "rank": 16,
            "alpha": 32.0,
            "targets": (),  # every projection of a layer, without those inside experts
            "base": "compute",  # the frozen matrices, in model.changes.dtype; int8, int4, float32
        },
    }
    config.examples = {
        "templates": ("rmr.rationale", "rmr.text"),
        "shots": 3,
        "with_shots": 0.5,
        "similarity": "bimodal",
        "order": "most_similar_first",
        "learn": "completion",
        "turns": "all",  # of conversations (mmqa prepare chat); last: the last answer alone
    }
    config.library = {
        "data": "",
        "split": "train",
        "folds": 1,
        "text_model": "minilm",
        "image_model": "",
        "text": "question_and_choices",
        "modality": "",
    }
    # Rows of `length` tokens, `targets` of them learned, several examples in each.
    config.batches = {"batch_size": 8, "length": 2048, "targets": 1024, "threads": 2}
    config.train = {
        "steps": 300,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 2e-4,
            "schedule": "cosine",
            "warmup": 0.05,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
        },
        "log_every": 5,
        "checkpoint_every": 100,
        "checkpoint_local_every": 0,
        "evaluate_every": 50,
        "accumulate": 1,
        "keep": 1,
    }
    config.validate = {
        "split": "val",
        "questions": 200,
        "shots": (0, 3),
        "template": "rmr.text",
        "metric": "accuracy",
    }
    config.inference = {"batch_size": 8}

    if mode == "full":
        config.model.lora = None
        config.train.optimizer.learning_rate = 2e-5
    elif mode == "pod":
        config.init = "weights/llama2-7b"
        config.mesh.update({"data": 1, "fsdp": -1})
        config.model.changes.dtype = "bfloat16"
        config.model.lora = None
        config.batches.update({"batch_size": 256, "threads": 16})
        # bfloat16 halves each of the first three; products in int8 or fp8; see training/README.md.
        config.train.precision = {
            "parameters": "float32",
            "moments": "float32",
            "gradients": "float32",
            "products": "",
        }
        config.train.update({"ema": 0.0, "offload": ""})  # to the host: optimizer, parameters
        config.train.optimizer.learning_rate = 2e-5
        config.inference.batch_size = 256
    elif mode == "cpu":
        config.examples.update({"templates": ("rmr.text",), "with_shots": 0.25})
        config.batches.update({"batch_size": 2, "length": 512, "targets": 128})
        config.train.update({"steps": 40, "checkpoint_every": 20, "evaluate_every": 20})
        config.train.log_every = 2
        config.train.optimizer.learning_rate = 1e-3
        config.validate.update({"questions": 40, "shots": (0,), "metric": "log_likelihood"})
        config.inference.batch_size = 2
    elif mode == "runlocal":
        config.init, config.tokenizer = "scratch", "corpus:400"
        config.model.changes = {
            "hidden": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "mlp": 64,
            "positions": 1024,
            "tied": True,
        }
        config.library.text_model, config.examples.similarity = "", "random"
        config.batches.update({"batch_size": 2, "length": 1024, "targets": 512})
        config.train.update({"steps": 4, "checkpoint_every": 2, "evaluate_every": 2})
        config.validate.update({"questions": 4, "shots": (0, 1)})
        config.inference.batch_size = 2
    return config
