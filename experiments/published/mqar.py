"""Multi-query associative recall: a model reads pairs of keys and values, then recalls values.

Source: HazyResearch/zoology (Arora et al., arXiv:2312.04927), zoology/data/multiquery_ar.py,
zoology/model.py and the configs of figure 2. With attention, the accuracy is 1 at every width. With
gated convolutions (`Convolution`), it is lower unless the model is wide.

Deviations, so that a row trains in minutes on two cores:
- The vocabulary has 256 instead of 8,192 ids.
- Training ends after 1,500 of the 12,500 steps for which the learning rate decays. The source ends
  after 12,500 steps (64 epochs of 100,000 rows), or earlier when the accuracy is 0.99.
- We use only one of the source's widths, one of its lengths and one of its learning rates.
- Long convolutions have one weight per position. In the source, an MLP computes these weights.
"""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite import register
from praxis_lite.core import Learner
from praxis_lite.experiments.published import SPLITS, Published, run_config, shuffled_arrays
from praxis_lite.inputs import TokenIds
from praxis_lite.layers import (
    AttentionProjection,
    BaseLayer,
    DotProductAttention,
    Dropout,
    FeedForward,
    LayerNorm,
    SharedEmbeddingSoftmax,
    TrainablePositionalEmbedding,
    WeightInit,
)
from praxis_lite.tasks.language_model import LanguageModelTask

__all__ = ["Attention", "Convolution", "GatedConvolution", "RecallModel", "recalls"]

STD = 0.02
NORMAL = WeightInit.Gaussian(STD)


def recalls(
    split: str, num_train: int, vocab_size: int, input_seq_len: int, num_kv_pairs: int
) -> dict[str, np.ndarray]:
    """Returns rows of keys and values, followed by the keys at random positions.

    The lower half of the ids are keys, and the upper half are values. Other positions have id 0.
    Only keys in the second part have weight 1, and their labels are their values.
    """
    num_rows = num_train if split == "train" else 3000
    rng = np.random.RandomState(split == "train")
    half, context = vocab_size // 2, 2 * num_kv_pairs

    def choose(size: int, weights: np.ndarray | float = 1.0) -> np.ndarray:
        # The smallest scaled exponential variates are a weighted sample without replacement.
        variates = rng.exponential(size=(num_rows, size)) / weights
        return np.argsort(variates, axis=1)[:, :num_kv_pairs]

    keys, values = 1 + choose(half - 1), half + choose(half)
    num_positions = (input_seq_len - context) // 2
    positions = context + 2 * choose(num_positions, np.arange(1, num_positions + 1) ** -0.99)
    ids = np.zeros((num_rows, input_seq_len), np.int32)
    labels, weights = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
    ids[:, 0:context:2], ids[:, 1:context:2] = keys, values
    np.put_along_axis(ids, positions, keys, axis=1)
    np.put_along_axis(labels, positions, values, axis=1)
    np.put_along_axis(weights, positions, 1.0, axis=1)
    return {"ids": ids, "labels": labels, "weights": weights}


