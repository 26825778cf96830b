"""The readers of untrusted files, with functions that write undamaged files and read them."""

import functools
import gzip
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite import inputs
from praxis_lite.inputs.sources.base import Source
from tests.faults.readers import Reader

TEXTS = [f"the cat number {i} sat on the mat, né 😀" for i in range(60)]
# Special tokens of chat models.
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "hello cat"},
    {"role": "assistant", "content": "yes it is"},
]


def read_source(source: Source) -> None:
    """Reads the first examples of a source by index."""
    source.check()
    source.fingerprint()
    for index in range(min(len(source), 500)):
        source[index]


# JSON lines, and the text in them.


def _lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _json_lines(folder: Path) -> None:
    text = _lines([{"text": text, "n": i, "list": [1, 2]} for i, text in enumerate(TEXTS)])
    (folder / "a.jsonl").write_text(text)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    import pyarrow

    packed = pyarrow.Codec("zstd").compress(text.encode(), asbytes=True)
    (folder / "c.jsonl.zst").write_bytes(packed)


def _read_documents(example_format: str, folder: Path) -> None:
    tokenizer = inputs.TokenIds() if example_format == "ids" else _ChatBytes()
    source = inputs.JsonLines(f"{folder}/*.jsonl")
    documents = inputs.Documents(source, example_format, tokenizer=tokenizer)
    documents.check()
    for index in range(len(documents.lengths)):
        documents[index]


class _ChatBytes(inputs.ByteTokenizer):
    """A byte tokenizer with a chat template."""

    @property
    def chat(self) -> Any:
        from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate

        return ChatTemplate(CHAT)


def _rows(rows: list[Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "a.jsonl").write_text(_lines(rows))

    return make


def _read_preferences(folder: Path) -> None:
    data = inputs.PreferenceData(
        f"{folder}/a.jsonl", "train", 2, 300, _ChatBytes(), shuffle=False, heldout_percent=0
    )
    data.check()
    data.rows(0, slice(0, 1))


def _corpus(folder: Path) -> None:
    for number in range(8):
        (folder / f"{number}.txt").write_text("\n\n".join(TEXTS[number:]) + "né\r\nx\n" * 50)


def _read_corpus(folder: Path) -> None:
    corpus = inputs.TextCorpus(f"{folder}/*.txt", heldout_percent=50)
    for split in ("train", "heldout"):
        corpus.documents(split)


def _prompts(folder: Path) -> None:
    (folder / "a.txt").write_text("hello\nwhat is né?\n")
    (folder / "b.jsonl").write_text(_lines([{"prompt": "hello"}, {"messages": MESSAGES[:1]}]))


def _read_prompts(folder: Path) -> None:
    from praxis_lite.trainer.decoding.user_prompts import prompt_ids, read_prompts

    for name in ("a.txt", "b.jsonl"):
        for prompt in read_prompts(folder / name):
            prompt_ids(prompt, _ChatBytes(), "--prompts")


# Columns, records, arrays and images.


def _columns(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from pyarrow import feather, ipc

    table = pyarrow.table(
        {
            "text": TEXTS,
            "ids": [[i, 1] for i in range(60)],
            "messages": [MESSAGES] * 60,
            "word": pyarrow.array(TEXTS).dictionary_encode(),
            "bytes": [b"\xff"] * 60,
        }
    )
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=17)
    with ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, 17)
    with ipc.new_stream(folder / "b.arrow", table.schema) as writer:
        writer.write_table(table, 17)
    feather.write_feather(table, folder / "c.arrow", compression="zstd")


def _records(folder: Path) -> None:
    import google_crc32c
    from array_record.python.array_record_module import ArrayRecordWriter

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    feature = b"\x0a\x04text\x12\x06\x0a\x04\x0a\x02a\xff"
    ids = b"\x0a\x03ids\x12\x0f\x1a\x0d\x0a\x0b\x03" + b"\xfc" + b"\xff" * 8 + b"\x01"
    entries = b"".join(b"\x0a" + bytes([len(item)]) + item for item in (feature, ids))
    record = b"\x0a" + bytes([len(entries)]) + entries
    length = struct.pack("<Q", len(record))
    framed = length + masked(length) + record + masked(record)
    (folder / "a.tfrecord").write_bytes(framed * 30)
    (folder / "b.tfrecord.gz").write_bytes(gzip.compress(framed * 30))
    writer = ArrayRecordWriter(f"{folder}/a.array_record", "group_size:1")
    for _ in range(30):
        writer.write(record)
    writer.close()


