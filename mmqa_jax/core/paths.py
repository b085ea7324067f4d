"""Paths of files, and of objects in a store: gs://BUCKET/NAME, s3://BUCKET/NAME.

`as_path` gives either the same interface: pathlib's, which etils.epath offers for objects. A store
has no renaming, no appending, no locks and no folders, but it takes an object whole or not at all
and lists what is there. So outputs are written in place, object by object (`core.files`), with
locks of their own (`core.locks`); and inputs, which libraries open as files or map into
memory, are copied to this host first (`core.local_copies`), but for records of pictures, of which
training reads ranges of bytes (`data.records.corpus_records`).
"""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from mmqa_jax.core.errors import RunError, UserError

# Scheme -> the package that speaks to the store; our extra has the scheme's name.
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
_PROTOCOLS = {"gs": "gcs", "s3": "s3"}  # as fsspec calls them
# A listing that is kept would hide what other processes have written since.
_FRESH = {"use_listings_cache": False}
_ADVICE = {
    "gs": "`gcloud auth application-default login` or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "`aws configure` or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
_NETWORK = re.compile(r"^(?=\w+:)\w*(?:Connect|Timeout)|Service Unavailable")
_SERVERS = ("http", "https", "milvus")  # no places of files


def as_path(place: str | os.PathLike) -> Path:
    """A pathlib.Path, or for gs:// and s3:// an epath.Path."""
    if isinstance(place, PurePath):  # of either kind
        return place  # type: ignore[return-value]
    place = os.fspath(place)
    scheme = scheme_of(place)
    if scheme is None:
        return Path(place)
    check_scheme(place, place)
    import fsspec
    from etils import epath

    # What epath makes of it is to be as `filesystem` does: fsspec's, also beside TensorFlow.
    os.environ.setdefault("EPATH_USE_TF", "false")
    fsspec.config.conf.setdefault(_PROTOCOLS[scheme], {}).update(_FRESH)
    return epath.Path(place)


def scheme_of(place: str | os.PathLike) -> str | None:
    """`gs` of gs://BUCKET/NAME; None of a path in the file system, or of a server's address."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", os.fspath(place))
    return None if match is None or match[1] in _SERVERS else match[1]


def check_scheme(place: str, what: str) -> None:
    """UserError, begun by `what`, for an unknown store or one whose package is missing."""
    scheme = scheme_of(place)
    if scheme not in _PACKAGES:
        known = " or ".join(f"{name}://" for name in _PACKAGES)
        raise UserError(f"{what}: a path, {known} was expected; correct it.")
    import fsspec

    package = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None and _PROTOCOLS[scheme] not in fsspec.registry:
        raise UserError(
            f"{what}: needs the package {package}; install it with "
            f"`pip install 'mmqa-jax[{scheme}]'`."
        )


def in_store(place: str | os.PathLike) -> bool:
    """Whether a place is in an object store."""
    return scheme_of(place) is not None


def absolute(place: str | os.PathLike) -> Path:
    """The absolute path; an object's name is one."""
    path = as_path(place)
    return path if in_store(path) else path.absolute()


def check_store(place: str | os.PathLike) -> None:
    """UserError if the place is in a store that cannot be reached, or whose bucket is missing."""
    if not in_store(place):
        return
    name = os.fspath(place)
    store, bucket = filesystem(name), key_of(name).partition("/")[0]
    with named_errors(name):
        try:
            store.info(name)
        except FileNotFoundError:
            # Where only objects may be read, asking for the bucket itself is refused.
            with contextlib.suppress(PermissionError):
                try:
                    store.info(bucket)
                except FileNotFoundError as error:
                    raise UserError(
                        f"{name}: there is no bucket {bucket}; make it, or name another place."
                    ) from error


def upload(file: str | os.PathLike, place: Path) -> None:
    """Puts a file into a store, whole or not at all; an object of that name is replaced."""
    name = os.fspath(place)
    with named_errors(name, RunError):
        filesystem(name).put_file(os.fspath(file), name)


def modified(path: Path) -> float:
    """When a file or an object was written, in seconds since the epoch."""
    if not in_store(path):
        return path.stat().st_mtime
    name = os.fspath(path)
    with named_errors(name, RunError):
        return filesystem(name).modified(name).timestamp()


def copy_file(source: Path, target: Path) -> None:
    """Copies a file or an object; `target` is in the file system only if `source` is."""
    if in_store(target):
        target.write_bytes(source.read_bytes())
    else:
        shutil.copyfile(source, target)


def remove_tree(folder: Path) -> None:
    """Removes a folder, or all objects below a name but held locks, which their holders remove."""
    if not in_store(folder):
        shutil.rmtree(folder)
        return
    name = os.fspath(folder)
    store = filesystem(name)
    with named_errors(name, RunError):
        keys = [key for key in store.find(name) if "/.lock/" not in key]
        if keys:
            store.rm(keys)


def listing(name: str) -> dict[str, tuple[int, str]]:
    """The objects at a name and below it: what follows the name -> size, and their version.

    A version is a text that changes with the content.
    """
    with named_errors(name):
        objects = filesystem(name).find(name, detail=True)
    versions = ("etag", "ETag", "generation", "mtime", "LastModified")
    return {
        key.removeprefix(key_of(name)).lstrip("/"): (
            about["size"],
            str(next((about[v] for v in versions if about.get(v)), "")),
        )
        for key, about in objects.items()
        if about["type"] == "file" and not key.endswith("/")
    }


def read_ranges(ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Bytes of objects of one store, fetched at once.

    `ranges`: an object, where its bytes begin, and where they end.

    Raises:
      RunError: the store cannot be reached.
    """
    if not ranges:
        return []
    names, starts, ends = map(list, zip(*ranges, strict=True))
    parts = filesystem(names[0]).cat_ranges(names, starts, ends)
    for data, (name, start, end) in zip(parts, ranges, strict=True):
        if isinstance(data, Exception):
            is_gone = isinstance(data, FileNotFoundError) or "satisfiable" in str(data)  # HTTP 416
        else:
            is_gone = len(data) != end - start
        if is_gone:
            raise UserError(
                f"{name}: bytes {start:,} to {end:,} were expected, but it is gone or shorter; "
                "copy the folder into the store again."
            )
        if isinstance(data, Exception):
            with named_errors(name, RunError):
                raise data
    return parts


def filesystem(name: str) -> Any:
    """fsspec's file system of a place in a store."""
    check_scheme(name, name)
    import fsspec

    with named_errors(name):
        return fsspec.filesystem(_PROTOCOLS[scheme_of(name)], **_FRESH)


def key_of(name: str) -> str:
    """BUCKET/NAME of gs://BUCKET/NAME."""
    return name.partition("://")[2].rstrip("/")


@contextlib.contextmanager
def named_errors(name: str, kind: type[UserError | RunError] = UserError) -> Iterator[None]:
    """Turns what the store's package raises into one sentence; the packages have no common error.

    That is a UserError before the work, and a RunError within it, after which launchers start a
    command again. Where the network fails it is a RunError in any case.
    """
    try:
        yield
    except (UserError, RunError, FileNotFoundError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if isinstance(error, ConnectionError | TimeoutError) or _NETWORK.search(reason):
            kind = RunError
        raise kind(
            f"{name}: the store refuses or cannot be reached ({reason}); check the name, the "
            f"permissions and the credentials ({_ADVICE[scheme_of(name)]})."
        ) from error


# s3:// for Orbax, which knows gs:// only.
#
# A store has no renaming: Orbax marks a checkpoint there as complete by a last object, deletes
# object by object, and lets TensorStore put the arrays. It does so for paths that begin with
# gs://. Here s3:// joins them, with TensorStore's driver for it. To be dropped once Orbax has its
# own (https://github.com/google/orbax/pull/2739).

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
