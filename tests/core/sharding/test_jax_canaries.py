"""What this design rests on in JAX, each as small as it can be: what fails here has moved.

Meshes have Auto axes because Explicit ones refuse what does not divide, and state is padded because
no array outside a program may be split unevenly. Where a refusal here is none any more, these may
go; where something that works no longer does, they must change.
"""

import dataclasses
import functools
import inspect
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite.core.sharding.padding import is_traced
from praxis_lite.core.xla_workarounds.xla_errors import _corrected
from praxis_lite.job.jax_internals import compilation_cache_modules, distributed_state
from praxis_lite.layers.base.tokamax_internals import (
    grouped_matmul_kernels,
    splash_kernels,
    splash_masks,
)
from praxis_lite.layers.moe.grouped_tokamax import _tpu_to_interpret
from tests.support.marks import needs_tokamax

ROOT = Path(__file__).parents[3]
# What JAX, or tokamax, may move without a word, and the one file of the library that uses it.
PRIVATE = {
    r"jax\._src|jax import _src": "praxis_lite/job/jax_internals.py",
    r"jax\.interpreters|jax import interpreters": "praxis_lite/core/xla_workarounds/xla_errors.py",
    r"jax\.core|jax import core": "praxis_lite/core/sharding/padding.py",
    r"\bjaxlib\.\w|(from|import) jaxlib": None,
    r"tokamax\._src": "praxis_lite/layers/base/tokamax_internals.py",
}

SEVEN = np.arange(7, dtype=np.float32)


def mesh_of(axis_type):
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,))


def jitted(function, **settings):
    """Returns `function` of seven numbers, run on an Explicit mesh of four devices."""
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        return jax.jit(function, **settings)(SEVEN)


def test_explicit_axes_refuse_an_uneven_slice():
    with pytest.raises(Exception, match="slicing on sharded dims where out dim .7."):
        jitted(lambda x: jax.sharding.reshard(jnp.pad(x, (0, 1)), P("data"))[:7])


def test_explicit_axes_refuse_an_uneven_reshard():
    with pytest.raises(ValueError, match="does not evenly divide the dimension size 7"):
        jitted(lambda x: jax.sharding.reshard(x, P("data")))


def test_device_put_refuses_an_uneven_split():
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        with pytest.raises(ValueError, match="4 times, but .* dimension size (is )?7"):
            jax.device_put(SEVEN, NamedSharding(mesh_of(axis_type), P("data")))


def test_jit_refuses_an_uneven_output():
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        split = NamedSharding(mesh_of(axis_type), P("data"))
        with pytest.raises(ValueError, match="4 times, but .* dimension size (is )?7"):
            jax.jit(lambda x: 2 * x, out_shardings=split)(SEVEN)


def test_auto_axes_refuse_unreduced():
    unreduced = P(unreduced={"data"})
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        for function in (
            lambda x: jax.lax.with_sharding_constraint(x, unreduced),
            lambda x: jnp.einsum("a,a->", x, x, out_sharding=unreduced),
        ):
            with pytest.raises(ValueError, match="can only refer to mesh axes .* type `Explicit`"):
                jax.jit(function)(np.ones(8))


def test_auto_axes_are_not_deprecated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = mesh_of(AxisType.Auto)
        with jax.set_mesh(mesh):
            jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data")))(np.ones(8))


def test_an_uneven_constraint_inside_jit_is_honored():
    with jax.set_mesh(mesh_of(AxisType.Auto)):

        def doubled(x):
            return jax.lax.with_sharding_constraint(2 * x, P("data"))[:7]

        actual = jax.jit(doubled)(SEVEN)
        compiled = jax.jit(lambda x: jnp.cos(jax.lax.with_sharding_constraint(x, P("data"))))
        text = compiled.lower(SEVEN).compile().as_text()
    np.testing.assert_array_equal(actual, 2 * SEVEN)
    assert "f32[2]" in text  # Two numbers a device: eight slots for seven.


