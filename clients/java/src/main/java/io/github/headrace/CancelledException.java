package io.github.headrace;

/** The call was ended by someone else, by an interrupt, or by closing the client (CANCELLED). */
public final class CancelledException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    CancelledException(Failure failure) {
        super(failure);
    }
}
