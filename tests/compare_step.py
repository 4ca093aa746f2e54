"""One denoising step of the demo model, sampling included, ours against transformers', side by side.

    python tests/compare_step.py [--rounds 60] [--dtype float32]

The same weights and canvases. The contestants alternate within one process, one step each, from step to step of the
same answer: ours with this project's random stream, ours with transformers' draws (whose tokens must equal theirs at
every step), and transformers with its default experts, with eager and with sdpa attention, of which the faster counts.
Prints medians for 1 and 2 threads and, last, one line of JSON with the worst ratio. What is measured, and how:
dgemma_local/bench/turns.py.
"""

import argparse
import json
import platform

import torch
from reference import open_model

from dgemma_local.bench.transformers_side import open_theirs
from dgemma_local.bench.turns import ROUNDS, STEPS, per_step
from dgemma_local.config import load_generation_config
from dgemma_local.demo.render import FOLDERS, Renderer
from dgemma_local.demo.tasks import Example

PUZZLE = "53..7....\n6..195...\n.98....6.\n8...6...3\n4..8.3..1\n7...2...6\n.6....28.\n...419..5\n....8..79"
FOLDER = FOLDERS["sudoku"]
THREADS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"canvases of {STEPS} steps")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    prompt = Renderer().prompt(Example("sudoku9", f"Solve this sudoku:\n{PUZZLE}", ""))
    config, model = load_generation_config(FOLDER), open_model(FOLDER, dtype)
    theirs = open_theirs(FOLDER, dtype, model.device)
    found = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        one = per_step(model, theirs, prompt, config, rounds=options.rounds)
        shown = "   ".join(f"{name} {ms:.2f} ms" for name, ms in one["ms"].items())
        print(f"{threads} thread{'s' if threads > 1 else ''}:  {shown}   → {one['ratio']:.2f}×")
        found.append(one)
    unequal, compared = (sum(one[key] for one in found) for key in ("unequal", "compared"))
    print(f"{found[0]['steps']} steps each; steps whose tokens differ from transformers': {unequal} of {compared}")
    print(
        json.dumps(
            {
                "ratio": round(min(one["ratio"] for one in found), 2),
                "dtype": options.dtype,
                "torch": torch.__version__,
                "cpu": platform.processor() or platform.machine(),
                "unequal": unequal,
            }
        )
    )


if __name__ == "__main__":
    main()
