"""Special tokens and ends: those of transformers for directories of 2019 to 2025, or a refusal."""

import json
import shutil
import time

import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.inputs.tokenizers.__main__ import main as command
from tests.support.goldens import GOLDENS, golden

HOME = GOLDENS / "tokenizers" / "directories"
TABLE = golden("tokenizers/directories/directories.json")
# transformers 5 forgets that special_tokens_map.json names them as special where added_tokens.json
# numbers them; version 4 does not.
FORGOTTEN = {
    "2022 BERT with entities": {70, 71},
    "2023 Llama 2 with ChatML": {320},
    "2023 tokenizer.json with added tokens in another file": {320},
}


def directory(path, base, files):
    """Writes a directory of a tokenizer."""
    path.mkdir(exist_ok=True)
    local = "tokenizer.json" if base.endswith(".json") else "tokenizer.model"
    shutil.copyfile(HOME / base, path / local)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("name", TABLE)
def test_special_tokens_and_ends_are_those_of_transformers(tmp_path, name):
    case = TABLE[name]
    tokenizer = load_tokenizer(directory(tmp_path, case["base"], case["files"]))
    special = tokenizer.special
    roles = {role: [special.texts[role], number] for role, number in special.roles.items()}
    expected = dict(case["roles"])
    if "eos_token" not in expected and "model_eos_ids" in case:
        # There the model alone knows what ends a text.
        expected["eos_token"] = roles["eos_token"]
        assert tokenizer.eos_id == case["model_eos_ids"][0]
    assert roles == expected
    if "model_eos_ids" in case:
        assert list(special.model_eos_ids) == case["model_eos_ids"]
    assert set(tokenizer.eos_ids) == {
        *special.model_eos_ids, *(() if tokenizer.eos_id is None else (tokenizer.eos_id,))
    }
    assert tokenizer.vocab_size == case["size"]
    left_out = {i for i in range(case["size"]) if i in tokenizer.special_ids}
    assert left_out == {*case["left_out"], *FORGOTTEN.get(name, ())}
    for text, ids in case["encoded"].items():
        # What only the model's own file calls unknown is no text.
        if name != "a model of SentencePiece alone" or text != "<unk>":
            assert tokenizer.encode(text, False).tolist() == ids, text
    if "hello" in case:
        assert tokenizer.encode("hello").tolist() == case["hello"]
    word = tokenizer.encode("hello", False).tolist()
    assert tokenizer.decode([*sorted(left_out), *word], True).strip() == "hello"


def test_an_empty_text_is_no_token_but_the_model_has_its_own(tmp_path):
    empty = {"bos_token": "", "eos_token": "", "unk_token": ""}
    files = {"tokenizer_config.json": empty}
    tokenizer = load_tokenizer(directory(tmp_path / "a", "llama.model", files))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (1, 2, (2,))
    typed = {"tokenizer_config.json": {name: {"content": ""} for name in empty}}
    assert load_tokenizer(directory(tmp_path / "b", "llama.model", typed)).eos_id == 2
    with pytest.raises(ConfigError, match=r"tokenizer_config.json.*eos_token"):
        _ = load_tokenizer(directory(tmp_path / "c", "unmarked.json", files)).eos_id
    files |= {"config.json": {"eos_token_id": 1}}
    assert load_tokenizer(directory(tmp_path / "c", "unmarked.json", files)).eos_id == 1
    by_class = {"tokenizer_config.json": {**empty, "tokenizer_class": "LlamaTokenizerFast"}}
    assert load_tokenizer(directory(tmp_path / "d", "unmarked.json", by_class)).eos_id == 1


def test_null_is_no_token_but_a_text_always_ends(tmp_path):
    files = {"tokenizer_config.json": {"bos_token": None, "eos_token": None}}
    tokenizer = load_tokenizer(directory(tmp_path, "llama.model", files))
    assert (tokenizer.bos_id, tokenizer.begin_ids, tokenizer.eos_id) == (None, (), 2)


@pytest.mark.parametrize("base", ["llama.model", "llama3.json"])
@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "<|nowhere|>"}, r"eos_token.*'<\|nowhere\|>'"),
        ("special_tokens_map.json", {"bos_token": {"content": "<|no|>"}}, r"bos_token.*'<\|no\|>'"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token.* 5;"),
        ("tokenizer_config.json", {"pad_token": True}, "pad_token.*True"),
        ("tokenizer_config.json", {"eos_token": ["</s>"]}, r"eos_token.*\['</s>'\]"),
        ("tokenizer_config.json", {"eos_token": {"content": 3}}, "eos_token.*{'content'.*3}"),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, r"'\\ud800'"),
        ("tokenizer_config.json", {"unk_token": {"content": "a", "lstrip": 1}}, "lstrip.*1"),
        ("tokenizer_config.json", {"additional_special_tokens": "a"}, "special_tokens.* 'a';"),
        ("tokenizer_config.json", {"extra_special_tokens": ["a", 7]}, r"special_tokens\[1\].* 7;"),
        ("special_tokens_map.json", {"additional_special_tokens": [""]}, r"special_tokens\[0\]"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, r"added_tokens_decoder.*\[\]"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"-1": {"content": "a"}}}, "'-1'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1.5": {"content": "a"}}}, "'1.5'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(10**12): {"content": "a"}}},
         "'1000000000000'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": "a"}}, r"\['9'\].*'a'"),
        ("added_tokens.json", {"<a>": 10**12}, "'<a>'.*1000000000000"),
        ("added_tokens.json", {"<a>": -1}, "'<a>'.*-1"),
        ("added_tokens.json", {"<a>": "x"}, "'<a>'.*'x'"),
        ("added_tokens.json", {"<a>": True}, "'<a>'.*True"),
        ("added_tokens.json", {"<a>": 400.0}, "'<a>'.*400.0"),
        ("added_tokens.json", {"": 400}, r"added_tokens\.json.*''"),
        ("generation_config.json", {"eos_token_id": 10**12}, "eos_token_id.*1000000000000"),
        ("generation_config.json", {"eos_token_id": [1, -1]}, "eos_token_id.*-1"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id.*'x'"),
        ("config.json", {"eos_token_id": True}, "eos_token_id.*True"),
        ("config.json", {"eos_token_id": 1.5}, "eos_token_id.*1.5"),
        ("config.json", {"eos_token_id": {"a": 1}}, "eos_token_id.*{'a'.*1}"),
        ("config.json", {"text_config": {"eos_token_id": -1}}, "eos_token_id.*-1"),
        ("tokenizer_config.json", "[" * 100_000, "JSON"),
        ("special_tokens_map.json", "[1]", "JSON"),
        ("added_tokens.json", "", "Expecting|char 0"),
    ],
)
def test_what_is_no_token_is_refused_by_file_and_field(tmp_path, base, name, fields, message):
    tokenizer = load_tokenizer(directory(tmp_path, base, {name: fields}))
    with pytest.raises(ConfigError, match=message) as refused:
        _ = tokenizer.eos_ids
    assert name in str(refused.value)


