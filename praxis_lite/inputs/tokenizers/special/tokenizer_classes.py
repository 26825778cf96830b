"""Special tokens that classes of transformers have without any file of a directory naming them."""

from collections.abc import Mapping
from typing import Any

ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)

# Special tokens in the order of ROLES; "-" where the class has none. They count where the
# vocabulary has them.
_TOKENS = {
    "Albert": "[CLS] [SEP] <unk> [SEP] <pad> [CLS] [MASK]",
    "Bart": "<s> </s> <unk> </s> <pad> <s> <mask>",
    "Bert": "- - [UNK] [SEP] [PAD] [CLS] [MASK]",
    "BigBird": "<s> </s> <unk> [SEP] <pad> [CLS] [MASK]",
    "CodeLlama": "<s> </s> <unk> - - - -",
    "Cohere": "<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <UNK> <SEP> <PAD> <CLS> <MASK_TOKEN>",
    "DebertaV2": "[CLS] [SEP] [UNK] [SEP] [PAD] [CLS] [MASK]",
    "GPT2": "<|endoftext|> <|endoftext|> <|endoftext|> - - - -",
    "GPTNeoX": "<|endoftext|> <|endoftext|> <|endoftext|> - <|padding|> - -",
    "Gemma": "<bos> <eos> <unk> - <pad> - <mask>",
    "Llama": "<s> </s> <unk> - - - -",
    "Qwen2": "- <|endoftext|> <|endoftext|> - <|endoftext|> - -",
    "Roberta": "<s> </s> <unk> </s> <pad> <s> <mask>",
    "T5": "- </s> <unk> - <pad> - -",
    "XLNet": "<s> </s> <unk> <sep> <pad> <cls> <mask>",
}
_ALIKE = {"Electra": "Bert", "DistilBert": "Bert", "CodeGen": "GPT2", "Whisper": "GPT2"}
# By model_type of config.json, for directories that name no class.
_OF_MODELS = {
    "albert": "Albert", "bart": "Bart", "bert": "Bert", "codegen": "GPT2", "cohere": "Cohere",
    "distilbert": "Bert", "electra": "Bert", "gemma": "Gemma", "gemma2": "Gemma",
    "gemma3": "Gemma", "gemma3_text": "Gemma", "gpt2": "GPT2", "gpt_neo": "GPT2",
    "gpt_neox": "GPTNeoX", "gptj": "GPT2", "llama": "Llama", "mbart": "MBart",
    "mt5": "T5", "pegasus": "Pegasus", "qwen2": "Qwen2", "qwen3": "Qwen2", "qwen3_moe": "Qwen2",
    "roberta": "Roberta", "t5": "T5", "xglm": "XGLM", "xlm-roberta": "XLMRoberta",
    "xlnet": "XLNet",
}
# Their ids are no pieces' numbers: tokens of other vocabularies stand before them.
_RENUMBERED = {
    "Barthez", "Bartpho", "Camembert", "LayoutXLM", "M2M100", "MBart", "MBart50", "MLuke", "Nllb",
    "PLBart", "Pegasus", "SeamlessM4T", "Speech2Text", "XGLM", "XLMRoberta",
}

# What `encode` puts an end of a text behind, unless add_eos_token says otherwise.
ENDED = {"Albert", "T5"}


def class_of(tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns the class of a directory's tokenizer, as "Llama" for LlamaTokenizerFast, or ""."""
    if config.get("model_type") == "qwen2":  # Whose files often name another.
        return "Qwen2"
    for fields in (tokenizer_config, config):
        name = fields.get("tokenizer_class")
        if isinstance(name, str) and name:
            stem = name.removesuffix("Fast").removesuffix("Tokenizer")
            return _ALIKE.get(stem, stem)
    model_type = config.get("model_type")
    return _OF_MODELS.get(model_type, "") if isinstance(model_type, str) else ""


def default_tokens(name: str) -> dict[str, str]:
    """Returns the texts of a class's special tokens by role."""
    texts = _TOKENS.get(name, "").split()
    return {role: text for role, text in zip(ROLES, texts, strict=False) if text != "-"}


def is_renumbered(name: str) -> bool:
    """Returns True if a class has other ids than the SentencePiece model that it reads."""
    return name in _RENUMBERED
