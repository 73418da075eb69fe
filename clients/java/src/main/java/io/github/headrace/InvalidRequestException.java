package io.github.headrace;

/**
 * The request breaks a rule (INVALID_ARGUMENT, OUT_OF_RANGE); {@code violations()} name field, rule
 * and limit.
 */
public final class InvalidRequestException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    InvalidRequestException(Failure failure) {
        super(failure);
    }
}
