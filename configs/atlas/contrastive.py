"""Atlas: the dual encoder (MiniLM text tower, small vision tower), contrastive training."""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: a few steps of a small model trained from scratch, for tests."""
    config = ConfigDict()
    config.task = "contrastive"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "mixture": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    # minilm; minilm:corpus, restricted to the tokens of the corpus; corpus:N, a WordPiece of N
    # tokens trained on the corpus; or a tokenizer.json.
    config.tokenizer = "minilm:corpus"
    # minilm, scratch, or a folder with BERT weights in transformers' layout.
    config.init = "minilm"
    config.pictures = {"size": 32, "resize": "squash"}
    config.model = {
        "clip": "",  # a CLIP preset instead of a BERT text tower: vit_b_16, ...
        "trunk": "minilm_l6",
        "changes": {"dropout": 0.0, "attention_dropout": 0.0},
        "vision": {
            "image_size": 32,
            "patch_size": 8,
            "width": 192,
            "layers": 4,
            "heads": 3,
            "mlp_width": 768,
        },
        "fusion": "mean",
        "picture_gate": 0.1,
    }
    config.augment = {
        "factory": "mmqa_jax.data.atlas.augment:AtlasAugment",
        "entities": 0.0,
        "palette": 0.0,
    }
    config.batches = {
        "batch_size": 48,
        "query_length": 32,
        "source_lengths": (48,),
        "num_negatives": 1,
        "second_hop": True,
        "slack": 0,
        "threads": 2,
    }
    config.train = {
        "steps": 24,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 1e-4,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
            "multipliers": (("^vision/", 5.0),),
        },
        "log_every": 5,
        "checkpoint_every": 12,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    # With train.evaluate_every above 0: logged as eval/..., the best step's weights kept.
    config.validate = {"split": "val", "questions": 200, "sources": 1000, "metric": "recall@10"}
    config.inference = {"batch_size": auto(), "buckets": (16, 24, 32, 48, 64)}

    if mode == "runlocal":
        config_beside(__file__, "../small.py").make_small(config)
    return config
