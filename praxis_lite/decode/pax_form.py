"""Converts a decoder's outputs to Pax's format, whose rows contain prompts and continuations."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from praxis_lite.decode.decoder import Decoder

# B batch, S samples or beams, P longest prompt, M new tokens, T tokens of a complete row.


def pax_outputs(
    decoder: Decoder,
    ids: np.ndarray,
    prefix_lengths: np.ndarray,
    outputs: Mapping[str, Any],
    *,
    seqlen: int | None = None,
) -> dict[str, np.ndarray]:
    """Converts a decoder's outputs to NumPy arrays with Pax's names and meanings.

    With fprop_for_prefix, T is P + M. Pax aligns all prompts to end at P and, after decoding,
    shifts each row to the left, which fills the end of the row with log-probs of 0.0. This function
    reproduces these zeros.

    Without fprop_for_prefix, T is `seqlen`, and prompt tokens except the first have log-probs. A
    row that neither ended nor reached its max_decode_steps has the length `seqlen`. In this mode,
    Pax's max_decode_steps includes the prompt: max_decode_steps=7 and seqlen=12 in Pax correspond
    to a Decoder with seqlen=8 and to `seqlen=12` here.

    Args:
      decoder: Decoder that computed the outputs.
      ids: int32 [B, P], the prompts.
      prefix_lengths: int32 [B], the length of each prompt.
      outputs: The outputs of `decoder`.
      seqlen: Number of tokens per row, T. If None, T is P + M.

    Returns:
      A dict of arrays:
      * output_ids: int32 [B, S, T], prompt and continuation.
      * decode_lengths: int32 [B, S], the total length of prompt and continuation.
      * logprobs: float32 [B, S, T], 1.0 for the prompt and after the end.
      * prefix_lengths, original_lengths: int32 [B, S], the length of the prompt.
      * prefix_ids: int32, the prompts: [B, S, T] with fprop_for_prefix, otherwise [B, S, P], and
        [B, 1, P] for a beam search.
      * scores: float32 [B, S].
      * done, hyp_ids: only for a beam search; see `BeamSearch.decode`.
      * end_logprobs: float32 [B, S, P + M], only for a beam search: the log-probs before Pax's
        shift, in rows whose prompts end at P.
    """
    ids, lengths_B = np.asarray(ids), np.asarray(prefix_lengths)
    outputs = {name: np.asarray(x) for name, x in outputs.items()}
    new_ids, new_logprobs = outputs["output_ids"], outputs["logprobs"]
    new_lengths_BS = outputs["decode_lengths"]
    (B, S, M), P = new_ids.shape, ids.shape[1]
    T = P + M if seqlen is None else seqlen
    prompt_lengths_BS = np.repeat(lengths_B[:, None], S, axis=1)
    output_ids = np.zeros((B, S, T), np.int32)
    logprobs = np.ones((B, S, T), np.float32)
    decode_lengths = prompt_lengths_BS + new_lengths_BS
    # Each row is the prompt, then the new tokens. Log-probs are 1.0 where nothing else is written.
    for b, length in enumerate(lengths_B):
        output_ids[b, :, :length] = ids[b, :length]
        if decoder.fprop_for_prefix:
            # The zeros that Pax's shift to the left leaves at the end.
            logprobs[b, :, T - (P - length) :] = 0.0
        else:
            logprobs[b, :, 1:length] = outputs["prefix_logprobs"][b, 1:length]
        for s, num_new in enumerate(new_lengths_BS[b]):
            new = slice(length, length + num_new)
            output_ids[b, s, new] = new_ids[b, s, :num_new]
            logprobs[b, s, new] = new_logprobs[b, s, :num_new]
            # Without fprop_for_prefix, a row that neither ended nor has M new tokens has the length
            # T.
            ended = num_new and output_ids[b, s, new][-1] in decoder.eos_ids
            if not (decoder.fprop_for_prefix or ended or num_new == M):
                decode_lengths[b, s] = T
    is_prefix = np.arange(P) < lengths_B[:, None]
    prefix_ids = np.where(is_prefix, ids, 0)[:, None]
    beam_outputs = {}
    # Beam search only.
    if "hyp_ids" in outputs:
        end_logprobs = np.ones((B, S, P + M), np.float32)
        is_new = np.arange(M) < new_lengths_BS[..., None]
        end_logprobs[..., P:] = np.where(is_new, new_logprobs, 1.0)
        beam_outputs = {name: outputs[name] for name in ("done", "hyp_ids")}
        beam_outputs["end_logprobs"] = end_logprobs
    else:
        room = T - P if decoder.fprop_for_prefix else 0
        prefix_ids = np.pad(np.repeat(prefix_ids, S, axis=1), ((0, 0), (0, 0), (0, room)))
    return {
        "output_ids": output_ids,
        "decode_lengths": decode_lengths,
        "logprobs": logprobs,
        "prefix_lengths": prompt_lengths_BS,
        "original_lengths": prompt_lengths_BS,
        "prefix_ids": prefix_ids,
        "scores": outputs["scores"],
        **beam_outputs,
    }
