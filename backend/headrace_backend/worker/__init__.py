"""The worker process: runs the model on one device, step by step, as the engine plans it.

A plan's way: ring -> `channel` -> `step_loop` -> `model_runner` (`input_batch` for the model's inputs, `sampler` for the tokens) -> `channel` -> ring. Start-up is
`main` (without torch: arguments, model folder) and `start_up` (device, memory plan, weights, cache, warm-up).
"""
