# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.models.function_model import FunctionModel as FunctionModel
from praxis_lite.models.linen_model import LinenModel as LinenModel
