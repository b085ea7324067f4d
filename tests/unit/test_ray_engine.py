"""`--engine=ray` on a cluster of this machine."""

import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from cli_runs import LANDS, QUESTIONS, done, mmqa, question, write_documents
from test_inference_killed import flags_of, results  # noqa: F401

from mmqa_jax.cli import make_parser
from mmqa_jax.commands.ray_engine import RayEngine, Tries, Worker
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.store import chunk_files, chunks_of
from mmqa_jax.runs.verbs.indexing import embed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module")
def cluster():
    """Two workers' worth of Ray."""
    import ray  # half a second: in this file's worker, and not in all
    from ray._private.node import Node

    with pytest.MonkeyPatch.context() as patch:
        # Of a node's processes those that serve its operator: each imports Ray for itself.
        for name in ("start_monitor", "start_api_server", "start_log_monitor"):
            patch.setattr(Node, name, lambda self, **options: None)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A corpus of 40 questions."""
    folder = tmp_path_factory.mktemp("many")
    lands = list(LANDS) * 5
    asked = [question(n, "test", land) for n, land in enumerate(lands)]
    train = [row for row in QUESTIONS if row["split"] == "train"]
    raw = write_documents(folder / "raw", [*train, *asked])
    done("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")
    return folder / "data"


def search(data: Path, out: Path) -> list:
    return ["search", f"--data={data}", "--method=bm25", f"--out={out}", "--chunk=1"]


class Killer(threading.Thread):
    """Kills (kill -9) the worker that committed the first part, once."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.killed, self.left = folder, 0, 0

    def run(self):
        while not chunk_files(self.folder):
            time.sleep(0.005)
        self.killed = next(chunks_of(chunk_files(self.folder)[0])).notes["process"]
        os.kill(self.killed, signal.SIGKILL)
        self.left = 40 - len(chunk_files(self.folder))


def test_a_worker_that_is_killed_loses_nothing(cluster, many, tmp_path):
    whole = done(*search(many, tmp_path / "whole.jsonl"))
    killer = Killer(tmp_path / "found.jsonl.parts")
    killer.start()
    result = done(*search(many, tmp_path / "found.jsonl"), "--engine=ray", "--workers=2")
    killer.join(10)
    assert killer.killed not in (0, os.getpid())
    assert killer.left > 0, "the job was finished before the kill"
    assert result == whole
    assert (tmp_path / "found.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "found.jsonl.parts").exists()


class Here:
    """An engine of this process, which notes what it was asked for."""

    is_worker = False

    def __init__(self):
        self.asked = []

    def compute(self, numbers, open_one):
        self.asked += numbers
        one = open_one()
        for number in numbers:
            one(number)


class DealtHere:
    """Ray Data's part of a job in this process: one worker, all numbers."""

    def __init__(self, items, **options):
        self.items = items

    def map_batches(self, worker, fn_constructor_args, **options):
        self.worker = worker(*fn_constructor_args)
        return self

    def iter_rows(self):
        for item in self.items:
            answers = self.worker({"chunk": np.array([item["chunk"]])})
            yield {name: column[0] for name, column in answers.items()}


class Actor:
    """An actor in this process: its methods' values stand for what Ray would get of them."""

    def __init__(self, kind):
        self._one = kind()

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=getattr(self._one, name))


@pytest.fixture
def here(cluster, monkeypatch):
    """Ray's actors and Ray Data in this process: each of a cluster's is a process that imports both."""
    monkeypatch.setattr(
        cluster,
        "remote",
        lambda **options: lambda kind: types.SimpleNamespace(remote=lambda: Actor(kind)),
    )
    monkeypatch.setattr(cluster, "get", lambda value: value)
    monkeypatch.setattr(cluster.data, "from_items", DealtHere)


def test_a_row_whose_workers_load_models(cluster, flags_of, tmp_path):  # noqa: F811
    done(*flags_of("run", tmp_path / "whole"))
    # One worker: each imports and loads much, and two work above.
    done(*flags_of("run", tmp_path / "ray"), "--engine=ray", "--workers=1")
    assert results(tmp_path / "ray") == results(tmp_path / "whole")


