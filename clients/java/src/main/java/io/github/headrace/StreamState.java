package io.github.headrace;

import io.github.headrace.GenerationEvent.Accepted;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.Reconnecting;
import io.grpc.Deadline;

/**
 * What a stream knows between two messages. This class is that of Generate and Chat, where the
 * failure of a call is final; {@link SubscriptionState} opens its call again.
 *
 * <p>Does not wait, read or collect: {@link EventSubscription} hands in each message or failure,
 * one at a time, and does what comes back.
 */
class StreamState {
    private final Deadline deadline;
    private StreamCall<?, ?> call;
    private String requestId;
    private boolean done;

    /** {@code deadline} may be null; it holds over all calls of the stream. */
    StreamState(StreamCall<?, ?> call, Deadline deadline) {
        this.call = call;
        this.deadline = deadline;
    }

    /** The call that opens the stream, or opens it again. */
    StreamCall<?, ?> call() {
        return call;
    }

    void callNext(StreamCall<?, ?> next) {
        call = next;
    }

    Deadline deadline() {
        return deadline;
    }

    /** The request's name; null before the accepted event. */
    String requestId() {
        return requestId;
    }

    boolean done() {
        return done;
    }

    /** The event to yield for a message; null where there is nothing new in it. */
    final GenerationEvent take(io.github.headrace.v1.GenerationEvent message) {
        GenerationEvent whole = Events.from(message);
        GenerationEvent event = whole == null ? null : newPart(whole);
        if (event instanceof Accepted accepted) {
            requestId = accepted.requestId();
        }
        done |= event instanceof Done;
        return event;
    }

    /**
     * What to do about a failed call: an event to yield, whose delay comes before the next opening.
     *
     * @throws HeadraceException the failure, where it is final
     */
    Reconnecting failed(HeadraceException error) {
        throw error;
    }

    /**
     * The call ended without an error.
     *
     * @throws InternalException it did so before the generation was done
     */
    final void ended() {
        if (!done) {
            throw Failure.contract("the stream ended before the generation did", requestId);
        }
    }

    /** The event without what was yielded before; null where nothing is left. */
    GenerationEvent newPart(GenerationEvent event) {
        return event;
    }
}
