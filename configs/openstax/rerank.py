"""OpenStax: VLP source selection (WebQA section 5.1) over paragraphs and captioned figures.

`data.negatives` names what the candidates of a test question look like: rankings of the training
paragraphs. The gold sources are all figures, so that most negatives are figures too.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests."""
    config = ConfigDict()
    config.task = "rerank"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "negatives": (), "mixture": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = "minilm"
    config.init = "minilm"
    # Token types that MiniLM does not have: tokens that match the question, the second source.
    config.new_types = (0, 1, 3)
    config.pictures = {"size": 48, "resize": "squash"}
    config.model = {
        "trunk": "minilm_l6",
        "changes": {
            "layers": 3,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
        },
        "frontend": "patches",
        "patch": 16,
        "whole": True,
    }
    config.packing = {
        "buckets": ((0, 224), (1, 224)),
        "max_source_tokens": 80,
        "max_question_tokens": 140,
        "max_answer_tokens": 0,
        "per_source": True,
        "match_types": (1,),
        "positions_after_regions": False,
    }
    config.batches = {
        "batch_size": 48,
        "choices_per_question": 5,
        "alike_share": 0.75,
        "second_hop_prob": 0.0,
        "slack": 0,
        "threads": 2,
    }
    config.train = {
        "steps": 110,
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
