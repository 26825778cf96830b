"""A pipeline of preferred and rejected answers, for direct preference optimization (DPO)."""

import dataclasses
import functools
import hashlib
import platform
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.inputs.base import spec_of
from praxis_lite.inputs.sources.base import Source, picklable_state
from praxis_lite.inputs.sources.json_lines import JsonLines
from praxis_lite.inputs.text.corpus import SPLITS, language_reference
from praxis_lite.inputs.text.document_pipeline import DocumentPipeline
from praxis_lite.inputs.text.documents import Documents
from praxis_lite.inputs.text.pairs import Pair
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import ASSISTANT, USER
from praxis_lite.inputs.tokenizers.loading import as_tokenizer

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(eq=False)
class PreferenceData(DocumentPipeline):
    """Batches for `DpoTask`: `ids`, `labels` and `answers` [B, 2, T], and `weights` [B].

    Index 0 of the second dimension is the chosen side, and index 1 is the rejected side. `answers`
    is 1 for the labels in an answer, including its end-of-turn or end-of-text token.

    Examples have one of TRL's formats: "prompt", "chosen" and "rejected" are all strings or lists
    of messages, or "chosen" and "rejected" are conversations with a common prefix, and "prompt" is
    optional. Pairs with an empty answer are skipped and counted.

    Args:
        files: Comma-separated globs that match JSON lines files, or a source of examples in any
            file format. If None, uses questions about Python with answers from the Python language
            reference.
        split: Name of the split, 'train' or 'heldout'.
        batch_size: Number of pairs in the global batch. With `bucket_lengths`, a batch of pairs of
            length T has `batch_size * (seq_len // T)` pairs.
        seq_len: Maximum number of labels per side, T.
        tokenizer: A tokenizer or its directory. The tokenizer needs a chat template if examples
            contain messages.
        seed: Seed of the shuffled order.
        shuffle: True for endless batches, reshuffled every epoch; False for one pass in order.
        heldout_percent: Percentage of pairs in the 'heldout' split, selected by a hash of their
            content.
        skip: If `files` are globs, names of faults (keys of FAULTS). Pairs with such a fault are
            skipped and counted. If `files` is a source, set the source's `skip` instead.
        ignored_keys: Keys of the examples to ignore, such as "score_chosen".
        bucket_lengths: Lengths below seq_len, in increasing order, such as (128, 256). If not
            empty, both sides of a pair are padded to the smallest length among these and seq_len
            that is sufficient for the longer side, and a batch contains pairs of one length. Each
            length is a shape for which the steps are compiled.
    """

    files: str | Source | None
    split: str
    batch_size: int
    seq_len: int
    # `__post_init__` converts it to a Tokenizer.
    tokenizer: Tokenizer | str | None = None  # type: ignore[assignment]
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool
    heldout_percent: int = 10
    skip: tuple[str, ...] = ()
    ignored_keys: tuple[str, ...] = ()
    bucket_lengths: Sequence[int] = ()

    def __post_init__(self):
        self.tokenizer = as_tokenizer(self.tokenizer)

    def check(self) -> None:
        super().check()
        self.require_at_least(0, "heldout_percent")
        require_choice("PreferenceData.split", self.split, SPLITS)
        require(
            isinstance(self.files, str | Source | None),
            "PreferenceData.files",
            self.files,
            "globs of files, a source of examples, or None",
        )
        if self.skip and isinstance(self.files, Source):
            raise ConfigError(
                f"PreferenceData.skip={self.skip} cannot be combined with a source. Set files.skip "
                "instead."
            )
        self.documents.check()
        if not len(self._numbers):
            raise ConfigError(
                f"PreferenceData: the {self.split!r} split of {self.files or 'the reference'} is "
                f"empty: {len(self.documents.lengths):,} pairs in all splits, skipped: "
                f"{self.documents.left_out or 'none'}. Change heldout_percent, or add pairs."
            )
        longest = self.row_lengths() + 1
        if longest.max() > self.seq_len + 1:
            first = int(np.argmax(longest > self.seq_len + 1))
            raise ConfigError(
                f"{self.documents.where(self._numbers[first])} has {longest[first]} tokens, more "
                f"than seq_len + 1 = {self.seq_len + 1}. Raise seq_len, or remove the pair."
            )
        _ = self.buckets

    @functools.cached_property
    def documents(self) -> Documents:  # type: ignore[override]  # Built from the settings.
        """The pairs of both splits."""
        source, ignored_keys = self.files, tuple(self.ignored_keys)
        if source is None:
            ignored_keys += ("messages",)  # `about_python` also writes this format.
            # The language reference depends on the Python version.
            name = f"pairs-{platform.python_version()}.jsonl"
            source = JsonLines(f"~/.cache/praxis_lite/questions/{name}", make=about_python)
        elif isinstance(source, str):
            source = JsonLines(source, skip=tuple(self.skip))
        return Documents(
            source,
            "preference",
            tokenizer=self.tokenizer,
            ignored_keys=ignored_keys,
            heldout_percent=self.heldout_percent,
        )

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        """The indices of the split's pairs in `documents`."""
        return self.documents.of_split(self.split)

    @property
    def pairs(self) -> list[Pair]:
        """The tokens in the split's pairs, in file order."""
        return [self.documents.pair(number) for number in self._numbers]

    @property
    def num_examples(self) -> int:
        return len(self._numbers)

    def row_lengths(self) -> np.ndarray:
        """Returns the number of labels on the longer side of each pair."""
        # A document contains the chosen answer, followed by the rejected one.
        chosen = self.documents.chosen_lengths
        return np.maximum(chosen, self.documents.lengths - chosen)[self._numbers] - 1

    def spec_of_shape(self, num_rows: int, length: int) -> "dict[str, jax.ShapeDtypeStruct]":
        shape = (num_rows, 2, length)
        return spec_of(
            ids=(shape, np.int32),
            labels=(shape, np.int32),
            answers=(shape, np.float32),
            weights=((num_rows,), np.float32),
        )

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        rows = self.rows_of_batch(index, rows)
        count = rows.stop - rows.start
        shape = (count, 2, self.length_of_batch(index))
        batch = {
            "ids": np.zeros(shape, np.int32),
            "labels": np.zeros(shape, np.int32),
            "answers": np.zeros(shape, np.float32),
            "weights": np.zeros(count, np.float32),
        }
        for row, number in enumerate(self.example_indices(index, rows)):
            batch["weights"][row] = 1.0
            pair = self.documents.pair(self._numbers[number])
            # Side 0 is the chosen answer, and side 1 the rejected one.
            for side, (ids, is_answer) in enumerate(pair):
                target = row, side, slice(0, len(ids) - 1)
                batch["ids"][target], batch["labels"][target] = ids[:-1], ids[1:]
                batch["answers"][target] = is_answer[1:]
        return batch

    def fingerprint(self) -> dict[str, Any]:
        settings = self.settings_fingerprint(
            "split",
            "batch_size",
            "seq_len",
            "tokenizer",
            "seed",
            "shuffle",
            "heldout_percent",
            "bucket_lengths",
        )
        digest = hashlib.sha256()
        for pair in self.pairs:
            for ids, is_answer in pair:
                digest.update(ids.astype(np.int32).tobytes() + is_answer.tobytes())
        return {**settings, "sha256": digest.hexdigest()}

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self)


def about_python(folder: str = "") -> Iterator[dict[str, Any]]:
    """Yields a question for each topic in Python's language reference, with two answers.

    The chosen answer is a paragraph about the topic, and the rejected answer is the chosen answer
    to the previous question.
    """
    previous_answer = None
    for name, text in language_reference():
        paragraphs = [" ".join(word.split()) for word in text.decode().split("\n\n")]
        answer = next(
            (
                text
                for text in paragraphs
                if text[:1].isalpha() and text.endswith(".") and len(text) < 400
            ),
            None,
        )
        if answer is None:
            continue
        if previous_answer is not None:
            question = {"role": USER, "content": f"What does Python's reference say of {name}?"}
            right, wrong = (
                {"role": ASSISTANT, "content": text} for text in (answer, previous_answer)
            )
            yield {
                "messages": [question, right],
                "chosen": [question, right],
                "rejected": [question, wrong],
            }
        previous_answer = answer
