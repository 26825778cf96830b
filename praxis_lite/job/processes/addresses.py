"""Determines the addresses on which a job's hosts listen and to which they connect."""

import contextlib
import ipaddress
import socket

from praxis_lite.host.host_names import is_loopback

__all__ = ("format_address", "own_address", "parse_address", "refuses_connections")


def parse_address(address: str) -> tuple[str, int]:
    """Splits "HOST:PORT" into host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """Returns "HOST:PORT", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refuses_connections(address: str) -> bool:
    """Returns whether a host refuses connections to "HOST:PORT" because no process is listening."""
    with contextlib.suppress(OSError):
        try:
            socket.create_connection(parse_address(address), timeout=0.3).close()
        except ConnectionRefusedError:
            return True
    return False


def own_address(coordinator: str | None) -> str:
    """Returns this host's IP address on the network of the coordinator.

    Returns a loopback address if the coordinator has one or if there is no network. If the
    coordinator's name does not resolve, as in Kubernetes before its pod runs, the interface of the
    default route is used.

    Args:
      coordinator: "HOST:PORT" of the coordinator, or None.
    """
    host = parse_address(coordinator)[0] if coordinator else ""
    # The last address is reserved (RFC 5737); the route to it is the default route.
    for target in filter(None, (host, socket.gethostname(), "192.0.2.1")):
        with contextlib.suppress(OSError):
            family, _, _, _, to = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(to)  # On a UDP socket, this only selects the interface.
                address = probe.getsockname()[0]
            # A host may resolve its own name to 127.0.1.1.
            if not is_loopback(address) or (target == host and is_loopback(host)):
                return address
    return "127.0.0.1"


def to_bind(coordinator: str) -> tuple[str, int]:
    """Returns the (host, port) on which the process with the coordinator "HOST:PORT" listens.

    The host is an address of this machine. 0.0.0.0 and :: mean all interfaces, as usual.
    """
    host, port = parse_address(coordinator)
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return host, port
    return own_address(coordinator), port


def to_reach(coordinator: str) -> tuple[str, int]:
    """Returns the (host, port) at which processes connect to the coordinator "HOST:PORT".

    The host is unchanged, unless it resolves to a loopback address on this host.
    """
    host, port = parse_address(coordinator)
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, port)[0][4][0])
        if is_loopback(address) and not is_loopback(host):
            return own_address(coordinator), port
    return host, port
