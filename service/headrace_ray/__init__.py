"""Engines and services of Headrace on a Ray cluster, for who has one.

Owns what is placed where, how many engines there are, and who learns of them. Ray says which nodes
there are and which of them are lost, reserves GPUs and CPUs, and starts actors; an actor starts the
very processes that `headrace backend` and `headrace service` are, and tokens pass between these
without Ray. `deployment` is what programs call, `commands` the command line.

Ray is an extra of its own (`headrace-server[ray]`): `commands` and `config` do without it.
"""
