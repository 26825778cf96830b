"""Decoded outputs in Pax's form: prompt and continuation in a row, 1.0 where unused."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from praxis_lite.decode.decoder import Decoder

# B batch, S samples or beams, P longest prompt, M new tokens, T tokens of a whole row.


def pax_outputs(
    decoder: Decoder,
    ids: np.ndarray,
    prefix_lengths: np.ndarray,
    outputs: Mapping[str, Any],
    *,
    seqlen: int | None = None,
) -> dict[str, np.ndarray]:
    """Returns the outputs of a Decoder under Pax's names and with Pax's meaning (NumPy).

    output_ids int32 [B, S, T]: the prompt and what follows it; decode_lengths int32 [B, S]: both
    together; logprobs float32 [B, S, T]: 1.0 for the prompt and after the end; prefix_lengths and
    original_lengths int32 [B, S]; prefix_ids int32: the prompts alone, [B, S, P], after a forward
    pass [B, S, T], and of a beam search [B, 1, P]; scores float32 [B, S].

    Of a beam search also done bool [B, S] and hyp_ids int32 [B, S], of BeamSearch.decode, and
    end_logprobs float32 [B, S, T], the logprobs as they lie before Pax moves the rows: all prompts
    end at P.

    After a forward pass T is P + M, and Pax, which moves each row left to its beginning, shows 0.0
    in the places that come in from the right. Prompts that went a token at a time have their own
    log-probs from the second token on, T is `seqlen`, and a row that neither ended nor came to its
    max_decode_steps has the length `seqlen`. (There Pax counts the prompt in max_decode_steps: what
    it calls max_decode_steps=7, seqlen=12 is a Decoder of seqlen=8, and `seqlen=12` here.)
    """
    ids, lengths_B = np.asarray(ids), np.asarray(prefix_lengths)
    outputs = {name: np.asarray(x) for name, x in outputs.items()}
    new_ids, new_logprobs = outputs["output_ids"], outputs["logprobs"]
    new_lengths_BS = outputs["decode_lengths"]
    (B, S, M), P = new_ids.shape, ids.shape[1]
    T = P + M if seqlen is None else seqlen
    whole_lengths_BS = np.repeat(lengths_B[:, None], S, axis=1)
    output_ids = np.zeros((B, S, T), np.int32)
    logprobs = np.ones((B, S, T), np.float32)
    decode_lengths = whole_lengths_BS + new_lengths_BS
    for b, length in enumerate(lengths_B):
        output_ids[b, :, :length] = ids[b, :length]
        if decoder.fprop_for_prefix:
            logprobs[b, :, T - (P - length) :] = 0.0
        else:
            logprobs[b, :, 1:length] = outputs["prefix_logprobs"][b, 1:length]
        for s, num_new in enumerate(new_lengths_BS[b]):
            new = slice(length, length + num_new)
            output_ids[b, s, new] = new_ids[b, s, :num_new]
            logprobs[b, s, new] = new_logprobs[b, s, :num_new]
            ended = num_new and output_ids[b, s, new][-1] in decoder.eos_ids
            if not (decoder.fprop_for_prefix or ended or num_new == M):
                decode_lengths[b, s] = T
    is_prefix = np.arange(P) < lengths_B[:, None]
    prefix_ids = np.where(is_prefix, ids, 0)[:, None]
    of_beams = {}
    if "hyp_ids" in outputs:
        end_logprobs = np.ones((B, S, P + M), np.float32)
        is_new = np.arange(M) < new_lengths_BS[..., None]
        end_logprobs[..., P:] = np.where(is_new, new_logprobs, 1.0)
        of_beams = {name: outputs[name] for name in ("done", "hyp_ids")}
        of_beams["end_logprobs"] = end_logprobs
    else:
        room = T - P if decoder.fprop_for_prefix else 0
        prefix_ids = np.pad(np.repeat(prefix_ids, S, axis=1), ((0, 0), (0, 0), (0, room)))
    return {
        "output_ids": output_ids,
        "decode_lengths": decode_lengths,
        "logprobs": logprobs,
        "prefix_lengths": whole_lengths_BS,
        "original_lengths": whole_lengths_BS,
        "prefix_ids": prefix_ids,
        "scores": outputs["scores"],
        **of_beams,
    }
