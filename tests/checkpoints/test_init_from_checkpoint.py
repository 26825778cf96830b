"""A job that starts from other checkpoints: what comes from where, and what is refused."""

import dataclasses
import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import CheckpointLoadingRules, ConfigError
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.init_from_checkpoint import FromCheckpoints
from praxis_lite.checkpoints.init.initial_state import begun
from praxis_lite.checkpoints.init.loading_rules import LOAD_ALL
from praxis_lite.checkpoints.init.planning import plan_init
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import MeshConfig, Partitioner, TrainState, make_mesh
from praxis_lite.layers import adapted
from tests.checkpoints.test_checkpoints import (
    partitioner_on,
    placed,
    random_true_state,
    tiny_config,
)

SOFTMAX = "softmax/logits_ffn/linear/w"
BLOCKS = "transformer/blocks"
EMA = "task.learner.ema_decay=0.9"
POSITIONS = "task.model.max_seq_length=37"  # A model with a weight more.


@functools.cache
def partitioner(shape=(1, 2, 4), *settings):
    """Returns Tiny on a mesh; the source's is (1, 4, 2), and neither divides 7, 11 or 257."""
    return partitioner_on(make_mesh(MeshConfig(ici_mesh_shape=shape)), *settings)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A job's directory with steps 13 and 17 of Tiny with averages, and the state of 17."""
    saving = partitioner((1, 4, 2), EMA)
    true_state = random_true_state(saving.layout)
    older = jax.tree.map(lambda x: x + np.ones_like(x), true_state)
    job = tmp_path_factory.mktemp("source")
    with Checkpoints(job / "checkpoints", saving=SaveSettings(max_to_keep=3)) as checkpoints:
        for step, state in ((13, older), (17, true_state)):
            state = placed(state, saving.layout, saving.mesh)
            checkpoints.save(step, state, saving.layout, {})
    return job, true_state


def by_path(state):
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def init(rules, target):
    """Returns a new state by path without its padding, having checked its shards and padding."""
    source = FromCheckpoints(rules, target.layout)
    state, plan = begun(target, target.key(3), source, lambda line: None), source.plan
    assert jax.tree.structure(state) == jax.tree.structure(target.layout.shapes)
    actual, leaves = {}, {leaf.path: leaf for leaf in target.layout.leaves()}
    placed_as = by_path(target.layout.abstract(target.mesh))
    for path, x in by_path(state).items():
        abstract = placed_as[path]
        assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype), path
        assert x.sharding.is_equivalent_to(abstract.sharding, x.ndim), path
        cut = tuple(map(slice, leaves[path].shape))
        array = np.array(x)
        actual[path] = array[cut].copy()
        array[cut] = 0
        assert not array.any(), f"padding of {path} is not zero"
    return actual, plan


def rules(**settings):
    return CheckpointLoadingRules(**{"load_rules": [LOAD_ALL], **settings})


