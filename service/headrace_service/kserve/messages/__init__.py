"""ModelInferRequest and ModelInferResponse: tensors, parameters, shared memory, and what a request is refused with."""
