// The events of one generation, as a caller reads them: one by one, as iterators, or all at once.
// Owns the call behind a stream and its end; what a stream remembers is in completion.go, and how a
// subscription continues in resume.go.

package headrace

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// Stream is the events of one generation. Read it in one of four ways: [Stream.Events],
// [Stream.Text], [Stream.Result], or event by event with [Stream.Next]; in one goroutine. The call
// has been sent when the stream is returned, which may take as long as connecting does. It holds a
// call open until it is read to its end or closed: leaving an iterator early closes it, and so does
// its context. Closing a stream of Generate or Chat cancels the generation, closing a subscription
// only leaves it.
type Stream struct {
	ctx    context.Context
	cancel context.CancelFunc
	closed atomic.Bool

	open    opener
	receive receiver
	pause   time.Duration // before the call is opened again
	resume  *resumption   // nil where a failure is final

	transcript transcript
	end        error // nil while more may come; io.EOF after a good end
}

// receiver reads the next message of a call; nil where the call has to be opened first.
type receiver func() (*headracev1.GenerationEvent, error)

// opener makes a call.
type opener func(ctx context.Context) (receiver, error)

// newStream opens the call, unless its request holds what cannot be sent. Failures come when the
// stream is read.
func newStream(ctx context.Context, request proto.Message, open opener) *Stream {
	s := &Stream{open: open}
	s.ctx, s.cancel = context.WithCancel(ctx)
	if err := checkText(request); err != nil {
		s.finish(err)
		return s
	}
	s.connect()
	return s
}

// failedStream is a stream whose call could not be made at all.
func failedStream(err error) *Stream {
	return &Stream{end: err, cancel: func() {}}
}

// Next is the next event; io.EOF after the last one and after [Stream.Close]. Any other error is an
// [*Error], and the stream's last word.
func (s *Stream) Next() (Event, error) {
	for s.end == nil {
		event, err := s.step()
		if err != nil {
			s.finish(err)
		} else if event != nil {
			s.transcript.add(event)
			return event, nil
		}
	}
	return nil, s.end
}

// Events yields the events that have not been read yet. An error comes last, with a nil event.
func (s *Stream) Events() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		defer s.Close()
		for {
			event, err := s.Next()
			if err == io.EOF || !yield(event, err) || err != nil {
				return
			}
		}
	}
}

// Text yields the text of a single output, piece by piece as it arrives. An error comes last, with
// an empty piece: the call failed, or the output ended with an error, or the stream carries more
// than one output, whose texts would be mixed.
func (s *Stream) Text() iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for event, err := range s.Events() {
			piece := ""
			if err == nil {
				piece, err = s.textOf(event)
			}
			if (piece != "" || err != nil) && !yield(piece, err) || err != nil {
				return
			}
		}
	}
}

// Result reads to the end and returns the whole answer, what was read before included. An output
// that ended with an error is an error here.
func (s *Stream) Result() (*Completion, error) {
	for {
		if _, err := s.Next(); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
	}
	if s.transcript.done == nil && s.closed.Load() {
		return nil, fromContext(context.Canceled, s.transcript.requestID)
	}
	return s.transcript.completion()
}

// Close ends the stream, and its call if that still runs. It may be called from any goroutine and
// more than once. What is read afterwards is io.EOF.
func (s *Stream) Close() {
	s.closed.Store(true)
	s.cancel()
}

// RequestID names the request; "" before [Accepted] was read.
func (s *Stream) RequestID() string { return s.transcript.requestID }

// Done is the last event, with usage and ledger; nil before it was read.
func (s *Stream) Done() *Done { return s.transcript.done }

// step reads one message, or opens the call again first; nil where there is nothing to yield.
func (s *Stream) step() (Event, error) {
	if s.closed.Load() {
		return nil, io.EOF
	}
	if s.receive == nil {
		if err := s.wait(); err != nil {
			return nil, err
		}
		s.connect()
	}
	message, err := s.receive()
	if err != nil {
		return s.failed(err)
	}
	event := eventFromProto(message)
	if err := s.checkColumns(event); err != nil || s.resume == nil || event == nil {
		return event, err
	}
	return s.resume.newPart(&s.transcript, event)
}

// failed is what to do about the end of a call.
func (s *Stream) failed(err error) (Event, error) {
	switch {
	case s.transcript.done != nil || s.closed.Load():
		return nil, io.EOF
	case errors.Is(err, io.EOF):
		return nil, broken(s.transcript.requestID, "the stream ended before the generation did")
	case s.resume == nil:
		return nil, fromRPC(err, s.transcript.requestID)
	}
	reconnecting, err := s.resume.failed(s.ctx, &s.transcript, fromRPC(err, s.transcript.requestID))
	if err != nil {
		return nil, err
	}
	s.receive, s.pause = nil, reconnecting.Delay
	return reconnecting, nil
}

// wait lets the pause before a reconnection pass.
func (s *Stream) wait() error {
	timer := time.NewTimer(s.pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-s.ctx.Done():
		if s.closed.Load() {
			return io.EOF
		}
		return fromContext(s.ctx.Err(), s.transcript.requestID)
	}
}

func (s *Stream) connect() {
	receive, err := s.open(s.ctx)
	if err != nil {
		receive = func() (*headracev1.GenerationEvent, error) { return nil, err }
	}
	s.receive = receive
}

// finish notes the stream's last word and lets go of its call.
func (s *Stream) finish(err error) {
	s.end = err
	s.cancel()
}

// checkColumns refuses log probabilities that are not of as many tokens as they come with.
func (s *Stream) checkColumns(event Event) error {
	whole := true
	switch event := event.(type) {
	case Delta:
		whole = event.Logprobs.covers(len(event.TokenIDs))
	case PromptLogprobs:
		whole = event.Logprobs.covers(len(event.Logprobs.Sampled))
	}
	if !whole {
		return broken(s.transcript.requestID, "log probabilities and tokens of an event are not of the same number")
	}
	return nil
}

// textOf is the text that an event adds to a stream of a single output.
func (s *Stream) textOf(event Event) (string, error) {
	switch event := event.(type) {
	case Delta:
		if len(s.transcript.outputs) > 1 {
			return "", errSeveralOutputs
		}
		return event.Text, nil
	case OutputFinished:
		return "", checkFinished(&event, s.transcript.requestID)
	default:
		return "", nil
	}
}

var errSeveralOutputs = errors.New(
	"headrace: Text reads one output, but this stream carries several: use Events or Result",
)

// receiverOf reads the messages of a streaming call, which all have an event.
func receiverOf[Response any, Pointer interface {
	*Response
	GetEvent() *headracev1.GenerationEvent
}](call grpc.ServerStreamingClient[Response], err error) (receiver, error) {
	if err != nil {
		return nil, err
	}
	return func() (*headracev1.GenerationEvent, error) {
		message, err := call.Recv()
		return Pointer(message).GetEvent(), err
	}, nil
}
