package io.github.headrace;

/**
 * The queue, a quota or a buffer is full (RESOURCE_EXHAUSTED); {@code retryAfter()} says when to
 * come back.
 */
public final class OverloadedException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    OverloadedException(Failure failure) {
        super(failure);
    }
}
