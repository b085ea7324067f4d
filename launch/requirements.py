"""Prints what launch/setup.sh gives to pip: `requirements.py EXTRA,...`, with TFDS installed.

All that pyproject.toml requires, but for pyarrow where TFDS alone asks for it: 0.17 GB for Parquet
files, which nothing here has TFDS read. The extra `parquet` names it.
"""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

TFDS, LEFT_OUT = "tensorflow-datasets", "pyarrow"


def requirements(extras: list[str]) -> list[str]:
    """The lines of a requirements file, those of TFDS in its place."""
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    of_tfds = [line for line in metadata.requires(TFDS) or () if "extra ==" not in line]
    return [
        *(line for line in lines if _package(line) != TFDS),
        *(line for line in of_tfds if _package(line) != LEFT_OUT),
    ]


def _package(line: str) -> str:
    return re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")


if __name__ == "__main__":
    print(*requirements(sys.argv[1].split(",")), sep="\n")
