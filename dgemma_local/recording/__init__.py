"""A run on disk, as it was seen: JSON Lines, complete up to the last step whatever ends the process.

The file is UTF-8 (written as ASCII), one object a line, no name twice in it. FILE.jsonl.gz is one gzip member of the same
bytes, flushed after each line; where the process was killed, its end is missing. `event` says what a line is:

    recording           first, once      model, seed, settings, prompt: `Header`
    prefilled           at most once     ┐
    step_done           every step       │ the events (`dgemma_local.events`), by their field names,
    retried             see below        │ each with the `seconds` it took
    canvas_committed    every canvas     │
    finished            last             ┘

`schema.json` beside this file describes every value. What a schema cannot say:

- L is `canvas_length` of the first line. `draft`, `next`, `entropy`, `tokens` of a commit, and `fed` have L entries, and
  `accepted` has L characters, 1 where the position is accepted. Entropies are nats, to a thousandth.
- `fed`, what a step read, stands in the first step of a canvas alone; a later step read the `next` of the step before.
- `canvas` counts from 0, `step` from 0 within it. A canvas is committed after its step with `done`, and its `tokens` are
  that step's `next`. A run that was stopped may go from any step to `finished`; one that was killed ends anywhere.
- `retried` stands in place of a commit, and voids the steps of its canvas since then: it begins anew with step 0.
- A token's text stands in the first line that names the token. `texts` has one entry a token that no line before named,
  in the order in which this line names them: `ends`, `prompt` in the first line; `fed`, `draft`, `next` in a step;
  `tokens` in the others. An entry is the text, or {"control": NAME} for a token that steers instead of being read.
  So a recording is replayed without model and tokenizer. A text is data of the model: it may hold anything.
- `pieces` is the text that a commit, or the end of the run, made final, as a reader of the answer sees it; a character
  that two canvases share comes with the later one.

A reader shows what comes before the first line that is damaged. Of a newer `version` it ignores names and kinds of lines
that it does not know; within a version nothing changes its meaning.
"""

from dgemma_local.recording.form import Header, Piece, Word
from dgemma_local.recording.read import Recording, open_recording
from dgemma_local.recording.write import Recorder, check_target

__all__ = ["Header", "Piece", "Recorder", "Recording", "Word", "check_target", "open_recording"]