def new_state(target):
    """Returns the arrays that `Partitioner.init` draws, by path, without padding."""
    leaves = {leaf.path: leaf for leaf in target.layout.leaves()}
    arrays = by_path(target.init(target.key(3)))
    cuts = {path: tuple(map(slice, leaf.shape)) for path, leaf in leaves.items()}
    return {path: np.asarray(x)[cuts[path]] for path, x in arrays.items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(actual[path], x, err_msg=path)


def test_weights_come_from_the_checkpoint_and_slots_from_the_weights(source):
    job, true_state = source
    target = partitioner((1, 2, 4), EMA)
    actual, plan = init({str(job): rules()}, target)
    expected = {f"mdl_vars/{path}": x for path, x in by_path(true_state.mdl_vars).items()}
    for path, x in by_path(true_state.opt_states).items():
        weight = by_path(true_state.mdl_vars["params"]).get(path.removeprefix("ema/"))
        is_average = path.startswith("ema/")
        expected[f"opt_states/{path}"] = weight if is_average else np.zeros_like(x)
    assert_equal(actual, {"step": 0, **expected})
    assert plan.summary()[0].startswith(f"mdl_vars: 12 from step 17 in {job}/checkpoints by '(.*)'")


@pytest.mark.slow
def test_what_no_rule_matches_stays_as_it_is_drawn(source):
    job, true_state = source
    target = partitioner((1, 2, 4), POSITIONS)
    swapped = "(.*/self_attention)/(?:query)/w"
    item = rules(
        load_rules=[(swapped, "{}.key.w"), (r"params/transformer/(.*)", "params/transformer/{}")],
        ignore_rules=[r".*/b$", ".*layer_norm"],
        directory=str(job),
        step=13,
    )
    actual, plan = init({"pretrained": item}, target)
    expected = new_state(target)
    for path, x in by_path(true_state.mdl_vars["params"]).items():
        if path.startswith(BLOCKS) and not path.endswith("/b") and "layer_norm" not in path:
            expected[f"mdl_vars/params/{path}"] = x + 1  # Step 13's.
    expected[f"mdl_vars/params/{BLOCKS}/self_attention/query/w"] = expected[
        f"mdl_vars/params/{BLOCKS}/self_attention/key/w"
    ]
    assert_equal(actual, expected)
    text = "\n".join(plan.summary())
    assert re.search(
        rf"^mdl_vars: 1 from step 13 in \S+ by .*: params/{BLOCKS}/self_attention/query/w <- "
        rf"params/{BLOCKS}/self_attention/key/w$",
        text,
        re.M,
    )
    assert re.search(r"^mdl_vars: 5 from step 13 in .* and 2 more$", text, re.M)
    assert re.search(
        r"^mdl_vars: 7 initialized at random: params/final_ln/scale, .* and 4 more$", text, re.M
    )
    assert re.search(r"^opt_states: \d+ initialized from the weights: ", text, re.M)
    assert text.endswith("\nstep: 0")
    assert f"params/{SOFTMAX}: new" in plan.lines()
    assert f"params/{BLOCKS}/ff_layer/ffn_layer1/linear/w" in plan.lines()


def test_of_two_checkpoints_the_first_wins(source):
    job, true_state = source
    first = rules(load_rules=[("params/softmax/(.*)", "params/softmax/{}")], step=13)
    step_17 = job / "checkpoints" / "17"
    actual, plan = init(
        {f"{job}/checkpoints": first, str(step_17): rules(load_step=True)}, partitioner()
    )
    weights = by_path(true_state.mdl_vars)
    for path, x in weights.items():
        expected = x + 1 if "softmax" in path else x
        np.testing.assert_array_equal(actual[f"mdl_vars/{path}"], expected, err_msg=path)
    assert actual["step"] == 17 and plan.summary()[-1] == f"step: 17 of {job}/checkpoints"


def test_a_state_is_loaded_whole(source):
    job, true_state = source
    whole = rules(load_opt_states=True, load_step=True)
    actual, plan = init({str(job): whole}, partitioner((1, 2, 4), EMA))
    assert_equal(actual, by_path(TrainState(17, true_state.mdl_vars, true_state.opt_states)))
    assert not any(" new" in line for line in plan.summary())


@pytest.mark.slow
def test_slots_are_loaded_where_they_agree(source):
    """The slots of a renamed weight too; where a group's are, the group's counts with them."""
    job, true_state = source
    item = rules(
        load_rules=[(r"(.*)/query/w", "{}/value/w"), (r"(.*)/ff_layer/(.*)", "{}/ff_layer/{}")],
        partial_load_opt_states=True,
    )
    target = partitioner()  # Without averages.
    actual, plan = init({str(job): item}, target)
    expected = new_state(target)
    slots = by_path(true_state.opt_states)
    for path in expected:
        if not path.startswith("opt_states/slots/stack_2"):
            continue
        saved = path.removeprefix("opt_states/").replace("/query/", "/value/")
        if "ff_layer" in path or "/query/" in path or path.endswith("/count"):
            expected[path] = slots[saved]
    # Else the rate that is reported would not be the one that the loaded counts stand for.
    assert slots["num_updates"] != expected["opt_states/num_updates"]
    expected["opt_states/num_updates"] = slots["num_updates"]
    opt_states = {path: x for path, x in actual.items() if path.startswith("opt_states/")}
    assert_equal(opt_states, {p: x for p, x in expected.items() if p.startswith("opt_states/")})
    assert any(line.startswith("opt_states: 15 from step 17") for line in plan.summary())


@pytest.mark.parametrize(
    "settings",
    [{"load_ema_states": True}, {"load_rules": [("params/(.*)", "ema/params/{}")]}],
    ids=["setting", "template"],
)
def test_weights_come_from_moving_averages(source, settings):
    job, true_state = source
    actual, _ = init({str(job): rules(**settings)}, partitioner())
    averages = by_path(true_state.opt_states["ema"])
    expected = {f"mdl_vars/params/{path}": x for path, x in averages.items()}
    assert_equal({path: x for path, x in actual.items() if path.startswith("mdl_vars/")}, expected)


@pytest.fixture(scope="module")
def half_source(tmp_path_factory):
    """A job's directory with step 5 of Tiny in bfloat16, and its values."""
    saving = partitioner((1, 4, 2))

    def halved(x):
        return jax.ShapeDtypeStruct(x.shape, "bfloat16" if x.dtype == jnp.float32 else x.dtype)

    layout = dataclasses.replace(saving.layout, shapes=jax.tree.map(halved, saving.layout.shapes))
    true_state = random_true_state(saving.layout)
    state = placed(true_state, layout, saving.mesh)
    job = tmp_path_factory.mktemp("half")
    with Checkpoints(job / "checkpoints", saving=SaveSettings()) as checkpoints:
        checkpoints.save(5, state, layout, {})
    return job, jax.tree.map(lambda x, to: x.astype(to.dtype), true_state, layout.shapes)


def test_named_variables_are_cast_and_told(half_source):
    job, half = half_source
    item = rules(cast_rules=["params/", "opt_states/slots/"], partial_load_opt_states=True)
    actual, plan = init({str(job): item}, partitioner())
    slots = {"slots": half.opt_states["slots"]}
    saved = by_path({"mdl_vars": half.mdl_vars, "opt_states": slots})
    for path, x in saved.items():
        assert actual[path].dtype == (x.dtype if x.dtype != jnp.bfloat16 else jnp.float32), path
        np.testing.assert_array_equal(actual[path], x.astype(actual[path].dtype), err_msg=path)
    casts = [line for line in plan.lines() if line.endswith(" (cast from bfloat16)")]
    assert f"params/{SOFTMAX} (cast from bfloat16)" in casts
    assert len(casts) == sum(x.dtype == jnp.bfloat16 for x in saved.values())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {},
            rf"params/{SOFTMAX}.*float32\[7, 257\].*params/{SOFTMAX}.*"
            r"bfloat16\[7, 257\].*cast_rules",
        ),
        ({"cast_rules": ["params/final_ln/.*"]}, rf"{SOFTMAX}.*float32.*cast_rules"),
        ({"cast_rules": [".*", "params/sofmax/.*"]}, r"'params/sofmax/\.\*'"),
    ],
    ids=["none", "others", "typo"],
)
def test_another_dtype_is_refused_where_no_cast_is_named(half_source, settings, words):
    job, _ = half_source
    item = rules(load_rules=[("(params/softmax/.*)", "{}")], **settings)
    with pytest.raises(ConfigError, match=words):
        plan_init(partitioner().layout, {str(job): item})


