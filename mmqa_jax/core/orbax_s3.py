"""s3:// for Orbax, which knows gs:// only.

A store has no renaming: Orbax marks a checkpoint there as complete by a last object, deletes object
by object, and lets TensorStore put the arrays. It does so for paths that begin with gs://. Here
s3:// joins them, with TensorStore's driver for it. To be dropped once Orbax has its own
(https://github.com/google/orbax/pull/2739).
"""

from __future__ import annotations

import functools
import os
from typing import Any
from urllib.parse import urlsplit

from mmqa_jax.core.errors import UserError

_PREFIX = "s3://"
# Functions of Orbax that are replaced: by module, their names.
_REPLACED = {
    "gcs_utils": ("get_kvstore_for_gcs",),
    "tensorstore_utils": (
        "_use_gcs_driver",
        "_normalize_path",
        "_get_backend_ocdbt_target_data_file_size",
    ),
}


@functools.cache
def teach_orbax_s3() -> None:
    """Lets Orbax write to and read from s3:// in this process, as it does with gs://."""
    from orbax.checkpoint import version
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    modules = {"gcs_utils": gcs_utils, "tensorstore_utils": tensorstore_utils}
    for module, names in _REPLACED.items():
        if missing := [name for name in names if not hasattr(modules[module], name)]:
            raise UserError(
                f"orbax-checkpoint {version.__version__} has no {module}.{missing[0]}, by which "
                "it is taught s3://; install the version of launch/constraints.txt."
            )
    gs_spec = gcs_utils.get_kvstore_for_gcs
    uses_gs, normalize = tensorstore_utils._use_gcs_driver, tensorstore_utils._normalize_path
    file_size = tensorstore_utils._get_backend_ocdbt_target_data_file_size
    gs_file_size = tensorstore_utils._GCS_OCDBT_TARGET_DATA_FILE_SIZE

    def kvstore(path: str) -> dict[str, Any]:
        return kvstore_spec(path) if path.startswith(_PREFIX) else gs_spec(path)

    def is_store(path: str) -> bool:
        return path.startswith(_PREFIX) or uses_gs(path)

    def normalized(path: str) -> str:
        path = os.fspath(path)
        if not path.startswith(_PREFIX):
            return normalize(path)
        return _PREFIX + os.path.normpath(path.removeprefix(_PREFIX))

    def target_file_size(spec: dict[str, Any] | None) -> int:
        base = (spec or {}).get("base")
        on_s3 = isinstance(base, dict) and base.get("driver") == "s3"
        return gs_file_size if on_s3 else file_size(spec)

    gcs_utils._GCS_PATH_PREFIX = (*gcs_utils._GCS_PATH_PREFIX, _PREFIX)
    gcs_utils.get_kvstore_for_gcs = kvstore
    tensorstore_utils._use_gcs_driver = is_store
    tensorstore_utils._normalize_path = normalized
    tensorstore_utils._get_backend_ocdbt_target_data_file_size = target_file_size


def kvstore_spec(place: str) -> dict[str, Any]:
    """TensorStore's key-value store of objects whose names begin with `place`, s3://BUCKET/NAME.

    Endpoint and region are those of the environment's variables that AWS's own tools read, and s3fs
    with them; without an endpoint it is Amazon's. So are the keys, if they are there; else
    TensorStore looks where AWS's tools do.
    """
    parts = urlsplit(place)
    spec = {"driver": "s3", "bucket": parts.netloc, "path": parts.path.lstrip("/")}
    environment = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    for member, names in environment.items():
        if value := next(filter(None, map(os.environ.get, names)), None):
            spec[member] = value
    if "AWS_ACCESS_KEY_ID" in os.environ:  # else AWS's library prints which files it has not found
        spec["aws_credentials"] = {"type": "environment"}
    return spec
