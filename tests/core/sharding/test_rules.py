"""Rules and strategies: Big Vision's answers on all cases given, and what it leaves open."""

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import linen as nn

from praxis_lite import ConfigError
from praxis_lite.core import (
    Fsdp,
    LogicalPartitioning,
    Replicate,
    ShardDim,
    infer_sharding,
    register_rule,
    rule_shardings,
)
from praxis_lite.core.sharding.devices.axis_types import abstract_mesh_of
from praxis_lite.core.sharding.rule_names import JobMesh, Leaf, Outcome, parsed_rules, rule_text
from tests.support.every_case import assert_each
from tests.support.goldens import golden, trimmed

FILE = "reference/sharding_rules_cases.json"
CASES = golden(FILE)["cases"]
KINDS = {"ValueError": ValueError, "KeyError": KeyError, "error": re.error}
MESH = JobMesh({"replica": 1, "data": 4, "mdl": 2})
PADDED = JobMesh(MESH.axis_sizes, allow_padding=True)


@functools.cache
def trees():
    return golden("reference/sharding_rules_trees.json")


def case_id(case):
    return f"{case['tree']}-{case['mesh']}-{'+'.join(rules for _, rules in case['strategy'])}"


def assert_each_case(check):
    assert_each(check, ((case_id(case), case) for case in CASES))


def test_every_case_of_big_vision():
    assert_each_case(has_its_splits)


def has_its_splits(case):
    tree, mesh = trees()["trees"][case["tree"]], trees()["meshes"][case["mesh"]]
    leaves = [
        Leaf(path, tuple(x["shape"]), x["dtype"], x.get("logical_names"))
        for path, x in tree.items()
    ]
    job_mesh = JobMesh(dict(zip(mesh["axes"], mesh["shape"], strict=True)), case["rules"] or ())
    if "error" in case:
        with pytest.raises(KINDS[case["error"]]) as raised:
            rule_shardings(leaves, case["strategy"], job_mesh)
        assert isinstance(raised.value, ConfigError)
        return
    splits = rule_shardings(leaves, case["strategy"], job_mesh)
    specs = {path: trimmed(split.spec) for path, split in splits.items() if split}
    assert {path: spec for path, spec in specs.items() if spec} == case["specs"]


def test_infer_sharding_has_the_answer_of_big_vision():
    assert_each_case(is_inferred)


def is_inferred(case):
    shapes, mesh = trees()["trees"][case["tree"]], trees()["meshes"][case["mesh"]]
    tree = {}
    for path, x in shapes.items():
        *parents, name = path.split("/")
        leaf, node = jax.ShapeDtypeStruct(x["shape"], x["dtype"]), tree
        for parent in parents:
            node = node.setdefault(parent, {})
        names = x.get("logical_names")
        node[name] = leaf if names is None else nn.LogicallyPartitioned(leaf, tuple(names))
    mesh = abstract_mesh_of(mesh["shape"], mesh["axes"])
    settings = {"logical_axis_rules": case["rules"] or ()}
    if "error" in case:
        with pytest.raises(ConfigError):
            infer_sharding(tree, case["strategy"], mesh, **settings)
        return
    actual = infer_sharding(tree, case["strategy"], mesh, **settings)
    assert all(x.mesh == mesh for x in jax.tree.leaves(actual))
    flat = jax.tree_util.tree_flatten_with_path(actual)[0]
    specs = {jax.tree_util.keystr(p, simple=True, separator="/"): x.spec for p, x in flat}
    assert {path: len(spec) for path, spec in specs.items()} == {
        path: len(x["shape"]) for path, x in shapes.items()
    }
    specs = {path: trimmed(spec) for path, spec in specs.items()}
    assert {path: spec for path, spec in specs.items() if spec} == case["specs"]


def one(shape, rules, job_mesh=MESH, **leaf):
    """Returns the sharding that the rules give to one leaf of float32."""
    return rule_shardings([Leaf("a/b", shape, "float32", **leaf)], [(".*", rules)], job_mesh)["a/b"]