def test_files_that_disagree_on_an_id_are_refused_with_both(tmp_path):
    for base, text, other in (
        ("llama.model", "<s>", 1), ("llama.json", "<s>", 1), ("llama3.json", "<new>", 293),
    ):
        path = directory(tmp_path / base, base, {"added_tokens.json": {text: 400}})
        with pytest.raises(ConfigError, match=f"{text}' is 400 in .*added.* and {other} by"):
            _ = load_tokenizer(path).vocab_size
    twice = {"added_tokens.json": {"<a>": 400, "<b>": 400}}
    path = directory(tmp_path / "two", "llama.model", twice)
    with pytest.raises(ConfigError, match="400.*'<a>'.*'<b>'"):
        _ = load_tokenizer(path).vocab_size


@pytest.mark.parametrize("base", ["llama.model", "llama3.json"])
def test_thousands_of_new_tokens_are_added_at_once(tmp_path, base):
    size = load_tokenizer(directory(tmp_path, base, {})).vocab_size
    added = {f"<|new_{i}|>": size + i for i in range(4000)}
    tokenizer = load_tokenizer(directory(tmp_path, base, {"added_tokens.json": added}))
    start = time.process_time()
    ids = tokenizer.encode("<|new_7|>hello<|new_3999|>", False).tolist()
    assert time.process_time() - start < 1
    assert (ids[0], ids[-1]) == (size + 7, size + 3999)
    assert tokenizer.vocab_size == size + 4000


def test_data_keeps_its_fingerprint_where_its_tokens_are_the_same(tmp_path):
    files = {
        "tokenizer_config.json": {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"}
    }
    tokenizer = load_tokenizer(directory(tmp_path / "a", "llama3.json", files))
    # As the versions before made it: of the files alone.
    assert tokenizer.fingerprint() == {
        "tokenizer": "JsonTokenizer",
        "sha256": "4a31894622a2fbb2dc51520b8080f44c10088631f053241c1aa03ad56e10cd9f",
    }
    others = [tokenizer.fingerprint()]
    for number, more in enumerate((
        {"added_tokens.json": {"<|im_start|>": 293}}, {"config.json": {"eos_token_id": 292}},
    )):
        files = {"tokenizer_config.json": {}, **more}
        path = directory(tmp_path / f"{number}", "llama3.json", files)
        others.append(load_tokenizer(path).fingerprint())
    assert len({other["sha256"] for other in others}) == 3


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}!",
        [{"name": "rag", "template": "?"}, {"name": "default", "template": "{{ bos_token }}!"}],
        {"rag": "?", "default": "{{ bos_token }}!"},
    ],
)
def test_a_template_stands_in_the_config_in_each_form_of_transformers(tmp_path, template):
    files = {"tokenizer_config.json": {"chat_template": template}}
    tokenizer = load_tokenizer(directory(tmp_path, "llama.model", files))
    message = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<s>!"


def test_a_template_that_is_no_text_is_refused(tmp_path):
    files = {"tokenizer_config.json": {"chat_template": 7}}
    with pytest.raises(ConfigError, match="chat_template.*7"):
        _ = load_tokenizer(directory(tmp_path, "llama.model", files)).chat


def test_a_command_shows_what_each_file_says(tmp_path, capsys):
    case = TABLE["2023 Llama 2 with ChatML"]
    path = directory(tmp_path / "model", case["base"], case["files"])
    assert command(["show", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ids from 0 to 321" in shown
    assert "eos_token 321 '<|im_end|>' special_tokens_map.json: eos_token" in shown
    assert "320 '<|im_start|>' special added_tokens.json: '<|im_start|>'" in shown
    assert "end an answer: 321 '<|im_end|>'" in shown
    assert command(["show", str(tmp_path / "absent")]) == 2


def test_directories_of_other_tokenizers_are_refused_by_name(tmp_path):
    path = tmp_path / "gpt2"
    path.mkdir()
    (path / "vocab.json").write_text("{}")
    (path / "merges.txt").write_text("")
    with pytest.raises(ConfigError, match="merges.txt.*vocab.json"):
        load_tokenizer(path)
    files = {"tokenizer_config.json": {"tokenizer_class": "XLMRobertaTokenizer"}}
    with pytest.raises(ConfigError, match="XLMRobertaTokenizer"):
        load_tokenizer(directory(tmp_path / "xlmr", "llama.model", files)).encode("a")
