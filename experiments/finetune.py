"""Fine-tuning: language models that start from another job's checkpoint, with new text."""

import sysconfig

import fiddle as fdl
import optax

from praxis_lite import LOAD_ALL, CheckpointLoadingRules, register
from praxis_lite.core import AuxiliaryOptimizer
from praxis_lite.experiments import lm
from praxis_lite.inputs import TextCorpus
from praxis_lite.layers import adapted

__all__ = ["LORA", "PyDocsFull", "PyDocsLora"]

# Matches the paths of the weights that LoRA adds to a model.
LORA = r".*/lora_[abm]$"


def code():
    """Returns the config of a corpus that comes with Python: the source code of asyncio."""
    files = f"{sysconfig.get_path('stdlib')}/asyncio/*.py"
    return fdl.Config(TextCorpus, files=files, heldout_percent=20)


def from_pydocs(run, **rules):
    """Changes a RunConfig to train for 120 steps, starting from the weights of lm.PyDocs."""
    run.init_from_checkpoint_rules = {
        "pretrained": fdl.Config(
            CheckpointLoadingRules,
            load_rules=(LOAD_ALL,),
            directory="/tmp/docs",
            experiment="lm.PyDocs",
            **rules,
        )
    }
    run.num_train_steps = run.checkpoints.every_steps = 120
    run.evaluation.every_steps = 60
    return run


@register
class PyDocsLora(lm.PyDocs):
    """Fine-tunes lm.PyDocs on Python code, with rank-5 LoRA adapters on its attention layers.

    Starts from the lm.PyDocs job in /tmp/docs. To start from a different job, use
    --set run.init_from_checkpoint_rules.pretrained.directory=DIR.
    """

    corpus = code()

    def task(self):
        task = super().task()
        block = task.model.transformer_layer_tpl
        block.tr_atten_tpl = fdl.Partial(adapted, base_tpl=block.tr_atten_tpl, rank=5)
        task.learner.bprop_variable_inclusion = LORA
        rate = task.learner.learning_rate
        rate.max, rate.decay_end = 4e-3, 120
        return task

    def run(self):
        return from_pydocs(super().run(), ignore_rules=(LORA,))


@register
class PyDocsFull(lm.PyDocs):
    """Fine-tunes lm.PyDocs on Python code, with a lower learning rate for the embedding.

    Starts from the lm.PyDocs job in /tmp/docs. To start from a different job, use
    --set run.init_from_checkpoint_rules.pretrained.directory=DIR.
    """

    corpus = code()

    def task(self):
        task = super().task()
        rate = task.learner.learning_rate
        rate.max, rate.decay_end = 1e-3, 120
        task.learner.auxiliary_optimizers = (
            fdl.Config(
                AuxiliaryOptimizer,
                regex="softmax/.*",
                name="embedding",
                optimizer=fdl.Partial(optax.adamw, b2=0.98),
                learning_rate=fdl.copy_with(rate, max=1e-4),
            ),
        )
        return task

    def run(self):
        return from_pydocs(super().run())
