// How a subscription continues after a broken connection without a lost or doubled token. The code
// here neither waits nor reads: stream.go hands in each event or failure and does what comes back.
//
//   - One output: it is asked for again from the token after the last one yielded, or, where broken
//     characters were last, from before those: the server gives a character whole whose bytes are
//     on both sides of the first token, and while the rest is missing it may yet become one.
//   - All outputs: they stand at different tokens, and only the server knows how many there are. So
//     they are asked for again from where the subscription began.
//
// What was yielded already and comes again is dropped by counting tokens and the length of
// contents. Contents and tokens of a delta cover each other, and contents are the same however the
// deltas are cut, so both counts name the same place.

package headrace

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// resumption is what a subscription knows of its calls. Its transcript is the stream's.
type resumption struct {
	first    *headracev1.SubscribeRequest // as the caller wants it
	next     *headracev1.SubscribeRequest // as the call that is opened next sends it
	retry    RetryPolicy
	failures int // in a row
	started  bool
	replays  map[uint32]*replay
}

// replay is how much of one output the server sends again: tokens before `tokens`, and the first
// `length` of the contents.
type replay struct {
	tokens uint32
	length int
}

func newResumption(request *headracev1.SubscribeRequest, retry RetryPolicy) *resumption {
	return &resumption{first: request, next: request, retry: retry}
}

// failed prepares the call that continues the stream. Final are all failures but UNAVAILABLE, too
// many in a row, and a deadline that would pass before the next attempt.
func (r *resumption) failed(ctx context.Context, read *transcript, failure *Error) (Reconnecting, error) {
	r.failures++
	if failure.Code != codes.Unavailable || r.failures >= r.retry.MaxAttempts {
		return Reconnecting{}, failure
	}
	delay := time.Duration(float64(r.retry.backoff(r.failures)) * (0.8 + 0.4*rand.Float64()))
	delay = max(delay, failure.RetryAfter)
	if deadline, has := ctx.Deadline(); has && time.Until(deadline) <= delay {
		return Reconnecting{}, failure
	}
	r.next = r.continuation(read)
	return Reconnecting{Err: failure, Attempt: r.failures, Delay: delay}, nil
}

func (r *resumption) continuation(read *transcript) *headracev1.SubscribeRequest {
	request := proto.Clone(r.first).(*headracev1.SubscribeRequest)
	r.replays = make(map[uint32]*replay)
	for index, output := range read.outputs {
		if output.begun {
			r.replays[index] = &replay{output.nextToken(), output.length}
		}
	}
	if request.OutputIndex == nil {
		return request
	}
	output := read.output(request.GetOutputIndex())
	if output.begun && output.sureToken >= request.GetFromToken() {
		request.FromToken = output.sureToken
		r.replays[request.GetOutputIndex()].length -= output.sureLength
	}
	return request
}

// position is that of the next token to yield.
func (r *resumption) position(output *outputTranscript) uint32 {
	if !output.begun {
		return r.first.GetFromToken()
	}
	return output.nextToken()
}

// newPart is the event without what was yielded before; nil where nothing of it is new. A
// continuation repeats accepted, started, the prompt's log probabilities and ended outputs. Any
// event ends a row of failures.
func (r *resumption) newPart(read *transcript, event Event) (Event, error) {
	r.failures = 0
	known := false
	switch event := event.(type) {
	case Delta:
		return r.newTokens(read, event)
	case PromptLogprobs:
		return newPromptTokens(read, event), nil
	case Accepted:
		known = read.accepted != nil
	case Started:
		known, r.started = r.started, true
	case OutputFinished:
		known = read.output(event.OutputIndex).finished != nil
	}
	if known {
		return nil, nil
	}
	return event, nil
}

func newPromptTokens(read *transcript, part PromptLogprobs) Event {
	known := 0
	if read.prompt != nil {
		next := max(read.prompt.NextTokenIndex(), part.FirstTokenIndex)
		known = int(min(next, part.NextTokenIndex()) - part.FirstTokenIndex)
	}
	if known == len(part.Logprobs.Sampled) {
		return nil
	}
	return PromptLogprobs{part.FirstTokenIndex + uint32(known), *part.Logprobs.from(known)}
}

func (r *resumption) newTokens(read *transcript, delta Delta) (Event, error) {
	output := read.output(delta.OutputIndex)
	expected := r.position(output)
	delta = r.withoutReplay(delta)
	if len(delta.TokenIDs) == 0 && delta.length() == 0 {
		return nil, nil
	}
	// The first delta may start before from_token, where a character is spread over tokens on both
	// sides of it.
	if delta.FirstTokenIndex > expected || (delta.FirstTokenIndex < expected && output.begun) {
		return nil, broken(read.requestID, "output %d continues at token %d, expected %d",
			delta.OutputIndex, delta.FirstTokenIndex, expected)
	}
	return delta, nil
}

func (r *resumption) withoutReplay(delta Delta) Delta {
	replay := r.replays[delta.OutputIndex]
	if replay == nil {
		return delta
	}
	known := min(max(replay.tokens, delta.FirstTokenIndex), delta.NextTokenIndex()) - delta.FirstTokenIndex
	length := min(replay.length, delta.length())
	replay.length -= length
	delta.FirstTokenIndex += known
	delta.TokenIDs = delta.TokenIDs[known:]
	delta.Logprobs = delta.Logprobs.from(int(known))
	return delta.without(length)
}
