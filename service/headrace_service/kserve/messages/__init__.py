"""ModelInferRequest and ModelInferResponse.

Tensors, parameters, shared memory, and the reasons for which a request is refused.
"""
