"""Floats of 4, 8 and 16 bits as numpy holds them: decode(bits) → fp32 exactly, encode(fp32 or fp64) → bits, rounded once.

Every encoder rounds to nearest even. e4m3, e5m2 and E2M1 saturate as `cvt.rn.satfinite` does; fp16 and bf16 overflow to
infinity. NaN stays NaN (E2M1 has none: hardware gives its largest value).
"""

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
BITS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "ue8m0": 8, "e2m1": 4}
UNSIGNED = {4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def _table(fmt: str) -> Array:
    return torch.arange(256, dtype=torch.uint8).view(TORCH[fmt]).float().numpy()


_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1: Array = np.concatenate([_POSITIVE, -_POSITIVE])  # by code; code 8 is −0
_TABLES = {
    "e4m3": _table("e4m3"),
    "e5m2": _table("e5m2"),
    "e2m1": E2M1,
    "ue8m0": np.concatenate([np.ldexp(1.0, np.arange(255) - 127), [np.nan]]).astype(np.float32),
}


def decode(bits: Array, fmt: str) -> Array:
    """The fp32 (of f64: fp64) values of bit patterns, which may sit in wider integers."""
    bits = np.ascontiguousarray(bits)
    if fmt in _TABLES:
        return _TABLES[fmt][bits.astype(np.int64) & (len(_TABLES[fmt]) - 1)]
    if fmt == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if fmt == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return bits.astype(UNSIGNED[BITS[fmt]]).view(np.float64 if fmt == "f64" else np.float32)


def encode(values: Array, fmt: str) -> Array:
    """The bit patterns of `values` in `fmt`, in the narrowest unsigned integers that hold one each."""
    with np.errstate(all="ignore"):
        if fmt in ("f32", "f64"):
            return values.astype(np.float32 if fmt == "f32" else np.float64).view(UNSIGNED[BITS[fmt]])
        if fmt == "f16":
            return values.astype(np.float16).view(np.uint16)
        narrow = np.ascontiguousarray(_to_odd(values))
    if fmt == "e2m1":
        return _to_e2m1(narrow)
    tensor = torch.from_numpy(narrow)
    if fmt in LARGEST:  # clamp keeps NaN
        return tensor.clamp(-LARGEST[fmt], LARGEST[fmt]).to(TORCH[fmt]).view(torch.uint8).numpy()
    return tensor.to(torch.bfloat16).view(torch.uint16).numpy()


def _to_odd(values: Array) -> Array:
    """fp64 → fp32 rounded to odd, so that rounding the result again is as good as rounding once."""
    if values.dtype != np.float64:
        return values.astype(np.float32)
    near = values.astype(np.float32)
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    chopped = np.where(away, np.nextafter(near, np.float32(0)), near).astype(np.float32)
    inexact = np.isfinite(values) & (chopped.astype(np.float64) != values)
    return (chopped.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)


def _to_e2m1(values: Array) -> Array:
    size = np.nan_to_num(np.abs(values), nan=6.0, posinf=6.0)
    halfway = (_POSITIVE[:-1] + _POSITIVE[1:]) / 2
    above = np.searchsorted(halfway, size, side="left")  # a tie stays below …
    tie = np.isin(size, halfway) & (above % 2 == 1)  # … unless the code below is odd
    return (above + tie + 8 * np.signbit(values)).astype(np.uint8)


def unpack_e2m1(packed: Array, axis: int) -> Array:
    """Two codes a byte along `axis`, the low nibble first, as fp32."""
    last = np.moveaxis(packed.view(np.uint8), axis, -1)
    codes = np.stack([last & 15, last >> 4], -1).reshape(*last.shape[:-1], -1)
    return np.moveaxis(E2M1[codes], -1, axis)