@functools.cache
def losses_where_data_is(axis_type):
    """Returns three losses of a bare language model whose dims no axis divides but the rows."""
    rng = np.random.default_rng(0)
    names = {"table": (37, 13), "up": (13, 29), "down": (29, 13), "out": (13, 37)}
    params = {
        name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in names.items()
    }
    ids = rng.integers(0, 37, (8, 8))
    mesh = jax.make_mesh((4, 2), ("data", "mdl"), axis_types=(axis_type, AxisType.Auto))

    def loss(params, one_hot):
        # mdl splits neither 13 nor 29 nor 37 evenly.
        splits = {"table": ("mdl", None), "up": (None, "mdl"), "down": ("mdl", None)}
        table, up, down, out = (
            jax.lax.with_sharding_constraint(params[name], P(*splits.get(name, (None, "mdl"))))
            for name in names
        )
        x = one_hot[:, :-1] @ table
        x = x + jnp.tanh(x @ up) @ down
        logprobs = jax.nn.log_softmax(x @ out)
        return -jnp.mean(jnp.sum(logprobs * one_hot[:, 1:], axis=-1))

    def step(params, one_hot):
        value, grads = jax.value_and_grad(loss)(params, one_hot)
        return jax.tree.map(lambda w, g: w - 0.5 * g, params, grads), value

    losses = []
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.eye(37, dtype=np.float32)[ids], NamedSharding(mesh, P("data")))
        step = jax.jit(step)
        for _ in range(3):
            params, value = step(params, rows)
            losses.append(float(value))
    return losses


@pytest.mark.slow
def test_an_uneven_language_model_has_the_same_losses_where_data_is_explicit_and_mdl_auto():
    expected = losses_where_data_is(AxisType.Auto)
    assert expected[2] < expected[0] - 0.1
    np.testing.assert_allclose(losses_where_data_is(AxisType.Explicit), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "names, only_user", PRIVATE.items(), ids=["_src", "interpreters", "core", "jaxlib", "tokamax"]
)
def test_private_names_of_jax_are_used_in_one_file_each(names, only_user):
    names_of_ours = ("praxis_lite", "praxis_tools", "tasks", "experiments", "examples")
    folders = [ROOT / name for name in names_of_ours]
    users = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in folder.rglob("*.py")
        if any(
            re.search(names, line) and not line.lstrip().startswith("#")
            for line in path.read_text("utf-8").splitlines()
        )
    }
    assert users == ({only_user} if only_user else set())


