"""A run on disk, as it was seen: JSON Lines, complete up to the last step whatever ends the process.

    recording           once: model, seed, settings, prompt
    prefilled           ┐
    step_done           │ the events (`dgemma_local.events`), by their field names,
    canvas_committed    │ each with the seconds it took
    finished            ┘

FILE.jsonl.gz is the same, compressed line by line. `schema.json` beside this file describes a line. A token's text stands
in the first line that names the token, so a recording is replayed without model and tokenizer.
"""

from dgemma_local.recording.form import Header, Piece, Word
from dgemma_local.recording.read import Recording, open_recording
from dgemma_local.recording.write import Recorder

__all__ = ["Header", "Piece", "Recorder", "Recording", "Word", "open_recording"]
