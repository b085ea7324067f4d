"""Workdirs (config, lock, stages), metrics files, and the multi-host environment."""

import json
import os
import subprocess
import sys
import time

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts.distributed import multi_host_arguments
from mmqa_jax.core.metrics import MetricsWriter, read_metrics
from mmqa_jax.core.workdir import Workdir
from tests.refusals import refuses

pytestmark = pytest.mark.slow

CONFIG = {"seed": 1, "train": {"steps": 10, "rate": 0.1}}

HOLD = """
import sys, time
from mmqa_jax.core import workdir
workdir._HEARTBEAT_SECONDS = 0.5  # not 5
workdir = workdir.Workdir(sys.argv[1])
workdir.claim({"seed": 1, "train": {"steps": 10, "rate": 0.1}})
with workdir.stage("embed") as todo:
    print("holding", todo, flush=True)
    time.sleep(60)
"""


def claim(path, config=CONFIG):
    with Workdir(path) as workdir:
        return workdir.claim(config)


def hold(path):
    """A process that has claimed `path` and is in the middle of stage `embed`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holding True\n"
    return process


def test_config_json_tells_what_ran_where(tmp_path):
    with Workdir(tmp_path / "run") as workdir:
        assert workdir.claim(CONFIG) is False
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["config"] == CONFIG
    assert record["devices"]["platform"] == "cpu"
    assert record["versions"]["jax"] == __import__("jax").__version__
    assert record["host"]["cpus"] >= 1
    assert claim(tmp_path / "run") is True


def test_another_config_is_refused_and_nothing_changes(tmp_path):
    claim(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    other = {"seed": 1, "train": {"steps": 20, "rate": 0.1, "new": None}}
    refuses(r"train\.steps \(10 there, 20 now\), train\.new .*--workdir", claim, tmp_path, other)
    assert (tmp_path / "config.json").read_bytes() == before


def test_paths_that_cannot_be_a_workdir_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    refuses("cannot be written", claim, tmp_path / "file" / "run")
    (tmp_path / "config.json").write_text("[]")
    refuses(r"config\.json: is not a run's config", claim, tmp_path)


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    """And the time of the first, which was killed, counts."""
    process = hold(tmp_path)
    try:
        refuses(rf"process {process.pid} on .* is writing into it", claim, tmp_path)
        time.sleep(1.5)  # some heartbeats
    finally:
        process.kill()
        process.wait()
    assert claim(tmp_path) is True
    workdir = Workdir(tmp_path)
    with workdir.stage("embed") as todo:
        assert todo
    record = workdir.stages()["embed"]
    assert 0.4 < record["seconds"] < 30
    assert record["attempts"] == 2


def test_stages_run_once_and_failed_ones_again(tmp_path):
    workdir = Workdir(tmp_path)
    ran = []

    def index(error=None):
        with workdir.stage("index") as todo:
            if todo:
                ran.append(error)
                if error:
                    raise error

    error = ValueError("disk")
    refuses("disk", index, error, error=ValueError)
    assert not workdir.done("index")
    index()
    assert workdir.done("index")
    index()
    assert ran == [error, None]
    with workdir.stage("search"):
        pass
    assert list(workdir.stages()) == ["index", "search"]
    assert workdir.stages()["index"]["peak_rss_mib"] > 10


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"stage": "other", "finished": 1, "seconds": 1, "attempts": 1}']
)
def test_what_is_no_record_of_a_stage_is_named(text, tmp_path):
    file = tmp_path / "stages" / "index.json"
    file.parent.mkdir()
    file.write_text(text)
    message = r"stages/index\.json: is not the record of a stage; delete it, and the stage runs"
    with pytest.raises(UserError, match=message):
        Workdir(tmp_path).stages()
    file.with_name(".index.running.json").write_text(text)  # only how long it has run is lost
    file.unlink()
    with Workdir(tmp_path).stage("index") as todo:
        assert todo
    assert Workdir(tmp_path).stages()["index"]["attempts"] in (1, 2)


def test_tensorboards_writer_loads_no_pytorch(tmp_path):
    (tmp_path / "torch.py").touch()  # found before PyTorch, whose import takes seconds
    code = (
        "import sys\n"
        "from mmqa_jax.core.metrics import MetricsWriter\n"
        "with MetricsWriter(sys.argv[1]) as metrics:\n"
        "    metrics.write(1, {'loss': 0.5})\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"  # afterwards as ever
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert [*tmp_path.glob("events.*")]


def test_metrics_after_the_restored_step_are_dropped(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"loss": step / 2})
        metrics.write(2, {"eval/acc": float("nan")})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # a kill in the middle of a write
    with MetricsWriter(tmp_path, restored_step=2) as metrics:
        metrics.write(3, {"loss": 9.0})
    rows = [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(tmp_path)]
    assert rows == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 1.0},
        {"step": 2, "eval/acc": None},
        {"step": 3, "loss": 9.0},
    ]
    events = [name for name in os.listdir(tmp_path) if name.startswith("events.out.tfevents")]
    assert events
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    refuses(r"metrics\.jsonl, line 1: not valid JSON", read_metrics, tmp_path)
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    refuses(r"metrics\.jsonl: is a folder, a file .*; move it away", read_metrics, tmp_path / "run")


def test_other_processes_write_no_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_multi_host_launches_are_told_from_single_ones():
    assert multi_host_arguments({}) is None
    assert multi_host_arguments({"SLURM_NTASKS": "4"}) is None  # a shell inside an allocation
    assert multi_host_arguments({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}) is not None
    assert multi_host_arguments({"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}) is None
    assert multi_host_arguments({"TPU_WORKER_HOSTNAMES": "localhost"}) is None
    assert multi_host_arguments({"TPU_WORKER_HOSTNAMES": "a,b"}) is not None
    full = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert multi_host_arguments(full) == {
        "coordinator_address": "a:1",
        "num_processes": 2,
        "process_id": 1,
    }
    with pytest.raises(UserError, match="JAX_COORDINATOR_ADDRESS is set but JAX_NUM_PROCESSES"):
        multi_host_arguments({"JAX_COORDINATOR_ADDRESS": "a:1"})
    with pytest.raises(UserError, match="JAX_PROCESS_ID=x: a whole number"):
        multi_host_arguments({**full, "JAX_PROCESS_ID": "x"})
    with pytest.raises(UserError, match="JAX_PROCESS_ID=2 but JAX_NUM_PROCESSES=2"):
        multi_host_arguments({**full, "JAX_PROCESS_ID": "2"})
    with pytest.raises(UserError, match="JAX_COORDINATOR_ADDRESS=a: host:port"):
        multi_host_arguments({**full, "JAX_COORDINATOR_ADDRESS": "a"})
    for bad in ("a:0", "a:99999", "a:²", f"a:{'9' * 5000}", ":1234"):
        with pytest.raises(UserError, match=r"host:port was expected"):
            multi_host_arguments({**full, "JAX_COORDINATOR_ADDRESS": bad})
    for bad in ("²", "9" * 5000, "-1"):
        with pytest.raises(UserError, match=r"JAX_NUM_PROCESSES=.*: a whole number"):
            multi_host_arguments({**full, "JAX_NUM_PROCESSES": bad})


def test_pods_are_left_to_jax_to_detect():
    detected = {}
    assert (
        multi_host_arguments({"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476"}) == detected
    )
    assert multi_host_arguments({"MEGASCALE_NUM_SLICES": "2"}) == detected
    assert multi_host_arguments({"MEGASCALE_NUM_SLICES": "1"}) is None
    # A TPU VM of GCE has no variable that names the others: its metadata server knows them.
    assert multi_host_arguments({}, has_tpu=True) == detected
    assert multi_host_arguments({"JAX_NUM_PROCESSES": "1"}, has_tpu=True) is None


def test_an_indexed_job_numbers_its_processes():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
    assert multi_host_arguments(pod) is None  # its pods may as well be independent shards
    joined = {**pod, "JAX_COORDINATOR_ADDRESS": "run-0.run:1234", "JAX_NUM_PROCESSES": "4"}
    assert multi_host_arguments(joined)["process_id"] == 3
    assert multi_host_arguments({**joined, "JAX_PROCESS_ID": "1"})["process_id"] == 1
