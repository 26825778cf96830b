"""Whole language models of packed rows: on one device, and where mesh axes split the sequence."""

import copy
import functools
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest

from praxis_lite import layers
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import SHARDING_PRESETS, rotary_lm, set_sharding_params
from praxis_lite.layers.attention.kernels import choice as kernels
from praxis_lite.layers.attention.kernels.context_parallel import CONTEXT_PARALLEL
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.layers.whole_model import preset_runs
from tests.support import packed_rows
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.lm_runs import zero_padded
from tests.support.marks import nightly_but, slow_or_nightly
from tests.support.packed_rows import NatsAndGradients, nats_and_gradients

Partial = fdl.Partial
LENGTHS, T = ((5, 1, 4), (2, 7)), 13
PACKED, APART = packed_rows.packing(LENGTHS, T), packed_rows.apart(LENGTHS, T)
NUM_DOCS = sum(map(len, LENGTHS))
# Each document has ids of its own, and so has padding: a gradient of the table of embeddings says
# which document it came to. The softmax has another table.
IDS_PER_DOC = 4
VOCAB = IDS_PER_DOC * (NUM_DOCS + 1)
SIZES = {
    "vocab_size": VOCAB,
    "model_dims": 8,
    "hidden_dims": 12,
    "num_heads": 4,
    "dim_per_head": 4,
    "num_layers": 2,
    "softmax_tpl": Partial(layers.FullSoftmax),
    "separate_embedding_tpl": Partial(layers.Embedding),
}


def batch_of(packing, *names: str) -> dict[str, np.ndarray]:
    """Returns the same documents, however they are packed, with optional inputs of these names."""
    rng, shape = np.random.default_rng(0), packing.document.shape
    lengths = [np.sum(packing.document == item) for item in range(NUM_DOCS)]
    padding_ids = rng.integers(VOCAB - IDS_PER_DOC, VOCAB, shape).astype(np.int32)
    ids = [IDS_PER_DOC * element + np.arange(n) % IDS_PER_DOC for element, n in enumerate(lengths)]
    optional = {
        "segment_ids": packing.segment_ids,
        "segment_pos": packing.positions,
        "paddings": (packing.segment_ids == 0).astype(np.float32),
        # Documents of one token begin with a prefix of one.
        "inputs_indicator": (packing.positions < 2).astype(np.int32),
    }
    return {
        "ids": packing.filled(padding_ids, ids),
        "labels": packing.filled(
            np.zeros(shape, np.int32), [rng.integers(0, VOCAB, n) for n in lengths]
        ),
        "weights": packing.filled(
            np.zeros(shape, np.float32), [rng.choice([0.5, 1.0, 2.0], n) for n in lengths]
        ),
        **{name: optional[name] for name in names},
    }


def task_of(lm, preset=None) -> LanguageModelTask:
    model = fdl.build(lm if preset is None else set_sharding_params(lm, preset))
    split = None if preset is None else {"map_2d": (preset["batch"], preset.get("length"))}
    return LanguageModelTask(model, Learner(optax.sgd, 0.1), inputs_split_mapping=split)


def check(actual: list[NatsAndGradients], expected: list[NatsAndGradients]) -> None:
    packed_rows.check(actual, expected, {"embedding_lookup": IDS_PER_DOC})


def lm_of(block=(), **settings) -> Any:
    """Returns a Pax-like LM; `block` has settings of its Transformer."""
    block = Partial(layers.Transformer, **dict(block))
    return Partial(layers.TransformerLm, **SIZES, transformer_layer_tpl=block, **settings)


def rotary(kernel="auto", **settings) -> Any:
    """Returns a rotary LM whose scanned blocks have a window and none in turn."""
    attention = {"num_kv_heads": 2, "atten_kernel": kernel, "atten_chunk_size": 4}
    lm = rotary_lm(**SIZES, attention=attention, **settings)
    windowed = copy.deepcopy(lm.transformer_layer_tpl)
    windowed.tr_atten_tpl.window = 3
    lm.transformer_layer_tpl = [windowed, lm.transformer_layer_tpl]
    return lm


def experts(**settings) -> Any:
    # A loss of the experts' balance is of all tokens together, not a sum over documents.
    return {
        "tr_fflayer_tpl": Partial(
            layers.TransformerFeedForwardMoe,
            num_experts=4,
            moe_load_balance_loss_weight=0.0,
            **settings,
        )
    }


