"""All parts of run_all.sh as one JSON file and one page of tables, whatever became of them.

python tests/gpu/merge.py FOLDER STEM SECONDS        reads FOLDER/STEM-*, writes FOLDER/STEM.json and FOLDER/STEM.md

The JSON holds every document as it came:

    seconds    of everything
    parts      [name, outcome, seconds, at_most, log], in the order they ran
    suite      what its last line counts, or null
    times      tests/gpu/times.py's document, or null
    benches    name -> dgemma bench's document

No torch here: it runs last, and must run. A document that is not JSON is a part cut while it wrote, and is left out.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dgemma_local.bench.report import FIGURES, SWEPT

OUTCOMES = {"0": "done", "11": "does not fit this card", "124": "cut", "137": "cut", "130": "interrupted"}
REHEARSAL = "rehearsal: small sizes on a CPU, nothing here was measured"
LAYOUTS = ("fp8", "nvfp4", "nvfp4-light")
WITHOUT_FIGURES = ("suite", "launches", "sanitizer", "memcheck", "racecheck")
Document = Mapping[str, Any]
Line = Sequence[str]


def merged(folder: Path, stem: str, seconds: int) -> dict[str, Any]:
    """What lies in the folder, as one document."""
    parts = list(read_parts(folder / f"{stem}-parts.tsv"))
    found = {path.name[len(stem) + 1 : -5]: read(path) for path in sorted(folder.glob(f"{stem}-*.json"))}
    documents = {name: document for name, document in found.items() if document is not None}
    times = documents.pop("times", None)
    return {
        "stem": stem,
        "what": REHEARSAL if stem.startswith("rehearsal") else "measured",
        "seconds": seconds,
        "parts": parts,
        "suite": counted(folder / f"{stem}-suite.txt"),
        "times": times,
        "benches": documents,
    }


def read_parts(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        name, code, seconds, most, log = line.split("\t")
        outcome = OUTCOMES.get(code, f"failed, exit code {code}" if code.isdecimal() else code)
        yield {"name": name, "outcome": outcome, "seconds": int(seconds), "at_most": int(most), "log": log}


def read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def counted(log: Path) -> dict[str, int] | None:
    """Tests by outcome, of pytest's last line or of run.py's own; of a suite that was cut, of its lines."""
    if not log.exists():
        return None
    text = log.read_text(errors="replace")
    last = re.findall(r"(?m)^(?:=+ )?((?:\d+ \w+, )*\d+ \w+)(?:, | in ).*\d+(?:\.\d+)? ?s", text)
    if last:
        return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last[-1])}
    return {word: len(re.findall(rf"(?im)^{word}\b|::\S.* {word}\b", text)) for word in ("passed", "failed")}


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────


def page(found: Document) -> str:
    lines = [f"# {found['stem']}", "", f"{found['what']}, {found['seconds']} s in all", *machine(found)]
    lines += ["", *table(("part", "outcome", "s", "at most"), part_rows(found))]
    sections = [*fixed(found), *sweep(found), *breakdowns(found), *steps(found)]
    for title, head, rows in sections:
        lines += ["", f"## {title}", "", *table(head, rows)]
    if not sections:
        lines += ["", f"no figures: {no_figures(found['parts'])}"]
    return "\n".join(lines) + "\n"


def no_figures(parts: Sequence[Document]) -> str:
    """What became of the parts that measure, in one line."""
    outcomes = [f"{part['name']} {part['outcome']}" for part in parts if part["name"] not in WITHOUT_FIGURES]
    return ", ".join(outcomes) or "no part that measures was begun"


def machine(found: Document) -> Iterator[str]:
    """One line of the first that knows it."""
    for bench in found["benches"].values():
        on = bench["machine"]
        if on is None:  # it ended before its model was there
            continue
        name = on["gpu"] or on["cpu"]
        driver = f", driver {on['driver']}" if on["driver"] else ""
        yield ""
        yield f"{name}{driver}, torch {on['torch']}, triton {on['triton']}, {bench['date']}"
        return


def table(head: Line, rows: Sequence[Line]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def part_rows(found: Document) -> list[Line]:
    rows: list[Line] = []
    for part in found["parts"]:
        suite = found["suite"] if part["name"] == "suite" else None
        counts = "" if suite is None else ": " + ", ".join(f"{number} {word}" for word, number in suite.items())
        rows.append((part["name"], part["outcome"] + counts, str(part["seconds"]), str(part["at_most"])))
    return rows


def fixed(found: Document) -> Iterator[tuple[str, Line, list[Line]]]:
    """fixed16, a layout a table: each process's medians side by side, and how far apart they lie."""
    for layout in LAYOUTS:
        runs = whole(found, layout)
        tasks = [run["protocols"]["fixed16"]["tasks"][0] for run in runs.values() if "fixed16" in run["protocols"]]
        if not tasks:
            continue
        rows: list[Line] = []
        for key, (words, digits) in FIGURES.items():
            medians = [median(task, key) for task in tasks]
            rows.append((words, *(number(each, digits) for each in medians), apart(medians)))
        memory = [run["memory"] for run in runs.values()]
        rows.append(("GB at the peak", *(number(each["peak_bytes"] / 1e9, 2) for each in memory), ""))
        planned = [each["planned_bytes"] for each in memory]
        rows.append(("GB planned", *(number(None if each is None else each / 1e9, 2) for each in planned), ""))
        rows.append(("s to make it", *(number(run["subject"]["load_seconds"], 1) for run in runs.values()), ""))
        mode = next(iter(runs.values()))["subject"]["mode"]
        yield f"fixed16, {layout}, {mode}", ("median", *runs, "apart"), rows


