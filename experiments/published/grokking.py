"""A transformer that learns division modulo 97 long after it has memorized the training data.

Source: stockeh/mlx-grokking, README.md, main.py, models.py and data.py. The accuracy on the other
half of the table is about 1 within 150 epochs.

Deviations:
- All 1,500 batches have 512 rows. In the source, the last of the 10 batches of an epoch has 48.
- AdamW corrects the bias of its moments. By default, MLX's AdamW does not.
- Evaluations do not use dropout. The source's evaluations do.
"""

import fiddle as fdl
import numpy as np
import optax

from praxis_lite import register
from praxis_lite.core import Learner
from praxis_lite.experiments.published import SPLITS, Published, run_config, shuffled_arrays
from praxis_lite.inputs import TokenIds
from praxis_lite.layers import (
    AttentionProjection,
    Embedding,
    FeedForward,
    FullSoftmax,
    Repeat,
    RotaryPositionalEmbedding,
    TransformerFeedForward,
    WeightInit,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.tasks.language_model import LanguageModelTask

__all__ = ["Grokking", "divisions"]


def divisions(split: str, p: int, train_fraction: float) -> dict[str, np.ndarray]:
    """Returns the ids of `a / b =`, [n, 4], with a / b mod p as the label of the last id."""
    a, b = (x.ravel() for x in np.meshgrid(np.arange(p), np.arange(1, p), indexing="ij"))
    quotient = np.array([x * pow(int(y), -1, p) % p for x, y in zip(a, b, strict=True)])
    order = np.random.RandomState(42).permutation(len(a))
    num_train = int(train_fraction * len(a))
    chosen = order[:num_train] if split == "train" else order[num_train:]
    ids = np.stack([a, np.full_like(a, p), b, np.full_like(a, p + 1)], axis=1)[chosen]
    labels, weights = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
    labels[:, -1], weights[:, -1] = quotient[chosen], 1.0
    return {"ids": ids, "labels": labels, "weights": weights}


@register
class Grokking(Published):
    """Learns division modulo 97. Published held-out accuracy: about 1 within 1,500 steps."""

    p = 97
    train_fraction = 0.5
    depth, dim, heads = 2, 128, 1
    dropout = 0.2
    lr = 1e-3
    weight_decay = 1.0
    beta1, beta2 = 0.9, 0.98
    warmup = 10
    batch_size = 512
    num_steps = 1500

    def task(self):
        # MLX's initial weights are uniform within 1 / sqrt(fan-in).
        uniform = fdl.Config(WeightInit.UniformSqrtDim)
        normal = fdl.Config(WeightInit.Gaussian, scale=self.dim**-0.5)
        lm = rotary_lm(
            vocab_size=self.p + 2,
            model_dims=self.dim,
            hidden_dims=4 * self.dim,
            num_heads=self.heads,
            num_layers=self.depth,
            tr_fflayer_tpl=fdl.Partial(
                TransformerFeedForward,
                activation="silu",
                use_gated_activation=True,
                has_bias=False,
                relu_dropout_prob=self.dropout,
                fflayer_tpl=fdl.Partial(FeedForward, weight_init=uniform),
            ),
            attention={
                "proj_tpl": fdl.Partial(AttentionProjection, params_init=uniform),
                "rotary_position_emb_tpl": fdl.Partial(
                    RotaryPositionalEmbedding, max_timescale=1e6
                ),
            },
            softmax_tpl=fdl.Partial(FullSoftmax, has_bias=False, weight_init=uniform),
            separate_embedding_tpl=fdl.Partial(Embedding, weight_init=normal),
            stacked_transformer_tpl=fdl.Partial(Repeat, checkpoint_policy="save_everything"),
        )
        adamw = fdl.Partial(
            optax.adamw, b1=self.beta1, b2=self.beta2, weight_decay=self.weight_decay
        )
        rate = fdl.Config(optax.linear_schedule, 0.0, self.lr, self.warmup)
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(lm),
            learner=fdl.Config(Learner, adamw, learning_rate=rate),
            inputs_split_mapping=SPLITS,
            tokenizer=fdl.Config(TokenIds),
        )

    def datasets(self):
        sizes = {"batch_size": self.batch_size, "eval_batch_size": self.batch_size}
        return shuffled_arrays(divisions, self.p, self.train_fraction, **sizes)

    def run(self):
        return run_config(self.num_steps, 50)
