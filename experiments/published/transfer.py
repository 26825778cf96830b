"""Narrow and wide GPTs whose best learning rates differ, because they do not use muP.

Source: EleutherAI/nanoGPT-mup, mup_examples/mutransfer_lr_shakespeare_char/sp/run.sh. The best
learning rate for a width of 2,048 is several times smaller than for a width of 256.

Deviations, so that the sweep takes minutes on two cores:
- The widths are 64 and 256 instead of 256 to 2,048, and heads have 32 instead of 64 dims.
- A batch has 8 windows of 128 characters. The source's windows have 1,024 characters.
"""

from praxis_lite import register
from praxis_lite.experiments.published.char import Gpt

__all__ = ["Narrow", "Wide"]


@register
class Narrow(Gpt):
    """A GPT with a width of 64, trained for 122 steps with a constant learning rate."""

    eval_interval = 122
    batch_size = 8
    block_size = 128
    n_layer, n_head, n_embd = 2, 2, 64
    learning_rate = 2**-8
    max_iters = 122
    beta2 = 0.95


@register
class Wide(Narrow):
    """A GPT with a width of 256, whose best learning rate is smaller."""

    n_head, n_embd = 8, 256