def _arrays(folder: Path) -> None:
    np.save(folder / "a.npy", np.arange(60.0).reshape(20, 3))
    np.savez(folder / "b.npz", x=np.arange(20), y=np.ones((20, 2)))
    np.savez_compressed(folder / "c.npz", x=np.arange(20), y=np.ones((20, 2)))


def _images(folder: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (13, 7, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    for number, ending in enumerate(("png", "jpg", "gif", "bmp", "webp", "tiff")):
        (folder / f"class{number % 2}").mkdir(exist_ok=True)
        image.save(folder / f"class{number % 2}" / f"x{number}.{ending}")


# Models, checkpoints and jobs.


def _job(folder: Path) -> None:
    from praxis_lite.main import main
    from tests.faults.zoo import train_argv

    try:
        main(train_argv(folder / "job", "run.num_train_steps=6", "mesh.ici_mesh_shape=1,1,1"))
    except SystemExit as error:
        assert not error.code, error.code


def _without_arrays(folder: Path) -> None:
    """Leaves config.json, metrics, and only the text files of a checkpoint."""
    for path in (folder / "job").glob("*"):
        if path.is_file() and not path.name.endswith((".json", ".jsonl")):
            path.unlink()
    for path in (folder / "job/checkpoints").glob("*/*"):
        if path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(folder / "job/tensorboard", ignore_errors=True)


def _checkpoints_alone(folder: Path) -> None:
    (folder / "job").rename(folder / "trained")
    shutil.move(folder / "trained/checkpoints", folder / "job")
    shutil.rmtree(folder / "trained")


def _read_job(folder: Path) -> None:
    from praxis_lite.checkpoints import tools
    from praxis_lite.config.build import build
    from praxis_lite.config.config_json import load_config_file
    from praxis_lite.job.job_dir import JobDir
    from praxis_lite.trainer.metrics.json_lines import read_json_lines
    from praxis_tools.goodput.goodput import goodput_of

    loaded = load_config_file(folder / "job/config.json", packages=("faultzoo",))
    build(loaded.config)
    for name in ("metrics.jsonl", "eval_metrics.jsonl"):
        read_json_lines(folder / "job" / name)
    str(goodput_of(JobDir(folder / "job")))
    directory = tools.steps_directory(str(folder / "job"))
    tools.listing(tools.list_steps(directory))


def _read_checkpoint(folder: Path) -> None:
    from praxis_lite.checkpoints import tools
    from praxis_lite.checkpoints.digest import digest_of

    directory = tools.steps_directory(str(folder / "job"))
    step_dir = tools.step_dir_of(directory, None)
    tools.description(step_dir)
    if not tools.decoded_step_errors(step_dir):
        digest_of(step_dir)


def _source(name: str, glob: str) -> Callable[[Path], None]:
    return lambda folder: read_source(getattr(inputs, name)(f"{folder}/{glob}"))


READERS: tuple[Reader, ...] = (
    Reader("json lines", _json_lines, _source("JsonLines", "*.jsonl*")),
    Reader("parquet", _columns, _source("Parquet", "*.parquet")),
    Reader("arrow", _columns, _source("ArrowFiles", "*.arrow")),
    Reader("tfrecord", _records, _source("TfRecords", "*.tfrecord*")),
    Reader("array_record", _records, _source("ArrayRecords", "*.array_record")),
    Reader("npy", _arrays, _source("NpyFiles", "*.np*")),
    Reader("text files", _corpus, _source("TextFiles", "*.txt")),
    Reader("image files", _images, _source("ImageFiles", "*/*")),
    Reader("corpus", _corpus, _read_corpus),
    Reader(
        "text documents",
        _rows([{"text": text} for text in TEXTS]),
        functools.partial(_read_documents, "text"),
    ),
    Reader(
        "token id documents",
        _rows([{"ids": [1, 2, i]} for i in range(20)]),
        functools.partial(_read_documents, "ids"),
    ),
    Reader(
        "message documents",
        _rows([{"messages": MESSAGES}] * 5),
        functools.partial(_read_documents, "messages"),
    ),
    Reader(
        "completion documents",
        _rows([{"prompt": "hi", "completion": "there"}] * 5),
        functools.partial(_read_documents, "completion"),
    ),
    Reader(
        "preferences",
        _rows(
            [
                {"prompt": "x", "chosen": "y", "rejected": "z"},
                {
                    "chosen": MESSAGES,
                    "rejected": [MESSAGES[0], {"role": "assistant", "content": "no"}],
                },
            ]
        ),
        _read_preferences,
    ),
    Reader("prompts", _prompts, _read_prompts),
    Reader("job", _job, _read_job, prune=_without_arrays),
    Reader("checkpoint", _job, _read_checkpoint, prune=_checkpoints_alone),
)
