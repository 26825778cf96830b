"""Compares the library's train step with the same model in plain JAX.

`python -m benchmarks.step_overhead` alternates between the two steps in a single run. It prints
ratios of the median step time, the host time per step, and the matmul flops, collective bytes and
temporary memory of the compiled steps. A second table compares a model with uneven sizes to a model
with the next even sizes.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import plain_jax_lm
from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    make_mesh,
    simulate_devices,
)
from praxis_lite.layers import (
    SHARDING_PRESETS,
    TransformerFeedForward,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo, hlo_matmuls

EVEN = plain_jax_lm.Config(256, 128, 512, num_heads=4, dims_per_head=32, num_layers=4)
UNEVEN = plain_jax_lm.Config(251, 127, 509, num_heads=3, dims_per_head=32, num_layers=4)
SCHEDULE = dict(init_value=0.0, peak_value=1e-3, warmup_steps=5, decay_steps=100)
BATCH, TIME = 16, 64
GOALS = {
    "median step time": 1.02,
    "matmul flops": 1.00,
    "collective bytes": 1.00,
    "temporary memory": 1.02,
    "host time per step": 1.2,
}


def library(cfg: plain_jax_lm.Config, mesh: jax.sharding.Mesh) -> Partitioner:
    """Returns a Partitioner for the same model as in `plain_jax_lm`."""
    lm = rotary_lm(
        vocab_size=cfg.vocab_size,
        model_dims=cfg.model_dims,
        hidden_dims=cfg.hidden_dims,
        num_heads=cfg.num_heads,
        dim_per_head=cfg.dims_per_head,
        num_layers=cfg.num_layers,
        tr_fflayer_tpl=fdl.Partial(TransformerFeedForward, has_bias=False, activation="gelu"),
    )
    task = fdl.Config(
        LanguageModelTask,
        # As in the plain JAX model, shard nothing over `mdl` between sublayers.
        model=set_sharding_params(lm, SHARDING_PRESETS["fsdp+tensor"] | {"residual_length": None}),
        learner=fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw),
            learning_rate=fdl.Config(optax.warmup_cosine_decay_schedule, **SCHEDULE),
            clip_gradient_norm_to_value=1.0,
        ),
        inputs_split_mapping={"map_2d": (("replica", "data"), None)},
    )
    return Partitioner(fdl.build(task), mesh)


def random_batch(vocab_size: int) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens; the same on every call."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=(BATCH, TIME + 1), dtype=np.int32)
    weights = np.ones((BATCH, TIME), np.float32)
    return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}


def weights_of(plain: dict[str, Any]) -> dict[str, Any]:
    """Converts the weights of `plain_jax_lm` to the library's tree, for equal initial weights."""
    layers = plain["layers"]
    attention = {name: {"w": layers[name]} for name in ("query", "key", "value", "post")}
    feed_forward = {
        f"ffn_layer{number}": {"linear": {"w": layers[f"w{number}"]}} for number in (1, 2)
    }
    blocks = {
        "self_attention": attention,
        "layer_norm": {"scale": layers["attention_norm"]},
        "ff_layer": {**feed_forward, "layer_norm": {"scale": layers["ffn_norm"]}},
    }
    return {
        "transformer": {"blocks": blocks},
        "softmax": {"logits_ffn": {"linear": {"w": plain["embedding"]}}},
        "final_ln": {"scale": plain["final_norm"]},
    }


class Step:
    """A train step and its state; each call is timed."""

    def __init__(self, step: Callable[..., Any], state: Any, *args: Any):
        self._step, self._state, self._args = step, state, args
        self.step_times: list[float] = []
        self.host_times: list[float] = []
        self.losses: list[float] = []

    def run(self, loss_of: Callable[[Any], jax.Array]) -> None:
        """Runs a step and records the time until the call returns and until the step is done."""
        start = time.perf_counter()
        self._state, outputs = self._step(self._state, *self._args)
        self.host_times.append(time.perf_counter() - start)
        jax.block_until_ready((self._state, outputs))
        self.step_times.append(time.perf_counter() - start)
        self.losses.append(float(loss_of(outputs)))


