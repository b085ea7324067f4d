"""What launch/preflight.sh checks on every host before a run: one verdict a line.

Every process collects its facts (versions, devices, speeds, clock); they are exchanged by JAX
itself, so that what is checked is also the way in which the hosts will talk. Process 0 prints.

    python -m launch.preflight --workdir=runs/x [--data=DIR] [--devices=N] [--slices=N] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mmqa_jax
from mmqa_jax.core.errors import RunError, UserError

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "libtpu")
_FACTS_BYTES = 8192  # of one process's facts as JSON
_DISK_MIB = 64
_DATA_MIB = 256  # read at most, to see how fast data comes
_SUM_MIB, _SUM_MIB_CPU = 256, 4  # summed over all devices: what each of them holds
_ROUNDS = 5
_CLOCK_SECONDS = 1.0  # clocks further apart make logs and leases of one run contradict each other
_DISK_MB = 50.0  # a checkpoint of 10 GB then takes more than three minutes
_FREE_SHARE = 0.9  # of a device's memory: less means that another program holds some

Facts = Mapping[str, Any]


class Verdict(NamedTuple):
    """One line: `ok`, `warn` (a run would work, slowly) or `FAIL`."""

    state: str
    name: str
    text: str

    def line(self) -> str:
        """As printed."""
        return f"{self.state:<5} {self.name:<9} {self.text}"


def check_alike(hosts: Sequence[Facts]) -> Verdict:
    """Python, packages and our own code are the same in all processes."""
    first, differing = hosts[0]["versions"], []
    for name in sorted({name for host in hosts for name in host["versions"]}):
        found = {host["versions"].get(name, "none") for host in hosts}
        if len(found) > 1:
            odd = next(h for h in hosts if h["versions"].get(name) != first.get(name))
            differing.append(
                f"{name} is {first.get(name, 'none')} on {hosts[0]['host']} but "
                f"{odd['versions'].get(name, 'none')} on {odd['host']}"
            )
    if differing:
        return Verdict("FAIL", "versions", "; ".join(differing))
    text = f"jax {first.get('jax')}, python {first['python']}, code {first['code']}"
    return Verdict("ok", "versions", f"{text}: alike in {len(hosts)} processes")


def check_devices(hosts: Sequence[Facts], expected: int | None) -> Verdict:
    """All processes have as many devices of one kind; together as many as expected."""
    kinds = sorted({(host["kind"], host["devices"]) for host in hosts})
    total = sum(host["devices"] for host in hosts)
    text = f"{total} x {kinds[0][0]} in {len(hosts)} processes"
    if len(kinds) > 1:
        each = ", ".join(f"{host['host']}: {host['devices']} x {host['kind']}" for host in hosts)
        return Verdict("FAIL", "devices", f"not alike: {each}")
    if expected is not None and total != expected:
        return Verdict("FAIL", "devices", f"{text}, {expected} were expected")
    return Verdict("ok", "devices", text)


def check_slices(hosts: Sequence[Facts], expected: int | None) -> list[Verdict]:
    """The slices have as many devices each, and are as many as expected; nothing of a single one.

    A process that has devices of several slices counts for the first of them.
    """
    each: Counter[int] = Counter()
    for host in hosts:
        each[host["slice"]] += host["devices"]
    if len(each) == 1 and expected in (None, 1):
        return []
    text = f"{len(each)} slice{'s' * (len(each) > 1)} of {max(each.values())} devices"
    if expected is not None and len(each) != expected:
        said = f"{text}, {expected} were expected; start the processes of all slices as one launch"
        return [Verdict("FAIL", "slices", said)]
    if len(set(each.values())) > 1:
        few = min(each, key=lambda number: each[number])
        names = ", ".join(host["host"] for host in hosts if host["slice"] == few)
        said = f"slice {few} ({names}) has {each[few]} devices, another {max(each.values())}"
        return [Verdict("FAIL", "slices", f"{said}; use slices of one size")]
    return [Verdict("ok", "slices", text)]


def check_memory(hosts: Sequence[Facts]) -> Verdict:
    """Hardly anything of the devices' memory is in use; CPUs do not say."""
    known = [host for host in hosts if host.get("memory")]
    if not known:
        return Verdict("ok", "memory", "the devices do not report theirs (CPU)")
    share, place = min((free / limit, h["host"]) for h in known for free, limit in h["memory"])
    smallest = min(limit for host in known for _, limit in host["memory"])
    text = f"{share:.0%} of {smallest / 2**30:.1f} GiB free on the fullest device ({place})"
    if share < _FREE_SHARE:
        return Verdict("FAIL", "memory", f"{text}; end the program that holds the rest")
    return Verdict("ok", "memory", text)


