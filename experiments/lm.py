"""Decoder-only language models on text and on synthetic tokens."""

import functools

import fiddle as fdl
import optax.contrib

from praxis_lite import (
    EvaluationSettings,
    Experiment,
    MeshConfig,
    RunConfig,
    SaveSettings,
    register,
)
from praxis_lite.core import Learner
from praxis_lite.decode import Sample
from praxis_lite.inputs import SyntheticLm, TextCorpus, TextPrompts, TokenIds, tf_data
from praxis_lite.inputs.tokenizers import as_tokenizer
from praxis_lite.layers import (
    Embedding,
    FullSoftmax,
    Repeat,
    RmsNorm,
    TransformerFeedForward,
    WeightInit,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.optimizers import muon_matrices
from praxis_lite.optimizers.schedules import linear_rampup_polynomial_decay
from praxis_lite.tasks.language_model import LanguageModelTask

__all__ = ["BATCH_OVER_DATA", "Llama", "PyDocs", "Synthetic"]

# Rows are sharded over the data axes; all other dims are replicated.
BATCH_OVER_DATA = {
    "map_1d": (("replica", "data"),),
    "map_2d": (("replica", "data"), None),
}


@register
class PyDocs(Experiment):
    """Trains a byte-level LM on Python's language reference, with sizes that require padding.

    No size is divisible by the number of devices that it is split over: the vocabulary (257), the
    hidden dims (389) and the 3 heads are split over two devices (model parallelism), the model dims
    (97) over four devices (data parallelism), and evaluation batches of 47 windows over all eight
    devices. The last batch contains fewer windows than there are devices.

    Muon updates the matrices, and AdamW the other weights.

    To train on different text, use --set datasets.train.corpus.files=GLOB. Held-out text and
    prompts come from the same files. For tokens other than bytes, use --set
    corpus.tokenizer=DIRECTORY with the directory of a transformers tokenizer.
    """

    corpus = fdl.Config(TextCorpus)

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    @property
    def text(self):
        """Config of the corpus, whose tokenizer the task also uses."""
        return self.corpus

    @property
    def vocab_size(self):
        return as_tokenizer(self.text.tokenizer).vocab_size

    def task(self):
        lm = rotary_lm(
            vocab_size=self.vocab_size,
            model_dims=97,
            hidden_dims=389,
            num_heads=3,
            dim_per_head=32,
            num_layers=4,
            # Norms of queries and keys permit a higher learning rate.
            attention={"ln_tpl": RmsNorm, "ln_before_rotary": True},
            # All activations fit in memory, and saving them is a quarter faster than remat.
            stacked_transformer_tpl=fdl.Partial(Repeat, checkpoint_policy="save_everything"),
        )
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(
                optax.contrib.muon,
                consistent_rms=0.2,
                weight_decay=0.1,
                adam_b2=0.98,
                muon_weight_dimension_numbers=fdl.Config(muon_matrices),
            ),
            learning_rate=fdl.Config(
                linear_rampup_polynomial_decay,
                warmup_steps=40,
                decay_start=40,
                decay_end=800,
                max=2e-2,
                min_ratio=0.0,
            ),
            clip_gradient_norm_to_value=1.0,
            # Two of the eight devices compute the update of each of the four layers.
            stacked_slot_mesh_axes=("data",),
        )
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(lm),
            learner=learner,
            inputs_split_mapping=BATCH_OVER_DATA,
            tokenizer=self.text.tokenizer,
            decoder=fdl.Config(Sample, max_decode_steps=160, k=0, p=0.9, temperature=0.5),
        )

    def datasets(self):
        windows = functools.partial(fdl.Config, tf_data.TextWindows, self.text, seq_len=128)
        return {
            "train": windows(split="train", batch_size=8, shuffle=True),
            "heldout": windows(split="heldout", batch_size=47, stride=64, shuffle=False),
        }

    def decode_datasets(self):
        return {
            "heldout": fdl.Config(
                TextPrompts,
                self.text,
                "heldout",
                batch_size=5,
                num_prompts=5,
                min_prompt_bytes=40,
                max_prompt_bytes=90,
            )
        }

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=800,
            checkpoints=fdl.Config(SaveSettings, every_steps=400),
            evaluation=fdl.Config(EvaluationSettings, every_steps=400),
        )


@register
class Llama(PyDocs):
    """Trains a small Llama: gated SiLU, grouped-query attention, untied embedding and softmax.

    It has four layers. The hidden dims (320), the 6 query heads and the 2 key/value heads are split
    over two devices (model parallelism).
    """

    def task(self):
        lm = rotary_lm(
            vocab_size=self.vocab_size,
            model_dims=120,
            hidden_dims=320,
            num_heads=6,
            dim_per_head=20,
            num_layers=4,
            attention={"num_kv_heads": 2},
            tr_fflayer_tpl=fdl.Partial(
                TransformerFeedForward,
                activation="silu",
                use_gated_activation=True,
                has_bias=False,
            ),
            softmax_tpl=fdl.Partial(FullSoftmax, has_bias=False),
            separate_embedding_tpl=fdl.Partial(
                Embedding,
                scale_sqrt_depth=True,
                weight_init=fdl.Config(WeightInit.Gaussian, scale=120**-0.5),
            ),
            stacked_transformer_tpl=fdl.Partial(Repeat, checkpoint_policy="save_everything"),
        )
        task = super().task()
        task.model = set_sharding_params(lm)
        task.learner.learning_rate.decay_end = 240
        return task

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=240,
            checkpoints=fdl.Config(SaveSettings, every_steps=240),
            evaluation=fdl.Config(EvaluationSettings, every_steps=120),
        )


@register
class Synthetic(Experiment):
    """Trains two layers on synthetic tokens in seconds; requires neither text nor tensorflow."""

    mesh = PyDocs.mesh

    def task(self):
        lm = rotary_lm(vocab_size=61, model_dims=32, hidden_dims=64, num_heads=4, num_layers=2)
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw),
            learning_rate=1e-2,
            clip_gradient_norm_to_value=1.0,
        )
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(lm),
            learner=learner,
            inputs_split_mapping=BATCH_OVER_DATA,
            tokenizer=fdl.Config(TokenIds),
        )

    def datasets(self):
        train = fdl.Config(SyntheticLm, vocab_size=61, batch_size=16, seq_len=32)
        return {"train": train, "heldout": fdl.copy_with(train, seed=1, num_batches=3)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=100)
