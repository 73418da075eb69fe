"""Products by cuBLAS for which this package names the tile.

bindings       the part of cuBLASLt's interface that names algorithms, by ctypes
tiles          which tile a product takes, by its sizes
tiled          a product of each shape, made once
fp8            products of FP8 tokens and weights: by such a tile, or by PyTorch's choice
plain          products of plain weights in bf16, where a tile is named
"""
