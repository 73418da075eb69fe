"""ModelInferRequest and ModelInferResponse: tensors, parameters, shared memory, and the reasons for
which a request is refused.
"""
