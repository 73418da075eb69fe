"""Quantized folders of other tools, without torch.

`quantization_config` and `compressed_tensors_config` read what config.json says of each layer,
`layer_format` and `bitsandbytes_tensors` name the tensors that stand in place of a layer's weight,
and `input_orders` and `input_scales` read the small tensors that come before the weights.

What the bits of the tensors mean is the backend's. Rooms here know no model family.
"""
