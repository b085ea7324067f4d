"""Arrays of .npz files, whose headers are compared with the file before anything is allocated."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np

from mmqa_jax.core.claims import COMPRESSION, check_claim

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(path: Path, key: str) -> np.ndarray:
    """One array of a file as np.savez and np.savez_compressed write it.

    Raises:
      UserError: the file claims to hold more than it can.
      Exception: of nearly any kind, for a broken archive or header, or one without the array.
    """
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{key}.npy")
        held = path.stat().st_size
        check_claim(f"{path}, {key}", member.file_size, held, times=COMPRESSION)
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise ValueError(f"format version {version}")
            shape, _, dtype = _HEADERS[version](file)
            check_claim(f"{path}, {key}", math.prod(shape) * dtype.itemsize, member.file_size)
    with np.load(path, allow_pickle=False) as opened:
        return opened[key]