def check_sum(hosts: Sequence[Facts]) -> Verdict:
    """The sum over all devices was right everywhere; how fast it was."""
    wrong = [host["host"] for host in hosts if not host["sum"]["right"]]
    if wrong:
        return Verdict("FAIL", "sum", f"wrong on {', '.join(wrong)}: links or devices are broken")
    slowest = min(host["sum"]["gb"] for host in hosts)
    size = hosts[0]["sum"]["mib"]
    if not slowest:
        return Verdict("ok", "sum", "one device: nothing to exchange")
    return Verdict("ok", "sum", f"{size} MiB a device, all-reduce at {slowest:.2f} GB/s a device")


def check_disk(hosts: Sequence[Facts], workdir: str) -> list[Verdict]:
    """The workdir can be written everywhere, is the same folder everywhere, and is fast enough."""
    failed = [f"{host['host']}: {host['disk']['error']}" for host in hosts if host["disk"]["error"]]
    if failed:
        return [Verdict("FAIL", "disk", f"{workdir} cannot be written on {'; '.join(failed)}")]
    alone = [host["host"] for host in hosts if not host["disk"]["shared"]]
    if alone:
        text = f"{workdir} is another folder on {', '.join(alone)}; name one on a shared disk"
        return [Verdict("FAIL", "disk", text)]
    slowest = min(hosts, key=lambda host: host["disk"]["write_mb"])
    write, read = slowest["disk"]["write_mb"], slowest["disk"]["read_mb"]
    text = f"{workdir}: writes {write:.0f} MB/s, reads {read:.0f} MB/s ({slowest['host']})"
    return [Verdict("warn" if write < _DISK_MB else "ok", "disk", text)]


def check_data(hosts: Sequence[Facts], data: str) -> list[Verdict]:
    """The data is there everywhere; how fast it is read."""
    if not data:
        return []
    absent = [host["host"] for host in hosts if host["data_mb"] is None]
    if absent:
        return [Verdict("FAIL", "data", f"{data} has no files on {', '.join(absent)}")]
    slowest = min(hosts, key=lambda host: host["data_mb"])
    return [Verdict("ok", "data", f"{data}: {slowest['data_mb']:.0f} MB/s ({slowest['host']})")]


def check_clocks(hosts: Sequence[Facts], rounds: Sequence[Sequence[float]]) -> Verdict:
    """How far the clocks are apart.

    Args:
      rounds: in each, the time of every process just after all of them met. The smallest spread
        is the nearest to the truth: meeting takes time, too.
    """
    times = min(rounds, key=lambda times: max(times) - min(times))
    spread = max(times) - min(times)
    if spread <= _CLOCK_SECONDS:
        return Verdict("ok", "clocks", f"at most {spread:.3f} s apart")
    ahead, behind = hosts[int(np.argmax(times))]["host"], hosts[int(np.argmin(times))]["host"]
    return Verdict(
        "FAIL", "clocks", f"{ahead} is {spread:.1f} s ahead of {behind}; synchronize them (NTP)"
    )


def run(
    workdir: str, data: str, expected: int | None, expected_slices: int | None
) -> list[Verdict]:
    """All checks; every process of the launch calls it, and gets the same verdicts."""
    from mmqa_jax.core.hosts import distributed

    began = time.time()
    distributed.start()
    import jax

    joined = f"{jax.process_count()} processes in {time.time() - began:.1f} s"
    marker = f".preflight-{secrets.token_hex(8)}"
    disk = _write_speed(Path(workdir), marker if jax.process_index() == 0 else None)
    facts = {"versions": _versions(), **_device_facts(), "disk": disk, "marker": marker}
    facts |= {"host": _host_name(jax.process_index()), "data_mb": _read_speed(data)}
    hosts = exchange(facts)
    # All have written by then: process 0's marker is seen where the folder is the same.
    facts["disk"]["shared"] = (Path(workdir) / hosts[0]["marker"]).exists()
    facts["sum"] = _sum_speed()
    hosts = exchange(facts)
    with contextlib.suppress(OSError):
        (Path(workdir) / marker).unlink()
    clocks = [[h["time"] for h in exchange({"time": time.time()})] for _ in range(_ROUNDS + 1)]
    return [
        Verdict("ok", "joined", joined),
        check_alike(hosts),
        check_devices(hosts, expected),
        *check_slices(hosts, expected_slices),
        check_sum(hosts),
        check_memory(hosts),
        *check_disk(hosts, workdir),
        *check_data(hosts, data),
        # In the first round some came later; from then on all leave the exchange together.
        check_clocks(hosts, clocks[1:]),
    ]