def attention(**settings) -> Any:
    return {"tr_atten_tpl": Partial(layers.DotProductAttention, **settings)}


MODELS = {
    "rotary": rotary,
    "learned_positions": lambda: lm_of(max_seq_length=T),
    "recurrent": lambda: lm_of({"tr_atten_tpl": layers.RgLruBlock}, position_emb_tpl=None),
    "dropless_experts": lambda: lm_of(experts(dropless=True)),
    "sinusoids": lm_of,
    "relative_bias": lambda: lm_of(
        attention(relative_bias_tpl=layers.RelativeBias), position_emb_tpl=None
    ),
    "side_by_side": lambda: lm_of({"is_parallel": True}),
    "primer": lambda: lm_of({"norm_policy": "primer_hybrid"}),
    "unrolled": lambda: lm_of(stacked_transformer_tpl=layers.StackedTransformer),
    "pipeline": lambda: lm_of(
        stacked_transformer_tpl=Partial(
            layers.Pipeline,
            num_stages=2,
            num_microbatches=NUM_DOCS,
            pipelined=True,
        )
    ),
    "experts_by_sentence": lambda: lm_of(
        experts(dropless=True, moe_gating_embedding_level="sentence")
    ),
    "experts_with_room": lambda: lm_of(experts(unadjusted_expert_capacity_factor=4.0)),
    "two_of_all_experts": lambda: lm_of(experts(gating_func="dense_top2")),
    "bidirectional": lambda: lm_of(model_type="bidirectional"),
    "prefix": lambda: lm_of(model_type="prefix"),
}


@functools.cache
def alone(name: str) -> list[NatsAndGradients]:
    names = ["inputs_indicator"] if name == "prefix" else []
    return nats_and_gradients(task_of(MODELS[name]()), batch_of(APART, "paddings", *names), APART)


# Of the others a mesh is tested too, below, or the layer alone, in test_packed_documents.py.
ON_ONE_DEVICE = [name for name in MODELS if name not in ("recurrent", "relative_bias", "prefix")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    nightly_but({"dropless_experts", "rotary", "pipeline"}, ON_ONE_DEVICE),
)
def test_a_packed_loss_is_that_of_rows_of_their_own_and_no_document_sees_another(name):
    batch = batch_of(PACKED, "segment_ids", "segment_pos")
    check(nats_and_gradients(task_of(MODELS[name]()), batch, PACKED), alone(name))


def test_positions_begin_anew_in_each_segment_if_a_batch_has_none():
    task, rng = task_of(MODELS["learned_positions"]()), np.random.default_rng(1)
    mdl_vars = jax.tree.map(
        lambda w: rng.normal(scale=0.4, size=w.shape).astype(np.float32),
        jax.eval_shape(task.model.init, jax.random.key(0)),
    )
    batch = batch_of(PACKED, "segment_ids", "segment_pos")
    in_a_row = np.broadcast_to(np.arange(T, dtype=np.int32), batch["segment_pos"].shape)
    positions = {"given": batch.pop("segment_pos"), "in a row": in_a_row}

    @jax.jit
    def losses(mdl_vars):
        def loss(**given):
            module = task.module(mdl_vars, None)
            return task.compute_loss(module, {**batch, **given}, None)["loss"][0]

        return loss(), {name: loss(segment_pos=x) for name, x in positions.items()}

    actual, expected = jax.tree.map(float, losses(mdl_vars))
    assert actual == pytest.approx(expected["given"], rel=1e-6)
    assert abs(actual - expected["in a row"]) > 1e-3


# What splits the sequence: between the parts of blocks (the preset), in gathers and scatters by
# hand, or everywhere, the batch itself included. And rings, in which it is rows that move.
BY_HAND = {"attention_collectives": "gather", "mlp_collectives": "ring"}
LENGTH = {"batch": "data", "length": "mdl", "residual_length": "mdl"}
PRESETS = {
    "sequence": SHARDING_PRESETS["sequence"],
    "gather": {**SHARDING_PRESETS["sequence"], **BY_HAND},
    "length": LENGTH,
    **{how: {**LENGTH, "attention_context": how} for how in CONTEXT_PARALLEL if how != "gather"},
    "gathered_keys": {**LENGTH, "attention_context": "gather"},
    "ring_of_rows": SHARDING_PRESETS["fsdp+ring"],
    "two_way_ring": {**SHARDING_PRESETS["fsdp+ring"], "attention_collectives": "two_way_ring"},
    "weights": SHARDING_PRESETS["fsdp+mlp_ring"],
}
KERNELS = [name for name, can_do in kernels.KERNELS.items() if "segment_ids" in can_do]


