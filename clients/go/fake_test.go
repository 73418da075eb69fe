// A real gRPC server with canned answers: real sockets, real statuses, a fake model. The prompt
// chooses the behaviour. The "model" answers with the words w0, w1, ...: token i of output o has
// the id 100*(o+1)+i. What clients did is recorded, so that tests can assert what a server
// observes.

package headrace_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	headrace "github.com/headrace/headrace/clients/go"
	pb "github.com/headrace/headrace/clients/go/headracev1"
)

const (
	requestID = "req-1"
	logTokens = 12
)

type fake struct {
	pb.UnimplementedInferenceServiceServer
	pb.UnimplementedAdminServiceServer

	mutex    sync.Mutex
	attempts map[string]int
	requests []any
	peers    map[string]bool
	headers  []metadata.MD

	failures int // of each call, before one succeeds
	// After how many events each attempt of Subscribe breaks; attempts beyond the list do not.
	breaks   []int
	outputs  uint32
	logprobs bool
	// Where it is not nil, an attempt that would break signals it and sends nothing more.
	stalled   chan struct{}
	cancelled chan struct{} // a word for each endless generation that its client dropped
}

// serve runs the fake at address until the test ends, or until the returned server is stopped.
func serve(t testing.TB, f *fake, address string, options ...grpc.ServerOption) (string, *grpc.Server) {
	t.Helper()
	f.attempts, f.peers, f.cancelled = map[string]int{}, map[string]bool{}, make(chan struct{}, 16)
	f.outputs = max(f.outputs, 1)
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(options...)
	pb.RegisterInferenceServiceServer(server, f)
	pb.RegisterAdminServiceServer(server, f)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String(), server
}

