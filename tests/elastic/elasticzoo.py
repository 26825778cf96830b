"""A tiny job for elastic tests, with all features that a regrouping must preserve.

It trains on a mixture of two packed sources, with uneven sizes, dropout, a moving average of the
weights, microbatches, and evaluations of the averages. Like a user's module, it is not part of a
package (`--packages=elasticzoo`).
"""

import time
from collections.abc import Iterator

import fiddle as fdl
import numpy as np
import optax

from praxis_lite import (
    EvaluationSettings,
    Experiment,
    Hook,
    MeshConfig,
    RunConfig,
    SaveSettings,
    register,
)
from praxis_lite.core import Learner
from praxis_lite.inputs import Documents, JsonLines, Mixture, PackedText
from praxis_lite.layers import TransformerFeedForward, rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask

BATCH = ("replica", "data")


def sums(folder: str, name: str | None = None) -> Iterator[dict[str, str]]:
    """Yields texts of additions, of uneven lengths."""
    rng = np.random.default_rng(5)
    for number in range(211):
        terms = rng.integers(0, 100, size=(int(rng.integers(1, 5)), 2)).tolist()
        yield {"text": " ".join(f"{number}: {a} + {b} = {a + b}." for a, b in terms)}


def words(folder: str, name: str | None = None) -> Iterator[dict[str, str]]:
    """Yields texts of syllables, of uneven lengths."""
    rng = np.random.default_rng(7)
    for _ in range(307):
        picked = rng.integers(0, 13, size=int(rng.integers(2, 17))).tolist()
        yield {"text": " ".join("bdfghklmnprst"[k] + "aeiou"[k % 5] for k in picked)}


class Pause(Hook):
    """Slows down each step, so that events occur in all phases."""

    waits = False

    def __init__(self, seconds: float):
        self._seconds = seconds

    def after_step(self, made) -> None:
        """Sleeps while the devices run the step."""
        time.sleep(self._seconds)


@register
class Mixed(Experiment):
    """A byte LM on sums and words, on any number of devices."""

    NUM_DEVICES = 8

    def mesh(self):
        return self.mesh_for(self.NUM_DEVICES)

    def mesh_for(self, num_devices):
        """Returns a mesh with an "mdl" axis of size 2 if the number is even, else of size 1."""
        shape = (1, num_devices, 1) if num_devices % 2 else (1, num_devices // 2, 2)
        return fdl.Config(MeshConfig, ici_mesh_shape=shape)

    def task(self):
        lm = rotary_lm(
            vocab_size=257,
            model_dims=13,
            hidden_dims=29,
            num_heads=3,
            dim_per_head=4,
            num_layers=2,
            residual_dropout_prob=0.1,
            # Smooth: at the kink of a ReLU, rounding could change the loss by 1e-5.
            tr_fflayer_tpl=fdl.Partial(TransformerFeedForward, activation="silu"),
        )
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adam, eps=1e-4),
            learning_rate=1e-3,
            clip_gradient_norm_to_value=1.0,
            ema_decay=0.98,
            gradient_accumulation_steps=2,
        )
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(lm),
            learner=learner,
            inputs_split_mapping={"map_1d": (BATCH,), "map_2d": (BATCH, None)},
        )

    def datasets(self):
        folder = "~/.cache/elasticzoo"
        documents = {
            name: fdl.Config(
                Documents,
                fdl.Config(JsonLines, f"{folder}/{name}.jsonl", make=make),
                heldout_percent=10,
            )
            for name, make in {"sums": sums, "words": words}.items()
        }
        rows = {
            split: {
                name: fdl.Config(
                    PackedText, item, split, batch_size=22, seq_len=43, shuffle=split == "train"
                )
                for name, item in documents.items()
            }
            for split in ("train", "heldout")
        }
        train = fdl.Config(
            Mixture,
            rows["train"],
            weights={"sums": 0.6, "words": 0.4},
            batch_size=22,
            unit="tokens",
        )
        return {"train": train, "heldout": rows["heldout"]["sums"]}

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=200,
            peer_save_every_steps=5,
            checkpoints=fdl.Config(SaveSettings, every_steps=20, max_to_keep=2),
            evaluation=fdl.Config(EvaluationSettings, every_steps=25, use_ema_states=True),
        )

    def hooks(self):
        return [fdl.Config(Pause, 0.0)]
