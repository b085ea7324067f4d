"""Atlas: VLP answers (WebQA section 5.2) from gold sources, with our augmentations.

Modes `vlp_i` and `vlp_t` are table 8's: trained on the questions of one modality alone, as often as
the model of both modalities sees them.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

ONE_MODALITY = {"vlp_i": ("image", 339), "vlp_t": ("text", 111)}  # -> modality, of the 450 steps
MODES = ("runlocal", *ONE_MODALITY)


def get_config(mode: str = "") -> ConfigDict:
    """`mode`: of MODES; `runlocal` is a few steps of a small model from scratch, for tests."""
    config = ConfigDict()
    config.task = "answer"
    config.seed = 0
    config.data = {"dir": "", "split": "train"}
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
        "where": True,
        "visual_hidden": (768,),
        "copy_head": True,
        "written_words": 1000,
    }
    config.packing = {
        "buckets": ((0, 92), (0, 144), (1, 80), (1, 104), (2, 88)),
        "max_source_tokens": 128,
        "max_question_tokens": 32,
        "max_answer_tokens": 24,
        "per_source": True,
        "match_types": (1, 0),
        "positions_after_regions": False,
    }
    config.masking = {"mask_prob": 0.5, "max_pred": 24, "probes": True, "keyword_weight": 20.0}
    config.augment = {
        "factory": "mmqa_jax.data.atlas.augment:AtlasAugment",
        "entities": 0.7,
        "palette": 0.7,
    }
    config.batches = {
        "batch_size": 32,
        "max_sources": 2,
        "distractor_prob": 0.1,
        "no_source_prob": 0.05,
        "shares": {"text": 0.4},  # pictures take more examples than text
        "slack": 8,
        "threads": 2,
    }
    config.train = {
        "steps": 450,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 7e-4,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
            "multipliers": (("^region_", 3.0),),
        },
        "log_every": 10,
        "checkpoint_every": 100,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    # With train.evaluate_every above 0: logged as eval/..., the best step's weights kept.
    config.validate = {
        "split": "val",
        "questions": 200,
        "metric": "webqa_acc/no_lemma",
        "num_beams": 1,  # greedy
    }
    config.inference = {
        "batch_size": auto(),
        "num_beams": 5,
        "max_new_tokens": 24,
        "length_penalty": 0.0,
        "no_repeat_ngram": 3,
        "only_best": True,  # a question stops once its best beam is certain
    }

    if mode in ONE_MODALITY:
        config.data.modality, config.train.steps = ONE_MODALITY[mode]
        config.batches.shares = {}
    if mode == "runlocal":
        config_beside(__file__, "../small.py").make_small(config)
        config.inference.max_new_tokens = 8
    return config
