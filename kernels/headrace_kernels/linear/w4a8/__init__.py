"""Products of INT4 weights and tokens rounded to e4m3 (W4A8)."""
