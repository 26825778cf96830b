"""Refuses weights that are frozen before anything has trained them: adapters over noise."""

import math
from collections.abc import Collection, Mapping, Sequence

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.core.learner.weight_groups import WeightGroups
from praxis_lite.core.sharding.weight_spec import WeightSpec, spec_items
from praxis_lite.layers.whole_model.adapters import ADAPTER_WEIGHTS

Path = tuple[str, ...]
# Weights next to a frozen one that are this many times smaller adapt it.
_THIN = 2


def check_frozen_base(
    groups: WeightGroups, loaded: Collection[str], *, may_be_new: bool
) -> None:
    """Checks that the weights that a new state freezes come from somewhere.

    It is refused where adapters, or other thin weights, are trained next to a frozen matrix that
    is drawn; and where more than half of all parameters are such matrices. A vector may be anything
    that is counted or set, such as a correction of loads.

    Args:
      groups: of the learner that is bound to the weights.
      loaded: paths in a TrainState, "mdl_vars/params/...", of what is not drawn.
      may_be_new: run.frozen_may_be_new.

    Raises:
      ConfigError: names these weights.
    """
    if may_be_new:
        return
    loaded = {path.removeprefix("mdl_vars/params/") for path in loaded}
    specs = dict(spec_items(groups.weight_specs))
    trained = {path for group in groups.by_name.values() for path in group.paths}
    new = {
        path: _size(spec) for path, spec in specs.items()
        if path not in trained and "/".join(path) not in loaded and _is_matrix(spec)
    }
    beside: dict[Path, list[Path]] = {}
    for path in trained:
        beside.setdefault(path[:-1], []).append(path)
    adapted = [path for path in new if _is_adapted(path, new[path], beside, specs)]
    is_most = sum(new.values()) > sum(map(_size, specs.values())) / 2
    if not adapted and not is_most:
        return
    names = ["/".join(path) for path in adapted or new]
    what = "Adapters are" if adapted else "Few weights are"
    raise ConfigError(
        f"{what} to be trained over weights that are frozen and newly drawn, so they would "
        f"stay noise: {len(names)} weights, {few(names, 5)}. Give trained weights: --set "
        "run.init_from_huggingface=DIRECTORY (HF_DIR=DIRECTORY in the experiments huggingface.*), "
        "or run.init_from_checkpoint_rules; train them too (task.learner.bprop_variable_inclusion "
        "and .bprop_variable_exclusion say what is frozen); or, if noise is what they are for, say "
        "--set run.frozen_may_be_new=True."
    )


def _is_adapted(
    path: Path, size: int, beside: Mapping[Path, Sequence[Path]], specs: Mapping[Path, WeightSpec]
) -> bool:
    local = beside.get(path[:-1], ())
    if any(item[-1] in ADAPTER_WEIGHTS for item in local):
        return True
    return bool(local) and _THIN * sum(_size(specs[element]) for element in local) < size


def _size(spec: WeightSpec) -> int:
    return math.prod(spec.shape)


def _is_matrix(spec: WeightSpec) -> bool:
    return len(spec.shape) - len(spec.stack_shape) >= 2
