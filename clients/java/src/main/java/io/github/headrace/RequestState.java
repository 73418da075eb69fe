package io.github.headrace;

/** Where a request is in its life. */
public enum RequestState {
    /** A state that is newer than this client. */
    UNKNOWN,
    /** Not computed yet. */
    QUEUED,
    /** In the batch, or preempted and to be computed again. */
    RUNNING,
    /** Ended; its log is kept until it expires. */
    FINISHED;

    static RequestState from(io.github.headrace.v1.RequestState state) {
        return switch (state) {
            case REQUEST_STATE_QUEUED -> QUEUED;
            case REQUEST_STATE_RUNNING -> RUNNING;
            case REQUEST_STATE_FINISHED -> FINISHED;
            default -> UNKNOWN;
        };
    }

    io.github.headrace.v1.RequestState wire() {
        return switch (this) {
            case QUEUED -> io.github.headrace.v1.RequestState.REQUEST_STATE_QUEUED;
            case RUNNING -> io.github.headrace.v1.RequestState.REQUEST_STATE_RUNNING;
            case FINISHED -> io.github.headrace.v1.RequestState.REQUEST_STATE_FINISHED;
            case UNKNOWN -> throw Failure.invalid("state", "UNKNOWN is no state to ask for");
        };
    }
}
