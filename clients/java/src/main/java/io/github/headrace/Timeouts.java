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

    /** The deadline of a call that begins now; null without one. */
    Deadline start(boolean generates) {
        Duration timeout = every != null ? every : generates ? null : quick;
        return timeout == null ? null : Deadline.after(timeout.toNanos(), TimeUnit.NANOSECONDS);
    }
}
