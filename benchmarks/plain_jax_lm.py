"""A sharded decoder-only language model in plain JAX and optax: the baseline of the benchmarks.

It does not use praxis_lite. As usual in JAX, dims must be divisible by the mesh axes over which
they are sharded. `python benchmarks/plain_jax_lm.py` trains for 20 steps on eight simulated
devices.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# B batch, T time (queries), S time (keys), D model, F hidden, H heads, K per head, V vocabulary.
MESH_AXES = ("replica", "data", "mdl")
# Mesh axes over which the batch is sharded; features are sharded over mdl.
BATCH = ("replica", "data")
PyTree = Any
Tx = optax.GradientTransformation


@dataclass(frozen=True)
class Config:
    """Sizes of the model; `gated` adds a projection that multiplies the hidden activations."""

    vocab_size: int
    model_dims: int
    hidden_dims: int
    num_heads: int
    dims_per_head: int
    num_layers: int
    gated: bool = False


def _weights(cfg: Config, make: Callable[[tuple, tuple, int | None], Any]) -> dict[str, Any]:
    # make(shape, split, fan-in; None for a norm's scale) per weight; layers are stacked.
    D, F, H, K = cfg.model_dims, cfg.hidden_dims, cfg.num_heads, cfg.dims_per_head

    def stacked(shape: tuple, split: tuple, fan_in: int | None = None) -> Any:
        return make((cfg.num_layers, *shape), (None, *split), fan_in)

    heads, into_hidden = ((D, H, K), ("data", "mdl", None)), ((D, F), ("data", "mdl"), D)
    layers = {name: stacked(*heads, D) for name in ("query", "key", "value")}
    layers |= {"post": stacked(*heads, H * K), "w1": stacked(*into_hidden)}
    layers |= {"gate": stacked(*into_hidden)} if cfg.gated else {}
    layers |= {"w2": stacked((F, D), ("mdl", "data"), F)}
    layers |= {name: stacked((D,), (None,)) for name in ("attention_norm", "ffn_norm")}
    embedding = make((D, cfg.vocab_size), ("data", "mdl"), D)
    return {"embedding": embedding, "layers": layers, "final_norm": make((D,), (None,), None)}


def specs(cfg: Config) -> dict[str, Any]:
    """Returns a PartitionSpec for each parameter: features over mdl, model dims over data."""
    return _weights(cfg, lambda shape, split, fan_in: P(*split))


def init(key: jax.Array, cfg: Config) -> dict[str, Any]:
    """Initializes float32 parameters: normal with stddev 1/sqrt(fan_in), scales of one."""
    keys = iter(jax.random.split(key, 32))

    def draw(shape: tuple, _: tuple, fan_in: int | None) -> jax.Array:
        normal = jax.random.normal(next(keys), shape)
        return jnp.ones(shape) if fan_in is None else normal * fan_in**-0.5

    return _weights(cfg, draw)


def _constrain(x: jax.Array, *split: Any) -> jax.Array:
    # Without a mesh, the model runs on one device.
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    return jax.lax.with_sharding_constraint(x, P(*split)) if on_mesh else x


def _project(equation: str, x: jax.Array, w: jax.Array, split: str | None = None) -> jax.Array:
    return _constrain(jnp.einsum(equation, x, w.astype(x.dtype)), BATCH, None, split)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-6)
    return (x32 * inverse * scale[None, None]).astype(x.dtype)


def _rotate(x_BTHK: jax.Array) -> jax.Array:
    # Rotary positions (arXiv:2104.09864), rotating the two halves of each head.
    T, K = x_BTHK.shape[1], x_BTHK.shape[-1]
    timescale = 10_000.0 ** (jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angle = (jnp.arange(T, dtype=jnp.float32)[:, None] / timescale[None])[None, :, None]
    (a, b), sin, cos = jnp.split(x_BTHK.astype(jnp.float32), 2, -1), jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHK.dtype)


def _attention(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    def heads(x_BTHK: jax.Array) -> jax.Array:
        return _constrain(x_BTHK, BATCH, None, "mdl", None)

    names = ("query", "key", "value")
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, layer[name].astype(x.dtype)) for name in names)
    q, k, v = heads(_rotate(q) * q.shape[-1] ** -0.5), heads(_rotate(k)), heads(v)
    logits = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones(logits.shape[2:], bool))[None, None]
    probs = jax.nn.softmax(jnp.where(causal, logits, -1e30), axis=-1).astype(x.dtype)
    encoded = heads(jnp.einsum("bhts,bshk->bthk", probs, v))
    return _project("bthk,dhk->btd", encoded, layer["post"])


def _feed_forward(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    h_BTF = jax.nn.gelu(_project("btd,df->btf", x, layer["w1"], "mdl"))
    if "gate" in layer:
        h_BTF = h_BTF * _project("btd,df->btf", x, layer["gate"], "mdl")
    return _project("btf,fd->btd", h_BTF, layer["w2"])


@jax.checkpoint
def _block(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    x = x + _attention(_rms_norm(x, layer["attention_norm"]), layer)
    return x + _feed_forward(_rms_norm(x, layer["ffn_norm"]), layer), None


def loss(
    params: PyTree, batch: dict[str, jax.Array], dtype: Any = jnp.float32
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the weighted mean cross-entropy in nats, and metrics that include this loss."""
    batch = {name: _constrain(x, BATCH, None) for name, x in batch.items()}
    emb_DV, weights = params["embedding"].astype(dtype), batch["weights"]
    # Gather from rows that are replicated over the batch axes, because other shardings conflict.
    rows = _constrain(emb_DV.T, "mdl", None)
    x = jnp.take(rows, batch["ids"], axis=0) * emb_DV.shape[0] ** 0.5
    x, _ = jax.lax.scan(_block, _constrain(x, BATCH, None, None), params["layers"])
    logits = _project("btd,dv->btv", _rms_norm(x, params["final_norm"]), emb_DV, "mdl")
    logits, num_tokens = logits.astype(jnp.float32), jnp.sum(weights)
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    value = jnp.sum(weights * xent) / num_tokens
    hits = jnp.argmax(logits, axis=-1) == batch["labels"]
    accuracy = jnp.sum(weights * hits) / num_tokens
    return value, {"loss": value, "accuracy": accuracy, "num_tokens": num_tokens}


