"""What the rows of every paper's table have in common. Not an experiment itself."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

_SHOWN = {"order": "most_similar_first", "seed": 0}
# Setting of a prompted system -> its options with their defaults, so that each can be overridden.
OPTIONS: dict[str, dict[str, Any]] = {
    "pica": {
        **_SHOWN, "shots": 16, "ensemble": 1, "similarity": "question_and_image", "tags": False,
        "shot_answer": "first", "template": "pica.okvqa", "max_new_tokens": 5,
    },
    "pica_choice": {
        **_SHOWN, "shots": 8, "similarity": "question", "tags": False, "shot_answer": "first",
        "template": "pica.okvqa", "score": "sum", "calibrated": False,
    },
    "rmr": {
        **_SHOWN, "shots": 3, "similarity": "bimodal", "template": "rmr.rationale", "chat": False,
        "pictures": False, "max_new_tokens": 256,
    },
    "rmr_direct": {
        **_SHOWN, "shots": 3, "similarity": "bimodal", "template": "rmr.direct", "chat": False,
        "pictures": False, "max_new_tokens": 128,
    },
    "rmr_choice": {
        **_SHOWN, "shots": 3, "similarity": "bimodal", "template": "rmr.text", "options": "text",
        "score": "sum", "calibrated": False,
    },
}  # fmt: skip


def language_model(model: str, backend: str = "engine", **engine: Any) -> dict[str, Any]:
    """The section `parts.llm` with every key that may be overridden.

    Args:
      model: as `mmqa prompt --model`.
      engine: sizes that differ from these (see configs/prompt/default.py).
    """
    sizes = {"slots": 32, "length": 1024, "buckets": (32, 128), "prefill_tokens": 256, "block": 128}
    return {
        "model": model,
        "backend": backend,
        "tokenizer": "",
        "dtype": "auto",
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
        "engine": {**sizes, **engine},
        "server": {"concurrency": 8},
    }


def library(**changes: Any) -> dict[str, Any]:
    """The section `parts.library` with every key: MiniLM's similarity within the row's own data."""
    own = {"data": "", "split": "train", "folds": 1, "text_model": "minilm", "image_model": ""}
    return {**own, "text": "question", "modality": "", **changes}


def make_row(
    name: str,
    row: Mapping[str, Any],
    *,
    system: str,
    dataset: str,
    data: str,
    split: str,
    made_by: Mapping[str, str],
) -> ConfigDict:
    """The config of one row, as `mmqa run` takes it.

    Args:
      name: of the row.
      row: its setting and parts, and where they differ from the defaults its options, published
        figures, questions (so many, evenly over the split; 0 is all) and modality.
      made_by: path of an input -> where it comes from.
    """
    config = ConfigDict()
    config.row = name
    config.system = row.get("system", system)
    config.setting = row["setting"]
    config.dataset = dataset
    config.data = {
        "dir": data,
        "split": split,
        "questions": row.get("questions", 0),
        "modality": row.get("modality", ""),
    }
    config.parts = row["parts"]
    config.options = {**OPTIONS.get(row["setting"], {}), **row.get("options", {})}
    # lemmatizer: "" is spaCy where it is installed; bart: "" leaves fluency out (WebQA's scores).
    config.scoring = {"lemmatizer": "", "bart": ""}
    config.published = row.get("published", ())
    config.made_by = tuple(made_by.items())
    return config