def figures(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Returns the costs of the compiled step per device, by name."""
    totals = hlo.summarize(hlo.collectives(compiled))
    return {
        "matmul flops": hlo_matmuls.flops(compiled),
        "collective bytes": sum(size for _, size in totals.values()),
        "temporary memory": hlo.memory_per_device(compiled).temp,
    }


def compare(num_steps: int) -> dict[str, tuple[float, float]]:
    """Returns (library, plain JAX) for each quantity, for the even model on a (1, 4, 2) mesh."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    batch = random_batch(EVEN.vocab_size)
    ours = library(EVEN, mesh)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(**SCHEDULE))
    )
    plain_step = plain_jax_lm.make_train_step(EVEN, mesh, tx)
    shardings = plain_jax_lm.state_shardings(EVEN, mesh, tx)
    plain_init = jax.jit(
        lambda key: plain_jax_lm.init_state(key, EVEN, tx), out_shardings=shardings
    )
    plain_batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(plain_jax_lm.MESH_AXES)))
    key = ours.key(0)
    ours_state, plain_state = ours.init(key), plain_init(jax.random.key(0))
    drawn = ours_state.mdl_vars["params"]
    params = jax.tree.map(
        lambda x, old: jax.device_put(np.asarray(x), old.sharding),
        weights_of(plain_state["params"]),
        drawn,
    )
    ours_state = dataclasses.replace(ours_state, mdl_vars=ours_state.mdl_vars | {"params": params})
    ours_batch = ours.global_batch(batch)
    ours_figures = figures(ours.train_step.lower(ours_state, ours_batch, key).compile())
    plain_figures = figures(plain_step.lower(plain_state, plain_batch).compile())
    a = Step(ours.train_step, ours_state, ours_batch, key)
    b = Step(plain_step, plain_state, plain_batch)
    for index in range(num_steps):
        # Alternate the order, so that neither always runs second.
        for step in (a, b) if index % 2 else (b, a):
            step.run(lambda o: o["metrics"]["loss"][0] if "metrics" in o else o["loss"])
        if index % 20 == 0:
            print(f"  step {index}/{num_steps}", file=sys.stderr)
    print(f"last losses: library {a.losses[-1]:.4f}, plain JAX {b.losses[-1]:.4f}")
    # Both start from the same weights, so equal losses show that they compute the same model.
    np.testing.assert_allclose(a.losses[:20], b.losses[:20], rtol=1e-4)
    warm = num_steps // 10
    measured = {
        "median step time": tuple(statistics.median(s.step_times[warm:]) for s in (a, b)),
        "host time per step": tuple(statistics.median(s.host_times[warm:]) for s in (a, b)),
    }
    exact = {name: (ours_figures[name], plain_figures[name]) for name in ours_figures}
    return {name: {**measured, **exact}[name] for name in GOALS}


def uneven_against_even() -> dict[str, tuple[float, float]]:
    """Returns (uneven, next even size) for each quantity of the compiled train step."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))

    def compiled(cfg: plain_jax_lm.Config) -> jax.stages.Compiled:
        spec = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_batch(cfg.vocab_size)
        )
        return library(cfg, mesh).train_step.lower(spec).compile()

    next_even = plain_jax_lm.Config(252, 128, 510, num_heads=4, dims_per_head=32, num_layers=4)
    uneven, even = figures(compiled(UNEVEN)), figures(compiled(next_even))
    return {name: (uneven[name], even[name]) for name in uneven}


def main() -> None:
    """Prints both tables."""
    simulate_devices(8)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=200)
    args = parser.parse_args()
    print(f"{'library / plain JAX':<24}{'library':>16}{'plain JAX':>16}{'ratio':>8}{'goal':>8}")
    for name, (a, b) in compare(args.num_steps).items():
        print(f"{name:<24}{a:>16,.6g}{b:>16,.6g}{a / b:>8.3f}{GOALS[name]:>8.2f}")
    print(f"\n{'uneven / next even':<24}{'uneven':>16}{'even':>16}{'ratio':>8}")
    for name, (a, b) in uneven_against_even().items():
        print(f"{name:<24}{a:>16,.6g}{b:>16,.6g}{a / b:>8.3f}")


if __name__ == "__main__":
    main()