# An independent answer: the four rules by hand, on lists and without a word of why.
def expected_spec(shape, calls, axis_sizes, names, rules, allow_padding):
    spec = [None] * len(shape)
    for kind, axes, value in calls:
        size = math.prod(axis_sizes[axis] for axis in axes)
        if kind == "replicate" and any(spec):
            raise ValueError
        if kind == "fsdp" and math.prod(shape) * 4 > value * 2**20:
            order = [d for d in np.argsort(shape, kind="stable")[::-1] if not spec[d]]
            fits = [d for d in order if shape[d] % size == 0]
            fits += [d for d in order if allow_padding and shape[d] >= size]
            for dim in fits[:1]:
                spec[dim] = axes
        if kind == "shard_dim":
            if abs(value) >= len(shape) or spec[value]:
                raise ValueError
            spec[value] = axes
        if kind == "logical_partitioning" and names:
            for name, axis in rules:
                dim = names.index(name) if name in names else None
                used = [a for entry in spec for a in entry or ()]
                if dim is not None and spec[dim] is None and axis and axis not in used:
                    spec[dim] = (axis,)
        used = [axis for entry in spec for axis in entry or ()]
        if len(used) != len(set(used)):
            raise ValueError
    return [None if e is None else e[0] if len(e) == 1 else list(e) for e in spec]


def random_case(rng):
    shape = tuple(int(size) for size in rng.choice([0, 1, 3, 7, 8, 12, 13, 16], rng.integers(0, 4)))
    names = [str(n) for n in rng.permutation(["embed", "mlp", "heads", "kv"])[: len(shape)]]
    calls = []
    # Names first, as in Big Vision, where they count only then.
    if rng.integers(2):
        calls.append(("logical_partitioning", (), 0))
    for _ in range(rng.integers(1, 3)):
        kind = str(rng.choice(["replicate", "fsdp", "fsdp", "shard_dim"]))
        axes = [("data",), ("mdl",), ("replica", "data")][rng.integers(3)]
        value = int(rng.integers(-2, 3)) if kind == "shard_dim" else float(rng.choice([0, 1e-4]))
        calls.append((kind, () if kind == "replicate" else axes, value))
    return shape, names if rng.integers(2) else None, calls


def text_of(kind, axes, value):
    axis = f"{axes[0]!r}" if len(axes) == 1 else f"{axes!r}"
    return f"{kind}({axis}, {value})" if axes else kind


def test_random_trees_against_the_rules_by_hand():
    rng = np.random.default_rng(7)
    rules = (("mlp", "mdl"), ("embed", "data"), ("kv", None), ("heads", "mdl"))
    seen = {"whole": 0, "split": 0, "error": 0}
    for padding, _ in itertools.product((False, True), range(400)):
        shape, names, calls = random_case(rng)
        text = "|".join(itertools.starmap(text_of, calls))
        job_mesh = JobMesh(MESH.axis_sizes, rules, allow_padding=padding)
        try:
            expected = expected_spec(shape, calls, MESH.axis_sizes, names, rules, padding)
        except ValueError:
            seen["error"] += 1
            with pytest.raises(ConfigError, match="a/b"):
                one(shape, text, job_mesh, logical_axes=names)
            continue
        split = one(shape, text, job_mesh, logical_axes=names)
        assert trimmed(split.spec) == trimmed(expected), (shape, names, text)
        seen["split" if any(expected) else "whole"] += 1
    assert min(seen.values()) > 80, seen


def test_an_empty_tree_and_one_that_no_pattern_matches():
    assert rule_shardings([], [(".*", "replicate")], MESH) == {}
    leaves = [Leaf("a", (8,), "float32"), Leaf("ab", (8,), "float32")]
    # A whole path: "a" is no pattern for "ab".
    splits = rule_shardings(leaves, [("a", "shard_dim('mdl', 0)")], MESH)
    assert splits["ab"] is None and splits["a"].spec == ("mdl",)
    assert rule_shardings(leaves, [], MESH) == {"a": None, "ab": None}


def test_a_leaf_belongs_to_the_first_pattern_only():
    leaves = [Leaf("a/w", (8, 8), "float32"), Leaf("b/w", (8, 8), "float32")]
    splits = rule_shardings(leaves, [("a/.*", "replicate"), (".*/w", "fsdp('mdl', 0)")], MESH)
    assert splits["a/w"].spec == (None, None) and splits["b/w"].spec == (None, "mdl")


def test_a_size_of_exactly_the_limit_stays_whole():
    limit = "fsdp('data', min_weight_size=56)"
    assert one((8, 7), limit).spec == (None, None)
    assert one((8, 8), limit).spec == (None, "data")
    # In elements, and in place of the size in MiB.
    assert one((8, 8), "fsdp('data')").spec == (None, None)
    assert one((2**18,), Fsdp("data", 1)).spec == (None,)
    assert one((2**18 + 4,), Fsdp("data", 1)).spec == ("data",)


