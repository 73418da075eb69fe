"""From files to parameters: what a rank keeps (`placement`) and filling it (`loader`, `dummy`).

Knows checkpoint tensors and plain torch tensors, no layers and no models.
"""
