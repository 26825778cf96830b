"""Text that comes back: of every kind of tokenizer, whole or as a stream, and always the same."""

import io
import json
import logging
import os
import random

import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    StreamingDecoder,
    load_tokenizer,
)
from praxis_lite.inputs.tokenizers.rust_library import errors_of_rust
from tests.support.goldens import GOLDENS

HOME = GOLDENS / "tokenizers" / "directories"
WORDS = ["the", "quick", "né", "fox", "over", "hello", "world", "cat", "😀", "."]
LINES = [" ".join(random.Random(i).choices(WORDS, k=9)) for i in range(80)]
TEXTS = [
    "hello world cat", "hello</s>world cat", "<s>the fox</s> né</s></s>cat", " two  blanks ",
    "</s>", "\n\ncat\t½ 日本",
]


def sentencepiece_model(path, **settings):
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, hard_vocab_limit=False, minloglevel=2,
        character_coverage=1.0, vocab_size=330 if settings.get("byte_fallback") else 50, **settings,
    )
    path.write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def streamed(tokenizer, ids, skips):
    decoder = StreamingDecoder(tokenizer, skips)
    return "".join([*map(decoder.push, ids), decoder.flush()])


def streams(tokenizer, count, chance):
    """Returns lists of ids: any but bytes, those that are special, and ids that are none."""
    size = tokenizer.vocab_size
    # A byte that is no character makes those before it unknown, which are text already.
    known = [i for i in range(size) if not (tokenizer.name_of(i) or "").startswith("<0x")]
    special = [*tokenizer.special_ids, size + 3, -1]
    for length in chance.choices([3, 40, 200], k=count):
        for pool in ([*known, -2, -1, size, size + 4], [*special, *special, *known[7:11]]):
            yield chance.choices(pool, k=length)


def check_streams(tokenizer, count=3):
    chance = random.Random(7)
    texts = [tokenizer.encode(text, False).tolist() for text in TEXTS]
    for ids in (*texts, *streams(tokenizer, count, chance)):
        for skips in (False, True):
            assert streamed(tokenizer, ids, skips) == tokenizer.decode(ids, skips), (ids, skips)


