"""Cases for `python -m benchmarks.bench_kernels`: one file per kernel file, named after it.

A case is a public function that takes nothing but arguments with defaults and returns `(callable,
bytes, flops)`, or a generator function that yields `(label, make)` pairs where `make()` returns
such a triple (for tables of sizes). `callable()` runs the kernel once on data that the case has
made on the GPU (seeded Gaussian numbers, never zeros), without a host sync, so that it can be
captured in a CUDA graph. `bytes` is what must be read and written at least, `flops` what must be
computed at least (0 where nothing is multiplied). The benchmark calls a case several times for
fresh data, so that the second run finds nothing in the L2 cache; cases need no rotation of their
own. Launches of the cuBLAS or SDPA rival may stand beside as cases whose label or name ends in
`_torch`.
"""
