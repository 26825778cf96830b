"""Language models with a mixture of experts, on a separate mesh axis, in every second layer."""

import fiddle as fdl

from praxis_lite import EvaluationSettings, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.experiments import lm
from praxis_lite.layers import SHARDING_PRESETS, TransformerFeedForwardMoe, set_sharding_params

__all__ = ["PyDocs", "Synthetic"]

# Tokens are split over the experts' axis too: an all-to-all takes them to the experts and back.
BATCH = SHARDING_PRESETS["expert"]["batch"]


def with_experts(task, **settings):
    """Returns a language model's task config with experts in every second layer, for `PyDocs.mesh`.

    The losses' weights are ST-MoE's (arXiv:2202.08906).
    """
    model = task.model
    dense = model.transformer_layer_tpl
    experts = fdl.Partial(
        TransformerFeedForwardMoe,
        moe_load_balance_loss_weight=1e-2, moe_router_z_loss_weight=1e-3,
        **settings,
    )
    mixture = fdl.copy_with(dense, tr_fflayer_tpl=experts)
    model.transformer_layer_tpl = [dense, mixture]
    set_sharding_params(model, "expert")
    task.inputs_split_mapping = {"map_1d": (BATCH,), "map_2d": (BATCH, None)}
    return task


@register
class PyDocs(lm.PyDocs):
    """lm.PyDocs with five experts, of which each byte goes to two, in every second layer.

    Three experts are on one half of the devices and two on the other; 145 model and 435 hidden dims
    divide nothing either.
    """

    def mesh(self):
        axis_names = ("data", "expert", "mdl")
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 2, 2), axis_names=axis_names)

    def task(self):
        task = super().task()
        task.learner.learning_rate.decay_steps = 200
        return with_experts(task, num_experts=5)

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=200,
            checkpoints=fdl.Config(SaveSettings, every_steps=200),
            evaluation=fdl.Config(EvaluationSettings, every_steps=200),
        )


@register
class Synthetic(lm.Synthetic):
    """lm.Synthetic with experts without a capacity: starts fast, learns in seconds."""

    mesh = PyDocs.mesh

    def task(self):
        return with_experts(super().task(), num_experts=4, dropless=True)
