"""Pairs of answers of which people prefer one, for direct preference optimization."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from praxis_lite.errors import ConfigError, require_choice
from praxis_lite.inputs.base import IndexedPipeline, spec_of
from praxis_lite.inputs.mixing.shuffle import examples_at
from praxis_lite.inputs.text.conversations import (
    Tokens,
    checked_messages,
    is_held_out,
    read_lines,
    tokens_of,
)
from praxis_lite.inputs.text.corpus import SPLITS
from praxis_lite.inputs.tokenizers import Tokenizer, as_tokenizer

if TYPE_CHECKING:
    import jax


class Pair(NamedTuple):
    """The prompt with the answer that is preferred, and with the other one."""

    chosen: Tokens
    rejected: Tokens


@dataclasses.dataclass(eq=False)
class PreferenceData(IndexedPipeline):
    """Pairs for `DpoTask`: `ids`, `labels`, `answers` [B, 2, T], `weights` [B]; chosen first.

    Files are JSON lines as TRL reads them: {"prompt", "chosen", "rejected"}, each a text or a list
    of messages; or "chosen" and "rejected" alone, whole conversations that begin alike. `answers`
    is 1 for the labels of an answer, the end of its turn or of the text included.

    Args:
        files: globs of files, separated by commas; None: questions about Python, answered by its
            language reference.
        split: 'train' or 'heldout'; heldout_percent of the lines, chosen by their content.
        tokenizer: with a chat template, if there are messages; or its directory.
        shuffle: True for endless batches, in another order each epoch; False for one pass.

    Raises:
        ConfigError: from `check`: a line is no pair, or is longer than seq_len + 1 tokens; names
            file and line.
    """

    files: str | None
    split: str
    batch_size: int
    seq_len: int
    tokenizer: Tokenizer | str | None = None
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool
    heldout_percent: int = 10

    def __post_init__(self):
        self.tokenizer = as_tokenizer(self.tokenizer)

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "seq_len")
        self.require_at_least(0, "seed", "heldout_percent")
        require_choice("PreferenceData.split", self.split, SPLITS)
        if not self.pairs:
            raise ConfigError(
                f"PreferenceData: the {self.split!r} split of {self.files or 'the reference'} has "
                "no pair. Change heldout_percent, or give more of them."
            )

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """The tokens of the split's pairs, in the files' order."""
        found = []
        for content, where in read_lines(self.files):
            if is_held_out(content, self.heldout_percent) == (self.split == "train"):
                continue
            pair = _pair(content, self.tokenizer, where)
            longest = max(len(one.ids) for one in pair)
            if longest > self.seq_len + 1:
                raise ConfigError(
                    f"{where} has {longest} tokens, more than seq_len + 1 = {self.seq_len + 1}. "
                    "Raise seq_len, or leave the line out."
                )
            found.append(pair)
        return found

    def largest_id(self) -> int:
        """Returns the largest id of any batch."""
        return max(int(one.ids.max()) for pair in self.pairs for one in pair)

    @property
    def num_batches(self) -> int | None:
        return None if self.shuffle else -(-len(self.pairs) // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        shape = (self.batch_size, 2, self.seq_len)
        return spec_of(
            ids=(shape, np.int32), labels=(shape, np.int32), answers=(shape, np.float32),
            weights=((self.batch_size,), np.float32),
        )

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first, count = index * self.batch_size + rows.start, rows.stop - rows.start
        chosen = examples_at(
            len(self.pairs), first, count, seed=self.seed, shuffle=self.shuffle
        )
        shape = (count, 2, self.seq_len)
        batch = {
            "ids": np.zeros(shape, np.int32), "labels": np.zeros(shape, np.int32),
            "answers": np.zeros(shape, np.float32), "weights": np.zeros(count, np.float32),
        }
        for row, number in enumerate(chosen):
            batch["weights"][row] = 1.0
            for side, (ids, is_answer) in enumerate(self.pairs[number]):
                place = row, side, slice(0, len(ids) - 1)
                batch["ids"][place], batch["labels"][place] = ids[:-1], ids[1:]
                batch["answers"][place] = is_answer[1:]
        return batch

    def fingerprint(self) -> dict[str, Any]:
        settings = self.settings_fingerprint(
            "split", "batch_size", "seq_len", "tokenizer", "seed", "shuffle", "heldout_percent"
        )
        digest = hashlib.sha256()
        for pair in self.pairs:
            for ids, is_answer in pair:
                digest.update(ids.tobytes() + is_answer.tobytes())
        return {**settings, "sha256": digest.hexdigest()}


def _pair(content: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Pair:
    answers = [content.get("chosen"), content.get("rejected")]
    prompt = content.get("prompt")
    if isinstance(prompt, str) and all(isinstance(one, str) for one in answers):
        return Pair(*(_of_texts(prompt, one, tokenizer) for one in answers))
    if not all(isinstance(one, list) for one in answers):
        raise ConfigError(
            f"{where} has {sorted(content)}; wanted are prompt, chosen and rejected, all of them "
            "texts or all of them lists of messages, or chosen and rejected conversations."
        )
    answers = [checked_messages(one, where) for one in answers]
    if prompt is None:
        count = next(
            (i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b),
            min(map(len, answers)),
        )
        prompt, answers = answers[0][:count], [one[count:] for one in answers]
    messages = checked_messages(prompt, where)
    return Pair(*(
        tokens_of([*messages, *one], tokenizer, where, first=len(messages)) for one in answers
    ))


def _of_texts(prompt: str, answer: str, tokenizer: Tokenizer) -> Tokens:
    end = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    before = tokenizer.encode_prompt(prompt)
    after = np.array([*tokenizer.encode(answer, False), *end], np.int32)
    is_answer = np.arange(len(before) + len(after)) >= len(before)
    return Tokens(np.concatenate([before, after]), is_answer)
