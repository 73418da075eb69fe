"""The rules by which layers that another tool quantized are found to be packed wrongly.

There is no original to compare with. The module owns the rules and their limits; `layer_statistics`
says why the figures say anything. Each rule asks for evidence that correctly packed layers are far
from giving: a layer is at fault for what is there, never for what is missing. Layers whose numbers
fill their range evenly, as no weights do, say nothing and are let pass.

What is seen: zero points of 4 bits or fewer that are one off, of more bits if they are off by a
sixteenth of the range; scales of other groups, rows or layers, where rows have several groups;
outputs in another order within their words; inputs in another order within their words or blocks,
where a trained layer shares the sizes of its inputs with the norm or the layers before it. What is
not: scales of whole rows or tensors that are another's, zero points of more bits that are a step
off, FP8 that is packed wrongly, and an order of inputs in random layers, for which it makes no
difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headrace_backend.packing.layer_statistics import WORD_ORDERS, Findings

# Steps by which the middle of a layer's numbers may be off 0. Layers of the demo model in int4 are
# off by 0.035 at most, those whose scales have the sign of their largest by 8 / 32.
_MOST_MEAN = 0.5
# Of more than 4 bits a step is small beside the scatter, and this part of the range counts.
_MOST_MEAN_PART = 1 / 16
# Of the scatter of numbers that are all as frequent, which is 0.29 of the range of whole ones:
# weights have up to 0.2 of the range.
_EVEN = 0.9
# Scales that come from the largest of their groups make nearly all groups reach the end of the
# range.
_FEWEST_REACHING = 0.8
# Groups from which on their correlation says something, and standard deviations that it must be
# off.
_FEWEST_GROUPS = 500
_DEVIATIONS = 6.0
# Scatter of groups that varies by less than this part of it: scales come from the scatter (0.03 at
# most, by rounding), not from the largest of their groups (0.07 at least).
_LEAST_VARIATION = 0.05
# Inputs from which on their sizes are compared.
_FEWEST_INPUTS = 128
# As families call the projections of MLPs and experts.
_GATES_AND_UPS = ("gate_proj", "up_proj", "w1", "w3")
_DOWNS = ("down_proj", "w2")

Profiles = Mapping[str, Findings]


def packing_faults(findings: Profiles, norms: Mapping[str, Tensor]) -> list[str]:
    """One line for each fault of a model's layers, which names the layer; none if all look right.

    Args:
        findings: Layer -> what was found of it.
        norms: Norm weights of the model, by their names in the folder.
    """
    faults = []
    for layer, found in findings.items():
        if found.scatter < _EVEN * found.even_scatter:
            faults += [f"layer {layer!r}: {fault}" for fault in (_middle_fault(found), _scales_fault(found)) if fault]
    for layer, found in findings.items():
        for what, sizes in _input_sizes(layer, findings, norms):
            faults += [f"layer {layer!r}: {fault}" for fault in _input_faults(found, what, sizes)]
    return faults


def _middle_fault(found: Findings) -> str | None:
    most = _MOST_MEAN if found.bits <= 4 else _MOST_MEAN_PART * (1 << found.bits)
    if abs(found.mean) <= most:
        return None
    return (
        f"its numbers are {found.mean:+.2f} steps off their zero points on average, more than {most:g}: zero points"
        " that are one off, or stored in another way, do that"
    )


def _scales_fault(found: Findings) -> str | None:
    if found.num_groups < _FEWEST_GROUPS or found.reaching < _FEWEST_REACHING or found.variation < _LEAST_VARIATION:
        return None
    own, *others = found.correlations
    deviation = found.num_groups**-0.5
    for name, other in zip(WORD_ORDERS, others, strict=True):
        if other < own - 2**0.5 * _DEVIATIONS * deviation:
            return (
                f"its scales suit its numbers better if outputs of a word are in another order, {name} (correlation"
                f" {other:.2f} against {own:.2f})"
            )
    if own <= -_DEVIATIONS * deviation:
        return None
    return (
        "its scales are not those of its numbers: groups that scatter less have no larger scales (correlation"
        f" {own:.2f}, {-_DEVIATIONS * deviation:.2f} is the least that scales of the own groups give)"
    )


def _input_sizes(layer: str, findings: Profiles, norms: Mapping[str, Tensor]) -> Sequence[tuple[str, Tensor]]:
    """Returns what the sizes of a layer's inputs may go with: the norm or layers before it."""
    parent, _, own = layer.rpartition(".")
    # Experts lie deeper than a dense MLP's projections, behind the same norm.
    decoder = ".".join(layer.split(".")[:3])
    if own in ("q_proj", "k_proj", "v_proj", *_GATES_AND_UPS):
        name = f"{decoder}.{'input' if parent.endswith('self_attn') else 'post_attention'}_layernorm.weight"
        return [(name, norms[name].float().abs().cpu())] if name in norms else []
    if own in _DOWNS:
        before = [(name, findings.get(f"{parent}.{name}")) for name in _GATES_AND_UPS]
        sizes = {name: found.rows for name, found in before if found is not None}
        if len(sizes) != 2:
            return []
        return [(" and ".join(sizes), torch.stack(list(sizes.values())).log().sum(0).exp())]
    values = findings.get(f"{parent}.v_proj")
    inputs = len(findings[layer].columns)
    if values is None or inputs % len(values.rows):
        return []
    # Query heads of a group follow each other and take the values of one head.
    return [("v_proj", values.rows)] if inputs == len(values.rows) else []


def _input_faults(found: Findings, what: str, sizes: Tensor) -> Iterator[str]:
    longest = max(map(len, found.input_orders.values()))
    inputs = len(found.columns) // longest * longest
    if inputs < _FEWEST_INPUTS or len(sizes) != len(found.columns):
        return
    own_sizes, sizes = _ranks(found.columns[:inputs]), _ranks(sizes[:inputs])
    own = _strength(own_sizes, sizes)
    for name, order in found.input_orders.items():
        words = torch.arange(inputs).view(-1, len(order))
        other = _strength(own_sizes, sizes[words[:, list(order)].flatten()])
        if other - own > _DEVIATIONS * math.sqrt(2 / (inputs - 3)):
            yield (
                f"the sizes of its inputs go with those of {what} better if inputs of a {_unit(order)} are in another"
                f" order, {name} (correlation {math.tanh(other):.2f} against {math.tanh(own):.2f})"
            )


def _unit(order: tuple[int, ...]) -> str:
    return "word" if order in WORD_ORDERS.values() else "block"


def _ranks(values: Tensor) -> Tensor:
    """Standardized, so that a few large ones do not decide."""
    ranks = values.argsort().argsort().double()
    return (ranks - ranks.mean()) / ranks.std()


def _strength(left: Tensor, right: Tensor) -> float:
    """Fisher's measure of a correlation, of either sign: its deviation does not depend on it."""
    return math.atanh(min(abs(float((left * right).mean())), 0.999999))
