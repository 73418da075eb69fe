package headrace_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	headrace "github.com/headrace/headrace/clients/go"
	pb "github.com/headrace/headrace/clients/go/headracev1"
)

func TestCallsThatMayBeSentTwiceAreSentAgain(t *testing.T) {
	f := &fake{failures: 2}
	client := start(t, f)
	if ids, err := client.Tokenize(background, "ab", nil); err != nil || len(ids) != 3 {
		t.Error(ids, err)
	}
	if cancelled, err := client.Cancel(background, requestID); err != nil || !cancelled {
		t.Error(cancelled, err)
	}
	if running, waiting, err := client.Admin().Drain(background); err != nil || running != 2 || waiting != 1 {
		t.Error(running, waiting, err)
	}
	for _, call := range []string{"Tokenize", "Cancel", "Drain"} {
		if f.attempts[call] != 3 {
			t.Error(call, f.attempts[call])
		}
	}
}

func TestCallsThatGenerateAreSentOnce(t *testing.T) {
	f := &fake{failures: 1}
	client := start(t, f)
	_, generate := client.Generate(background, headrace.Text("hello")).Result()
	_, complete := client.Complete(background, headrace.Text("hello"))
	_, chat := client.Chat(background, []headrace.Message{headrace.User("hello")}).Result()
	for call, err := range map[string]error{"Generate": generate, "Complete": complete, "Chat": chat} {
		if !errors.Is(err, headrace.ErrUnavailable) || f.attempts[call] != 1 {
			t.Error(call, f.attempts[call], err)
		}
	}
}

func TestRetriesCanBeSwitchedOff(t *testing.T) {
	f := &fake{failures: 1}
	client := start(t, f, headrace.WithRetry(headrace.RetryPolicy{MaxAttempts: 1}))
	_, err := client.Tokenize(background, "ab", nil)
	if !errors.Is(err, headrace.ErrUnavailable) || f.attempts["Tokenize"] != 1 {
		t.Error(err, f.attempts)
	}
}

func TestCallsTakeConnectionsInTurn(t *testing.T) {
	f := &fake{}
	client := start(t, f, headrace.WithChannels(3))
	for range 9 {
		if _, err := client.Tokenize(background, "ab", nil); err != nil {
			t.Fatal(err)
		}
	}
	if len(f.peers) != 3 {
		t.Error(f.peers)
	}
}

