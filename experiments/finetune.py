"""Language models that start from another job's checkpoint and train on other text."""

import sysconfig

import fiddle as fdl
import optax

from praxis_lite import LOAD_ALL, CheckpointLoadingRules, register
from praxis_lite.core import AuxiliaryOptimizer
from praxis_lite.experiments import lm
from praxis_lite.inputs import TextCorpus
from praxis_lite.layers import adapted

__all__ = ["LORA", "PyDocsFull", "PyDocsLora"]

# The paths of the weights that LoRA adds to a model.
LORA = r".*/lora_[abm]$"


def code():
    """Returns the config of a corpus that comes with Python: the source of asyncio."""
    files = f"{sysconfig.get_path('stdlib')}/asyncio/*.py"
    return fdl.Config(TextCorpus, files=files, heldout_percent=20)


def from_pydocs(run, **rules):
    """Returns a run's config, shorter, that starts with all weights of a job of lm.PyDocs."""
    run.init_from_checkpoint_rules = {
        "pretrained": fdl.Config(
            CheckpointLoadingRules, load_rules=(LOAD_ALL,), directory="/tmp/docs",
            experiment="lm.PyDocs", **rules,
        )
    }
    run.num_train_steps = run.checkpoints.every_steps = 120
    run.evaluation.every_steps = 60
    return run


@register
class PyDocsLora(lm.PyDocs):
    """lm.PyDocs learns Python code by a LoRA of rank 5 on its attention; all else is frozen.

    Starts from the job of lm.PyDocs in /tmp/docs, or that of
    --set run.init_from_checkpoint_rules.pretrained.directory=DIR.
    """

    corpus = code()

    def task(self):
        task = super().task()
        block = task.model.transformer_layer_tpl
        block.tr_atten_tpl = fdl.Partial(adapted, base_tpl=block.tr_atten_tpl, rank=5)
        task.learner.bprop_variable_inclusion = LORA
        task.learner.learning_rate.decay_steps = 120
        return task

    def run(self):
        return from_pydocs(super().run(), ignore_rules=(LORA,))


@register
class PyDocsFull(lm.PyDocs):
    """lm.PyDocs learns Python code with all its weights, its embedding at a tenth of the rate.

    Starts from the job of lm.PyDocs in /tmp/docs, or that of
    --set run.init_from_checkpoint_rules.pretrained.directory=DIR.
    """

    corpus = code()

    def task(self):
        task = super().task()
        rate = task.learner.learning_rate
        rate.peak_value, rate.end_value, rate.decay_steps = 1e-3, 1e-5, 120
        task.learner.auxiliary_optimizers = (
            fdl.Config(
                AuxiliaryOptimizer, regex="softmax/.*", name="embedding",
                optimizer=fdl.Partial(optax.adamw, b2=0.98),
                learning_rate=fdl.copy_with(rate, peak_value=1e-4, end_value=1e-6),
            ),
        )
        return task

    def run(self):
        return from_pydocs(super().run())
