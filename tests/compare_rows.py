"""What activations in four bits cost: the NVFP4 demo's puzzles with rows in bf16 (W4A16) and in NVFP4 (W4A4).

    python tests/compare_rows.py [--cases 40]

By the kernels' torch twins, on a CPU that stands for a card of capability 12. The demo's input scales are 1, as its
checkpoint has them: uncalibrated, within what E4M3 can hold.
"""

import argparse
import os

import torch
from dgemma_local.kernels._launch import BLACKWELL

from dgemma_local import ops
from dgemma_local.demo import evaluate
from dgemma_local.session import Wishes, open_session

CLUES = (36, 45)
WORDS = {"W4A16": "twins", "W4A4": "twins nvfp4-rows"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=40, help="puzzles of each number of clues")
    cases = parser.parse_args().cases
    torch.set_num_threads(1)
    ops.gpu_of = lambda x: BLACKWELL
    for what, words in WORDS.items():
        os.environ["DGEMMA_OPS"] = words
        session = open_session("demo-nvfp4", Wishes(device="cpu", context=1024))
        for clues in CLUES:
            right = taken = 0
            for number in range(cases):
                example, _ = evaluate.puzzle(9, clues, number)
                text, steps, *_ = evaluate.answer(session, example, number)
                right += text.strip() == example.answer
                taken += steps
            print(f"{what:6} 9x9, {clues} clues: {right} of {cases} exact, {taken / cases:.1f} steps", flush=True)


if __name__ == "__main__":
    main()
