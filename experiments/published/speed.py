"""GPT-2 with 124M parameters, for measuring the training speed.

Source: karpathy/llm.c and karpathy/nanoGPT, config/train_gpt2.py. llm.c processes about 463,000
tokens per second on one H100 (10B tokens in 45 minutes on eight).

Deviations:
- Ids are synthetic, because only the speed is measured.
"""

import fiddle as fdl
import jax.numpy as jnp

from praxis_lite import register
from praxis_lite.experiments.published.char import Gpt
from praxis_lite.inputs import SyntheticLm, TokenIds

__all__ = ["Gpt2"]


@register
class Gpt2(Gpt):
    """GPT-2 with 124M parameters in bfloat16, on synthetic ids."""

    vocab_size = 50304
    batch_size = 64
    block_size = 1024
    n_layer, n_head, n_embd = 12, 12, 768
    bias = True
    learning_rate = 6e-4
    max_iters = 50
    beta2 = 0.95

    def tokenizer(self):
        return fdl.Config(TokenIds)

    def model(self):
        model = super().model()
        model.fprop_dtype = jnp.bfloat16
        return model

    def datasets(self):
        return {"train": fdl.Config(SyntheticLm, self.vocab_size, self.batch_size, self.block_size)}
