"""WebQA, source selection by VLP (section 5.1): tables 6 and 7, column source F1.

  vlp_select.py                  VLP (X101-FPN features)
  vlp_select.py:vinvl            VLP + VinVL
  vlp_select.py:clip_patches     ours: CLIP's patch features instead of a detector's
  vlp_select.py:cached           ours: sources are read once for all questions, so that `mmqa rerank
                                 --candidates=all` ranks the whole collection; `data.negatives`
                                 names rankings whose sources are further negatives

Each with `_pod` behind it (VLP itself: `:pod`) is for a v5e-256, a v5p-64 or 8 to 64 H100s: the
paper's update of 128 questions, 4,096 pairs, in one part instead of 128 (8 H100s:
`--config.train.accumulate=2`), the rate as it is; products in bfloat16, where the original's are
float32. Each with `_runlocal` is a run of seconds, for tests.
"""

import re

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto, config_beside

ROWS = {"vlp": "x101", "vinvl": "vinvl", "clip_patches": "clip", "cached": "x101"}  # -> frontend
SIZES = ("runlocal", "pod")
MODES = (*SIZES, *ROWS, *(f"{row}_{size}" for row in ROWS for size in SIZES))


def get_config(mode: str = "") -> ConfigDict:
    """`mode`: a name of MODES, the row of the table; none is VLP."""
    vlp = config_beside(__file__, "vlp.py")
    row = re.sub(rf"_?({'|'.join(SIZES)})$", "", mode) or "vlp"
    config = vlp.base(ROWS[row])
    config.task = "rerank"
    # A question has 32 choices, 16 of either modality, of which the gold sources are some; the
    # pairs of all questions are mixed. So 32 pairs are worth one question.
    config.batches = {
        "batch_size": 128 * 32,
        "choices_per_question": 32,
        "alike_share": 0.5,
        "threads": 4,
    }
    # Epoch 3 of the original's 6.
    config.train = vlp.train(vlp.QUESTIONS[None], 3, 3e-5, parts=128)
    config.validate = {
        "split": "val",
        "questions": 500,
        "metric": "source_f1",
        "cap": "webqa",
        "select": "above",
    }
    config.inference = {"batch_size": auto(), "always_truncate_tail": False}
    config.data.mixture = ()
    if row == "cached":
        config.data.negatives = ()
        config.model.joint_layers = 1
    if mode.endswith("runlocal"):
        vlp.make_local(config)
    elif mode.endswith("pod"):
        vlp.make_pod(config)
    return config
