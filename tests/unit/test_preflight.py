"""Preflight's verdicts over the facts of several hosts. Real processes: test_launch_slurm.py."""

import json
import re

import pytest

from launch import preflight


def host(name="a", **changes):
    return {
        "host": name,
        "versions": {"python": "3.11.7", "jax": "0.10.2", "code": "c0de"},
        "kind": "TPU v5 lite", "devices": 4, "slice": 0, "memory": [[15 * 2**30, 16 * 2**30]] * 4,
        "disk": {"error": "", "shared": True, "write_mb": 900.0, "read_mb": 2000.0},
        "sum": {"right": True, "gb": 90.0, "mib": 256},
        "data_mb": 700.0,
    } | changes  # fmt: skip


def other(**changes):
    return [host(), host("b", **changes)]


VERSIONS = {"python": "3.11.7", "jax": "0.10.2", "code": "c0de"}
DISK = {"error": "", "shared": True, "write_mb": 900.0, "read_mb": 2000.0}


@pytest.mark.parametrize(
    ("verdict", "state", "text"),
    [
        (preflight.check_alike(other()), "ok", "jax 0.10.2, .* alike in 2 processes"),
        (
            preflight.check_alike(other(versions=VERSIONS | {"jax": "0.10.1"})),
            "FAIL",
            "jax is 0.10.2 on a but 0.10.1 on b",
        ),
        (
            preflight.check_alike(other(versions=VERSIONS | {"libtpu": "0.0.42"})),
            "FAIL",
            "libtpu is none on a but 0.0.42 on b",
        ),
        (preflight.check_devices(other(), 8), "ok", "8 x TPU v5 lite in 2 processes"),
        (preflight.check_devices(other(), 256), "FAIL", "8 x .*, 256 were expected"),
        (preflight.check_devices(other(devices=3), None), "FAIL", "a: 4 x .*, b: 3 x TPU"),
        (preflight.check_memory(other()), "ok", "94% of 16.0 GiB free"),
        (preflight.check_memory(other(memory=[[2**30, 16 * 2**30]])), "FAIL", r"6% of .* \(b\)"),
        (preflight.check_memory([host(memory=[])]), "ok", "do not report"),
        (preflight.check_sum(other()), "ok", "256 MiB a device, all-reduce at 90.00 GB/s"),
        (preflight.check_sum(other(sum={"right": False, "gb": 9.0, "mib": 1})), "FAIL", "on b"),
        (preflight.check_sum([host(sum={"right": True, "gb": 0.0, "mib": 1})]), "ok", "one device"),
        (preflight.check_clocks(other(), [[5.0, 9.0], [7.0, 7.5]]), "ok", "at most 0.500 s"),
        (preflight.check_clocks(other(), [[5.0, 9.0]]), "FAIL", "b is 4.0 s ahead of a"),
    ],
)
def test_verdicts(verdict, state, text):
    assert verdict.state == state
    assert re.search(text, verdict.text), verdict.text


@pytest.mark.parametrize(
    ("disk", "state", "text"),
    [
        (DISK, "ok", "writes 900 MB/s"),
        (DISK | {"write_mb": 20.0}, "warn", "writes 20 MB/s, .*(b)"),
        (DISK | {"shared": False}, "FAIL", "runs is another folder on b"),
        (DISK | {"error": "Read-only file system"}, "FAIL", "on b: Read-only file system"),
    ],
)
def test_the_workdir_is_writable_and_the_same_everywhere(disk, state, text):
    (verdict,) = preflight.check_disk(other(disk=disk), "runs")
    assert verdict.state == state
    assert re.search(text, verdict.text), verdict.text


@pytest.mark.parametrize(
    ("hosts", "expected", "state", "text"),
    [
        (other(slice=1), None, "ok", "2 slices of 4 devices"),
        ([*other(), *other(slice=1)], 2, "FAIL", r"slice 1 \(b\) has 4 devices, another 12"),
        (other(slice=1), 4, "FAIL", "2 slices of 4 devices, 4 were expected; start"),
        (other(), 2, "FAIL", "1 slice of 8 devices, 2 were expected"),
    ],
)
def test_slices_are_of_one_size_and_as_many_as_expected(hosts, expected, state, text):
    (verdict,) = preflight.check_slices(hosts, expected)
    assert verdict.state == state
    assert re.search(text, verdict.text), verdict.text
    assert preflight.check_slices(other(), None) == preflight.check_slices(other(), 1) == []


def test_data_that_is_absent_on_a_host():
    assert preflight.check_data(other(), "") == []
    assert preflight.check_data(other(), "data")[0].state == "ok"
    (verdict,) = preflight.check_data(other(data_mb=None), "data")
    assert (verdict.state, verdict.text) == ("FAIL", "data has no files on b")


def test_one_machine(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "shard").write_bytes(b"x" * 5_000_000)
    flags = [f"--workdir={tmp_path / 'run'}", f"--data={data}", "--json"]
    assert preflight.main(flags) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = ["joined", "versions", "devices", "sum", "memory", "disk", "data", "clocks"]
    assert [line.split()[1] for line in lines] == names
    assert json.loads(last)["ok"]
    assert list((tmp_path / "run").iterdir()) == []  # nothing is left behind
    assert preflight.main([*flags, "--devices=99"]) == 1
    (tmp_path / "file").touch()
    assert preflight.main([f"--workdir={tmp_path / 'file'}"]) == 1
    assert "FAIL  disk" in capsys.readouterr().out
