"""ORCA (protos/xds), by which servers tell load balancers their load, in a pool of its own."""