def test_a_verb_whose_workers_load_models(here, data, models, flags_of, tmp_path):  # noqa: F811
    done(*flags_of("embed", tmp_path / "whole"))
    done(*flags_of("embed", tmp_path / "ray"), "--engine=ray")
    assert results(tmp_path / "ray") == results(tmp_path / "whole")
    # Once more, over what is there: the first chunk is compared.
    engine = Here()
    embed(data, models / "contrastive", tmp_path / "ray", chunk=3, engine=engine)
    assert engine.asked == [0]
    assert results(tmp_path / "ray") == results(tmp_path / "whole")


def test_what_a_worker_refuses_is_the_users_mistake(here, many, tmp_path):
    """The model is opened by workers alone."""
    flags = ["rerank", f"--data={many}", f"--out={tmp_path / 'out'}", "--engine=ray"]
    ended = mmqa(*flags, "--model=nowhere")
    assert ended.code == 2, ended.err
    assert ended.err.startswith("mmqa: nowhere")
    assert [*tmp_path.iterdir()] == []


def test_a_chunk_that_costs_worker_after_worker_is_given_up(here, many, tmp_path):
    tries = Actor(Tries)
    for number in (7, 7, 7, 7, 8, 8, 8):
        tries.begin.remote(number)
    arguments = make_parser().parse_args([str(x) for x in search(many, tmp_path / "found.jsonl")])
    worker = Worker({**vars(arguments), "overrides": []}, tries)
    answers = worker({"chunk": np.array([7, 8])})
    assert answers["error"].tolist() == ["its workers were lost 4 times", ""]
    assert [path.name for path in chunk_files(tmp_path / "found.jsonl.parts")] == ["00008.jsonl"]


CHUNKS_3_AND_4 = r"chunks 3, 4 are not done; start the command again"


@pytest.mark.parametrize(
    ("answers", "lost", "message"),
    [
        (
            ["", "ValueError: no", "", "its workers were lost 4 times", ""],
            None,
            r"chunks 1, 3 failed \(chunk 1: ValueError: no\); start the command again",
        ),
        (
            ["", "", ""],
            "a long story\nthe node died",
            rf"failed \(the node died\); {CHUNKS_3_AND_4}",
        ),
        (["", "", ""], "", rf"the cluster failed \(LostNode\); {CHUNKS_3_AND_4}"),
    ],
)
def test_what_a_cluster_fails_at_is_named(answers, lost, message, monkeypatch):
    class LostNode(Exception):
        pass

    class Rows(DealtHere):
        def map_batches(self, worker, **options):
            return self

        def iter_rows(self):
            for number, error in enumerate(answers):
                yield {"chunk": number, "error": error}
            if lost is not None:
                raise LostNode(lost)

    data = types.SimpleNamespace(
        DataContext=types.SimpleNamespace(get_current=types.SimpleNamespace),
        ActorPoolStrategy=dict,
        from_items=Rows,
    )
    ray = types.SimpleNamespace(
        data=data,
        exceptions=types.SimpleNamespace(RayError=LostNode),
        is_initialized=lambda: True,
        cluster_resources=dict,
        remote=lambda **options: lambda kind: types.SimpleNamespace(remote=kind),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    with pytest.raises(RunError, match=f"^--engine=ray: .*{message}"):
        RayEngine({"verb": "search"}, 1).compute(range(5), None)


def test_shards_or_ray(many, refused, tmp_path):
    flags = search(many, tmp_path / "out.jsonl")
    refused(*flags, "--engine=ray", "--shard=0/2", message="--engine=ray and --shard: each shares")
    refused(*flags, "--engine=ray", "--workers=0", message="--workers=0: at least 1 was expected")


def test_without_ray(many, refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    flags = search(many, tmp_path / "out.jsonl")
    refused(*flags, "--engine=ray", message="--engine=ray: Ray is not installed .*extra `ray`")
