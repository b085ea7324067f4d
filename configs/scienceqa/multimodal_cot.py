"""Multimodal-CoT (Zhang et al., 2023): a T5 that sees pictures writes rationales, or answers.

    mmqa train --config=configs/scienceqa/multimodal_cot.py --config.data.dir=data/scienceqa \\
               --workdir=runs/mmcot-rationale
    mmqa train --config=configs/scienceqa/multimodal_cot.py:answer \\
               --config.data.dir=data/scienceqa --workdir=runs/mmcot-answer
    mmqa run --config=configs/scienceqa/tables.py:mmcot_base --workdir=runs/mmcot \\
             --config.parts.rationale_model.model=runs/mmcot-rationale \\
             --config.parts.answer_model.model=runs/mmcot-answer

Values are those of amazon-science/mm-cot (README.md of February 2023): UnifiedQA of t5-base, DETR's
vectors, 20 epochs of 12,726 questions in batches of 16. The last step is used, as there. The rest
is that of transformers' Trainer (main.py:217-232): its AdamW, clipping at 1, a linear schedule
without warm-up.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto

MODES = ("rationale", "answer", "runlocal", "answer_runlocal")
_EPOCHS, _QUESTIONS, _BATCH = 20, 12_726, 16


def get_config(mode: str = "rationale") -> ConfigDict:
    """The stage `rationale` or `answer`; `runlocal`: a few steps of a tiny model from scratch."""
    answers = mode.startswith("answer")
    config = ConfigDict()
    config.task = "multimodal_cot"
    config.seed = 42
    config.data = {"dir": "", "split": "train"}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.init = "downloads/unifiedqa-t5-base"  # a published T5, mm-cot's folder, or scratch
    config.tokenizer = ""  # the model's own
    config.model = {"changes": {"dtype": "float32", "remat": "none", "features": 256}}
    config.pictures = {
        "file": "downloads/vision_features/detr.npy",
        "names": "",  # name_map.json beside it
        "vectors": 100,
        "features": 256,
    }
    config.format = "QCMG-A" if answers else "QCM-LE"
    config.captions = False
    # `padded`, the authors' protocol: labels keep the pad's id (utils_data.py:222-230) and only
    # -100 is ignored (model.py:458), so that the loss is the mean over all `targets` places.
    # `masked`: the mean over the texts' tokens.
    config.labels = "padded"
    config.batches = {
        "batch_size": _BATCH,
        "lengths": (128, 256, 512),
        "targets": 64 if answers else 512,
        "threads": 2,
    }
    config.train = {
        "steps": _EPOCHS * -(-_QUESTIONS // _BATCH),  # each epoch ends with a smaller batch there
        "optimizer": {
            "name": "transformers_adamw",
            "eps": 1e-8,
            "learning_rate": 5e-5,
            "schedule": "linear",
            "warmup": 0.0,
            "weight_decay": 0.01,
            # Trainer decays no norm and nothing named bias, T5's relative_attention_bias included.
            "no_decay": r"norm|bias|/relative/",
            "clip_norm": 1.0,
        },
        "log_every": 20,
        "checkpoint_every": 1000,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    config.inference = {"batch_size": auto()}
    if mode.endswith("runlocal"):
        config.init, config.tokenizer = "scratch", "corpus:400"
        config.model.changes = {
            "hidden": 32,
            "head_size": 8,
            "heads": 4,
            "mlp": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "features": 6,
        }
        config.pictures.update({"vectors": 3, "features": 6})
        config.batches.update({"batch_size": 2, "lengths": (128,), "targets": 64})
        config.train.update({"steps": 4, "checkpoint_every": 2})
        config.inference.batch_size = 2
    return config
