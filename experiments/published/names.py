"""Character-level models of first names, as in makemore.

Sources: karpathy/makemore, makemore.py and README.md (`Transformer`: about 1.92), and the notebook
makemore_part5_cnn1.ipynb of the lectures (`Mlp`: 2.105, `WaveNet`: 1.993).

Deviations of `Mlp` and `WaveNet`:
- Examples are shuffled every epoch. The source draws them with replacement.
- Batch norms normalize by the biased variance.

Deviations of `Transformer`:
- Names are shuffled every epoch. The source draws them with replacement.
- The test loss is that of all 1,000 test names. The source evaluates 11 batches of 100 names.
- Training ends after 30,000 steps. The source trains until it is stopped.
"""

import random

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite import register
from praxis_lite.core import Learner
from praxis_lite.experiments.published import DATA, SPLITS, Published, run_config, shuffled_arrays
from praxis_lite.experiments.published.char import Gpt
from praxis_lite.inputs import TokenIds
from praxis_lite.layers import BaseLayer, BatchNorm, Embedding, FeedForward, Linear, WeightInit
from praxis_lite.optimizers import schedules
from praxis_lite.tasks.image_classification import ClassificationTask

__all__ = ["Mlp", "Transformer", "WaveNet", "contexts", "rows"]

VOCAB_SIZE = 27  # The letters, and 0 for the start and the end of a name.


def names() -> list[np.ndarray]:
    """Returns all names. Each is an int32 array of letters from 1 to 26."""
    words = (DATA / "names.txt").read_text(encoding="utf-8").split()
    return [np.frombuffer(word.encode(), np.uint8).astype(np.int32) - 96 for word in words]


def contexts(split: str, block_size: int) -> dict[str, np.ndarray]:
    """Returns letters [n] as labels, and the `block_size` letters before each as inputs.

    As in the lectures, 80% of the names are for training, and the next 10% are held out.
    """
    words = names()
    random.Random(42).shuffle(words)
    train_end, heldout_end = int(0.8 * len(words)), int(0.9 * len(words))
    words = words[:train_end] if split == "train" else words[train_end:heldout_end]
    padding = np.zeros(block_size, np.int32)
    letters = np.concatenate([*(part for word in words for part in (padding, word)), padding])
    windows = np.lib.stride_tricks.sliding_window_view(letters, block_size + 1)
    # A label is a letter, or the 0 that ends a name.
    windows = windows[(windows[:, -1] != 0) | (windows[:, -2] != 0)]
    return {"inputs": windows[:, :-1], "labels": windows[:, -1]}


def rows(split: str) -> dict[str, np.ndarray]:
    """Returns ids, labels and weights [n, 16], with one name per row and weight 0 after its end.

    The 1,000 held-out names are those that the source selects, with `torch.randperm` and its
    default seed. They are easy: a trigram model's loss is 0.03 lower than on ten other random sets.
    """
    heldout = set(np.loadtxt(DATA / "names_test_lines.txt", int).tolist())
    is_train = split == "train"
    words = [word for line, word in enumerate(names(), 1) if (line not in heldout) == is_train]
    ids = np.zeros((len(words), 17), np.int32)
    for row, word in zip(ids, words, strict=True):
        row[1 : 1 + len(word)] = word
    lengths = np.array([len(word) for word in words])
    weights = (np.arange(16) <= lengths[:, None]).astype(np.float32)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights}


class Hierarchy(BaseLayer):
    """Merges `fan` neighbors per level until one vector is left: ids [B, T] -> logits [B, 27].

    With a single level, this is the lectures' MLP. With `fan=2`, it is their WaveNet.

    Args:
      n_embd: Size of a letter's embedding.
      n_hidden: Size of the hidden vectors.
      fan: Number of neighbors that a level merges.
      num_levels: Number of levels; T is fan ** num_levels.
    """

    has_types = False  # JAX cannot infer the type of the reshape over Explicit axes.

    def __init__(self, n_embd: int, n_hidden: int, *, fan: int, num_levels: int, rngs: nnx.Rngs):
        fan_in = WeightInit.GaussianSqrtFanIn()
        self.embedding = Embedding(VOCAB_SIZE, n_embd, weight_init=WeightInit.Gaussian(), rngs=rngs)
        sizes = [n_embd, *[n_hidden] * (num_levels - 1)]
        self.linears = nnx.List(
            Linear(fan * size, n_hidden, weight_init=fan_in, rngs=rngs) for size in sizes
        )
        self.norms = nnx.List(
            BatchNorm(n_hidden, decay=0.9, epsilon=1e-5, rngs=rngs) for _ in sizes
        )
        # As in the lectures, the initial logits are small.
        last = WeightInit.GaussianSqrtFanIn(0.1)
        self.logits = FeedForward(
            n_hidden, VOCAB_SIZE, activation="identity", weight_init=last, rngs=rngs
        )
        self.fan = fan

    def __call__(self, ids: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        x = self.embedding(ids)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = x.reshape(x.shape[0], x.shape[1] // self.fan, -1)
            x = jnp.tanh(norm(linear(x), key=key))
        return self.logits(x[:, 0])


@register
class Mlp(Published):
    """The lectures' MLP with 12k parameters. Published validation loss: 2.105."""

    n_embd, n_hidden, fan, num_levels = 10, 200, 3, 1
    max_steps = 200_000
    batch_size = 32

    def task(self):
        model = fdl.Partial(
            Hierarchy, self.n_embd, self.n_hidden, fan=self.fan, num_levels=self.num_levels
        )
        rate = fdl.Config(schedules.piecewise_constant, boundaries=[150_000], values=[0.1, 0.01])
        return fdl.Config(
            ClassificationTask,
            model=model,
            learner=fdl.Config(Learner, fdl.Partial(optax.sgd), learning_rate=rate),
            inputs_split_mapping=SPLITS,
        )

    def datasets(self):
        sizes = {"batch_size": self.batch_size, "eval_batch_size": 1024}
        return shuffled_arrays(contexts, self.fan**self.num_levels, **sizes)

    def run(self):
        return run_config(self.max_steps, 10_000)


@register
class WaveNet(Mlp):
    """The lectures' hierarchical model with 77k parameters. Published validation loss: 1.993."""

    n_embd, n_hidden, fan, num_levels = 24, 128, 2, 3


@register
class Transformer(Gpt):
    """makemore's transformer with 200k parameters. Published test loss: about 1.92."""

    eval_interval = 500
    vocab_size = VOCAB_SIZE
    batch_size = 32
    block_size = 16
    n_layer, n_head, n_embd = 4, 4, 64
    bias, tied = True, False
    activation, scaled_init = "gelu", False
    learning_rate = 5e-4
    weight_decay, decays_vectors = 0.01, True
    grad_clip = 0.0
    max_iters = 30_000

    def tokenizer(self):
        return fdl.Config(TokenIds)

    def datasets(self):
        return shuffled_arrays(rows, batch_size=self.batch_size, eval_batch_size=250)
