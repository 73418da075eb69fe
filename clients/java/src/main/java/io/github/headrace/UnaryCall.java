package io.github.headrace;

import io.grpc.MethodDescriptor;
import java.util.function.Function;

/**
 * A call with one answer: which method, what to send, how to read the answer.
 *
 * @param generates tells calls that take as long as a generation from those that are quick
 */
record UnaryCall<Q, R, T>(MethodDescriptor<Q, R> method, Q request, Function<R, T> convert, boolean generates) {

    static <Q, R, T> UnaryCall<Q, R, T> quick(MethodDescriptor<Q, R> method, Q request, Function<R, T> convert) {
        return new UnaryCall<>(method, request, convert, false);
    }
}
