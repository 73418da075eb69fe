package io.github.headrace;

/** The server does not know the call, or cannot do what it asks for (UNIMPLEMENTED). */
public final class UnimplementedException extends HeadraceException {
    private static final long serialVersionUID = 1L;

    UnimplementedException(Failure failure) {
        super(failure);
    }
}
