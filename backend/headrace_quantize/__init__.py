"""`headrace quantize`: a model folder in, the same model in fewer bits out, layer by layer, in a
process of its own.

    text ── calibration_text ──> windows of ids ── decoder_pass ──> inputs of each projection ──
    statistics ──> rtn, gptq, awq
                                                                                                                    │
                                                                                                                    numbers,
                                                                                                                    scales,
                                                                                                                    zero
                                                                                                                    points
    original folder ── source_tensors ──> one decoder layer at a time
    ───────────────────────────────────────────────┤
                                                                                                                    ▼
    report <── evaluation (held-out text, both models) <── the layer, filled from what was written
    <── compressed_tensors, output_folder

Owns nothing that serves: models, layers and reading of weights are `headrace_backend`'s, and nobody
imports this room but the command line, and of it only what needs no torch (`config`, `checks`).
Never holds more than one decoder layer's weights; text passes through layer after layer and is kept
between them on the host.
"""
