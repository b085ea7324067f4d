"""WebQA's VLP baselines: what source selection (vlp_select.py) and QA (vlp_qa.py) share.

Facts: WebQnA/WebQA_Baseline's README and run_webqa.py; WebQA section 5. Not an experiment itself.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

# Questions of the train split (WebQA, Table 4) by the modality of their sources.
QUESTIONS = {None: 36_766, "image": 18_954, "text": 17_812}


def base(frontend: str) -> ConfigDict:
    """Data, model and packing over one kind of picture features.

    Args:
      frontend: `x101`, `vinvl`, `clip` (patch features of raw pictures), or `none`.
    """
    config = ConfigDict()
    config.seed = 42
    # Facts and captions are read without their titles.
    config.data = {"dir": "", "split": "train", "titles": False, "modality": None}
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = "downloads/bert-base-cased/tokenizer.json"
    # VLP, pretrained on Conceptual Captions (cc_g8_lr1e-4_batch512_s0.75_b0.25).
    config.init = "downloads/vlp/model.30.bin"
    # Seen by `clip` alone, prepared as CLIP's own preprocessing does.
    config.pictures = {"size": 224, "resize": "crop", "alpha": "dropped"}
    config.model = {
        "trunk": "bert_base_cased",
        "changes": {"eps": 1e-5, "dtype": "float32", "remat": "none"},
        "frontend": frontend,
    }
    config.packing = {
        # Without pictures, with one, with two: 512 positions at most. Shorter shapes save time
        # and change nothing, for padding is never seen.
        "buckets": ((0, 96), (0, 160), (0, 512), (1, 96), (1, 312), (2, 128), (2, 312)),
        "max_source_tokens": 400,  # max_len_a
        "max_caption_tokens": 200,  # max_len_a without the region slots
        "max_question_tokens": 109,
        "max_answer_tokens": 109,
        "max_pair_tokens": 109,  # max_len_b
        "segments": (4, 5),  # --new_segment_ids
        "attend_empty_slots": True,
        "positions_after_regions": True,
        "picture_positions": 200,  # max_len_img_cxt
    }
    if frontend == "x101":
        config.features = {
            "root": "downloads/x101fpn",  # or a folder of `mmqa features --unrectified`
            "id_map": "downloads/image_id_map_0328.pkl",
            "slots": 100,
            "max_missing": 3_900,  # pictures without features: 1 in 100
            **detection(),
        }
    elif frontend == "vinvl":
        # One TSV for the release's ids (30,000,000 + row): 3 = image_id // 10,000,000.
        config.features = {
            "files": {"3": "downloads/vinvl/features.tsv"},
            "root": "",  # or a folder of `mmqa features`, in place of files
            "slots": 100,
            "max_missing": 3_900,
            **detection(),
        }
    elif frontend == "clip":
        config.features = {"root": "weights/clip"}  # mmqa convert --model=clip
        config.model.update({"clip": "vit_b_16", "vision": {}, "vision_layer": -2})
        # 196 patches a picture leave 120 of the 512 positions to the text.
        config.packing.buckets = ((0, 96), (0, 160), (0, 512), (1, 120), (2, 120))
        config.packing.picture_positions = 392
    else:  # no picture is ever shown, and so no features are needed
        config.model.update({"frontend": "patches", "patch": 16})
        config.packing.buckets = ((0, 96), (0, 160), (0, 512))
    return config


def detection() -> dict:
    """Keys of `features` for training on raw pictures (mmqa_jax/models/detection/README.md)."""
    return {
        # A detector's file or folder, in place of root, which is then to be ''.
        "detector": "",
        "cache": "",  # what it found; '': region_cache in the workdir
        "detection": {
            "regions": None,  # fewest and most, sides: as `mmqa features` takes them
            "sides": None,
            "dtype": "float32",  # of the convolutions
            "precision": "float16",
            "batch_size": auto(),
        },
    }


def train(questions: int, epochs: int, rate: float, *, parts: int) -> dict:
    """The section `train`: plain Adam at one rate, an update for every 128 questions.

    The original's warm-up and weight decay are only set with --fp16 (run_webqa.py l.503-509).

    Args:
      parts: of an update, each with pictures or without.
    """
    return {
        "steps": -(-questions * epochs // 128),
        "optimizer": {
            "name": "adam",
            "learning_rate": rate,
            "schedule": "constant",
            "warmup": 0.0,
        },
        "log_every": 10,
        "checkpoint_every": 250,
        "checkpoint_local_every": 0,
        "evaluate_every": 250,
        "accumulate": parts,
        "keep": 2,
    }


def make_pod(config: ConfigDict) -> None:
    """Turns a config into a pod's: products in bfloat16 (parameters stay float32), more readers.

    Of 256 chips or 64 GPUs each holds few pairs, so that no activation has to be computed again.
    """
    config.train.accumulate = 1
    config.model.changes.dtype = "bfloat16"
    config.batches.threads = 16


def make_local(config: ConfigDict) -> None:
    """Turns a config into a run of seconds: a small model from scratch (CLIP stays as it is)."""
    config_beside(__file__, "../small.py").make_small(config)
    config.train.accumulate = 2
    config.inference.batch_size = 8
