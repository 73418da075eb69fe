// The calls that generate, and those that read, list and end generations.

package headrace

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"iter"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// Generate streams the answer to a prompt. Closing the stream, or cancelling ctx, cancels the
// generation.
func (c *Client) Generate(ctx context.Context, prompt Prompt, options ...GenerationOption) *Stream {
	request := &headracev1.GenerateRequest{Spec: specOf(prompt, options)}
	return newStream(ctx, request, func(ctx context.Context) (receiver, error) {
		return receiverOf(c.inference().Generate(ctx, request))
	})
}

// Chat streams the answer to a conversation, oldest message first, laid out by the model's own chat
// template. Closing the stream, or cancelling ctx, cancels the generation.
func (c *Client) Chat(ctx context.Context, messages []Message, options ...ChatOption) *Stream {
	request := &headracev1.ChatRequest{Messages: chatMessages(messages), Spec: &headracev1.GenerationSpec{}}
	for _, option := range options {
		option.applyToChat(request)
	}
	return newStream(ctx, request, func(ctx context.Context) (receiver, error) {
		return receiverOf(c.inference().Chat(ctx, request))
	})
}

// Complete is the whole answer to a prompt, in one message.
func (c *Client) Complete(ctx context.Context, prompt Prompt, options ...GenerationOption) (*Completion, error) {
	request := &headracev1.CompleteRequest{Spec: specOf(prompt, options)}
	response, err := unary(ctx, c.inference(), request, headracev1.InferenceServiceClient.Complete)
	if err != nil {
		return nil, err
	}
	return completionFromProto(response)
}

// Submitted is a generation that outlives its readers.
type Submitted struct {
	// RequestID is what Subscribe and Cancel take.
	RequestID string
	// ModelRevision is the name and content hash of the model that answers.
	ModelRevision string
	// PromptTokens is the length of the prompt.
	PromptTokens uint32
	// Existing says that the idempotency key was known and this is an earlier request.
	Existing bool
}

// Submit starts a generation that outlives its readers: it ends by itself, by [Client.Cancel], or
// by its time limit. It always carries an idempotency key, so that it may be sent again after a
// broken connection and still starts one generation.
func (c *Client) Submit(ctx context.Context, prompt Prompt, options ...SubmitOption) (*Submitted, error) {
	return c.submit(ctx, submission(prompt, options))
}

func submission(prompt Prompt, options []SubmitOption) *headracev1.SubmitRequest {
	request := &headracev1.SubmitRequest{Spec: specOf(prompt, nil), IdempotencyKey: drawKey()}
	for _, option := range options {
		option.applyToSubmit(request)
	}
	return request
}

func (c *Client) submit(ctx context.Context, request *headracev1.SubmitRequest) (*Submitted, error) {
	response, err := quick(ctx, c, request, headracev1.InferenceServiceClient.Submit)
	if err != nil {
		return nil, err
	}
	return &Submitted{response.GetRequestId(), response.GetModelRevision(), response.GetPromptTokens(),
		response.GetExisting()}, nil
}

// SubscribeOption narrows a subscription.
type SubscribeOption func(*headracev1.SubscribeRequest)

// WithFromToken begins at this token of each output read, from 0; at most the number of tokens that
// there are.
func WithFromToken(index uint32) SubscribeOption {
	return func(r *headracev1.SubscribeRequest) { r.FromToken = index }
}

// WithOutputIndex reads one output only.
func WithOutputIndex(index uint32) SubscribeOption {
	return func(r *headracev1.SubscribeRequest) { r.OutputIndex = &index }
}

// Subscribe reads a generation of the caller's, submitted or running, while it runs and until its
// log expires. A broken connection is opened again and the stream continues after the last token
// read, after a [Reconnecting] event. Closing the stream leaves the generation alone.
func (c *Client) Subscribe(ctx context.Context, requestID string, options ...SubscribeOption) *Stream {
	request := subscription(requestID, options)
	resume := newResumption(request, c.retry)
	s := newStream(ctx, request, func(ctx context.Context) (receiver, error) {
		return receiverOf(c.inference().Subscribe(ctx, resume.next))
	})
	s.resume, s.transcript.requestID = resume, requestID
	return s
}

