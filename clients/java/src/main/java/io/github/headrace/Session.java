package io.github.headrace;

import io.github.headrace.v1.InferenceServiceGrpc;
import io.github.headrace.v1.SessionAttach;
import io.github.headrace.v1.SessionRequest;
import io.github.headrace.v1.SessionResponse;
import io.github.headrace.v1.SessionSubmit;
import io.grpc.ClientCall;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Queue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.function.Supplier;

/**
 * Many generations over one call: one message comes per engine step, with what is new in all of
 * them. Closing it ends the call, and with it what was submitted and not detached.
 *
 * <p>It is read in one of three ways, not mixed: {@link #steps}, {@link #events}, or its
 * generations, each from any thread. Nothing is read that nobody waits for: who waits for an event
 * of its generation and finds none reads the next step for all. A broken connection ends a session;
 * what was detached or attached goes on and can be attached again in another one.
 */
public final class Session implements AutoCloseable {
    // Steps that wait in memory to be read, at most; the server waits with the rest.
    private static final int AHEAD = 16;
    private static final Object END = new Object();

    private final Object lock = new Object();
    private final BlockingQueue<Object> arrived = new LinkedBlockingQueue<>();
    private final ClientCall<SessionRequest, SessionResponse> call;
    private final Transport transport;
    // What follows is guarded by the lock.
    private final SessionState state = new SessionState();
    private final Map<Integer, SessionGeneration> generations = new HashMap<>();
    private String way;
    private boolean reading;
    private boolean finished;
    private boolean closed;
    private boolean ended;
    private HeadraceException failure;

    Session(Transport transport, Deadline deadline) {
        this.transport = transport;
        this.call = transport.newCall(InferenceServiceGrpc.getSessionMethod(), deadline);
        call.start(new Listener(), new Metadata());
        call.request(AHEAD);
    }

    /**
     * Starts a generation, which ends with the session at the latest.
     *
     * @param prompt text to continue
     * @param options how to generate
     * @return to be read here, or known by its id
     */
    public SessionGeneration submit(String prompt, GenerationOptions options) {
        return submit(Prompt.text(prompt), options);
    }

    /**
     * Starts a generation, which ends with the session at the latest.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @return to be read here, or known by its id
     * @throws InvalidRequestException a value that cannot be sent; what the server refuses comes as
     *     the generation's error
     */
    public SessionGeneration submit(Prompt prompt, GenerationOptions options) {
        return start(SessionSubmit.newBuilder().setSpec(Calls.spec(prompt, options)));
    }

    /**
     * Starts a generation, which ends with the session at the latest.
     *
     * @param conversation what to answer
     * @param options how to generate
     * @return to be read here, or known by its id
     */
    public SessionGeneration submit(Conversation conversation, GenerationOptions options) {
        SessionSubmit.Builder submission = SessionSubmit.newBuilder()
                .addAllMessages(Calls.messages(conversation))
                .setSpec(options.spec());
        if (conversation.continueLastMessage()) {
            submission.setContinueLastMessage(true);
        }
        conversation.tools().ifPresent(use -> submission.addAllTools(use.messages())
                .setToolChoice(use.choiceMessage())
                .setParallelToolCalls(use.parallel()));
        return start(submission);
    }

    /**
     * Starts a generation that outlives the session, as {@link HeadraceClient#submit(Prompt,
     * GenerationOptions, String)} does.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @param idempotencyKey the same key and spec is the same request; null: a new request in any
     *     case
     * @return to be read here, or known by its id
     */
    public SessionGeneration submitDetached(Prompt prompt, GenerationOptions options, String idempotencyKey) {
        SessionSubmit.Builder submission =
                SessionSubmit.newBuilder().setSpec(Calls.spec(prompt, options)).setDetached(true);
        if (idempotencyKey != null) {
            submission.setIdempotencyKey(Wire.utf8("idempotency_key", idempotencyKey));
        }
        return start(submission);
    }

    /**
     * Reads a generation that exists, all outputs of it.
     *
     * @param requestId from an accepted event, or from submit
     * @param fromToken the first token wanted in each output
     * @return to be read here, or known by its id
     */
    public SessionGeneration attach(String requestId, int fromToken) {
        return attach(attachment(requestId, fromToken));
    }

    /**
     * Reads one output of a generation that exists.
     *
     * @param requestId from an accepted event, or from submit
     * @param fromToken the first token wanted
     * @param outputIndex which of the n outputs
     * @return to be read here, or known by its id
     */
    public SessionGeneration attach(String requestId, int fromToken, int outputIndex) {
        return attach(attachment(requestId, fromToken).setOutputIndex(Wire.unsigned("output_index", outputIndex)));
    }

    /**
     * The messages as they come, until the session ends; see {@link #finish}.
     *
     * @return to be read once
     */
    public Iterable<SessionStep> steps() {
        claim("steps()");
        return () -> new Steps<>(step -> {
            step.events().forEach(state::note);
            return List.of(step);
        });
    }

    /**
     * All generations' events in the order of their arrival, until the session ends; see {@link
     * #finish}.
     *
     * @return to be read once
     */
    public Iterable<SessionEvent> events() {
        claim("events()");
        return () -> new Steps<>(state::events);
    }

