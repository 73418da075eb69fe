package io.github.headrace;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.RequestInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;

/**
 * Why a call failed, on its way from a gRPC status to an exception.
 *
 * <p>Owns the reading of google.rpc details and the choice of the exception's class. Statuses of
 * calls, statuses inside messages and this client's own refusals come in, exceptions go out.
 */
record Failure(
        Status.Code code,
        String message,
        List<Violation> violations,
        Duration retryAfter,
        String requestId,
        Throwable cause) {

    /**
     * The exception for a failed call; {@code requestId} is what the stream has learned, or null.
     */
    static HeadraceException of(Status status, Metadata trailers, String requestId) {
        com.google.rpc.Status details = details(status, trailers);
        String message = status.getDescription();
        Failure plain = new Failure(status.getCode(), message, List.of(), null, requestId, status.getCause());
        return plain.with(details == null ? List.of() : details.getDetailsList()).exception();
    }

    /** The exception for a status inside a message, such as the error of an output. */
    static HeadraceException of(com.google.rpc.Status status, String requestId) {
        Status.Code code = Status.fromCodeValue(status.getCode()).getCode();
        Failure plain = new Failure(code, status.getMessage(), List.of(), null, requestId, null);
        return plain.with(status.getDetailsList()).exception();
    }

    /** An exception of this client's own. */
    static HeadraceException of(Status.Code code, String message, String requestId) {
        return new Failure(code, message, List.of(), null, requestId, null).exception();
    }

    /** A refusal of this client's own, for a value that the wire format cannot carry. */
    static HeadraceException invalid(String field, String description) {
        List<Violation> violations = List.of(new Violation(field, description));
        Status.Code code = Status.Code.INVALID_ARGUMENT;
        return new Failure(code, field + ": " + description, violations, null, null, null).exception();
    }

    /** The server broke its own contract. */
    static HeadraceException contract(String message, String requestId) {
        return of(Status.Code.INTERNAL, message, requestId);
    }

    private static com.google.rpc.Status details(Status status, Metadata trailers) {
        try {
            return trailers == null ? null : StatusProto.fromStatusAndTrailers(status, trailers);
        } catch (IllegalArgumentException damaged) {
            return null;
        }
    }

    private Failure with(List<Any> details) {
        List<Violation> rules = new ArrayList<>();
        Duration retry = null;
        String id = requestId;
        try {
            for (Any detail : details) {
                if (detail.is(BadRequest.class)) {
                    for (BadRequest.FieldViolation broken : detail.unpack(BadRequest.class).getFieldViolationsList()) {
                        rules.add(new Violation(broken.getField(), broken.getDescription()));
                    }
                } else if (detail.is(RetryInfo.class)) {
                    com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
                    retry = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
                } else if (detail.is(RequestInfo.class)) {
                    id = detail.unpack(RequestInfo.class).getRequestId();
                }
            }
        } catch (InvalidProtocolBufferException damaged) {
            // What was read before the damage is kept; the status says the rest.
        }
        String text = message == null || message.isEmpty() ? code.name() : message;
        return new Failure(code, text, List.copyOf(rules), retry, id, cause);
    }

    private HeadraceException exception() {
        return switch (code) {
            case INVALID_ARGUMENT, OUT_OF_RANGE -> new InvalidRequestException(this);
            case NOT_FOUND -> new NotFoundException(this);
            case ALREADY_EXISTS -> new AlreadyExistsException(this);
            case RESOURCE_EXHAUSTED -> new OverloadedException(this);
            case UNAVAILABLE -> new UnavailableException(this);
            case DEADLINE_EXCEEDED -> new DeadlineExceededException(this);
            case CANCELLED -> new CancelledException(this);
            case PERMISSION_DENIED -> new PermissionDeniedException(this);
            case UNAUTHENTICATED -> new UnauthenticatedException(this);
            case UNIMPLEMENTED -> new UnimplementedException(this);
            case INTERNAL, UNKNOWN, DATA_LOSS -> new InternalException(this);
            default -> new HeadraceException(this);
        };
    }
}
