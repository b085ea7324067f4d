"""Places in an object store (gs://, s3://): paths, whole writes, locks, copies, refusals."""

import contextlib
import importlib.util
import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import object_store
import pytest
from cli_runs import mmqa

from mmqa_jax.core import locks, paths
from mmqa_jax.core.chunks import JobRecord, write_job
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import atomic_write, check_out, read_json, read_jsonl, write_json
from mmqa_jax.core.local_copies import local_copy, with_local_copies
from mmqa_jax.core.locks import Busy, alone, hold, nobody_else
from mmqa_jax.core.metrics import MetricsWriter, read_metrics
from mmqa_jax.core.paths import as_path, check_store
from mmqa_jax.retrieval.embeddings import open_embeddings, read_unfinished, write_embeddings
from mmqa_jax.retrieval.manifest import read_manifest, replace_folder
from mmqa_jax.runs.merging import merge_parts
from mmqa_jax.training import loop
from tests.refusals import refuses

GS, S3 = f"gs://{object_store.BUCKET}", f"s3://{object_store.BUCKET}"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "all"
    with pytest.MonkeyPatch.context() as patch, object_store.started(folder, patch):
        yield object_store.Objects(folder / object_store.BUCKET)


@pytest.fixture
def store(stand_in, tmp_path, monkeypatch):
    """The objects of an empty bucket."""
    for name in stand_in.names():
        stand_in.path(name).unlink()
    monkeypatch.setenv("MMQA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 0.4)
    return stand_in


@pytest.mark.parametrize("root", [GS, S3])
def test_an_object_is_written_whole_or_not_at_all(store, root):
    path = as_path(f"{root}/folder/file.json")
    write_json(path, {"n": 1})

    def write_half():
        with atomic_write(path) as file:
            file.write("half")
            file.flush()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert read_json(path) == read_json(str(path)) == {"n": 1}
    with atomic_write(path, "wb") as file:
        file.write(b'{"a": 1}\n{"a": 2}\n')
    assert [row for _, row in read_jsonl(path)] == [{"a": 1}, {"a": 2}]
    assert store.names() == ["folder/file.json"]
    refuses(f"{root}/other: no such file", read_json, f"{root}/other")


def test_a_lock_of_one(store):
    first = hold(as_path(f"{GS}/.lock"))
    refuses(f"process {os.getpid()} on ", hold, as_path(f"{GS}/.lock"), error=Busy)
    with pytest.raises(Busy):
        hold(as_path(f"{GS}/.lock"), shared=True)
    assert len(store.names()) == 1  # those who were refused left nothing
    first.close()
    assert store.names() == []
    hold(as_path(f"{GS}/.lock")).close()


def test_a_lock_of_many(store):
    one, two = (hold(as_path(f"{GS}/.lock"), shared=True) for _ in range(2))
    assert not nobody_else(one)
    with pytest.raises(Busy):
        hold(as_path(f"{GS}/.lock"))
    two.close()
    assert nobody_else(one)
    with pytest.raises(Busy):
        hold(as_path(f"{GS}/.lock"), shared=True)
    one.close()


def test_the_lock_of_a_dead_process_is_taken(store):
    holder = {"owner": "process 1 on elsewhere", "beats": 1}
    store.put(".lock/alone-elsewhere-1-0", json.dumps(holder).encode())
    with alone(as_path(f"{GS}/.lock")):  # after PATIENCE_SECONDS
        assert len(store.names()) == 1
        assert "elsewhere" not in store.names()[0]
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for kind in ("alone", "shared"):
        store.put(f".lock/{kind}-{socket.gethostname()}-{child}-0", json.dumps(holder).encode())
    hold(as_path(f"{GS}/.lock")).close()
    assert store.names() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_lost_its_lock_ends(store, monkeypatch, capfd):
    codes = []

    def end(code):
        codes.append(code)
        raise SystemExit  # of the beating thread

    monkeypatch.setattr(locks.os, "_exit", end)
    lock = hold(as_path(f"{GS}/.lock"))
    store.path(store.names()[0]).unlink()
    lock._thread.join(10)
    assert codes == [75]
    assert "another process took this lock" in capfd.readouterr().err
    lock.close()


def test_a_copy_follows_the_store(store, monkeypatch):
    fetched = []
    get_file = object_store.StandIn.get_file

    def counted(self, source, *more, **named):
        fetched.append(source.rpartition("/")[2])
        return get_file(self, source, *more, **named)

    monkeypatch.setattr(object_store.StandIn, "get_file", counted)
    names = ("model.json", "weights/d/0", "checkpoints/5/x", "best/model.json", "events.out.1")
    for name in (*names, ".lock/alone-x", "data/.lock/x", "tables/a.txt"):
        store.put(f"run/{name}", name.encode())
    copy = local_copy(f"{GS}/run")
    found = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert found == {"model.json", "weights/d/0", "tables/a.txt"}
    assert local_copy(f"{GS}/run") == copy
    assert len(fetched) == 3
    store.put("run/tables/a.txt", b"new, as long"[:12])
    store.path("run/weights/d/0").unlink()
    assert (local_copy(as_path(f"{GS}/run")) / "tables/a.txt").read_bytes() == b"new, as long"
    assert not (copy / "weights/d/0").exists()
    assert fetched[3:] == ["a.txt"]
    assert local_copy(f"{GS}/run/best").joinpath("model.json").read_text() == "best/model.json"
    assert local_copy(f"{GS}/run/model.json").read_text() == "model.json"
    assert local_copy("runs/local").parts == ("runs", "local")


def test_a_copy_that_the_disk_has_no_room_for(store, monkeypatch):
    store.put("run/model.json", b"{}")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    message = rf"{GS}/run: its copy takes 0\.0 GiB, .* has 0\.0 GiB left; .* larger .* MMQA_CACHE"
    refuses(message, local_copy, f"{GS}/run", error=RunError)


def test_orbax_of_another_version_is_not_taught(monkeypatch):
    from orbax.checkpoint._src.path import gcs_utils

    monkeypatch.delattr(gcs_utils, "get_kvstore_for_gcs")
    message = (
        r"orbax-checkpoint \d\S* has no gcs_utils\.get_kv.*; install .*launch/constraints\.txt"
    )
    refuses(message, paths.teach_orbax_s3.__wrapped__)


def test_a_config_with_places_in_a_store(store):
    from ml_collections import ConfigDict

    store.put("data/corpus.json", b"{}")
    config = ConfigDict({"data": {"dir": f"{S3}/data"}, "numbers": (1, 2), "name": "x"})
    found = with_local_copies(config)
    assert found.data.dir == str(local_copy(f"{S3}/data"))
    assert (found.numbers, found.name) == ((1, 2), "x")
    assert config.data.dir == f"{S3}/data"


def test_metrics_are_put_whole(store, monkeypatch):
    with MetricsWriter(f"{GS}/run") as metrics:
        metrics.write(1, {"loss": 2.0})
        assert read_metrics(f"{GS}/run") == []
        metrics.flush()
        assert [row["step"] for row in read_metrics(f"{GS}/run")] == [1]
        metrics.write(2, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(f"{GS}/run")] == [1, 2]
    with MetricsWriter(f"{GS}/run", restored_step=1) as metrics:
        metrics.write(2, {"loss": 1.5})
    assert [row["loss"] for row in read_metrics(f"{GS}/run")] == [2.0, 1.5]
    assert {name.partition(".")[0] for name in store.names()} == {"run/events", "run/metrics"}


def test_a_trace_is_put_when_it_is_whole(store, monkeypatch):
    def start(folder):
        (Path(folder) / "plugins").mkdir()
        (Path(folder) / "plugins/trace").write_text("steps")

    monkeypatch.setattr(loop.jax.profiler, "start_trace", start)
    monkeypatch.setattr(loop.jax.profiler, "stop_trace", lambda: None)
    with loop.Profile(loop.Steps(2, 3), as_path(f"{GS}/run")) as traced:
        for step in range(1, 5):
            with traced.step(step, lambda: None):
                assert store.names() == ([] if step < 4 else ["run/profile/plugins/trace"])


def test_embeddings_are_made_in_parts(store):
    rows = np.random.default_rng(0).normal(size=(7, 4)).astype("f4")

    def write(part):
        return write_embeddings(
            f"{GS}/index", lambda span: rows[span.start : span.stop], rows=7, dim=4,
            model_fingerprint="m", corpus_fingerprint="c", shard_rows=2, part=part,
        )  # fmt: skip

    assert write((0, 2)) is None
    assert read_unfinished(f"{GS}/index").missing == [1, 3]
    (part,) = [name for name in store.names() if name.endswith("00000.jsonl")]
    store.put(part, store.path(part).read_bytes()[:-1])
    assert write((1, 2)) is None
    assert write((0, 2)) is not None
    np.testing.assert_array_equal(open_embeddings(f"{GS}/index", "m", "c").vectors, rows)
    assert store.names() == ["index/SHA256SUMS", "index/embeddings.npy", "index/manifest.json"]
    flip_last_byte(store, "index/embeddings.npy")
    refuses(r"index/embeddings\.npy: is damaged; delete", open_embeddings, f"{GS}/index", "m", "c")


def test_parts_are_not_merged_while_a_process_is_alone_with_them(store):
    folder = as_path(f"{GS}/found.jsonl.parts")
    write_job(folder, JobRecord({"verb": "search", "items": 1, "chunk": 1}))
    said = rf"found\.jsonl\.parts: process {os.getpid()} on .* is at work there; wait until it ends"
    with hold(folder / ".lock"), pytest.raises(UserError, match=said):
        merge_parts(folder)


def test_a_shard_of_another_content_is_not_joined(store):
    """Its length is looked at before, and its content when all are joined."""

    def write(part):
        return write_embeddings(
            f"{GS}/index", lambda span: np.ones((len(span), 4), "f4"), rows=4, dim=4,
            model_fingerprint="m", corpus_fingerprint="c", shard_rows=2, part=part,
        )  # fmt: skip

    assert write((0, 2)) is None
    (shard,) = [name for name in store.names() if name.endswith("00000.jsonl")]
    flip_last_byte(store, shard)
    refuses(rf"{GS}/index/shards-\w+/00000.jsonl: .*; delete it", write, (1, 2))
    store.path(shard).unlink()
    assert write((0, 2)) is not None


def flip_last_byte(store, name):
    *content, last = store.path(name).read_bytes()
    store.put(name, bytes([*content, last ^ 1]))


def test_a_folder_is_replaced_with_its_manifest_last(store):
    def fill(content):
        with replace_folder(f"{GS}/index", {"what": "a thing"}) as folder:
            (folder / content).write_text(content)
            if content == "bad":
                raise ZeroDivisionError

    fill("first")
    with pytest.raises(ZeroDivisionError):
        fill("bad")
    assert store.names() == ["index/SHA256SUMS", "index/first", "index/manifest.json"]
    fill("second")
    assert store.names() == ["index/SHA256SUMS", "index/manifest.json", "index/second"]
    assert read_manifest(f"{GS}/index", "a thing", "mmqa x") == {"what": "a thing"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["status", "gcs://bucket/x"],
            "--path=gcs://bucket/x: a path, gs:// or s3:// was expected",
        ),
        (["status", "gs://nowhere/x"], "gs://nowhere/x: there is no bucket nowhere; make it, or"),
        (["status", f"{GS}/x"], f"{GS}/x: is not there, nor are parts of"),
        (["demo", f"--workdir={GS}/x"], f"--workdir={GS}/x: `mmqa demo` takes no place in an obj"),
        (
            ["embed", f"--data={GS}/no", "--model=m", "--out=o"],
            f"{GS}/no: no such object, and none",
        ),
    ],
)
def test_wrong_places(store, arguments, message):
    ended = mmqa(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"mmqa: {message}")
    assert ended.err.count("\n") == 1


