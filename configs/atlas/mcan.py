"""Atlas: Prophet's stage 1 with pictures, MCAN over the patch grid of a CLIP vision tower.

Question encoder (MiniLM), tower (models/two_towers/network.py) and fusion are trained together, by
models/mcan/patches.py. A question of Atlas has no picture of its own: it is asked on those of its
gold sources, one or two, as VLP's row `oracle` is. A question on snippets has none, and the model
answers it from its words; the snippets are the language model's to read. The answers are the
keywords of the training questions (their answers are sentences) that at least two of them have.
Colors of flags are exchanged as for VLP (answer.py), so that no flag is memorized; names are not,
since a closed list of answers cannot hold new ones.

    mmqa train --config=configs/atlas/mcan.py --config.data.dir=data/atlas --workdir=runs/atlas_mcan
    mmqa candidates --data=data/atlas --model runs/atlas_mcan --out=runs/atlas_candidates
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests."""
    config = ConfigDict()
    config.task = "vqa"
    config.seed = 0
    config.data = {"dir": "", "split": "train"}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer, config.init = "minilm", "minilm"
    config.answers = {"file": "", "base": "", "min_questions": 2}
    config.pictures = {"size": 48, "resize": "sample"}
    config.model = {
        "image": "patches",
        "pictures": 2,
        "trunk": "minilm_l6",
        "changes": {"layers": 3, "dropout": 0.0, "attention_dropout": 0.0, "unroll": 1},
        "vision": {
            "image_size": 48,
            "patch_size": 12,
            "width": 192,
            "layers": 3,
            "heads": 3,
            "mlp_width": 768,
            "embed_dim": 384,
            "unroll": 1,
        },
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
    config.augment = {
        "factory": "mmqa_jax.data.atlas.augment:AtlasAugment",
        "entities": 0.0,
        "palette": 0.7,
    }
    config.batches = {"batch_size": 64, "lengths": (20, 40), "threads": 2}
    config.train = {
        "steps": 300,
        "optimizer": {
            "name": "adam",
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup": 0.1,
            "b2": 0.98,
            "clip_norm": 2.0,
            "multipliers": (("^bert/", 0.1),),
        },
        "log_every": 10,
        "checkpoint_every": 100,
        "checkpoint_local_every": 0,
        "evaluate_every": 100,
        "accumulate": 1,
        "keep": 1,
    }
    # Scored by WebQA's accuracy of the first candidate, without lemmas.
    config.validate = {"split": "val", "questions": 0, "metric": "accuracy"}
    config.inference = {"batch_size": auto()}

    if mode == "runlocal":
        config_beside(__file__, "../small.py").make_small(config)
        config.model.vision.update(config_beside(__file__, "../small.py").TOWER)
        config.model.fusion.update(
            {"hidden": 32, "heads": 2, "mlp": 64, "layers": 1, "flat_mlp": 16, "flat_out": 32}
        )
        config.model.answer_embeddings = False
        config.answers.min_questions = 1
    return config
