"""The KServe v2 / Triton wire: inference.GRPCInferenceService over the same engines as headrace.v1.

From the wire inwards: `service` (table of RPCs, names of models), `handlers` (two ways to infer,
and a file for each other kind of RPC), `language_models` (loaded models, by the conventions of vLLM
and TensorRT-LLM), `models` (what handlers ask of a model, whatever it is), `accounting` and
`statistics`, `messages` (requests and responses, tensors, shared memory).
"""