func TestQuickCallsHaveATimeoutOfTheirOwn(t *testing.T) {
	client := start(t, &fake{}, headrace.WithTimeout(50*time.Millisecond))
	if _, err := client.Tokenize(background, "sleep", nil); !errors.Is(err, headrace.ErrDeadline) {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(background, 200*time.Millisecond)
	defer cancel()
	begun := time.Now()
	if _, err := client.Tokenize(ctx, "sleep", nil); !errors.Is(err, headrace.ErrDeadline) ||
		time.Since(begun) < 150*time.Millisecond {
		t.Error("the context's own deadline does not count:", err, time.Since(begun))
	}
}

func TestListsAreReadPageByPage(t *testing.T) {
	f := &fake{}
	client := start(t, f)
	count := 0
	options := &headrace.ListOptions{State: headrace.StateRunning, PageSize: 2, Model: "m"}
	for summary, err := range client.ListRequests(background, options) {
		if err != nil || summary.GetRequestId() != []string{"req-0", "req-1", "req-2", "req-3", "req-4"}[count] {
			t.Fatal(summary, err)
		}
		count++
	}
	first := f.requests[0].(*pb.ListRequestsRequest)
	if count != 5 || len(f.requests) != 3 || first.GetPageSize() != 2 || first.GetModel() != "m" ||
		first.GetState() != headrace.StateRunning {
		t.Error(count, f.requests)
	}
	for range client.ListRequests(background, nil) {
		break // asks for no second page
	}
	if len(f.requests) != 4 {
		t.Error(len(f.requests))
	}
}

func TestOptionsSendWhatTheyAreGiven(t *testing.T) {
	f := &fake{}
	client := start(t, f)
	_, err := client.Submit(background, headrace.Text("hello"), headrace.WithTemperature(0),
		headrace.WithIdempotencyKey("mine"), headrace.WithTimeLimit(time.Second))
	request := f.requests[0].(*pb.SubmitRequest)
	sampling := request.GetSpec().GetSampling()
	if err != nil || request.GetIdempotencyKey() != "mine" || sampling.Temperature == nil || sampling.TopP != nil ||
		request.GetSpec().GetTimeLimit().AsDuration() != time.Second {
		t.Error(request, err)
	}
}

// every option of GenerationSpec, with a value that is not the field's zero.
var every = []headrace.GenerationOption{
	headrace.WithModel("m"), headrace.WithTemperature(1), headrace.WithTopP(1), headrace.WithTopK(1),
	headrace.WithMinP(1), headrace.WithTopNSigma(1), headrace.WithRepetitionPenalty(1), headrace.WithPresencePenalty(1),
	headrace.WithFrequencyPenalty(1), headrace.WithSeed(1), headrace.WithLogitBias(map[uint32]float32{1: 1}),
	headrace.WithStop("a"), headrace.WithStopTokens(1), headrace.WithMaxTokens(1), headrace.WithMinTokens(1),
	headrace.WithIgnoreEOS(true), headrace.WithBadWords("a"), headrace.WithIncludeStopString(true),
	headrace.WithOutputs(1), headrace.WithLogprobs(1), headrace.WithPromptLogprobs(1), headrace.WithPriority(1),
	headrace.WithTimeLimit(1), headrace.WithCacheSalt("a"), headrace.WithSkipSpecialTokens(true),
	headrace.WithTokenIDsOnly(true),
	headrace.WithTraceDetail(headrace.TraceSpan), headrace.WithMaxDrafts(0), headrace.WithMaxDrafts(4), headrace.WithMaxReasoningTokens(5),
	headrace.WithReasoningEffort(headrace.EffortHigh),
	headrace.WithJSONSchema("{}"), headrace.WithRegex("a"), headrace.WithGrammar("a"), headrace.WithBeamSearch(2, 1),
	headrace.WithEarlyStopping(headrace.StopNever), headrace.WithBestOf(2),
	headrace.WithJSONObject(), headrace.WithChoice("a"),
	headrace.WithStructuralTags(&headrace.StructuralTag{Trigger: "a", Begin: "a", JsonSchema: "{}", End: "a"}),
}

func TestEveryFieldOfASpecHasAnOption(t *testing.T) {
	set := map[string]bool{"text": true, "token_ids": true} // the prompt
	var note func(prefix string, message protoreflect.Message)
	note = func(prefix string, message protoreflect.Message) {
		message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
			set[prefix+string(field.Name())] = true
			if nests(field) {
				note(prefix+string(field.Name())+".", value.Message())
			}
			return true
		})
	}
	for _, option := range every {
		spec := &pb.GenerationSpec{}
		option(spec)
		note("", spec.ProtoReflect())
	}
	var want func(prefix string, message protoreflect.MessageDescriptor)
	want = func(prefix string, message protoreflect.MessageDescriptor) {
		for i := range message.Fields().Len() {
			field := message.Fields().Get(i)
			if path := prefix + string(field.Name()); !set[path] {
				t.Error("no option sets", path)
			} else if nests(field) {
				want(path+".", field.Message())
			}
		}
	}
	want("", (&pb.GenerationSpec{}).ProtoReflect().Descriptor())
}

// nests tells whether a field holds a message of the spec's own, which options set field by field.
func nests(field protoreflect.FieldDescriptor) bool {
	own := field.Kind() == protoreflect.MessageKind && !field.IsMap() && !field.IsList() &&
		field.Message().ParentFile().Package() == "headrace.v1"
	return own && field.Name() != "token_ids"
}

func TestClientsThatMakeNoSenseAreRefused(t *testing.T) {
	for want, options := range map[string][]headrace.Option{
		"WithChannels":          {headrace.WithChannels(0)},
		"WithTimeout":           {headrace.WithTimeout(-1)},
		"weightedroundrobin\"":  {headrace.WithLoadBalancing(headrace.WeightedRoundRobin)},
		"round_robin, weighted": {headrace.WithLoadBalancing("random")},
		"WithRetry":             {headrace.WithRetry(headrace.RetryPolicy{MaxAttempts: -1})},
		"WithAPIKey":            {headrace.WithAPIKey("ends with a line break\n")},
		"not both":              {headrace.WithInsecure(), headrace.WithTLS(headrace.TLS{})},
		"/no/such/file":         {headrace.WithTLS(headrace.TLS{CAFile: "/no/such/file"})},
		"no PEM":                {headrace.WithTLS(headrace.TLS{CAFile: "client_test.go"})},
		"belong together":       {headrace.WithTLS(headrace.TLS{CertFile: "client_test.go"})},
		"unencrypted key: tls":  {headrace.WithTLS(headrace.TLS{CertFile: "client_test.go", KeyFile: "client_test.go"})},
	} {
		if client, err := headrace.New("127.0.0.1:1", options...); err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "line break\n") {
			t.Error(want, client, err)
		}
	}
}
