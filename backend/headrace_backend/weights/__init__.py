"""From files to parameters: which part of which checkpoint tensor a rank keeps (`placement`), and
filling it (`loader`, `dummy`).

Knows checkpoint tensors and plain torch tensors, no layers and no models.
"""
