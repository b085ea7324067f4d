"""Embeddings of a whole corpus on disk: written shard by shard, resumable, memory-mapped.

A late-interaction encoder's have the vectors of all tokens beside them.

While the job runs, `folder` contains `manifest.json` and `shards-JOB/00000.jsonl`, ... (a
core.store); a job killed at any point resumes with the missing shards. Several processes, on
several hosts with a shared disk, may share a job: each writes every n-th shard, and the last to
finish joins them into one `embeddings.npy` (ScaNN needs a single array). JOB is a hash of the job's
manifest, so shards of another model or corpus are never used by mistake. SHA256SUMS has the
checksums of the finished files, which whoever opens them checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float32, Int, Int64, UInt8

from mmqa_jax.core.checkpoints.checksums import check_sums, digest, read_sums, write_sums
from mmqa_jax.core.chunks import MOST_PARTS, JobRecord, PartState, Unfinished, named
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, write_json
from mmqa_jax.core.local_copies import local_copy
from mmqa_jax.core.locks import alone
from mmqa_jax.core.paths import as_path, in_store, modified, remove_tree
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.store import Store, check_no_link
from mmqa_jax.retrieval.manifest import MANIFEST, check_manifest, manifest_bytes, read_manifest

_ARRAY = "embeddings.npy"
_TOKENS, _TOKEN_ENDS = "tokens.npy", "token_ends.npy"
_FILES = (_ARRAY, _TOKENS, _TOKEN_ENDS)
_ALIGNMENT = 64  # bytes, of XLA's arrays
_WHAT = "embeddings of a corpus"
_VERB = "mmqa embed"
BROKEN = "the checkpoint is broken: train again or use another one"
_REMEDY = f"delete the folder and run `{_VERB}` again"


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Unit vectors of every source of a corpus, by row."""

    vectors: Float32[np.ndarray, "n D"]  # float32[n, D], usually memory-mapped
    model_fingerprint: str  # of the encoder that made them; queries must come from the same one
    corpus_fingerprint: str  # of the corpus, whose rows these are
    # The vectors of the sources' tokens, of a late-interaction encoder.
    tokens: TokenVectors | None = None


class EmbeddedRows(NamedTuple):
    """Embedded sources."""

    vectors: Float32[np.ndarray, "n D"]  # of the sources
    # The bytes of all their tokens' vectors (TokenFormat); None: they are not stored.
    codes: UInt8[np.ndarray, "T W"] | None = None
    counts: Int64[np.ndarray, " n"] | None = None  # the tokens of each source


def open_embeddings(
    folder: str | os.PathLike,
    model_fingerprint: str | None = None,
    corpus_fingerprint: str | None = None,
) -> Embeddings:
    """Opens finished embeddings, memory-mapped."""
    folder = as_path(folder)
    manifest = read_manifest(folder, _WHAT, _VERB)
    fingerprints = {
        "model_fingerprint": model_fingerprint,
        "corpus_fingerprint": corpus_fingerprint,
    }
    check_manifest(folder, manifest, fingerprints, _VERB)
    if not manifest.get("complete"):
        raise UserError(f"{folder}: the embedding job did not finish; run `{_VERB}` again.")
    _check_sizes(folder, manifest)
    vectors = _open_array(folder, _ARRAY, np.float32, (manifest["rows"], manifest["dim"]))
    tokens = _open_tokens(folder, manifest) if manifest.get("tokens") else None
    check_sums(folder, {MANIFEST, *([] if in_store(folder) else _FILES)}, remedy=_REMEDY)
    return Embeddings(
        vectors, manifest["model_fingerprint"], manifest["corpus_fingerprint"], tokens
    )


