"""Prophet's stage 1 on A-OKVQA without pictures: OK-VQA's small MCAN, finetuned on one half of val.

Captions of A-OKVQA's train pictures are not at hand, and one half of val is too few questions to
start from. So the run starts from OK-VQA's `small` (configs/okvqa/mcan.py), with its answers; the
two benchmarks share no question. Its two halves of val are those of the rows' libraries.

    for fold in 0 1; do
      mmqa train --config=configs/aokvqa/mcan.py:small --config.data.fold=$fold \\
                 --workdir=runs/aokvqa_mcan_$fold
    done
    mmqa candidates --data=data/aokvqa --split=val --examples_split=val \\
                    --model runs/aokvqa_mcan_0 runs/aokvqa_mcan_1 --out=runs/aokvqa_candidates

With the train split's captions: `--config.data.more_splits="('train',)"` and more steps.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("small", "runlocal")

START = "runs/okvqa_mcan_0"


def get_config(mode: str = "small") -> ConfigDict:
    """`small`: see above. `runlocal`: a few steps of a small model from scratch, for tests."""
    config = config_beside(__file__, "../okvqa/mcan.py").get_config(mode)
    config.data = {"dir": "data/aokvqa", "split": "val", "folds": 2, "fold": 0, "more_splits": ()}
    config.validate = {"split": "val", "questions": 0, "metric": "recall@10"}
    if mode == "small":
        config.init = START
        config.answers.file = f"{START}/answers.json"
        config.model.answer_embeddings = False  # the run's head is trained
        config.train.update({"steps": 20, "checkpoint_every": 20, "evaluate_every": 10})
        config.train.optimizer.learning_rate = 3e-4
    return config
