"""OpenStax: MiniLM tuned on links from a paragraph to the figure that it speaks of, by its caption.

`token`: a vector for each token (late interaction). The hard negatives are what BM25 finds
(`data.negatives`, files of `mmqa search --split=train`) or, with `mining.every`, what the model
itself finds.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto

MODES = ("runlocal", "token")


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
    if mode == "runlocal":
        config.batches.update({"batch_size": 4, "query_length": 32, "source_lengths": (32,)})
        config.train.update({"steps": 2, "log_every": 1, "checkpoint_every": 1})
    return config
