"""Atlas: the whole path, as `mmqa demo` runs it. Models and rows have files of their own."""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: the same path in about a minute, on a small part of Atlas, for tests."""
    config = ConfigDict()
    config.seed = 0
    # Countries to build Atlas from; 0 = all.
    config.countries = 0
    # Of products: float32, bfloat16, or auto (bfloat16 where the CPU has fast ones). Training with
    # rounded numbers is faster and less accurate (RESULTS.md).
    config.precision = "float32"
    for task in ("contrastive", "rerank", "answer"):
        config[task] = config_beside(__file__, f"{task}.py").get_config(mode)
    # dev_questions: on which the weight of the fused retrievers is chosen; 0 = all of val.
    config.search = {"index": "auto", "dev_questions": 300}
    # top_k: candidates of the whole collection; dev_questions: on which the threshold is chosen.
    config.select = {"top_k": 20, "dev_questions": 60}
    # Questions of the test split that are answered, evenly over it; 0 = all.
    config.evaluate = {"questions": 300, "examples": 60}
    if mode == "runlocal":
        config.countries = 40
        config.evaluate.questions, config.select.dev_questions = 40, 20
        config.search.dev_questions = 20
    return config
