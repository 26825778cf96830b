"""What Flax Linen's boxes declare, alone, in stacks and beside a job's rules, case by case."""

import pytest
from flax import linen as nn

from praxis_lite.models import LinenModel
from tests.support.declared_splits import (
    refused,
    splits_of,
    stacks_of,
)

D, LAYERS, STAGES = 7, 3, 2  # Model dims; no axis divides them.
INIT = nn.initializers.lecun_normal()
RULES = {"logical_axis_rules": (("embed", "data"), ("mlp", "mdl"))}


def logical(*names, **settings):
    return nn.with_logical_partitioning(INIT, names, **settings)


def axes(*entries):
    return nn.with_partitioning(INIT, entries)


def rules(*pairs, **settings):
    return {"logical_axis_rules": (*RULES["logical_axis_rules"], *pairs), **settings}


class Net(nn.Module):
    """A dense layer, alone or in stacks.

    Attributes:
      kernel_init: draws its kernel [D, D].
      names: of the stacks, outermost first; "": Flax is told of no name.
      transform: "scan" or "vmap".
    """

    kernel_init: nn.initializers.Initializer = INIT
    names: tuple[str | None, ...] = ()
    transform: str = "scan"
    is_remat: bool = False
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        init = self.kernel_init

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _=None):
                x = nn.tanh(nn.Dense(D, use_bias=False, kernel_init=init, name="dense")(x))
                return x, None

        layer = nn.remat(Layer) if self.is_remat else Layer
        for name, length in zip(reversed(self.names), (LAYERS, STAGES), strict=False):
            lifted = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}}
            if name != "":
                lifted["metadata_params"] = {nn.PARTITION_NAME: name}
            if self.transform == "scan":
                layer = nn.scan(layer, length=length, **lifted)
            else:
                layer = nn.vmap(layer, in_axes=None, axis_size=length, **lifted)
        x, _ = layer(name="layer")(x, None)
        return x if self.transform == "scan" or not self.names else x.sum(0)


def net(init=INIT, *names, **settings):
    return LinenModel(Net(init, names, **settings), {"x": (2, D)})


E_M, D_M = logical("embed", "mlp"), axes("data", "mdl")
FSDP = {"strategy": [(".*", 'fsdp("data", 0)')]}
# By case: the model, the job's rules, the split of the kernel, how an optimizer sees it.
DECIDED = {
    "names": (net(E_M), RULES, ("data", "mdl"), "unstacked"),
    "axes": (net(D_M), {}, ("data", "mdl"), "unstacked"),
    "axes, short": (net(axes("data")), {}, ("data", None), "unstacked"),
    "axes, two of a dim": (
        net(axes(("replica", "data"), "mdl")),
        {},
        (("replica", "data"), "mdl"),
        "unstacked",
    ),
    "axes, none": (net(axes(None, None)), {}, (None, None), "unstacked"),
    "own rules": (
        net(logical("embed", "mlp", rules=(("mlp", "data"),))),
        RULES,
        (None, "data"),
        "unstacked",
    ),
    "remat": (net(E_M, is_remat=True), RULES, ("data", "mdl"), "unstacked"),
    # A scan's dim is layers, whatever its name is.
    "scan of layers": (net(E_M, "layers"), RULES, (None, "data", "mdl"), "stack_3"),
    "scan without a name": (net(E_M, None), RULES, (None, "data", "mdl"), "stack_3"),
    "scan of blocks, with a rule": (
        net(E_M, "blocks"),
        rules(("blocks", None)),
        (None, "data", "mdl"),
        "stack_3",
    ),
    "scan of blocks, split": (
        net(E_M, "blocks"),
        rules(("blocks", "replica")),
        ("replica", "data", "mdl"),
        "stack_3",
    ),
    "scan of blocks, told": (
        net(E_M, "blocks"),
        rules(stack_axis_names=("blocks",)),
        (None, "data", "mdl"),
        "stack_3",
    ),
    "scan of blocks, left whole": (
        net(E_M, "blocks"),
        rules(unmapped_logical_axes="replicate"),
        (None, "data", "mdl"),
        "stack_3",
    ),
    "scan of layers, split last": (
        net(E_M, "layers"),
        rules(("layers", "data")),
        (None, "data", "mdl"),
        "stack_3",
    ),
    "scan of a short one": (net(logical("mlp"), "layers"), RULES, (None, "mdl", None), "stack_3"),
    "scan of remat": (net(E_M, "layers", is_remat=True), RULES, (None, "data", "mdl"), "stack_3"),
    "scan of axes": (net(D_M, None), {}, (None, "data", "mdl"), "stack_3"),
    "scan along an axis": (net(axes(None, "mdl"), "data"), {}, ("data", None, "mdl"), "stack_3"),
    "scan without boxes": (net(INIT, ""), RULES, (None, None, None), "stack_3"),
    "scan of a scan": (
        net(E_M, "stages", "layers"),
        rules(("stages", "replica")),
        ("replica", None, "data", "mdl"),
        "stack_2x3",
    ),
    "scan of a scan of axes": (net(D_M, None, None), {}, (None, None, "data", "mdl"), "stack_2x3"),
    "vmap": (net(E_M, "layers", transform="vmap"), RULES, (None, "data", "mdl"), "stack_3"),
    "scan of a later dim": (net(E_M, "layers", axis=1), RULES, ("data", None, "mdl"), "unstacked"),
    # Rules by path start from axes; names count where they are asked.
    "fsdp beside axes": (net(axes(None, "mdl")), FSDP, ("data", "mdl"), "unstacked"),
    "fsdp beside a scan's axes": (
        net(axes(None, "mdl"), None),
        FSDP,
        (None, "data", "mdl"),
        "stack_3",
    ),
    "fsdp without boxes": (net(), FSDP, (None, "data"), "unstacked"),
    "fsdp in place of names": (net(E_M), RULES | FSDP, (None, "data"), "unstacked"),
    "fsdp after names": (
        net(logical(None, "mlp"), "layers"),
        RULES | {"strategy": [(".*", 'logical_partitioning|fsdp("data", 0)')]},
        (None, "data", "mdl"),
        "stack_3",
    ),
    "a rule for a scan's dim": (
        net(axes(None, "mdl"), None),
        {"strategy": [(".*kernel", 'shard_dim("data", 0)')]},
        ("data", None, "mdl"),
        "stack_3",
    ),
}


