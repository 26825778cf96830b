"""A small language model that stores part of its state or activations in host memory.

Run as a script, it compiles the model for a TPU and prints the memory use.
"""

import functools
import json
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import Repeat, rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask

NUM_LAYERS, ROWS, LENGTH, VOCAB = 3, 11, 7, 37
DIMS = dict(vocab_size=VOCAB, model_dims=13, hidden_dims=29, num_heads=3, dim_per_head=6)
EVEN = dict(vocab_size=40, model_dims=24, hidden_dims=48, num_heads=8, dim_per_head=2)
LARGE = dict(vocab_size=512, model_dims=512, hidden_dims=2048, num_heads=8, dim_per_head=64)
INPUTS = ("iteration_input", "query_proj", "ffn1")


def placed(place: str) -> dict[str, str]:
    """Returns a checkpoint policy that places three activations "device" or offloads them."""
    return dict.fromkeys(INPUTS, place)


def partitioner(
    policy: Any, *, dims: Any = DIMS, mesh: Any = None, stack: Any = Repeat, **learner: Any
) -> Partitioner:
    """Returns a Partitioner on 8 devices, with settings of the stack and the learner."""
    lm = rotary_lm(
        num_layers=NUM_LAYERS,
        stacked_transformer_tpl=fdl.Partial(stack, checkpoint_policy=policy),
        **dims,
    )
    task = LanguageModelTask(
        fdl.build(set_sharding_params(lm)),
        Learner(optax.adamw, 1e-2, clip_gradient_norm_to_value=0.5, **learner),
        inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2))) if mesh is None else mesh
    return Partitioner(task, mesh)


def batch(rows: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(3).integers(0, VOCAB, (rows, length + 1)).astype(np.int32)
    weights = np.ones((rows, length), np.float32)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights}


def spec(rows: int = ROWS, length: int = LENGTH) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(rows, length))


def placed_state(made: Partitioner, state: Any) -> Any:
    """Returns the NumPy arrays of a state where the partitioner stores them."""
    return jax.device_put(state, made.layout.shardings(made.mesh))


def trained(made: Partitioner, initial: Any = None) -> tuple[list[Any], Any, Any]:
    """Returns the losses of two steps, the final state as NumPy arrays, and the final state.

    Args:
      initial: NumPy arrays of the state to start with. If None, the partitioner draws the state.
    """
    key, inputs = made.key(7), made.global_batch(batch())
    state = made.init(made.key(0)) if initial is None else placed_state(made, initial)
    losses = []
    for _ in range(2):
        state, outputs = made.train_step(state, inputs, key)
        losses.append(np.asarray(outputs["metrics"]["loss"][0]))
    return losses, jax.tree.map(np.asarray, state), state


def assert_same(actual: Any, expected: Any, rtol: float = 0.0) -> None:
    """Asserts that all leaves are bitwise equal, or differ by at most `rtol` times the maximum."""
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        atol = rtol * np.abs(other).max(initial=0.0)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, other, rtol=rtol, atol=atol, err_msg=name)


def assert_restored(folder: Any, source: tuple, target: Partitioner) -> None:
    """Asserts that a state saved by one partitioner can be restored by another one.

    Args:
      source: A partitioner and the results of `trained`.
    """
    made, _, expected, state = source
    with Checkpoints(folder, saving=SaveSettings()) as checkpoints:
        checkpoints.save(2, state, made.layout)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(target.layout, target.mesh).state
    assert_same(restored, expected)
    for leaf, x in zip(target.layout.leaves(), jax.tree.leaves(restored), strict=True):
        assert x.sharding.memory_kind == leaf.memory_kind


def memory_on_tpu(policy: Any, **settings: Any) -> dict[str, int]:
    """Returns the device and host bytes that the compiler for v5e plans for a step.

    Also returns the bytes that a plan counts on the link between device and host.
    """
    from praxis_tools.plan.costs import FITTED
    from praxis_tools.plan.schedule.schedule import schedule
    from praxis_tools.plan.topology import PhysicalMesh, topology_of

    topology = topology_of("v5e:2x4", 1)
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)), topology.devices)
    made = partitioner(policy, dims=LARGE, mesh=mesh, **settings)
    compiled = made.train_step.lower(spec(64, 512)).compile()
    planned = compiled.memory_analysis()
    in_one_slice = PhysicalMesh(dict(mesh.shape), np.zeros(mesh.size, int))
    copies = schedule(compiled.as_text(), topology.chip, in_one_slice, FITTED).host_copies.values()
    return {
        name: int(getattr(planned, f"{name}_size_in_bytes"))
        for name in ("argument", "temp", "host_argument", "host_output", "host_alias", "host_temp")
    } | {
        kind: sum(copy.bytes for copy in copies if copy.kind == kind)
        for kind in ("copy to the host", "copy from the host")
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "device": memory_on_tpu(placed("device")),
                "offload": memory_on_tpu(placed("offload"), host_slots=".*"),
                "weights": memory_on_tpu(
                    "save_nothing", stack=functools.partial(Repeat, offload_weights=True)
                ),
            }
        )
    )
