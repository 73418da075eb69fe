"""Attention of prompts' chunks on sm_90, by warps of three trades.

launch     who takes it, where keys and values lie, and the launch
kernel     what the warps do: copies, products and softmax
items      which tile of rows a program has in its turn, and which keys it attends to
results    what becomes of a tile's sums: rows of the output, or shares that are merged
"""
