"""Which Host headers name this machine."""

import pytest

from praxis_lite.host.host_names import LOOPBACK_HOSTS, has_allowed_host

OWN = ("localhost", "LocalHost", "localhost:80", "127.0.0.1", "127.0.0.1:65535", "[::1]",
       "[::1]:8000", "[0:0:0:0:0:0:0:1]", " localhost ")  # fmt: skip
FOREIGN = (
    "",
    " ",
    "evil.com",
    "127.0.0.1.evil.com",
    "localhost.evil.com",
    "evil.com:80",
    "localhost.",
    "127.0.0.1.",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "127.0.0.01",
    "10.0.0.1",
    "0.0.0.0",
    "localhost:",
    "localhost:abc",
    "localhost:-1",
    "localhost:65536",
    "localhost:80:80",
    "localhost:\uff18\uff10",
    "localhost@evil.com",
    "evil.com@localhost",
    "user:key@localhost",
    "localhost/",
    "localhost/@evil.com",
    "localhost#",
    "localhost?x",
    "localhost,evil.com",
    "localhost evil.com",
    "local\thost",
    "localhost\\evil.com",
    "http://localhost",
    "//localhost",
    "[::1",
    "::1",
    "[::1]x",
    "[::1]:",
    "[::1%25lo]",
    "[::1%lo]",
    "[::]",
    "[]",
    "[localhost]",
    "[127.0.0.1]",
    "[::ffff:127.0.0.1]",
    "\u24dbocalhost",
    "loc\u0430lhost",
    "xn--loclhost-6fg",
    "%6cocalhost",
    "localhost\0",
    "*",
)


@pytest.mark.parametrize("hosts, expected", [
    *(([host], True) for host in OWN), *(([host], False) for host in FOREIGN),
    ([], False), (["localhost", "localhost"], False), (["localhost", "evil.com"], False),
])  # fmt: skip
def test_only_one_host_header_that_is_exactly_an_own_name_counts(hosts, expected):
    assert has_allowed_host(hosts, LOOPBACK_HOSTS) is expected
