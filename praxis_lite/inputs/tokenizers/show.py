"""Lines on a directory's tokenizer: special tokens, ends, and the files that say so."""

from collections.abc import Iterator

from praxis_lite.core.errors import shown
from praxis_lite.inputs.tokenizers.directory_tokenizer import DirectoryTokenizer
from praxis_lite.inputs.tokenizers.special.tokenizer_classes import ROLES


def description(tokenizer: DirectoryTokenizer) -> str:
    """Returns lines on a tokenizer: its size, roles, ends, and each special or added token."""
    return "\n".join(_lines(tokenizer))


def _lines(tokenizer: DirectoryTokenizer) -> Iterator[str]:
    special = tokenizer.special
    inside = f"{tokenizer.directory}/"
    yield f"{tokenizer}: ids from 0 to {special.vocab_size - 1}"
    for role in sorted(special.roles, key=[*ROLES, *sorted(special.roles)].index):
        number = special.roles[role]
        text = shown(repr(special.texts[role])) if role in special.texts else ""
        said_by = special.said_by[role].removeprefix(inside)
        yield f"  {role:12} {number:7} {text:24} {said_by}"
    for name, ids in (
        ("before a text", tokenizer.begin_ids), ("behind a text", tokenizer.end_ids),
        ("end a document", () if tokenizer.eos_id is None else (tokenizer.eos_id,)),
        ("end an answer", tokenizer.eos_ids),
    ):
        yield f"  {name}: {', '.join(_named(tokenizer, number) for number in ids) or 'none'}"
    if special.model_eos_ids:
        ends = ", ".join(map(str, special.model_eos_ids))
        yield f"  of these by {special.model_eos_said_by.removeprefix(inside)}: {ends}"
    yield f"{len(special.tokens)} tokens that are no pieces of text:"
    for number, token in sorted(special.tokens.items()):
        kind = "special" if number in tokenizer.special_ids else "added"
        flags = " ".join(name for name, is_set in token.flags.items() if is_set)
        text, said_by = shown(repr(token.text)), token.said_by.removeprefix(inside)
        yield f"  {number:7} {text:24} {kind:8} {flags:12} {said_by}"


def _named(tokenizer: DirectoryTokenizer, number: int) -> str:
    token = tokenizer.special.tokens.get(number)
    return str(number) if token is None else f"{number} {shown(repr(token.text))}"
