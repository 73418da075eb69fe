package io.github.headrace;

import io.github.headrace.v1.DrainResponse;

/**
 * What a drained server still has to do, over all models.
 *
 * @param runningSequences sequences that still run
 * @param waitingRequests requests that still wait
 */
public record DrainStatus(int runningSequences, int waitingRequests) {

    static DrainStatus from(DrainResponse response) {
        return new DrainStatus(response.getRunningSequences(), response.getWaitingRequests());
    }
}
