package io.github.headrace;

import java.time.Duration;

/**
 * How often and how soon to try again after UNAVAILABLE. The defaults outlast the restart of a
 * service: 8 s for calls, half a minute for subscriptions.
 *
 * @param maxAttempts attempts in a row, for subscriptions; gRPC itself makes at most 5 for a call.
 *     1 tries once.
 * @param initialBackoff pause before the second attempt, spread at random by a fifth
 * @param maxBackoff longest pause
 * @param multiplier growth of the pause from attempt to attempt
 */
public record RetryPolicy(int maxAttempts, Duration initialBackoff, Duration maxBackoff, double multiplier) {
    /** Ten attempts, the first pause 0.2 s, three times as long each time, at most 5 s. */
    public static final RetryPolicy DEFAULT =
            new RetryPolicy(10, Duration.ofMillis(200), Duration.ofSeconds(5), 3.0);

    /** Sends nothing twice. */
    public static final RetryPolicy NONE = new RetryPolicy(1, Duration.ofMillis(200), Duration.ofSeconds(5), 3.0);

    /**
     * Checks the values.
     *
     * @param maxAttempts at least 1
     * @param initialBackoff above 0
     * @param maxBackoff above 0
     * @param multiplier above 0
     */
    public RetryPolicy {
        if (maxAttempts < 1) {
            throw new IllegalArgumentException("maxAttempts must be at least 1, not " + maxAttempts);
        }
        if (!isPositive(initialBackoff) || !isPositive(maxBackoff) || !(multiplier > 0)) {
            throw new IllegalArgumentException("initialBackoff, maxBackoff and multiplier must be above 0");
        }
    }

    /** How long to wait after this many failures in a row, from 1. */
    Duration backoff(int failures) {
        double nanos = initialBackoff.toNanos() * Math.pow(multiplier, failures - 1);
        return Duration.ofNanos((long) Math.min(maxBackoff.toNanos(), nanos));
    }

    private static boolean isPositive(Duration time) {
        return !time.isNegative() && !time.isZero();
    }
}
