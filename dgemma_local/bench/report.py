"""The document as tables of text, for a terminal and for a pipe; and as its one line of JSON.

Nothing is computed here but ratios of figures that stand beside each other, and nothing is imported: a bare machine
prints these tables without rich.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# figure -> what the table calls it, digits
FIGURES = {
    "step_ms_p50": ("ms/step, p50", 2),
    "step_ms_p95": ("ms/step, p95", 2),
    "first_step_ms": ("ms, commit and step 0", 2),
    "commit_ms": ("ms/commit, by difference", 2),
    "canvas_ms": ("ms/canvas", 1),
    "steps_per_canvas": ("steps/canvas", 2),
    "tokens_per_forward": ("tokens/forward", 2),
    "tokens_per_pass": ("tokens/pass with commits", 2),
    "decode_tok_s": ("tok/s, decode", 1),
    "end_to_end_tok_s": ("tok/s, end to end", 1),
    "first_draft_ms": ("ms to the first draft", 1),
    "first_canvas_ms": ("ms to the first canvas", 1),
    "prefill_tok_s": ("tok/s, prefill", 0),
    "joules_per_token": ("joules/token", 3),
}
SWEPT = (
    "step_ms_p50",
    "step_ms_p95",
    "canvas_ms",
    "decode_tok_s",
    "end_to_end_tok_s",
    "first_canvas_ms",
    "prefill_tok_s",
)
# our figure -> an endpoint's name of it
THEIR_NAMES = {"first_canvas_ms": "ttft_ms", "canvas_ms": "canvas_ms", "end_to_end_tok_s": "end_to_end_tok_s"}
RATIOS = {"per_step": "a step", "per_canvas": "a canvas", "end_to_end": "end to end"}
# by dtype; of fp32: where the demo's answers part, they are equal in fp64
MAY_DIFFER = {
    "float32": "in fp32 a near-tie may fall otherwise by rounding, and what follows it",
    "bfloat16": "tokens are to be equal in fp32 alone: --dtype float32",
}
# of a breakdown's row: what the table calls it, times what, digits
PARTS = {
    "count": ("a step", 1, 0),
    "ms": ("ms", 1, 3),
    "share": ("% of it", 100, 1),
    "bytes": ("MB", 1e-6, 1),
    "flops": ("GFLOP", 1e-9, 1),
    "gb_s": ("GB/s", 1, 0),
    "of_copy": ("% of a copy's", 100, 0),
    "of_roofline": ("% of the roofline", 100, 0),
}
GB = 10**9


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a head; `notes` follow, a line each."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def line(document: Mapping[str, Any]) -> str:
    """One line, keys sorted. Raises ValueError on NaN and infinity, which JSON does not have."""
    return json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False)


def head(document: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, and on what; the label first."""
    subject, machine, memory = document["subject"], document["machine"], document["memory"]
    if document["label"]:
        yield document["label"]
    yield (
        f"{subject['name']}: {subject['layout']}{_in_fp8(subject['fp8'])}, {subject['dtype']}, on {subject['device']}, {subject['mode']}; "
        f"context {subject['context']:,}; --seed {document['seed']}, {counted(document['runs'], 'run')} behind a warm-up"
    )
    on = f"{machine['cpu']}, {machine['threads']} of {machine['cores']} threads"
    if machine["gpu"]:
        power = "" if machine["power_limit_w"] is None else f", {machine['power_limit_w']:.0f} W at most"
        clocks = "" if machine["sm_mhz"] is None else f", {machine['sm_mhz']:.0f} / {machine['memory_mhz']:.0f} MHz"
        on = f"{machine['gpu']}, driver {machine['driver'] or '?'}{power}{clocks}; {on}"
    triton = f", triton {machine['triton']}" if machine["triton"] else ""
    yield f"{on}; torch {machine['torch']}{triton}, Python {machine['python']}, dgemma {document['dgemma']}"
    planned = "" if memory["planned_bytes"] is None else f"; planned {memory['planned_bytes'] / GB:.3f} GB"
    whose = "tensors on the device" if memory["of"] == "device" else "the whole process, Python and torch in it"
    yield f"loaded in {subject['load_seconds']:.2f} s; peak {memory['peak_bytes'] / GB:.3f} GB of {whose}{planned}"


