// Many generations over one stream, for gateways: requests go out under ids that the session draws,
// and one message per engine step comes back with what is new in all of them. Owns the ids and
// where each output stands; a session that breaks is not opened again, because what was submitted
// attached to it is gone (submit with WithDetached and attach from another session, or use
// GenerateDurable).

package headrace

import (
	"context"
	"errors"
	"io"
	"iter"
	"math"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// Session is many generations over one stream. Requests may be made from any goroutine while one of
// them reads [Session.Events] or [Session.Steps]; a session that nobody reads stands still once its
// buffers are full. Close it, or cancel its context, to let go of it: generations that were not
// submitted with [WithDetached] are then cancelled.
type Session struct {
	cancel context.CancelFunc
	call   grpc.BidiStreamingClient[headracev1.SessionRequest, headracev1.SessionResponse]
	closed atomic.Bool

	mutex sync.Mutex
	last  uint32
	done  bool                // no more requests
	open  map[uint32]*reading // by stream id: the generations that more may come of
}

// reading is where the outputs of one generation stand.
type reading struct {
	from uint32            // position of the first token of every output
	next map[uint32]uint32 // by output: position of the next token, where there was one
}

// SessionStep is what is new in all generations of a session since the step before. A generation's
// events come after its tokens.
type SessionStep struct {
	Tokens SessionTokens
	Events []SessionEvent
}

// SessionTokens are new tokens of many generations, as columns of equal length: entry i of each
// belongs to the same token, in order within an output. Tokens with log probabilities, and the
// first ones of a generation attached past its beginning, come as [Delta] events instead.
type SessionTokens struct {
	// StreamIDs say which generation.
	StreamIDs []uint32
	// OutputIndices say which of its n outputs.
	OutputIndices []uint32
	TokenIDs      []uint32
	// Texts are "" where a token has none of its own (a character of several tokens stands with its
	// last one) and with [WithTokenIDsOnly].
	Texts []string
}

// SessionEvent is one event of a generation.
type SessionEvent struct {
	StreamID uint32
	Event    Event
}

// Session opens a session on one connection. ctx bounds all of it.
func (c *Client) Session(ctx context.Context) (*Session, error) {
	ctx, cancel := context.WithCancel(ctx)
	call, err := c.inference().Session(ctx)
	if err != nil {
		cancel()
		return nil, fromRPC(err, "")
	}
	return &Session{cancel: cancel, call: call, open: map[uint32]*reading{}}, nil
}

// Submit starts a generation and returns the id of its events. What the server refuses comes as a
// [Failed] event.
func (s *Session) Submit(prompt Prompt, options ...SessionOption) (uint32, error) {
	return s.submit(&headracev1.SessionSubmit{Spec: specOf(prompt, nil)}, options)
}

// SubmitChat is Submit with a conversation as the prompt.
func (s *Session) SubmitChat(messages []Message, options ...SessionOption) (uint32, error) {
	spec := &headracev1.GenerationSpec{}
	return s.submit(&headracev1.SessionSubmit{Spec: spec, Messages: chatMessages(messages)}, options)
}

func (s *Session) submit(request *headracev1.SessionSubmit, options []SessionOption) (uint32, error) {
	for _, option := range options {
		if traceparent, is := option.(traceparentOption); is {
			if err := checkTraceparent(string(traceparent)); err != nil {
				return 0, err
			}
		}
		option.applyToSession(request)
	}
	return s.begin(&headracev1.SessionRequest{Action: &headracev1.SessionRequest_Submit{Submit: request}}, 0)
}

// Attach reads a generation that exists and returns the id of its events here.
func (s *Session) Attach(requestID string, options ...SubscribeOption) (uint32, error) {
	wanted := subscription(requestID, options)
	request := &headracev1.SessionAttach{
		RequestId: wanted.RequestId, OutputIndex: wanted.OutputIndex, FromToken: wanted.FromToken,
	}
	action := &headracev1.SessionRequest_Attach{Attach: request}
	return s.begin(&headracev1.SessionRequest{Action: action}, wanted.FromToken)
}

// Cancel ends a generation of the session. Its end comes as events. It does nothing where the
// generation has ended already.
func (s *Session) Cancel(streamID uint32) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.open[streamID] == nil {
		return nil
	}
	return s.send(cancelRequest(streamID, &headracev1.SessionCancel{}))
}

// Detach gives up reading a generation; no further event of it comes. One that outlives its readers
// goes on, another is cancelled.
func (s *Session) Detach(streamID uint32) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.open[streamID] == nil {
		return nil
	}
	delete(s.open, streamID)
	detach := true
	return s.send(cancelRequest(streamID, &headracev1.SessionCancel{Detach: &detach}))
}

// CloseSend says that there are no more requests. What runs goes on to its end, and then the
// session ends.
func (s *Session) CloseSend() error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.done = true
	if err := s.call.CloseSend(); err != nil {
		return fromRPC(err, "")
	}
	return nil
}

// Close ends the session at once. It may be called more than once. What is read afterwards ends
// without an error.
func (s *Session) Close() {
	s.closed.Store(true)
	s.cancel()
}

// Steps yields the messages of the session as they come, one per engine step: the way to read very
// many tokens. An error comes last, with a nil step. Read either Steps or Events, once.
func (s *Session) Steps() iter.Seq2[*SessionStep, error] {
	return func(yield func(*SessionStep, error) bool) {
		defer s.Close()
		for {
			step, err := s.next()
			if err == io.EOF {
				return
			}
			if err == nil {
				s.noteEnds(step)
			}
			if !yield(step, err) || err != nil {
				return
			}
		}
	}
}

