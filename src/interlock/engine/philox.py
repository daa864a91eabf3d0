"""Counter-based random numbers: Philox4x32-10, vectorised over rows in numpy.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]


def philox4x32(counter: UInt64s, key: UInt64s) -> UInt64s:
    """Ten rounds.

    Args:
        counter: uint64 [4, m]; key: uint64 [2, m]; the words are 32-bit numbers.

    Returns:
        uint64 [4, m] of 32-bit words.
    """
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _ROUNDS * _WEYL) & _MASK:
        product = even * _MULTIPLIERS
        even = (product[::-1] >> _HALF) ^ odd ^ round_key
        odd = product[::-1] & _MASK
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seed: UInt64s, position: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each row, a function of (seed, position) alone; 53 random bits.

    Args:
        seed: uint64 [m]; position: int64 [m], not negative.
    """
    counter = np.zeros((4, len(position)), dtype=np.uint64)
    counter[0], counter[1] = position & 0xFFFFFFFF, position >> 32
    key = np.stack([seed & _MASK, seed >> _HALF])
    high, low, _, _ = philox4x32(counter, key)
    bits: UInt64s = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
