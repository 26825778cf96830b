"""Creates golden files for Hugging Face model families with transformers, as in goldens/hf/.

    pip install torch transformers
    python tests/support/hf_goldens.py DIRECTORY [FAMILY ...]

The script does not import praxis_lite. It writes a folder for each family with config.json (in the
format of the installed transformers), model.safetensors, goldens.npz and goldens.json.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

SHARED = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 109,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 14, "num_key_value_heads": 1}),  # As in the 2B model.
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 14,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            },
        },
    ),
    "olmo2": ("Olmo2", {"tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 14,
            "moe_intermediate_size": 37,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_neox": (
        "GPTNeoX",
        {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "num_key_value_heads": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
}
FAMILIES["gpt_oss"] = (
    "GptOss",
    {
        "head_dim": 14,
        "intermediate_size": 37,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
)
LENGTHS, T, PROMPTS, NEW = (29, 17, 23), 29, (11, 4, 7), 16


# Name of the head in the file; transformers 5 renames it.
HEADS = {"gpt_neox": "embed_out.weight"}


def made(family: str) -> Any:
    """Returns a model with random weights whose logits have a standard deviation of about two."""
    name, settings = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    given = {key: x for key, x in {**SHARED, **settings}.items() if x is not None}
    config = getattr(transformers, f"{name}Config")(**given)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            is_norm = "norm" in path and weight.ndim == 1
            noise = torch.randn_like(weight)
            if is_norm:
                weight.add_(0.2 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * (1.2 / weight.shape[-1] ** 0.5))
        ids = torch.randint(3, 101, (4, T))
        scale = 2.0 / model(ids).logits.std()
        head = model.get_output_embeddings().weight
        if head is not model.get_input_embeddings().weight:
            head.mul_(scale)
    return model.eval()


def goldens(model: Any) -> dict[str, np.ndarray]:
    """Returns the arrays that tests/goldens/README.md describes."""
    actual: dict[str, Any] = {}
    rows = [torch.randint(3, 101, (n,)) for n in LENGTHS]
    pad = torch.zeros(len(rows), T, dtype=torch.long)

    def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = pad.clone(), pad.clone()
        for i, row in enumerate(rows):
            place = slice(0, len(row)) if side == "right" else slice(T - len(row), T)
            ids[i, place], mask[i, place] = row, 1
        return ids, mask

    ids, mask = padded("right")
    outputs = model(ids, attention_mask=mask, output_hidden_states=True)
    actual |= {
        "right_ids": ids,
        "right_mask": mask,
        "right_logits": outputs.logits,
        "right_hidden_states": torch.stack(outputs.hidden_states),
        "right_last_hidden_state": outputs.hidden_states[-1],
    }
    left_ids, left_mask = padded("left")
    positions = (left_mask.cumsum(1) - 1).clamp(min=0)
    left = model(left_ids, attention_mask=left_mask, position_ids=positions)
    actual |= {
        "left_ids": left_ids,
        "left_mask": left_mask,
        "left_position_ids": positions,
        "left_logits": left.logits,
    }
    actual |= packed(model)
    shifted = torch.randint(3, 101, (1, T))
    position_ids = torch.arange(7, 7 + T)[None]
    logits = model(shifted, position_ids=position_ids).logits
    actual |= {
        "shifted_ids": shifted,
        "shifted_position_ids": position_ids,
        "shifted_logits": logits,
    }
    actual |= greedy(model)
    loss = next_token_loss(model, ids, mask)
    loss.backward()
    actual["right_loss"] = loss
    grads: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if name == "lm_head.weight":
            name = HEADS.get(model.config.model_type, name)
        is_as_named = model.config.model_type == "gpt_oss"
        grads |= {name: weight.grad} if is_as_named else in_the_file(name, weight.grad)
    actual["tensor_names"] = np.array(list(grads))
    actual["gradient_norms"] = np.array([x.double().norm().item() for x in grads.values()])
    return {k: x.detach().numpy() if isinstance(x, torch.Tensor) else x for k, x in actual.items()}


def packed(model: Any) -> dict[str, torch.Tensor]:
    """Returns packed rows; the logits of each segment are computed without the other segments."""
    ids = torch.randint(3, 101, (2, T))
    segments, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    logits = torch.zeros(2, T, 101)
    for row, lengths in enumerate(((11, 13, 5), (6, 19, 4))):
        start = 0
        for number, length in enumerate(lengths, 1):
            place = slice(start, start + length)
            segments[row, place], positions[row, place] = number, torch.arange(length)
            logits[row, place] = model(ids[row : row + 1, place]).logits[0]
            start += length
    return {
        "packed_ids": ids,
        "packed_position_ids": positions,
        "packed_segment_ids": segments,
        "packed_logits": logits,
    }


def greedy(model: Any) -> dict[str, Any]:
    """Returns left-padded prompts of unequal length and their greedy continuations."""
    longest = max(PROMPTS)
    ids = torch.zeros(len(PROMPTS), longest, dtype=torch.long)
    mask, tokens, margin = torch.zeros_like(ids), [], np.inf
    for i, length in enumerate(PROMPTS):
        row = torch.randint(3, 101, (length,))
        ids[i, longest - length :], mask[i, longest - length :] = row, 1
        for _ in range(NEW):
            best = model(row[None]).logits[0, -1].topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            row = torch.cat([row, best.indices[:1]])
        tokens.append(row[length:])
    return {
        "greedy_prompts": ids,
        "greedy_mask": mask,
        "greedy_lengths": np.array(PROMPTS),
        "greedy_tokens": torch.stack(tokens),
        "greedy_margin": np.array(margin),
    }


def next_token_loss(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy over all targets that are not padding."""
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="none"
    )
    weights = mask[:, 1:].reshape(-1).float()
    return (losses * weights).sum() / weights.sum()


