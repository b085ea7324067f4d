"""Several processes as one launch: joining them, and what they tell each other outside jit.

What they exchange goes through the key-value store of JAX's coordination service, which process 0
runs: it needs no device, works between different versions, and never blocks for good.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import hashlib
import http.client
import http.server
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.config import flatten, to_plain_dict
from mmqa_jax.core.errors import RunError, UserError, decimal_number, first_names
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.hosts.peers import Peers, heartbeat_seconds, may_be_a_loss, speak_before_abort

_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# An interactive Slurm shell (salloc) sets SLURM_NTASKS too; only a task of srun is one of many.
_LAUNCHED = ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK")
_FAILED = "mmqa/failed"
DEFAULT_JOIN_SECONDS = 1800  # hosts of a pod come up minutes apart
_JOIN, _BIND = "MMQA_JOIN_SECONDS", "MMQA_COORDINATOR_BIND"
# gRPC's and Python's variables for proxies, in either case.
_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


@dataclasses.dataclass
class _Launch:
    """One a process, as JAX's own connection is."""

    peers: Peers | None = None
    handler: Any = None


_LAUNCH = _Launch()


def start(compilation_cache_dir: str | os.PathLike | None = None, *, join: bool = True) -> None:
    """Prepares JAX; call it before any JAX computation. Later calls have no effect.

    Turns on the persistent compilation cache, and joins the other hosts of a multi-host launch.
    JAX detects Slurm, TPU pods (GCE and GKE), Open MPI up to version 4 and, with the package
    `kubernetes`, an Indexed Job; elsewhere set JAX_COORDINATOR_ADDRESS=host:port,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID on each host.

    Args:
      compilation_cache_dir: where compiled programs are kept; by default $MMQA_CACHE/xla or
        ~/.cache/mmqa_jax/xla.
      join: whether to join the other hosts of a launch; False for a program of its own, such as a
        shard of a job.

    Raises:
      RunError: the cluster does not say where process 0 is, or others have not come in time.
    """
    import jax

    cache = _compilation_cache(compilation_cache_dir)
    if cache is not None:
        open_cache(cache)
        jax.config.update("jax_compilation_cache_dir", str(cache))
        # Small programs too: a short run starts dozens of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if jax.distributed.is_initialized() or not join:
        return
    arguments = multi_host_arguments(os.environ, has_tpu=_has_tpu(os.environ))
    if arguments is None:
        return
    try:
        _initialize(arguments, os.environ)
    except ValueError as error:
        if arguments or "coordinator_address should be defined" not in str(error):
            raise UserError(
                f"environment: the variables of this launch cannot be read ({error}); see "
                "mmqa_jax/training/HOSTS.md for those that are."
            ) from error
        if (count := _launched_with(os.environ)) is not None:  # such as by Open MPI 5
            raise UserError(
                f"environment: {count}={os.environ[count]}, but JAX does not know this launcher; "
                f"set {', '.join(_NAMES)} in each process, or JAX_NUM_PROCESSES=1 to use each "
                "alone."
            ) from error
        # A TPU outside any cluster that JAX knows: this host is all there is.
    except (RuntimeError, OSError) as error:
        first_line = str(error).partition("\n")[0]
        raise RunError(
            f"the hosts of this launch could not be joined ({first_line}); check that all of them "
            "were started and reach process 0, or set JAX_NUM_PROCESSES=1 to use this host alone."
        ) from error


def peers() -> Peers | None:
    """The other processes; None if there are none."""
    return _LAUNCH.peers


