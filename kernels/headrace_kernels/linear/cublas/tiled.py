"""Products whose tile is given, one for each shape, made when it is first asked for."""

from __future__ import annotations

import functools

import torch

from headrace_kernels import card
from headrace_kernels.linear.cublas.bindings import LibraryProduct, ProductShape, cublas_lt
from headrace_kernels.linear.cublas.tiles import tile_rule


@functools.cache
def tiled_product(device: torch.device, shape: ProductShape) -> LibraryProduct | None:
    """A product by the tile that `tile_rule` names; None: it is multiplied by the library's own.

    That is so where the rule names none, on other GPUs than sm_90, on which nothing was measured,
    and where the library has no such tile.
    """
    if device.type != "cuda" or not card.has_warpgroup_instructions(device):
        return None
    name = tile_rule(shape, card.multiprocessors(device))
    if name is None or (library := cublas_lt(device)) is None:
        return None
    product = LibraryProduct(library, shape)
    return product if product.cut(name) else None
