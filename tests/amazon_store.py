"""s3:// without Amazon: moto's server, to which s3fs and TensorStore speak as they do to Amazon's.

Only processes that are started within find it: a process of tests/object_store.py keeps that one's
s3://.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

BUCKET = "bucket"


class Bucket:
    """The objects of the bucket, as boto3 sees them."""

    def __init__(self, client):
        self._client = client

    def names(self, prefix=""):
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def download(self, names, prefix, folder):
        """The objects of these names, at what is behind the prefix below a folder."""
        for name in names:
            file = Path(folder, name.removeprefix(prefix).lstrip("/"))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read())


@contextlib.contextmanager
def started(monkeypatch):
    """The store with one empty bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    monkeypatch.setattr(logging.getLogger("werkzeug"), "level", logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    for key, value in {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }.items():
        monkeypatch.setenv(key, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield Bucket(client)
    server.stop()
