"""Supervised fine-tuning on conversations: the loss is on what the assistant says."""

import dataclasses
import functools
import hashlib
from typing import Any

from praxis_lite.errors import ConfigError, require_choice
from praxis_lite.inputs.text.conversations import (
    Tokens,
    checked_messages,
    is_held_out,
    read_lines,
    tokens_of,
)
from praxis_lite.inputs.text.corpus import SPLITS
from praxis_lite.inputs.text.packed_rows import PackedRows
from praxis_lite.inputs.text.packing import WINDOW, Packing, first_fit, unpacked
from praxis_lite.inputs.tokenizers import Tokenizer, as_tokenizer

TOO_LONG = ("refuse", "drop", "cut")


@dataclasses.dataclass(eq=False)
class ChatData(PackedRows):
    """Conversations for a language model, several to a row, as `PackedRows`.

    Files are JSON lines with {"messages": [{"role": ..., "content": ...}, ...]}, as TRL reads them.
    A label has weight 1 if it is the assistant's to write, the end of its turn included. Several
    conversations share a row, and none sees another.

    Args:
        files: globs of files, separated by commas; None: questions about Python, answered by its
            language reference.
        split: 'train' or 'heldout'; heldout_percent of the lines, chosen by their content.
        tokenizer: with a chat template; or its directory.
        shuffle: True for endless batches, in another order each epoch; False for one pass.
        packing: False: a row for each conversation.
        too_long: of more than seq_len + 1 tokens: "refuse", "drop" the conversation, or "cut" it.

    Raises:
        ConfigError: from `check`: a line is no conversation, none is the assistant's, or one is too
            long; names file and line.
    """

    files: str | None
    split: str
    batch_size: int
    seq_len: int
    tokenizer: Tokenizer | str | None = None
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool
    packing: bool = True
    heldout_percent: int = 10
    too_long: str = "refuse"

    def __post_init__(self):
        self.tokenizer = as_tokenizer(self.tokenizer)

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "seq_len")
        self.require_at_least(0, "seed", "heldout_percent")
        require_choice("ChatData.split", self.split, SPLITS)
        require_choice("ChatData.too_long", self.too_long, TOO_LONG)
        if not self.conversations:
            raise ConfigError(
                f"ChatData: the {self.split!r} split of {self.files or 'the reference'} has no "
                "conversation. Change heldout_percent, or give more of them."
            )

    @functools.cached_property
    def conversations(self) -> list[Tokens]:
        """The tokens of the split's conversations, in the files' order."""
        found = []
        for content, where in read_lines(self.files):
            if is_held_out(content, self.heldout_percent) == (self.split == "train"):
                continue
            messages = checked_messages(content.get("messages"), where)
            tokens = tokens_of(messages, self.tokenizer, where)
            if len(tokens.ids) > self.seq_len + 1:
                if self.too_long == "refuse":
                    raise ConfigError(
                        f"{where} has {len(tokens.ids)} tokens, more than seq_len + 1 = "
                        f"{self.seq_len + 1}. Raise seq_len, or set too_long to 'drop' or 'cut'."
                    )
                if self.too_long == "drop":
                    continue
                tokens = Tokens(*(x[: self.seq_len + 1] for x in tokens))
            found.append(tokens)
        return found

    @functools.cached_property
    def table(self) -> Packing:
        counts = [len(one.ids) - 1 for one in self.conversations]
        if not self.packing:
            return unpacked(counts, self.seq_len)
        return first_fit(counts, self.seq_len, WINDOW)

    def document(self, number: int) -> Tokens:
        return self.conversations[number]

    def largest_id(self) -> int:
        """Returns the largest id of any batch."""
        return max(int(one.ids.max()) for one in self.conversations)

    def fingerprint(self) -> dict[str, Any]:
        settings = self.settings_fingerprint(
            "split", "batch_size", "seq_len", "tokenizer", "seed", "shuffle", "packing",
            "heldout_percent", "too_long",
        )
        digest = hashlib.sha256()
        for ids, is_answer in self.conversations:
            digest.update(ids.tobytes() + is_answer.tobytes())
        # Rows were packed otherwise before: by size, each where it fits best.
        return {**settings, "window": WINDOW, "sha256": digest.hexdigest()}
