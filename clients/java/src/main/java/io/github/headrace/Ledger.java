package io.github.headrace;

import java.time.Duration;

/**
 * Where the time of a request went. The parts from {@code queued} to {@code blockedOnReader} do not
 * overlap and add up to {@code endToEnd}.
 *
 * @param queued from the arrival of the call to its first step, tokenization included
 * @param prefill from the first step to the first token
 * @param decode generating tokens
 * @param preempted waiting to be computed again, after its cache blocks were given to others
 * @param engineRestart waiting for a worker to be replaced
 * @param detokenizeAndSend from the last token in the engine to its delivery, without the time the
 *     reader took
 * @param blockedOnReader waiting for the reader to take messages, after the last token
 * @param endToEnd from the arrival of the call to the last message
 * @param ttft from the arrival of the call to the first token in the engine
 * @param stepCount steps that computed a token of the request
 * @param preemptions times that a sequence of the request lost its cache blocks to others
 * @param cachedTokens prompt tokens found in the prefix cache
 * @param draftTokens drafted tokens that its steps verified
 * @param acceptedTokens those of them that were right, each a step that its output did not need
 */
public record Ledger(
        Duration queued,
        Duration prefill,
        Duration decode,
        Duration preempted,
        Duration engineRestart,
        Duration detokenizeAndSend,
        Duration blockedOnReader,
        Duration endToEnd,
        Duration ttft,
        int stepCount,
        int preemptions,
        int cachedTokens,
        int draftTokens,
        int acceptedTokens) {

    static Ledger from(io.github.headrace.v1.Ledger ledger) {
        return new Ledger(
                Duration.ofNanos(ledger.getQueuedNs()),
                Duration.ofNanos(ledger.getPrefillNs()),
                Duration.ofNanos(ledger.getDecodeNs()),
                Duration.ofNanos(ledger.getPreemptedNs()),
                Duration.ofNanos(ledger.getEngineRestartNs()),
                Duration.ofNanos(ledger.getDetokenizeAndSendNs()),
                Duration.ofNanos(ledger.getBlockedOnReaderNs()),
                Duration.ofNanos(ledger.getEndToEndNs()),
                Duration.ofNanos(ledger.getTtftNs()),
                ledger.getStepCount(),
                ledger.getPreemptions(),
                ledger.getCachedTokens(),
                ledger.getDraftTokens(),
                ledger.getAcceptedTokens());
    }
}
