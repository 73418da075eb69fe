package io.github.headrace;

/** No such model or request, or not one of the caller's (NOT_FOUND). */
public final class NotFoundException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    NotFoundException(Failure failure) {
        super(failure);
    }
}