// connect is a client that retries fast.
func connect(t testing.TB, address string, options ...headrace.Option) *headrace.Client {
	t.Helper()
	fast := headrace.WithRetry(
		headrace.RetryPolicy{InitialBackoff: 10 * time.Millisecond, MaxBackoff: 20 * time.Millisecond},
	)
	client, err := headrace.New(address, append([]headrace.Option{fast}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// start is a fake and a client of it.
func start(t testing.TB, f *fake, options ...headrace.Option) *headrace.Client {
	address, _ := serve(t, f, "127.0.0.1:0")
	return connect(t, address, options...)
}

// see records a call and fails the first ones; it returns how many attempts there were.
func (f *fake) see(ctx context.Context, call string, request any) (int, error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.attempts[call]++
	f.requests = append(f.requests, request)
	if from, ok := peer.FromContext(ctx); ok {
		f.peers[from.Addr.String()] = true
	}
	header, _ := metadata.FromIncomingContext(ctx)
	f.headers = append(f.headers, header)
	if f.attempts[call] <= f.failures {
		return f.attempts[call], status.Error(codes.Unavailable, "restarting")
	}
	return f.attempts[call], nil
}

func (f *fake) attemptsOf(call string) int {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.attempts[call]
}

func word(output, i uint32) string {
	if output == 0 {
		return fmt.Sprintf("w%d ", i)
	}
	return fmt.Sprintf("é%d.%d ", output, i)
}

func tokenID(output, i uint32) uint32 { return 100*(output+1) + i }

// answer is the text of the tokens from first to before end.
func answer(output, first, end uint32) string {
	var text strings.Builder
	for i := first; i < end; i++ {
		text.WriteString(word(output, i))
	}
	return text.String()
}

func accepted() *pb.GenerationEvent {
	return &pb.GenerationEvent{Event: &pb.GenerationEvent_Accepted{
		Accepted: &pb.Accepted{RequestId: requestID, ModelRevision: "fake@1", PromptTokens: 3}}}
}

func started() *pb.GenerationEvent {
	return &pb.GenerationEvent{Event: &pb.GenerationEvent_Started{Started: &pb.Started{CachedTokens: 1}}}
}

func delta(output, first, count uint32, logprobs bool) *pb.GenerationEvent {
	made := &pb.Delta{OutputIndex: output, FirstTokenIndex: first}
	columns := &pb.Logprobs{}
	for i := first; i < first+count; i++ {
		made.TokenIds = append(made.TokenIds, tokenID(output, i))
		columns.Sampled, columns.Ranks = append(columns.Sampled, -float32(i)), append(columns.Ranks, 1)
		columns.TopCounts = append(columns.TopCounts, 2)
		columns.TopTokenIds = append(columns.TopTokenIds, tokenID(output, i), 7)
		columns.TopLogprobs = append(columns.TopLogprobs, -float32(i), -99)
	}
	made.Content = []*pb.Content{{Kind: &pb.Content_Text{Text: answer(output, first, first+count)}}}
	if logprobs {
		made.Logprobs = columns
	}
	return &pb.GenerationEvent{Event: &pb.GenerationEvent_Delta{Delta: made}}
}

func promptLogprobs(first, count uint32) *pb.GenerationEvent {
	columns := delta(0, first, count, true).GetDelta().GetLogprobs()
	return &pb.GenerationEvent{Event: &pb.GenerationEvent_PromptLogprobs{
		PromptLogprobs: &pb.PromptLogprobs{FirstTokenIndex: first, Logprobs: columns}}}
}

func finished(output uint32, reason pb.FinishReason) *pb.GenerationEvent {
	return &pb.GenerationEvent{Event: &pb.GenerationEvent_OutputFinished{
		OutputFinished: &pb.OutputFinished{OutputIndex: output, Reason: reason}}}
}

func done(tokens uint32) *pb.GenerationEvent {
	return &pb.GenerationEvent{Event: &pb.GenerationEvent_Done{Done: &pb.Done{
		Usage: &pb.Usage{PromptTokens: 3, OutputTokens: tokens, CachedTokens: 1},
		Ledger: &pb.Ledger{QueuedNs: 1e6, PrefillNs: 2e6, DecodeNs: 6e6, DetokenizeAndSendNs: 1e6,
			EndToEndNs: 1e7, TtftNs: 3e6, StepCount: tokens}}}}
}

func rich(code codes.Code, message string, details ...protoadapt.MessageV1) error {
	made, err := status.New(code, message).WithDetails(details...)
	if err != nil {
		panic(err)
	}
	return made.Err()
}

// events sends what the prompt asks for.
func (f *fake) events(ctx context.Context, prompt string, spec *pb.GenerationSpec,
	send func(*pb.GenerationEvent) error) error {
	switch prompt {
	case "invalid":
		return rich(codes.InvalidArgument, "invalid request",
			&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
				{Field: "spec.sampling.top_p", Description: "must be above 0 and at most 1 (given: 7)"}}})
	case "overloaded":
		return rich(codes.ResourceExhausted, "the queue is full",
			&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)})
	}
	_ = send(accepted())
	_ = send(started())
	switch prompt {
	case "endless":
		for i := uint32(0); ctx.Err() == nil; i++ {
			_ = send(delta(0, i, 1, false))
			time.Sleep(5 * time.Millisecond)
		}
		f.cancelled <- struct{}{}
		return nil
	case "broken":
		_ = send(delta(0, 0, 1, false))
		return rich(codes.Unavailable, "the engine died", &errdetails.RequestInfo{RequestId: "req-from-details"})
	case "failing":
		failure := finished(0, pb.FinishReason_FINISH_REASON_ERROR)
		failure.GetOutputFinished().Error = &statuspb.Status{Code: int32(codes.Internal),
			Message: "a step produced NaN"}
		_ = send(failure)
		return send(done(0))
	case "no-done":
		return send(delta(0, 0, 1, false))
	case "bad columns":
		wrong := delta(0, 0, 2, true)
		wrong.GetDelta().GetLogprobs().TopCounts[0] = 9
		return send(wrong)
	}
	tokens, n := max(spec.GetStop().GetMaxTokens(), 1), max(spec.GetN(), 1)
	for i := range tokens {
		for output := range n {
			_ = send(delta(output, i, 1, spec.Logprobs != nil))
		}
	}
	for output := range n {
		_ = send(finished(output, pb.FinishReason_FINISH_REASON_LENGTH))
	}
	return send(done(tokens * n))
}

