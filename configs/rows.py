"""What the rows of every paper's table have in common. Not an experiment itself."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


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
    config.options = row.get("options", {})
    # lemmatizer: "" is spaCy where it is installed; bart: "" leaves fluency out (WebQA's scores).
    config.scoring = {"lemmatizer": "", "bart": ""}
    config.published = row.get("published", ())
    config.made_by = tuple(made_by.items())
    return config