def test_whole_numbers_are_not_cast(source):
    """A count that wraps would be another schedule."""
    job, _ = source
    layout = partitioner((1, 2, 4), EMA).layout
    counts = {**layout.shapes.opt_states, "num_updates": jax.ShapeDtypeStruct((), "int8")}
    shapes = dataclasses.replace(layout.shapes, opt_states=counts)
    item = rules(load_opt_states=True, cast_rules=[".*"])
    with pytest.raises(ConfigError, match=r"num_updates.*int8\[\].*int32\[\]"):
        plan_init(dataclasses.replace(layout, shapes=shapes), {str(job): item})


@pytest.mark.slow
def test_a_lora_starts_as_its_base(source):
    job, true_state = source
    config, lora = tiny_config(), r".*/lora_[ab]$"
    block = config.task.model.transformer_layer_tpl
    block.tr_atten_tpl = fdl.Partial(adapted, base_tpl=block.tr_atten_tpl, rank=5)
    config.task.learner.bprop_variable_inclusion = lora
    built = fdl.build(config)
    target = Partitioner(built.task, make_mesh(MeshConfig(ici_mesh_shape=(1, 2, 4))))
    initial = FromCheckpoints({str(job): rules(ignore_rules=[lora])}, target.layout)
    state = begun(target, target.key(3), initial, lambda line: None)
    slots = [path for path in by_path(state.opt_states["slots"]) if not path.endswith("count")]
    assert len(slots) == 16 and all(re.fullmatch(lora, path) for path in slots)
    base = partitioner((1, 1, 1), EMA)
    inputs = next(built.datasets["train"].batches())
    expected = base.eval_step(
        placed(true_state, base.layout, base.mesh).mdl_vars, base.global_batch(inputs)
    )
    actual = target.eval_step(state.mdl_vars, target.global_batch(inputs))
    np.testing.assert_allclose(actual["loss"][0], expected["loss"][0], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({}, (POSITIONS,), r"params/position_emb/\S+, .*params/position_emb/\S+,"),
        (
            {"load_rules": [(r"params/(softmax.*)", "params/lm/{}")]},
            (),
            rf"params/lm/{SOFTMAX}, .* params/{SOFTMAX}",
        ),
        (
            # 7 and 8 are both stored as 8: the shapes on disk tell nothing.
            {"load_rules": [(r"params/(softmax.*)", "params/{}")]},
            ("task.model.model_dims=8",),
            rf"params/{SOFTMAX}.*float32\[8, 257\].*params/{SOFTMAX}.*float32\[7, 257\]",
        ),
        (
            {"load_rules": [LOAD_ALL, ("params/sofmax/(.*)", "params/{}")]},
            (),
            r"'params/sofmax/\(\.\*\)'.*params/final_ln",
        ),
        (
            {"load_rules": [(r"softmax/(.*)", "params/softmax/{}")]},
            (),
            r"'softmax/\(\.\*\)'.*'params/'",
        ),
        (
            {"load_rules": [LOAD_ALL, (r"params/softmax/(.*)", "params/{}")]},
            (),
            rf"params/softmax/.*\(params/{SOFTMAX}\)",
        ),
        ({"ignore_rules": [".*lora_"]}, (), r"'\.\*lora_'"),
        (
            {"load_opt_states": True},
            (),
            "opt_states/ema/final_ln/scale",
        ),
        (
            {"step": 14},
            (),
            "14.*13, 17",
        ),
        ({"step": "best"}, (), "best.*13, 17"),
    ],
    ids=[
        "missing",
        "renamed",
        "shape",
        "typo",
        "collection",
        "shadowed",
        "ignored",
        "slots",
        "step",
        "best",
    ],
)
def test_rules_that_do_not_fit_are_refused(source, settings, model, words):
    job, _ = source
    with pytest.raises(ConfigError, match=words):
        plan_init(partitioner((1, 2, 4), *model).layout, {str(job): rules(**settings)})


