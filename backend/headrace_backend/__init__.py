"""The backend of one model: a process that owns its requests, and the workers that compute them.

    server          the process: socket, streams of services, life of the workers                    no torch
    engine          requests, scheduling, blocks of the cache, token logs: a pure object             no torch
    step            what crosses between the two, in shared memory: plans, results, messages         no torch
    worker          a process for each rank: executes plans on a device
    models, layers, quantization, weights, parallel    what it executes them with; arithmetic is
                                                       `headrace_kernels`'

`config` is read by both processes; `device_defaults`, `kv_bytes`, `quantize_rules` and `tp_rules`
are what is to be known of devices and models before torch is loaded.
"""