def whole(found: Document, layout: str) -> dict[str, Document]:
    """The processes of a layout that came to their end, by name."""
    named = re.compile(rf"{layout}(-\d+)?")
    return {name: bench for name, bench in found["benches"].items() if named.fullmatch(name) and bench["complete"]}


def apart(values: Sequence[float | None]) -> str:
    """(most - least) / least."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or min(known) <= 0:
        return ""
    return f"{(max(known) - min(known)) / min(known):.1%}"


def sweep(found: Document) -> Iterator[tuple[str, Line, list[Line]]]:
    for name, bench in found["benches"].items():
        for task in [bench["protocols"].get("context")]:
            if task is None:
                continue
            rows = [
                (f"{each['prompt_tokens']:,}", *(number(median(each, key), FIGURES[key][1]) for key in SWEPT))
                for each in task["tasks"]
            ]
            cut = "" if bench["complete"] else ", cut"
            yield f"{name}, {bench['subject']['layout']}{cut}", ("tokens in", *(FIGURES[key][0] for key in SWEPT)), rows


def breakdowns(found: Document) -> Iterator[tuple[str, Line, list[Line]]]:
    """A step's time by kernel, of the last process of each layout, in which everything was compiled."""
    head = ("part", "launches", "ms", "% of the step", "GB/s", "% of the copy", "% of the roofline")
    for layout in LAYOUTS:
        runs = whole(found, layout).values()
        tables = [run["protocols"]["breakdown"]["rows"] for run in runs if "breakdown" in run["protocols"]]
        if tables:
            rows = [
                (
                    row["part"],
                    number(row["count"], 0),
                    number(row["ms"], 3),
                    percent(row["share"]),
                    number(row["gb_s"], 0),
                    percent(row["of_copy"]),
                    percent(row["of_roofline"]),
                )
                for row in tables[-1]
            ]
            yield f"breakdown, {layout}", head, rows


def steps(found: Document) -> Iterator[tuple[str, Line, list[Line]]]:
    """Sums of single launches, as tests/gpu/times.py has them."""
    if found["times"] is not None:
        rows = [
            (name, number(step["ms"], 2), number(step["ms_predicted"], 2), str(step["launches"]))
            for name, step in found["times"]["steps"].items()
        ]
        yield "launches one by one, from a cold L2", ("step", "ms", "predicted", "launches"), rows


def median(task: Document, key: str) -> float | None:
    figure = task["figures"][key]
    return None if figure is None else float(figure["median"])


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.1f}"


def main() -> None:
    folder, stem, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    found = merged(folder, stem, seconds)
    (folder / f"{stem}.json").write_text(json.dumps(found, ensure_ascii=False, sort_keys=True) + "\n")
    text = page(found)
    (folder / f"{stem}.md").write_text(text)
    print(f"\n{text}\n{folder / stem}.json, {stem}.md")


if __name__ == "__main__":
    main()