def test_with_padding_what_divides_comes_first_and_the_largest_next():
    assert one((13, 8), "fsdp('data', 0)", PADDED).spec == (None, "data")
    assert one((13, 7), "fsdp('data', 0)").spec == (None, None)
    assert one((13, 7), "fsdp('data', 0)", PADDED).spec == ("data", None)
    assert one((7, 7), "fsdp('data', 0)", PADDED).spec == (None, "data")
    # Two of three elements for four devices: a device would have nothing but padding.
    assert one((3, 3), "fsdp('data', 0)", PADDED).spec == (None, None)


def test_a_dim_of_layers_is_split_where_no_other_will_do():
    assert one((16, 8), "fsdp('data', 0)", num_stacked=1).spec == (None, "data")
    assert one((16, 7), "fsdp('data', 0)", num_stacked=1).spec == ("data", None)
    assert one((16, 7), "fsdp('data', 0)", PADDED, num_stacked=1).spec == (None, "data")
    assert one((16, 3), "fsdp('data', 0)", PADDED, num_stacked=1).spec == ("data", None)


@pytest.mark.parametrize(
    ("shape", "rules", "job_mesh", "notes"),
    [
        ((8, 8), "fsdp('data')", MESH, ["fsdp('data'): replicated, size at most 4 MiB"]),
        ((8,), "fsdp('data', min_weight_size=2048)", MESH, ["replicated, size at most 2,048"]),
        ((13, 7), "fsdp('data', 0)", MESH, ["no unsplit dim is divisible by 4 devices"]),
        ((3, 3), "fsdp('data', 0)", PADDED, ["no unsplit dim has at least 4 elements"]),
        ((), "fsdp('data', 0)", PADDED, ["no unsplit dim has at least 4 elements"]),
        ((8,), "shard_dim('mdl', 1, True)", MESH, ["shard_dim('mdl', 1, ignore_ndim_error=True)"]),
        ((8,), "logical_partitioning", MESH, ["logical_partitioning: replicated, no logical"]),
        # Whole is what was asked for, and what another rule splits is not whole.
        ((8,), "replicate", MESH, []),
        ((8, 8), "fsdp('data')|shard_dim('mdl', 1)", MESH, []),
        # But that a large one is not split further is said.
        ((13, 8), "shard_dim('mdl', 1)|fsdp('data', 0)", MESH, ["no unsplit dim is divisible"]),
    ],
)
def test_what_stays_whole_is_reported_with_the_reason(shape, rules, job_mesh, notes):
    actual = one(shape, rules, job_mesh).notes
    assert len(actual) == len(notes)
    assert all(expected in note for expected, note in zip(notes, actual, strict=True)), actual


def test_rules_start_from_what_the_layer_declares():
    split = one((8, 8), "fsdp('mdl', 0)", spec=("data",))
    assert split.spec == ("data", "mdl")
    assert split.decided_by == "fsdp('mdl', min_size_to_shard_mb=0)"
    with pytest.raises(ConfigError, match=r"a/b.*shard_dim\('mdl'.*0\).*0"):
        one((8, 8), "shard_dim('mdl', 0)", spec=("data",))
    with pytest.raises(ConfigError, match=r"a/b.*'data'"):
        one((8, 8), "fsdp('data', 0)", spec=("data",))
    with pytest.raises(ConfigError, match=r"a/b.*`replicate`.*\('data', None\)"):
        one((8, 8), "replicate", spec=("data",))


def test_names_after_other_rules_fill_what_is_free():
    names = JobMesh(MESH.axis_sizes, (("embed", "data"), ("mlp", "mdl"), ("mlp", "replica")))
    split = one(
        (8, 8), "shard_dim('mdl', 0)|logical_partitioning", names, logical_axes=(None, "mlp")
    )
    assert split.spec == ("mdl", "replica")
    with pytest.raises(ConfigError, match="'embed'.*0"):
        one((8, 8), "shard_dim('mdl', 0)|logical_partitioning", names, logical_axes=("embed", None))
    with pytest.raises(ConfigError, match=r"a/b.*3.*\('embed', None, None\).*2.*\(8, 8\)"):
        one((8, 8), "logical_partitioning", names, logical_axes=("embed", None, None))