    /**
     * Says that nothing more will be submitted or attached: when all generations have ended, the
     * session does.
     */
    public void finish() {
        synchronized (lock) {
            if (!finished && !closed) {
                finished = true;
                call.halfClose();
            }
        }
    }

    /**
     * Ends the session's call; what was submitted and not detached is cancelled. May be called from
     * any thread and more than once.
     */
    @Override
    public void close() {
        synchronized (lock) {
            if (!closed) {
                closed = true;
                call.cancel("the session is closed", null);
                arrived.add(END);
            }
        }
    }

    void cancel(int streamId) {
        synchronized (lock) {
            send(state.cancel(streamId));
        }
    }

    void detach(int streamId) {
        synchronized (lock) {
            send(state.detach(streamId));
            generations.remove(streamId);
            lock.notifyAll();
        }
    }

    /** Waits for the next event of a generation; null where none will come. */
    SessionEvent next(SessionGeneration generation) {
        claim("its generations");
        while (true) {
            synchronized (lock) {
                if (!generation.arrived.isEmpty()) {
                    return generation.arrived.remove();
                }
                if (!mayCome(generation)) {
                    return null;
                }
                if (reading) {
                    await();
                    continue;
                }
                reading = true;
            }
            readForAll();
        }
    }

    private SessionGeneration start(SessionSubmit.Builder submission) {
        return open(() -> state.submit(submission.build()));
    }

    private SessionGeneration attach(SessionAttach.Builder attachment) {
        return open(() -> state.attach(attachment.build()));
    }

    private static SessionAttach.Builder attachment(String requestId, int fromToken) {
        return SessionAttach.newBuilder()
                .setRequestId(Wire.utf8("request_id", requestId))
                .setFromToken(Wire.unsigned("from_token", fromToken));
    }

    private SessionGeneration open(Supplier<SessionRequest> message) {
        synchronized (lock) {
            if (failure != null) {
                throw failure;
            }
            if (closed || finished || ended) {
                throw new IllegalStateException("the session takes no more generations: it is finished or closed");
            }
            SessionRequest request = message.get();
            SessionGeneration generation = new SessionGeneration(this, request.getStreamId());
            generations.put(request.getStreamId(), generation);
            send(request);
            return generation;
        }
    }

    private void send(SessionRequest request) {
        if (request != null && !finished && !closed && !ended) {
            call.sendMessage(request);
        }
    }

    private void claim(String wanted) {
        synchronized (lock) {
            if (way != null && !way.equals(wanted)) {
                throw new IllegalStateException("the session is read by " + way + ", not by " + wanted);
            }
            way = wanted;
        }
    }

    /** Whether an event of a generation may still come. */
    private boolean mayCome(SessionGeneration generation) {
        if (!state.isOpen(generation.streamId()) || closed) {
            return false;
        }
        if (failure != null) {
            throw failure;
        }
        if (ended) {
            throw Failure.contract("the session ended before the generation did", generation.requestId().orElse(null));
        }
        return true;
    }

    private void await() {
        try {
            lock.wait();
        } catch (InterruptedException interrupted) {
            throw interruption();
        }
    }

    private void readForAll() {
        SessionStep step = null;
        try {
            step = read();
        } finally {
            synchronized (lock) {
                reading = false;
                if (step != null) {
                    state.events(step).forEach(event -> {
                        SessionGeneration generation = event.isLast()
                                ? generations.remove(event.streamId())
                                : generations.get(event.streamId());
                        generation.arrived.add(event);
                    });
                }
                lock.notifyAll();
            }
        }
    }

    /** Waits for the next step; null at the end. */
    private SessionStep read() {
        Object next;
        try {
            next = arrived.take();
        } catch (InterruptedException interrupted) {
            throw interruption();
        }
        if (next instanceof SessionResponse response) {
            call.request(1);
            return SessionStep.from(response);
        }
        // Who reads after this finds the end, too.
        arrived.add(next);
        synchronized (lock) {
            ended = true;
            if (next instanceof HeadraceException failed && !closed) {
                failure = failed;
                throw failed;
            }
        }
        return null;
    }

    private static HeadraceException interruption() {
        Thread.currentThread().interrupt();
        return Failure.of(Status.Code.CANCELLED, "interrupted while reading", null);
    }

    /** What the session's only reader makes of steps. */
    private interface Reading<T> {
        List<T> of(SessionStep step);
    }

    private final class Steps<T> implements Iterator<T> {
        private final Reading<T> reading;
        private final Queue<T> ahead = new ArrayDeque<>();

        Steps(Reading<T> reading) {
            this.reading = reading;
        }

        @Override
        public boolean hasNext() {
            while (ahead.isEmpty()) {
                SessionStep step = read();
                if (step == null) {
                    return false;
                }
                synchronized (lock) {
                    ahead.addAll(reading.of(step));
                    step.events().stream()
                            .filter(SessionEvent::isLast)
                            .forEach(last -> generations.remove(last.streamId()));
                }
            }
            return true;
        }

        @Override
        public T next() {
            if (!hasNext()) {
                throw new NoSuchElementException();
            }
            return ahead.remove();
        }
    }

    private final class Listener extends ClientCall.Listener<SessionResponse> {
        @Override
        public void onMessage(SessionResponse response) {
            arrived.add(response);
        }

        @Override
        public void onClose(Status status, Metadata trailers) {
            arrived.add(status.isOk() ? END : transport.failure(status, trailers, null));
        }
    }
}
