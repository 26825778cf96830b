"""What uneven sharding costs, read from the compiled programs; and that init is sharded itself."""

import math
import re

import jax
import pytest

from praxis_tools.explain import hlo
from tests.support.lm_runs import (
    NUM_ROWS,
    SEQ_LEN,
    SIZES,
    batches,
    partitioner_of,
    partitioner_with,
    prompts,
    structs,
)
from tests.support.unknown_loops import unknown_loops

# What every init must be, core/models/test_nnx_guide.py asks of small models in `make test`.
pytestmark = pytest.mark.slow


def next_even_sizes(shape):
    """Returns the sizes of the uneven model, each raised to what a mesh divides."""
    _, data, mdl = shape

    def up(size, parts):
        return math.ceil(size / parts) * parts

    dims = SIZES["uneven"]
    return dims | {
        "vocab_size": up(dims["vocab_size"], mdl),
        "hidden_dims": up(dims["hidden_dims"], mdl),
        "num_heads": up(dims["num_heads"], mdl),
        "model_dims": up(dims["model_dims"], data),
    }


def collectives(partitioner, step, element_spec):
    compiled = partitioner.steps[step].lower(element_spec).compile()
    assert not unknown_loops(compiled) or step == "decode"
    return hlo.summarize(hlo.collectives(compiled))


def assert_no_more(uneven, even):
    assert even
    for kind, (count, size) in uneven.items():
        even_count, even_size = even.get(kind, (0, 0))
        assert count <= even_count, kind
        assert size <= even_size, kind


@pytest.mark.parametrize(
    ("optimizer", "shape"),
    [
        ("adafactor", (1, 3, 2)),
        *(
            pytest.param("adamw", shape, marks=pytest.mark.nightly)
            for shape in ((2, 2, 2), (1, 4, 2))
        ),
    ],
    ids=str,
)
def test_uneven_weights_cost_no_collective_more_than_the_next_even_size(optimizer, shape):
    inputs = structs(batches("uneven")[0])
    uneven = collectives(partitioner_of("uneven", optimizer, shape), "train", inputs)
    even_model = partitioner_with(next_even_sizes(shape), optimizer, shape)
    assert all(leaf.shape == leaf.padded_shape for leaf in even_model.layout.leaves())
    assert_no_more(uneven, collectives(even_model, "train", inputs))


@pytest.mark.parametrize("step", ["eval", "decode"])
def test_nor_do_the_other_steps(step):
    shape = (2, 2, 2)
    inputs = structs(prompts() if step == "decode" else batches("uneven")[0])
    uneven = collectives(partitioner_of("uneven", "adamw", shape), step, inputs)
    even_model = partitioner_with(next_even_sizes(shape), "adamw", shape)
    assert_no_more(uneven, collectives(even_model, step, inputs))


def test_an_uneven_batch_moves_its_own_few_numbers_more_and_no_activation():
    shape = (1, 4, 2)
    partitioner = partitioner_of("uneven", "adamw", shape)
    uneven = collectives(partitioner, "train", structs(batches("uneven")[0]))
    num_devices = math.prod(shape)
    rows = math.ceil(NUM_ROWS["uneven"] / num_devices) * num_devices
    assert rows != NUM_ROWS["uneven"]
    inputs = structs(batches("uneven", num_rows=rows)[0])
    even = collectives(partitioner, "train", inputs)
    # Cutting the padding rows off moves ids, labels and weights to where the true rows belong: the
    # price of a step that sees true rows only. It is less than these arrays whole, far less than
    # any activation.
    allowed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(inputs))
    assert allowed < 4 * NUM_ROWS["uneven"] * SEQ_LEN * SIZES["uneven"]["model_dims"]
    kinds = uneven.keys() | even.keys()
    totals = {k: (uneven.get(k, (0, 0)), even.get(k, (0, 0))) for k in kinds}
    assert sum(max(0, ours[1] - theirs[1]) for ours, theirs in totals.values()) <= allowed
    # Activations and gradients are summed by all-reduces.
    assert_no_more({"all-reduce": uneven["all-reduce"]}, even)


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ("uneven", (1, 4, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("even", (2, 2, 2)), ("uneven", (1, 1, 8)))
        ),
    ],
    ids=str,
)
def test_no_weight_or_slot_is_ever_whole_on_a_device_at_init(size, shape):
    partitioner = partitioner_with(
        # As the small models, but that a weight outweighs all else.
        SIZES[size] | {"vocab_size": 30011 if size == "uneven" else 30016},
        "adafactor",
        shape,
    )
    compiled = partitioner.init.lower(partitioner.key(0)).compile()
    leaves = list(partitioner.layout.leaves())
    largest = max(leaves, key=lambda leaf: math.prod(leaf.shape))
    assert largest.path == "mdl_vars/params/softmax/logits_ffn/linear/w"
    assert largest.num_shards > 1
    # No array of the program of one device, of any type, is larger than the largest shard.
    sizes = [
        math.prod(map(int, filter(None, dims.split(","))))
        for dims in re.findall(r"\b[a-z]+\d*\[([\d,]*)\]", compiled.as_text())
    ]
    assert max(sizes) == math.prod(largest.padded_shape) // largest.num_shards
    # Nothing is drawn in one place and sent to another.
    assert not hlo.collectives(compiled)
    memory = hlo.memory_per_device(compiled)
    whole = math.prod(largest.shape) * 4
    assert memory.temp < whole
    state_bytes = sum(leaf.bytes_per_device for leaf in leaves)
    # XLA counts a pointer per output.
    assert state_bytes <= memory.outputs <= state_bytes + 8 * len(leaves)
