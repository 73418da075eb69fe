"""The arithmetic of `headrace quantize`: from a weight and its inputs' statistics to numbers.

Path through the room: `statistics` adds up what a product's inputs are like, `awq` finds scales for
them, and `gptq` or rounding to nearest (`numbers`) makes the numbers. Knows tensors, and neither
models nor files.
"""
