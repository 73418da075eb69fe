"""From a configuration to a runner that has compiled, captured and allocated everything.

    start               the order: device, place among the ranks, weights, cache, readiness
    sizes               what of the configuration all later phases need
    device              which device and dtype; kernel_cache: where compiled kernels are kept
    ranks               a rank's place among the others
    memory_plan         how much memory weights, a step, graphs and the cache take (plan_sizes: the
                        same for models that are not loaded)
    quantized           which weights take fewer bits, and the report of what that costs
    draft_model         the model that drafts, before it is loaded; drafters: who drafts
    fitted_runner       a runner whose cache fits what was measured
    profile_step        measures the largest steps; launch_bound: those that the host limits
    warm_up             runs synthetic steps until nothing compiles any more
    synthetic_steps     step plans of no request
    ceilings            rates of the device that telemetry compares steps with
    device_memory       what of a card is free and held, phase by phase

What a step does afterwards is `step/`.
"""
