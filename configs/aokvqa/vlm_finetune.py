"""Qwen2.5-VL or Qwen3-VL learns to answer questions on pictures.

    mmqa train --config=configs/aokvqa/vlm_finetune.py --config.data.dir=data/aokvqa \\
               --config.init=Qwen/Qwen2.5-VL-7B-Instruct --workdir=runs/vlm-finetune

The run's folder, or its folder best, is then `--config.parts.llm.model` of a row and `--model` of
`mmqa prompt`. `init` is any Qwen-VL that `mmqa prompt --model` takes, or (mode `llava`) a LLaVA-1.5
or LLaVA-OneVision. Other data are any that `mmqa prepare` wrote with questions and answers:
ScienceQA, OK-VQA (whose questions have no rationales and no choices):

    mmqa train --config=configs/aokvqa/vlm_finetune.py --config.data.dir=data/okvqa \\
               --config.examples.templates="('rmr.text',)" --config.validate.split=test \\
               --config.validate.metric=log_likelihood --workdir=runs/vlm-okvqa

Conversations of `mmqa prepare chat`, or of `mmqa prepare cited --pictures=pixels`, with several
pictures each:

    mmqa train --config=configs/aokvqa/vlm_finetune.py --config.data.dir=data/chats \\
               --config.pictures.most=4 --config.validate.metric=log_likelihood --workdir=runs/chat
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("full", "llava", "runlocal")


def get_config(mode: str = "") -> ConfigDict:
    """LoRA on every projection of the language model, the tower frozen.

    `full`: all parameters are trained, those of the tower too.

    `llava`: a LLaVA's whole language model, the tower and the projector frozen.

    `runlocal`: a few steps of a tiny model from scratch, for tests.
    """
    config = config_beside(__file__, "../scienceqa/rmr_finetune.py").get_config(
        "full" if mode == "llava" else mode
    )
    config.task = "vision_language"
    config.model.tower = "trained" if mode == "full" else "frozen"
    # COCO's pictures as they are: up to 576 tokens of 28 x 28 pixels each.
    config.model.vision = {"dtype": "float32", "remat": "none", "max_pixels": 576 * 28 * 28}
    config.pictures = {"max_broken": None, "most": 1}  # of a conversation
    # As the rows of RMR ask, the answer behind its rationale; and alone, as it is validated.
    templates = ("rmr.direct", "rmr.text")
    config.examples.update({"templates": templates, "shots": 0, "similarity": "random"})
    config.library.text_model = ""
    # Tokens beside those of a picture.
    config.batches.update({"length": 512, "targets": 256, "workers": 0})
    config.validate.shots = (0,)
    if mode in ("full", "llava"):
        config.train.optimizer.learning_rate = 1e-5
    if mode == "llava":  # its pictures have the size that its own files say
        del config.model.vision["max_pixels"]
    elif mode == "runlocal":
        config.init = "scratch"
        config.model.changes.mrope = (2, 1, 1)
        config.model.vision = {
            "width": 16,
            "layers": 2,
            "heads": 2,
            "mlp": 20,
            "out": 32,
            "patch": 2,
            "window": 8,
            "full_layers": (1,),
            "min_pixels": 144,
            "max_pixels": 400,
        }
    return config
