"""The backend of one model: a process that owns its requests, and the workers that compute them.

Without torch, in the backend's process:

    server          the process: socket, streams of services, life of the workers
    engine          requests, scheduling, blocks of the cache, token logs: a pure object
    step            what crosses to the workers and back in shared memory: plans, results, messages
    rank_agent      workers of an engine on another host: `headrace ranks`

With torch, in a process for each rank:

    worker          executes plans on a device
    models, layers, quantization, weights, parallel    what it executes them with; arithmetic is
                                                       `headrace_kernels`'
    packing         whether other tools packed weights as they say: `headrace doctor --weights`

`config` is read by both; `device_defaults`, `kv_bytes`, `quantize_rules` and `tp_rules` are what is
to be known of devices and models before torch is loaded.
"""
