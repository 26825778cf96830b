# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.modes.job_from_command import (
    experiment_of as experiment_of,
)
from praxis_lite.modes.job_from_command import (
    job_on_mesh as job_on_mesh,
)
from praxis_lite.modes.job_from_command import (
    recorded_job_of as recorded_job_of,
)
from praxis_lite.modes.mode import CommandLine as CommandLine
from praxis_lite.modes.mode import Mode as Mode
