"""Atlas: VLP source selection (WebQA section 5.1) over picture patches."""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests."""
    config = ConfigDict()
    config.task = "rerank"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "mixture": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = "minilm:corpus"  # see contrastive.py
    config.init = "minilm"
    # Token types that MiniLM does not have: tokens that match the question, the second source.
    config.new_types = (0, 1, 3)
    config.pictures = {"size": 48, "resize": "sample"}
    config.model = {
        "trunk": "minilm_l6",
        "changes": {"layers": 3, "dropout": 0.0, "attention_dropout": 0.0},
        "frontend": "patches",
        "patch": 16,
        "whole": True,
        "colors": True,
        "tags": True,
        "visual_hidden": (768,),
    }
    config.packing = {
        # Closely spaced, for little padding: all pairs of a question are scored, most are short.
        "buckets": ((0, 48), (0, 64), (0, 96), (1, 40), (1, 52)),
        "max_source_tokens": 64,
        "max_question_tokens": 48,
        "max_answer_tokens": 0,
        "per_source": True,
        "match_types": (1,),
        "positions_after_regions": False,
    }
    config.augment = {
        "factory": "mmqa_jax.data.atlas.augment:AtlasAugment",
        "entities": 0.5,
        "palette": 0.0,
    }
    config.batches = {
        "batch_size": 64,
        "choices_per_question": 8,
        "alike_share": 0.75,
        "second_hop_prob": 0.3,
        "slack": 4,
        "threads": 2,
    }
    config.train = {
        "steps": 130,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 2e-4,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
        },
        "log_every": 10,
        "checkpoint_every": 40,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    # With train.evaluate_every above 0: logged as eval/..., the best step's weights kept.
    config.validate = {"split": "val", "questions": 100, "metric": "source_f1"}
    config.inference = {"batch_size": auto()}

    if mode == "runlocal":
        config_beside(__file__, "../small.py").make_small(config)
    return config
