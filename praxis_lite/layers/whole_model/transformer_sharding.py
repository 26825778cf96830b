"""Applies a sharding preset to all layers in a model's config."""

import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl
from fiddle import daglish

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.core.sharding.split_dims import DimSplit
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.embedding.positional_embeddings import (
    PositionalEmbedding,
    TrainablePositionalEmbedding,
)
from praxis_lite.layers.stacking.repeats import Repeat
from praxis_lite.layers.transformer.transformers import Transformer
from praxis_lite.layers.whole_model.sharding_presets import (
    ACTIVATION_DIMS,
    PRESET_SETTINGS,
    REPLICATED_LAYERS,
    SHARDING_PRESETS,
    WEIGHT_DIMS,
)

Preset = Mapping[str, DimSplit]
# Layers without sharding settings. They become configs, so that --set can change their settings.
_CONTAINERS = (Repeat, Transformer)


def set_sharding_params(
    model: fdl.Buildable, preset: str | Preset = "fsdp+tensor"
) -> fdl.Buildable:
    """Applies a sharding preset to the config of a model or layer in place, and returns the config.

    The preset sets the sharding of every layer that names its dims (`BaseLayer.splits`), including
    layers from default templates. Other settings are not changed. If the preset has no entry
    "expert", experts are not changed; if the entry is None, experts are replicated. Logs a warning,
    once per class, if a layer has weights but neither its class nor the config defines their
    sharding, and if the model contains no layer of this library.

    Shard batches over `preset["batch"]`, for example with the inputs_split_mapping {"map_2d":
    (preset["batch"], None)} for ids. With an inputs_split_mapping of None, batches are sharded over
    all devices.

    Args:
      model: The config.
      preset: A name in SHARDING_PRESETS, or a dict from dim names to the mesh axes (one, a tuple,
        or None) over which these dims are sharded. Dims that are missing are replicated.

    Raises:
      ConfigError: The preset or a dim name is unknown, or two dims of an array get the same axis.
    """
    preset = _resolve(preset)
    unsharded: dict[str, str] = {}
    _set_splits(model, preset, False, unsharded)
    if not any(axes for name, axes in preset.items() if not name.endswith("batch")):
        return model  # The preset does not shard any weight.
    for name, fields in unsharded.items():
        logging.getLogger(__name__).warning(
            "set_sharding_params does not change %s, which is replicated, because the preset does "
            "not define its sharding. Set its %s, or name its dims in its class: "
            "splits = praxis_lite.layers.splits(weight=...).",
            name,
            fields,
        )
    if not any(_is_layer(config) for config, _ in daglish.iterate(model)):
        logging.getLogger(__name__).warning(
            "A sharding preset does not shard the weights of %s, because the config of this model "
            "contains no layer of praxis_lite.layers. Set task.weight_sharding instead: see "
            "docs/sharding.md.",
            _class_name(fdl.get_callable(model)),
        )
    return model


def _is_layer(config: Any) -> bool:
    layer = fdl.get_callable(config) if isinstance(config, fdl.Buildable) else config
    return inspect.isclass(layer) and issubclass(layer, BaseLayer)


def _resolve(preset: str | Preset) -> Preset:
    """Checks the names in a preset, and returns the mesh axes, keyed by name."""
    setting = "set_sharding_params.preset"
    if not isinstance(preset, Mapping):
        require_choice(setting, preset, SHARDING_PRESETS)
        preset = SHARDING_PRESETS[preset]
    # List the library's names, because some of its layers may not have been imported.
    known = dict.fromkeys((*WEIGHT_DIMS, *ACTIVATION_DIMS, *PRESET_SETTINGS))
    known |= dict.fromkeys(name for dims in _declared_dims() for name in _names(dims))
    for name, axes in preset.items():
        require_choice(f"a name in {setting}", name, known)
        if name in PRESET_SETTINGS:
            if axes is not None:
                require_choice(f"{setting}[{name!r}]", axes, PRESET_SETTINGS[name])
            continue
        is_valid = isinstance(axes, str | int | list | tuple | None)
        require(
            is_valid, f"{setting}[{name!r}]", axes, "a mesh axis, a tuple of mesh axes, or None"
        )
    return {"residual_batch": preset.get("batch"), **preset}


def _names(declared: Mapping[str, Any]) -> Iterator[str]:
    for dims in declared.values():
        if isinstance(dims, Mapping):
            yield from _names(dims)
        else:
            yield from [dims] if isinstance(dims, str) else filter(None, dims)


def _declared_dims() -> list[Mapping[str, Any]]:
    """Returns the logical dims that the loaded layer classes declare."""
    declarations, classes = [], [BaseLayer]
    while classes:
        layer = classes.pop()
        declarations += [layer.splits, layer.preset_settings, layer.template_splits]
        classes += layer.__subclasses__()
    return declarations


