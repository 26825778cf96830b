"""`praxis tokenizers`: trains a tokenizer on text, or describes a tokenizer."""

import argparse
import contextlib
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.places import is_url, local_file, uploaded
from praxis_lite.job.command import Parser
from praxis_lite.programs.program import Program


class Tokenizers(Program):
    """Trains a byte-level BPE tokenizer, or describes a tokenizer."""

    name = "tokenizers"
    summary = "trains a byte-level BPE tokenizer, or describes a tokenizer"
    continues_without_output = True

    def add_arguments(self, parser: Parser) -> None:
        """Adds the subcommands train and show."""
        commands = parser.add_subparsers(required=True, metavar="{train,show}")
        show = commands.add_parser("show", help="list special tokens and end tokens of a tokenizer")
        show.set_defaults(command=_show)
        show.add_argument(
            "directory", metavar="DIR", help="directory or hf:// URL of the tokenizer"
        )
        train = commands.add_parser(
            "train",
            help="train a byte-level BPE tokenizer",
            description="Trains a byte-level BPE tokenizer like those of GPT-2 and Llama 3.",
        )
        train.set_defaults(command=_train)
        train.add_argument("files", metavar="FILES", help="comma-separated globs of text files")
        train.add_argument("directory", metavar="OUT_DIR", help="new or empty directory")
        train.add_argument(
            "--vocab-size",
            metavar="N",
            type=int,
            default=8192,
            help="number of tokens; default: 8192",
        )
        train.add_argument(
            "--special", nargs="+", default=[], metavar="TOKEN", help="additional special tokens"
        )
        train.add_argument(
            "--chat-template", metavar="FILE", help="Jinja chat template; default: ChatML format"
        )

    def run(self, args: argparse.Namespace) -> None:
        """Runs a subcommand; raises ConfigError if a file, a directory or a token is invalid."""
        args.command(args)


def _show(args: argparse.Namespace) -> None:
    from praxis_lite.inputs.tokenizers.loading import load_tokenizer
    from praxis_lite.inputs.tokenizers.training import description

    print(description(load_tokenizer(args.directory)))


def _train(args: argparse.Namespace) -> None:
    from praxis_lite.inputs.sources.files.paths import matching_files
    from praxis_lite.inputs.text.corpus import read_documents
    from praxis_lite.inputs.tokenizers.files import TOKENIZER_JSON
    from praxis_lite.inputs.tokenizers.training import CHAT, train_tokenizer
    from praxis_lite.job.local_directory import local_directory

    template = CHAT if args.chat_template is None else _template(local_file(args.chat_template))
    with contextlib.ExitStack() as stack:
        if is_url(args.directory):
            directory = stack.enter_context(uploaded(args.directory, TOKENIZER_JSON))
        else:
            directory = local_directory(args.directory)
        result = train_tokenizer(args.files, directory, args.vocab_size, args.special, template)
    texts = [text for path in matching_files(args.files) for _, text in read_documents(path)]
    num_bytes = sum(map(len, texts))
    num_tokens = sum(map(len, result.encode_documents(texts)))
    if not num_tokens:
        raise ConfigError(f"The files {args.files} contain no text. Specify files with text.")
    if result.vocab_size < args.vocab_size:
        print(
            f"The vocabulary has only {result.vocab_size} tokens instead of {args.vocab_size}, "
            "because the text contains no further pairs to merge."
        )
    print(
        f"{args.directory}: a tokenizer with {result.vocab_size} tokens. It encodes the "
        f"{num_bytes:,} bytes of text as {num_tokens:,} tokens, {num_bytes / num_tokens:.2f} bytes "
        "per token."
    )


def _template(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template={path} cannot be read: {getattr(error, 'strerror', None) or error}. "
            "Specify a UTF-8 text file."
        ) from None
