package io.github.headrace;

/** The server cannot be reached, stops, or lost its engine (UNAVAILABLE). */
public final class UnavailableException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    UnavailableException(Failure failure) {
        super(failure);
    }
}
