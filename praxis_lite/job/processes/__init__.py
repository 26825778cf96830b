"""The processes of a job: how they connect, communicate and exit.

This package does not depend on models, mesh axes or the job's files.
"""

from praxis_lite.job.processes.coordination import (
    client,
    count,
    count_on_this_host,
    exchange,
    exchange_host_names,
    host,
    index,
    is_first,
    name,
)
from praxis_lite.job.processes.membership import membership

__all__ = (
    "client",
    "count",
    "count_on_this_host",
    "exchange",
    "host",
    "index",
    "is_first",
    "exchange_host_names",
    "membership",
    "name",
)
