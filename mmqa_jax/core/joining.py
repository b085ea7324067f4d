"""Joining the processes of a launch, with an end to the wait and a name for who is missing.

What JAX finds out about a cluster stays JAX's: only how jax.distributed.initialize makes jaxlib's
service and client is changed, since it has no argument for either.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError, decimal_number
from mmqa_jax.core.peers import Peers, callback, heartbeat_seconds, on_failed_callback
from mmqa_jax.core.rendezvous import Meeting, join

DEFAULT_JOIN_SECONDS = 1800  # hosts of a pod come up minutes apart
_JOIN = "MMQA_JOIN_SECONDS"
_BIND = "MMQA_COORDINATOR_BIND"
# gRPC's and Python's variables for proxies, in either case.
_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


@dataclasses.dataclass
class _Launch:
    """One a process, as JAX's own connection is."""

    peers: Peers | None = None
    handler: Any = None


_LAUNCH = _Launch()


def peers() -> Peers | None:
    """The other processes; None if there are none."""
    return _LAUNCH.peers


def initialize(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """jax.distributed.initialize, which names who does not come, or is lost later.

    Args:
      arguments: what is known of address, number of processes and this one's; JAX finds the rest.
      environment: MMQA_JOIN_SECONDS and MMQA_HEARTBEAT_SECONDS, how long others are waited for at
        the start and later; MMQA_COORDINATOR_BIND, the address that process 0 listens at.

    Raises:
      RunError: others have not come in time.
      What jax.distributed.initialize raises.
    """
    import jax
    from jax._src import distributed as of_jax

    limit = join_seconds(environment)
    runtime = _Runtime(of_jax._jax, limit, environment)
    of_jax._jax = runtime
    try:
        with without_proxies():
            jax.distributed.initialize(
                **arguments,
                initialization_timeout=limit,
                heartbeat_timeout_seconds=runtime.heartbeat,
            )
    finally:
        of_jax._jax = runtime.jaxlib
    if (others := peers()) is not None:
        client = of_jax.global_state.client
        others.watch(client)
        others.hold_errors_of_threads()
        atexit.register(others.leave, client)  # before JAX's own, which waits for the others


@contextlib.contextmanager
def without_proxies() -> Iterator[None]:
    """Hides the environment's proxies: what is connected to meanwhile is reached directly.

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
    given = environment.get(_JOIN) or str(DEFAULT_JOIN_SECONDS)
    if not (seconds := decimal_number(given)):
        raise UserError(f"environment: {_JOIN}={given}: whole seconds were expected, at least 1.")
    return seconds


def bound(address: str, environment: Mapping[str, str]) -> str:
    """HOST:PORT to listen at: JAX's choice, with the host of MMQA_COORDINATOR_BIND if given."""
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


class _Runtime:
    """jaxlib's module as jax.distributed sees it while it joins."""

    def __init__(self, jaxlib: Any, limit: int, environment: Mapping[str, str]):
        self.jaxlib, self.heartbeat = jaxlib, heartbeat_seconds(environment)
        self._limit, self._environment = limit, environment
        self._meeting: Meeting | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jaxlib, name)

    def get_distributed_runtime_service(self, address: str, num_nodes: int, **options: Any) -> Any:
        """Process 0: JAX's service, when all have come."""
        address = bound(address, self._environment)
        if num_nodes > 1:
            self._meeting = Meeting(address, num_nodes, self._limit)
            self._meeting.wait()
        return self.jaxlib.get_distributed_runtime_service(address, num_nodes, **options)

    def get_distributed_runtime_client(self, address: str, node_id: int, **options: Any) -> Any:
        """Every process: JAX's client, which ends this process by `Peers.report`."""
        from jax._src.distributed import global_state

        count = global_state.num_processes
        if count > 1:
            if self._meeting is not None:
                self._meeting.release()
            else:
                join(address, node_id, count, self._limit)
            _LAUNCH.peers = Peers(node_id, count, address, self.heartbeat)
            _LAUNCH.handler = on_failed_callback(_LAUNCH.peers.report)
            if _LAUNCH.handler is not None:
                options["missed_heartbeat_callback"] = callback
        return self.jaxlib.get_distributed_runtime_client(address, node_id, **options)
