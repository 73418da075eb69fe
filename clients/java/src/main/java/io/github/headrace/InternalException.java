package io.github.headrace;

/** The server failed, or answered against its own contract (INTERNAL, UNKNOWN, DATA_LOSS). */
public final class InternalException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    InternalException(Failure failure) {
        super(failure);
    }
}
