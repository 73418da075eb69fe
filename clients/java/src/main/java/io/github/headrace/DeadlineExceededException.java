package io.github.headrace;

/** The call's timeout passed (DEADLINE_EXCEEDED). */
public final class DeadlineExceededException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    DeadlineExceededException(Failure failure) {
        super(failure);
    }
}
