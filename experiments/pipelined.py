"""Pipeline-parallel language models, whose layers are split into stages along a mesh axis."""

import fiddle as fdl

from praxis_lite import EvaluationSettings, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.core import Partitioner
from praxis_lite.experiments import lm
from praxis_lite.layers import (
    SHARDING_PRESETS,
    OneForwardOneBackward,
    Pipeline,
    set_sharding_params,
)

__all__ = ["PyDocs", "SplitBackward", "Synthetic", "ZeroBubble"]

# The embedding and the softmax are outside the pipeline. There, the batch is sharded over stages.
BATCH, BATCH_OF_STAGE = ("stage", "data"), ("data",)


def pipelined(task, **settings):
    """Replaces the layer stack in a task's model with a Pipeline, for `PyDocs.mesh`."""
    model = task.model
    model.stacked_transformer_tpl = fdl.Partial(Pipeline, num_stages=2, **settings)
    # Replicate weights along "data", because otherwise they would be gathered again in every tick
    # of the pipeline.
    set_sharding_params(model, {**SHARDING_PRESETS["megatron"], "batch": BATCH_OF_STAGE})
    model.softmax_tpl.activation_split_dims_mapping = (BATCH, None, "mdl")
    model.softmax_tpl.lookup_split_dims_mapping = (BATCH, None, None)
    task.inputs_split_mapping = {"map_1d": (BATCH,), "map_2d": (BATCH, None)}
    return task


@register
class PyDocs(lm.PyDocs):
    """lm.PyDocs as a circular pipeline: each microbatch passes through the two stages twice.

    With four microbatches, 1/9 of the ticks are idle. The 97 model dims and 3 heads are split over
    two devices, and each device has one row of a microbatch. Decoding also uses the pipeline.
    """

    def mesh(self):
        axis_names = ("stage", "data", "mdl")
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 2, 2), axis_names=axis_names)

    def task(self):
        task = super().task()
        task.learner.learning_rate.decay_end = 240
        return pipelined(task, num_microbatches=4, circular_repeat=2)

    def datasets(self):
        datasets = super().datasets()
        datasets["heldout"].batch_size = 48  # Divisible by the number of microbatches.
        return datasets

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=240,
            checkpoints=fdl.Config(SaveSettings, every_steps=240),
            evaluation=fdl.Config(EvaluationSettings, every_steps=240),
        )


@register
class Synthetic(lm.Synthetic):
    """lm.Synthetic on two pipeline stages (GPipe schedule); trains in seconds."""

    mesh = PyDocs.mesh

    def task(self):
        return pipelined(super().task(), num_microbatches=4)


@register
class SplitBackward(Synthetic):
    """Synthetic with a split backward pass, so that weight gradients have no pipeline bubbles."""

    def task(self):
        task = super().task()
        task.model.stacked_transformer_tpl.split_backward = True
        return task


@register
class ZeroBubble(Synthetic):
    """Synthetic with interleaved 1F1B, a split backward pass and uneven microbatches.

    16 rows in three microbatches pass through two stages twice. The model has 6 layers.
    """

    def task(self):
        task = super().task()
        task.model.num_layers = 6
        task.model.stacked_transformer_tpl = fdl.copy_with(
            task.model.stacked_transformer_tpl,
            num_microbatches=3,
            circular_repeat=2,
            split_backward=True,
        )
        return task

    def partitioner(self):
        return fdl.Partial(Partitioner, gradients=fdl.Config(OneForwardOneBackward))
