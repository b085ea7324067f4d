"""A stand-in of an object store: gs:// and s3:// in a local folder, without the real packages.

An object is one file, named by its quoted name; there are no folders. Nothing can be renamed or
appended to, and no file is an object before it is whole. Two ways lead to the objects: `StandIn`,
an fsspec file system in place of gcsfs and s3fs, and for gs:// the HTTP server `serve`, to which
TensorStore's own driver speaks Google's protocol.

A test starts it with `started`. Processes that it starts find it by the environment: `install`.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import sys
import threading
import types
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path

import fsspec
from fsspec.spec import AbstractBufferedFile

BUCKET = "bucket"
_ROOT = "MMQA_TEST_OBJECT_STORE"


def quoted(name):
    return urllib.parse.quote(name, safe="")


class Objects:
    """The objects of a bucket, each a file in a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def names(self, prefix=""):
        return sorted(
            name
            for name in map(urllib.parse.unquote, os.listdir(self.folder))
            if name.startswith(prefix) and not name.startswith("\0")
        )

    def path(self, name):
        return self.folder / quoted(name)

    def put(self, name, content):
        temporary = self.folder / quoted(f"\0{os.getpid()}-{threading.get_ident()}")
        temporary.write_bytes(content)
        os.replace(temporary, self.path(name))

    def version(self, name):
        status = self.path(name).stat()
        return str(status.st_mtime_ns + status.st_ino % 1000)


