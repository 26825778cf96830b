"""praxis_tools: tools to plan, explain, check, report on, serve and supervise praxis_lite jobs.

Its loggers are children of `praxis_lite`, so that one level and one handler apply to both packages.
"""

import logging

logging.getLogger(__name__).parent = logging.getLogger("praxis_lite")
