"""An extension of griffe: layers in the reference have the arguments that they have at run time.

`inherit_params` and `splits` add arguments to the constructors of layers, which griffe, because it
only reads the source, does not see.
"""

import importlib
import inspect
import re
from typing import Any

import griffe

from praxis_lite.layers.base.dims import SplitSetting

# The modules of types, which the source imports.
MODULES = re.compile(r"\b[a-z_]+(\.[a-z_]+)*\.(?=[A-Z])")
KINDS = {kind: griffe.ParameterKind(kind.description) for kind in inspect._ParameterKind}


class Layers(griffe.Extension):
    """Replaces the constructors of the classes in praxis_lite.layers."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Replaces the constructor of a layer class; griffe calls this for every loaded class."""
        if not cls.path.startswith("praxis_lite.layers.") or not cls.parent.is_module:
            return
        layer = getattr(importlib.import_module(cls.module.path), cls.name)
        parameters = inspect.signature(layer).parameters
        init = cls.members.get("__init__")
        read = {parameter.name: parameter for parameter in init.parameters} if init else {}
        if parameters.keys() <= read.keys():
            return
        first = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        others = [read.get(name) or as_read(one) for name, one in parameters.items()]
        signature = griffe.Parameters(first, *others)
        cls.set_member("__init__", griffe.Function("__init__", parameters=signature))


def as_read(parameter: inspect.Parameter) -> griffe.Parameter:
    """Returns an argument as griffe would have read it from the source."""
    default, annotation = parameter.default, parameter.annotation
    if isinstance(default, type):
        shown = default.__name__
    elif default is None or isinstance(default, bool | int | float | str | tuple):
        shown = repr(default)
    else:
        shown = "..."
    text = "SplitSetting" if annotation == SplitSetting else inspect.formatannotation(annotation)
    return griffe.Parameter(
        parameter.name,
        kind=KINDS[parameter.kind],
        annotation=None if annotation is parameter.empty else MODULES.sub("", text),
        default=None if default is parameter.empty else shown,
    )
