"""MAVL's planner learns which tools help on one half of the questions; the other half judges.

What every plan answered comes from a finished row with the oracle's plans:

    mmqa run --config=configs/okvqa/tables.py:smollm2_mavl_oracle \\
             --workdir=runs/tables/okvqa/smollm2_mavl_oracle
    mmqa train --config=configs/okvqa/planner.py --workdir=runs/okvqa_planner
    mmqa train --config=configs/okvqa/planner.py:reward --workdir=runs/okvqa_planner_reward

The run's folder is then `--config.parts.planner.model` of the row `smollm2_mavl_planner`. A-OKVQA:
`--config.data.dir=data/aokvqa --config.data.split=val` and the workdir of its row.
"""

from ml_collections import ConfigDict

# Importing it makes its tasks known.
from mmqa_jax.extensions import mavl_planner

MODES = ("reward", "runlocal", "reward_runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """SmolLM2 by LoRA on the plans that answered right.

    `reward`: GRPO on plans that it draws itself, from what the first has learned (`init`).

    `runlocal`, `reward_runlocal`: a few steps of a tiny model from scratch, for tests; the first
    trains all of it.
    """
    by_reward = mode.startswith("reward")
    config = ConfigDict()
    config.task = (mavl_planner.RewardedPlans if by_reward else mavl_planner.RightPlans).name
    config.seed = 0
    config.data = {
        "dir": "data/okvqa",
        "split": "test",
        "outcomes": "runs/tables/okvqa/smollm2_mavl_oracle",
        "folds": 2,
        "fold": 0,
        "cost": 0.02,
        "taught": "deciding",
        "agents": ("junior", "senior", "manager"),
        "chat": True,  # as the rows with SmolLM2
        "reading": "strict",
    }
    config.mesh = {
        **{"data": -1, "fsdp": 1, "sequence": 1, "tensor": 1},
        **{"dcn_data": -1, "dcn_fsdp": -1},
    }
    config.init = "smollm2"
    config.tokenizer = ""
    config.model = {
        "changes": {"dtype": "float32", "remat": "none"},
        "lora": {"rank": 16, "alpha": 32.0, "targets": ()},
    }
    config.batches = {"batch_size": 8, "length": 512, "targets": 64, "threads": 2}
    config.train = {
        "steps": 200,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 2e-4,
            "schedule": "cosine",
            "warmup": 0.05,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
        },
        "log_every": 5,
        "checkpoint_every": 50,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    config.validate = {"fold": 1, "questions": 100, "metric": None}
    config.inference = {"slots": 16, "new_tokens": 24}

    if by_reward:
        config.init = "runs/okvqa_planner"
        config.grpo = {
            "group": 8,
            "temperature": 1.0,
            "updates": 1,
            "clip": 0.2,
            "kl_weight": 0.04,
        }
        config.batches = {"batch_size": 64, "length": 320}
        config.train.update({"log_every": 1, "checkpoint_every": 20})
        config.train.optimizer.update({"learning_rate": 1e-4, "schedule": "constant"})
    if mode.endswith("runlocal"):
        config.init, config.tokenizer, config.data.chat = "scratch", "corpus:400", False
        config.model.changes = {
            "hidden": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "mlp": 64,
            "positions": 1024,
            "tied": True,
        }
        config.batches.update({"batch_size": 4, "length": 640})
        config.train.update({"steps": 4, "log_every": 1, "checkpoint_every": 2})
        config.validate.questions = 2
        if by_reward:
            config.grpo.group = 2
        else:
            config.model.lora = None
    return config
