# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_tools.lm_eval.harness import harness_model as harness_model
