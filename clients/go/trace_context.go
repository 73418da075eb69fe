// W3C trace contexts of callers: the form of traceparent, which the server's spans join. A server
// ignores a malformed one without a word, so that it is refused here.

package headrace

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"google.golang.org/grpc/metadata"

	"github.com/headrace/headrace/clients/go/headracev1"
)

const (
	traceparentKey      = "traceparent"
	maxTraceparentChars = 256
)

// Versions to come may add parts, as the server takes them.
var traceparentForm = regexp.MustCompile(`^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-[\x20-\x7e]*)?$`)

// ContextWithTraceparent returns a context whose calls join the caller's trace, named by its W3C
// traceparent; with the sampled flag (01 at the end) their generations are always recorded. It is
// for every call of a client; generations of a session may have their own by [WithTraceparent]. A
// malformed traceparent is an [ErrInvalid].
func ContextWithTraceparent(ctx context.Context, traceparent string) (context.Context, error) {
	if err := checkTraceparent(traceparent); err != nil {
		return nil, err
	}
	// A copy; two traceparents are none to a server.
	sent, _ := metadata.FromOutgoingContext(ctx)
	if sent == nil {
		sent = metadata.MD{}
	}
	sent.Set(traceparentKey, traceparent)
	return metadata.NewOutgoingContext(ctx, sent), nil
}

// WithTraceparent has one generation of a session join this trace. Default: that of the session's
// call. [Session.Submit] refuses a malformed one.
func WithTraceparent(traceparent string) SessionOption { return traceparentOption(traceparent) }

type traceparentOption string

func (traceparent traceparentOption) applyToSession(r *headracev1.SessionSubmit) {
	r.Traceparent = string(traceparent)
}

func checkTraceparent(traceparent string) error {
	parts := traceparentForm.FindStringSubmatch(traceparent)
	if len(traceparent) <= maxTraceparentChars && parts != nil && parts[1] != "ff" &&
		strings.Trim(parts[2], "0") != "" && strings.Trim(parts[3], "0") != "" && (parts[1] != "00" || parts[4] == "") {
		return nil
	}
	const rule = "must be a W3C trace context, as 00-<32 hex digits>-<16>-<2> (given: %.80q)"
	return invalid(traceparentKey, fmt.Sprintf(rule, traceparent))
}
