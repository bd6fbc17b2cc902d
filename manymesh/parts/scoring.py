"""What rollouts that score have in common: sequences that can be scored, in parts of bounded size, and the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import isfinite

import torch
from tensordict import TensorDict

from core.batch import flat, nested
from core.columns import check_model_inputs
from core.errors import ManymeshError, Refused
from manymesh.parts.rollout_checks import not_finite
from manymesh.parts.rollout_rows import check_vocabulary, token_ids

# Of one row: log-probabilities of its tokens but for the first, and for each of these the k most likely (id, log-prob).
RowScore = tuple[Sequence[float], Sequence[Sequence[tuple[int, float]]]]
# Log-probabilities that an engine is asked for at once: they come as Python objects of some hundred bytes.
PART_VALUES = 2**20


def read_sequences(
    sequences: TensorDict,
    *,
    vocab_size: int,
    longest: int | None,
    temperature: float,
    top_k: int,
    inputs: Collection[str] = (),
) -> torch.Tensor:
    """`input_ids` (rows, tokens) int64, jagged, once it is known that they can be scored.

    Args:
        longest: tokens of a sequence that the backend holds; None for no limit.
        inputs: model inputs that the backend reads, as its manifest names them.

    Raises:
        Refused: a token is not in the vocabulary, a sequence is empty or too long; temperature is not above 0, or top_k
            not of 0..vocab_size; model inputs that the backend doesn't read.
    """
    check_model_inputs(sequences.keys(), inputs, "the rollout")
    if not (isfinite(temperature) and temperature > 0):
        raise Refused("scores are of softmax(logits / temperature)", have=temperature, want="a temperature above 0")
    if not 0 <= top_k <= vocab_size:
        raise Refused("illegal top_k of a score", have=top_k, want=f"0 (off) to {vocab_size}, the vocabulary")
    ids = token_ids(sequences, "input_ids")
    check_vocabulary(ids, vocab_size, "sequence")
    lengths = flat(ids)[1].diff()
    if longest is not None and len(lengths) and int(lengths.max()) > longest:
        raise Refused(
            f"sequence {int(lengths.argmax())} is longer than the rollout holds",
            have=f"{int(lengths.max())} tokens",
            want=f"at most {longest}",
            mend="cut the sequence, or give the rollout a larger context",
        )
    return ids


def parts(rows: Sequence[Sequence[int]], top_k: int, values: int = PART_VALUES) -> Iterator[Sequence[Sequence[int]]]:
    """Runs of rows that ask for at most so many values, or of one row."""
    start, num_values = 0, 0
    for end, row in enumerate(rows):
        size = len(row) * (1 + top_k)
        if end > start and num_values + size > values:
            yield rows[start:end]
            start, num_values = end, 0
        num_values += size
    if start < len(rows):
        yield rows[start:]


def scores(ids: torch.Tensor, rows: Iterable[RowScore], top_k: int, where: str) -> TensorDict:
    """The answer of score, from what an engine that speaks in lists says of each row.

    Args:
        ids: of read_sequences.
        where: weight version, for the error.

    Raises:
        ManymeshError: as `scored`.
    """
    values: list[float] = []
    top: list[tuple[int, float]] = []
    for row, best in rows:
        values += [0.0, *row]
        if top_k:
            top += [(0, 0.0)] * top_k
            for each in best:
                top += each
    log_probs = torch.tensor(values, dtype=torch.float32)
    if not top_k:
        return scored(ids, log_probs, None, where)
    top_ids = torch.tensor([token for token, _ in top], dtype=torch.int64).view(-1, top_k)
    top_values = torch.tensor([value for _, value in top], dtype=torch.float32).view(-1, top_k)
    return scored(ids, log_probs, (top_ids, top_values), where)


def scored(
    ids: torch.Tensor, log_probs: torch.Tensor, top: tuple[torch.Tensor, torch.Tensor] | None, where: str
) -> TensorDict:
    """The answer of score, on the device of `ids` and with its offsets.

    Args:
        ids: of read_sequences.
        log_probs: fp32 (tokens), in row order.
        top: ids and log-probabilities, (tokens, top_k).
        where: weight version, for the error.

    Raises:
        ManymeshError: a log-probability is NaN.
    """
    tokens, offsets = flat(ids)
    if len(log_probs) != len(tokens):
        raise ManymeshError(
            "the engine's scores lack tokens", have=f"{len(log_probs)} values", want=f"{len(tokens)}", where=where
        )
    if bool(log_probs.isnan().any()):
        raise not_finite(where)
    columns = {"log_probs": log_probs}
    if top is not None:
        columns |= {"top_ids": top[0], "top_log_probs": top[1]}
    out = TensorDict({}, batch_size=[len(offsets) - 1])
    for name, values in columns.items():
        out.set(name, nested(values.to(tokens.device), offsets))
    return out