def init_state(key: jax.Array, cfg: Config, tx: Tx) -> PyTree:
    """Returns dict(step, params, opt_state); jit it with `state_shardings` as out_shardings."""
    params = init(key, cfg)
    return {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": tx.init(params)}


def state_shardings(cfg: Config, mesh: Mesh, tx: Tx) -> PyTree:
    """Returns the NamedSharding of each leaf of the state; slots follow their parameters."""
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), cfg, tx))
    state |= {"step": P(), "params": specs(cfg)}
    state["opt_state"] = optax.tree_map_params(
        tx, lambda _, s: s, state["opt_state"], specs(cfg), transform_non_params=lambda _: P()
    )
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), state)


def make_train_step(cfg: Config, mesh: Mesh, tx: Tx, dtype: Any = jnp.float32) -> Callable:
    """Returns a jitted function (state, batch) -> (state, metrics) that donates the state."""

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        old = {name: state[name] for name in ("params", "opt_state")}
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            grad_fn = jax.value_and_grad(loss, has_aux=True)
            (value, metrics), grads = grad_fn(old["params"], batch, dtype)
        updates, opt_state = tx.update(grads, old["opt_state"], old["params"])
        new = {"params": optax.apply_updates(old["params"], updates), "opt_state": opt_state}
        norm = optax.tree.norm(grads)
        # Skip the update if the loss or a gradient is not finite.
        finite = jnp.isfinite(norm) & jnp.isfinite(value)
        kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        metrics |= {"grad_norm": norm, "skipped": ~finite}
        return {"step": state["step"] + 1, **kept}, metrics

    shardings = state_shardings(cfg, mesh, tx)
    inputs = shardings, NamedSharding(mesh, P(MESH_AXES))
    outputs = shardings, NamedSharding(mesh, P())
    return jax.jit(train_step, in_shardings=inputs, out_shardings=outputs, donate_argnums=0)


def main() -> None:
    """Trains for 20 steps on a batch of random tokens; prints the losses and the time per step."""
    # Without these flags, two collectives may deadlock (jax 0.10).
    os.environ["NPROC"] = "32"
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((1, 4, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    cfg = Config(256, 128, 512, num_heads=4, dims_per_head=32, num_layers=4, gated=True)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=(16, 65), dtype=np.int32)
    batch = {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": np.ones((16, 64), "f4")}
    batch = jax.device_put(batch, NamedSharding(mesh, P(MESH_AXES)))
    shardings = state_shardings(cfg, mesh, tx)
    state = jax.jit(lambda key: init_state(key, cfg, tx), out_shardings=shardings)(
        jax.random.key(0)
    )
    train_step = make_train_step(cfg, mesh, tx)
    for step in range(1, 21):
        start = time.perf_counter()
        state, metrics = train_step(state, batch)
        value = float(metrics["loss"])  # Waits for the step; the first step includes compilation.
        print(f"step {step:2}  loss {value:.4f}  {1e3 * (time.perf_counter() - start):6.1f} ms")


if __name__ == "__main__":
    main()
