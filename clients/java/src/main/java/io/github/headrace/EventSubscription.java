package io.github.headrace;

import io.github.headrace.GenerationEvent.Reconnecting;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.ArrayDeque;
import java.util.Queue;
import java.util.concurrent.Flow;

/**
 * One stream on its way to one subscriber: reads as many messages as events were asked for, and
 * opens a broken subscription again.
 *
 * <p>Owns the calls and the demand. A message is asked of gRPC only against an event that the
 * subscriber asked for, so a slow subscriber slows the server down. What a message means is the
 * {@link StreamState}'s to say. Everything below runs in the mailbox, one task at a time.
 */
final class EventSubscription implements Flow.Subscription {
    // Messages asked for at once, at most; more are asked for as these arrive.
    private static final int MAX_REQUESTED = 1 << 16;

    private final Transport transport;
    private final StreamState state;
    private final Flow.Subscriber<? super GenerationEvent> subscriber;
    private final Mailbox mailbox = new Mailbox();
    // Events of this client's own, for which there was no demand yet.
    private final Queue<Reconnecting> waiting = new ArrayDeque<>();
    private ClientCall<?, ?> call;
    private long demand;
    private int requested;
    private boolean ended;

    EventSubscription(
            Transport transport, StreamState state, Flow.Subscriber<? super GenerationEvent> subscriber) {
        this.transport = transport;
        this.state = state;
        this.subscriber = subscriber;
    }

    void start() {
        mailbox.execute(() -> {
            subscriber.onSubscribe(this);
            // After whatever the subscriber asked for just now.
            mailbox.execute(() -> open(state.call()));
        });
    }

    @Override
    public void request(long n) {
        mailbox.execute(() -> {
            if (n <= 0) {
                fail(new IllegalArgumentException("request(n) needs an n above 0, not " + n));
                return;
            }
            demand = demand + n < 0 ? Long.MAX_VALUE : demand + n;
            deliver();
        });
    }

    @Override
    public void cancel() {
        mailbox.execute(this::end);
    }

    private <Q, R> void open(StreamCall<Q, R> next) {
        if (ended) {
            return;
        }
        ClientCall<Q, R> opened = transport.newCall(next.method(), state.deadline());
        call = opened;
        requested = 0;
        opened.start(new Listener<>(next), new Metadata());
        ask();
        opened.sendMessage(next.request());
        opened.halfClose();
    }

    /** Asks for as many messages as events are wanted; what is on its way counts. */
    private void ask() {
        int more = (int) Math.min(demand - waiting.size(), MAX_REQUESTED) - requested;
        if (call != null && more > 0) {
            requested += more;
            call.request(more);
        }
    }

    private void received(io.github.headrace.v1.GenerationEvent message) {
        if (ended) {
            return;
        }
        requested--;
        try {
            GenerationEvent event = state.take(message);
            if (event != null) {
                emit(event);
            }
        } catch (RuntimeException broken) {
            // Whatever it is, a subscriber must not wait for ever.
            fail(broken);
        }
        deliver();
    }

    private void deliver() {
        while (!ended && demand > 0 && !waiting.isEmpty()) {
            emit(waiting.remove());
        }
        if (!ended) {
            ask();
        }
    }

    private void emit(GenerationEvent event) {
        demand--;
        try {
            subscriber.onNext(event);
        } catch (RuntimeException | Error thrown) {
            fail(thrown);
        }
    }

    private void closed(Status status, Metadata trailers) {
        call = null;
        if (ended) {
            return;
        }
        try {
            if (status.isOk() || state.done()) {
                state.ended();
                end();
                subscriber.onComplete();
            } else {
                reconnect(state.failed(transport.failure(status, trailers, state.requestId())));
            }
        } catch (HeadraceException last) {
            fail(last);
        }
    }

    private void reconnect(Reconnecting event) {
        waiting.add(event);
        transport.reconnectAfter(event.delay(), () -> mailbox.execute(() -> open(state.call())));
        deliver();
    }

    private void fail(Throwable error) {
        if (!ended) {
            end();
            subscriber.onError(error);
        }
    }

    private void end() {
        ended = true;
        if (call != null) {
            call.cancel("the reader left", null);
            call = null;
        }
    }

    /** Brings what gRPC reports into the mailbox. */
    private final class Listener<R> extends ClientCall.Listener<R> {
        private final StreamCall<?, R> opened;

        Listener(StreamCall<?, R> opened) {
            this.opened = opened;
        }

        @Override
        public void onMessage(R message) {
            mailbox.execute(() -> received(opened.event().apply(message)));
        }

        @Override
        public void onClose(Status status, Metadata trailers) {
            mailbox.execute(() -> closed(status, trailers));
        }
    }
}
