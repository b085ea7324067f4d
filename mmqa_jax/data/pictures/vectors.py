"""Vectors of ScienceQA's pictures as Multimodal-CoT publishes them.

`detr.npy` [N, 100, 256], `clip.npy` [N, 49, 2048], `resnet.npy` [N, 2048] and `name_map.json`,
question id -> row. The authors repeat ResNet's one vector 512 times, which attention does not tell
from one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.schema import Question

_TORCH = (".pth", ".pt")


class PictureVectors:
    """The vectors of questions' pictures, read one by one from a file that is mapped.

    Args:
      file: of the vectors.
      names: file of the rows; "" is name_map.json beside `file`.

    Attributes:
      shape: (vectors of a picture, values of each).
    """

    def __init__(self, file: str, names: str = ""):
        path = Path(file)
        if path.suffix in _TORCH:
            raise UserError(
                f"{path}: vectors are read from .npy, which needs not be held in memory; write it "
                "once with python -c \"import numpy, torch; numpy.save('vit.npy', "
                "torch.load('vit.pth', weights_only=True).numpy())\"."
            )
        try:
            self._vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file; fetch it from mm-cot's page.") from error
        except Exception as error:  # numpy parses the header as Python, which can raise nearly any
            reason = " ".join(str(error).split())
            raise UserError(
                f"{path}: no array of numpy ({reason:.150}); fetch it again from mm-cot's page."
            ) from error
        if not isinstance(self._vectors, np.ndarray):
            raise UserError(f"{path}: an archive of arrays; save the one array by numpy.save.")
        if self._vectors.ndim == 2:
            self._vectors = self._vectors[:, None]
        if self._vectors.ndim != 3 or self._vectors.dtype.kind != "f":
            raise UserError(
                f"{path}: has shape {self._vectors.shape} and type {self._vectors.dtype}; pictures "
                "x vectors x values in floating point were expected; fetch it again from mm-cot's "
                "page."
            )
        self.shape: tuple[int, int] = self._vectors.shape[1:]
        rows_file = Path(names) if names else path.with_name("name_map.json")
        rows = read_json(rows_file)
        if not isinstance(rows, dict) or None in map(whole_number, rows.values()):
            raise UserError(
                f"{rows_file}: question ids with rows were expected; fetch name_map.json again."
            )
        self._rows = {key: whole_number(row) for key, row in rows.items()}
        last = max(self._rows.values(), default=0)
        if last >= len(self._vectors):
            raise UserError(
                f"{rows_file}: names row {last}, but {path} has {len(self._vectors)}; the two "
                "files are not of one set."
            )

    def of(self, question: Question) -> Float32[np.ndarray, "P D"]:
        """Returns the vectors of a question's picture; zeros where there is none."""
        row = self._rows.get(question.id)
        if row is None:
            return np.zeros(self.shape, np.float32)
        return np.asarray(self._vectors[row], np.float32)
