"""Sets all splits of a model's config from a preset."""

import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl

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
    LEFT_WHOLE,
    OF_ACTIVATIONS,
    OF_SETTINGS,
    OF_WEIGHTS,
    SHARDING_PRESETS,
)

Preset = Mapping[str, DimSplit]
# Without splits; they become configs so that --set reaches their settings.
_HOLDERS = (Repeat, Transformer)


def set_sharding_params(
    model: fdl.Buildable, preset: str | Preset = "fsdp+tensor"
) -> fdl.Buildable:
    """Returns `model`, the config of a model or of a part of it, with all its splits set.

    This sets the splits of every layer that names its dims (`BaseLayer.splits`), and of the
    templates under it, given or by default; other settings stay. A preset without the name "expert"
    leaves experts as they are, one with None leaves them whole. Logs a warning, once for each
    class, where a layer has weights to split and neither its class nor the config says how.

    Batches best come as `preset["batch"]` says: an inputs_split_mapping of {"map_2d": (that, None)}
    for ids; one of None, over all devices.

    Args:
      preset: a name in SHARDING_PRESETS; or a dict from the layers' names to the mesh axes
        (one, a tuple of them, None) that they split over. A name that it lacks is not split.

    Raises:
      ConfigError: there is no such preset or name, or two dims of an array get the same axis.
    """
    preset, unsplit = _checked(preset), {}
    _set_splits(model, preset, False, unsplit)
    if not any(axes for name, axes in preset.items() if not name.endswith("batch")):
        return model  # This preset wants every weight whole.
    for name, fields in unsplit.items():
        logging.getLogger("praxis_lite").warning(
            "set_sharding_params leaves %s as it is, whole on every device: the preset does not "
            "say how it splits. Set its %s, or name its dims in its class, "
            "splits = praxis_lite.layers.splits(weight=...).",
            name,
            fields,
        )
    return model


def _checked(preset: str | Preset) -> Preset:
    """Returns the mesh axes by name."""
    setting = "set_sharding_params.preset"
    if not isinstance(preset, Mapping):
        require_choice(setting, preset, SHARDING_PRESETS)
        preset = SHARDING_PRESETS[preset]
    # Those of the library by themselves: not all of its layers need be imported.
    known = dict.fromkeys((*OF_WEIGHTS, *OF_ACTIVATIONS, *OF_SETTINGS))
    known |= dict.fromkeys(name for row in _rows() for name in _names(row))
    for name, axes in preset.items():
        require_choice(f"a name in {setting}", name, known)
        if name in OF_SETTINGS:
            if axes is not None:
                require_choice(f"{setting}[{name!r}]", axes, OF_SETTINGS[name])
            continue
        is_right = isinstance(axes, str | int | list | tuple | None)
        require(is_right, f"{setting}[{name!r}]", axes, "a mesh axis, a tuple of them, or None")
    return {"residual_batch": preset.get("batch"), **preset}


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    for dims in row.values():
        if isinstance(dims, Mapping):
            yield from _names(dims)
        else:
            yield from [dims] if isinstance(dims, str) else filter(None, dims)


def _rows() -> list[Mapping[str, Any]]:
    """Returns the logical dims that the loaded layer classes declare."""
    rows, classes = [], [BaseLayer]
    while classes:
        layer = classes.pop()
        rows += [layer.splits, layer.preset_settings, layer.template_splits]
        classes += layer.__subclasses__()
    return rows


