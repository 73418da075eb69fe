"""`headrace quantize`: rewrites a model folder in fewer bits, layer by layer, in its own process.

    text -calibration_text-> windows of ids -decoder_pass-> inputs of each projection
    folder -source_tensors-> one decoder layer at a time
    inputs, layer -rounding (statistics; rtn, gptq, awq)-> numbers, scales, zero points
        -compressed_tensors, output_folder-> shards -> the layer, filled from what was written
    held-out text, both models -evaluation-> report

Owns nothing that serves: models, layers and reading of weights are `headrace_backend`'s, and nobody
imports this room but the command line, and of it only what needs no torch (`config`, `checks`).
Never holds more than one decoder layer's weights; text passes through layer after layer and is kept
between them on the host.
"""