def check_sentencepiece(path, **settings):
    library = sentencepiece_model(path, **settings)
    tokenizer = SentencePieceTokenizer(path)
    for text in TEXTS:
        ids = tokenizer.encode(text, False).tolist()
        if "<" not in text:
            assert ids == library.encode(text) and tokenizer.decode(ids) == library.decode(ids)
        elif settings["model_type"] != "word":  # Words of bytes have marks for blanks.
            # A blank more or less: models that leave out blanks put one before each word.
            decoded = tokenizer.decode(ids)
            assert decoded.replace(" ", "") == text.replace(" ", "")
            without = text.replace("<s>", "").replace("</s>", "")
            decoded = tokenizer.decode(ids, True)
            assert decoded.replace(" ", "") == without.replace(" ", "")
    # What stands behind a special token keeps its first character, and gets no blank.
    if not settings.get("remove_extra_whitespaces", True) and settings["model_type"] != "word":
        text = "hello</s>world  cat</s> the"
        assert tokenizer.decode(tokenizer.encode(text, False)) == text
    ids = tokenizer.encode("hello", False).tolist()
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**12, -1]) == tokenizer.decode(ids)
    check_streams(tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "unigram"},
        {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True,
         "remove_extra_whitespaces": False},
        {"model_type": "bpe", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
        {"model_type": "char", "normalization_rule_name": "identity"},
        {"model_type": "word", "byte_fallback": True, "normalization_rule_name": "nfkc"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_sentencepiece_gives_back_what_it_was_given(tmp_path, settings):
    check_sentencepiece(tmp_path / "tokenizer.model", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["unigram", "bpe", "word", "char"])
@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nfkc"])
def test_sentencepiece_of_every_kind_gives_back_what_it_was_given(
    tmp_path, model_type, byte_fallback, rule
):
    for removes in (False, True):
        for prefix in (False, True):
            check_sentencepiece(
                tmp_path / "tokenizer.model", model_type=model_type, byte_fallback=byte_fallback,
                normalization_rule_name=rule, remove_extra_whitespaces=removes,
                add_dummy_prefix=prefix,
            )


def library_tokenizers():
    """Returns tokenizers of the library by what their decoders do."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def trained(model, trainer, pre_tokenizer, decoder, normalizer=None, **settings):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizer
        if decoder is not None:
            tokenizer.decoder = decoder
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        special = ["<unk>", "<s>", "</s>"]
        settings = {"vocab_size": 90, "special_tokens": special, "show_progress": False} | settings
        tokenizer.train_from_iterator(LINES, trainer(**settings))
        return tokenizer

    unknown = {"unk_token": "<unk>"}
    result = {
        f"metaspace, {scheme}": trained(
            models.BPE(**unknown), trainers.BpeTrainer,
            pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "first"),
            decoders.Metaspace(prepend_scheme=scheme),
        )
        for scheme in ("always", "never", "first")
    }
    result |= {
        f"wordpiece, cleanup {cleanup}": trained(
            models.WordPiece(**unknown), trainers.WordPieceTrainer,
            pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=cleanup),
            normalizers.BertNormalizer(),
        )
        for cleanup in (True, False)
    }
    result["byte level"] = trained(
        models.BPE(), trainers.BpeTrainer, pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(), vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    result["ends of words"] = trained(
        models.BPE(end_of_word_suffix="</w>", **unknown), trainers.BpeTrainer,
        pre_tokenizers.Whitespace(), decoders.BPEDecoder(), end_of_word_suffix="</w>",
    )
    result["words"] = trained(
        models.WordLevel(**unknown), trainers.WordLevelTrainer, pre_tokenizers.Whitespace(), None
    )
    for name in ("llama.json", "t5.json"):
        result[name] = Tokenizer.from_file(str(HOME / name))
    result["bytes that only the decoder joins"] = Tokenizer.from_file(str(HOME / "llama.json"))
    result["bytes that only the decoder joins"].model.byte_fallback = False
    return result


def test_every_decoder_of_the_library_streams_what_it_decodes(tmp_path):
    for name, library in library_tokenizers().items():
        library.add_special_tokens(["<a blank>"])
        folder = tmp_path / name
        folder.mkdir()
        library.save(str(folder / "tokenizer.json"))
        tokenizer = load_tokenizer(folder)
        check_streams(tokenizer, count=2)
        for ids in streams(tokenizer, 2, random.Random(3)):
            for skips in (False, True):
                known = [i for i in ids if i >= 0]
                expected = library.decode(known, skip_special_tokens=skips)
                assert tokenizer.decode([*ids, 2**40], skips) == expected, name


def test_bytes_stream_what_they_decode_and_end_with_the_end_of_a_text():
    tokenizer = ByteTokenizer()
    for ids in ([104, 195, 169, 256, 104], [256], [240, 159, 152, 104, 255, 300, -1, 104]):
        for skips in (False, True):
            assert streamed(tokenizer, ids, skips) == tokenizer.decode(ids, skips)


def test_a_long_stream_of_bytes_that_are_no_text_takes_a_time_that_grows_with_it():
    class Counting(ByteTokenizer):
        num_ids = 0

        def decode(self, ids, skip_special_tokens=False):
            Counting.num_ids += len(ids)
            return super().decode(ids)

    assert streamed(Counting(), [97, *[128] * 5000], False) == "a" + "\ufffd" * 5000
    assert Counting.num_ids < 5000 * 50


def test_a_text_has_one_encoding_whatever_a_file_asks_for(tmp_path, caplog):
    fields = json.loads((HOME / "llama3.json").read_text())
    text = " ".join(WORDS * 9)
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    expected = load_tokenizer(tmp_path).encode(text).tolist()
    fields["model"]["dropout"] = 0.5
    fields["truncation"] = {
        "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0
    }
    fields["padding"] = {
        "strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with caplog.at_level(logging.INFO, "praxis_lite"):
        tokenizer = load_tokenizer(tmp_path)
        assert {tuple(tokenizer.encode(text).tolist()) for _ in range(20)} == {tuple(expected)}
        (documents,) = tokenizer.encode_documents([text.encode()])
    assert documents.tolist() == tokenizer.encode(text, False).tolist()
    assert "dropout 0.5 is not followed" in caplog.text


def test_sampling_of_sentencepiece_is_not_followed(tmp_path, caplog):
    (tmp_path / "spiece.model").write_bytes((HOME / "t5.model").read_bytes())
    sampling = {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}
    settings = {"sp_model_kwargs": sampling, "split_special_tokens": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.INFO, "praxis_lite"):
        tokenizer = load_tokenizer(tmp_path)
        assert len({tuple(tokenizer.encode("hello world").tolist()) for _ in range(20)}) == 1
        assert tokenizer.encode("</s>", False).tolist() == [1]
    assert "enable_sampling is not followed" in caplog.text
    assert "split_special_tokens is not followed" in caplog.text


BROKEN = {
    "empty": b"", "no JSON": b"{", "a list": b"[]", "nested": b"[" * 200_000,
    "no UTF-8": b"\xff" * 99, "no model": b'{"version": "1.0"}', "zeros": bytes(999),
    "text": b"the cat sat" * 99,
}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_in_a_paragraph(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/{name} "):
        load_tokenizer(tmp_path).encode("a")


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (("post_processor", "special_tokens"), {}, "'<s>'.*special_tokens"),
        (("pre_tokenizer",), {"type": "FixedLength", "length": 0}, "FixedLength.* 0"),
        (("model", "continuing_subword_prefix"), "aaaaaaaaaaaa", "continuing_subword_prefix.*'aaa"),
        (("normalizer",), {"type": "Sequence", "normalizers": [GROWS] * 60}, f"izer.*{2**60}"),
        (("decoder",), {"type": "Sequence", "decoders": [GROWS] * 60}, f"coder.*{2**60}"),
    ],
)
def test_a_file_that_ends_the_library_in_a_panic_is_refused(tmp_path, part, value, message):
    fields = json.loads((HOME / "llama.json").read_text())
    place = fields
    for name in part[:-1]:
        place = place[name]
    place[part[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=f"tokenizer.json.*{message}"):
        load_tokenizer(tmp_path).encode("a")


def test_a_panic_that_nothing_foresaw_is_the_error_of_a_file(tmp_path):
    class PanicException(BaseException):
        """As the library's, whose class has no public name."""

    with pytest.raises(ConfigError, match="no entry"), errors_of_rust(tmp_path):
        raise PanicException("no entry")
    with pytest.raises(KeyboardInterrupt), errors_of_rust(tmp_path):
        raise KeyboardInterrupt


def test_pipes_folders_and_huge_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes((HOME / "llama3.json").read_bytes())
    beside = tmp_path / "special_tokens_map.json"
    os.mkfifo(beside)
    with pytest.raises(ConfigError, match="special_tokens_map.json"):
        _ = load_tokenizer(tmp_path).eos_id
    beside.unlink()
    beside.mkdir()
    with pytest.raises(ConfigError, match="special_tokens_map.json"):
        _ = load_tokenizer(tmp_path).eos_id
    beside.rmdir()
    os.truncate(path, 2**40)
    with pytest.raises(ConfigError, match=r"1.0.*TiB"):
        load_tokenizer(tmp_path).encode("a")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="AutoTokenizer"):
        load_tokenizer(tmp_path)
    for name in ("~nobody_has_this_name/x", "a" * 5000):
        with pytest.raises(ConfigError, match=name[:50]):
            load_tokenizer(name)
