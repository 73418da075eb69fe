"""The KServe v2 / Triton wire: inference.GRPCInferenceService over the same engines as headrace.v1.

From the wire inwards: `service` (table of RPCs, names of models), `infer_handlers` and
`infer_stream` (the two ways to infer), `models` (what they ask of a model), `language_model` with
its conventions `vllm_tensors` and `tensorrt_llm_tensors`, `generation_wire` and `responses` (the
way back). Beside it `tensors`, `parameters`, `shared_memory` and `statistics`, which know nothing
of generations.
"""
