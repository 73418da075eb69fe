package io.github.headrace;

import io.grpc.Deadline;
import java.time.Duration;
import java.util.concurrent.TimeUnit;

/**
 * How long calls may take.
 *
 * @param quick for calls that do not generate; null: no limit
 * @param every for all calls, streams too, in place of {@code quick}; null: not given
 */
record Timeouts(Duration quick, Duration every) {
    /** Beyond it there is no deadline: gRPC counts nanoseconds, and the longest is of 292 years. */
    private static final Duration LONGEST = Duration.ofDays(100 * 365);

    /** The deadline of a call that begins now; null without one. */
    Deadline start(boolean generates) {
        Duration timeout = every != null ? every : generates ? null : quick;
        boolean endless = timeout == null || timeout.compareTo(LONGEST) > 0;
        return endless ? null : Deadline.after(timeout.toNanos(), TimeUnit.NANOSECONDS);
    }
}
