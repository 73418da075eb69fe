package io.github.headrace;

/** The idempotency key belongs to a request with another spec (ALREADY_EXISTS). */
public final class AlreadyExistsException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    AlreadyExistsException(Failure failure) {
        super(failure);
    }
}