// Events yields what happens in all generations, tokens as a [Delta] for each output that has some.
// A generation's last event is [Done] or [Failed]. An error comes last: it is the session's. Read
// either Steps or Events, once.
func (s *Session) Events() iter.Seq2[SessionEvent, error] {
	return func(yield func(SessionEvent, error) bool) {
		defer s.Close()
		for {
			step, err := s.next()
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(SessionEvent{}, err)
				return
			}
			for _, event := range s.eventsOf(step) {
				if !yield(event, nil) {
					return
				}
			}
		}
	}
}

// next reads one message; io.EOF after the last one and after Close.
func (s *Session) next() (*SessionStep, error) {
	response, err := s.call.Recv()
	switch {
	case err == io.EOF || (err != nil && s.closed.Load()):
		return nil, io.EOF
	case err != nil:
		return nil, fromRPC(err, "")
	}
	return stepFromProto(response)
}

// begin sends a request that starts something, under an id that was never used in this session.
func (s *Session) begin(request *headracev1.SessionRequest, from uint32) (uint32, error) {
	if err := checkText(request); err != nil {
		return 0, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.last == math.MaxUint32 {
		return 0, errors.New("headrace: the session has used all of its stream ids: open another one")
	}
	s.last++
	request.StreamId = s.last
	s.open[s.last] = &reading{from, map[uint32]uint32{}}
	if err := s.send(request); err != nil {
		delete(s.open, s.last)
		return 0, err
	}
	return s.last, nil
}

// send sends a request. The caller holds the mutex, because gRPC sends one message at a time.
func (s *Session) send(request *headracev1.SessionRequest) error {
	if s.done {
		return errors.New("headrace: a request after CloseSend")
	}
	err := s.call.Send(request)
	if err == nil {
		return nil
	}
	if errors.Is(err, io.EOF) { // gRPC keeps the reason for the reader
		return &Error{Code: codes.Unavailable, Message: "the session has ended; its reader gets the reason"}
	}
	return fromRPC(err, "")
}

// noteEnds forgets the generations that nothing more comes of.
func (s *Session) noteEnds(step *SessionStep) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for _, event := range step.Events {
		if isLast(event.Event) {
			delete(s.open, event.StreamID)
		}
	}
}

// eventsOf is a step as events: first the tokens, one Delta per output that has some, then the
// rest. What nobody reads any more is left out; an error with id 0, which speaks of a request that
// named no generation, is not.
func (s *Session) eventsOf(step *SessionStep) []SessionEvent {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	events := s.deltas(step.Tokens)
	for _, event := range step.Events {
		generation := s.open[event.StreamID]
		if generation == nil && event.StreamID != 0 {
			continue
		}
		if delta, is := event.Event.(Delta); is && generation != nil {
			generation.next[delta.OutputIndex] = delta.NextTokenIndex()
		}
		if isLast(event.Event) {
			delete(s.open, event.StreamID)
		}
		events = append(events, event)
	}
	return events
}

// deltas is the columns as one Delta per output, in the order in which outputs first appear.
func (s *Session) deltas(tokens SessionTokens) []SessionEvent {
	type output struct{ streamID, index uint32 }
	var order []output
	runs := make(map[output]*Delta)
	for i, streamID := range tokens.StreamIDs {
		generation := s.open[streamID]
		if generation == nil {
			continue
		}
		key := output{streamID, tokens.OutputIndices[i]}
		run := runs[key]
		if run == nil {
			run = &Delta{OutputIndex: key.index, FirstTokenIndex: generation.position(key.index)}
			runs[key], order = run, append(order, key)
		}
		run.TokenIDs = append(run.TokenIDs, tokens.TokenIDs[i])
		run.Text += tokens.Texts[i]
		generation.next[key.index] = run.NextTokenIndex()
	}
	events := make([]SessionEvent, len(order))
	for i, key := range order {
		events[i] = SessionEvent{key.streamID, *runs[key]}
	}
	return events
}

// position is that of the next token of an output.
func (r *reading) position(output uint32) uint32 {
	if next, known := r.next[output]; known {
		return next
	}
	return r.from
}

func isLast(event Event) bool {
	switch event.(type) {
	case Done, Failed:
		return true
	default:
		return false
	}
}

// stepFromProto is the step of a message. Columns that the wire leaves out because they say nothing
// are filled up.
func stepFromProto(response *headracev1.SessionResponse) (*SessionStep, error) {
	t := response.GetTokens()
	tokens := SessionTokens{t.GetStreamIds(), t.GetOutputIndices(), t.GetTokenIds(), t.GetTexts()}
	count := len(tokens.StreamIDs)
	if len(tokens.OutputIndices) == 0 {
		tokens.OutputIndices = make([]uint32, count)
	}
	if len(tokens.Texts) == 0 {
		tokens.Texts = make([]string, count)
	}
	if len(tokens.OutputIndices) != count || len(tokens.TokenIDs) != count || len(tokens.Texts) != count {
		return nil, broken("", "the columns of a session's tokens are not of equal length")
	}
	step := &SessionStep{Tokens: tokens}
	for _, message := range response.GetEvents() {
		if event := sessionEvent(message); event != nil {
			step.Events = append(step.Events, SessionEvent{message.GetStreamId(), event})
		}
	}
	return step, nil
}

// sessionEvent is nil for a kind that is newer than this client.
func sessionEvent(message *headracev1.SessionEvent) Event {
	if message.GetError() != nil {
		return Failed{fromStatus(message.GetError(), "")}
	}
	return eventFromProto(message.GetEvent())
}

func cancelRequest(streamID uint32, request *headracev1.SessionCancel) *headracev1.SessionRequest {
	return &headracev1.SessionRequest{StreamId: streamID, Action: &headracev1.SessionRequest_Cancel{Cancel: request}}
}
