package io.github.headrace;

import io.grpc.Status;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;

/**
 * The events of one call. Closing it before its end cancels the call: a Generate or Chat is then
 * cancelled on the server, a subscription only detached. A stream that was read to its end needs no
 * closing.
 */
public final class GenerationStream extends EventReader implements AutoCloseable {
    // Events that wait in memory for their reader, at most; the server waits with the rest.
    private static final int AHEAD = 64;

    private final Inbox inbox = new Inbox();
    private int taken;
    private volatile boolean closed;
    private RuntimeException failure;

    GenerationStream(Transport transport, StreamState state) {
        new EventSubscription(transport, state, inbox).start();
    }

    /**
     * Ends the stream, and the call with it if it still runs. May be called from any thread, and
     * more than once.
     */
    @Override
    public void close() {
        closed = true;
        inbox.subscription.cancel();
        inbox.arrived.add(Inbox.END);
    }

    @Override
    GenerationEvent read() {
        if (failure != null) {
            throw failure;
        }
        Object arrived = closed ? Inbox.END : take();
        if (arrived instanceof GenerationEvent event) {
            replenish();
            return event;
        }
        closed = true;
        if (arrived instanceof RuntimeException failed) {
            // Where the caller waited tells more than where gRPC noticed.
            failed.fillInStackTrace();
            failure = failed;
            throw failed;
        }
        return null;
    }

    private Object take() {
        try {
            return inbox.arrived.take();
        } catch (InterruptedException interrupted) {
            close();
            Thread.currentThread().interrupt();
            return Failure.of(Status.Code.CANCELLED, "interrupted while reading", requestId().orElse(null));
        }
    }

    private void replenish() {
        taken++;
        if (taken == AHEAD / 2) {
            taken = 0;
            inbox.subscription.request(AHEAD / 2);
        }
    }

    /** Where gRPC's threads leave events, the failure or the end. */
    private static final class Inbox implements Flow.Subscriber<GenerationEvent> {
        static final Object END = new Object();

        final BlockingQueue<Object> arrived = new LinkedBlockingQueue<>();
        Flow.Subscription subscription;

        @Override
        public void onSubscribe(Flow.Subscription given) {
            subscription = given;
            given.request(AHEAD);
        }

        @Override
        public void onNext(GenerationEvent event) {
            arrived.add(event);
        }

        @Override
        public void onError(Throwable failed) {
            arrived.add(failed);
        }

        @Override
        public void onComplete() {
            arrived.add(END);
        }
    }
}
