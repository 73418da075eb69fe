package io.github.headrace;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ClientInterceptors;
import io.grpc.Deadline;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.ForkJoinPool;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * The connections of a client, taken in turn, and what every call has in common.
 *
 * <p>Owns channels and their end. What is sent is in {@link Calls}, what streams remember in {@link
 * StreamState}.
 */
final class Transport implements AutoCloseable {
    private final List<ManagedChannel> connections;
    private final List<Channel> channels;
    private final RetryPolicy retry;
    private final Executor executor;
    private final AtomicInteger turn = new AtomicInteger();
    private volatile boolean closed;

    /** Takes over the connections; {@code executor} may be null. */
    Transport(List<ManagedChannel> connections, ClientInterceptor headers, RetryPolicy retry, Executor executor) {
        this.connections = connections;
        this.channels = connections.stream()
                .map(connection -> ClientInterceptors.intercept(connection, headers))
                .toList();
        this.retry = retry;
        this.executor = executor == null ? ForkJoinPool.commonPool() : executor;
    }

    RetryPolicy retry() {
        return retry;
    }

    boolean isClosed() {
        return closed;
    }

    /** A call on the next connection, not started yet; {@code deadline} may be null. */
    <Q, R> ClientCall<Q, R> newCall(MethodDescriptor<Q, R> method, Deadline deadline) {
        return next().newCall(method, options(deadline));
    }

    <Q, R, T> T call(UnaryCall<Q, R, T> call, Timeouts timeouts) {
        CallOptions options = options(timeouts.start(call.generates()));
        R response;
        try {
            response = ClientCalls.blockingUnaryCall(next(), call.method(), options, call.request());
        } catch (StatusRuntimeException failed) {
            throw failure(failed.getStatus(), failed.getTrailers(), null);
        }
        return call.convert().apply(response);
    }

    <Q, R, T> CompletableFuture<T> callAsync(UnaryCall<Q, R, T> call, Timeouts timeouts) {
        ClientCall<Q, R> started = newCall(call.method(), timeouts.start(call.generates()));
        CompletableFuture<T> future = new CompletableFuture<>();
        future.whenComplete((answer, failed) -> {
            if (future.isCancelled()) {
                started.cancel("cancelled by the caller", null);
            }
        });
        ClientCalls.asyncUnaryCall(started, call.request(), new Answer<>(call, future));
        return future;
    }

    /**
     * The exception for a failed call. After {@link #close} it says so, whatever gRPC makes of it.
     */
    HeadraceException failure(Status status, io.grpc.Metadata trailers, String requestId) {
        return closed
                ? Failure.of(Status.Code.CANCELLED, "the client is closed", requestId)
                : Failure.of(status, trailers, requestId);
    }

    /**
     * Runs something after a while; connections that wait before they try again stop waiting then.
     */
    void reconnectAfter(Duration delay, Runnable task) {
        CompletableFuture.delayedExecutor(delay.toNanos(), TimeUnit.NANOSECONDS, executor)
                .execute(() -> {
                    connections.forEach(ManagedChannel::resetConnectBackoff);
                    task.run();
                });
    }

    /** Ends the connections and all calls on them. */
    @Override
    public void close() {
        closed = true;
        connections.forEach(ManagedChannel::shutdownNow);
        try {
            for (ManagedChannel connection : connections) {
                connection.awaitTermination(5, TimeUnit.SECONDS);
            }
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }

    private Channel next() {
        return channels.get(Math.floorMod(turn.getAndIncrement(), channels.size()));
    }

    private static CallOptions options(Deadline deadline) {
        return deadline == null ? CallOptions.DEFAULT : CallOptions.DEFAULT.withDeadline(deadline);
    }

    /** Completes a future with the answer of a call. */
    private final class Answer<R, T> implements StreamObserver<R> {
        private final UnaryCall<?, R, T> call;
        private final CompletableFuture<T> future;

        Answer(UnaryCall<?, R, T> call, CompletableFuture<T> future) {
            this.call = call;
            this.future = future;
        }

        @Override
        public void onNext(R response) {
            try {
                future.complete(call.convert().apply(response));
            } catch (HeadraceException refused) {
                future.completeExceptionally(refused);
            }
        }

        @Override
        public void onError(Throwable failed) {
            future.completeExceptionally(
                    failure(Status.fromThrowable(failed), Status.trailersFromThrowable(failed), null));
        }

        @Override
        public void onCompleted() {}
    }
}
