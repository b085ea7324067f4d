"""KAT (Gui et al., NAACL 2022): Fusion-in-Decoder over Wikidata's entities and GPT-3's answers.

    mmqa train --config=configs/okvqa/kat.py --config.data.dir=data/okvqa \\
               --workdir=data/runs/kat-large

The modes are the three models of guilk/KAT's README.md, with its values; the knowledge is its
okvqa.zip, unpacked in downloads/KAT. The batch is that of its 16 GPUs with one question each.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("base", "large_explicit", "runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """KAT large; `base`, `large_explicit` (no GPT-3), or `runlocal`, a tiny one, for tests."""
    fusion = config_beside(__file__, "../webqa/fusion_in_decoder.py")
    config = fusion.get_config("runlocal" if mode == "runlocal" else "")
    config.passages.entities = 40
    for section, split in ((config.passages, "train"), (config.validate, "val")):
        section.knowledge = knowledge(split, answers=mode != "large_explicit")
    config.validate.split = "test"  # which `mmqa prepare okvqa` makes of val2014
    config.inference.max_new_tokens = 9  # max_length=10, the decoder's first input among them
    if mode == "runlocal":
        return config
    config.init = "weights/t5-base" if mode == "base" else "weights/t5-large"
    config.passages.update({"count": 50, "length": 64})
    config.batches.batch_size = 16
    config.train.optimizer.update({"learning_rate": 3e-5, "warmup": 1000 / 8000})
    config.train.steps = 8000
    return config


def knowledge(split: str, *, answers: bool = True) -> dict[str, str]:
    """KAT's files of a COCO split of 2014; without `answers` the explicit knowledge alone."""
    folder = "downloads/KAT/okvqa"
    return {
        "rankings": "",
        "entities": f"{folder}/wikidata_okvqa_{split}2014_topentities.pkl",
        "answers": f"{folder}/gpt3_okvqa_{split}2014_answers.pkl" if answers else "",
    }
