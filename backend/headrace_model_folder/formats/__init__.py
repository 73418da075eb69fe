"""Quantized folders of other tools, without torch: what config.json says of each layer
(`quantization_config`, `compressed_tensors_config`), which tensors stand in place of the layer's
weight (`layer_format`, `bitsandbytes_tensors`), and the small tensors that are read before the
weights are (`input_orders`, `input_scales`).

What the bits of the tensors mean is the backend's. Rooms here know no model family.
"""
