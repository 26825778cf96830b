"""Text that comes back: of every kind of tokenizer, whole or as a stream, and always the same."""

import random

from praxis_lite.inputs.tokenizers import ByteTokenizer, StreamingDecoder, load_tokenizer
from tests.support.goldens import GOLDENS

HOME = GOLDENS / "tokenizers" / "directories"
WORDS = ["the", "quick", "né", "fox", "over", "hello", "world", "cat", "😀", "."]
LINES = [" ".join(random.Random(i).choices(WORDS, k=9)) for i in range(80)]
TEXTS = [
    "hello world cat",
    "hello</s>world cat",
    "<s>the fox</s> né</s></s>cat",
    " two  blanks ",
    "</s>",
    "\n\ncat\t½ 日本",
]


def streamed(tokenizer, ids, skips):
    decoder = StreamingDecoder(tokenizer, skips)
    return "".join([*map(decoder.push, ids), decoder.flush()])


def streams(tokenizer, count, chance):
    """Returns lists of ids: any but bytes, those that are special, and ids that are none."""
    size = tokenizer.vocab_size
    # A byte that is no character makes those before it unknown in the complete text, but not in a
    # stream, which has returned them already.
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
            models.BPE(**unknown),
            trainers.BpeTrainer,
            pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "first"),
            decoders.Metaspace(prepend_scheme=scheme),
        )
        for scheme in ("always", "never", "first")
    }
    result |= {
        f"wordpiece, cleanup {cleanup}": trained(
            models.WordPiece(**unknown),
            trainers.WordPieceTrainer,
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(cleanup=cleanup),
            normalizers.BertNormalizer(),
        )
        for cleanup in (True, False)
    }
    result["byte level"] = trained(
        models.BPE(),
        trainers.BpeTrainer,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    result["ends of words"] = trained(
        models.BPE(end_of_word_suffix="</w>", **unknown),
        trainers.BpeTrainer,
        pre_tokenizers.Whitespace(),
        decoders.BPEDecoder(),
        end_of_word_suffix="</w>",
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
