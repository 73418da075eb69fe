package io.github.headrace;

import io.grpc.MethodDescriptor;
import java.util.function.Function;

/**
 * A call that streams events.
 *
 * @param event takes the event out of a message
 */
record StreamCall<Q, R>(
        MethodDescriptor<Q, R> method, Q request, Function<R, io.github.headrace.v1.GenerationEvent> event) {

    StreamCall<Q, R> with(Q other) {
        return new StreamCall<>(method, other, event);
    }
}