def test_a_store_that_fails(store, monkeypatch):
    """The network's fault, or a refusal in the middle of the work: launchers start it again."""

    def fail_with(error):
        def fail(*_, **__):
            raise error

        for name in ("info", "find", "put_file", "exists"):
            monkeypatch.setattr(object_store.StandIn, name, fail)

    for error in (ConnectionResetError("reset"), TimeoutError("slow")):
        fail_with(error)
        for failing in (check_store, local_copy):
            refuses("cannot be reached", failing, f"{GS}/run", error=RunError)
    fail_with(PermissionError("no longer"))
    refuses("no longer", write_json, f"{GS}/x", {}, error=RunError)
    with pytest.raises(PermissionError):  # not: there is none
        as_path(f"{GS}/x").exists()


@pytest.fixture
def denied(store):
    marker = store.folder.with_name(f"{object_store.BUCKET}.denied")
    marker.touch()
    yield
    marker.unlink()


@pytest.mark.parametrize(
    "refused", [check_store, local_copy, lambda name: check_out(as_path(name))]
)
def test_a_store_that_refuses(denied, refused):
    refuses(r"refuses .*Anonymous caller .*credentials \(`gcloud auth", refused, f"{GS}/run")


@pytest.mark.parametrize("verb", ["status", "merge"])
def test_a_verb_whose_store_refuses(denied, verb):
    ended = mmqa(verb, f"{GS}/run")
    assert ended.code == 2
    assert ended.err.startswith(f"mmqa: {GS}/run: the store refuses")


@pytest.mark.parametrize(("root", "package"), [(GS, "gcsfs"), (S3, "s3fs")])
def test_a_package_that_is_not_installed(store, root, package, monkeypatch):
    find_spec = importlib.util.find_spec

    def absent(name, *where):
        return None if name == package else find_spec(name, *where)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.setattr(fsspec, "registry", {})
    scheme = root.partition(":")[0]
    refuses(rf"needs the package {package}; .*'mmqa-jax\[{scheme}\]'", as_path, f"{root}/x")


def test_the_stand_in_cannot_rename_or_append(store):
    path = as_path(f"{GS}/x")
    path.write_text("x")
    for wrong in (lambda: path.rename(as_path(f"{GS}/y")), lambda: path.open("a")):
        with pytest.raises((NotImplementedError, ValueError)), contextlib.closing(wrong()):
            pass
