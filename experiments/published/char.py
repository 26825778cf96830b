"""Character-level GPTs trained on Shakespeare, as in nanoGPT.

Source: karpathy/nanoGPT, README.md, model.py, train.py and config/train_shakespeare_char.py. The
best validation loss of `Char` is 1.4697. The final validation loss of `CharCpu` is 1.88. Logs of
`Char` that others have published have losses of 2.06 to 2.08 at step 250, where `CharStart` ends;
one is at https://vglazer.github.io/training-on-metal.

Deviations:
- An epoch consists of non-overlapping windows, which start at a random offset. The source draws the
  start of each window with replacement.
- Evaluations use the complete held-out text. The source uses random windows of it.
- The source trained `Char` with bfloat16 autocast on a GPU. We use float32.
"""

import string
from typing import Any

import fiddle as fdl
import optax

from praxis_lite import register
from praxis_lite.core import Learner
from praxis_lite.experiments.published import DATA, SPLITS, Published, run_config
from praxis_lite.inputs import CharacterTokenizer, TextCorpus
from praxis_lite.inputs.numpy_data import TextWindows
from praxis_lite.layers import (
    AttentionProjection,
    DotProductAttention,
    Embedding,
    FeedForward,
    FullSoftmax,
    LayerNorm,
    Repeat,
    SharedEmbeddingSoftmax,
    TrainablePositionalEmbedding,
    Transformer,
    TransformerFeedForward,
    TransformerLm,
    WeightInit,
    set_sharding_params,
)
from praxis_lite.optimizers import path_mask
from praxis_lite.tasks.language_model import LanguageModelTask

__all__ = ["Char", "CharCpu", "CharStart", "Gpt"]

CHARACTERS = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase


class Gpt(Published):
    """Base class: nanoGPT's model (GPT-2 with optional biases), trained on Shakespeare."""

    batch_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    learning_rate: float
    max_iters: int
    eval_interval = 250
    vocab_size = 65
    bias = False
    tied = True  # Whether the embedding is also the softmax weight.
    activation = "gelu_exact"
    # Whether weights whose outputs are added to the residual stream have a smaller initial scale.
    scaled_init = True
    dropout = 0.0
    weight_decay = 0.1
    decays_vectors = False  # Whether weight decay includes norms and biases.
    beta2 = 0.99
    grad_clip = 1.0

    def model(self) -> "fdl.Partial[TransformerLm]":
        """Returns the config of the model."""
        std = 0.02
        normal = fdl.Config(WeightInit.Gaussian, std)
        output_std = std * (2 * self.n_layer) ** -0.5 if self.scaled_init else std
        output_init = fdl.Config(WeightInit.Gaussian, output_std)
        norm = fdl.Partial(LayerNorm, epsilon=1e-5, use_bias=self.bias, direct_scale=True)
        block = fdl.Partial(
            Transformer,
            ln_tpl=norm,
            atten_dropout_prob=self.dropout,
            tr_atten_tpl=fdl.Partial(
                DotProductAttention,
                use_bias=self.bias,
                internal_enable_per_dim_scale=False,
                proj_tpl=fdl.Partial(AttentionProjection, params_init=normal),
                output_init=output_init,
            ),
            tr_fflayer_tpl=fdl.Partial(
                TransformerFeedForward,
                activation=self.activation,
                has_bias=self.bias,
                fflayer_tpl=fdl.Partial(FeedForward, weight_init=normal),
                output_init=output_init,
            ),
        )
        softmax = SharedEmbeddingSoftmax if self.tied else FullSoftmax
        embedding = None if self.tied else fdl.Partial(Embedding, weight_init=normal)
        stack = fdl.Partial(
            Repeat, checkpoint_policy="save_everything", input_dropout_prob=self.dropout
        )
        return fdl.Partial(
            TransformerLm,
            vocab_size=self.vocab_size,
            model_dims=self.n_embd,
            hidden_dims=4 * self.n_embd,
            num_heads=self.n_head,
            num_layers=self.n_layer,
            max_seq_length=self.block_size,
            residual_dropout_prob=self.dropout,
            softmax_tpl=fdl.Partial(softmax, has_bias=False, weight_init=normal),
            separate_embedding_tpl=embedding,
            position_emb_tpl=fdl.Partial(TrainablePositionalEmbedding, weight_init=normal),
            transformer_layer_tpl=block,
            stacked_transformer_tpl=stack,
            final_ln_tpl=norm,
        )

    def rate(self) -> Any:
        """Returns the learning rate, or the config of its schedule."""
        return self.learning_rate

    def tokenizer(self) -> fdl.Config:
        """Returns the config of the tokenizer."""
        return fdl.Config(CharacterTokenizer, CHARACTERS)

    def task(self):
        mask = None if self.decays_vectors else fdl.Config(path_mask, skip_1d_vectors=True)
        adamw = fdl.Partial(
            optax.adamw, b1=0.9, b2=self.beta2, weight_decay=self.weight_decay, mask=mask
        )
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(self.model()),
            learner=fdl.Config(
                Learner,
                optimizer=adamw,
                learning_rate=self.rate(),
                clip_gradient_norm_to_value=self.grad_clip,
            ),
            inputs_split_mapping=SPLITS,
            tokenizer=self.tokenizer(),
        )

    def datasets(self):
        def windows(split: str, heldout_percent: int, **settings: Any) -> fdl.Config:
            corpus = fdl.Config(
                TextCorpus,
                files=str(DATA / f"tinyshakespeare_{split}.txt"),
                heldout_percent=heldout_percent,
                tokenizer=self.tokenizer(),
            )
            return fdl.Config(TextWindows, corpus, split, seq_len=self.block_size, **settings)

        return {
            "train": windows("train", 0, batch_size=self.batch_size, shuffle=True),
            "heldout": windows("heldout", 100, batch_size=64, shuffle=False),
        }

    def run(self):
        return run_config(self.max_iters, self.eval_interval)


@register
class Char(Gpt):
    """nanoGPT's model with 10.6M parameters. Published validation loss: 1.47."""

    batch_size = 64
    block_size = 256
    n_layer = 6
    n_head = 6
    n_embd = 384
    dropout = 0.2
    learning_rate = 1e-3
    max_iters = 5000  # lr_decay_iters has the same value.
    min_lr = 1e-4
    warmup_iters = 100

    def rate(self):
        return fdl.Config(
            optax.warmup_cosine_decay_schedule,
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_iters,
            decay_steps=self.max_iters,
            end_value=self.min_lr,
        )


@register
class CharStart(Char):
    """The first 250 steps of `Char`, for a CPU. Published validation losses: 2.06 to 2.08."""

    def run(self):
        return run_config(self.eval_interval, self.eval_interval // 5)


@register
class CharCpu(Char):
    """nanoGPT's model for a laptop. Published validation loss: 1.88."""

    batch_size = 12
    block_size = 64
    n_layer = 4
    n_head = 4
    n_embd = 128
    dropout = 0.0
    max_iters = 2000