class GatedConvolution(BaseLayer):
    """Multiplies a causal convolution by a projection, and adds the inputs: [B, T, D] -> [B, T, D].

    It is called like an attention layer, and returns (outputs, None).

    Args:
      dims: D.
      kernel_size: Length of the filters.
    """

    def __init__(self, dims: int, kernel_size: int, *, rngs: nnx.Rngs):
        linear = {"activation": "identity", "weight_init": NORMAL}
        self.projection = FeedForward(dims, dims, **linear, rngs=rngs)
        # As in PyTorch, the weights are uniform within 1 / sqrt(kernel size).
        uniform = WeightInit.UniformSqrtDim()
        self.filters = self.weight((kernel_size, dims), init=uniform, rngs=rngs)
        self.bias = self.weight((dims,), init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> tuple[jax.Array, None]:
        # Convolves by a product with a Toeplitz matrix for each channel: [T, S, D]. On a CPU, this
        # makes a step seven times as fast as XLA's convolution does.
        lags = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
        kernel_size = self.filters.shape[0]
        is_inside = ((lags >= 0) & (lags < kernel_size))[..., None]
        matrices = jnp.where(is_inside, self.filters[...][lags.clip(0, kernel_size - 1)], 0)
        convolved = jnp.einsum("bsd,tsd->btd", x, matrices) + self.bias[...][None, None]
        return convolved * self.projection(x) + x, None


class RecallModel(BaseLayer):
    """A language model without feed-forward layers: ids [B, T] -> logits [B, T, V].

    A layer is an attention layer or a gated convolution.

    Args:
      vocab_size: V.
      d_model: Size of the residual stream.
      input_seq_len: T.
      kernel_sizes: Filter length of each gated convolution. If empty, the model has two attention
        layers and learned position embeddings.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        input_seq_len: int,
        *,
        kernel_sizes: tuple[int, ...] = (),
        rngs: nnx.Rngs,
    ):
        D, V = d_model, vocab_size
        self.softmax = SharedEmbeddingSoftmax(V, D, has_bias=False, weight_init=NORMAL, rngs=rngs)
        self.dropout = Dropout(0.1)
        if kernel_sizes:
            self.positions = None
            mixers = [GatedConvolution(D, size, rngs=rngs) for size in kernel_sizes]
        else:
            self.positions = TrainablePositionalEmbedding(
                input_seq_len, D, weight_init=NORMAL, rngs=rngs
            )
            attention = functools.partial(
                DotProductAttention,
                internal_enable_per_dim_scale=False,
                atten_dropout_prob=0.1,
                proj_tpl=functools.partial(AttentionProjection, params_init=NORMAL),
                output_init=WeightInit.Gaussian(STD / 2),  # STD / sqrt(2 * number of layers).
            )
            mixers = [attention(D, 1, rngs=rngs) for _ in range(2)]
        self.mixers = nnx.List(mixers)
        norm = functools.partial(LayerNorm, D, epsilon=1e-5, direct_scale=True)
        self.norms, self.later_norms = (nnx.List(norm(rngs=rngs) for _ in mixers) for _ in range(2))
        self.final_norm = norm(rngs=rngs)
        self.vocab_size = V

    def __call__(self, ids: jax.Array, *, key: jax.Array | None = None) -> tuple[jax.Array, None]:
        num_keys = 1 + len(self.mixers)
        keys = [None] * num_keys if key is None else jax.random.split(key, num_keys)
        x = self.softmax.emb_lookup(ids)
        if self.positions is not None:
            x = x + self.positions(seq_length=ids.shape[1])
        x = self.dropout(x, keys[0])
        layers = zip(self.norms, self.mixers, self.later_norms, keys[1:], strict=True)
        for norm, mixer, later_norm, mixer_key in layers:
            x = x + mixer(norm(x), key=mixer_key)[0]
            x = x + later_norm(x)  # The source's feed-forward layer is the identity.
        return self.softmax(self.final_norm(x)), None


@register
class Attention(Published):
    """Two attention layers with a width of 64. Published accuracy: 1."""

    num_examples = 100_000
    vocab_size = 256
    input_seq_len = 64
    num_kv_pairs = 4
    d_model = 64
    kernel_sizes: tuple[int, ...] = ()
    learning_rate = 2.15e-3
    batch_size = 512
    max_steps = 12_500
    num_train_steps = 1500

    def task(self):
        model = fdl.Partial(
            RecallModel,
            self.vocab_size,
            self.d_model,
            self.input_seq_len,
            kernel_sizes=self.kernel_sizes,
        )
        adamw = fdl.Partial(optax.adamw, weight_decay=0.1)
        rate = fdl.Config(optax.cosine_decay_schedule, self.learning_rate, self.max_steps)
        return fdl.Config(
            LanguageModelTask,
            model=model,
            learner=fdl.Config(Learner, adamw, learning_rate=rate),
            inputs_split_mapping=SPLITS,
            tokenizer=fdl.Config(TokenIds),
        )

    def datasets(self):
        sizes = (self.num_examples, self.vocab_size, self.input_seq_len, self.num_kv_pairs)
        return shuffled_arrays(recalls, *sizes, batch_size=self.batch_size, eval_batch_size=250)

    def run(self):
        return run_config(self.num_train_steps, 250)


@register
class Convolution(Attention):
    """Two gated convolutions with a width of 64. Published accuracy: below 1."""

    kernel_sizes = (3, 64)