def counted(number: int, thing: str) -> str:
    """ "1 run", "3 runs"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _in_fp8(parts: Sequence[str]) -> str:
    return f" with {', '.join(parts)} in FP8" if parts else ""


def tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """A table a protocol, then the comparison."""
    for name, found in document["protocols"].items():
        if name == "breakdown":
            yield _breakdown(found)
        elif name == "context":
            yield _sweep(found)
        else:
            yield _figures(name, found)
    if document["against"] is not None:
        yield from _against(document["against"], document["protocols"])


def plain(table: Table) -> Iterator[str]:
    """Aligned columns: the first to the left, the others to the right."""
    yield table.title
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    for row in (table.head, *table.rows):
        cells = [cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        yield f"  {'  '.join(cells)}".rstrip()
    for note in table.notes:
        yield f"  {note}"


def number(value: float | None, digits: int, times: float = 1) -> str:
    return "-" if value is None else f"{value * times:,.{digits}f}"


def _figures(name: str, found: Mapping[str, Any]) -> Table:
    """A figure a row, a task a column: median (least … most)."""
    tasks: Sequence[Mapping[str, Any]] = found["tasks"]
    rows = [
        ("tokens in", *(f"{task['prompt_tokens']:,}" for task in tasks)),
        ("tokens kept", *(f"{task['kept_tokens']:,}" for task in tasks)),
        *(
            (words, *(_spread(task["figures"][key], digits) for task in tasks))
            for key, (words, digits) in FIGURES.items()
        ),
    ]
    notes = [found["note"]] if found["note"] else []
    why = {FIGURES[key][0]: reason for task in tasks for key, reason in task["missing"].items()}
    notes += [f"- {words}: {reason}" for words, reason in why.items()]
    first = tasks[0]
    rule = "ends ignored" if first["ends_ignored"] else "until an end token"
    most = "at most" if first["confidence"] else "exactly"  # a mean entropy is never below 0
    title = (
        f"{name}: {most} {first['steps']} steps a canvas, confidence {first['confidence']:g}, entropy bound "
        f"{first['entropy_bound']:g}, temperature {first['t_max']:g} to {first['t_min']:g}, {rule}"
    )
    return Table(title, ("median (least … most)", *(task["name"] for task in tasks)), tuple(rows), tuple(notes))


def _sweep(found: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            f"{task['prompt_tokens']:,}",
            *(number((task["figures"][key] or {}).get("median"), FIGURES[key][1]) for key in SWEPT),
        )
        for task in found["tasks"]
    )
    first = found["tasks"][0]
    title = f"context: {first['asked_tokens']:,} tokens in {first['steps']} steps a canvas behind each prompt, medians"
    return Table(title, ("tokens in", *(FIGURES[key][0] for key in SWEPT)), rows)


def _breakdown(found: Mapping[str, Any]) -> Table:
    """Rows as bench/breakdown.py made them; a column a key, in their order."""
    rows = found["rows"]
    keys = [key for key in PARTS if any(row[key] is not None for row in rows)]
    cells = [(row["part"], *(number(row[key], PARTS[key][2], PARTS[key][1]) for key in keys)) for row in rows]
    return Table("breakdown: where a step's time goes", ("", *(PARTS[key][0] for key in keys)), tuple(cells))


def _spread(found: Mapping[str, float] | None, digits: int) -> str:
    if found is None:
        return "-"
    middle, low, high = (number(found[key], digits) for key in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low} … {high})"


def _against(against: Mapping[str, Any], protocols: Mapping[str, Any]) -> Iterator[Table]:
    """Theirs beside ours, and how many times as fast ours is."""
    found, title = against["found"], f"against {against['what']}"
    if found.get("why_not"):
        yield Table(f"{title}: not measured", (found["why_not"],), ())
        return
    if "median" in found:
        yield _endpoint(title, found, protocols["fixed16"]["tasks"][0]["figures"])
    parts = (
        ("per_step", "step by step", "ms", "ms/step", 3),
        ("answers", "whole answers", "tok_s", "tok/s, end to end", 1),
    )
    for part, how, key, words, digits in parts:
        for entry in found.get(part, ()):
            rows = tuple((name, number(value, digits)) for name, value in entry[key].items())
            threads = counted(entry["threads"], "thread")
            remarks = [*_remarks(entry, found["dtype"])]
            if part == "per_step" and slowed(entry, found[part][0]):
                remarks.append("slower than with fewer threads, theirs and ours: not in the ratio below")
            yield Table(f"{title}, {how}, {threads}", ("", words), rows, tuple(remarks))
    ours = tuple((words, number(value, 2)) for key, words in RATIOS.items() if (value := against["ratio"][key]))
    why = found.get("no_ratio")
    if ours:
        yield Table(f"{title}: so many times as fast", ("", "ours : theirs"), ours)
    else:
        yield Table(f"{title}: no ratio", (why or "nothing was timed on both sides",), ())


def _remarks(entry: Mapping[str, Any], dtype: str) -> Iterator[str]:
    if entry["compared"]:
        yield f"{entry['unequal']} of {entry['compared']} compared with {entry['twin']} by their tokens differ"
    if entry["unequal"]:
        yield MAY_DIFFER[dtype]
    if cut(entry):
        yield f"stopped early, {entry['steps']} of {entry['wanted']} steps were timed: not in the ratio below"


def cut(entry: Mapping[str, Any]) -> bool:
    """Whether steps in turns took too long, and were not all taken."""
    return bool(entry.get("steps", 0) < entry.get("wanted", 0))


def slowed(entry: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Whether every contestant takes longer than with the first entry's threads: they wait for each other."""
    return all(
        ms is not None and before is not None and ms > before
        for ms, before in ((ms, first["ms"][name]) for name, ms in entry["ms"].items())
    )


