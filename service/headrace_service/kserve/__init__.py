"""The KServe v2 / Triton wire: inference.GRPCInferenceService over the same engines as headrace.v1."""
