"""Prophet's stage 1 on OK-VQA: the MCAN that gives answer candidates and answer-aware examples.

Facts: MILVLG/prophet configs/{pretrain,finetune}.yml, prophet/stage1/{pretrain,finetune}.py,
utils/optim.py; MILVLG/openvqa configs/vqa/mcan_small.yml, openvqa/utils/optim.py. The originals
sum the loss over a batch of 64, we take its mean: `clip_norm` and `eps` are divided by 64.

    mmqa prepare vqav2 --raw=downloads/vqav2 --out=data/vqav2
    mmqa train --config=configs/okvqa/mcan.py:pretrain --config.data.dir=data/vqav2 \\
               --workdir=runs/mcan_pretrain
    mmqa train --config=configs/okvqa/mcan.py:head --config.init=runs/mcan_pretrain \\
               --config.answers.base=runs/mcan_pretrain --workdir=runs/mcan_head
    mmqa train --config=configs/okvqa/mcan.py:finetune --config.init=runs/mcan_head \\
               --config.answers.base=runs/mcan_pretrain --workdir=runs/mcan
    mmqa candidates --data=data/okvqa --model runs/mcan --out=runs/candidates

Without pictures: `small`, on one half of the questions that have captions, and the other half.

    mmqa train --config=configs/okvqa/mcan.py:small --config.data.fold=0 --workdir=runs/mcan_0
    mmqa train --config=configs/okvqa/mcan.py:small --config.data.fold=1 --workdir=runs/mcan_1
    mmqa candidates --data=data/okvqa --model runs/mcan_0 runs/mcan_1 --examples_split=test \\
                    --out=runs/candidates
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto

MODES = ("pretrain", "pretrain_pod", "head", "finetune", "openvqa", "small", "runlocal")

_BATCH = 64  # over which the originals sum the loss
_VQAV2_QUESTIONS = 443_757  # of its train split
_VQAV2, _OKVQA = _VQAV2_QUESTIONS // _BATCH, 9_009 // _BATCH  # batches of an epoch
_PROPHET = {
    "hidden": 1024,
    "heads": 8,
    "mlp": 4096,
    "layers": 6,
    "flat_mlp": 1024,
    "flat_out": 2048,
    "value_bias": False,
    "norm": "layer",
    "eps": 1e-5,
    "dropout": 0.1,
}
_BERT = ((r"^bert/", 0.01),)


def get_config(mode: str = "finetune") -> ConfigDict:
    """`pretrain`: on VQAv2's train split; its answers are those of `config.answers.file`, openvqa's
    list. Prophet's for OK-VQA adds val without OK-VQA's test pictures, and Visual Genome:
    `--config.data.more_splits="('val','vg')"`, and steps in proportion.

    `pretrain_pod`: the same for a v5e-256, a v5p-64 or 8 to 64 H100s, not the original's recipe:
    1,024 questions a batch instead of 64, rates times the root of 16 (the rule for Adam of Malladi
    et al. 2022), as many epochs; products in bfloat16.

    `head`: finetuning's first epoch, only the classes of answers that VQAv2 lacks.
    `finetune`: the other five epochs, all parameters.
    `openvqa`: the original MCAN on VQAv2, GloVe words and detector regions.
    `small`: MiniLM on question and caption, on the train split (which has no captions) and one of
    two halves of the test split; for the other half it gives candidates.
    `runlocal`: `small` with a few steps of a small model from scratch, for tests.
    """
    config = ConfigDict()
    config.task = "vqa"
    config.seed = 0
    config.data = {"dir": "data/okvqa", "split": "train", "more_splits": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = "downloads/bert-large-uncased/tokenizer.json"
    config.init = "downloads/bert-large-uncased"
    config.answers = {"file": "", "base": "", "min_questions": 2}
    config.features = {"root": "data/coco_grids"}
    config.model = {
        "image": "grid",
        "trunk": "bert_large_uncased",
        "changes": {},
        "fusion": dict(_PROPHET),
        "grid": 16,
        "image_features": 4096,
    }
    config.batches = {"batch_size": _BATCH, "lengths": (32,), "threads": 8}
    config.train = {
        "optimizer": {
            "name": "adam",
            "b1": 0.9,
            "b2": 0.98,
            "eps": 1e-9 / _BATCH,
            "schedule": "stairs",
        },
        "log_every": 100,
        "checkpoint_every": 2000,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    config.inference = {"batch_size": auto()}
    {
        "pretrain": _pretrain,
        "pretrain_pod": _pretrain_pod,
        "head": _head,
        "finetune": _finetune,
        "openvqa": _openvqa,
        "small": _small,
        "runlocal": _runlocal,
    }[mode](config)
    return config


def _stairs(epoch: int, warmup: int, decays: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Both originals' schedule: the rate climbs by epochs, and falls to a fifth at some."""
    levels = [(n * epoch, (n + 1) / (warmup + 1)) for n in range(warmup + 1)]
    return (*levels, *((at * epoch, 0.2**n) for n, at in enumerate(decays, start=1)))