def trained(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, names: list[str]
) -> dict[str, np.ndarray]:
    """Returns the losses of ten AdamW steps, and the sums and norms of the tensors after them."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = next_token_loss(model, ids, mask)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Use the names in the file, as transformers does when it writes the tensors.
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    weights = [tensors[name].double() for name in names]
    return {
        "train_losses": np.array(losses),
        "train_sums": np.array([x.sum().item() for x in weights]),
        "train_norms": np.array([x.norm().item() for x in weights]),
    }


def training(folder: Path, actual: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays after ten training steps, and tolerances that allow for rounding.

    Args:
      folder: The folder with the model.
      actual: The other golden arrays of the model.
    """
    ids, mask = (torch.tensor(actual[f"right_{x}"]).long() for x in ("ids", "mask"))
    kind, names = transformers.AutoModelForCausalLM, [str(x) for x in actual["tensor_names"]]
    result = trained(read(kind, folder), ids, mask, names)
    # Repeat the ten steps with weights that differ by one rounding unit.
    nudged = read(kind, folder)
    with torch.no_grad():
        for weight in nudged.parameters():
            weight.mul_(1 + 2.0**-23 * torch.sign(torch.randn_like(weight)))
    other = trained(nudged, ids, mask, names)
    for name in ("sums", "norms"):
        moved = np.abs(result[f"train_{name}"] - other[f"train_{name}"])
        least = 1e-5 * result["train_norms"] + 1e-5
        result[f"train_{name}_tolerance"] = np.maximum(10 * moved, least)
    return result


def read(kind: type, folder: Path) -> Any:
    """Loads the model in a folder without fused kernels."""
    return kind.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def in_the_file(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a tensor under its names in the file; transformers 5 merges those of experts."""
    if name.endswith("experts.gate_up_proj"):
        parts = {"gate_proj": x.chunk(2, 1)[0], "up_proj": x.chunk(2, 1)[1]}
    elif name.endswith("experts.down_proj"):
        parts = {"down_proj": x}
    else:
        return {name: x}
    around = name.rpartition(".")[0]
    return {
        f"{around}.{expert}.{part}.weight": tensor[expert]
        for part, tensor in parts.items()
        for expert in range(len(x))
    }


def main(directory: str, *families: str) -> None:
    """Writes the goldens of the given families, or of all families.

    For a family that is not in FAMILIES, only the training arrays are added to existing goldens.
    """
    for family in families or FAMILIES:
        folder = Path(directory) / family
        if family not in FAMILIES:
            actual = dict(np.load(folder / "goldens.npz"))
            np.savez_compressed(folder / "goldens.npz", **actual, **training(folder, actual))
            continue
        model = made(family)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        actual = goldens(read(type(model), folder))
        actual |= training(folder, actual)
        np.savez_compressed(folder / "goldens.npz", **actual)
        about = {
            "case": family,
            "logits_std": float(actual["right_logits"].std()),
            "smallest_greedy_margin": float(actual["greedy_margin"]),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        (folder / "goldens.json").write_text(json.dumps(about, indent=1) + "\n")
        print(about)


if __name__ == "__main__":
    main(*sys.argv[1:])
