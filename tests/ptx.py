"""PTX on numpy lanes: what a piece of inline assembly computes, bit by bit.

    run("prmt.b32 $0, $1, 0, 0x3120;", 1, [bits]) → [bits]

A register is an array of uint64 with one element a lane; an operation reads and writes as many of its low bits as its
type has. `$0 … $n−1` are the outputs, the inputs follow, as in LLVM's constraints. Predicates (`@p`, `@!p`), vector moves
(`mov.b32 {a, b}, c`), `.reg` declarations and scopes are understood; memory, shuffles and jumps are not.

OPCODES is the table: name → function of (modifiers, sources) → destination. An opcode that is missing raises.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from narrow import BITS, decode, encode

Array = np.ndarray[Any, Any]
Operation = Callable[..., "Array | tuple[Array, ...]"]
OPCODES: dict[str, Operation] = {}

U64 = np.uint64


def run(assembly: str, outputs: int, inputs: Sequence[Array]) -> list[Array]:
    """The outputs' bits, uint64, for inputs given as unsigned integers of any width."""
    registers = {f"${outputs + i}": np.asarray(x).astype(U64) for i, x in enumerate(inputs)}
    with np.errstate(all="ignore"):
        for statement in _statements(assembly):
            _execute(statement, registers)
    lanes = np.broadcast_shapes(*(np.shape(x) for x in inputs))
    return [np.broadcast_to(registers[f"${i}"], lanes) for i in range(outputs)]


