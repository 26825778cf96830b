"""Directories of tokenizers of each kind: ids, special tokens and chats are AutoTokenizer's."""

import functools
import io
import json
import random
import shutil
import sys

import pytest
import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from praxis_lite import ConfigError
from praxis_lite.inputs.tokenizers import JsonTokenizer, load_tokenizer
from tests.support.commands import praxis
from tests.support.goldens import GOLDENS, golden

HOME = GOLDENS / "tokenizers" / "directories"
TABLE = golden("tokenizers/directories/directories.json")
WORDS = ["the", "quick", "né", "fox", "over", "hello", "world", "cat", "😀", "."]
LINES = [" ".join(random.Random(i).choices(WORDS, k=9)) for i in range(80)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TEXTS = [
    "hello world cat",
    "",
    "  two  blanks ",
    "<s>the fox</s> né",
    "<s> the fox</s>cat</s>",
    "</s>",
    "hello<|im_end|>\nworld <|im_end|> ",
    "the<tool>fox <tool> cat",
    "\n\ncat\t½ 日本",
    "😀é",
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def write(path, **files):
    """Writes a directory; returns it. A file's name has __ for its dot."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        content = content if isinstance(content, str | bytes) else json.dumps(content)
        content = content.encode() if isinstance(content, str) else content
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def trained(model, trainer, pre_tokenizer, decoder, normalizer=None, template=None, **settings):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    settings = {"vocab_size": 90, "special_tokens": SPECIAL, "show_progress": False} | settings
    tokenizer.train_from_iterator(LINES, trainer(**settings))
    if template is not None:
        pairs = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[pair for pair in pairs if pair[0] in template]
        )
    return tokenizer


def byte_level(**settings):
    return trained(
        models.BPE(),
        trainers.BpeTrainer,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        **settings,
    )


def metaspace(scheme, **settings):
    return trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer,
        pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "first"),
        decoders.Metaspace(prepend_scheme=scheme),
        **settings,
    )


def word_piece():
    return trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer,
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
        normalizers.BertNormalizer(),
        template="<s> $A </s>",
    )


def unigram():
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer,
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
        normalizers.NFKC(),
        template="$A </s>",
        unk_token="<unk>",
    )


def added_tokens():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True), AddedToken("<|im_end|>", rstrip=True)])
    return tokenizer


@functools.cache
def sentencepiece_model(**settings):
    import sentencepiece

    # With older versions, this library refuses to convert SentencePiece models.
    pytest.importorskip("transformers", minversion="5.24")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        character_coverage=1.0,
        vocab_size=330 if settings.get("byte_fallback") else 50,
        **settings,
    )
    return written.getvalue()


LLAMA = {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True,
         "remove_extra_whitespaces": False}  # fmt: skip
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
BERT = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}


def bpe_files(tokenizer):
    fields = json.loads(tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in fields["merges"]]
    return {"vocab__json": fields["vocab"], "merges__txt": "#version: 0.2\n" + "\n".join(merges)}


def json_file(tokenizer, **config):
    return {"tokenizer__json": tokenizer.to_str(), "tokenizer_config__json": NAMES | config}


# Files of a directory by its kind.
KINDS = {
    "byte level": lambda: json_file(byte_level()),
    "byte level, BOS": lambda: json_file(byte_level(template="<s> $A")),
    "Qwen": lambda: (
        json_file(
            byte_level(), tokenizer_class="Qwen2Tokenizer", bos_token=None, eos_token="<|im_end|>"
        )
        | {"config__json": {"model_type": "qwen2", "eos_token_id": [3, 2]}}
    ),
    "GPT-2": lambda: (
        bpe_files(byte_level(special_tokens=["<|endoftext|>"]))
        | {"config__json": {"model_type": "gpt2"}}
    ),
    "Llama, tokenizer.json": lambda: json_file(
        metaspace("first", template="<s> $A"), tokenizer_class="LlamaTokenizerFast", legacy=True
    ),
    **{
        f"metaspace, {scheme}": lambda scheme=scheme: json_file(metaspace(scheme))
        for scheme in ("always", "first", "never")
    },
    "word piece": lambda: json_file(word_piece(), tokenizer_class="PreTrainedTokenizerFast"),
    "BERT, vocab.txt": lambda: {
        "vocab__txt": "\n".join([*BERT.values(), "[MASK]", "the", "fox", "##es", "hello", "."]),
        "config__json": {"model_type": "bert"},
        "tokenizer_config__json": BERT,
    },
    "unigram": lambda: json_file(unigram(), add_eos_token=True),
    "added tokens": lambda: json_file(added_tokens()),
    "added tokens in the config": lambda: json_file(
        byte_level(),
        additional_special_tokens=["<tool>"],
        pad_token={
            "__type": "AddedToken",
            "content": "<pad>",
            "lstrip": True,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        },
    ),
    "special tokens as text": lambda: json_file(byte_level(), split_special_tokens=True),
    "chat": lambda: json_file(byte_level(template="<s> $A"), chat_template=CHAT),
    "SentencePiece": lambda: {"tokenizer__model": sentencepiece_model(**LLAMA)},
    **{
        f"SentencePiece, Llama, legacy {legacy}": lambda legacy=legacy: {
            "tokenizer__model": sentencepiece_model(**LLAMA),
            "config__json": {"model_type": "llama", "eos_token_id": 2},
            "tokenizer_config__json": NAMES
            | {
                "legacy": legacy,
                "add_bos_token": True,
                "tokenizer_class": "LlamaTokenizer",
                "chat_template": CHAT,
            },
        }
        for legacy in (True, False)
    },
    "SentencePiece, T5": lambda: {
        "spiece__model": sentencepiece_model(model_type="unigram"),
        "config__json": {"model_type": "t5"},
        "tokenizer_config__json": {"tokenizer_class": "T5Tokenizer", "extra_ids": 10},
    },
}


def check_equal(ours, theirs):
    for text in TEXTS:
        for adds in (True, False):
            expected = theirs.encode(text, add_special_tokens=adds)
            assert ours.encode(text, adds).tolist() == expected, (text, adds)
        ids = ours.encode(text, False).tolist()
        for skips in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skips) == expected, (text, skips)
    assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)
    if theirs.eos_token_id is not None:
        assert ours.eos_id == theirs.eos_token_id
    assert ours.roles == theirs.special_tokens_map
    if theirs.chat_template is not None:
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " né"}]
        expected = theirs.apply_chat_template(said)["input_ids"]
        assert ours.apply_chat_template(said).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_ids_special_tokens_and_chats_are_those_of_transformers(tmp_path, kind, monkeypatch):
    directory = write(tmp_path / "model", **KINDS[kind]())
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    check_equal(ours, theirs)
    # Both read the normalized copy alike; this library does so without transformers.
    check_equal(ours, AutoTokenizer.from_pretrained(ours.directory))
    shutil.copytree(ours.directory, tmp_path / "copy")
    monkeypatch.setitem(sys.modules, "transformers", None)
    copy = load_tokenizer(tmp_path / "copy")
    check_equal(copy, theirs)
    assert copy.directory == tmp_path / "copy" and copy.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize("adds_eos", [None, False, True])
@pytest.mark.parametrize("adds_bos", [None, False, True])
@pytest.mark.parametrize("template", [None, "$A", "<s> $A", "<s> $A </s>"])
def test_add_bos_token_and_add_eos_token_are_those_of_transformers(
    tmp_path, template, adds_bos, adds_eos
):
    flags = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    flags = {name: value for name, value in flags.items() if value is not None}
    if template is None:  # The flags decide where there is no tokenizer.json.
        directory = write(
            tmp_path,
            tokenizer__model=sentencepiece_model(**LLAMA),
            tokenizer_config__json=NAMES | flags | {"tokenizer_class": "LlamaTokenizer"},
        )
    else:
        directory = write(tmp_path, **json_file(byte_level(template=template), **flags))
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    check_equal(ours, theirs)
    ids = theirs.encode("the fox", add_special_tokens=False)
    start, *_ = theirs.encode("the fox")
    begin = [ours.bos_id] if start == ours.bos_id else []
    assert ours.encode_prompt("the fox").tolist() == [*begin, *ids]
    assert ours.with_end(ours.encode_prompt("the fox")).tolist() == [*begin, *ids, ours.eos_id]


@pytest.mark.parametrize("name", TABLE)
def test_special_tokens_and_ends_are_those_of_published_directories(tmp_path, name):
    case = TABLE[name]
    base = "tokenizer__json" if case["base"].endswith(".json") else "tokenizer__model"
    if base == "tokenizer__model":
        pytest.importorskip("transformers", minversion="5.24")
    if name == "made up: both lists, and an object in the other file":
        # transformers 5.12 ignores one of the lists.
        pytest.importorskip("transformers", minversion="5.20")
    files = {base: (HOME / case["base"]).read_bytes(), **case["files"]}
    tokenizer = load_tokenizer(write(tmp_path, **files))
    assert tokenizer.roles == {role: text for role, (text, _) in case["roles"].items()}
    for text, number in case["roles"].values():
        assert tokenizer._tokenizer.token_to_id(text) == number
    if "model_eos_ids" in case:
        assert list(tokenizer.model_eos_ids) == case["model_eos_ids"]
        assert set(case["model_eos_ids"]) <= set(tokenizer.eos_ids)
    assert tokenizer.vocab_size == case["size"]
    assert sorted(tokenizer.special_ids) == sorted(case["left_out"])
    for text, ids in case["encoded"].items():
        assert tokenizer.encode(text, False).tolist() == ids, text
    if "hello" in case:
        assert tokenizer.encode("hello").tolist() == case["hello"]


@pytest.mark.parametrize("settings", [
    {"model_type": "unigram"}, LLAMA, {"model_type": "char"},
    {"model_type": "bpe", "add_dummy_prefix": False},
], ids=["unigram", "llama", "char", "without a prefix"])  # fmt: skip
@pytest.mark.parametrize("name", ["tokenizer.model", "mine.model"])
def test_a_bare_model_has_the_ids_and_texts_of_sentencepiece(tmp_path, settings, name):
    import sentencepiece

    content = sentencepiece_model(**settings)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    tokenizer = load_tokenizer(write(tmp_path, **{name: content}))
    for text in ("hello world cat", " two  blanks ", "\n\ncat\té", ""):
        ids = library.encode(text)
        assert tokenizer.encode(text, False).tolist() == ids
        if library.unk_id() not in ids:
            assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.vocab_size == library.get_piece_size()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (library.bos_id(), library.eos_id())


def test_a_rendered_text_does_not_get_a_second_bos_or_eos(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, **KINDS["chat"]()))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    ids = tokenizer.encode(text, False).tolist()
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
    assert tokenizer.encode_prompt(text).tolist() == ids
    assert tokenizer.with_end(tokenizer.encode_prompt(text)).tolist() == ids


@pytest.mark.parametrize("kind", ["Qwen", "GPT-2"])
def test_a_tokenizer_without_a_bos_puts_nothing_before_a_prompt(tmp_path, kind):
    directory = write(tmp_path, **KINDS[kind]())
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("the fox", False).tolist()
    assert tokenizer.encode_prompt("the fox").tolist() == ids
    document = tokenizer.with_end(tokenizer.encode_prompt("the fox"))
    assert document.tolist() == [*ids, tokenizer.eos_id]
    # Unless the job says so, for documents and prompts alike.
    tokenizer = JsonTokenizer(directory, documents_start_with_eos=True)
    assert tokenizer.encode_prompt("the fox").tolist() == [tokenizer.eos_id, *ids]


def test_a_missing_transformers_is_reported_with_the_pip_line(tmp_path, monkeypatch):
    directory = write(tmp_path / "a model", **bpe_files(byte_level()))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"a model.*transformers"):
        load_tokenizer(directory).encode("a")


def test_sentencepiece_models_are_not_converted_by_an_old_transformers(tmp_path, monkeypatch):
    config = NAMES | {"tokenizer_class": "LlamaTokenizer", "model_max_length": 77}
    model = sentencepiece_model(**LLAMA)
    directory = write(tmp_path, tokenizer__model=model, tokenizer_config__json=config)
    monkeypatch.setattr(transformers, "__version__", "5.23.1")
    with pytest.raises(ConfigError, match=r"transformers 5\.23\.1 .*tokenizer\.model.*5\.24"):
        load_tokenizer(directory).encode("a")


@pytest.mark.parametrize(("files", "message"), [
    ({"tokenizer__json": "{"}, "tokenizer.json"),
    ({"tokenizer__json": "{}", "tokenizer_config__json": "["}, "tokenizer_config.json"),
    ({"tokenizer__model": b"no model"}, "tokenizer.model"),
    ({"vocab__json": "{}"}, "vocab.json"),
])  # fmt: skip
def test_a_directory_that_cannot_be_read_is_reported_by_file(tmp_path, files, message):
    with pytest.raises(ConfigError, match=f"{tmp_path}.*{message}"):
        load_tokenizer(write(tmp_path, **files)).encode("a")


def test_what_is_no_directory_of_a_tokenizer_is_refused(tmp_path):
    write(tmp_path, config__json={})
    for path, message in ((tmp_path / "absent", "absent"), (tmp_path, r"config\.json")):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(path)


def test_a_text_has_one_encoding_of_all_of_it(tmp_path):
    tokenizer = byte_level()
    text = " ".join(WORDS * 9)
    expected = tokenizer.encode(text).ids
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=900)
    tokenizer.model.dropout = 0.5
    actual = load_tokenizer(write(tmp_path, **json_file(tokenizer)))
    for _ in range(9):
        assert actual.encode(text).tolist() == expected


@pytest.mark.parametrize(
    "template", [CHAT, [{"name": "rag", "template": "?"}, {"name": "default", "template": CHAT}]]
)
def test_a_template_is_read_in_each_form_of_transformers(tmp_path, template):
    directory = write(tmp_path, **json_file(byte_level(), chat_template=template))
    said = [{"role": "user", "content": "a"}]
    text = load_tokenizer(directory).apply_chat_template(said, tokenize=False)
    assert text == "<s>user: a</s>"


def test_a_command_shows_special_tokens_and_ends(tmp_path, capsys):
    assert praxis("tokenizers", "show", str(write(tmp_path, **KINDS["Qwen"]()))) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "eos_token '<|im_end|>'" in shown and "before a text: none" in shown
    assert "end of an answer: 3 '<|im_end|>', 2 '</s>' chat template: none" in shown
    assert praxis("tokenizers", "show", str(write(tmp_path / "chat", **KINDS["chat"]()))) == 0
    assert "chat template: yes" in capsys.readouterr().out
    assert praxis("tokenizers", "show", tmp_path / "absent") == 2
