"""WebQA, answers by VLP (section 5.2): tables 6 and 8.

  vlp_qa.py                  VLP (X101-FPN features)
  vlp_qa.py:vinvl            VLP + VinVL
  vlp_qa.py:q_only           VLP (Q-only): trained without sources; answer with --sources=none
  vlp_qa.py:vlp_i            VLP_I: picture questions alone
  vlp_qa.py:vlp_t            VLP_T: text questions alone
  vlp_qa.py:clip_patches     ours: CLIP's patch features instead of a detector's

Each with `_pod` behind it (VLP itself: `:pod`) is for a v5p-64 or 8 to 64 H100s: the paper's update
of 128 questions in one part instead of 4, the rate as it is; products in bfloat16, where the
original's are float32. A v5e-256 has more chips than that: `--config.mesh.tensor=2`, or `_pod1024`,
which is not the paper's: 1,024 questions an update, the rate times the root of 8 (the rule for Adam
of Malladi et al. 2022) after a warm-up over a tenth of the steps, for as many epochs.
Each with `_runlocal` is a run of seconds, for tests.
"""

import re

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

ROWS = {  # -> frontend, modality, epochs
    "vlp": ("x101", None, 11),
    "vinvl": ("vinvl", None, 13),
    "q_only": ("none", None, 11),
    "vlp_i": ("x101", "image", 11),
    "vlp_t": ("none", "text", 11),
    "clip_patches": ("clip", None, 11),
}
SIZES = ("runlocal", "pod", "pod1024")
MODES = (*SIZES, *ROWS, *(f"{row}_{size}" for row in ROWS for size in SIZES))


def get_config(mode: str = "") -> ConfigDict:
    """`mode`: a name of MODES, the row of the table; none is VLP."""
    vlp = config_beside(__file__, "vlp.py")
    row = re.sub(rf"_?({'|'.join(SIZES)})$", "", mode) or "vlp"
    frontend, modality, epochs = ROWS[row]
    config = vlp.base(frontend)
    config.task = "answer"
    config.data.modality = modality
    config.data.route_by_category = True  # a data set for picture and one for text questions
    config.packing.picture_content = row != "q_only"  # --no_img_content
    config.masking = {"mask_prob": 0.5, "max_pred": 50}
    config.batches = {
        "batch_size": 128,
        "max_sources": 16,  # all gold facts; of the pictures the first two with their captions
        "shuffle_sources": False,
        "no_source_prob": 1.0 if row == "q_only" else 0.0,
        "wording": "first",
        "threads": 4,
    }
    # The original's micro-batch: --train_batch_size 128 in 64 gradient_accumulation_steps.
    config.questions_per_mean = 2
    # The epoch whose checkpoint the authors took, of 16.
    config.train = vlp.train(vlp.QUESTIONS[modality], epochs, 1e-4, parts=4)
    config.validate = {
        "split": "val",
        "questions": 500,
        "metric": "webqa_acc/no_lemma",
        "num_beams": 1,  # greedy
        "sources": "none" if row == "q_only" else "oracle",
    }
    config.inference = {
        "batch_size": auto(),
        "num_beams": 5,
        "max_new_tokens": 30,  # max_tgt_len
        "length_penalty": 0.0,
        "only_best": False,
        "always_truncate_tail": False,
        # [CLS] sources [SEP] question: 400 + 70 + 2 columns, then 30 for the answer.
        "packing": {
            "buckets": _shorter(config.packing.buckets),
            "max_question_tokens": 70,  # max_len_Q
            "max_answer_tokens": 0,
            "max_pair_tokens": None,
        },
    }
    if mode.endswith("runlocal"):
        vlp.make_local(config)
        config.inference.max_new_tokens = 8
    elif "pod" in mode:
        vlp.make_pod(config)
    if mode.endswith("pod1024"):
        config.batches.batch_size = 1024
        config.train.steps = -(-config.train.steps // 8)
        config.train.optimizer.update({"learning_rate": 1e-4 * 8**0.5, "warmup": 0.1})
        config.train.update({"log_every": 5, "checkpoint_every": 50, "evaluate_every": 50})
    return config


def _shorter(buckets: tuple) -> tuple:
    """The buckets for decoding, where no answer stands in the sequence."""
    longest = {512: 472, 312: 272, 120: 90}
    return tuple((pictures, longest.get(text, text)) for pictures, text in buckets)
