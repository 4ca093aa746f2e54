"""The demo model: a tiny DiffusionGemma trained on a CPU, its data, its training and its evaluation.

python -m dgemma_local.demo.train        makes it (resumable)
python -m dgemma_local.demo.evaluate     measures it on puzzles it has never seen
"""