// GenerateDurable is Submit and Subscribe in one: a stream that survives broken connections.
// Closing it does not end the generation; give [WithTimeLimit], or [Client.Cancel] it by its
// RequestID.
func (c *Client) GenerateDurable(ctx context.Context, prompt Prompt, options ...SubmitOption) *Stream {
	request := submission(prompt, options)
	submitted, err := c.submit(ctx, request)
	if err != nil {
		return failedStream(err)
	}
	if request.GetSpec().GetN() > 1 {
		return c.Subscribe(ctx, submitted.RequestID)
	}
	// A single output is asked for again from its last token; several are sent again whole.
	return c.Subscribe(ctx, submitted.RequestID, WithOutputIndex(0))
}

// Cancel ends a generation of the caller's; its readers see [FinishCancelled]. It tells whether the
// request was still waiting or running.
func (c *Client) Cancel(ctx context.Context, requestID string) (bool, error) {
	response, err := quick(ctx, c, &headracev1.CancelRequest{RequestId: requestID},
		headracev1.InferenceServiceClient.Cancel)
	return response.GetCancelled(), err
}

// RequestSummary is one request of a list.
type RequestSummary = headracev1.RequestSummary

// RequestState is where a request is in its life.
type RequestState = headracev1.RequestState

// The states of requests.
const (
	StateQueued   = headracev1.RequestState_REQUEST_STATE_QUEUED
	StateRunning  = headracev1.RequestState_REQUEST_STATE_RUNNING
	StateFinished = headracev1.RequestState_REQUEST_STATE_FINISHED
)

// ListOptions narrow a list of requests. The zero value lists all.
type ListOptions struct {
	// State of the requests; 0 means any.
	State RequestState
	// Model that answers; "" means any.
	Model string
	// PageSize is how many are fetched at once. 1 to 1,000; 0 means the server's default.
	PageSize uint32
}

// ListRequests yields the caller's own generations, newest first: waiting, running, and ended ones
// whose log is still kept. Pages are fetched as they are needed. options may be nil.
func (c *Client) ListRequests(ctx context.Context, options *ListOptions) iter.Seq2[*RequestSummary, error] {
	return func(yield func(*RequestSummary, error) bool) {
		request := options.request()
		for {
			page, err := quick(ctx, c, request, headracev1.InferenceServiceClient.ListRequests)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, summary := range page.GetRequests() {
				if !yield(summary, nil) {
					return
				}
			}
			request.PageToken = page.GetNextPageToken()
			if request.PageToken == "" {
				return
			}
		}
	}
}

func (o *ListOptions) request() *headracev1.ListRequestsRequest {
	request := &headracev1.ListRequestsRequest{}
	if o == nil {
		return request
	}
	request.State, request.Model = o.State, o.Model
	if o.PageSize != 0 {
		request.PageSize = &o.PageSize
	}
	return request
}

func specOf(prompt Prompt, options []GenerationOption) *headracev1.GenerationSpec {
	spec := &headracev1.GenerationSpec{}
	if prompt != nil { // without one the server says what is missing
		prompt.set(spec)
	}
	Options(options...)(spec)
	return spec
}

func subscription(requestID string, options []SubscribeOption) *headracev1.SubscribeRequest {
	request := &headracev1.SubscribeRequest{RequestId: requestID}
	for _, option := range options {
		option(request)
	}
	return request
}

// drawKey is an idempotency key that nobody else has.
func drawKey() string {
	var key [16]byte
	if _, err := rand.Read(key[:]); err != nil {
		panic(err) // a system without randomness is none to go on with; Go 1.24 and newer do the same
	}
	return hex.EncodeToString(key[:])
}
