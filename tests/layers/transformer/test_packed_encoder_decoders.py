"""Pairs of sources and targets packed into rows are what each is in a row of its own."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner
from praxis_lite.layers import set_sharding_params
from praxis_lite.tasks.sequence_to_sequence import SequenceToSequenceTask
from tests.support import packed_rows
from tests.support.marks import nightly_but
from tests.support.packed_rows import nats_and_gradients

Partial = fdl.Partial
S, T = 11, 13
# The lengths of sources and of their targets. One has no source.
SOURCES, TARGETS = ((3, 2, 4), (6, 0)), ((5, 1, 4), (2, 7))
PACKED, APART = (
    (packing(SOURCES, S), packing(TARGETS, T))
    for packing in (packed_rows.packing, packed_rows.apart)
)
NUM_PAIRS, IDS_PER_PAIR = 5, 4
VOCAB = IDS_PER_PAIR * (NUM_PAIRS + 1)
TABLES = {"encoder_embedding_lookup": IDS_PER_PAIR, "decoder_embedding_lookup": IDS_PER_PAIR}
ATTENTION = {
    "rotary": {"use_rotary_position_emb": True, "num_kv_heads": 2},
    "relative_bias": {"relative_bias_tpl": layers.RelativeBias},
    "sinusoids": {},
}


def batch_of(packings, *, has_positions: bool = True) -> dict[str, np.ndarray]:
    """Returns the same pairs; segments, and positions, in packed rows alone."""
    rng, (sources, targets) = np.random.default_rng(0), packings

    def ids(packing, rng):
        shape, first = packing.document.shape, VOCAB - IDS_PER_PAIR
        lengths = [np.sum(packing.document == item) for item in range(NUM_PAIRS)]
        local = [IDS_PER_PAIR * i + np.arange(n) % IDS_PER_PAIR for i, n in enumerate(lengths)]
        labels = [rng.integers(0, VOCAB, n) for n in lengths]
        padding = rng.integers(first, VOCAB, shape).astype(np.int32)
        return packing.filled(padding, local), packing.filled(np.zeros(shape, np.int32), labels)

    src_ids, _ = ids(sources, rng)
    target_ids, labels = ids(targets, rng)
    batch = {"src_ids": src_ids, "ids": target_ids, "labels": labels}
    batch["weights"] = (targets.segment_ids > 0).astype(np.float32)
    for name, packing in (("src_", sources), ("", targets)):
        batch[f"{name}paddings"] = (packing.segment_ids == 0).astype(np.float32)
        if packings is PACKED:
            batch[f"{name}segment_ids"] = packing.segment_ids
            if has_positions:
                batch[f"{name}segment_pos"] = packing.positions
    return batch


def task_of(name: str, preset=None) -> SequenceToSequenceTask:
    attention = Partial(layers.DotProductAttention, **ATTENTION[name])
    block = Partial(layers.Transformer, tr_atten_tpl=attention)
    model = Partial(
        layers.TransformerEncoderDecoder,
        VOCAB,
        8,
        12,
        4,
        2,
        2,
        dim_per_head=4,
        position_emb_tpl=Partial(layers.PositionalEmbedding) if name == "sinusoids" else None,
        encoder_layer_tpl=block,
        decoder_layer_tpl=block,
        softmax_tpl=Partial(layers.FullSoftmax),
        encoder_embedding_tpl=Partial(layers.Embedding),
        decoder_embedding_tpl=Partial(layers.Embedding),
    )
    split = None if preset is None else {"map_2d": (preset["batch"], preset.get("length"))}
    model = model if preset is None else set_sharding_params(model, preset)
    return SequenceToSequenceTask(
        fdl.build(model), Learner(optax.sgd, 0.1), inputs_split_mapping=split
    )


@functools.cache
def alone(name: str):
    return nats_and_gradients(task_of(name), batch_of(APART), APART[1])


def check(name: str, task: SequenceToSequenceTask, mesh=None, **given) -> None:
    actual = nats_and_gradients(task, batch_of(PACKED, **given), PACKED[1], mesh)
    # Gradients of sources pass ten sublayers, each of which rounds.
    packed_rows.check(actual, alone(name), TABLES, tolerance=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but({"rotary"}, ATTENTION))
def test_pairs_of_a_row_neither_see_nor_change_each_other(name):
    check(name, task_of(name))


@pytest.mark.slow
def test_positions_begin_anew_in_each_segment_if_a_batch_has_none():
    check("sinusoids", task_of("sinusoids"), has_positions=False)


# test_packed_models.py has other ways to split a sequence.
@pytest.mark.slow
def test_so_it_is_where_an_axis_splits_both_sequences(mesh_of):
    preset = {"batch": "data", "length": "mdl", "residual_length": "mdl"}
    check("rotary", task_of("rotary", preset), mesh_of(1, 2, 3))


@pytest.mark.parametrize("name", ["input_segment_ids", "target_segment_ids"])
def test_segments_of_one_side_alone_are_refused(name):
    def call():
        model = layers.TransformerEncoderDecoder(7, 4, 6, 2, 1, 1, rngs=nnx.Rngs(0))
        ids = jnp.ones((2, 3), jnp.int32)
        return model(ids, ids, **{name: ids})

    with pytest.raises(ConfigError, match="input_segment_ids.*target_segment_ids"):
        jax.eval_shape(call)


@pytest.mark.parametrize("name", ["input_segment_ids", "target_segment_ids"])
def test_segments_are_refused_beside_a_cache(name):
    def call():
        model = layers.TransformerEncoderDecoder(7, 4, 6, 2, 1, 1, rngs=nnx.Rngs(0))
        ids = jnp.ones((2, 3), jnp.int32)
        cache = model.init_cache(2, 3, encoded_length=3)
        return model.decode(ids, encoded=model.encode(ids), cache=cache, **{name: ids})

    with pytest.raises(ConfigError, match="segment_ids"):
        jax.eval_shape(call)
