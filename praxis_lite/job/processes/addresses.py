"""Addresses of a job's hosts: where its ports listen, and how other hosts reach them."""

import contextlib
import ipaddress
import socket

from praxis_lite.host.host_names import is_loopback

__all__ = ("joined", "own_address", "split")


def split(address: str) -> tuple[str, int]:
    """Returns host and port of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """Returns "HOST:PORT", the host in brackets if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(coordinator: str | None) -> str:
    """Returns the address of this host on the network of the coordinator, "HOST:PORT".

    It is a loopback address if the coordinator's is, or there is no network. The coordinator's name
    may have no address: in Kubernetes while its pod is not there.
    """
    host = split(coordinator)[0] if coordinator else ""
    # The last address stands for any other network (RFC 5737).
    for target in filter(None, (host, socket.gethostname(), "192.0.2.1")):
        with contextlib.suppress(OSError):
            family, _, _, _, to = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as asked:
                asked.connect(to)  # Sends nothing.
                address = asked.getsockname()[0]
            # A host's own name may mean 127.0.1.1 on it, and its address elsewhere.
            if not is_loopback(address) or (target == host and is_loopback(host)):
                return address
    return "127.0.0.1"


def to_bind(coordinator: str) -> tuple[str, int]:
    """Returns where the coordinator, "HOST:PORT", listens on its host: an address of that host.

    0.0.0.0 and :: are taken at their word: all interfaces.
    """
    host, port = split(coordinator)
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return host, port
    return own_address(coordinator), port


def to_reach(coordinator: str) -> tuple[str, int]:
    """Returns where processes reach the coordinator, "HOST:PORT".

    It is the host as it was given, unless that is this host's own name for itself.
    """
    host, port = split(coordinator)
    with contextlib.suppress(OSError):
        if is_loopback(socket.getaddrinfo(host, port)[0][4][0]) and not is_loopback(host):
            return own_address(coordinator), port
    return host, port
