"""What is to be measured: flags as they were given, looked at before anything is opened."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dgemma_local.bench.protocols import NAMES
from dgemma_local.errors import UsageError

SYNTHETIC = "26b"
FP8 = ("attention", "mlp", "embedding")
LAYOUTS = ("bf16", "fp8", "nvfp4", "nvfp4-nvidia")  # of bench.synthetic, which takes torch
DEFAULT_LAYOUT = "nvfp4"
DEFAULT_RUNS, MOST_RUNS = 3, 1000
LARGEST_SEED = (1 << 64) - 1
WITHOUT_CONTEXT = ("fixed16", "adaptive", "breakdown")  # by default: the sweep takes minutes
OF_SYNTHETIC = ("fixed16", "breakdown")  # its tokens mean nothing, so that a rule of stopping has nothing to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured; `checked` has looked at it."""

    model: str | None = None  # a name or a folder; None: synthetic
    layout: str | None = None  # of a synthetic model
    protocols: tuple[str, ...] = WITHOUT_CONTEXT
    against: str | None = None  # "transformers", or an endpoint's address
    runs: int = DEFAULT_RUNS
    context: int | None = None
    seed: int = 0
    fp8: tuple[str, ...] = ()  # of FP8, parts that are held in it whatever they are stored as
    dtype: str | None = None  # of a model with weights; None: as stored, and float32 beside transformers on a CPU
    device: str | None = None


def checked(
    *,
    demo: bool = False,
    model: str | None = None,
    synthetic: str | None = None,
    layout: str | None = None,
    protocol: str | None = None,
    against: str | None = None,
    runs: int = DEFAULT_RUNS,
    context: int | None = None,
    seed: int = 0,
    fp8_attention: bool = False,
    fp8_mlp: bool = False,
    fp8_embedding: bool = False,
    dtype: str | None = None,
    device: str | None = None,
) -> Request:
    """Flags as they were given. Raises UsageError on what contradicts itself, is unknown, or is out of range."""
    if demo + (model is not None) + (synthetic is not None) > 1:
        raise UsageError("--demo, --model and --synthetic exclude each other", "give one of them")
    if model is not None and not model.strip():
        raise UsageError("--model names nothing", "give a name from `dgemma models`, or a folder")
    if synthetic not in (None, SYNTHETIC):
        raise UsageError(f"no synthetic model is called {synthetic!r}", f"give --synthetic {SYNTHETIC}")
    if layout is not None and synthetic is None:
        raise UsageError("--layout is that of a synthetic model", f"add --synthetic {SYNTHETIC}, or drop it")
    if not 1 <= runs <= MOST_RUNS:
        raise UsageError(f"{runs} runs cannot be made", f"ask for 1 to {MOST_RUNS:,}")
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"the seed {seed} is out of range", f"give a whole number from 0 to {LARGEST_SEED}")
    if dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"the dtype {dtype!r} is not known", "choose one of: float32, bfloat16")
    if dtype is not None and synthetic is not None:
        raise UsageError("--dtype is that of a model with weights", "give --layout, or drop --synthetic")
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"the device {device!r} is not known", "choose one of: cpu, cuda")
    if against not in (None, "transformers") and not str(against).startswith(("http://", "https://")):
        raise UsageError(f"nothing can be measured against {against!r}", "give transformers, or an http:// address")
    if context is not None and context < 1:
        raise UsageError(f"a context of {context} tokens cannot be given", "ask for at least one canvas and a prompt")
    fp8 = tuple(part for part, wish in zip(FP8, (fp8_attention, fp8_mlp, fp8_embedding), strict=True) if wish)
    if fp8 and against == "transformers":
        raise UsageError(
            f"with {', '.join(f'--fp8-{part}' for part in fp8)} our weights are not those that transformers would have",
            "drop --against transformers, or the parts in FP8",
        )
    if synthetic is not None:
        layout = layout or DEFAULT_LAYOUT
        if layout not in LAYOUTS:
            raise UsageError(f"no layout is called {layout!r}", f"choose of: {', '.join(LAYOUTS)}")
    if synthetic is not None and against == "transformers":
        raise UsageError("transformers cannot open random weights", "compare it on a model: --demo or --model NAME")
    wanted = _protocols(protocol, WITHOUT_CONTEXT if synthetic is None else OF_SYNTHETIC)
    if synthetic is not None and "adaptive" in wanted and protocol != "all":
        raise UsageError(
            "a synthetic model has no words: adaptive means nothing", "ask for fixed16, context, breakdown"
        )
    if synthetic is not None:
        wanted = tuple(one for one in wanted if one != "adaptive")
    if against not in (None, "transformers") and "fixed16" not in wanted:
        raise UsageError("an endpoint is compared by fixed16", "add fixed16 to --protocol")
    return Request(
        model=None if synthetic is not None else "demo" if demo else model or _default(),
        layout=layout,
        protocols=wanted,
        against=against,
        runs=runs,
        context=context,
        seed=seed,
        fp8=fp8,
        dtype=dtype,
        device=device,
    )


def _default() -> str:
    """What `run` would open: the checkpoint for this card where it is fetched, else the demo."""
    from dgemma_local.auto import to_run

    return to_run()[0]


def _protocols(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """In the order of NAMES."""
    if text is None:
        return tuple(default)
    if text == "all":
        return NAMES
    wanted = set(_words(text))
    if unknown := sorted(wanted - {*NAMES}):
        raise UsageError(f"no protocol is called {unknown[0]!r}", f"choose of: {', '.join(NAMES)}; or all")
    if not wanted:
        raise UsageError("--protocol names nothing", f"choose of: {', '.join(NAMES)}; or all")
    return tuple(name for name in NAMES if name in wanted)


def _words(text: str) -> Iterator[str]:
    return (word.strip() for word in text.split(",") if word.strip())
