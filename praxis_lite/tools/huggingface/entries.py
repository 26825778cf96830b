"""An entry of a family's [tensors]: the weights that a tensor is, and where its form differs."""

from typing import Any, NamedTuple

from praxis_lite.core.errors import ConfigError, require, require_choice

# How weights that are one tensor may alternate in it: each head has its part of each weight, or
# each number of the last dim comes from the next weight.
JOINED = ("heads", "interleaved")
EMBEDDING, HEAD = "embedding", "head"


class Entry(NamedTuple):
    """A tensor of theirs, in a family's table a path, a list of paths, or a table of these fields.

    Attributes:
      to: the paths of our weights: in a layer where the tensor's name has {layer}, else in the
        model; or EMBEDDING or HEAD, which are one weight in a tied model. Several weights lie one
        behind the other, along their outputs.
      dims: the dims of the tensor in the names of our weight's, "embed (heads head_dim)"; None:
        they follow, see `form_of`.
      joined: how several weights lie otherwise, of JOINED.
    """

    to: tuple[str, ...]
    dims: str | None = None
    joined: str | None = None


def entry_of(given: Any, where: str) -> Entry:
    """Returns an entry as a table has it; `where` names the table and the tensor.

    Raises:
      ConfigError: it is something else.
    """
    fields = given if isinstance(given, dict) else {"to": given}
    for name in fields:
        require_choice(f"{where}: a field", name, Entry._fields)
    to = fields.get("to")
    to = [to] if isinstance(to, str) else to
    is_right = isinstance(to, list) and to and all(isinstance(path, str) for path in to)
    require(bool(is_right), where, given, 'the path of a weight, "layer_norm/scale", or a list')
    dims, joined = fields.get("dims"), fields.get("joined")
    is_text = dims is None or isinstance(dims, str)
    require(is_text, f"{where}: dims", dims, 'a text, "embed (heads head_dim)"')
    if joined is not None:
        require_choice(f"{where}: joined", joined, JOINED)
        if len(to) < 2:
            raise ConfigError(f"{where}: joined = {joined!r} is of several weights. Take it out.")
    return Entry(tuple(to), dims, joined)
