"""Triton's interpreter made right: what it computes with TRITON_INTERPRET=1 is what a card would.

Out of the box (3.6 … 3.9) it multiplies the bit patterns of bf16, truncates where hardware rounds, does not saturate
e4m3, reads its NaN bytes as ±480, knows no inline assembly, mistakes NVFP4's e4m3 group scales for exponents, and gives
zeros where a masked load names no `other`. Here:

    bf16, e4m3, e5m2   held as their bits; every operation decodes to fp32, computes, rounds once to nearest even
    fp32 → e4m3        saturates at ±448, NaN stays NaN: cvt.rn.satfinite
    tl.dot             fp32 sums of the decoded operands
    tl.dot_scaled      E2M1, e4m3, e5m2, fp16 and bf16 operands under e4m3 or e8m0 scales
    inline assembly    evaluated by ptx.py: any `pack`, several outputs
    tl.load(p, mask)   lanes that no `other` fills hold NaN, or a wild integer: a card promises nothing about them
    tl.reduce, scan    with a combine function of one's own: whole slices at a time, in a tree, as a card does
    the language       patched once a process, not at every call of a device function

`install()` before the first launch. TRITON_INTERPRET must be set before triton is imported: it decides there.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ptx
import triton.language as tl
from narrow import decode, encode, unpack_e2m1
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

Array = np.ndarray[Any, Any]

NARROW = {"bf16": "bf16", "fp8e4nv": "e4m3", "fp8e5": "e5m2"}  # triton's names of what numpy has no type for
WILD = 0x5A5A5A5A5A5A5A5A  # what an integer holds that nobody wrote: as an index out of every bound


def install() -> None:
    """Mend the interpreter, for the rest of the process."""
    if getattr(InterpreterBuilder, "mended", False):
        return
    if type(tl.standard.cdiv).__name__ != "InterpretedFunction":
        raise RuntimeError(
            "triton was imported before TRITON_INTERPRET=1 was set, and compiles now: start a new process"
        )
    for name, function in BUILDER.items():
        setattr(InterpreterBuilder, name, function)
    _mend_dot_scaled()
    _mend_reductions()
    _quiet_numpy()
    _patch_language_once()
    InterpreterBuilder.mended = True


def of_unwritten(dtype: Any) -> Any:
    """What memory of a triton dtype holds before anyone wrote to it."""
    if dtype.name in NARROW:
        return encode(np.array([np.nan], np.float32), NARROW[dtype.name])[0]
    kind = interpreter._get_np_dtype(dtype)
    if kind == np.bool_:
        return True
    return kind.type(np.nan) if kind.kind == "f" else np.array([WILD], np.uint64).view(kind)[0]


# Values


def _values(handle: TensorHandle) -> Array:
    """As numpy can compute with: bf16 and fp8 as fp32, everything else as it is."""
    name = handle.dtype.scalar.name
    return decode(handle.data, NARROW[name]) if name in NARROW else handle.data


def _handle(values: Array, dtype: Any) -> TensorHandle:
    dtype = dtype.scalar
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    if dtype.name in NARROW:
        return TensorHandle(encode(np.asarray(values, np.float32), NARROW[dtype.name]), dtype)
    return TensorHandle(values.astype(interpreter._get_np_dtype(dtype), copy=False), dtype)


def _is_narrow(*handles: TensorHandle) -> bool:
    return any(h.dtype.scalar.name in NARROW for h in handles)


_plain = {
    name: getattr(InterpreterBuilder, name)
    for name in ("cast_impl", "binary_op", "unary_op", "ternary_op", "create_dot", "create_masked_load")
}


def _cast(self: Any, source: TensorHandle, to: Any) -> TensorHandle:
    return _handle(_values(source), to)


def _binary(self: Any, left: TensorHandle, right: TensorHandle, operation: Callable[..., Array]) -> TensorHandle:
    if _is_narrow(left):
        return _handle(operation(_values(left), _values(right)), left.dtype)
    return _plain["binary_op"](self, left, right, operation)


def _unary(self: Any, argument: TensorHandle, operation: Callable[..., Array]) -> TensorHandle:
    if _is_narrow(argument):
        return _handle(operation(_values(argument)), argument.dtype)
    return _plain["unary_op"](self, argument, operation)


def _ternary(
    self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, operation: Callable[..., Array]
) -> TensorHandle:
    if _is_narrow(c):
        return _handle(operation(_values(a), _values(b), _values(c)), c.dtype)
    return _plain["ternary_op"](self, a, b, c, operation)


def _fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """Rounded once: the product of two fp32 is exact in fp64."""
    if not z.dtype.scalar.is_floating():
        return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
    return _handle(_values(x).astype(np.float64) * _values(y) + _values(z), z.dtype)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, accumulator: TensorHandle, *_: Any) -> TensorHandle:
    """Sums of fp32 products; integers by way of fp64, which is exact and, unlike numpy's integers, fast."""
    total = accumulator.data.dtype
    wide = np.float64 if total.kind in "iu" or total == np.float64 else np.float32
    product = np.matmul(_values(a).astype(wide, copy=False), _values(b).astype(wide, copy=False))
    return _handle(product.astype(total, copy=False) + accumulator.data, accumulator.dtype)