def _endpoint(title: str, found: Mapping[str, Any], ours: Mapping[str, Any]) -> Table:
    """Figures that both sides take alike, medians; what the server tells of its settings, and what sets it apart."""
    rows = tuple(
        (FIGURES[key][0], number((ours[key] or {}).get("median"), FIGURES[key][1]), number(theirs, FIGURES[key][1]))
        for key, theirs in ((key, found["median"][name]) for key, name in THEIR_NAMES.items())
    )
    said = f"{found['model']}, version {found['version'] or '?'}: {found['settings']}"
    missing = [f"- {name}: {why}" for name, why in found["missing"].items() if name in THEIR_NAMES.values()]
    return Table(f"{title}, fixed16", ("", "ours", "theirs"), rows, (said, *found["notes"], *missing))


def endpoint_ratios(ours: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float | None]:
    """Of fixed16's figures and what endpoint.measure found.

    A step is a sixteenth of a canvas where the server tells that it takes as many steps as fixed16; else it is not known.
    Nothing is where `found` says why (`no_ratio`).
    """
    if found.get("no_ratio"):
        return dict.fromkeys(RATIOS)
    canvas, whole, theirs = ours["canvas_ms"], ours["end_to_end_tok_s"], found["median"]
    per_canvas = theirs["canvas_ms"] / canvas["median"] if theirs["canvas_ms"] and canvas else None
    return {
        "per_step": per_canvas if found["same_steps"] else None,
        "per_canvas": per_canvas,
        "end_to_end": whole["median"] / theirs["end_to_end_tok_s"] if theirs["end_to_end_tok_s"] and whole else None,
    }


def ratios(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Of what comparison.measure found: the worst over its numbers of threads, without those that were cut or slowed all."""
    entries = found.get("per_step", ())
    steps = [entry["ratio"] for entry in entries if not cut(entry) and not slowed(entry, entries[0])]
    if not steps:  # on a card: between the drafts of whole answers
        for entry in found.get("answers", ()):
            ms = entry["step_ms"]
            theirs = [value for name, value in ms.items() if name.startswith("transformers") and value]
            if ms.get("ours") and theirs:
                steps.append(min(theirs) / ms["ours"])
    whole = [entry["ratio"] for entry in found.get("answers", ())]
    return {"per_step": min(steps, default=None), "per_canvas": None, "end_to_end": min(whole, default=None)}
