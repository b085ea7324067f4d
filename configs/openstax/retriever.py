"""OpenStax: MiniLM tuned on links from a paragraph to the figure that it speaks of, by its caption.

`token`: a vector for each token (late interaction). `pages`: figures as they look, by a Qwen-VL
that becomes a ColQwen, by LoRA; `towers`: by a CLIP. The hard negatives are what BM25 finds
(`data.negatives`, files of `mmqa search --split=train`) or, with `mining.every`, what the model
itself finds.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto

MODES = ("runlocal", "token", "pages", "towers")


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: two steps, for tests."""
    config = ConfigDict()
    config.task = "retriever"
    config.seed = 0
    config.data = {"dir": "", "split": "train", "negatives": (), "mixture": (), "teacher": ""}
    config.data.examples = ""
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "dcn_data": -1, "dcn_fsdp": -1}
    config.tokenizer = ""  # that of `init`
    config.init = "minilm"  # or the folder, or ORG/NAME, of a published encoder of texts
    config.model = {"vectors": "text", "dim": 0, "prompts": (), "changes": {"dtype": "float32"}}
    config.loss = {
        "kind": "softmax",  # margin_mse or divergence: the scores of data.teacher
        "scale": 20.0,
        "symmetric": False,
        "matryoshka": (),
    }
    config.mining = {"every": 0, "top_k": 20}
    config.batches = {
        "batch_size": 32,
        "query_length": 128,
        "source_lengths": (96,),
        "num_negatives": 1,
        "threads": 2,
    }
    config.train = {
        "steps": 60,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 5e-5,
            "schedule": "cosine",
            "warmup": 0.1,
            "clip_norm": 1.0,
        },
        "log_every": 5,
        "checkpoint_every": 20,
        "checkpoint_local_every": 0,
        "evaluate_every": 0,
        "accumulate": 1,
        "keep": 1,
    }
    # With train.evaluate_every above 0: logged as eval/..., the best step's weights kept.
    config.validate = {"split": "val", "questions": 200, "sources": 2000, "metric": "recall@10"}
    config.inference = {"batch_size": auto()}

    if mode == "token":
        config.model.vectors = "token"
        config.loss.scale = 1.0
    if mode == "pages":
        config.init = "Qwen/Qwen3-VL-2B-Instruct"  # in the Hugging Face cache
        config.model.update({"vectors": "token", "dim": 128, "tower": "frozen"})
        config.model.lora = {"rank": 32, "alpha": 32.0, "targets": (), "base": "compute"}
        config.model.changes = {"dtype": "bfloat16", "remat": "full"}
        config.pictures = {"max_pixels": 768 * 32 * 32}  # so many tokens
        config.batches.source_lengths = (1024,)
        config.loss.update({"scale": 50.0, "mean": True})  # as ColPali is trained
        config.train.optimizer.learning_rate = 2e-4
    if mode == "towers":
        config.init = "openai/clip-vit-base-patch32"
        config.model.vectors = ""
        config.batches.update({"query_length": 77, "source_lengths": (77,)})
        config.loss.update({"scale": 100.0, "symmetric": True})
        config.train.optimizer.learning_rate = 1e-5
    if mode == "runlocal":
        config.batches.update({"batch_size": 4, "query_length": 32, "source_lengths": (32,)})
        config.train.update({"steps": 2, "log_every": 1, "checkpoint_every": 1})
    return config
