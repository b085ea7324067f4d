"""Atlas: the whole path, as `mmqa demo` runs it. The three models have files of their own."""

import importlib.util
from pathlib import Path

from ml_collections import ConfigDict

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: the same path in about a minute, on a small part of Atlas, for tests."""
    config = ConfigDict()
    config.seed = 0
    # Countries to build Atlas from; 0 = all.
    config.countries = 0
    for task in ("contrastive", "rerank", "answer"):
        config[task] = _neighbour(task).get_config(mode)
    config.search = {"top_k": 100, "index": "auto"}
    config.select = {"top_k": 20, "dev_questions": 60}
    # Questions of the test split that are answered, evenly over it; 0 = all.
    config.evaluate = {"questions": 300, "bootstrap": 10000, "examples": 60}
    if mode == "runlocal":
        config.countries = 40
        config.evaluate.questions, config.select.dev_questions = 40, 20
    return config


def _neighbour(name: str):
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"atlas_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