def test_rules_may_match_nothing_where_they_are_told_so(source):
    job, _ = source
    item = rules(load_rules=[("params/sofmax/(.*)", "{}")], safe_load=False)
    assert plan_init(partitioner().layout, {str(job): item}).sources == {}


def test_averages_that_are_not_there_are_refused(tmp_path):
    saving = partitioner()
    with Checkpoints(tmp_path, saving=SaveSettings(max_to_keep=1)) as checkpoints:
        state = placed(random_true_state(saving.layout), saving.layout, saving.mesh)
        checkpoints.save(3, state, saving.layout, {})
    with pytest.raises(ConfigError, match=r"\(opt_states/ema\)"):
        plan_init(saving.layout, {str(tmp_path): rules(load_ema_states=True)})


def test_an_empty_directory_says_what_to_run_first(tmp_path):
    item = rules(directory=str(tmp_path / "docs"), experiment="lm.PyDocs")
    words = (
        rf" {tmp_path}/docs to .* praxis train lm.PyDocs --job_log_dir={tmp_path}/docs; .*--set "
        r"run.init_from_checkpoint_rules.pretrained.directory=DIR"
    )
    with pytest.raises(ConfigError, match=words):
        plan_init(partitioner().layout, {"pretrained": item})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"load_rules": LOAD_ALL}, r"CheckpointLoadingRules\.load_rules"),
        ({"load_rules": [("params/(.*", "{}")]}, r"'params/\(\.\*'"),
        ({"load_rules": [("params/.*", "params/{}")]}, r"'params/\{\}'.*'params/"),
        ({"ignore_rules": ".*lora_"}, r"ignore_rules.*'\.\*lora_'"),
        ({"cast_rules": ".*"}, r"cast_rules.*'\.\*'"),
        ({"load_opt_states": True, "partial_load_opt_states": True}, "load_opt.*partial_load"),
    ],
    ids=["pair", "regex", "template", "ignore", "cast", "both"],
)
def test_rules_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        rules(**settings)
