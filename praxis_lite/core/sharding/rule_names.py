"""Rules, and their names: the type of a rule, and a strategy's strings that stand for rules."""

import ast
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.sharding.logical_axes import LogicalAxes, LogicalAxisRules, MeshAxes

Spec = tuple[MeshAxes, ...]


class UnknownName(ConfigError, KeyError):
    """A rule that is not registered, or an axis that the mesh does not have."""

    __str__ = Exception.__str__  # KeyError's is the repr of the message.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array as rules see it.

    Attributes:
      path: what patterns are matched with, whole.
      shape: without padding.
      dtype: anything that `numpy.dtype` takes.
      logical_axes: a name, a tuple of names or None per dim; None: it has no names.
      logical_axis_rules: (name, mesh axes) pairs of this leaf alone, before the job's.
      spec: where rules start: mesh axes per dim; (): nothing is split.
      num_stacked: how many leading dims count layers rather than a tensor's own elements.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    logical_axes: LogicalAxes | None = None
    logical_axis_rules: LogicalAxisRules = ()
    spec: Spec = ()
    num_stacked: int = 0


@dataclasses.dataclass(frozen=True)
class JobMesh:
    """What rules know in addition to the leaf.

    Attributes:
      axis_sizes: devices along each mesh axis, in the mesh's order.
      logical_axis_rules: (name, mesh axes) pairs, first match wins.
      allow_padding: `Fsdp` may split a dim that does not divide.
      unmapped_is_error: a logical axis without a rule is an error; False: it is not split.
    """

    axis_sizes: Mapping[str, int]
    logical_axis_rules: LogicalAxisRules = ()
    allow_padding: bool = False
    unmapped_is_error: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A rule's result for a leaf's spec.

    Attributes:
      spec: mesh axes per dim.
      note: what deserves to be reported.
      skipped: why the rule left the leaf; reported only if no other rule splits it.
      by: what decided, if it is not the rule itself.
    """

    spec: Spec
    note: str = ""
    skipped: str = ""
    by: str = ""


# (spec so far, leaf, job_mesh) -> the new spec, or an Outcome; `spec` has an entry per dim.
Rule = Callable[[Spec, Leaf, JobMesh], Spec | Outcome]

REGISTERED: dict[str, Callable[..., Rule]] = {}


def register_rule(name: str) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Returns a decorator of a Rule's class, or of a function that returns a Rule, for strings.

    Raises:
      ConfigError: the name is taken, or not an identifier.
    """

    def register(factory: Callable[..., Rule]) -> Callable[..., Rule]:
        there = REGISTERED.get(name)
        # A module that is loaded anew, or a notebook's cell, registers its own again.
        is_same = there is None or (there.__module__, there.__qualname__) == (
            factory.__module__, factory.__qualname__
        )
        if not name.isidentifier() or not is_same:
            raise ConfigError(f"register_rule: {name!r} is taken, or not an identifier. Rename it.")
        REGISTERED[name] = factory
        return factory

    return register


def rule_text(rule: Rule) -> str:
    """Returns a rule as a strategy's string would have it."""
    if isinstance(rule, functools.partial):
        settings = [*map(repr, rule.args), *(f"{k}={v!r}" for k, v in rule.keywords.items())]
        return f"{rule_text(rule.func)}({', '.join(settings)})"
    if not dataclasses.is_dataclass(rule):
        # What a registered function returns has that function's name in its own.
        return getattr(rule, "__qualname__", type(rule).__name__).partition(".<locals>")[0]
    settings = []
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.default is dataclasses.MISSING:
            settings.append(repr(value))
        elif value != field.default:
            settings.append(f"{field.name}={value!r}")
    known = {factory: name for name, factory in REGISTERED.items()}
    name = known.get(type(rule), type(rule).__name__)
    return f"{name}({', '.join(settings)})" if settings else name


def parsed_rules(rules: Any) -> tuple[Rule, ...]:
    """Returns the rules that a string, a rule, or a nested sequence of both stands for, in order.

    A string is one or more of a registered rule's name or call, with `|` between:
    `'shard_dim("mdl", -1)|fsdp("data", 0)'`. Arguments are literals; nothing is evaluated.

    Raises:
      UnknownName: a name that is not registered; a KeyError too.
      ConfigError: what cannot be read, arguments that a rule does not take, or not a rule.
    """
    if isinstance(rules, str):
        try:
            node = ast.parse(rules.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"The rules {rules!r} cannot be read: {error}. {_WANTED}") from error
        return tuple(_called(call, rules) for call in _alternatives(node))
    if callable(rules):
        return (rules,)
    if isinstance(rules, Iterable) and not isinstance(rules, Mapping):
        return tuple(rule for part in rules for rule in parsed_rules(part))
    raise ConfigError(f"{rules!r} is no rule. {_WANTED}")


_WANTED = (
    "Wanted is a rule, a list of rules, or a string such as "
    """'shard_dim("mdl", -1)|fsdp("data", 0)'."""
)


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    else:
        yield node


def _called(node: ast.expr, text: str) -> Rule:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ConfigError(f"The rules {text!r} have {ast.unparse(node)!r}. {_WANTED}")
    name = call.func.id
    if name not in REGISTERED:
        raise UnknownName(
            f"The rules {text!r} name '{name}', and there are {', '.join(REGISTERED)}."
            f"{did_you_mean(name, REGISTERED)} A rule of your own is registered by "
            "`register_rule` in a module that is loaded; or give the object in place of the string."
        )
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return REGISTERED[name](*args, **keywords)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The rules {text!r} have {ast.unparse(node)!r}: {error}. Arguments are literals, of "
            "those that the rule takes."
        ) from error
