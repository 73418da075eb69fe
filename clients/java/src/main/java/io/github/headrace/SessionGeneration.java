package io.github.headrace;

import java.util.ArrayDeque;
import java.util.Queue;

/**
 * One generation of a session: read it here, or know it by its id in the session's steps and
 * events.
 */
public final class SessionGeneration extends EventReader {
    // Filled and emptied by the session under its lock.
    final Queue<SessionEvent> arrived = new ArrayDeque<>();

    private final Session session;
    private final int streamId;
    private HeadraceException failure;

    SessionGeneration(Session session, int streamId) {
        this.session = session;
        this.streamId = streamId;
    }

    /**
     * Names the generation within its session.
     *
     * @return at least 1, and never used again in the session
     */
    public int streamId() {
        return streamId;
    }

    /** Ends the generation; its end comes as events. Nothing happens where it has ended. */
    public void cancel() {
        session.cancel(streamId);
    }

    /**
     * Gives up reading: nothing more comes of it here, while it goes on if it was attached, or
     * submitted detached.
     */
    public void detach() {
        session.detach(streamId);
    }

    @Override
    GenerationEvent read() {
        if (failure != null) {
            throw failure;
        }
        SessionEvent next = session.next(this);
        if (next != null && next.error() != null) {
            failure = next.error();
            throw failure;
        }
        return next == null ? null : next.event();
    }
}
