package io.github.headrace;

/** The credentials are not enough (PERMISSION_DENIED), or missing or wrong (its subclass). */
public class PermissionDeniedException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    PermissionDeniedException(Failure failure) {
        super(failure);
    }
}