def _initialize(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """jax.distributed.initialize, which names who does not come, or is lost later.

    What JAX finds out about a cluster stays JAX's.

    Args:
      arguments: what is known of address, number of processes and this one's; JAX finds the rest.
      environment: MMQA_JOIN_SECONDS and MMQA_HEARTBEAT_SECONDS, how long others are waited for at
        the start and later; MMQA_COORDINATOR_BIND, the address that process 0 listens at.
    """
    import jax
    from jax._src import distributed as of_jax

    limit, heartbeat = join_seconds(environment), heartbeat_seconds(environment)
    jaxlib = of_jax._jax
    make_service = jaxlib.get_distributed_runtime_service
    make_client = jaxlib.get_distributed_runtime_client

    def service(address: str, count: int, **options: Any) -> Any:
        """Process 0: JAX's service, when all have come."""
        address = bound(address, environment)
        if count > 1:
            Meeting(address, count, limit).wait()
        return make_service(address, count, **options)

    def client(address: str, me: int, **options: Any) -> Any:
        """Every process: JAX's client, which ends this process by `Peers.report`."""
        if (count := of_jax.global_state.num_processes) > 1:
            if me:
                join(address, me, count, limit)
            _LAUNCH.peers = Peers(me, count, address, heartbeat)
            callback, _LAUNCH.handler = speak_before_abort(_LAUNCH.peers.report)
            if callback is not None:
                options["missed_heartbeat_callback"] = callback
        return make_client(address, me, **options)

    jaxlib.get_distributed_runtime_service = service
    jaxlib.get_distributed_runtime_client = client
    try:
        with without_proxies():
            jax.distributed.initialize(
                **arguments, initialization_timeout=limit, heartbeat_timeout_seconds=heartbeat
            )
    finally:
        jaxlib.get_distributed_runtime_service = make_service
        jaxlib.get_distributed_runtime_client = make_client
    if (others := peers()) is not None:
        connection = of_jax.global_state.client
        others.watch(connection)
        others.hold_errors_of_threads()
        atexit.register(others.leave, connection)  # before JAX's own, which waits for the others


@contextlib.contextmanager
def without_proxies() -> Iterator[None]:
    """Hides the environment's proxies, so that connections made meanwhile are direct.

    gRPC would ask an HTTP proxy for the way to process 0, which a cluster's proxy to the outside
    does not know: the processes would wait for each other until the time is up.
    """
    hidden = {name: os.environ[name] for name in os.environ if name.lower() in _PROXIES}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def join_seconds(environment: Mapping[str, str]) -> int:
    """How long the start waits for the other processes: MMQA_JOIN_SECONDS, or half an hour."""
    text = environment.get(_JOIN) or str(DEFAULT_JOIN_SECONDS)
    if not (seconds := decimal_number(text)):
        raise UserError(f"environment: {_JOIN}={text}: whole seconds were expected, at least 1.")
    return seconds


def bound(address: str, environment: Mapping[str, str]) -> str:
    """HOST:PORT to listen at: JAX's choice, with the host of MMQA_COORDINATOR_BIND if it is set."""
    host = environment.get(_BIND, "")
    if not host:
        if not address.rpartition(":")[2].isdecimal():
            raise UserError(
                f"environment: JAX_COORDINATOR_BIND_ADDRESS={address}: host:port was expected."
            )
        return address
    if "/" in host or (":" in host and not host.startswith("[") and host.count(":") == 1):
        raise UserError(
            f"environment: {_BIND}={host}: an address of this host was expected, without a port, "
            "which is that of the coordinator's address."
        )
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{address.rpartition(':')[2]}"


def multi_host_arguments(
    environment: Mapping[str, str], *, has_tpu: bool = False
) -> dict[str, Any] | None:
    """Arguments for jax.distributed.initialize; empty: JAX detects them; None: one host alone.

    JAX_NUM_PROCESSES=1 without the other two variables keeps a host to itself, whatever the
    cluster. In a Kubernetes Indexed Job (and JobSet) JOB_COMPLETION_INDEX stands for
    JAX_PROCESS_ID.

    `has_tpu`: whether this host has TPU chips. A TPU VM of GCE learns of the other hosts from its
    metadata server alone, not from a variable.
    """
    values = {name: environment[name] for name in _NAMES if environment.get(name)}
    if values == {"JAX_NUM_PROCESSES": "1"}:
        return None
    if values:
        index = environment.get("JOB_COMPLETION_INDEX")
        if index:
            values.setdefault("JAX_PROCESS_ID", index)
        return _given(values)
    if any(mark in environment for mark in _LAUNCHED):
        return None if _launched_with(environment) is None else {}
    lists = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
    if has_tpu or any("," in environment.get(name, "") for name in lists):
        return {}
    if environment.get("MEGASCALE_NUM_SLICES", "1") != "1":
        return {}
    in_job = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    return {} if in_job and importlib.util.find_spec("kubernetes") else None


def _launched_with(environment: Mapping[str, str]) -> str | None:
    """The variable by which Slurm or Open MPI says that it started several processes."""
    if not any(mark in environment for mark in _LAUNCHED):
        return None
    counts = {name: environment.get(name, "") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")}
    return next((name for name, n in counts.items() if n.isdigit() and int(n) > 1), None)


def _given(values: Mapping[str, str]) -> dict[str, Any]:
    if missing := [name for name in _NAMES if name not in values]:
        raise UserError(
            f"environment: {next(iter(values))} is set but {', '.join(missing)} is not; set all "
            "three on every host, or none."
        )
    for name in _NAMES[1:]:
        if not values[name].isdecimal() or len(values[name]) > 9:
            raise UserError(f"environment: {name}={values[name]}: a whole number was expected.")
    count, index = int(values[_NAMES[1]]), int(values[_NAMES[2]])
    if index >= count:
        raise UserError(
            f"environment: {_NAMES[2]}={index} but {_NAMES[1]}={count}: number the processes from "
            f"0 to {count - 1}."
        )
    address = values[_NAMES[0]]
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise UserError(f"environment: {_NAMES[0]}={address}: host:port was expected.")
    return {"coordinator_address": address, "num_processes": count, "process_id": index}


def _has_tpu(environment: Mapping[str, str]) -> bool:
    """Whether JAX would use TPU chips of this host: v4 and older, or v5e and later."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return False
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def process_index() -> int:
    """This process's number in its launch; initialises no backend."""
    service = _service()
    return 0 if service is None else service.process_id


def alone() -> bool:
    """Whether this process is the only one of its launch."""
    service = _service()
    return service is None or service.num_processes == 1


def gather(name: str, value: Any) -> list[Any]:
    """The JSON values of all processes, in order; every process calls it.

    `name`: of this exchange; may be used again.

    Raises:
      UserError, RunError: another process failed (see `fail_together`).
    """
    service = _service()
    if service is None:
        return [value]
    client, me, count = service.client, service.process_id, service.num_processes
    turn = client.key_value_increment(f"mmqa/turns/{me}/{name}", 1)
    place = f"mmqa/values/{name}/{turn}"
    client.key_value_set(f"{place}/{me}", json.dumps(value))
    pause = 0.02
    with _naming_the_lost():
        while len(entries := client.key_value_dir_get(place)) < count:
            raise_others_failure()
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)
    values = {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}
    if me == 0 and turn > 1:  # all have read the values of the turn before
        client.key_value_delete(f"mmqa/values/{name}/{turn - 1}/")
    return [values[process] for process in range(count)]


def barrier(name: str) -> None:
    """Waits until every process of the launch is here."""
    gather(f"barrier/{name}", None)


def connect_devices() -> None:
    """One small collective over all devices: the last thing that can be wrong before a step.

    On CPU it also makes the connections between the processes, which a program whose first
    collectives run side by side does not survive.
    """
    from jax.experimental import multihost_utils

    if _service() is not None:
        multihost_utils.sync_global_devices("the devices are connected")


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """What one process fails with in the block becomes the failure of all.

    The others raise it in their next `gather` or `barrier`, at the latest at the end of the block,
    and so all of them end with one exit code, instead of waiting for the one that is gone: a
    UserError as such, everything else as a RunError. Where it is a lost process that makes this
    one fail, it ends with that one's name.
    """
    try:
        with _naming_the_lost():
            yield
            barrier("end of the block")
    except Exception as error:
        _tell_failure(error)
        raise


def _tell_failure(error: Exception) -> None:
    if (service := _service()) is None:
        return
    others = peers()
    if others is not None:
        others.fails(2 if isinstance(error, UserError) else 1)
    if isinstance(error, UserError | RunError):
        report = [type(error).__name__, socket.gethostname(), str(error)]
    else:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        report = [RunError.__name__, socket.gethostname(), what]
    with contextlib.suppress(Exception):  # process 0 may be gone
        if not service.client.key_value_dir_get(_FAILED):
            service.client.key_value_set(f"{_FAILED}/{service.process_id}", json.dumps(report))


@contextlib.contextmanager
def _naming_the_lost() -> Iterator[None]:
    """A collective, or an exchange, that fails because a process is lost ends this one."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        if (others := peers()) is not None and may_be_a_loss(error):
            others.settle(raise_others_failure)
        raise


def at(step: int, doing: str, resumes: Callable[[], int | None] | None = None) -> None:
    """Says what this process does, and the step from which a restart goes on (None: none)."""
    if (others := peers()) is not None:
        others.at(step, doing, resumes)


def raise_others_failure() -> None:
    """Raises what another process has failed with, if one has."""
    service = _service()
    if service is None:
        return
    for key, text in sorted(service.client.key_value_dir_get(_FAILED)):
        process = int(key.rpartition("/")[2])
        kind, host, message = json.loads(text)
        if process != service.process_id:
            error_class = UserError if kind == UserError.__name__ else RunError
            raise error_class(f"process {process} on {host}: {message}")


def others_failure() -> UserError | RunError | None:
    """The failure of another process, or None."""
    try:
        raise_others_failure()
    except (UserError, RunError) as error:
        return error
    return None


def _service() -> Any:
    """JAX's connection of this process to the others; None if there are none."""
    from jax._src import distributed  # jax has no public way to its key-value store

    state = distributed.global_state
    return state if state.client is not None and state.num_processes > 1 else None


def _compilation_cache(chosen: str | os.PathLike | None) -> Path | None:
    folder = Path(chosen) if chosen is not None else cache_dir() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return folder
    if chosen is not None:
        raise UserError(
            f"{folder}: the compilation cache cannot be written there; name another folder."
        )
    # A read-only home is no reason to stop: programs are then compiled in every run.
    logging.getLogger(__name__).warning("%s is not writable: there is no compilation cache", folder)
    return None


# JAX's cache of compiled programs, looked through after a process that was killed.
#
# JAX writes an entry in place, and never again one that is there: half an entry, which kill -9
# leaves behind, would be met with a warning in every later run, its program compiled each time.

_MARK = ".open-"  # then host and process


@functools.cache
def open_cache(folder: Path) -> None:
    """Removes broken entries of killed processes of this host, and marks the folder as in use."""
    host = socket.gethostname()
    for mark in folder.glob(f"{_MARK}{host}-*"):
        if not _is_running(mark.name.rpartition("-")[2]):
            with contextlib.suppress(OSError):  # another process was faster, or another user's
                _remove_broken(folder, mark.stat().st_mtime)
                mark.unlink()
    mark = folder / f"{_MARK}{host}-{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk: JAX then writes no entry either
        mark.touch()
        atexit.register(mark.unlink, missing_ok=True)


def is_whole(entry: bytes) -> bool:
    """Whether a file of the cache is as JAX wrote it."""
    from jax._src import compilation_cache  # JAX has no public way to look at one

    try:
        compilation_cache.decompress_executable(entry)
    except Exception:  # of the library that compressed it
        return False
    return True


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _remove_broken(folder: Path, since: float) -> None:
    """Deletes entries that were written after `since`, a time of files, and are not whole."""
    for file in folder.glob("*-cache"):
        if file.stat().st_mtime >= since and not is_whole(file.read_bytes()):
            file.unlink(missing_ok=True)


# The processes of a launch meet before JAX joins them, so that one that is absent is named.


EVERY_SECONDS = 10.0  # between two lines
_LONGEST_LINE = 4096  # bytes of a reply
_BETWEEN_TRIES = 0.2  # seconds
_LONGEST_TURN = 10.0  # seconds; a turn that took longer was this process's own sleep
_PORT_SECONDS = 20.0  # until the port is free


def _print(line: str) -> None:
    print(f"mmqa: {line}", file=sys.stderr, flush=True)


class _Guest(NamedTuple):
    host: str
    pid: str
    seen: float


class Meeting:
    """Process 0's side.

    Args:
      bind: HOST:PORT to listen at; [::] are all addresses.
      count: how many processes the launch has.
      limit: seconds until it gives up.
      every: seconds between two lines.
      say: prints a line.
    """

    def __init__(
        self,
        bind: str,
        count: int,
        limit: float,
        *,
        every: float = EVERY_SECONDS,
        say: Callable[[str], None] = _print,
    ):
        self._bind, self._count, self._limit = bind, count, limit
        self._every, self._say = every, say
        self._guests: dict[int, _Guest] = {}
        self._all_are_there = threading.Event()
        self._server = _listen(bind, self)

    def wait(self) -> None:
        """Returns when all are there, and listens no more.

        Raises:
          RunError: some have not come within the limit; they are named.
        """
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        waited, due, last = 0.0, self._every, time.monotonic()
        try:
            while absent := self._absent():
                time.sleep(0.05)
                now = time.monotonic()
                if now - last < _LONGEST_TURN:
                    waited += now - last
                last = now
                if waited > self._limit:
                    raise RunError(
                        f"{self._sentence(absent, waited)}: gave up; start every process of the "
                        "launch, or set JAX_NUM_PROCESSES to how many there are."
                    )
                if waited > due:
                    due += self._every
                    self._say(
                        f"{self._sentence(absent, waited)}: check that each was started, and "
                        "reaches this port."
                    )
        finally:
            self._all_are_there.set()
            self._server.shutdown()
            self._server.server_close()

    def greet(self, query: str) -> dict[str, Any]:
        """The reply to a process, which waits for half a line's time if others are absent."""
        values = dict(urllib.parse.parse_qsl(query))
        process, count = (decimal_number(values.get(name, "")) for name in ("process", "of"))
        if process is None or not {"host", "pid"} <= values.keys():
            return {}  # a port scan, another program
        if count != self._count:
            problem = f"it was started as one of {count} processes, process 0 as one of"
            return {"refused": f"{problem} {self._count}; give all the same number"}
        guest = _Guest(values["host"], values["pid"], time.monotonic())
        known = self._guests.get(process, guest)
        if not 0 < process < self._count or (known[:2] != guest[:2] and self._is_there(process)):
            host = known.host if 0 < process < self._count else socket.gethostname()
            problem = f"there is a process {process} already, on {host}"
            return {"refused": f"{problem}; number the processes differently"}
        self._guests[process] = guest
        self._all_are_there.wait(self._every / 2)
        return {"absent": self._absent()}

    def _is_there(self, process: int) -> bool:
        seen = self._guests[process].seen if process in self._guests else float("-inf")
        return time.monotonic() - seen < self._every / 2 + 3 or self._all_are_there.is_set()

    def _absent(self) -> list[int]:
        return [process for process in range(1, self._count) if not self._is_there(process)]

    def _sentence(self, absent: list[int], seconds: float) -> str:
        came = [f"{process} ({guest.host})" for process, guest in list(self._guests.items())]
        others = f"; there are 0 ({socket.gethostname()}), {first_names(came)}" if came else ""
        return (
            f"process 0 has waited {seconds:.0f} s at {self._bind} for {_processes(absent)} "
            f"of {self._count}{others}"
        )


def join(
    address: str,
    process: int,
    count: int,
    limit: float,
    *,
    every: float = EVERY_SECONDS,
    say: Callable[[str], None] = _print,
) -> None:
    """Every other process's side: returns when JAX's own service answers at process 0's port.

    `address`: HOST:PORT of process 0.

    Raises:
      RunError: process 0 was not reached, or others have not come, within the limit.
    """
    began, problem = time.monotonic(), "nothing was tried yet"
    due, absent = began + every, []
    host, _, port = address.rpartition(":")
    here = {"process": process, "of": count, "host": socket.gethostname(), "pid": os.getpid()}
    query = urllib.parse.urlencode(here)
    while time.monotonic() < began + limit:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=every)
        try:
            connection.request("GET", f"/?{query}")
            reply = json.loads(connection.getresponse().read(_LONGEST_LINE))
            refused, absent = reply.get("refused"), reply.get("absent", [])
            # Another process of this number may be this one's last start, which has just ended.
            if refused and time.monotonic() > began + every:
                raise UserError(f"process 0 at {address} refuses process {process}: {refused}.")
            problem = refused or "JAX's service is not there"
        except http.client.RemoteDisconnected:
            problem = "it closed the connection"
        except (http.client.HTTPException, ValueError):
            return  # JAX's service is there, and decides
        except socket.gaierror as error:
            problem = f"its name is not known here: {error.strerror}"
        except TimeoutError:
            problem = "no answer: a firewall, or a host that is down"
        except OSError as error:
            problem = f"{(error.strerror or str(error)).lower()}"
        finally:
            connection.close()
        if time.monotonic() > due:
            due = time.monotonic() + every
            say(_waiting(process, address, absent, time.monotonic() - began, problem))
        time.sleep(_BETWEEN_TRIES)
    raise RunError(
        f"process {process} has waited {time.monotonic() - began:.0f} s for process 0 at {address} "
        f"({problem}): gave up; start every process of the launch with the address of process 0."
    )