# What each kernel makes of a split sequence; what each way to split makes of one kernel.
CASES = [
    *(("length", kernel) for kernel in KERNELS),
    ("sequence", "einsum"),
    ("gather", "splash"),
    ("all_to_all", "splash"),
    ("all_to_all", "einsum"),
    *((word, "chunked") for word in ("gathered_keys", "ring", "all_to_all+ring")),
    ("ring_of_rows", "chunked"),
    ("two_way_ring", "einsum"),
    ("weights", "splash"),
]
SLOW = {
    ("length", "einsum"),
    ("sequence", "einsum"),
}


@pytest.mark.parametrize("case", slow_or_nightly((), SLOW, CASES), ids="-".join)
def test_so_it_is_where_an_axis_splits_the_sequence(case, mesh_of):
    word, kernel = case
    batch = batch_of(PACKED, "segment_ids", "segment_pos")
    # Three devices, which divide neither the 13 tokens nor the heads.
    task = task_of(rotary(kernel), PRESETS[word])
    actual = nats_and_gradients(task, batch, PACKED, mesh_of(1, 2, 3))
    check(actual, alone("rotary"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    nightly_but({"prefix"}, ["recurrent", "relative_bias", "dropless_experts", "prefix"]),
)
def test_so_it_is_for_other_layers_there(name, mesh_of):
    names = ["inputs_indicator"] if name == "prefix" else []
    batch = batch_of(PACKED, "segment_ids", "segment_pos", *names)
    task = task_of(MODELS[name](), PRESETS["length"])
    check(nats_and_gradients(task, batch, PACKED, mesh_of(1, 2, 4)), alone(name))


def steps(kind, word, num_stages, shape, batch, packing) -> list[tuple[float, np.ndarray]]:
    """Returns the loss of a step on all documents, and on each, and how the embeddings changed."""
    lm, names = lm_of(position_emb_tpl=None), ("replica", "data", "mdl")
    if num_stages > 1:
        names = ("stage", "data", "mdl")
        lm.stacked_transformer_tpl = Partial(layers.Pipeline, num_stages=2, num_microbatches=5)
    mesh = make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=names, allow_unused_devices=True))
    partitioner = kind(task_of(lm, PRESETS[word]), mesh)
    layout, key, actual = partitioner.layout, partitioner.key(0), []
    state = preset_runs.drawn(partitioner)
    old = state.mdl_vars["params"]["embedding_lookup"]["emb_var"]
    padded = jax.tree.map(zero_padded, state, layout.padded_shapes)
    for item in packed_rows.of_each_document(batch, packing):
        state = jax.device_put(padded, layout.shardings(mesh))
        state, outputs = partitioner.train_step(state, partitioner.global_batch(item), key)
        new = np.asarray(state.mdl_vars["params"]["embedding_lookup"]["emb_var"])
        change = new[: old.shape[0], : old.shape[1]] - old
        actual.append((float(outputs["metrics"]["loss"][0]), change))
    return actual


@functools.cache
def steps_apart(num_stages):
    return steps(Partitioner, "length", num_stages, (1, 1, 1), batch_of(APART), APART)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word", "num_stages"),
    nightly_but(
        {(explicit_partitioner, "gather", 1)},
        [
            (Partitioner, "length", 1),
            (Partitioner, "length", 2),
            (Partitioner, "all_to_all", 2),
            (explicit_partitioner, "gather", 1),
            (explicit_partitioner, "ring", 1),
        ],
    ),
)
def test_a_training_step_leaves_other_documents_embeddings_as_they_are(kind, word, num_stages):
    batch = batch_of(PACKED, "segment_ids", "segment_pos")
    actual = steps(kind, word, num_stages, (num_stages, 2, 2), batch, PACKED)
    for document, ((loss, change), (loss_apart, change_apart)) in enumerate(
        zip(actual, steps_apart(num_stages), strict=True), -1
    ):
        np.testing.assert_allclose(loss, loss_apart, rtol=1e-6)
        # What is added to embeddings of about 0.3 is rounded.
        np.testing.assert_allclose(change, change_apart, rtol=0, atol=1e-7)
        if document >= 0:
            others = np.delete(change, packed_rows.table_rows(document, IDS_PER_DOC), axis=0)
            np.testing.assert_array_equal(others, 0.0, err_msg=f"{document} sees another")