@register_rule("last_dim")
def last_dim(axis):
    """A user's rule in Big Vision's style: a function that returns one."""

    def rule(spec, leaf, job_mesh):
        return (*spec[:-1], axis)

    return rule


class TooLong:
    def __call__(self, spec, leaf, job_mesh):
        return Outcome((*spec, None))


def test_a_rule_of_the_users_is_named_in_a_string_or_given():
    assert one((8, 8), "last_dim('mdl')|fsdp('data', 0)").spec == ("data", "mdl")
    assert one((8, 8), last_dim("mdl")).decided_by == "last_dim"
    # What it returns is checked as any spec is.
    with pytest.raises(ConfigError, match="a/b.*last_dim.*'model'"):
        one((8, 8), "last_dim('model')")
    with pytest.raises(ConfigError, match="a/b.*TooLong.*3.*2"):
        one((8, 8), TooLong())
    register_rule("last_dim")(last_dim)  # Loaded anew.
    with pytest.raises(ConfigError, match="'fsdp'"):
        register_rule("fsdp")(last_dim)


def test_rules_are_strings_objects_and_nests_of_both():
    expected = (ShardDim("mdl", -1), Fsdp("data", 0), Replicate(), LogicalPartitioning())
    text = """ shard_dim("mdl", dim=-1) | fsdp(axis='data', min_size_to_shard_mb=0)|replicate()"""
    assert parsed_rules(f"{text}|logical_partitioning") == expected
    assert parsed_rules([text, [LogicalPartitioning()]]) == expected
    assert parsed_rules(json.loads(json.dumps([["replicate"]]))) == (Replicate(),)
    # Written as a strategy has them, they are read again.
    assert parsed_rules("|".join(map(rule_text, expected))) == expected


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("fdsp('data')", r"'fdsp'.*fsdp\?"),
        ("fsdp('data'", r""""fsdp\('data'" .*line 1"""),
        ("", "'' .*<unknown>"),
        ("fsdp()", r"'fsdp\(\)'.*'axis'"),
        ("fsdp('data', size=3)", "fsdp.* 'size'"),
        ("fsdp(())", r"fsdp\(\(\)\).*axis.*\(\);"),
        ("fsdp('data', '4')", r"fsdp\('data'.*size.* '4';"),
        ("shard_dim('data', '0')", r"shard_dim\('data'.*dim.* '0';"),
        ("fsdp(open('x'))", r"open\('x'\).*malformed.*Call"),
        ("os.remove('x')", r"os\.remove\('x'\)"),
        ("fsdp('data') and replicate", r"fsdp\('data'\) and replicate"),
        (7, "^7 .*shard_dim"),
        ({"fsdp": "data"}, r"^\{'fsdp': 'data'\} .*shard_dim"),
    ],
)
def test_a_string_that_is_no_rule(rules, message):
    with pytest.raises(ConfigError, match=message):
        parsed_rules(rules)


def test_an_axis_that_the_mesh_has_not_is_named_with_the_path():
    with pytest.raises(ConfigError, match=r"a/b.*fsdp\('date'\).*data") as raised:
        one((2,), "fsdp('date')")
    assert isinstance(raised.value, KeyError)  # As in Big Vision.
    with pytest.raises(ConfigError, match="a/b.*shard_dim.*data"):
        one((8,), "shard_dim('date', 0)")


@pytest.mark.parametrize("strategy", [[".*"], [(".*",)], [("a", "replicate", 3)], [7]])
def test_an_entry_that_is_no_pair(strategy):
    with pytest.raises(ConfigError, match=f"strategy.* {re.escape(repr(strategy[0]))};"):
        rule_shardings([], strategy, MESH)


ALONE = """
from praxis_lite.core import MeshConfig, infer_sharding, make_mesh
import numpy as np
mesh = make_mesh(MeshConfig(ici_mesh_shape=(1,), axis_names=("data",)))
rules = [(".*", 'fsdp("data", min_size_to_shard_mb=0)')]
print(infer_sharding({"w": np.zeros((8, 8))}, rules, mesh)["w"].spec)
"""


@pytest.mark.slow
def test_the_rules_that_there_are_are_known_to_a_program_that_imports_nothing_else():
    result = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert "'data'" in result.stdout, result.stderr