def _waiting(process: int, address: str, absent: list[int], seconds: float, problem: str) -> str:
    if absent:
        return (
            f"process {process} has waited {seconds:.0f} s for {_processes(absent)}, as process 0 "
            f"at {address} does: check that each was started."
        )
    return (
        f"process {process} has waited {seconds:.0f} s for process 0 at {address} ({problem}): "
        "check that it was started with this address, and that this host reaches the port."
    )


def _processes(absent: list[int]) -> str:
    return f"process{'es' if len(absent) > 1 else ''} {first_names(map(str, absent))}"


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024

    def __init__(self, host: str, port: int, meeting: Meeting):
        self.meeting = meeting
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        (self.address_family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)  # without a look-up of this host's name

    def handle_error(self, *_: Any) -> None:
        """A connection that breaks is no error of this process."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = EVERY_SECONDS

    def do_GET(self) -> None:
        reply = json.dumps(self.server.meeting.greet(self.path.partition("?")[2])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def _listen(bind: str, meeting: Meeting) -> _Server:
    host, _, port = bind.rpartition(":")
    deadline = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return _Server(host.strip("[]"), int(port), meeting)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.5)  # the attempt before this one is still ending
                continue
            why = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror
            raise UserError(
                f"process 0 cannot listen at {bind} ({why}): choose another port in "
                "JAX_COORDINATOR_ADDRESS, or an address of this host in MMQA_COORDINATOR_BIND."
            ) from error


# Whether all processes of a launch are the same run: command, code, libraries, data, workdir.


# What decides how a program is compiled, or how a checkpoint is written.
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_SHOWN = 4


def check_same_run(config: Any, further: Mapping[str, Any]) -> None:
    """UserError on every process if they differ, with what differs and where.

    Args:
      config: of the run, a ConfigDict or mapping.
      further: other JSON values that have to be equal, by what a message calls them.
    """
    if alone():  # nothing can differ; the code need not be read
        return
    facts = {f"config key {key}": value for key, value in flatten(to_plain_dict(config)).items()}
    facts |= further
    facts |= {f"the version of {name}": different for name, different in _versions().items()}
    facts["the code of mmqa_jax"] = _code_fingerprint()
    reports = gather("facts", {"host": socket.gethostname(), "facts": facts})
    if different := differences([(report["host"], report["facts"]) for report in reports]):
        more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise UserError(
            f"the processes of this launch differ: {'; '.join(different[:_SHOWN])}{more}; start "
            "all of them with the same command, code and environment."
        )


def differences(reports: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Returns a line for each fact that differs among (host, facts) of the processes in order."""
    (first_host, first), absent = reports[0], "absent"
    names = dict.fromkeys(name for _, facts in reports for name in facts)
    lines = []
    for name in names:
        wanted = first.get(name, absent)
        others = [
            (process, host, facts.get(name, absent))
            for process, (host, facts) in enumerate(reports)
            if facts.get(name, absent) != wanted
        ]
        if others:
            process, host, value = others[0]
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            lines.append(
                f"{name} is {wanted!r} on process 0 ({first_host}) and {value!r} on process "
                f"{process} ({host}){more}"
            )
    return lines


