"""`dgemma bench`: what a model does on this machine, in figures that say how they were taken.

    command ─► request     flags, looked at before anything is opened
            ─► subject     a model ready to answer: the demo, a checkpoint, random weights of the 26B model's shapes
            ─► protocols   what it is asked
            ─► measure     answers with a clock beside their events, and the figures made of them
            ─► machine     clocks, power, memory, versions
            ─► report      one JSON document, and its tables

Every run of a task begins with an empty cache and has the same seed; a warm-up comes first and is not counted. Where two
runs differ in a token, or a kernel's self-test failed, no speed is shown (errors.BenchRefused).

The clock is monotonic (time.perf_counter) and stands beside the events of `engine.Conversation.answer`:

    question ─► Prefilled ─► StepDone 0, 1 … ─► CanvasCommitted ─► StepDone 0 … ─► CanvasCommitted ─► Finished

    step_ms_p50, step_ms_p95  from one step's event to the next one's, within a canvas: steps 1, 2 …; p95 by nearest rank
    first_step_ms             from a canvas's commit to the next one's step 0, median: that step, and the commit's pass (on
                              the kernels the two are one pass). Canvas 0 has none
    commit_ms                 first_step_ms - step_ms_p50: what committing a canvas adds
    canvas_ms                 decode seconds ÷ canvases
    steps_per_canvas          denoising steps ÷ canvases
    tokens_per_forward        transformers' definition (DiffusionGemmaGenerationOutput): generated tokens without padding, an
                              end token counted, ÷ denoising steps
    tokens_per_pass           kept tokens ÷ (denoising steps + passes that a commit took for itself). The prompt's passes are
                              prefill, and not in it
    prefill_tok_s             prompt tokens ÷ prefill seconds: those to the first draft, less step_ms_p50. No event stands
                              between the two, for the prompt's end may share its pass with step 0. Not known below a
                              tenth of a step
    decode_tok_s              kept tokens ÷ decode seconds: the others up to the last CanvasCommitted, all canvases included
    end_to_end_tok_s          kept tokens ÷ seconds from the question to Finished
    first_draft_ms            from the question to the first step's draft
    first_canvas_ms           from the question to the first committed canvas
    joules_per_token          the card's power over the answers ÷ kept tokens

Kept tokens are those of the answer: what follows an end token is not counted, and the end token neither. With ends
ignored all count. Several answers (adaptive, "together") are summed before they are divided.

The document, schema 1; every key is always there, null where it cannot be known:

    schema 1 · complete (false in a --json file until all was measured; subject, machine and memory are null at first) · dgemma · date (UTC) · seed · runs ·
    label (what must be said with every figure)
    subject    name, kind, layout, fp8, dtype, device, mode, context, canvas_length, vocab_size, load_seconds, planned_bytes
    machine    cpu, cores, threads, python, torch, triton, cuda, gpu, driver, power_limit_w, sm_mhz, memory_mhz (medians while measuring)
    protocols  fixed16, adaptive, context, breakdown, those that ran -> {note, tasks: [task], rows: [row]}
               rows: of breakdown alone, as bench/breakdown.py says
    task       name, note, prompt_tokens, asked_tokens, steps, confidence, entropy_bound, t_max, t_min, ends_ignored, kept_tokens,
               canvases, finish, digest (SHA-256 of the token ids), figures, missing
    figures    name -> {median, min, max, runs} | null
    missing    name -> why it is null
    memory     peak_bytes, of (device | process), planned_bytes
    against    null, or {what, found: as bench/comparison.py or bench/endpoint.py say, or {why_not: why nothing of theirs
               was measured}, ratio: per_step, per_canvas, end_to_end}, ours : theirs as speeds
"""

SCHEMA = 1