class StandIn(fsspec.AbstractFileSystem):
    """What gcsfs and s3fs have in common, and nothing that a store cannot do."""

    cachable = False

    def _objects(self, bucket):
        folder = Path(os.environ[_ROOT], bucket)
        if not folder.is_dir():
            raise FileNotFoundError(bucket)
        if (folder.parent / f"{bucket}.denied").exists():
            raise OSError("Anonymous caller does not have storage.objects.list access")
        return Objects(folder)

    def _split(self, path):
        bucket, _, name = self._strip_protocol(path).partition("/")
        return self._objects(bucket), bucket, name

    def _about(self, objects, bucket, name):
        try:
            size, version = objects.path(name).stat().st_size, objects.version(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{bucket}/{name}") from error
        return {"name": f"{bucket}/{name}", "size": size, "type": "file", "etag": version}

    def info(self, path, **_):
        objects, bucket, name = self._split(path)
        if name and objects.path(name).is_file():
            return self._about(objects, bucket, name)
        if not name or objects.names(f"{name}/"):
            return {"name": f"{bucket}/{name}".rstrip("/"), "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **_):
        objects, bucket, name = self._split(path)
        prefix = f"{name}/" if name else ""
        found = {}
        for one in objects.names(prefix):
            first, slash, _ = one.removeprefix(prefix).partition("/")
            key = f"{bucket}/{prefix}{first}"
            with contextlib.suppress(FileNotFoundError):
                found[key] = (
                    {"name": key, "size": 0, "type": "directory"}
                    if slash
                    else self._about(objects, bucket, one)
                )
        if not found:  # an object, or nothing
            found = {path: self.info(path)} if name else {}
        return list(found.values()) if detail else list(found)

    def exists(self, path, **_):
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def modified(self, path):
        objects, _, name = self._split(path)
        return datetime.fromtimestamp(objects.path(name).stat().st_mtime, UTC)

    def _rm(self, path):
        objects, _, name = self._split(path)
        objects.path(name).unlink()

    def rm(self, path, recursive=False, maxdepth=None):
        for one in [path] if isinstance(path, str) else path:
            name = self._strip_protocol(one)
            for key in self.find(name) if recursive else [name]:
                self._rm(key)

    def rm_file(self, path):
        self._rm(path)

    def makedirs(self, path, exist_ok=False):
        self._split(path)

    def mkdir(self, path, create_parents=True, **_):
        self._split(path)

    def put_file(self, lpath, rpath, **_):
        objects, _, name = self._split(rpath)
        objects.put(name, Path(lpath).read_bytes())

    def _open(self, path, mode="rb", **named):
        if mode not in ("rb", "wb"):
            raise ValueError(f"a store cannot open an object with mode {mode}")
        return _File(self, self._strip_protocol(path), mode, **named)

    def mv(self, *_, **__):
        raise NotImplementedError("a store has no renaming")

    move = rename = mv

    def cp_file(self, path1, path2, **_):
        objects, _, name = self._split(path1)
        target, _, copied = self._split(path2)
        target.put(copied, objects.path(name).read_bytes())


class _File(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        objects, _, name = self.fs._split(self.path)
        return objects.path(name).read_bytes()[start:end]

    def _initiate_upload(self):
        self._parts = b""

    def _upload_chunk(self, final=False):
        self._parts += self.buffer.getvalue()
        if final:
            objects, _, name = self.fs._split(self.path)
            objects.put(name, self._parts)
        return True


class GoogleStore(StandIn):
    protocol = ("gs", "gcs")


class AmazonStore(StandIn):
    protocol = ("s3", "s3a")


def install():
    """Uses the stand-in of the environment in this process, if there is one."""
    if _ROOT not in os.environ:
        return
    for scheme, kind in (("gs", GoogleStore), ("gcs", GoogleStore), ("s3", AmazonStore)):
        fsspec.register_implementation(scheme, kind, clobber=True)
    # Orbax asks Google's own package whether the bucket has folders.
    bucket = types.SimpleNamespace(hierarchical_namespace_enabled=False)
    storage = types.ModuleType("google.cloud.storage")
    storage.Client = lambda: types.SimpleNamespace(get_bucket=lambda name: bucket)
    cloud = types.ModuleType("google.cloud")
    cloud.storage = storage
    sys.modules |= {"google.cloud": cloud, "google.cloud.storage": storage}


class _Server(http.server.BaseHTTPRequestHandler):
    """The part of Google's JSON interface that TensorStore uses."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _asked(self):
        address = urllib.parse.urlsplit(self.path)
        asked = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        parts = address.path.partition("/b/")[2].split("/")
        objects = Objects(Path(self.server.root, parts[0]))
        name = urllib.parse.unquote(parts[2]) if len(parts) > 2 else asked.get("name")
        return objects, name, asked

    def _send(self, code, content=b"", **headers):
        self.send_response(code)
        for key, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)

    def _metadata(self, objects, name):
        version = objects.version(name)
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": objects.folder.name,
            "generation": version,
            "metageneration": "1",
            "size": str(objects.path(name).stat().st_size),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }

    def _version(self, objects, name):
        try:
            return objects.version(name)
        except FileNotFoundError:
            return "0"

    def _refused(self, objects, name, asked):
        """Whether a condition on the object's version does not hold."""
        version = self._version(objects, name)
        if asked.get("ifGenerationMatch", version) != version:
            self._send(412)
            return True
        if asked.get("ifGenerationNotMatch") == version:
            self._send(304)
            return True
        return False

    def do_GET(self):
        objects, name, asked = self._asked()
        with self.server.lock:
            if name is None:
                names = objects.names(asked.get("prefix", ""))
                names = [n for n in names if n >= asked.get("startOffset", "")]
                end = asked.get("endOffset")
                names = [n for n in names if not end or n < end]
                items = [self._metadata(objects, n) for n in names]
                self._send(200, json.dumps({"items": items}).encode())
                return
            if not objects.path(name).is_file():
                self._send(404)
                return
            if self._refused(objects, name, asked):
                return
            content = objects.path(name).read_bytes()
            version = objects.version(name)
        headers = {"x_goog_generation": version, "ETag": f'"{version}"'}
        if asked.get("alt") != "media":
            self._send(200, json.dumps(self._metadata(objects, name)).encode())
        elif span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(len(content) - int(last), 0)
            end = min(int(last) + 1, len(content)) if last and first else len(content)
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            self._send(206, content[start:end], **headers)
        else:
            self._send(200, content, **headers)

    def do_POST(self):
        objects, name, asked = self._asked()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            if not self._refused(objects, name, asked):
                objects.put(name, content)
                self._send(200, json.dumps(self._metadata(objects, name)).encode())

    def do_DELETE(self):
        objects, name, asked = self._asked()
        with self.server.lock:
            if not objects.path(name).is_file():
                self._send(404)
            elif not self._refused(objects, name, asked):
                objects.path(name).unlink()
                self._send(204)


@contextlib.contextmanager
def started(root, monkeypatch):
    """The stand-in, with one bucket; also for the processes that are started within."""
    (Path(root) / BUCKET).mkdir(parents=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.root, server.lock, server.daemon_threads = root, threading.Lock(), True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for key, value in {
        _ROOT: str(root),
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",
        "EPATH_USE_TF": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }.items():
        monkeypatch.setenv(key, value)
    for name in ("google.cloud", "google.cloud.storage"):
        monkeypatch.setitem(sys.modules, name, None)
    install()
    yield
    server.shutdown()
    server.server_close()
    thread.join()
