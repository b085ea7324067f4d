"""WebQA: CLIP ViT-B/16 trained on questions and their sources, pictures and snippets in one space.

Beyond the paper, whose CLIP must know the modality to find pictures. Every question's gold source
stands against hard negatives of both modalities, its own, and all sources of the global batch:

    mmqa convert --model=clip --source=openai/clip-vit-base-patch16 --out=weights/clip
    mmqa train --config=configs/webqa/contrastive.py --config.data.dir=data/webqa \\
               --config.init=weights/clip --workdir=runs/contrastive

Written for 32 accelerators. On fewer, `tower_parts` keeps the batch and saves memory: the towers
run over it in parts, the loss over all of it. The mode `pod` is CLIP ViT-L/14 at 32,768 questions a
batch, for a v5e-256, a v5p-64 or 8 to 64 H100s (8: `--config.tower_parts=64`). Nearly all of the
36,766 questions are then in each batch; the rate grows with the root of the batch:

    mmqa convert --model=clip --source=openai/clip-vit-large-patch14 --out=weights/clip-l14
    mmqa train --config=configs/webqa/contrastive.py:pod --config.data.dir=data/webqa \\
               --workdir=runs/contrastive-l14

The mode `siglip` is SigLIP so400m at 384 pixels with its own loss, whose chunks go from chip to
chip:

    mmqa convert --model=siglip --source=google/siglip-so400m-patch14-384 --out=weights/siglip
    mmqa train --config=configs/webqa/contrastive.py:siglip --config.data.dir=data/webqa \\
               --workdir=runs/contrastive-siglip
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

MODES = ("pod", "siglip", "runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """`pod`: ViT-L/14 at 32,768, `siglip`: so400m at 4,096; parameters split eight ways.

    `runlocal`: a few steps of a small model trained from scratch, for tests.
    """
    config = ConfigDict()
    config.task = "contrastive"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "negatives": (), "mixture": ()}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.init = "weights/clip"  # a folder of `mmqa convert --model=clip`, with its tokenizer
    config.pictures = {"size": 224, "resize": "crop", "alpha": "dropped"}
    config.model = {
        "clip": "vit_b_16",
        "changes": {"dtype": "bfloat16", "remat": "full"},
        "vision": {"dtype": "bfloat16", "remat": "full"},
        "fusion": "mean",  # caption and picture; `image` is the paper's, pictures alone
        "picture_gate": 1.0,
    }
    config.loss = "softmax"  # or SigLIP's, `sigmoid`
    config.tower_parts = 1
    config.batches = {
        "batch_size": 4096,
        "query_length": 48,
        "source_lengths": (77,),
        "num_negatives": 2,
        "second_hop": False,
        "slack": 0,
        "threads": 16,
    }
    config.train = {
        "steps": 500,  # 36,766 questions: 55 epochs
        "optimizer": {
            "name": "adamw",
            "learning_rate": 1e-5,
            "schedule": "cosine",
            "warmup": 0.1,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
        },
        "log_every": 10,
        "checkpoint_every": 100,
        "checkpoint_local_every": 0,
        "evaluate_every": 50,
        "accumulate": 1,
        "keep": 2,
    }
    config.validate = {"split": "val", "questions": 250, "sources": 5000, "metric": "recall@20"}
    config.inference = {"batch_size": auto(), "buckets": (16, 32, 48, 77)}

    if mode == "runlocal":
        config.pictures.size = 32
        config.model = {
            "trunk": "minilm_l6",
            "vision": {"image_size": 32, "patch_size": 8},
            "fusion": "mean",
            "picture_gate": 1.0,
        }
        config_beside(__file__, "../small.py").make_small(config)
        config.tower_parts, config.batches.threads = 2, 2
    else:
        config.tokenizer = config.get_ref("init")
    if mode == "siglip":
        config.mesh.fsdp = 8
        config.init, config.loss = "weights/siglip", "sigmoid"
        config.pictures = {"size": 384, "resize": "squash", "alpha": "white"}
        config.model = {
            "siglip": "so400m_14_384",
            "changes": {"dtype": "bfloat16"},
            "vision": {"dtype": "bfloat16"},
            "fusion": "mean",
            "picture_gate": 1.0,
        }
        config.tower_parts = 8
        # Kernels alone decay (big_vision optim/__init__.py, wd_mults).
        config.train.optimizer.no_decay = r"(?<!/kernel)$"
        # SigLIP reads texts padded to 64 tokens.
        config.batches.update({"query_length": 64, "source_lengths": (64,)})
        config.inference.buckets = (64,)
    if mode == "pod":
        config.mesh.fsdp = 8
        config.init = "weights/clip-l14"
        config.model.clip = "vit_l_14"
        # Parts of 16 questions a chip on a v5e-256, of 64 on 64 H100s: then each part's activations
        # fit, and only the parts' own recomputation is paid for.
        config.tower_parts = 8
        config.model.changes.remat = config.model.vision.remat = "none"
        config.batches.batch_size = 32_768
        config.train.steps = 62  # 55 epochs, as above
        config.train.optimizer.learning_rate = 1e-5 * 8**0.5
        config.train.update({"log_every": 1, "checkpoint_every": 20, "evaluate_every": 10})
    return config
