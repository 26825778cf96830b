"""What are the processes of a job, and when does each of them end?

Never sees a model, a mesh's axes or a file of the job.
"""

from praxis_lite.job.processes.coordination import (
    client,
    count,
    count_on_this_host,
    exchange,
    host,
    index,
    is_first,
    learn_hosts,
    name,
)
from praxis_lite.job.processes.membership import membership

__all__ = (
    "client", "count", "count_on_this_host", "exchange", "host", "index", "is_first",
    "learn_hosts", "membership", "name",
)
