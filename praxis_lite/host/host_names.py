"""Checks the Host header of requests against the names of this machine.

This protects local servers from DNS rebinding: a web page can point its domain to this machine, and
make a browser on this machine send requests. The Host header then contains that domain.
"""

import ipaddress
import re
from collections.abc import Sequence, Set

__all__ = ("LOOPBACK_HOSTS", "has_allowed_host", "is_loopback")

# Names by which this machine refers to itself.
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([a-zA-Z0-9._-]+))(?::([0-9]{1,5}))?", re.ASCII)


def is_loopback(host: str) -> bool:
    """Returns whether a host is a loopback address, which other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def has_allowed_host(host_headers: Sequence[str], names: Set[str]) -> bool:
    """Returns whether a request has exactly one Host header, with one of the allowed names.

    Args:
      host_headers: Values of all Host headers in the request. A valid value is NAME, ADDRESS or
        [IPV6], with or without a port.
      names: Allowed names in lower case; IPv6 addresses without brackets, in their shortest form.
    """
    if len(host_headers) != 1:
        return False
    found = _HOST.fullmatch(host_headers[0].strip(" \t"))
    if found is None or int(found[3] or 0) >= 2**16:
        return False
    if found[1] is None:
        return found[2].lower() in names
    try:
        return str(ipaddress.IPv6Address(found[1])) in names
    except ValueError:
        return False