def _operand(handle: TensorHandle, scale: TensorHandle | None, kind: Any, k_packed: bool, right: bool) -> Array:
    k_axis = -2 if right else -1
    if "E2M1" in str(kind).upper():
        values = unpack_e2m1(handle.data, k_axis if k_packed else -3 - k_axis)
    else:
        values = _values(handle)
    if scale is None:
        return values
    factors = decode(scale.data, NARROW.get(scale.dtype.scalar.name, "ue8m0"))  # [rows or columns, K / group]
    factors = np.repeat(factors, values.shape[k_axis] // factors.shape[-1], -1)
    return values * (np.swapaxes(factors, -1, -2) if right else factors)


def _dot_scaled(
    self: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, fast: Any, ka: Any, kb: Any, c: Any
) -> TensorHandle:
    product = np.matmul(_operand(a, a_scale, a_kind, ka, False), _operand(b, b_scale, b_kind, kb, True))
    return TensorHandle(product + c.data, tl.float32)


def _masked_load(self: Any, pointers: TensorHandle, mask: TensorHandle, other: Any, *rest: Any) -> TensorHandle:
    if other is None:
        dtype = pointers.get_element_ty()
        other = TensorHandle(np.full(pointers.data.shape, of_unwritten(dtype), interpreter._get_np_dtype(dtype)), dtype)
    return _plain["create_masked_load"](self, pointers, mask, other, *rest)


def _histogram(self: Any, data: TensorHandle, bins: int, mask: TensorHandle | None) -> TensorHandle:
    kept = data.data if mask is None else data.data[np.broadcast_to(mask.data, data.data.shape)]
    kept = kept[(kept >= 0) & (kept < bins)]
    return TensorHandle(np.bincount(kept.astype(np.int64), minlength=bins).astype(np.int32), tl.int32)


def _inline_assembly(
    self: Any, assembly: str, constraints: str, values: Any, kinds: Any, is_pure: bool, pack: int
) -> Any:
    outputs = run_assembly(assembly, constraints, [v.data for v in values], [_numpy(k) for k in kinds], pack)
    handles = [TensorHandle(out, kind.scalar) for out, kind in zip(outputs, kinds, strict=True)]
    return types.SimpleNamespace(get_result=handles.__getitem__)


def _numpy(kind: Any) -> Any:
    return interpreter._get_np_dtype(kind.scalar)


def run_assembly(
    assembly: str, constraints: str, inputs: Sequence[Array], outputs: Sequence[Any], pack: int = 1
) -> list[Array]:
    """Inline assembly on whole arrays: `pack` neighbours to an instance, those under 32 bits sharing registers."""
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    arrays = [np.ascontiguousarray(np.broadcast_to(x, shape)).reshape(-1) for x in inputs]
    size = arrays[0].size
    if size % pack:
        raise ValueError(f"inline assembly: {size} elements are no multiple of pack={pack}")
    registers = [r for array in arrays for r in _to_registers(array, pack)]
    counts = [pack // _a_register(np.dtype(kind), pack) for kind in outputs]
    written = sum(c.strip().startswith("=") for c in constraints.split(","))
    read = sum(c.strip()[:1] not in ("=", "~", "") for c in constraints.split(","))
    if (written, read) != (sum(counts), len(registers)):
        raise ValueError(
            f"inline assembly: constraints {constraints!r} name {written} outputs and {read} inputs; "
            f"pack={pack} makes them {sum(counts)} and {len(registers)}"
        )
    results = iter(ptx.run(assembly, written, registers))
    return [
        _from_registers([next(results) for _ in range(n)], np.dtype(kind), pack).reshape(shape)
        for kind, n in zip(outputs, counts, strict=True)
    ]


def _a_register(kind: Any, pack: int) -> int:
    """Elements that share a register of 32 bits."""
    return min(max(4 // kind.itemsize, 1), pack)


def _to_registers(array: Array, pack: int) -> list[Array]:
    bits = array.view(np.uint8) if array.dtype == np.bool_ else array.view(f"u{array.itemsize}")
    lanes = bits.reshape(-1, pack).astype(np.uint64)
    n, width = _a_register(array.dtype, pack), np.uint64(8 * array.itemsize)
    shifts = np.arange(n, dtype=np.uint64) * width
    return [(lanes[:, i : i + n] << shifts).sum(-1, dtype=np.uint64) for i in range(0, pack, n)]


def _from_registers(registers: list[Array], kind: Any, pack: int) -> Array:
    n, width = _a_register(kind, pack), np.uint64(8 * kind.itemsize)
    shifts = np.arange(n, dtype=np.uint64) * width
    lanes = np.concatenate([(r[:, None] >> shifts) for r in registers], axis=1)  # [instances, pack]
    unsigned = lanes.astype(f"u{kind.itemsize}").reshape(-1)
    return unsigned.astype(np.bool_) if kind == np.bool_ else unsigned.view(kind)


BUILDER: dict[str, Any] = {
    "cast_impl": _cast,
    "create_fp_to_fp": lambda self, source, to, rounding: _cast(self, source, to),
    "binary_op": _binary,
    "unary_op": _unary,
    "ternary_op": _ternary,
    "create_fma": _fma,
    "create_dot": _dot,
    "create_dot_scaled": _dot_scaled,
    "create_masked_load": _masked_load,
    "create_histogram": _histogram,
    "create_inline_asm": _inline_assembly,
    "get_bf16": lambda self, value: _handle(np.array([value], np.float32), tl.bfloat16),
    "create_rsqrt": lambda self, x: _unary(self, x, lambda v: 1 / np.sqrt(v)),
}


def _mend_dot_scaled() -> None:
    """3.6 and 3.7 ask the format for `.value`, which only the compiler's constexpr has."""
    plain = TritonSemantic.dot_scaled

    class Format(str):
        @property
        def value(self) -> str:
            return str(self)

    def dot_scaled(self: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, *rest: Any) -> Any:
        kinds = [Format(getattr(k, "value", k)) for k in (a_kind, b_kind)]
        return plain(self, a, a_scale, kinds[0], b, b_scale, kinds[1], *rest)

    TritonSemantic.dot_scaled = dot_scaled


# Reductions


def _combine(operation: Any, left: list[Array], right: list[Array], dtypes: Sequence[Any]) -> list[Array]:
    """A combine function on whole slices."""

    def tensor(data: Array, dtype: Any) -> tl.tensor:
        shape = list(data.shape) or [1]
        return tl.tensor(TensorHandle(data.reshape(shape), dtype.scalar), tl.block_type(dtype.scalar, shape))

    shape = left[0].shape
    arguments = [tensor(x, d) for side in (left, right) for x, d in zip(side, dtypes, strict=True)]
    result = operation.fn(*arguments)
    return [np.broadcast_to(r.handle.data, shape) for r in (result if isinstance(result, tuple) else (result,))]


def _reduce(self: ReduceOps, inputs: Any) -> list[Any]:
    whole = self.axis is None
    arrays = [x.handle.data.reshape(-1) if whole else np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    dtypes = [x.dtype for x in inputs]
    while len(arrays[0]) > 1:  # neighbours pairwise; lengths are powers of two
        arrays = _combine(self.combine_fn, [a[0::2] for a in arrays], [a[1::2] for a in arrays], dtypes)
    results = []
    for x, array in zip(inputs, arrays, strict=True):
        data = array[0]
        if self.keep_dims:
            data = data.reshape([1] * x.handle.data.ndim) if whole else np.expand_dims(data, self.axis)
        results.append(self.to_tensor(data, x.dtype))
    return results


def _scan(self: ScanOps, inputs: Any) -> list[Any]:
    """Each position takes in what ends 1, 2, 4 … before it."""
    arrays = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    dtypes = [x.dtype for x in inputs]
    step = 1
    while step < len(arrays[0]):
        joined = _combine(self.combine_fn, [np.roll(a, step, 0) for a in arrays], arrays, dtypes)
        arrays = [np.concatenate([a[:step], j[step:]]) for a, j in zip(arrays, joined, strict=True)]
        step *= 2
    return [self.to_tensor(np.moveaxis(a, 0, self.axis), x.dtype) for a, x in zip(arrays, inputs, strict=True)]


def _mend_reductions() -> None:
    plain = ReduceOps.min_max

    def min_max(self: ReduceOps, inputs: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        """fmax: as nanmax, and NaN without a warning where there is nothing else."""
        by_name = {"nanmax": np.fmax.reduce, "nanmin": np.fmin.reduce}
        return plain(self, inputs, by_name.get(val_reduce_op.__name__, val_reduce_op), idx_reduce_op)

    ReduceOps.min_max = min_max
    ReduceOps.generic_reduce = _reduce
    ScanOps.generic_scan = _scan


# Speed and quiet


def _quiet_numpy() -> None:
    """A card divides by zero without a word; and nothing there checks integers for overflow at every addition."""
    plain = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            plain(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_language_once() -> None:
    """Triton patches its language at every launch and every call of a device function; once is enough here."""
    plain = interpreter._patch_lang
    everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = plain(everything)
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    nothing = type(scope)()
    interpreter._patch_lang = lambda function: nothing
