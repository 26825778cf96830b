"""Models here as models of lm-evaluation-harness (EleutherAI's `lm_eval`), from its command line.

    python -m praxis_tools.lm_eval --model praxis_lite --model_args job=DIR --tasks hellaswag

It takes the arguments of `lm_eval`, which has no place for models of other packages. In Python
`harness_model` makes the same. Texts become ids as in lm_eval's own adapter of transformers.
Never sees tasks and their metrics: those are lm_eval's.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
