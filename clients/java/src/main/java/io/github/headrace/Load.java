package io.github.headrace;

import io.github.headrace.v1.GetLoadResponse;
import java.time.Duration;

/**
 * How busy the server is.
 *
 * @param model name of the model these figures are of
 * @param runningSequences sequences in the batch
 * @param maxRunningSequences most sequences that the batch holds
 * @param waitingRequests requests that wait for their first step
 * @param maxWaitingRequests most waiting requests before new ones are refused
 * @param waitingTokens prompt tokens of the waiting requests
 * @param kvCacheUsage share of KV cache blocks in use by running sequences, 0 to 1
 * @param kvBlocks KV cache blocks in all
 * @param outputTokensPerSecond over the last ten seconds
 * @param expectedWait what a request that arrives now would wait before its first step
 * @param prefixCacheHitRate share of prompt tokens that the prefix cache had, over the engine's
 *     life, 0 to 1
 * @param serving whether the engine makes progress
 * @param draining whether the server takes no new generations because it is drained or shuts down
 * @param openCalls generations and subscriptions open at the service process that answered
 * @param maxOpenCalls the most that it takes
 */
public record Load(
        String model,
        int runningSequences,
        int maxRunningSequences,
        int waitingRequests,
        int maxWaitingRequests,
        long waitingTokens,
        float kvCacheUsage,
        int kvBlocks,
        float outputTokensPerSecond,
        Duration expectedWait,
        float prefixCacheHitRate,
        boolean serving,
        boolean draining,
        int openCalls,
        int maxOpenCalls) {

    static Load from(GetLoadResponse load) {
        return new Load(
                load.getModel(),
                load.getRunningSequences(),
                load.getMaxRunningSequences(),
                load.getWaitingRequests(),
                load.getMaxWaitingRequests(),
                load.getWaitingTokens(),
                load.getKvCacheUsage(),
                load.getKvBlocks(),
                load.getOutputTokensPerSecond(),
                Duration.ofNanos(load.getExpectedWaitNs()),
                load.getPrefixCacheHitRate(),
                load.getServing(),
                load.getDraining(),
                load.getOpenCalls(),
                load.getMaxOpenCalls());
    }
}
