package io.github.headrace;

/** Why an output ended. */
public enum FinishReason {
    /** A reason that is newer than this client. */
    UNKNOWN,
    /** An end-of-text token, a stop token or a stop string. */
    STOP,
    /** The most tokens asked for, or the end of the context. */
    LENGTH,
    /** {@link HeadraceClient#cancel}, or the caller dropped the call. */
    CANCELLED,
    /** The call's deadline or the generation's time limit passed. */
    DEADLINE,
    /** The engine could not go on with this output. */
    ERROR,
    /** As {@link #STOP}, of an output that called at least one function. */
    TOOL_CALLS;

    static FinishReason from(io.github.headrace.v1.FinishReason reason) {
        return switch (reason) {
            case FINISH_REASON_STOP -> STOP;
            case FINISH_REASON_LENGTH -> LENGTH;
            case FINISH_REASON_CANCELLED -> CANCELLED;
            case FINISH_REASON_DEADLINE -> DEADLINE;
            case FINISH_REASON_ERROR -> ERROR;
            case FINISH_REASON_TOOL_CALLS -> TOOL_CALLS;
            default -> UNKNOWN;
        };
    }
}