func (f *fake) Generate(request *pb.GenerateRequest, stream grpc.ServerStreamingServer[pb.GenerateResponse]) error {
	if _, err := f.see(stream.Context(), "Generate", request); err != nil {
		return err
	}
	return f.events(stream.Context(), request.GetSpec().GetText(), request.GetSpec(),
		func(e *pb.GenerationEvent) error {
			return stream.Send(&pb.GenerateResponse{Event: e})
		})
}

func (f *fake) Chat(request *pb.ChatRequest, stream grpc.ServerStreamingServer[pb.ChatResponse]) error {
	if _, err := f.see(stream.Context(), "Chat", request); err != nil {
		return err
	}
	return f.events(stream.Context(), "", request.GetSpec(), func(e *pb.GenerationEvent) error {
		return stream.Send(&pb.ChatResponse{Event: e})
	})
}

func (f *fake) Complete(ctx context.Context, request *pb.CompleteRequest) (*pb.CompleteResponse, error) {
	if _, err := f.see(ctx, "Complete", request); err != nil {
		return nil, err
	}
	tokens := delta(0, 0, 2, true).GetDelta()
	output := &pb.Output{TokenIds: tokens.GetTokenIds(), Content: tokens.GetContent(), Logprobs: tokens.GetLogprobs(),
		Finished: &pb.OutputFinished{Reason: pb.FinishReason_FINISH_REASON_STOP,
			MatchedStop: &pb.MatchedStop{Kind: &pb.MatchedStop_TokenId{TokenId: 7}}}}
	return &pb.CompleteResponse{RequestId: requestID, Outputs: []*pb.Output{output},
		Usage: done(2).GetDone().GetUsage(),
		PromptLogprobs: []*pb.PromptLogprobs{promptLogprobs(1, 2).GetPromptLogprobs(),
			promptLogprobs(3, 1).GetPromptLogprobs()}}, nil
}

func (f *fake) Submit(ctx context.Context, request *pb.SubmitRequest) (*pb.SubmitResponse, error) {
	if _, err := f.see(ctx, "Submit", request); err != nil {
		return nil, err
	}
	return &pb.SubmitResponse{RequestId: requestID, PromptTokens: 3}, nil
}