def test_walks_over_modules_ask_for_flaxs_graph_mode():
    """A weight may be shared, which a tree forbids; nnx.compat takes graphs in any mode."""
    names = r"(?<!`)nnx\.(iter_graph|iter_modules|split|state|clone|merge_state)\("
    folders = [ROOT / name for name in ("praxis_lite", "praxis_tools", "tasks", "experiments")]
    code = {path: path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")}
    users = {path for path, text in code.items() if re.search(names, text)}
    assert {path.name for path in users} <= {"nnx.py", "nnx_checkpoint.py"}  # Their docstrings.


def test_jax_internals_are_where_they_were():
    """Of job/jax_internals.py: the connection of processes, and the cache of programs."""
    assert {"client", "process_id", "num_processes", "coordinator_address"} <= {
        name for name in dir(distributed_state()) if not name.startswith("_")
    }
    assert distributed_state().client is None  # This process runs alone.
    cache, keys, compiler = compilation_cache_modules()
    assert callable(cache.get_file_cache) and {"get", "put"} <= set(dir(cache.CacheInterface))
    assert callable(keys._hash_accelerator_config) and callable(compiler._cache_write)
    assert compiler.distributed.global_state is distributed_state()


@needs_tokamax
def test_tokamax_internals_are_where_they_were():
    """Of layers/base/tokamax_internals.py: its splash attention, and its grouped matmuls."""
    splash, masks = splash_kernels(), splash_masks()
    assert masks.FullMask((2, 3)).shape == masks.LocalMask((2, 3), (1, 0), offset=0).shape
    fields = {field.name for field in dataclasses.fields(splash.SplashConfig)}
    assert {
        "block_q",
        "block_kv",
        "block_q_dkv",
        "block_kv_dkv",
        "attn_logits_soft_cap",
        "use_base2_exp",
        "dq_reduction_steps",
        "interpret",
        "residual_checkpoint_name",
    } <= fields
    kernel = splash.make_splash_mha(masks.FullMask((128, 128)), q_seq_shards=1)
    assert kernel.dkv_mask_info is not None
    taken = inspect.signature(splash._splash_attention_bwd_dkv).parameters
    assert set(taken) <= {
        "q",
        "k",
        "v",
        "segment_ids",
        "logsumexp",
        "do",
        "di",
        "bq",
        "bkv",
        "bkv_compute",
        "mask_info",
        *kernel.kwargs,
    }
    assert splash.SegmentIds(q=1, kv=2) == (1, 2)
    ours = {"precision", "out_dtype", "tiling", "interpret"}
    for function in (grouped_matmul_kernels().gmm, grouped_matmul_kernels().tgmm):
        taken = inspect.signature(function).parameters
        assert list(taken)[:3] == ["lhs", "rhs", "group_sizes"] and ours <= set(taken)


def test_a_device_kind_can_be_told_to_pallas():
    """Of layers/moe/grouped_tokamax.py: what interprets a kernel that asks of its TPU."""
    with pytest.raises(ValueError, match="cpu"):
        pltpu.get_tpu_info()
    with _tpu_to_interpret():
        assert pltpu.get_tpu_info().generation == 5


def test_a_primitive_of_ours_is_lowered_as_a_function():
    """Of core/xla_workarounds/xla_errors.py: mlir.lower_fun and mlir.register_lowering."""
    doubled = _corrected(jax.lax.neg_p, lambda primitive, x, **params: 2 * x)
    actual = jax.jit(lambda x: doubled.bind(x, accuracy=None))(SEVEN)
    np.testing.assert_array_equal(actual, 2 * SEVEN)


def test_an_array_that_is_traced_is_told_from_others():
    """Of core/sharding/padding.py: jax.core.Tracer."""
    traced = []
    jax.jit(lambda x: traced.append(is_traced(x)))(SEVEN)
    assert traced == [True] and not is_traced(SEVEN) and not is_traced(jnp.ones(3))


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this jax has one form of remat")
@pytest.mark.parametrize("is_next", [False, True], ids=["today", "jax_remat3"])
def test_a_shard_map_computed_again_inside_another_in_a_scan(is_next):
    """A program as in layers/stacking/tensor_parallel.py; docs/versions.md describes the limit.

    Where the second case compiles, take REMAT3_CANNOT out of tests/layers/stacking.
    """
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def inner(x):
        again = jax.checkpoint(lambda x: jnp.tanh(x) * jnp.arange(3.0)[None])
        by_b = {"in_specs": P("b"), "out_specs": P("b"), "axis_names": {"b"}}
        return jax.checkpoint(jax.shard_map(again, **by_b))(x)

    def outer(x):
        return jnp.sum(jax.lax.scan(lambda x, _: (inner(x), None), x, length=2)[0])

    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", is_next)
    try:
        with jax.set_mesh(mesh):
            by_a = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
            run = jax.jit(jax.shard_map(jax.grad(outer), **by_a))
            if is_next:  # jax 0.10 has no rule for any shard_map in it.
                with pytest.raises((ValueError, AttributeError), match='"a".*bound|shard_map'):
                    run.lower(jnp.ones((4, 3)))
            else:
                run.lower(jnp.ones((4, 3)))
    finally:
        jax.config.update("jax_remat3", before)
