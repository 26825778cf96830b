"""The experiment of the job that is stored for each release: a tiny model with many features.

Each release has a copy of this file, which is never changed, because users' experiments are not
changed either.
"""

import fiddle as fdl
import jax.numpy as jnp
import optax

from praxis_lite import EvaluationSettings, Experiment, MeshConfig, RunConfig, SaveSettings
from praxis_lite.core import Learner
from praxis_lite.decode import Sample
from praxis_lite.inputs import TextCorpus, TextPrompts
from praxis_lite.inputs.numpy_data import TextWindows
from praxis_lite.layers import Repeat, TransformerFeedForward, rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask


class TinyJob(Experiment):
    """Trains a language model on bytes; the mesh divides none of its sizes."""

    corpus = fdl.Config(TextCorpus, files="*.txt", heldout_percent=20)

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 2))

    def task(self):
        lm = rotary_lm(
            vocab_size=257,
            model_dims=5,
            hidden_dims=7,
            num_heads=3,
            dim_per_head=2,
            num_layers=2,
            attention={"num_kv_heads": 1},
            tr_fflayer_tpl=fdl.Partial(
                TransformerFeedForward, activation="silu", use_gated_activation=True
            ),
            stacked_transformer_tpl=fdl.Partial(Repeat, checkpoint_policy="save_everything"),
        )
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw, weight_decay=0.1, mu_dtype=jnp.bfloat16),
            learning_rate=fdl.Config(optax.cosine_decay_schedule, 0.02, decay_steps=10),
            clip_gradient_norm_to_value=1.0,
            ema_decay=0.9,
        )
        rows = ("replica", "data")
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(lm),
            learner=learner,
            inputs_split_mapping={"map_1d": (rows,), "map_2d": (rows, None)},
            tokenizer=self.corpus.tokenizer,
            decoder=fdl.Config(Sample, max_decode_steps=7, temperature=0.0),
        )

    def datasets(self):
        def windows(split, batch_size, shuffle):
            return fdl.Config(
                TextWindows,
                self.corpus,
                split=split,
                seq_len=13,
                batch_size=batch_size,
                shuffle=shuffle,
            )

        return {"train": windows("train", 5, True), "heldout": windows("heldout", 7, False)}

    def decode_datasets(self):
        prompts = fdl.Config(
            TextPrompts,
            self.corpus,
            "heldout",
            batch_size=1,
            num_prompts=1,
            min_prompt_bytes=5,
            max_prompt_bytes=11,
        )
        return {"heldout": prompts}

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=2,
            checkpoints=fdl.Config(SaveSettings, every_steps=2),
            evaluation=fdl.Config(EvaluationSettings, every_steps=2),
        )
