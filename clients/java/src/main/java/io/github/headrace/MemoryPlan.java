package io.github.headrace;

/**
 * How the device's memory is divided, in bytes.
 *
 * @param deviceBytes all of the device's memory, whoever uses it; 0 on a CPU
 * @param totalBytes what was free for the model before it was loaded
 * @param weightBytes the model's weights
 * @param activationBytes what the largest step needs while it is computed
 * @param graphBytes captured CUDA graphs
 * @param otherBytes the driver's and libraries' own
 * @param reserveBytes what stays free
 * @param kvCacheBytes the KV cache
 * @param measured whether the figures were measured after loading; else they are estimates
 */
public record MemoryPlan(
        long deviceBytes,
        long totalBytes,
        long weightBytes,
        long activationBytes,
        long graphBytes,
        long otherBytes,
        long reserveBytes,
        long kvCacheBytes,
        boolean measured) {

    static MemoryPlan from(io.github.headrace.v1.MemoryPlan plan) {
        return new MemoryPlan(
                plan.getDeviceBytes(),
                plan.getTotalBytes(),
                plan.getWeightBytes(),
                plan.getActivationBytes(),
                plan.getGraphBytes(),
                plan.getOtherBytes(),
                plan.getReserveBytes(),
                plan.getKvCacheBytes(),
                plan.getMeasured());
    }
}
