"""model.json, which says what the arrays in a weights folder are; reading it needs no JAX.

`mmqa convert` and training write it, see folder.py. SHA256SUMS beside it are checked before it is
used.
"""

import os
from pathlib import Path
from typing import Any

from mmqa_jax.core.checkpoints.checksums import check_sums
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.paths import as_path, in_store

FORMAT = "mmqa_jax weights 1"
WEIGHTS, RECORD = "weights", "model.json"
# Of a training run: what else is needed to use its weights; config.json has its own checksum.
RUN_FILES = (
    *("answers.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    # Of a retriever that sees pictures: how they are prepared, its prompts, a tokenizer's pieces.
    *(
        "preprocessor_config.json",
        "processor_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
    *("vocab.json", "merges.txt", "spiece.model"),
)
_OLD_RECORD = "config.json"  # of folders that were converted when training wrote its own format
DAMAGED = (
    "copy the folder again, or train or convert the model again (who changed the file on purpose "
    "deletes SHA256SUMS)"
)


def is_weights_folder(path: str | os.PathLike) -> bool:
    """Whether a path is a folder that `mmqa convert` or a finished training run wrote."""
    path = Path(path)
    if not (path / WEIGHTS).is_dir() or not record_file(path).is_file():
        return False
    record = read_json(record_file(path))
    check_sums(path, [RECORD], remedy=DAMAGED)
    return isinstance(record, dict) and str(record.get("format", "")).startswith("mmqa_jax")


def is_converted(path: str | os.PathLike) -> bool:
    """Whether a path is a folder that `mmqa convert` wrote."""
    return is_weights_folder(path) and "task" not in read_metadata(path)


def read_metadata(folder: str | os.PathLike) -> dict[str, Any]:
    """The content of model.json."""
    file = record_file(as_path(folder))
    if not file.exists():
        if not in_store(file) and not Path(folder).exists():
            raise UserError(f"{folder}: no such file or folder; check the path.")
        raise UserError(
            f"{folder}: holds no trained weights (no {RECORD}); run the training to its end, or "
            "give its workdir or a folder of `mmqa convert`."
        )
    metadata = read_json(file)
    if not isinstance(metadata, dict):
        raise UserError(
            f"{file}: is not what training or `mmqa convert` writes; copy the folder again, or "
            "train or convert the model again."
        )
    check_sums(file.parent, remedy=DAMAGED)
    return metadata


def is_trained(folder: Path, steps: int) -> bool:
    """Whether the run in `folder` has reached its last step and saved its weights."""
    return (folder / RECORD).exists() and read_metadata(folder).get("step") == steps


def record_file(folder: Path) -> Path:
    """model.json; config.json in a folder of an older `mmqa convert`."""
    file = folder / RECORD
    if not file.exists() and (folder / WEIGHTS).is_dir() and (folder / _OLD_RECORD).is_file():
        old = read_json(folder / _OLD_RECORD)
        if isinstance(old, dict) and "format" in old:
            return folder / _OLD_RECORD
    return file
