"""Fused Triton kernels, one file each, beside their torch twins; `ops.py` is the only caller.

    embedding            token embedding, self-conditioning's sum and norm
    norms                RMSNorm; post-norm + residual + the next pre-norms; the end of a layer
    heads                q/k/v norms, rotation, K/V into the cache
    attention            a canvas, or a causal chunk, over the cache
    router               who goes to which expert, and the list of work
    experts              the mixture: experts_grouped (bf16, FP8, NVFP4 decoded in registers), experts_nvfp4_nvfp4
    bf16_linear, fp8_linear, nvfp4_linear, nvfp4_nvfp4_linear
    rows                 activations to FP8 or NVFP4
    vocabulary           the end of a step: logits, draw (draft, entropy, sample), soft (the next step's conditioning)
    canvas               acceptance, re-noise, stop

Files with an underscore are what several of these share. README.md here is written by tests/kernel_report.py: what the
compilers made of each, and the time that predicts.
"""
