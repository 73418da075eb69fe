package io.github.headrace;

import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.stream.Collectors;

/**
 * A call failed. Subclasses name the usual reasons; other statuses come as this class itself.
 *
 * <p>The message is what the server says (or this client, of requests that cannot be sent), with
 * the rules that were broken.
 */
public class HeadraceException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    private final Status.Code code;
    private final Violation[] violations;
    private final Duration retryAfter;
    private final String requestId;

    HeadraceException(Failure failure) {
        super(text(failure), failure.cause());
        this.code = failure.code();
        this.violations = failure.violations().toArray(new Violation[0]);
        this.retryAfter = failure.retryAfter();
        this.requestId = failure.requestId();
    }

    /**
     * The gRPC status.
     *
     * @return never OK
     */
    public Status.Code code() {
        return code;
    }

    /**
     * The rules that the request broke.
     *
     * @return empty unless the request was refused
     */
    public List<Violation> violations() {
        return List.of(violations);
    }

    /**
     * After how long the server asks to be tried again.
     *
     * @return empty where it did not say
     */
    public Optional<Duration> retryAfter() {
        return Optional.ofNullable(retryAfter);
    }

    /**
     * The name of the request in the server's logs.
     *
     * @return empty where it never got as far as having one
     */
    public Optional<String> requestId() {
        return Optional.ofNullable(requestId);
    }

    private static String text(Failure failure) {
        String broken = failure.violations().stream()
                .filter(violation -> !failure.message().contains(violation.description()))
                .map(violation -> violation.field() + ": " + violation.description())
                .collect(Collectors.joining("; "));
        return broken.isEmpty() ? failure.message() : failure.message() + " (" + broken + ")";
    }
}