def _statements(assembly: str) -> list[str]:
    """Without comments, declarations and the braces of scopes; those of vectors stay."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", assembly, flags=re.DOTALL)
    text = re.sub(r"(^|[;{}])\s*(?=[{}])", r"\1", text)
    found = []
    for part in text.split(";"):
        part = part.strip()
        while part[:1] in ("{", "}"):  # where a statement begins, a brace is a scope's
            part = part[1:].strip()
        if part and not part.startswith(".reg"):
            found.append(part)
    return found


def _execute(statement: str, registers: dict[str, Array]) -> None:
    guard = None
    if statement.startswith("@"):
        predicate, statement = statement[1:].split(None, 1)
        guard = registers[predicate.lstrip("!")].astype(bool) ^ predicate.startswith("!")
    opcode, operands = statement.split(None, 1)
    name, *modifiers = opcode.split(".")
    if name not in OPCODES:
        raise NotImplementedError(f"ptx.py knows no `{opcode}`: add it to OPCODES")
    target, *sources = _operands(operands)
    values = [_value(s, registers, modifiers) for s in sources]
    result = OPCODES[name](modifiers, *values)
    if target.startswith("{"):
        parts = [t.strip() for t in target[1:-1].split(",")]
        width = int(modifiers[-1][1:]) // len(parts)
        result = tuple(_low(result >> U64(i * width), width) for i in range(len(parts)))
    else:
        parts = [t.strip() for t in target.split("|")]
    for part, value in zip(parts, result if isinstance(result, tuple) else (result,), strict=False):
        if guard is not None:  # a lane that does not execute keeps what it had
            value = np.where(guard, value, registers.get(part, U64(0)))
        if part != "_":
            registers[part] = np.asarray(value, U64)


def _operands(text: str) -> list[str]:
    return [x.strip() for x in re.findall(r"\{[^}]*\}|[^,{}]+", text) if x.strip()]


def _value(operand: str, registers: dict[str, Array], modifiers: list[str]) -> Array:
    if operand.startswith("{"):
        parts = [_value(p.strip(), registers, modifiers) for p in operand[1:-1].split(",")]
        width = int(modifiers[-1][1:]) // len(parts)
        return sum((_low(p, width) << U64(i * width) for i, p in enumerate(parts)), U64(0))
    if operand in registers:
        return registers[operand]
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", operand):
        return np.asarray(int(match[1] or match[2], 16), U64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)[uU]?", operand):
        return np.asarray(int(operand.rstrip("uU"), 0) & (2**64 - 1), U64)
    if re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", operand):
        return encode(np.asarray(float(operand)), "f64" if modifiers[-1] == "f64" else "f32").astype(U64)
    raise NotImplementedError(f"ptx.py reads no operand `{operand}`: not written before, and no number")


# Reading and writing registers by type.


def _low(x: Array, bits: int) -> Array:
    return x & U64(2**bits - 1)


def _bits(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def _integer(x: Array, kind: str) -> Array:
    """The register as an integer of `kind`, in 64 bits; .s types are sign-extended."""
    bits = _bits(kind)
    if kind[0] != "s":
        return _low(x, bits)
    return (x << U64(64 - bits)).view(np.int64) >> np.int64(64 - bits)


def _store(x: Array, kind: str) -> Array:
    return _low(np.asarray(x).astype(U64), _bits(kind))


def _is_float(kind: str) -> bool:
    return kind.removesuffix("x2") in BITS


def _floats(x: Array, kind: str) -> list[Array]:
    """The components of a register as fp32 (fp64), the low one first."""
    fmt = kind.removesuffix("x2")
    return [decode(_low(x >> U64(i * BITS[fmt]), BITS[fmt]), fmt) for i in range(2 if kind.endswith("x2") else 1)]


def _join(values: Sequence[Array], kind: str) -> Array:
    fmt = kind.removesuffix("x2")
    return sum((encode(np.asarray(v), fmt).astype(U64) << U64(i * BITS[fmt]) for i, v in enumerate(values)), U64(0))


def _flush(values: list[Array], modifiers: list[str]) -> list[Array]:
    if "ftz" not in modifiers:
        return values
    return [np.where(np.abs(v) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), v), v) for v in values]


# The opcodes.


def opcode(*names: str) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        for name in names:
            OPCODES[name] = function
        return function

    return register


@opcode("mov")
def _mov(modifiers: list[str], a: Array) -> Array:
    return a


@opcode("prmt")
def _prmt(modifiers: list[str], a: Array, b: Array, selector: Array) -> Array:
    pool = _low(a, 32) | _low(b, 32) << U64(32)
    result: Array = np.asarray(0, U64)
    for i in range(4):
        nibble = selector >> U64(4 * i) & U64(15)
        byte = pool >> (nibble & U64(7)) * U64(8) & U64(255)
        sign = np.where(byte & U64(128), U64(255), U64(0))
        result = result | np.where(nibble & U64(8), sign, byte) << U64(8 * i)
    return result


@opcode("lop3")
def _lop3(modifiers: list[str], a: Array, b: Array, c: Array, table: Array) -> Array:
    result: Array = np.asarray(0, U64)
    for i in range(8):
        if int(table) >> i & 1:
            result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return _low(result, 32)


@opcode("and")
def _and(modifiers: list[str], a: Array, b: Array) -> Array:
    return a & b


@opcode("or")
def _or(modifiers: list[str], a: Array, b: Array) -> Array:
    return a | b


@opcode("xor")
def _xor(modifiers: list[str], a: Array, b: Array) -> Array:
    return a ^ b


@opcode("not")
def _not(modifiers: list[str], a: Array) -> Array:
    return _store(~a, modifiers[-1])


@opcode("shl")
def _shl(modifiers: list[str], a: Array, count: Array) -> Array:
    width = _bits(modifiers[-1])
    count = _low(count, 32)
    return np.where(count < U64(width), _store(a << np.minimum(count, U64(63)), modifiers[-1]), U64(0))


@opcode("shr")
def _shr(modifiers: list[str], a: Array, count: Array) -> Array:
    count = np.minimum(_low(count, 32), U64(63))  # past the width: zeros, or copies of the sign
    kind = modifiers[-1]
    value = _integer(a, kind)
    return _store(value >> (count.astype(np.int64) if kind[0] == "s" else count), kind)


@opcode("shf")
def _shf(modifiers: list[str], a: Array, b: Array, count: Array) -> Array:
    count = _low(count, 5) if "wrap" in modifiers else np.minimum(_low(count, 32), U64(32))
    both = _low(a, 32) | _low(b, 32) << U64(32)
    return _low(both << count >> U64(32) if "l" in modifiers else both >> count, 32)


@opcode("bfe")
def _bfe(modifiers: list[str], a: Array, position: Array, length: Array) -> Array:
    kind, length = modifiers[-1], np.minimum(_low(length, 8), U64(_bits(modifiers[-1])))
    field = _low(a, _bits(kind)) >> _low(position, 8) & (U64(1) << length) - U64(1)
    if kind[0] == "s":
        field = np.where(
            field >> np.maximum(length, U64(1)) - U64(1) & U64(1), field | ~((U64(1) << length) - U64(1)), field
        )
    return _store(field, kind)


@opcode("bfi")
def _bfi(modifiers: list[str], a: Array, b: Array, position: Array, length: Array) -> Array:
    mask = ((U64(1) << _low(length, 8)) - U64(1)) << _low(position, 8)
    return _store((a << _low(position, 8) & mask) | (b & ~mask), modifiers[-1])


@opcode("popc")
def _popc(modifiers: list[str], a: Array) -> Array:
    return np.bitwise_count(_low(a, _bits(modifiers[-1]))).astype(U64)


def _arithmetic(modifiers: list[str], function: Callable[..., Array], *sources: Array) -> Array:
    """Elementwise in fp64 (floats: exact products, one rounding) or in 64-bit integers."""
    kind = modifiers[-1]
    if not _is_float(kind):
        return _store(function(*(_integer(s, kind) for s in sources)), kind)
    columns = zip(*(_flush(_floats(s, kind), modifiers) for s in sources), strict=True)
    results = [function(*(c.astype(np.float64) for c in column)) for column in columns]
    if "sat" in modifiers:
        results = [np.nan_to_num(np.clip(r, 0, 1), nan=0.0) for r in results]
    if "relu" in modifiers:
        results = [np.where(r < 0, 0.0, r) for r in results]
    if "ftz" in modifiers:
        results = _flush([decode(encode(r, "f32"), "f32") for r in results], modifiers)
    return _join(results, kind)


@opcode("add")
def _add(modifiers: list[str], a: Array, b: Array) -> Array:
    return _arithmetic(modifiers, np.add, a, b)


@opcode("sub")
def _sub(modifiers: list[str], a: Array, b: Array) -> Array:
    return _arithmetic(modifiers, np.subtract, a, b)


@opcode("mul")
def _mul(modifiers: list[str], a: Array, b: Array) -> Array:
    kind = modifiers[-1]
    if _is_float(kind) or "lo" in modifiers:
        return _arithmetic(modifiers, np.multiply, a, b)
    product = (_integer(a, kind) * _integer(b, kind)).astype(U64)  # of at most 32 bits each: exact
    return product if "wide" in modifiers else _store(product >> U64(_bits(kind)), kind)


@opcode("mad")
def _mad(modifiers: list[str], a: Array, b: Array, c: Array) -> Array:
    kind = modifiers[-1]
    if "wide" in modifiers:
        return _mul(modifiers, a, b) + c
    if "hi" in modifiers:
        return _store(_mul(modifiers, a, b) + c, kind)
    return _arithmetic(modifiers, lambda x, y, z: x * y + z, a, b, c)


@opcode("fma")
def _fma(modifiers: list[str], a: Array, b: Array, c: Array) -> Array:
    return _arithmetic(modifiers, lambda x, y, z: x * y + z, a, b, c)


@opcode("min")
def _min(modifiers: list[str], a: Array, b: Array) -> Array:
    return _extreme(modifiers, np.minimum if "NaN" in modifiers else np.fmin, a, b)


@opcode("max")
def _max(modifiers: list[str], a: Array, b: Array) -> Array:
    return _extreme(modifiers, np.maximum if "NaN" in modifiers else np.fmax, a, b)


def _extreme(modifiers: list[str], function: Callable[..., Array], *sources: Array) -> Array:
    return _arithmetic(modifiers, function, *sources)


@opcode("abs")
def _abs(modifiers: list[str], a: Array) -> Array:
    return _arithmetic(modifiers, np.abs, a)


@opcode("neg")
def _neg(modifiers: list[str], a: Array) -> Array:
    return _arithmetic(modifiers, np.negative, a)


@opcode("div")
def _div(modifiers: list[str], a: Array, b: Array) -> Array:
    if _is_float(modifiers[-1]):
        return _arithmetic(modifiers, np.divide, a, b)
    return _arithmetic(modifiers, lambda x, y: (x - np.fmod(x, y)) // y, a, b)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "lg2": np.log2,
    "ex2": np.exp2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}  # .approx: correctly rounded here, within 2^-22 or so on a card


def _unary(function: Callable[[Array], Array]) -> Operation:
    return lambda modifiers, a: _arithmetic(modifiers, function, a)


for _name, _function in FUNCTIONS.items():
    OPCODES[_name] = _unary(_function)


@opcode("cvt")
def _cvt(modifiers: list[str], *sources: Array) -> Array:
    """cvt{.rounding}{.satfinite}.to.from; with two sources the first becomes the upper half."""
    to, source = modifiers[-2:]
    if _is_float(source):
        values = [v for s in reversed(sources) for v in _flush(_floats(s, source), modifiers)]
    else:
        values = [_integer(s, source) for s in reversed(sources)]
    if "relu" in modifiers:
        values = [np.where(v < 0, 0, v) for v in values]
    if _is_float(to):
        if "rz" in modifiers:
            raise NotImplementedError("ptx.py rounds to nearest even only")
        return _join([np.asarray(v, np.float64) if not _is_float(source) else v for v in values], to)
    (value,) = values
    if _is_float(source):
        rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[modifiers[0]](value)
        low, high = (-(2 ** (_bits(to) - 1)), 2 ** (_bits(to) - 1) - 1) if to[0] == "s" else (0, 2 ** _bits(to) - 1)
        clamped = np.clip(np.nan_to_num(rounded.astype(np.float64), nan=0.0), low, high)
        return _store(clamped.astype(np.int64 if to[0] == "s" else U64), to)
    return _store(value, to)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@opcode("setp")
def _setp(modifiers: list[str], a: Array, b: Array) -> tuple[Array, Array]:
    name, kind = modifiers[0], modifiers[-1]
    unordered = name not in COMPARISONS  # equ, neu, ltu …: true where a NaN stands
    compare = COMPARISONS[name[:2]] if unordered else COMPARISONS[name]
    x, y = (_floats(v, kind)[0] if _is_float(kind) else _integer(v, kind) for v in (a, b))
    nan = (np.isnan(x) | np.isnan(y)) if _is_float(kind) else np.asarray(False)
    held = (compare(x, y) | nan) if unordered else (compare(x, y) & ~nan)
    return held.astype(U64), (~held).astype(U64)


@opcode("selp")
def _selp(modifiers: list[str], a: Array, b: Array, predicate: Array) -> Array:
    return np.where(predicate.astype(bool), a, b)
