"""Former settings, which are taken still, in Python, behind --set, and from a job's config.json.

Settings of a RunConfig that are those of its parts today, and compiler options of presets, whose
names did not end in "?".
"""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fiddle as fdl

FORMER = {
    "checkpoint_every_steps": ("checkpoints", "every_steps"),
    "checkpoint_every_seconds": ("checkpoints", "every_seconds"),
    "max_checkpoints_to_keep": ("checkpoints", "max_to_keep"),
    "keep_checkpoint_every_steps": ("checkpoints", "keep_every_steps"),
    "best_checkpoints": ("checkpoints", "best"),
    "save_retries": ("checkpoints", "retries"),
    "save_non_finite": ("checkpoints", "save_non_finite"),
    "eval_every_steps": ("evaluation", "every_steps"),
    "max_eval_batches": ("evaluation", "max_batches"),
    "eval_use_ema_states": ("evaluation", "use_ema_states"),
    "early_stopping": ("stopping", "early"),
    "max_skipped_steps_in_a_row": ("stopping", "max_skipped_steps_in_a_row"),
    "time_limit_seconds": ("stopping", "time_limit_seconds"),
    "watchdog_seconds": ("stopping", "watchdog_seconds"),
    "watchdog_exits": ("stopping", "watchdog_exits"),
    "loss_spike_factor": ("loss_spikes", "factor"),
    "on_loss_spike": ("loss_spikes", "action"),
}
_SETTING = re.compile(rf"run\.({'|'.join(FORMER)})(?=[.\[=])")


def takes_former_settings(cls: type) -> type:
    """Returns a dataclass whose constructor also takes the former settings, with a warning."""
    init = cls.__init__
    signature = inspect.signature(init)

    def __init__(self: Any, **settings: Any) -> None:
        for former in FORMER.keys() & settings.keys():
            part, name = FORMER[former]
            default = signature.parameters[part].default
            value = dataclasses.replace(
                settings.get(part, default), **{name: settings.pop(former)}
            )
            settings[part] = value
            _warn(former)
        init(self, **settings)

    former = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in FORMER
    ]
    __init__.__signature__ = signature.replace(
        parameters=[*signature.parameters.values(), *former]
    )
    cls.__init__ = __init__
    cls.__getattr__, cls.former_settings = _former_value, frozenset(FORMER)
    return cls


def _former_value(self: Any, name: str) -> Any:
    if name not in FORMER:
        raise AttributeError(f"{type(self).__name__} has no {name!r}")
    _warn(name)
    part, today = FORMER[name]
    return getattr(getattr(self, part), today)


def _warn(former: str) -> None:
    warnings.warn(
        f"run.{former} is run.{'.'.join(FORMER[former])} now, and the former name goes with the "
        "next minor version.", DeprecationWarning, stacklevel=3,
    )


def move_former_settings(run: Any) -> None:
    """Moves the former settings in the config of a RunConfig to where they are today."""
    if not isinstance(run, fdl.Buildable):
        return
    for former in [name for name in run.__arguments__ if name in FORMER]:
        part, name = FORMER[former]
        parent = getattr(run, part)
        if not isinstance(parent, fdl.Buildable):
            fields = {
                field.name: getattr(parent, field.name) for field in dataclasses.fields(parent)
                if getattr(parent, field.name) != field.default
            }
            parent = fdl.Config(type(parent), **fields)
            setattr(run, part, parent)
        setattr(parent, name, run.__arguments__[former])
        delattr(run, former)


def mark_options_of_presets(mesh: Any) -> None:
    """Ends the names of compiler options in a MeshConfig's config in "?" where a preset's do.

    A config.json of before has them without, as if the user had given them, and a compiler that
    lacks them would end the job. An option that equals a preset's counts as the preset's.
    """
    options = getattr(mesh, "compiler_options", None)
    if not options or not isinstance(options, Mapping):
        return
    # Imported here, because it needs jax.
    from praxis_lite.layers.whole_model.sharding_presets import COMPILER_OPTIONS

    of_presets = [
        (kind, *option) for preset in COMPILER_OPTIONS.values()
        for kind, given in preset.items() for option in given.items()
    ]
    mesh.compiler_options = {
        kind: {
            f"{name}?" if (kind, f"{name}?", value) in of_presets else name: value
            for name, value in given.items()
        } if isinstance(given, Mapping) else given
        for kind, given in options.items()
    }


def settings_of_today(
    settings: Sequence[str], note: Callable[[str], None]
) -> tuple[str, ...]:
    """Returns "path=value" of --set with the paths of today; `note` is told what has moved."""
    texts = []
    for text in settings:
        if match := _SETTING.match(text):
            today = f"run.{'.'.join(FORMER[match[1]])}"
            note(f"note: run.{match[1]} is {today} now; the former name goes with the next version")
            text = today + text[match.end():]
        texts.append(text)
    return tuple(texts)