def _set_splits(
    config: fdl.Buildable, preset: Preset, parent_sets_splits: bool, unsharded: dict[str, str]
) -> None:
    """Sets the sharding in a config and its templates.

    Args:
      config: The config.
      preset: The mesh axes, keyed by dim name.
      parent_sets_splits: Whether the config is the template of a layer that passes the sharding
        when it calls the template.
      unsharded: Output dict: maps names of classes whose weights are not sharded to the fields that
        would shard them.
    """
    layer = fdl.get_callable(config)
    parameters = inspect.signature(layer).parameters
    declared = _declared(layer)
    if declared is not None and ("expert" in preset or "expert" not in _names(declared)):
        _set_declared(config, declared, preset)
    fields = [  # Not empty for layers with weights.
        name
        for name in parameters
        if name.endswith("split_dims_mapping") and not name.startswith("activation")
    ]
    is_split = any(getattr(config, name, None) is not None for name in fields)
    is_replicated = inspect.isclass(layer) and issubclass(layer, REPLICATED_LAYERS)
    if fields and not (is_split or parent_sets_splits or is_replicated):
        unsharded[_class_name(layer)] = ", ".join(fields)
    if inspect.isclass(layer):  # A function, such as `adapted`, passes on its settings.
        parent_sets_splits = bool(fields)
    if _learns_positions(config, parameters):
        config.position_emb_tpl = fdl.Partial(TrainablePositionalEmbedding)
    # Recurse into the templates. A layer may also declare dims for the layers of a template, which
    # override the settings from the recursion.
    for name, templates in _templates(config, parameters):
        items = templates if isinstance(templates, list | tuple) else [templates]
        new = [_with_splits(item, preset, parent_sets_splits, unsharded) for item in items]
        if any(element is not old for element, old in zip(new, items, strict=True)):
            setattr(config, name, new if items is templates else new[0])
        template_dims = (declared or {}).get(name)
        if template_dims is not None and isinstance(new[0], fdl.Buildable):
            _set_declared(new[0], template_dims, preset)


def _learns_positions(config: fdl.Buildable, parameters: Mapping[str, Any]) -> bool:
    """Returns whether the config describes a TransformerLm with learned positions."""
    if not {"max_seq_length", "position_emb_tpl"} <= parameters.keys():
        return False
    template = getattr(config, "position_emb_tpl", None)
    max_seq_length = getattr(config, "max_seq_length", None)
    return max_seq_length is not None and template in (None, PositionalEmbedding)


def _templates(
    config: fdl.Buildable, parameters: Mapping[str, inspect.Parameter]
) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for the nested configs and templates in a config, including defaults."""
    given = fdl.ordered_arguments(config)
    defaults = {name: p.default for name, p in parameters.items() if name not in given}
    for name, value in (defaults | given).items():
        items = value if isinstance(value, list | tuple) else (value,)
        is_config = any(isinstance(item, fdl.Buildable) for item in items)
        if isinstance(name, str) and (is_config or name.endswith("_tpl") or name == "block"):
            yield name, value


def _with_splits(template: Any, *args: Any) -> Any:
    """Converts a template to a config and shards it; returns it unchanged if nothing is set."""
    if isinstance(template, fdl.Buildable):
        _set_splits(template, *args)
        return template
    if isinstance(template, functools.partial):
        config = fdl.Partial(template.func, *template.args, **template.keywords)
    elif inspect.isclass(template) or inspect.isfunction(template):
        config = fdl.Partial(template)
    else:
        return template
    before = fdl.ordered_arguments(config)
    _set_splits(config, *args)
    is_set = (
        _declared(fdl.get_callable(config)) is not None or fdl.ordered_arguments(config) != before
    )
    return config if is_set else template


def _declared(layer: Any) -> Mapping[str, Any] | None:
    """Returns a class's dim names, keyed by setting or template; None if the class has none."""
    if not _is_layer(layer):
        return None
    named = {name: dims for name, dims in layer.splits.items() if any(dims)}
    declared = {**named, **layer.preset_settings, **layer.template_splits}
    return declared or ({} if issubclass(layer, _CONTAINERS) else None)


def _class_name(layer: Any) -> str:
    return getattr(layer, "__name__", repr(layer))


def _in_preset(name: str | None, dims: Sequence[str | None], preset: Preset) -> str | None:
    """Returns the preset's name for a dim; the experts' model dims may have a separate name."""
    is_of_experts = name == "embed" and "expert" in dims and "expert_embed" in preset
    return "expert_embed" if is_of_experts else name


def _set_declared(config: fdl.Buildable, declared: Mapping[str, Any], preset: Preset) -> None:
    for field, dims in declared.items():
        if isinstance(dims, Mapping):
            continue  # Dims for a template; see `_set_splits`.
        # A setting, such as tensor_parallel, whose value is in the preset.
        if isinstance(dims, str):
            if preset.get(dims) is not None or getattr(config, field, None) is not None:
                setattr(config, field, preset.get(dims))
            continue
        names = [_in_preset(name, dims, preset) for name in dims]
        split = tuple(None if name is None else preset.get(name) for name in names)
        name_of: dict[Any, str] = {}
        for name, entry in zip(dims, split, strict=True):
            for axis in entry if isinstance(entry, list | tuple) else (entry,):
                if axis is None or (isinstance(axis, int) and axis < 0):
                    continue
                if axis in name_of:
                    raise ConfigError(
                        "set_sharding_params: the preset shards two dims of "
                        f"{_class_name(fdl.get_callable(config))}.{field} {dims} over the mesh "
                        f"axis {axis!r}: {name_of[axis]!r} and {name!r}. An axis can shard only "
                        "one dim of an array. Change the entry of one of these dims in the preset."
                    )
                name_of[axis] = name
        setattr(config, field, split)
