"""The config.json that transformers writes beside a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json


def config_file(path: Path) -> Path:
    """Where the config.json of a checkpoint is: in the folder, or beside the file."""
    return (path if path.is_dir() else path.parent) / "config.json"


def hf_config(path: Path, model_type: str) -> dict[str, Any]:
    """transformers' config.json in the folder or beside the file.

    Raises:
      UserError: there is none, or it is another model's.
    """
    file = config_file(path)
    if not file.exists():
        raise UserError(
            f"{file}: no such file; the config.json of transformers must lie beside the weights."
        )
    published = read_json(file)
    found = published.get("model_type") if isinstance(published, dict) else None
    if found != model_type:
        raise UserError(
            f"{file}: model_type is {found!r}, expected {model_type!r}; give a checkpoint of that "
            "model, or the --model of this one."
        )
    return published
