"""What the hosts of a launch read of a prepared corpus at s3://: a copy, or records by ranges.

    python -m tests.streamed_batches DATA [BATCHES [SIZE]]   two hosts beside one, each way: a table

The store is moto's on this machine, and a host is a process that makes its rows of every batch of a
contrastive training. Bytes are what S3's client returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import amazon_store

PLACE = f"s3://{amazon_store.BUCKET}/data"


def put_folder(folder, prefix="data"):
    """Puts a folder's files into the bucket of the environment."""
    import boto3

    client = boto3.client("s3")
    for file in filter(Path.is_file, Path(folder).rglob("*")):
        key = f"{prefix}/{file.relative_to(folder)}"
        client.put_object(Bucket=amazon_store.BUCKET, Key=key, Body=file.read_bytes())


def start_host(cache, **asked):
    """Starts a host: the arguments of `host`."""
    command = [sys.executable, "-m", "tests.streamed_batches", "--host", json.dumps(asked)]
    environment = {**os.environ, "MMQA_CACHE": str(cache), "MMQA_PROGRESS": "off"}
    root = Path(__file__).parents[1]
    return subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True)


def told(host):
    """What a host that has ended printed."""
    printed, _ = host.communicate()
    assert host.returncode == 0, printed
    return json.loads(printed)


def host(place=PLACE, rows=None, start=0, batches=8, size=8, stream=True, threads=2, side=32):
    """Makes batches of a contrastive training.

    Returns:
      rows: of each batch, SHA-256 of each example's pictures; bytes, requests: that S3's client
      returned; first, seconds, cpu: to the first batch, to the end, and of the processor.
    """
    import contextlib

    import s3fs

    from mmqa_jax.core.local_copies import local_copy
    from mmqa_jax.data.batches.feed import FeedConfig
    from mmqa_jax.data.batches.retriever import ContrastSampling, contrastive_batches
    from mmqa_jax.data.batches.source_reader import SourceReader
    from mmqa_jax.data.corpus import open_corpus
    from mmqa_jax.data.pictures.store import PictureStore
    from mmqa_jax.data.tokenizers import minilm_tokenizer

    result = {"bytes": 0, "requests": 0, "rows": []}
    cat_file, get_file = s3fs.S3FileSystem._cat_file, s3fs.S3FileSystem._get_file

    async def counted_cat(self, *more, **named):
        data = await cat_file(self, *more, **named)
        result["bytes"] += len(data)
        result["requests"] += 1
        return data

    async def counted_get(self, source, target, *more, **named):
        await get_file(self, source, target, *more, **named)
        result["bytes"] += os.path.getsize(target)
        result["requests"] += 1

    s3fs.S3FileSystem._cat_file, s3fs.S3FileSystem._get_file = counted_cat, counted_get
    began = time.perf_counter()
    corpus = open_corpus(local_copy(place, stream=stream))
    reader = SourceReader(corpus, minilm_tokenizer(), PictureStore(corpus, side, cache_bytes=0))
    asked = [q for q in corpus.questions("train") if q.positives]
    made = contrastive_batches(
        reader,
        asked,
        FeedConfig(size, threads=threads, rows=None if rows is None else tuple(rows)),
        ContrastSampling(query_length=16, source_lengths=(16,), num_negatives=0),
    )
    made.set_state({**made.get_state(), "next_index": start})
    with contextlib.closing(made):
        for _ in range(batches):
            batch = next(made)
            result.setdefault("first", time.perf_counter() - began)
            pixels = batch["pixels"].reshape(len(batch["index"]), -1)
            result["rows"].append([hashlib.sha256(one.tobytes()).hexdigest() for one in pixels])
    result |= {"seconds": time.perf_counter() - began, "cpu": time.process_time()}
    return result


def main():
    if sys.argv[1] == "--host":
        print(json.dumps(host(**json.loads(sys.argv[2]))))
        return
    data, batches, size = sys.argv[1], *map(int, [*sys.argv[2:], 40, 32][:2])
    asked = {"batches": batches, "size": size}
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        amazon_store.started(patch),
    ):
        put_folder(data)
        shards = Path(data).rglob("pictures-*")
        print(f"pictures: {sum(one.stat().st_size for one in shards) / 2**20:.1f} MiB")
        print("| read | host | MiB | requests | s to the first batch | s in all | s of a core |")
        print("|---|---|---:|---:|---:|---:|---:|")
        seen = []
        for stream, count in ((False, 2), (True, 1), (True, 2)):
            hosts = [
                start_host(f"{folder}/{stream}{count}{i}", rows=list(range(i, size, count)),
                           stream=stream, **asked)
                for i in range(count)
            ]  # fmt: skip
            found = list(map(told, hosts))
            for number, one in enumerate(found):
                way = "by ranges" if stream else "copied"
                print(
                    f"| {way} | {number + 1} of {count} | {one['bytes'] / 2**20:.1f} | "
                    f"{one['requests']} | {one['first']:.1f} | {one['seconds']:.1f} | "
                    f"{one['cpu']:.1f} |"
                )
            parts = zip(*(one["rows"] for one in found), strict=True)
            seen.append(
                [[row for rows in zip(*part, strict=True) for row in rows] for part in parts]
            )
        assert seen[0] == seen[1] == seen[2], "the batches differ"


if __name__ == "__main__":
    main()