def _pretrain(config: ConfigDict) -> None:
    config.data.dir = "data/vqav2"
    config.answers.file = "downloads/openvqa/answer_dict.json"
    config.train.steps = 13 * _VQAV2
    config.train.optimizer.update(
        {
            "learning_rate": 7e-5,
            "levels": _stairs(_VQAV2, warmup=3, decays=(10, 12)),
            "clip_norm": 2.0 / _BATCH,
            "clip_apart": True,
            "multipliers": _BERT,
        }
    )


def _pretrain_pod(config: ConfigDict) -> None:
    _pretrain(config)
    times = 16
    config.batches.update({"batch_size": times * _BATCH, "threads": 16})
    config.model.changes.dtype = config.model.fusion.dtype = "bfloat16"
    epoch = _VQAV2 // times
    config.train.steps = 13 * epoch
    config.train.optimizer.learning_rate *= times**0.5
    config.train.optimizer.levels = _stairs(epoch, warmup=3, decays=(10, 12))
    config.train.update({"log_every": 10, "checkpoint_every": 200})


def _head(config: ConfigDict) -> None:
    config.init = config.answers.base = "runs/mcan_pretrain"
    config.train.steps = _OKVQA
    config.train.optimizer.update(
        {
            "learning_rate": 1e-3,
            "levels": ((0, 1.0),),
            "multipliers": ((r"^new_head/", 1.0), (r"", 0.0)),
        }
    )


def _finetune(config: ConfigDict) -> None:
    config.init, config.answers.base = "runs/mcan_head", "runs/mcan_pretrain"
    config.train.steps = 5 * _OKVQA
    config.train.optimizer.update(
        {
            "name": "adamw",
            "weight_decay": 0.01,
            "no_decay": r"(?!)",  # torch's AdamW decays all
            "learning_rate": 5e-5,
            # The original's epochs 1 to 5; it counts the head's as epoch 0.
            "levels": ((0, 1.0), (4 * _OKVQA, 0.2)),
            "multipliers": _BERT,
        }
    )


def _openvqa(config: ConfigDict) -> None:
    config.data.dir = "data/vqav2"
    config.answers.file = "downloads/openvqa/answer_dict.json"
    config.tokenizer, config.init = "words", "downloads/glove.840B.300d.txt"
    config.features.root = "data/coco_regions"
    config.model = {
        "image": "regions",
        "fusion": {"dropout": 0.1},  # FusionConfig's defaults are mcan_small
        "word_features": 300,
        "region_features": 2048,
    }
    config.batches.lengths = (14,)
    config.train.steps = 13 * _VQAV2
    # Its warm-up counts the epochs' last, smaller batches, which it leaves out (optim.py:37-51).
    warmup = tuple((n * _VQAV2_QUESTIONS // _BATCH, (n + 1) / 4) for n in range(4))
    decays = _stairs(_VQAV2, warmup=0, decays=(10, 12))[1:]
    config.train.optimizer.update({"learning_rate": 1e-4, "levels": (*warmup, *decays)})


def _small(config: ConfigDict) -> None:
    config.data = {
        "dir": "data/okvqa",
        "split": "test",
        "folds": 2,
        "fold": 0,
        "more_splits": ("train",),
    }
    del config.features
    config.tokenizer, config.init = "minilm", "minilm"
    config.model = {
        "image": "caption",
        "trunk": "minilm_l6",
        "changes": {"unroll": 1},
        "frozen_text": True,
        "fusion": {
            "hidden": 192,
            "heads": 6,
            "mlp": 768,
            "layers": 2,
            "flat_mlp": 192,
            "flat_out": 384,
            "norm": "layer",
            "eps": 1e-5,
            "dropout": 0.1,
            "unroll": 1,
        },
        "answer_embeddings": True,
    }
    config.batches.update({"lengths": (16, 28), "threads": 1})
    config.train.steps = 300
    config.train.optimizer = {
        "name": "adam",
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup": 0.1,
        "b2": 0.98,
        "clip_norm": 2.0,
    }
    config.train.update({"log_every": 10, "checkpoint_every": 100, "evaluate_every": 150})
    config.validate = {"split": "test", "questions": 500, "metric": "recall@10"}


def _runlocal(config: ConfigDict) -> None:
    _small(config)
    config.tokenizer, config.init = "corpus:2000", "scratch"
    config.answers.min_questions = 1
    config.model.answer_embeddings = False
    config.model.changes = {"hidden": 32, "layers": 1, "heads": 2, "mlp": 64}
    config.model.fusion.update(
        {"hidden": 32, "heads": 2, "mlp": 64, "layers": 1, "flat_mlp": 16, "flat_out": 32}
    )
    config.batches.batch_size = 8
    config.train.update({"steps": 4, "log_every": 2, "checkpoint_every": 2, "evaluate_every": 0})
