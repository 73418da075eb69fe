// What is sent again after a broken connection, how often and how soon. UNAVAILABLE only, and only
// calls that may be sent twice: those that read, Cancel (a second one changes nothing), Submit
// (this client always sends an idempotency key) and the calls of AdminService that set a state.
// Generate, Chat and Complete are sent once: the caller may have seen tokens of the first attempt,
// and a second one costs a whole generation. RESOURCE_EXHAUSTED is never sent again: the server
// says when to come back (Error.RetryAfter), and a crowd that repeats at once keeps it overloaded.
// Subscribe is not gRPC's to repeat, because resume.go opens it again itself, from the last token.

package headrace

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/headrace/headrace/clients/go/headracev1"
)

var (
	idempotentCalls = []string{
		"Submit", "Cancel", "ListRequests", "Tokenize", "Detokenize", "GetModel", "ListModels", "GetLoad",
	}
	// UnloadModel is not one of them: its second attempt may find the model gone.
	idempotentAdminCalls = []string{"LoadModel", "ListRepository", "Drain", "GetMemoryPlan"}
)

// gRPC makes no more attempts of a call than this, whatever the service config says.
const maxCallAttempts = 5

// RetryPolicy says how often and how soon to try again after UNAVAILABLE. A zero field means its
// default. The defaults outlast the restart of a service: 8 s for calls, half a minute for
// subscriptions.
type RetryPolicy struct {
	// MaxAttempts in a row, for subscriptions; gRPC makes at most 5 of a call. 1 sends nothing
	// twice. Default 10.
	MaxAttempts int
	// InitialBackoff is the pause before the second attempt, spread at random by a fifth. Default
	// 200 ms.
	InitialBackoff time.Duration
	// MaxBackoff is the longest pause. Default 5 s.
	MaxBackoff time.Duration
	// Multiplier is the growth of the pause from attempt to attempt. Default 3.
	Multiplier float64
}

// WithRetry replaces the default [RetryPolicy].
func WithRetry(policy RetryPolicy) Option {
	return func(c *config) error {
		if policy.MaxAttempts < 0 || policy.InitialBackoff < 0 || policy.MaxBackoff < 0 || policy.Multiplier < 0 {
			return errors.New("headrace: WithRetry takes no negative values")
		}
		c.retry = policy.withDefaults()
		return nil
	}
}

func (p RetryPolicy) withDefaults() RetryPolicy {
	if p.MaxAttempts == 0 {
		p.MaxAttempts = 10
	}
	if p.InitialBackoff == 0 {
		p.InitialBackoff = 200 * time.Millisecond
	}
	if p.MaxBackoff == 0 {
		p.MaxBackoff = 5 * time.Second
	}
	if p.Multiplier == 0 {
		p.Multiplier = 3
	}
	return p
}

// backoff is the pause after this many failures in a row, from 1.
func (p RetryPolicy) backoff(failures int) time.Duration {
	pause := float64(p.InitialBackoff) * math.Pow(p.Multiplier, float64(failures-1))
	return time.Duration(min(float64(p.MaxBackoff), pause))
}

// serviceConfig is gRPC's service config: how addresses are used, and one retry policy for the calls
// that may be sent twice.
func (p RetryPolicy) serviceConfig(balancing string) string {
	config := map[string]any{"loadBalancingConfig": []any{map[string]any{balancing: struct{}{}}}}
	if p.MaxAttempts > 1 {
		config["methodConfig"] = []any{p.methodConfig()}
	}
	text, err := json.Marshal(config)
	if err != nil {
		panic(err) // strings and numbers alone
	}
	return string(text)
}

func (p RetryPolicy) methodConfig() map[string]any {
	type name struct {
		Service string `json:"service"`
		Method  string `json:"method"`
	}
	var names []name
	for _, call := range idempotentCalls {
		names = append(names, name{headracev1.InferenceService_ServiceDesc.ServiceName, call})
	}
	for _, call := range idempotentAdminCalls {
		names = append(names, name{headracev1.AdminService_ServiceDesc.ServiceName, call})
	}
	seconds := func(d time.Duration) string { return fmt.Sprintf("%.9fs", d.Seconds()) }
	return map[string]any{
		"name": names,
		"retryPolicy": map[string]any{
			"maxAttempts":          min(p.MaxAttempts, maxCallAttempts),
			"initialBackoff":       seconds(p.InitialBackoff),
			"maxBackoff":           seconds(p.MaxBackoff),
			"backoffMultiplier":    p.Multiplier,
			"retryableStatusCodes": []string{"UNAVAILABLE"},
		},
	}
}
