"""A T5 learns to answer: the kind of the tables' trained baselines. The recipe is ours.

    mmqa train --config=configs/scienceqa/t5_finetune.py --config.data.dir=data/scienceqa \\
               --config.init=weights/flan-t5-base --workdir=runs/t5-finetune

The run's folder, or its folder best, is then `--config.parts.llm.model` of a row and `--model` of
`mmqa prompt`. `init` is a T5, Flan-T5 or mT5 as `mmqa prompt --model` takes it. Any folder of
`mmqa prepare` will do as data: questions with options, or with `answers` alone; `mmqa prepare
corpus` makes one of a questions.jsonl of `{"id", "split", "question", "answers"}`.
"""

from ml_collections import ConfigDict

MODES = ("rationale", "pod", "runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """The answer behind UnifiedQA's question and options.

    `rationale`: rationale and answer behind ScienceQA's prompt, the texts of MM-CoT's one-stage
    baseline; its loss counts the pads, too. Five epochs there are 8 x 10^3 steps of 8.

    `pod`: Flan-T5-XL on a v5e-64 or 16 H100s: 128 prompts an update, parameters and optimizer state
    split over all devices, products in bfloat16. The rate is ours.

    `runlocal`: a few steps of a tiny model from scratch, for tests.
    """
    config = ConfigDict()
    config.task = "seq2seq"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "mixture": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.init = "weights/flan-t5-base"  # or scratch (then model.changes are its sizes)
    config.tokenizer = ""  # the model's own
    config.model = {"changes": {"dtype": "float32", "remat": "none"}}
    config.examples = {
        "templates": ("seq2seq.unifiedqa",),
        "shots": 0,
        "with_shots": 0.0,
        "similarity": "random",
        "order": "most_similar_first",
        "learn": "completion",
    }
    config.library = {
        "data": "",
        "split": "train",
        "folds": 1,
        "text_model": "",
        "image_model": "",
        "text": "question_and_choices",
        "modality": "",
    }
    # Prompts are padded to the first of `lengths` that holds them; `targets` tokens of an answer.
    config.batches = {"batch_size": 8, "lengths": (128, 256, 512), "targets": 32, "threads": 2}
    config.train = {
        "steps": 8000,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 5e-5,  # MM-CoT's
            "schedule": "linear",
            "warmup": 0.0,
            "weight_decay": 0.01,
            "clip_norm": 1.0,
        },
        "log_every": 20,
        "checkpoint_every": 1000,
        "checkpoint_local_every": 0,
        "evaluate_every": 1000,
        "accumulate": 1,
        "keep": 1,
    }
    config.validate = {
        "split": "val",
        "questions": 200,
        "shots": (0,),
        "template": "seq2seq.unifiedqa",
        "metric": "accuracy",
    }
    config.inference = {"batch_size": 8}

    if mode == "rationale":
        config.examples.templates = ("rmr.rationale",)
        config.batches.targets = 512
        config.validate.template = "rmr.text"
    elif mode == "pod":
        config.init = "weights/flan-t5-xl"
        config.mesh.update({"data": 1, "fsdp": -1})
        config.model.changes.dtype = "bfloat16"
        config.batches.update({"batch_size": 128, "threads": 16})
        config.train.update({"steps": 500, "checkpoint_every": 100, "evaluate_every": 100})
        config.inference.batch_size = 128
    elif mode == "runlocal":
        config.init, config.tokenizer = "scratch", "corpus:400"
        config.model.changes = {
            "hidden": 32,
            "head_size": 8,
            "heads": 4,
            "mlp": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
        }
        config.batches.update({"batch_size": 2, "lengths": (512, 1024), "targets": 64})
        config.train.update({"steps": 4, "checkpoint_every": 2, "evaluate_every": 2})
        config.validate.questions = 4
        config.inference.batch_size = 2
    return config