def exchange(facts: Facts) -> list[dict[str, Any]]:
    """The facts of all processes, by their number; all call it together."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [dict(facts)]
    text = json.dumps(facts).encode()
    assert len(text) <= _FACTS_BYTES, f"{len(text)} bytes of facts"
    padded = np.frombuffer(text.ljust(_FACTS_BYTES), np.uint8)
    found = multihost_utils.process_allgather(padded)  # [process, _FACTS_BYTES]
    return [json.loads(row.tobytes()) for row in np.asarray(found)]


def _host_name(process: int) -> str:
    return f"{socket.gethostname()}[{process}]"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "code": _code_digest()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _code_digest() -> str:
    """A hash of our sources: a pod's image need not have git."""
    root, digest = Path(mmqa_jax.__file__).parent, hashlib.blake2b(digest_size=6)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _device_facts() -> dict[str, Any]:
    import jax

    from mmqa_jax.core.mesh import slice_of

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    memory = [
        [one["bytes_limit"] - one.get("bytes_in_use", 0), one["bytes_limit"]]
        for one in stats
        if one.get("bytes_limit")
    ]
    devices = jax.local_devices()
    return {
        "kind": devices[0].device_kind,
        "devices": len(devices),
        "slice": slice_of(devices[0]),
        "memory": memory,
    }


def _sum_speed() -> dict[str, Any]:
    """Sums an array over all devices: whether it is right, and GB/s that a device moves."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    mib = _SUM_MIB_CPU if devices[0].platform == "cpu" else _SUM_MIB
    # In jax's own order: of several slices jax.make_mesh makes no mesh, and a sum has no order.
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("all")
    shape = (len(devices), mib * 2**20 // 4)
    numbers = jax.make_array_from_callback(
        shape,
        NamedSharding(mesh, spec),
        lambda index: np.full((1, shape[1]), 1 + (index[0].start or 0), np.float32),
    )
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    summed = jax.block_until_ready(total(numbers))  # compiles
    wanted = len(devices) * (len(devices) + 1) / 2
    right = all((np.asarray(shard.data) == wanted).all() for shard in summed.addressable_shards)
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(total(numbers))
        seconds.append(time.perf_counter() - began)
    # A ring moves each part 2 (n - 1) times; counted as NCCL's "bus bandwidth" is.
    moved = 2 * (len(devices) - 1) / len(devices) * mib * 2**20
    return {"right": bool(right), "gb": moved / min(seconds) / 1e9, "mib": mib}


def _write_speed(folder: Path, marker: str | None) -> dict[str, Any]:
    """MB/s of writing and reading a file in the folder; `marker` is left there."""
    block = np.random.default_rng(0).bytes(2**20)  # disks that compress gain nothing
    path = folder / f".preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if marker is not None:
            (folder / marker).touch()
        began = time.perf_counter()
        with open(path, "wb") as file:
            for _ in range(_DISK_MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter() - began
        read = _read_file(path, _DISK_MIB * 2**20)
    except OSError as error:
        return {"error": error.strerror or str(error), "write_mb": 0.0, "read_mb": 0.0}
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    size = _DISK_MIB * 2**20 / 1e6
    return {"error": "", "write_mb": size / written, "read_mb": size / read}


def _read_file(path: Path, most: int) -> float:
    """Seconds to read a file, or its first bytes, from the disk and not from memory."""
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        left = most
        while left > 0 and (block := file.read(min(left, 2**22))):
            left -= len(block)
    return time.perf_counter() - began


def _read_speed(data: str) -> float | None:
    """MB/s of reading the data's largest files; None if it has none."""
    files = [path for path in Path(data).rglob("*") if path.is_file()] if data else []
    left, read, seconds = _DATA_MIB * 2**20, 0, 1e-9
    for path in sorted(files, key=lambda path: -path.stat().st_size):
        size = min(left, path.stat().st_size)
        if size == 0:
            break
        seconds += _read_file(path, size)
        left, read = left - size, read + size
    return read / seconds / 1e6 if read else None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdicts on process 0; the exit code is the same on all processes."""
    parser = argparse.ArgumentParser(prog="preflight", description=__doc__.partition("\n")[0])
    parser.add_argument("--workdir", default=".", help="folder that the run writes to (.)")
    parser.add_argument("--data", default="", help="folder that the run reads from")
    parser.add_argument("--devices", type=int, help="how many devices there must be in all")
    parser.add_argument("--slices", type=int, help="over how many slices they must be")
    parser.add_argument("--json", action="store_true", help="last line: the verdicts as JSON")
    arguments = parser.parse_args(argv)
    try:
        verdicts = run(arguments.workdir, arguments.data, arguments.devices, arguments.slices)
    except (UserError, RunError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    import jax

    failed = [verdict.name for verdict in verdicts if verdict.state == "FAIL"]
    if jax.process_index() == 0:
        for verdict in verdicts:
            print(verdict.line())
        if arguments.json:
            rows = [verdict._asdict() for verdict in verdicts]
            print(json.dumps({"ok": not failed, "verdicts": rows}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
