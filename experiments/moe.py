"""Language models with experts in every second layer, sharded over an expert mesh axis."""

import fiddle as fdl

from praxis_lite import EvaluationSettings, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.experiments import lm
from praxis_lite.layers import SHARDING_PRESETS, TransformerFeedForwardMoe, set_sharding_params

__all__ = ["PyDocs", "Synthetic"]

# Tokens are also sharded over the expert axis. All-to-alls send the tokens to their experts and
# back.
BATCH = SHARDING_PRESETS["expert"]["batch"]


def with_experts(task, **settings):
    """Replaces every second feed-forward layer in a task's model with experts, for `PyDocs.mesh`.

    The weights of the auxiliary losses are the same as in ST-MoE (arXiv:2202.08906).
    """
    model = task.model
    dense = model.transformer_layer_tpl
    experts = fdl.Partial(
        TransformerFeedForwardMoe,
        moe_load_balance_loss_weight=1e-2,
        moe_router_z_loss_weight=1e-3,
        **settings,
    )
    mixture = fdl.copy_with(dense, tr_fflayer_tpl=experts)
    model.transformer_layer_tpl = [dense, mixture]
    set_sharding_params(model, "expert")
    task.inputs_split_mapping = {"map_1d": (BATCH,), "map_2d": (BATCH, None)}
    return task


@register
class PyDocs(lm.PyDocs):
    """lm.PyDocs with five experts in every second layer, and top-2 routing.

    The five experts, the 97 model dims and the 389 hidden dims are sharded unevenly over the
    expert axis of size 2: half of the devices store three experts each, and the other half store
    two.
    """

    def mesh(self):
        axis_names = ("data", "expert", "mdl")
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 2, 2), axis_names=axis_names)

    def task(self):
        task = super().task()
        task.learner.learning_rate.decay_end = 200
        return with_experts(task, num_experts=5)

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=200,
            checkpoints=fdl.Config(SaveSettings, every_steps=200),
            evaluation=fdl.Config(EvaluationSettings, every_steps=200),
        )


@register
class Synthetic(lm.Synthetic):
    """lm.Synthetic with dropless experts in every second layer; trains in seconds."""

    mesh = PyDocs.mesh

    def task(self):
        return with_experts(super().task(), num_experts=4, dropless=True)
