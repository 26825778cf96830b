"""Evaluates trained models with EleutherAI's lm-evaluation-harness (`lm_eval`).

    praxis lm_eval --model praxis_lite --model_args job=DIR --tasks hellaswag

The command takes all arguments of `lm_eval` and registers `--model praxis_lite`; `harness_model`
does the same in Python. Text is tokenized as in lm_eval's adapter for transformers (`hf`). Tasks
and metrics are implemented by lm_eval; this package only scores and continues token ids.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
