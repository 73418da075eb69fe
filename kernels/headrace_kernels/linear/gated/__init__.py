"""Products of gate and up projections with the activation in them, by the format of the weight.

dense             plain weights: who multiplies, and with which tile
dense_sm90        the kernel for tens of rows on sm_90
"""
