// The errors a caller can meet, and how a gRPC status becomes one of them. Owns the reading of
// google.rpc details (BadRequest, RetryInfo, RequestInfo); owns no decision to try again, which is
// in retry.go and resume.go.

package headrace

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What a failure means. Compare with [errors.Is]; the details are in the [*Error], which
// [errors.As] finds.
var (
	// ErrInvalid: the request breaks a rule (INVALID_ARGUMENT, OUT_OF_RANGE); Error.Violations name
	// field, rule and limit.
	ErrInvalid = errors.New("headrace: invalid request")
	// ErrNotFound: no such model or request, or not one of the caller's.
	ErrNotFound = errors.New("headrace: not found")
	// ErrAlreadyExists: the idempotency key belongs to a request with another spec.
	ErrAlreadyExists = errors.New("headrace: already exists")
	// ErrFailedPrecondition: the server's state does not allow it, for example Chat with a model
	// that has no chat template.
	ErrFailedPrecondition = errors.New("headrace: failed precondition")
	// ErrOverloaded: the queue, a quota or a buffer is full (RESOURCE_EXHAUSTED); Error.RetryAfter
	// says when to come back.
	ErrOverloaded = errors.New("headrace: overloaded")
	// ErrUnavailable: the server cannot be reached, stops, or lost its engine.
	ErrUnavailable = errors.New("headrace: unavailable")
	// ErrDeadline: the call's deadline passed. Such errors are context.DeadlineExceeded as well.
	ErrDeadline = errors.New("headrace: deadline exceeded")
	// ErrCancelled: the call's context was cancelled, or somebody else ended it. Such errors are
	// context.Canceled as well.
	ErrCancelled = errors.New("headrace: cancelled")
	// ErrUnauthenticated: the server takes no calls without an API key or a client certificate that
	// it knows.
	ErrUnauthenticated = errors.New("headrace: unauthenticated")
	// ErrPermissionDenied: the caller is known, but this call or this model is not allowed to it.
	ErrPermissionDenied = errors.New("headrace: permission denied")
	// ErrUnimplemented: the server does not know the call, or the option is not built yet.
	ErrUnimplemented = errors.New("headrace: unimplemented")
	// ErrInternal: the server failed, or answered against its own contract (INTERNAL, UNKNOWN,
	// DATA_LOSS).
	ErrInternal = errors.New("headrace: internal error")
)

var meanings = map[codes.Code]error{
	codes.InvalidArgument:    ErrInvalid,
	codes.OutOfRange:         ErrInvalid,
	codes.NotFound:           ErrNotFound,
	codes.AlreadyExists:      ErrAlreadyExists,
	codes.FailedPrecondition: ErrFailedPrecondition,
	codes.ResourceExhausted:  ErrOverloaded,
	codes.Unavailable:        ErrUnavailable,
	codes.DeadlineExceeded:   ErrDeadline,
	codes.Canceled:           ErrCancelled,
	codes.Unauthenticated:    ErrUnauthenticated,
	codes.PermissionDenied:   ErrPermissionDenied,
	codes.Unimplemented:      ErrUnimplemented,
	codes.Internal:           ErrInternal,
	codes.Unknown:            ErrInternal,
	codes.DataLoss:           ErrInternal,
}

// Violation is one rule that a request broke.
type Violation struct {
	// Field is the path of the field, for example "spec.sampling.top_p".
	Field string
	// Description names the rule, its limit and the value that broke it.
	Description string
}

// Error is a call that failed.
type Error struct {
	// Code is the gRPC status.
	Code codes.Code
	// Message is what the server (or this client, for requests that cannot be sent) says about it.
	Message string
	// Violations are the rules that the request broke; empty unless it was refused.
	Violations []Violation
	// RetryAfter is when the server asks to be tried again; 0 where it did not say.
	RetryAfter time.Duration
	// RequestID names the request in the server's logs, where it got as far as having one.
	RequestID string
}

// Error is the status and the message, followed by violations that the message does not mention.
func (e *Error) Error() string {
	var more []string
	for _, v := range e.Violations {
		if !strings.Contains(e.Message, v.Description) {
			more = append(more, v.Field+": "+v.Description)
		}
	}
	text := fmt.Sprintf("headrace: %s: %s", e.Code, e.Message)
	if len(more) > 0 {
		text += " (" + strings.Join(more, "; ") + ")"
	}
	return text
}

// Is tells whether target is the meaning of the status: one of this package's Err variables, or an
// error of package context.
func (e *Error) Is(target error) bool {
	switch target {
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	case context.Canceled:
		return e.Code == codes.Canceled
	default:
		meaning, known := meanings[e.Code]
		return known && target == meaning
	}
}

// GRPCStatus makes status.FromError and status.Code of grpc-go work on the error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// fromRPC is the error of a call that failed. requestID is what its stream has learned, used where
// the status names no request itself.
func fromRPC(err error, requestID string) *Error {
	var ours *Error
	if errors.As(err, &ours) {
		return ours
	}
	return fromStatus(status.Convert(err).Proto(), requestID)
}

// fromContext is the error of a context that ended while nothing was being called.
func fromContext(err error, requestID string) *Error {
	return fromRPC(status.FromContextError(err).Err(), requestID)
}

// fromStatus is the error of a google.rpc.Status, of a call or inside a message.
func fromStatus(s *statuspb.Status, requestID string) *Error {
	made := &Error{Code: codes.Code(s.GetCode()), Message: s.GetMessage(), RequestID: requestID}
	if made.Message == "" {
		made.Message = made.Code.String()
	}
	for _, packed := range s.GetDetails() {
		// Details of kinds that this client does not know, and damaged ones, say nothing.
		detail, err := packed.UnmarshalNew()
		if err != nil {
			continue
		}
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			for _, v := range detail.GetFieldViolations() {
				made.Violations = append(made.Violations, Violation{v.GetField(), v.GetDescription()})
			}
		case *errdetails.RetryInfo:
			made.RetryAfter = detail.GetRetryDelay().AsDuration()
		case *errdetails.RequestInfo:
			made.RequestID = detail.GetRequestId()
		}
	}
	return made
}

// invalid is an error of this client's own, for a value that cannot be sent.
func invalid(field, description string) *Error {
	return &Error{
		Code:       codes.InvalidArgument,
		Message:    field + ": " + description,
		Violations: []Violation{{field, description}},
	}
}

// broken is an answer against the server's own contract.
func broken(requestID, format string, arguments ...any) *Error {
	return &Error{Code: codes.Internal, Message: fmt.Sprintf(format, arguments...), RequestID: requestID}
}