def _set_splits(
    config: fdl.Buildable, preset: Preset, is_told: bool, unsplit: dict[str, str]
) -> None:
    """Sets the splits of a config and of the templates in it.

    Args:
      is_told: the layer whose template this is hands it splits when it calls it.
      unsplit: gets the name of a class whose weights nothing splits, and the fields that would.
    """
    layer = fdl.get_callable(config)
    parameters = inspect.signature(layer).parameters
    row = _row(layer)
    if row is not None and ("expert" in preset or "expert" not in _names(row)):
        _set_row(config, row, preset)
    fields = [  # A layer with weights has some.
        name for name in parameters
        if name.endswith("split_dims_mapping") and not name.startswith("activation")
    ]
    is_split = any(getattr(config, name, None) is not None for name in fields)
    is_left_whole = inspect.isclass(layer) and issubclass(layer, LEFT_WHOLE)
    if fields and not (is_split or is_told or is_left_whole):
        unsplit[_name(layer)] = ", ".join(fields)
    if inspect.isclass(layer):  # A function, such as `adapted`, hands on what it is given.
        is_told = bool(fields)
    if _learns_positions(config, parameters):
        config.position_emb_tpl = fdl.Partial(TrainablePositionalEmbedding)
    for name, templates in _templates(config, parameters):
        ones = templates if isinstance(templates, list | tuple) else [templates]
        new = [_with_splits(item, preset, is_told, unsplit) for item in ones]
        if any(element is not old for element, old in zip(new, ones, strict=True)):
            setattr(config, name, new if ones is templates else new[0])
        inner = (row or {}).get(name)
        if inner is not None and isinstance(new[0], fdl.Buildable):
            _set_row(new[0], inner, preset)


def _learns_positions(config: fdl.Buildable, parameters: Mapping[str, Any]) -> bool:
    """Returns whether the config is of a TransformerLm that will learn its positions."""
    if not {"max_seq_length", "position_emb_tpl"} <= parameters.keys():
        return False
    template = getattr(config, "position_emb_tpl", None)
    max_seq_length = getattr(config, "max_seq_length", None)
    return max_seq_length is not None and template in (None, PositionalEmbedding)


def _templates(
    config: fdl.Buildable, parameters: Mapping[str, inspect.Parameter]
) -> Iterator[tuple[str, Any]]:
    """Yields a config's templates by name, given or by default, and configs by any name."""
    given = fdl.ordered_arguments(config)
    defaults = {name: p.default for name, p in parameters.items() if name not in given}
    for name, value in (defaults | given).items():
        ones = value if isinstance(value, list | tuple) else (value,)
        is_config = any(isinstance(item, fdl.Buildable) for item in ones)
        if isinstance(name, str) and (is_config or name.endswith("_tpl") or name == "block"):
            yield name, value


def _with_splits(template: Any, *args: Any) -> Any:
    """Returns a template as a config with its splits set, or as it is if there are none to set."""
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
    is_set = _row(fdl.get_callable(config)) is not None or fdl.ordered_arguments(config) != before
    return config if is_set else template


def _row(layer: Any) -> Mapping[str, Any] | None:
    """Returns the names of a class's dims by setting, and by template; None: it says nothing."""
    if not (inspect.isclass(layer) and issubclass(layer, BaseLayer)):
        return None
    named = {name: dims for name, dims in layer.splits.items() if any(dims)}
    row = {**named, **layer.preset_settings, **layer.template_splits}
    return row or ({} if issubclass(layer, _HOLDERS) else None)


def _name(layer: Any) -> str:
    return getattr(layer, "__name__", repr(layer))


def _in_preset(name: str | None, dims: Sequence[str | None], preset: Preset) -> str | None:
    """Returns the preset's name of an array's dim: model dims of experts may have their own."""
    is_of_experts = name == "embed" and "expert" in dims and "expert_embed" in preset
    return "expert_embed" if is_of_experts else name


def _set_row(config: fdl.Buildable, row: Mapping[str, Any], preset: Preset) -> None:
    for field, dims in row.items():
        if isinstance(dims, Mapping):
            continue  # A template's own row.
        if isinstance(dims, str):
            if preset.get(dims) is not None or getattr(config, field, None) is not None:
                setattr(config, field, preset.get(dims))
            continue
        split = tuple(preset.get(_in_preset(name, dims, preset)) for name in dims)
        name_of: dict[Any, str] = {}
        for name, entry in zip(dims, split, strict=True):
            for axis in entry if isinstance(entry, list | tuple) else (entry,):
                if axis is None or (isinstance(axis, int) and axis < 0):
                    continue
                if axis in name_of:
                    raise ConfigError(
                        f"set_sharding_params: {_name(fdl.get_callable(config))}.{field} has the "
                        f"dims {dims}, of which {name_of[axis]!r} and {name!r} both split over the "
                        f"mesh axis {axis!r}. An axis splits one dim of an array: change one of "
                        "the two names in the preset."
                    )
                name_of[axis] = name
        setattr(config, field, split)
