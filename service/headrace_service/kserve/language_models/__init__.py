"""Loaded models behind the tensors that vLLM and TensorRT-LLM give them in Triton."""