// Subscribe sends the whole log from from_token on; each attempt cuts it into deltas of another
// size, and output by output at another pace.
func (f *fake) Subscribe(request *pb.SubscribeRequest, stream grpc.ServerStreamingServer[pb.SubscribeResponse]) error {
	attempt, _ := f.see(stream.Context(), "Subscribe", request)
	if request.GetRequestId() != requestID {
		return status.Error(codes.NotFound, "no such request")
	}
	for i, event := range f.log(request, uint32(attempt)) {
		if attempt <= len(f.breaks) && i == f.breaks[attempt-1] {
			if f.stalled == nil {
				return rich(codes.Unavailable, "connection lost",
					&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
			}
			f.stalled <- struct{}{}
			<-stream.Context().Done()
			return nil
		}
		_ = stream.Send(&pb.SubscribeResponse{Event: event})
	}
	return nil
}

func (f *fake) log(request *pb.SubscribeRequest, attempt uint32) []*pb.GenerationEvent {
	events := []*pb.GenerationEvent{accepted(), started()}
	for first := uint32(1); f.logprobs && first < 7; first += 1 + attempt%3 {
		events = append(events, promptLogprobs(first, min(1+attempt%3, 7-first)))
	}
	var open []uint32
	position := map[uint32]uint32{}
	for output := range f.outputs {
		if request.OutputIndex == nil || request.GetOutputIndex() == output {
			open, position[output] = append(open, output), request.GetFromToken()
		}
	}
	for len(open) > 0 {
		for _, output := range slices.Clone(open) {
			if count := min(1+(attempt+output)%3, logTokens-position[output]); count > 0 {
				events = append(events, delta(output, position[output], count, f.logprobs))
				position[output] += count
			}
			if position[output] == logTokens {
				events = append(events, finished(output, pb.FinishReason_FINISH_REASON_STOP))
				open = slices.DeleteFunc(open, func(o uint32) bool { return o == output })
			}
		}
	}
	return append(events, done(logTokens*f.outputs))
}

func (f *fake) Cancel(ctx context.Context, request *pb.CancelRequest) (*pb.CancelResponse, error) {
	_, err := f.see(ctx, "Cancel", request)
	return &pb.CancelResponse{Cancelled: true}, err
}

func (f *fake) ListRequests(ctx context.Context, request *pb.ListRequestsRequest) (*pb.ListRequestsResponse, error) {
	if _, err := f.see(ctx, "ListRequests", request); err != nil {
		return nil, err
	}
	first, page := 0, &pb.ListRequestsResponse{}
	_, _ = fmt.Sscan(request.GetPageToken(), &first)
	for i := first; i < min(first+2, 5); i++ {
		page.Requests = append(page.Requests, &pb.RequestSummary{RequestId: fmt.Sprint("req-", i)})
	}
	if first+2 < 5 {
		page.NextPageToken = fmt.Sprint(first + 2)
	}
	return page, nil
}

func (f *fake) Tokenize(ctx context.Context, request *pb.TokenizeRequest) (*pb.TokenizeResponse, error) {
	if _, err := f.see(ctx, "Tokenize", request); err != nil {
		return nil, err
	}
	if request.GetText() == "sleep" {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return &pb.TokenizeResponse{TokenIds: []uint32{1, 2, 3}}, nil
}

func (f *fake) Drain(ctx context.Context, request *pb.DrainRequest) (*pb.DrainResponse, error) {
	_, err := f.see(ctx, "Drain", request)
	return &pb.DrainResponse{RunningSequences: 2, WaitingRequests: 1}, err
}

// Session answers every submission with four tokens over two steps, in columns, and an attachment
// with a delta first. "bad" prompts fail.
func (f *fake) Session(stream grpc.BidiStreamingServer[pb.SessionRequest, pb.SessionResponse]) error {
	_, _ = f.see(stream.Context(), "Session", nil)
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		_, _ = f.see(stream.Context(), "request", request)
		for _, step := range answerTo(request) {
			_ = stream.Send(step)
		}
	}
}

func answerTo(request *pb.SessionRequest) []*pb.SessionResponse {
	id := request.GetStreamId()
	event := func(e *pb.GenerationEvent) *pb.SessionEvent {
		return &pb.SessionEvent{StreamId: id, Kind: &pb.SessionEvent_Event{Event: e}}
	}
	switch {
	case request.GetSubmit() != nil && request.GetSubmit().GetSpec().GetText() == "bad":
		failure := &statuspb.Status{Code: int32(codes.InvalidArgument), Message: "no"}
		failed := &pb.SessionEvent{StreamId: id, Kind: &pb.SessionEvent_Error{Error: failure}}
		return []*pb.SessionResponse{{Events: []*pb.SessionEvent{failed}}}
	case request.GetSubmit() != nil && request.GetSubmit().GetSpec().GetText() == "open":
		return []*pb.SessionResponse{{Events: []*pb.SessionEvent{event(accepted())}}}
	case request.GetSubmit() != nil:
		return []*pb.SessionResponse{
			{Events: []*pb.SessionEvent{event(accepted()), event(started())}},
			{Tokens: &pb.SessionTokens{StreamIds: []uint32{id, id, id}, OutputIndices: []uint32{0, 1, 0},
				TokenIds: []uint32{100, 200, 101}, Texts: []string{"a", "x", "b"}}},
			{Tokens: &pb.SessionTokens{StreamIds: []uint32{id}, TokenIds: []uint32{102}},
				Events: []*pb.SessionEvent{event(finished(0, pb.FinishReason_FINISH_REASON_LENGTH)), event(done(4))}},
		}
	case request.GetAttach() != nil:
		from := request.GetAttach().GetFromToken()
		return []*pb.SessionResponse{
			{Events: []*pb.SessionEvent{event(delta(0, from, 2, false))}},
			{Tokens: &pb.SessionTokens{StreamIds: []uint32{id}, TokenIds: []uint32{9}},
				Events: []*pb.SessionEvent{event(done(4))}},
		}
	default:
		cancelled := finished(0, pb.FinishReason_FINISH_REASON_CANCELLED)
		return []*pb.SessionResponse{{Events: []*pb.SessionEvent{event(cancelled), event(done(0))}}}
	}
}
