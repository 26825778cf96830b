"""A language model on a filtered, packed mixture of three text datasets in three file formats.

The text comes with a Python installation: documentation, source code and the licenses of packages.
On first use, the text is written to .jsonl.gz, .parquet and .jsonl.zst files, which are then read
like any other files.
"""

import ast
import functools
import importlib.metadata
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import fiddle as fdl

from praxis_lite import register
from praxis_lite.experiments import lm
from praxis_lite.inputs import (
    Documents,
    JsonLines,
    Mixture,
    PackedText,
    Parquet,
    language_reference,
)

__all__ = ["PythonTexts", "code", "docs", "examples_of", "is_worth_learning", "licenses"]

Texts = Iterator[tuple[str, str]]


def docs() -> Texts:
    """Yields (title, text) for topics of the language reference and for docstrings."""
    for name, text in language_reference():
        yield name, text.decode()
    for path, text in code():
        for node in ast.walk(ast.parse(text)):
            is_documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            if is_documented and (docstring := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'name', '')}", docstring


def code() -> Texts:
    """Yields (name, source) for the top-level modules of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.name, path.read_text(encoding="utf-8", errors="replace")


def licenses() -> Texts:
    """Yields (path, text) for the licenses of installed packages, without duplicates."""
    seen = set()
    for package in sorted(importlib.metadata.distributions(), key=lambda dist: dist.name.lower()):
        for file in sorted(package.files or (), key=str):
            path = Path(file.locate())
            if file.name.lower().startswith(("licen", "copying", "notice")) and path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                if text not in seen:
                    seen.add(text)
                    yield f"{package.name}/{file.name}", text


def examples_of(folder: str, texts: Callable[[], Texts]) -> Iterator[dict[str, str]]:
    """Converts (title, text) pairs to examples with the keys "name" and "text"."""
    for title, text in texts():
        yield {"name": title, "text": text}


def is_worth_learning(example: dict[str, str]) -> bool:
    """Returns whether the text of an example has at least 200 characters."""
    return len(example["text"]) >= 200


@register
class PythonTexts(lm.Llama):
    """Trains lm.Llama on documentation, code and licenses, with more code after step 100.

    Measured in tokens, the final mixture is 50% documentation, 40% code and 10% licenses. The files
    are written to `folder` on first use; change the folder with --set folder=DIR. For tokens other
    than bytes, use --set corpus.tokenizer=DIR.
    """

    folder = "~/.cache/praxis_lite/python_texts"

    def documents(self, source, name: str, texts: Callable[[], Texts]):
        """Returns the config of a document dataset whose file is in `folder`."""
        make = fdl.Partial(examples_of, texts=texts)
        files = fdl.Config(source, f"{self.folder}/{name}", make=make)
        return fdl.Config(
            Documents,
            files,
            tokenizer=self.corpus.tokenizer,
            keep=is_worth_learning,
            heldout_percent=5,
        )

    def datasets(self):
        documents = {
            "docs": self.documents(JsonLines, "docs.jsonl.gz", docs),
            "code": self.documents(Parquet, "code.parquet", code),
            "licenses": self.documents(JsonLines, "licenses.jsonl.zst", licenses),
        }
        rows = functools.partial(fdl.Config, PackedText, seq_len=256)
        sources = {
            name: rows(document, "train", batch_size=16, shuffle=True)
            for name, document in documents.items()
        }
        train = fdl.Config(
            Mixture,
            sources,
            unit="tokens",
            batch_size=16,
            weights=[
                (0, {"docs": 0.8, "code": 0.1, "licenses": 0.1}),
                (100, {"docs": 0.5, "code": 0.4, "licenses": 0.1}),
            ],
        )
        heldout = {
            f"heldout_{name}": rows(document, "heldout", batch_size=16, shuffle=False)
            for name, document in documents.items()
            if name != "licenses"
        }
        return {"train": train, **heldout}

    def run(self):
        run = super().run()
        run.evaluation.max_batches = 8
        return run