def _open_tokens(folder: str | os.PathLike, manifest: dict[str, Any]) -> TokenVectors:
    """The tokens' vectors that a manifest says are there."""
    try:
        stored = dict(manifest["tokens"])
        dim, number = stored.pop("dim"), stored.pop("number")
        form = TokenFormat(**stored)
        shape = number, form.width(dim)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}/{MANIFEST}: tokens is {manifest['tokens']}, a precision, pool, dim and "
            f"number were expected; {_REMEDY}."
        ) from error
    ends = _open_array(folder, _TOKEN_ENDS, np.int64, (manifest["rows"],))
    if ends[-1] != number or (np.diff(ends, prepend=0) < 0).any():
        raise UserError(f"{folder}/{_TOKEN_ENDS}: does not fit {_TOKENS}; {_REMEDY}.")
    return TokenVectors(_open_array(folder, _TOKENS, np.uint8, shape), ends, dim, form)


def _open_array(
    folder: str | os.PathLike, name: str, dtype: type, shape: tuple[int, ...]
) -> np.ndarray:
    """A memory-mapped array of finished embeddings; of an object store its copy on this host."""
    folder = as_path(folder)
    file = local_copy(folder / name)
    array = _load(file, shape, dtype)
    if array is None:
        raise UserError(
            f"{folder}/{name}: missing or damaged, {np.dtype(dtype)} {list(shape)} was expected; "
            f"{_REMEDY}."
        )
    if in_store(folder):
        expected = (read_sums(folder) or {}).get(name)
        if expected is not None and digest(file) != expected:
            raise UserError(f"{folder}/{name}: is damaged; {_REMEDY}.")
    return array