def check_shared_folder(folder: Path) -> None:
    """UserError on every process if they do not all see and write process 0's folder."""
    tokens = gather("token", uuid.uuid4().hex)
    if len(tokens) == 1:
        return
    mark = folder / f".seen.{tokens[0]}.{process_index()}"
    problem = None
    try:
        mark.write_text(socket.gethostname(), encoding="utf-8")
    except OSError as error:
        problem = error.strerror
    hosts = gather("marked", [socket.gethostname(), problem])
    try:
        _check_marks(folder, mark, hosts)
    finally:
        barrier("marks are checked")
        mark.unlink(missing_ok=True)


def _check_marks(folder: Path, mark: Path, hosts: list[Any]) -> None:
    unseen = [
        process
        for process, (_, problem) in enumerate(hosts)
        if problem is None and not mark.with_suffix(f".{process}").exists()
    ]
    apart = gather("unseen", unseen)[0]  # process 0 writes what all read
    lines = [
        f"cannot be written on process {process} ({host}: {problem})"
        for process, (host, problem) in enumerate(hosts)
        if problem is not None
    ]
    lines += [f"process {process} ({hosts[process][0]}) has another folder" for process in apart]
    if lines:
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise UserError(
            f"--workdir={folder}: {'; '.join(lines[:_SHOWN])}{more}; name a folder on a file "
            "system that all hosts share and can write."
        )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def _code_fingerprint() -> str:
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
