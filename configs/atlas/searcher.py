"""SmolLM2 learns by reward to search Atlas's snippets, from what it has learned of conversations.

    mmqa prepare searched --raw=data/atlas --out=data/atlas_searched --balanced
    mmqa train --config=configs/scienceqa/rmr_finetune.py --config.data.dir=data/atlas_searched ...
    mmqa train --config=configs/atlas/searcher.py --workdir=runs/atlas/searcher

The run's folder is then `--config.parts.llm.model` of the row configs/corpus.py:search_r1, with
`--config.options.results_by=user`. Its folder `rollouts` holds all episodes. RESULTS.md has the
whole commands.
"""

from ml_collections import ConfigDict

# Importing it makes its task known.
from mmqa_jax.extensions import pictured_searcher, searcher

MODES = ("runlocal", "pictured", "pictured_runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """GRPO by LoRA with DAPO's clipping, average and draws.

    `pictured`: a Qwen-VL, which is shown the pictures that its tools find.

    `runlocal`, `pictured_runlocal`: a few steps of a tiny model from scratch, for tests.
    """
    config = ConfigDict()
    config.seed = 0
    config.mesh = {
        **{"data": -1, "fsdp": 1, "sequence": 1, "tensor": 1},
        **{"dcn_data": -1, "dcn_fsdp": -1},
    }
    config.tokenizer = ""
    config.model = {
        "changes": {"dtype": "float32", "remat": "full"},
        "lora": {"rank": 16, "alpha": 32.0, "targets": ()},
    }
    config.train = {
        "steps": 60,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 5e-5,
            "schedule": "constant",
            "warmup": 0.05,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
        },
        "log_every": 1,
        "checkpoint_every": 10,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    config.task = searcher.Searcher.name
    config.init = "runs/atlas/searched"
    config.data = {"dir": "data/atlas", "split": "train", "modality": "text"}
    config.data.update({"model": "", "index": ""})
    config.batches = {"batch_size": 32, "length": 1024}
    config.episodes = {
        **{"turns": 3, "top_k": 3, "new_tokens": 80},
        **{"template": "search_r1", "results_by": "user", "pages": 0, "tokens": 0, "slots": 32},
        **{"picture_searches": 0, "zooms": 0},
    }
    config.reward = {
        **{"scorer": "webqa", "answer": 1.0, "evidence": 0.2, "precision": 0.0},
        **{"format": 0.1, "search": 0.02, "function": ""},
    }
    config.grpo = {
        **{"group": 8, "temperature": 1.0, "learn": "clipped", "updates": 1},
        **{"clip": 0.2, "clip_above": 0.28, "ratio": "token", "average": "tokens"},
        **{"scaled": True, "kl_weight": 0.0, "draws": 2},
    }
    config.exact = False
    config.validate = {"split": "val", "questions": 60, "metric": None}
    if mode.startswith("pictured"):
        config.task = pictured_searcher.PicturedSearcher.name
        config.init, config.data.modality = "Qwen/Qwen2.5-VL-3B-Instruct", None
        config.model.tower = "frozen"
        config.model.vision = {"dtype": "float32", "remat": "none", "max_pixels": 256 * 28 * 28}
        config.pictures = {"max_broken": None, "most": 4}  # of an episode
        config.episodes.update({"template": "tools", "picture_searches": 1, "zooms": 1})
    if mode.endswith("runlocal"):
        config.init, config.tokenizer, config.data.modality = "scratch", "corpus:400", None
        config.model.changes = {
            **{"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 64},
            **{"positions": 1024, "tied": True},
        }
        config.batches = {"batch_size": 4, "length": 640}
        config.episodes.update({"new_tokens": 16, "slots": 4})
        config.grpo.group = 2
        config.train.update({"steps": 4, "checkpoint_every": 2})
        config.validate.questions = 2
    if mode == "pictured_runlocal":
        config.model.changes.mrope = (2, 1, 1)
        config.model.vision = {
            **{"width": 16, "layers": 2, "heads": 2, "mlp": 20, "out": 32, "patch": 2},
            **{"window": 8, "full_layers": (1,), "min_pixels": 144, "max_pixels": 400},
        }
    return config