def write_embeddings(
    folder: str | os.PathLike,
    embed_rows: Callable[[range], np.ndarray | EmbeddedRows],
    *,
    rows: int,
    dim: int,
    model_fingerprint: str,
    corpus_fingerprint: str,
    tokens: tuple[TokenFormat, int] | None = None,
    shard_rows: int = 4096,
    part: tuple[int, int] = (0, 1),
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Embeddings | None:
    """Runs an embedding job, or what remains of it.

    Args:
      embed_rows: embeds a range of rows, float32[len(range), dim]; called once per shard.
      rows, dim: size of the whole result.
      tokens: how the tokens' vectors in EmbeddedRows are stored, and their values each.
      shard_rows: rows per shard, the most work that a kill can lose.
      part: (i, n): this process writes the shards i, i + n, i + 2n, ... of a job shared by n.
      overwrite: start over if `folder` holds embeddings of another model or corpus.
      on_progress: called with (rows done, rows of this part) after every shard.

    Returns:
      The embeddings; None while other processes still have shards to write.
    """
    if rows < 1:
        raise UserError("embed: the corpus is empty, at least one source was expected.")
    mine, parts = part
    if not 0 <= mine < parts:
        raise UserError(f"embed: part {mine} of {parts} does not exist; count from 0.")
    folder = as_path(folder)
    job = {
        "what": _WHAT,
        "rows": rows,
        "dim": dim,
        "shard_rows": shard_rows,
        "model_fingerprint": model_fingerprint,
        "corpus_fingerprint": corpus_fingerprint,
    }
    if tokens is not None:
        job["tokens"] = {**dataclasses.asdict(tokens[0]), "dim": tokens[1]}
    with _locked(folder):
        earlier = _readable_manifest(folder)
        if earlier is not None and not overwrite:
            _refuse_other_job(folder, earlier, job, parts)
        if _is_complete(folder, job):
            return _finish(folder)
        write_json(folder / MANIFEST, {**job, "complete": False, "parts": parts})

    spans, shards = _spans(job), _open_shards(folder, job)
    done, total = 0, sum(map(len, spans[mine::parts]))
    for number in range(mine, len(spans), parts):
        span = spans[number]
        if not _is_whole(shards, number, (len(span), dim)):
            embedded = embed_rows(span)
            if not isinstance(embedded, EmbeddedRows):
                embedded = EmbeddedRows(np.asarray(embedded, np.float32))
            _check_finite(embedded.vectors, span)
            shards.add(_shard_values(number, embedded), alone=True)
        done += len(span)
        if on_progress is not None:
            on_progress(done, total)

    with _locked(folder):
        if not _is_complete(folder, job):  # no other process has joined them
            if _missing(folder, job):
                return None
            _join(folder, job)
        return _finish(folder)


def read_unfinished(folder: str | os.PathLike) -> Unfinished | None:
    """How far the job in `folder` is; None: it is finished. UserError: there is none."""
    folder = as_path(folder)
    manifest = read_manifest(folder, _WHAT, _VERB)
    if manifest.get("complete"):
        return None
    _check_sizes(folder, manifest)
    job, parts = _job_of(manifest)
    spans, shards = _spans(job), _open_shards(folder, job)
    written = [
        modified(shards.file_of(key)) if (key := _key(number)) in shards else None
        for number in range(len(spans))
    ]
    return Unfinished(parts, list(map(PartState, map(len, spans), written)))


def embedded_rows(folder: str | os.PathLike) -> int:
    """How many rows the job in `folder` has embedded."""
    if (unfinished := read_unfinished(folder)) is not None:
        return sum(part.items for part in unfinished.parts if part.ended is not None)
    manifest = read_manifest(folder, _WHAT, _VERB)
    _check_sizes(folder, manifest)
    return manifest["rows"]


def join_embeddings(folder: str | os.PathLike) -> Embeddings:
    """Finishes a job whose shards are all written."""
    folder = as_path(folder)
    manifest = read_manifest(folder, _WHAT, _VERB)
    _check_sizes(folder, manifest)
    job, parts = _job_of(manifest)
    check_no_link(_shards(folder, job))
    with _locked(folder):
        if not _is_complete(folder, job):
            if missing := _missing(folder, job):
                raise UserError(
                    f"{folder}: {len(missing)} of {-(-job['rows'] // job['shard_rows'])} parts are "
                    f"missing: {named(missing)}; start {JobRecord({}, parts).owners(missing)} "
                    "again."
                )
            _join(folder, job)
        return _finish(folder)


def _job_of(manifest: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The job of a manifest, and how many processes share it."""
    more = ("complete", "parts")
    job = {key: value for key, value in manifest.items() if key not in more}
    if isinstance(tokens := job.get("tokens"), dict):  # their number is of the result
        job["tokens"] = {key: value for key, value in tokens.items() if key != "number"}
    return job, manifest.get("parts", 1)


def _spans(job: dict[str, Any]) -> list[range]:
    """The rows of every shard."""
    rows, size = job["rows"], job["shard_rows"]
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def _key(number: int) -> str:
    return f"{number:05d}"


def _shard_values(number: int, embedded: EmbeddedRows) -> dict[str, np.ndarray]:
    """Returns the arrays of a shard's file by key."""
    key = _key(number)
    values = {key: embedded.vectors}
    if embedded.codes is not None:
        values |= {f"{key} codes": embedded.codes, f"{key} counts": embedded.counts}
    return values


def _open_shards(folder: Path, job: dict[str, Any]) -> Store:
    """The shards by number; damaged ones are missing."""
    place = _shards(folder, job)
    if any(place.glob("*.npy")):
        raise UserError(
            f"{place}: holds shards of an older version of mmqa-jax; finish the job with that "
            "version, or delete this folder, and they are computed again."
        )
    return Store(place, job, damage="drop")


def _missing(folder: Path, job: dict[str, Any]) -> list[int]:
    """The shards that are missing or damaged."""
    shards, spans = _open_shards(folder, job), enumerate(_spans(job))
    return [n for n, span in spans if not _is_whole(shards, n, (len(span), job["dim"]))]


def _join(folder: Path, job: dict[str, Any]) -> None:
    """Concatenates the shards into one array each, with one shard in memory at a time."""
    _join_array(folder, job, _ARRAY, "", "<f4", (job["rows"], job["dim"]))
    manifest, files = {**job, "complete": True}, [_ARRAY]
    if "tokens" in job:
        shards, spans = _open_shards(folder, job), _spans(job)
        counts = [_part(shards, number, " counts") for number in range(len(spans))]
        ends = np.cumsum(np.concatenate(counts))
        width = _part(shards, 0, " codes").shape[1]
        _join_array(folder, job, _TOKENS, " codes", "|u1", (int(ends[-1]), width))
        with atomic_write(folder / _TOKEN_ENDS, "wb") as file:
            np.save(file, ends)
        manifest["tokens"] = {**job["tokens"], "number": int(ends[-1])}
        files += [_TOKENS, _TOKEN_ENDS]
    content = manifest_bytes(manifest)
    write_sums(folder, files, coming={MANIFEST: content})
    with atomic_write(folder / MANIFEST, "wb") as file:
        file.write(content)


def _join_array(
    folder: Path, job: dict[str, Any], name: str, column: str, dtype: str, shape: tuple[int, ...]
) -> None:
    """Writes one array of all shards' arrays under the key with `column` behind it."""
    with atomic_write(folder / name, "wb") as file:
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        shards = _open_shards(folder, job)
        for number in range(len(_spans(job))):
            file.write(np.ascontiguousarray(_part(shards, number, column)).data)


def _part(shards: Store, number: int, column: str) -> np.ndarray:
    """An array of a shard; UserError where it is damaged."""
    key = _key(number)
    array = None if shards.get(key) is None else shards.get(f"{key}{column}")
    if array is None:
        raise UserError(
            f"{shards.folder}/{key}.jsonl: is damaged; delete it, and the next start of `{_VERB}` "
            "computes it again."
        )
    return array


def _finish(folder: Path) -> Embeddings:
    """Removes all shards, also those of earlier jobs, and opens the joined embeddings."""
    for shards in folder.glob("shards-*"):
        with contextlib.suppress(OSError):
            remove_tree(shards)
    return open_embeddings(folder)


def _is_complete(folder: Path, job: dict[str, Any]) -> bool:
    manifest = _readable_manifest(folder)
    if manifest is None or _job_of(manifest)[0] != job or not manifest.get("complete"):
        return False
    shape = (job["rows"], job["dim"])
    file = folder / _ARRAY
    return _has_size(file, shape) if in_store(file) else _load(file, shape) is not None


def _shards(folder: Path, job: dict[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps(job, sort_keys=True).encode(), digest_size=8)
    return folder / f"shards-{digest.hexdigest()}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks out the job's other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / ".lock"):
        yield


def _readable_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(folder, _WHAT, _VERB)
    except UserError:
        return None


def _refuse_other_job(
    folder: Path, earlier: dict[str, Any], job: dict[str, Any], parts: int
) -> None:
    shared = parts > 1 or earlier.get("parts", 1) > 1
    earlier, _ = _job_of(earlier)
    for key in {**job, **earlier}:
        # Another shard size gives the same result, but processes must agree on the shards; how many
        # they are does not matter.
        if earlier.get(key) != job.get(key) and (shared or key != "shard_rows"):
            raise UserError(
                f"{folder / MANIFEST}: holds embeddings with {key} {earlier.get(key)!r}, this "
                f"job's is {job.get(key)!r}; name another --out or give --overwrite."
            )


def _is_whole(shards: Store, number: int, shape: tuple[int, int]) -> bool:
    """Whether a shard has this shape, and is not damaged; in an object store that is seen later."""
    if in_store(shards.folder):
        return shards.is_whole(_key(number))
    vectors = shards.get(_key(number))
    is_array = isinstance(vectors, np.ndarray)
    return is_array and vectors.shape == shape and vectors.dtype == np.float32


def _has_size(path: Path, shape: tuple[int, int]) -> bool:
    """Whether the file at `path` is as long as an array of this shape."""
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            stored_shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            start = file.tell()
    except (OSError, ValueError, EOFError):
        return False
    is_long = path.stat().length == start + 4 * shape[0] * shape[1]
    return stored_shape == shape and dtype == np.float32 and is_long


def _load(path: Path, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray | None:
    """The memory-mapped array at `path`, None if it is missing, damaged or of another shape."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return array if array.shape == shape and array.dtype == dtype else None


def _check_sizes(folder: str | os.PathLike, manifest: dict[str, Any]) -> None:
    """UserError if a manifest does not say how many rows there are, of a size that can be."""
    sizes = [manifest.get(name) for name in ("rows", "dim", "shard_rows")]
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not whole or -(-sizes[0] // sizes[2]) > MOST_PARTS or sizes[0] * sizes[1] > 1 << 60:
        raise UserError(
            f"{folder}/{MANIFEST}: rows, dim and shard_rows are {sizes}, sizes of embeddings were "
            f"expected; {_REMEDY}."
        )


def _check_finite(vectors: np.ndarray, span: range) -> None:
    if len(bad := not_finite(vectors)):
        raise UserError(
            f"embed: the vectors of {len(bad)} sources are not finite, the first is row "
            f"{span.start + int(bad[0])}; {BROKEN}."
        )


# Arrays of vectors: finite wherever they are used.


_BLOCK = 65_536  # rows that are looked at together


def not_finite(vectors: Float32[np.ndarray, "n D"]) -> Int[np.ndarray, " m"]:
    """The rows of which a product can be no number: with NaN or inf, or a length beyond float32.

    Of the others every dot product is finite (Cauchy-Schwarz); one that is NaN would rank first.
    """
    bad = []
    for start in range(0, len(vectors), _BLOCK):
        block = np.asarray(vectors[start : start + _BLOCK], np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("nd,nd->n", block, block)
        bad.append(start + np.flatnonzero(~np.isfinite(squares)))
    return np.concatenate(bad) if bad else np.zeros(0, int)


def check_finite(vectors: Float32[np.ndarray, "n D"], what: str, remedy: str) -> None:
    """UserError, of `what`, `row 3 of 5 ...` and `remedy`, if a row is not finite."""
    bad = not_finite(vectors)
    if len(bad):
        more = f", nor {len(bad) - 1:,} more" if len(bad) > 1 else ""
        raise UserError(
            f"{what}: row {bad[0]} of {len(vectors):,} is not finite{more} (NaN, infinity or too "
            f"large for float32); {remedy}."
        )


# Embeddings kept on disk, found again by the content that was embedded.


_MANY = 2_000  # contents, from which on their progress is shown


def cached_vectors(
    folder: Path,
    fingerprint: str,
    contents: Sequence[str | bytes],
    embed: Callable[[Int[np.ndarray, " rows"]], Float32[np.ndarray, "rows D"]],
    *,
    unit: str = "texts",
    block: int = 1_024,
    groups: Sequence[str] | None = None,
) -> Float32[np.ndarray, "n D"]:
    """The vectors of `contents`, computed unless an earlier run kept them.

    They are computed and kept in blocks, so that an interrupted run continues with the next one.
    A block is found by all of its contents: a vector may depend, in its last bits, on those that
    it was computed with.

    Args:
      folder: of the cache; it has a folder for each encoder.
      fingerprint: of the encoder and of how it is used.
      contents: what is embedded, or its digests, in order.
      embed: computes the vectors of the contents with these indices.
      unit: what is embedded, for the progress.
      block: contents of a block, and of a call of `embed` at least; fewer than an embedder shows
        the progress of.
      groups: of each content, such as its file: contents of one group are a block, so that only
        the groups that change are computed again. None: blocks are of similar length.
    """
    blocks = _of_similar_length(contents, block) if groups is None else _of_groups(groups)
    keys = [_digest(contents[row] for row in rows) for rows in blocks]
    encoder = hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
    with Store(folder / encoder, {"encoder": fingerprint}, damage="drop") as store:
        stored = [_kept(store, key, len(rows)) for key, rows in zip(keys, blocks, strict=True)]
        with _progress(unit, blocks, stored) as advance:
            for numbers in _together(blocks, stored, block):
                rows = np.concatenate([blocks[number] for number in numbers])
                vectors = np.asarray(embed(rows))
                check_finite(vectors, f"embed: the vectors of {unit}", BROKEN)
                ends = np.cumsum([len(blocks[number]) for number in numbers])
                parts = dict(zip(numbers, np.split(vectors, ends[:-1]), strict=True))
                store.add({keys[number]: part for number, part in parts.items()})
                for number, part in parts.items():
                    stored[number] = part
                advance(len(rows))
    vectors = np.concatenate(stored)
    in_order = _aligned(vectors.shape)
    in_order[np.concatenate(blocks)] = vectors
    return in_order


def _aligned(shape: tuple[int, int]) -> np.ndarray:
    """An array whose memory a CPU's programs read in place, as they do that of a file's map."""
    memory = np.empty(math.prod(shape) * 4 + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : memory.nbytes - _ALIGNMENT + start].view(np.float32).reshape(shape)


def _of_similar_length(contents: Sequence[str | bytes], block: int) -> list[np.ndarray]:
    """The rows of every block: texts of similar length together, as the embedder batches them."""
    order = np.arange(len(contents))
    if len(contents) > block:
        order = np.argsort([len(content) for content in contents], kind="stable")
    return [order[start : start + block] for start in range(0, max(len(order), 1), block)]


def _of_groups(groups: Sequence[str]) -> list[np.ndarray]:
    """The rows of every block: those of a group."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return [np.array(members) for members in rows.values()]


def _together(
    blocks: Sequence[np.ndarray], stored: Sequence[np.ndarray | None], least: int
) -> Iterator[list[int]]:
    """Numbers of the blocks that nothing is kept of, in groups of at least so many contents."""
    waiting: list[int] = []
    for number, vectors in enumerate(stored):
        if vectors is None:
            waiting.append(number)
        if waiting and sum(len(blocks[n]) for n in waiting) >= least:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _digest(contents: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        data = content.encode() if isinstance(content, str) else content
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()[:32]


def _kept(store: Store, key: str, rows: int) -> np.ndarray | None:
    """The vectors of a block; None where there are not so many, or they are of no use."""
    vectors = store.get(key)
    is_whole = isinstance(vectors, np.ndarray) and vectors.ndim == 2 and len(vectors) == rows
    return vectors if is_whole and not len(not_finite(vectors)) else None


@contextlib.contextmanager
def _progress(
    unit: str, blocks: Sequence[np.ndarray], stored: Sequence[np.ndarray | None]
) -> Iterator[Callable[[int], None]]:
    """Shows how many are embedded, if there are many; yields what counts more of them."""
    total = sum(map(len, blocks))
    start = sum(len(vectors) for vectors in stored if vectors is not None)
    quiet = None if total >= _MANY else True
    with Progress(f"Embedding {unit}", total, unit, start=start, quiet=quiet) as progress:
        yield progress.advance


# The vectors of all tokens of a corpus, as `mmqa embed` keeps them for late interaction.


Precision = Literal["float16", "int8", "binary"]
_HELD = 4_096  # sources whose tokens were encoded when they were asked for


@dataclasses.dataclass(frozen=True)
class TokenFormat:
    """How the vectors of a source's tokens are stored."""

    # `float16`; `int8`, with a float16 scale for each vector; or `binary`, the sign of each value.
    precision: Precision = "int8"
    pool: int = 1  # a source keeps about one vector for so many tokens; 1: all of them

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise UserError(
                f"--tokens={self.precision}: is no precision of tokens' vectors; use one of "
                f"{', '.join(get_args(Precision))}."
            )
        if self.pool < 1:
            raise UserError(f"--pool={self.pool}: must be 1 or more, the tokens of one vector.")

    def width(self, dim: int) -> int:
        """The bytes of a vector of `dim` values."""
        return {"float16": 2 * dim, "int8": dim + 2, "binary": -(-dim // 8)}[self.precision]

    def encode(self, vectors: Float32[np.ndarray, "T D"]) -> UInt8[np.ndarray, "T W"]:
        """The bytes of each vector."""
        if self.precision == "binary":
            return np.packbits(vectors > 0, axis=1)
        if self.precision == "float16":
            return vectors.astype("<f2").view(np.uint8)
        scales = np.maximum(np.abs(vectors).max(1, keepdims=True) / 127, 1e-6).astype("<f2")
        whole = np.clip(np.rint(vectors / scales.astype(np.float32)), -127, 127).astype(np.int8)
        return np.concatenate([whole.view(np.uint8), scales.view(np.uint8)], axis=1)

    def decode(
        self, codes: UInt8[np.ndarray, "T W"], dim: int
    ) -> tuple[Float32[np.ndarray, "T D"], Float32[np.ndarray, "T 1"] | np.float32]:
        """Vectors, and what each is to be multiplied by; those of signs get the length 1."""
        if self.precision == "binary":
            bits = np.unpackbits(codes, axis=1, count=dim)
            return 2 * bits.astype(np.float32) - 1, np.float32(dim**-0.5)
        if self.precision == "float16":
            return codes.view("<f2").astype(np.float32), np.float32(1)
        scales = np.ascontiguousarray(codes[:, dim:]).view("<f2").astype(np.float32)
        return codes[:, :dim].view(np.int8).astype(np.float32), scales


@dataclasses.dataclass(frozen=True)
class TokenVectors:
    """The tokens' vectors of every source of a corpus, by row."""

    codes: UInt8[np.ndarray, "T W"]  # usually memory-mapped; `format` says what they stand for
    ends: Int64[np.ndarray, " n"]  # behind each source's last token
    dim: int  # the values of a vector
    format: TokenFormat

    def counts(self) -> Int64[np.ndarray, " n"]:
        """How many tokens each source has."""
        return np.diff(self.ends, prepend=0)

    def rows(self, rows: Sequence[int]) -> list[UInt8[np.ndarray, "tokens W"]]:
        """The bytes of the tokens of the sources in these rows."""
        codes = np.asarray(self.codes)  # slices of a memory map are slow
        rows = np.asarray(rows, np.int64)
        ends = self.ends[rows]
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        return [codes[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


class EncodedTokens:
    """TokenVectors of few sources that nobody stored: they are encoded when they are asked for,
    and the last `_HELD` of them stay in memory.

    Args:
      encode: rows of sources -> the vectors of their tokens, float32 [tokens, D] each.
      dim: the values of a vector.
    """

    format = TokenFormat("float16")

    def __init__(self, encode: Callable[[Sequence[int]], Sequence[np.ndarray]], dim: int):
        self._encode, self.dim = encode, dim
        self._codes: dict[int, np.ndarray] = {}

    def rows(self, rows: Sequence[int]) -> list[UInt8[np.ndarray, "tokens W"]]:
        """See TokenVectors."""
        missing = [row for row in dict.fromkeys(map(int, rows)) if row not in self._codes]
        encoded = self._encode(missing) if missing else ()
        for row, vectors in zip(missing, encoded, strict=True):
            self._codes[row] = self.format.encode(vectors)
        of_rows = [self._codes[int(row)] for row in rows]
        for row in list(self._codes)[:-_HELD]:
            del self._codes[row]
        return of_rows


def pool_tokens(
    vectors: Float32[np.ndarray, "T D"], pool: float, protected: int = 1, normalized: bool = True
) -> Float32[np.ndarray, "t D"]:
    """Merges unit vectors that are alike into T // pool means.

    Ward's clusters of 1 - cosine (Clavié et al. 2024, "Reducing the Footprint of Multi-Vector
    Retrieval"), as sentence-transformers' HierarchicalTokenPooling.

    Args:
      vectors: of the tokens of one text.
      pool: a mean stands for about so many tokens.
      protected: tokens at the beginning that stay apart, such as [CLS].
      normalized: whether means are scaled to length 1.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    first, merged = vectors[:protected], vectors[protected:]
    clusters = max(int(len(merged) // pool), 1)
    if clusters >= len(merged):
        return vectors
    distances = squareform(np.clip(1 - merged @ merged.T, 0, 2), checks=False)
    tree = hierarchy.linkage(distances, method="ward")
    _, cluster = np.unique(hierarchy.fcluster(tree, clusters, "maxclust"), return_inverse=True)
    means = np.zeros((cluster.max() + 1, vectors.shape[1]), np.float32)
    np.add.at(means, cluster, merged)
    if normalized:
        means /= np.linalg.norm(means, axis=1, keepdims=True)
    else:
        means /= np.bincount(cluster)[:, None]
    return np.concatenate([first, means])
