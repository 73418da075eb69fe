package io.github.headrace;

/** The credentials are missing or wrong (UNAUTHENTICATED). */
public final class UnauthenticatedException extends PermissionDeniedException {
    private static final long serialVersionUID = 1L;

    UnauthenticatedException(Failure failure) {
        super(failure);
    }
}