@pytest.mark.parametrize("case", DECIDED)
def test_a_kernel_splits_as_its_box_its_stacks_and_the_rules_say(case):
    model, declared, expected, stack = DECIDED[case]
    assert splits_of(model, **declared) == {"layer/dense/kernel": expected}
    assert stacks_of(model, **declared) == {"layer/dense/kernel": stack}


WRONG = {
    "a stack's name without a rule": (
        net(E_M, "blocks"),
        RULES,
        ["layer/dense/kernel", "'blocks'", "('blocks', AXES)"],
    ),
    "a name beside axes": (
        net(D_M, "layers"),
        {},
        ["layer/dense/kernel", "'layers'", "'mdl'", "Fix the mapping"],
    ),
    "Flax wants a name": (net(E_M, ""), RULES, ["Net", '"partition_name" is not specified']),
    "more names than dims": (
        net(logical("embed", "mlp", "kv"), "layers"),
        RULES,
        ["params/layer/dense/kernel", "'kv'", "3 entries", "2 dims", "Remove 1"],
    ),
    "an unknown axis": (net(axes("date")), {}, ["layer/dense/kernel", "'date'", "mean data"]),
    "an axis twice": (net(axes("mdl", "mdl")), {}, ["layer/dense/kernel", "'mdl' twice"]),
    "a name twice": (
        net(logical("mlp", "mlp"), "layers"),
        RULES,
        ["layer/dense", "'mlp'", "more than once"],
    ),
    "axes, too many": (net(axes("data", None, "mdl"), None), {}, ["3 entries", "2 dims"]),
    "no entry for an axis": (net(axes("data", 0.5)), {}, ["layer/dense/kernel", "0.5", "index"]),
    "an axis of the stack": (net(D_M, "data"), {}, ["layer/dense/kernel", "'data' twice"]),
    "replicate what is split": (
        net(D_M),
        {"strategy": [(".*", "replicate")]},
        ["`replicate`", "('data', 'mdl')"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_says_what_was_found_and_wanted(case):
    model, declared, words = WRONG[case]
    with refused(words):
        splits_of(model, **declared)
