"""What the environment says of a launch: refused by the variable, before any other process is awaited."""

import jax
import pytest
from jax._src import xla_bridge

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.hosts.peers import heartbeat_seconds
from mmqa_jax.core.hosts.watchdog import hang_limit
from tests.refusals import refuses

TWO = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture(autouse=True)
def _no_cache(tmp_path, monkeypatch):
    """The tests' own cache of programs stays: that of the environment cannot be written."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MMQA_CACHE", str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {**TWO, "JAX_LOCAL_DEVICE_IDS": "a"},
            r"^environment: the variables of this launch cannot be read \(.*'a'\); see mmqa_jax/tr",
        ),
        # Open MPI 5 has no OMPI_MCA_orte_hnp_uri, by which JAX knows it.
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
            r"^environment: OMPI_COMM_WORLD_SIZE=4, but JAX .*; set JAX_COORDINATOR_ADDRESS, JAX",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
            r"^environment: SLURM_NTASKS=2, but JAX .* or JAX_NUM_PROCESSES=1 to use each alone",
        ),
    ],
)
def test_a_launch_that_cannot_be_read(environment, message, monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refuses(message, distributed.start)


def test_a_launch_that_comes_too_late(monkeypatch):
    jax.devices()
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    message = r"could not be joined \(jax\.distributed.*before any.*\); check .*, or set JAX_NUM_PR"
    refuses(message, distributed.start, error=RunError)


def test_a_given_cache_that_cannot_be_written(tmp_path):
    folder = tmp_path / "file" / "xla"
    refuses(f"^{folder}: the compilation cache .*; name another folder", distributed.start, folder)


@pytest.mark.parametrize(
    ("read", "name", "default", "bad"),
    [
        (distributed.join_seconds, "MMQA_JOIN_SECONDS", 1800, ("0", "-1")),
        (heartbeat_seconds, "MMQA_HEARTBEAT_SECONDS", 30, ("1", "2.5")),
        (hang_limit, "MMQA_HANG_SECONDS", 1800, ("-1", "nan")),
    ],
)
def test_seconds_come_from_the_environment(read, name, default, bad):
    assert read({}) == default
    assert read({name: "60"}) == 60
    if read is hang_limit:
        assert read({name: "0"}) == 0  # never
    for text in ("soon", *bad, *["9" * 5000] * (read is not hang_limit)):
        refuses(f"^environment: {name}={text[:9]}.*seconds were expec", read, {name: text})
