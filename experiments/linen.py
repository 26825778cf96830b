"""Plain Flax Linen models: a ViT without sharding annotations, and an LM with logical axes."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax

from praxis_lite import MeshConfig, register
from praxis_lite.core import Learner, WeightSharding
from praxis_lite.experiments.linen_models import CausalLm, VisionTransformer
from praxis_lite.experiments.lm import BATCH_OVER_DATA
from praxis_lite.experiments.lm import PyDocs as LayersPyDocs
from praxis_lite.experiments.vision import BATCH, Digits
from praxis_lite.models import LinenModel
from praxis_lite.tasks.image_classification import ClassificationTask
from praxis_lite.tasks.loss import LossTask

__all__ = ["DigitsViT", "PyDocs", "continued", "next_token_loss"]


@register
class DigitsViT(Digits):
    """Classifies digits with a plain Linen ViT; a rule shards all weights over the data axis."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self):
        model = fdl.Config(LinenModel, fdl.Config(VisionTransformer), {"images": (1, 8, 8, 1)})
        return fdl.Config(
            ClassificationTask,
            model,
            self.learner(),
            weight_sharding=fdl.Config(WeightSharding, strategy=((".*", 'fsdp("data", 0)'),)),
            inputs_split_mapping={"map_1d": (BATCH,), "map_4d": (BATCH,)},
        )


def next_token_loss(model, inputs, key):
    """Returns the cross-entropy in nats per token [B, T], and metrics per token."""
    logits, labels = model(inputs["ids"]).astype(jnp.float32), inputs["labels"]
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    return xent, {"bits_per_byte": xent / jnp.log(2.0), "accuracy": correct}


def continued(model, inputs, key, *, num_tokens):
    """Continues prompts [B, T] greedily, with a full forward pass per token (no KV cache)."""
    ids, lengths = inputs["ids"], inputs["prefix_lengths"]
    ids = jnp.pad(ids, ((0, 0), (0, num_tokens)))

    def add_one(n, ids):
        rows, last = jnp.arange(len(ids)), lengths - 1 + n
        token = jnp.argmax(model(ids)[rows, last], axis=-1)
        return ids.at[rows, last + 1].set(token)

    return {"ids": jax.lax.fori_loop(0, num_tokens, add_one, ids)}


@register
class PyDocs(LayersPyDocs):
    """Trains a plain Linen LM on Python's language reference, with rules for its logical axes."""

    def task(self):
        model = fdl.Config(LinenModel, fdl.Config(CausalLm), {"ids": ("int32", (1, 128))})
        rules = (
            ("batch", ("replica", "data")),
            ("embed", "data"),
            ("heads", "mdl"),
            ("mlp", "mdl"),
            ("vocab", "mdl"),
            ("layers", None),
            ("kv", None),
        )
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw, b2=0.98, weight_decay=0.1),
            learning_rate=fdl.Config(optax.warmup_cosine_decay_schedule, 0.0, 4e-3, 40, 800),
            clip_gradient_norm_to_value=1.0,
        )
        return fdl.Config(
            LossTask,
            model,
            next_token_loss,
            learner,
            predict=fdl.Partial(continued, num_tokens=100),
            weight_sharding=fdl.Config(WeightSharding, logical_axis_rules=rules),
            inputs_split_mapping=BATCH_OVER_DATA,
            required_inputs=("ids", "labels", "weights"),
        )
