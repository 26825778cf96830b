"""Detects weights that are frozen although they are random, such as the base of an adapter."""

import math
from collections.abc import Collection, Mapping, Sequence

from praxis_lite.core.errors import ConfigError, first_few
from praxis_lite.core.learner.weight_groups import WeightGroups
from praxis_lite.core.sharding.weight_spec import WeightSpec, spec_items
from praxis_lite.layers.whole_model.adapters import ADAPTER_WEIGHTS

Path = tuple[str, ...]
# Trained weights in the same module as a frozen weight are treated as its adapters if they are
# smaller than the frozen weight by this factor.
_ADAPTER_SIZE_RATIO = 2


def check_frozen_base(groups: WeightGroups, loaded: Collection[str], *, may_be_new: bool) -> None:
    """Checks that the frozen weights of a new state are pretrained.

    An error is raised if adapters or other much smaller weights are trained together with a frozen
    random matrix, or if frozen random matrices contain more than half of all parameters. Vectors
    are ignored, because they may be counters or settings, such as a load-balancing bias.

    Args:
      groups: The optimizer groups of the learner, which include the frozen weights.
      loaded: Paths of the loaded arrays in a TrainState, such as "mdl_vars/params/...".
      may_be_new: The setting run.frozen_may_be_new, which disables this check.

    Raises:
      ConfigError: Frozen weights are random. The message lists them.
    """
    if may_be_new:
        return
    loaded = {path.removeprefix("mdl_vars/params/") for path in loaded}
    specs = dict(spec_items(groups.weight_specs))
    trained = {path for group in groups.by_name.values() for path in group.paths}
    # Sizes of the frozen matrices that are random.
    new = {
        path: _size(spec)
        for path, spec in specs.items()
        if path not in trained and "/".join(path) not in loaded and _is_matrix(spec)
    }
    # Adapters are in the same module as the weight that they adapt.
    trained_by_module: dict[Path, list[Path]] = {}
    for path in trained:
        trained_by_module.setdefault(path[:-1], []).append(path)
    adapted = [
        path
        for path in new
        if _has_adapters(new[path], trained_by_module.get(path[:-1], ()), specs)
    ]
    is_majority = sum(new.values()) > sum(map(_size, specs.values())) / 2
    if not adapted and not is_majority:
        return
    names = ["/".join(path) for path in adapted or new]
    trained_part = "Adapters" if adapted else "Few weights"
    raise ConfigError(
        f"{trained_part} would be trained over weights that are frozen and random: {len(names)} "
        f"weights, {first_few(names, 5)}. Load trained weights with --set "
        "run.init_from_huggingface=DIRECTORY (HF_DIR=DIRECTORY in the experiments huggingface.*) "
        "or run.init_from_checkpoint_rules; train these weights too "
        "(task.learner.bprop_variable_inclusion and .bprop_variable_exclusion); or, if they should "
        "be random, add --set run.frozen_may_be_new=True."
    )


def _has_adapters(size: int, trained: Sequence[Path], specs: Mapping[Path, WeightSpec]) -> bool:
    """Returns whether a module's trained weights adapt its frozen weight of the given size."""
    if any(path[-1] in ADAPTER_WEIGHTS for path in trained):
        return True
    trained_size = sum(_size(specs[path]) for path in trained)
    return bool(trained) and _ADAPTER_SIZE_RATIO * trained_size < size


def _size(spec: WeightSpec) -> int:
    return math.prod(spec.shape)


def _is_matrix(spec: WeightSpec) -> bool:
    return len(spec.shape) - len(spec.stack_shape) >= 2
