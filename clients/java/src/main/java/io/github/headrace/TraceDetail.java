package io.github.headrace;

/** How much of each token is traced. */
public enum TraceDetail {
    /** Nothing per token. */
    OFF,
    /** Arrays on the request's span. */
    ARRAY,
    /** One span per token. */
    SPAN;

    io.github.headrace.v1.TraceDetail wire() {
        return switch (this) {
            case OFF -> io.github.headrace.v1.TraceDetail.TRACE_DETAIL_OFF;
            case ARRAY -> io.github.headrace.v1.TraceDetail.TRACE_DETAIL_ARRAY;
            case SPAN -> io.github.headrace.v1.TraceDetail.TRACE_DETAIL_SPAN;
        };
    }
}
