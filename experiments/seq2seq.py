"""An encoder-decoder that learns to reverse words."""

from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax

from praxis_lite import EvaluationSettings, Experiment, MeshConfig, RunConfig, register
from praxis_lite.core import Learner
from praxis_lite.decode import BeamSearch
from praxis_lite.inputs import IndexedPipeline, random_bits
from praxis_lite.layers import (
    DotProductAttention,
    Transformer,
    TransformerEncoderDecoder,
    set_sharding_params,
)
from praxis_lite.tasks.sequence_to_sequence import SequenceToSequenceTask

__all__ = ["Reverse", "ReversedWords"]

PADDING, END, FIRST_LETTER = 0, 1, 2


class ReversedWords(IndexedPipeline):
    """Random words as sources, and the reversed words as targets.

    Labels end with END; the ids of a target start with END.

    Args:
      num_letters: Number of letters. The vocabulary also contains a padding token and an end token.
      max_letters: Length of the longest words. The shortest words are half as long.
      batch_size: Number of words per batch.
      seed: Seed for generating words.
      num_batches: Number of batches in a single pass, or None for endless training batches.
      for_decoding: Whether to return prompts for decoding, in which `ids` are the beginnings of the
        targets, with `prefix_lengths` and one weight per row.
    """

    def __init__(
        self,
        num_letters: int,
        max_letters: int,
        batch_size: int,
        seed: int = 0,
        num_batches: int | None = None,
        for_decoding: bool = False,
    ):
        self.num_letters, self.max_letters = num_letters, max_letters
        self.batch_size, self.seed = batch_size, seed
        self._num_batches, self.for_decoding = num_batches, for_decoding

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "num_letters")
        self.require_at_least(2, "max_letters")

    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows = self.rows(0, slice(0, self.batch_size))
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in rows.items()}

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first, longest = index * self.batch_size, self.max_letters
        numbers = range(first + rows.start, first + rows.stop)
        bits = np.stack([random_bits(self.seed, row, longest + 1) for row in numbers])
        shortest = longest // 2
        lengths = shortest + (bits[:, 0] % np.uint64(longest - shortest + 1)).astype(np.int64)
        letters = FIRST_LETTER + (bits[:, 1:] % np.uint64(self.num_letters)).astype(np.int32)
        is_padding = np.arange(longest)[None, :] >= lengths[:, None]
        labels = np.full((len(bits), longest + 1), PADDING, np.int32)
        for row, length in enumerate(lengths):
            labels[row, :length] = letters[row, :length][::-1]
            labels[row, length] = END
        batch = {
            "src_ids": np.where(is_padding, PADDING, letters),
            "src_paddings": is_padding.astype(np.float32),
            "labels": labels,
        }
        start = np.full((len(bits), 1), END, np.int32)
        if self.for_decoding:
            ones = np.ones(len(bits), np.int32)
            weights = ones.astype(np.float32)
            return batch | {"ids": start, "prefix_lengths": ones, "weights": weights}
        ids = np.concatenate([start, labels[:, :-1]], axis=1)
        weights = (labels != PADDING).astype(np.float32)
        return batch | {"ids": ids, "weights": weights, "paddings": 1.0 - weights}

    def fingerprint(self) -> dict[str, Any]:
        settings = self.settings_fingerprint(
            "num_letters", "max_letters", "batch_size", "seed", "num_batches", "for_decoding"
        )
        return settings | {"pipeline": "ReversedWords"}


@register
class Reverse(Experiment):
    """Trains an encoder-decoder to spell words backwards, and decodes with beam search.

    All dims are sharded unevenly: 70 model dims over four devices (data parallelism), and 3 heads
    and 141 hidden dims over two devices (model parallelism). Evaluation batches are smaller than
    training batches.
    """

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self):
        # Use rotary positions, because the task depends on distances from the end of the word.
        block = fdl.Partial(
            Transformer,
            tr_atten_tpl=fdl.Partial(DotProductAttention, use_rotary_position_emb=True),
            cross_atten_tpl=fdl.Partial(DotProductAttention),
        )
        model = fdl.Partial(
            TransformerEncoderDecoder,
            vocab_size=28,
            model_dims=70,
            hidden_dims=141,
            num_heads=3,
            dim_per_head=24,
            num_encoder_layers=2,
            num_decoder_layers=2,
            encoder_layer_tpl=block,
            decoder_layer_tpl=block,
        )
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw, b2=0.98),
            learning_rate=fdl.Config(
                optax.warmup_cosine_decay_schedule,
                init_value=0.0,
                peak_value=5e-3,
                warmup_steps=50,
                decay_steps=500,
                end_value=1e-5,
            ),
            clip_gradient_norm_to_value=1.0,
        )
        over_data = ("replica", "data")
        return fdl.Config(
            SequenceToSequenceTask,
            model=set_sharding_params(model),
            learner=learner,
            inputs_split_mapping={"map_1d": (over_data,), "map_2d": (over_data, None)},
            decoder=fdl.Config(BeamSearch, beam_size=3, max_decode_steps=10, eos_id=END),
        )

    def datasets(self):
        words = fdl.Config(ReversedWords, num_letters=26, max_letters=9, batch_size=64)
        heldout = fdl.copy_with(words, batch_size=53, seed=1, num_batches=3)
        return {"train": words, "heldout": heldout}

    def decode_datasets(self):
        words = self.datasets()["train"]
        return {
            "heldout": fdl.copy_with(words, batch_size=5, seed=2, num_batches=2, for_decoding=True)
        }

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=500,
            evaluation=fdl.Config(EvaluationSettings, every_steps=250),
        )
