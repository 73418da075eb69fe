// Tests against a real server, whose address is in HEADRACE_TEST_SERVER (demo model, no TLS, no
// keys). For the tests of broken connections, HEADRACE_TEST_PROXY is the address of a proxy in
// front of it, and connecting to HEADRACE_TEST_CUT resets all of the proxy's connections. For the
// tests of keys, HEADRACE_TEST_TLS_SERVER asks for TLS and a key, HEADRACE_TEST_CA vouches for it,
// HEADRACE_TEST_KEY may generate and read, and HEADRACE_TEST_FEW_KEY as well, but not twice within
// a minute. `make test` in the repository's root sets all of them
// (tests/clients/test_go_client.py).

package headrace_test

import (
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	headrace "github.com/headrace/headrace/clients/go"
)

const story = headrace.Text("Once upon a time")

// fromEnvironment is a variable's value; the test is skipped without it.
func fromEnvironment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Skip(name, "is not set: no server to test against")
	}
	return value
}

func realServer(t *testing.T, options ...headrace.Option) *headrace.Client {
	t.Helper()
	return connect(t, fromEnvironment(t, "HEADRACE_TEST_SERVER"), options...)
}

func greedy(tokens uint32) headrace.GenerationOption {
	return headrace.Options(headrace.WithTemperature(0), headrace.WithMaxTokens(tokens), headrace.WithIgnoreEOS(true))
}

func TestServerAnswersTheSameWhicheverWayItIsAsked(t *testing.T) {
	client := realServer(t, headrace.WithChannels(3))
	complete, err := client.Complete(background, story, greedy(24))
	if err != nil {
		t.Fatal(err)
	}
	ids, err := client.Tokenize(background, string(story), nil)
	if err != nil {
		t.Fatal(err)
	}
	generate, err := client.Generate(background, headrace.TokenIDs(ids), greedy(24), headrace.WithLogprobs(2)).Result()
	if err != nil {
		t.Fatal(err)
	}
	durable, err := client.GenerateDurable(background, story, greedy(24)).Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range []*headrace.Completion{generate, durable} {
		if !slices.Equal(complete.TokenIDs(), other.TokenIDs()) || complete.Text() != other.Text() ||
			other.FinishReason() != headrace.FinishLength {
			t.Errorf("%q\n%q", complete.Text(), other.Text())
		}
	}
	columns := generate.Outputs[0].Logprobs
	if len(columns.Sampled) != 24 || columns.Top(23)[0].TokenID != generate.TokenIDs()[23] {
		t.Errorf("%+v", columns)
	}
	if text, err := client.Detokenize(background, complete.TokenIDs(), nil); err != nil || text != complete.Text() {
		t.Errorf("%q %v", text, err)
	}
}

func TestServerChatsAndStopsWhereItIsTold(t *testing.T) {
	client := realServer(t)
	said := []headrace.Message{headrace.System("Be brief."), headrace.User("What is a KV cache?")}
	answered, err := client.Chat(background, said, headrace.WithTemperature(0), headrace.WithMaxTokens(60),
		headrace.WithStop("keys")).Result()
	if err != nil || answered.FinishReason() != headrace.FinishStop &&
		answered.FinishReason() != headrace.FinishLength {
		t.Fatal(answered, err)
	}
	seeds, err := client.Generate(background, story, headrace.WithOutputs(3), headrace.WithSeed(7),
		headrace.WithMaxTokens(8)).Result()
	if err != nil || len(seeds.Outputs) != 3 || seeds.Usage.OutputTokens > 24 {
		t.Fatal(seeds, err)
	}
	if sum := seeds.Ledger; sum.EndToEnd <= 0 || sum.TTFT > sum.EndToEnd {
		t.Errorf("%+v", sum)
	}
}

func TestServerNamesTheRuleThatARequestBreaks(t *testing.T) {
	client := realServer(t)
	var failure *headrace.Error
	_, err := client.Generate(background, story, headrace.WithTopP(7), headrace.WithOutputs(0)).Result()
	if !errors.As(err, &failure) || !errors.Is(err, headrace.ErrInvalid) || len(failure.Violations) != 2 {
		t.Fatalf("%+v", err)
	}
	fields := []string{failure.Violations[0].Field, failure.Violations[1].Field}
	if !slices.Contains(fields, "spec.sampling.top_p") || !slices.Contains(fields, "spec.n") {
		t.Error(fields)
	}
	_, unknown := client.GetModel(background, "no-such-model")
	_, expired := client.Subscribe(background, "no-such-request").Result()
	_, prompt := client.Complete(background, nil)
	if !errors.Is(unknown, headrace.ErrNotFound) || !errors.Is(expired, headrace.ErrNotFound) ||
		!errors.Is(prompt, headrace.ErrInvalid) {
		t.Error(unknown, expired, prompt)
	}
	_, err = client.Complete(background, story, headrace.WithBeamSearch(2, 1), headrace.WithTemperature(0.5))
	if !errors.As(err, &failure) || failure.Violations[0].Field != "spec.sampling.temperature" {
		t.Error(err)
	}
	found, err := client.Complete(background, story, headrace.WithBeamSearch(3, 1), headrace.WithOutputs(2),
		headrace.WithMaxTokens(4))
	if err != nil || *found.Outputs[0].Score < *found.Outputs[1].Score {
		t.Error(found, err)
	}
	_, err = client.Complete(background, story, headrace.WithRegex("["))
	if !errors.As(err, &failure) || failure.Violations[0].Field != "spec.structured_output.regex" {
		t.Error(err)
	}
	chosen, err := client.Complete(background, story, headrace.WithChoice("left", "right"), headrace.WithOutputs(2))
	if err != nil {
		t.Fatal(err)
	}
	for _, output := range chosen.Outputs {
		if output.Text != "left" && output.Text != "right" {
			t.Error(output.Text)
		}
	}
}

func TestServerTellsWhatItIs(t *testing.T) {
	client := realServer(t)
	models, err := client.ListModels(background)
	if err != nil || len(models) != 1 {
		t.Fatal(models, err)
	}
	model, err := client.GetModel(background, models[0].GetName())
	if err != nil || model.GetVocabularySize() == 0 || model.GetRevision() != models[0].GetRevision() {
		t.Error(model, err)
	}
	load, err := client.Load(background, "")
	if err != nil || !load.GetServing() || load.GetKvBlocks() == 0 {
		t.Error(load, err)
	}
	plan, err := client.Admin().GetMemoryPlan(background, "")
	if err != nil || plan.GetKvCacheBytes() == 0 {
		t.Error(plan, err)
	}
	if _, err := client.Admin().ListRepository(background); err != nil {
		t.Error(err)
	}
	err = client.Admin().SetTraceDetail(background, headrace.TraceArray)
	if err != nil && !errors.Is(err, headrace.ErrFailedPrecondition) {
		t.Error(err) // the server may run without telemetry
	}
}

func TestServerEndsWhatIsLeftAndKeepsWhatIsSubmitted(t *testing.T) {
	client := realServer(t)
	left := client.Generate(background, story, greedy(400))
	for event, err := range left.Events() {
		if err != nil {
			t.Fatal(err)
		}
		if _, is := event.(headrace.Delta); is {
			break
		}
	}
	submitted, err := client.Submit(background, story, greedy(400))
	if err != nil {
		t.Fatal(err)
	}
	if cancelled, err := client.Cancel(background, submitted.RequestID); err != nil || !cancelled {
		t.Error(cancelled, err)
	}
	answered, err := client.Subscribe(background, submitted.RequestID).Result()
	if err != nil || answered.FinishReason() != headrace.FinishCancelled {
		t.Error(answered, err)
	}
	ended := map[string]bool{left.RequestID(): false, submitted.RequestID: false}
	deadline := time.Now().Add(30 * time.Second)
	for ; !(ended[left.RequestID()] && ended[submitted.RequestID]); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not ended: ", ended)
		}
		finished := &headrace.ListOptions{State: headrace.StateFinished, PageSize: 2}
		for summary, err := range client.ListRequests(background, finished) {
			if err != nil {
				t.Fatal(err)
			}
			if _, ours := ended[summary.GetRequestId()]; ours {
				ended[summary.GetRequestId()] = true
			}
		}
	}
}

func TestServerTakesAKeyForOneSpecOnly(t *testing.T) {
	client, same := realServer(t), headrace.WithIdempotencyKey(t.Name()+time.Now().String())
	first, err := client.Submit(background, story, greedy(4), same)
	if err != nil || first.Existing {
		t.Fatal(first, err)
	}
	second, err := client.Submit(background, story, greedy(4), same)
	if err != nil || !second.Existing || second.RequestID != first.RequestID {
		t.Error(second, err)
	}
	if _, err := client.Submit(background, story, greedy(5), same); !errors.Is(err, headrace.ErrAlreadyExists) {
		t.Error(err)
	}
}

// cut resets all connections of the proxy and returns when that has happened.
func cut(t *testing.T) {
	t.Helper()
	control, err := net.Dial("tcp", fromEnvironment(t, "HEADRACE_TEST_CUT"))
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	if _, err := io.ReadAll(control); err != nil {
		t.Fatal(err)
	}
}

func TestServerLosesAndDoublesNothingOverBrokenConnections(t *testing.T) {
	direct, address := realServer(t), fromEnvironment(t, "HEADRACE_TEST_PROXY")
	// Single bytes of characters of two to four bytes, in random order, so that cuts fall into the
	// middle of characters.
	ids, err := direct.Tokenize(background, "é漢😀ß語🚀", &headrace.TokenizeOptions{NoSpecialTokens: true})
	if err != nil {
		t.Fatal(err)
	}
	bytes := map[uint32]float32{}
	for _, id := range ids {
		bytes[id] = 60
	}
	reconnections := 0
	for name, broken := range map[string]headrace.GenerationOption{
		"one output": headrace.Options(), "one output, bytes": headrace.WithLogitBias(bytes),
		"three outputs":        headrace.WithOutputs(3),
		"three outputs, bytes": headrace.Options(headrace.WithOutputs(3), headrace.WithLogitBias(bytes)),
	} {
		t.Run(name, func(t *testing.T) {
			client := connect(t, address, headrace.WithChannels(2))
			stream := client.GenerateDurable(background, story, broken, headrace.WithMaxTokens(120),
				headrace.WithIgnoreEOS(true), headrace.WithSeed(3), headrace.WithTemperature(1),
				headrace.WithLogprobs(1), headrace.WithPromptLogprobs(1))
			again := readAndCut(t, stream)
			reconnections += again
			disturbed, err := stream.Result()
			if err != nil {
				t.Fatal(err)
			}
			whole, err := direct.Subscribe(background, stream.RequestID()).Result()
			if err != nil || again == 0 {
				t.Fatal(again, err)
			}
			if !reflect.DeepEqual(disturbed.Outputs, whole.Outputs) ||
				!reflect.DeepEqual(disturbed.PromptLogprobs, whole.PromptLogprobs) {
				t.Errorf("%+v\nwhole:\n%+v", disturbed, whole)
			}
			// The engine computed each token once: as many steps as for somebody who reads
			// undisturbed.
			if d, w := disturbed.Ledger.StepCount, whole.Ledger.StepCount; d != w || d > 125 ||
				disturbed.Usage != whole.Usage || int(disturbed.Usage.OutputTokens) != 120*len(whole.Outputs) {
				t.Error(d, w, disturbed.Usage)
			}
		})
	}
	// Not every cut breaks a stream: on a busy machine its last tokens may have come before they
	// are read.
	if reconnections < 6 {
		t.Error("too few connections broke to prove anything:", reconnections)
	}
}

// readAndCut reads to the end, cuts the connections again and again on the way, and returns how
// often the stream was opened again.
func readAndCut(t *testing.T, stream *headrace.Stream) (reconnections int) {
	t.Helper()
	next, tokens, cuts := map[uint32]uint32{}, 0, 0
	for {
		event, err := stream.Next()
		if err == io.EOF {
			return reconnections
		} else if err != nil {
			t.Fatal(err)
		}
		switch event := event.(type) {
		case headrace.Delta:
			if event.FirstTokenIndex != next[event.OutputIndex] {
				t.Fatalf("output %d: token %d comes where %d should", event.OutputIndex, event.FirstTokenIndex,
					next[event.OutputIndex])
			}
			next[event.OutputIndex] = event.NextTokenIndex()
			tokens += len(event.TokenIDs)
			openEnd := strings.HasSuffix(event.Text, "\uFFFD") // what is behind may yet become a character
			if tokens > 23*(cuts+1) && cuts < 4 || openEnd && cuts < 12 {
				cuts++
				cut(t)
			}
		case headrace.Reconnecting:
			reconnections++
		}
	}
}

func TestServerServesSessions(t *testing.T) {
	client := realServer(t)
	alone, err := client.Complete(background, story, greedy(16))
	if err != nil {
		t.Fatal(err)
	}
	submitted := client.GenerateDurable(background, story, greedy(16))
	if _, err := submitted.Result(); err != nil {
		t.Fatal(err)
	}
	session := openSession(t, client)
	plain := begun(session.Submit(story, greedy(16)))(t)
	chat := begun(session.SubmitChat([]headrace.Message{headrace.User("What is a KV cache?")},
		headrace.WithMaxTokens(8)))(t)
	attached := begun(session.Attach(submitted.RequestID(), headrace.WithFromToken(4)))(t)
	wrong := begun(session.Submit(story, headrace.WithTopP(7)))(t)
	ended := begun(session.Submit(story, greedy(400)))(t)
	ids, last, closed := map[uint32][]uint32{}, map[uint32]headrace.Event{}, false
	for event, err := range session.Events() {
		if err != nil {
			t.Fatal(err)
		}
		last[event.StreamID] = event.Event
		if delta, is := event.Event.(headrace.Delta); is {
			first, known := int(delta.FirstTokenIndex), len(ids[event.StreamID])
			if event.StreamID == attached {
				known += 4
			}
			if first != known {
				t.Errorf("generation %d: token %d after %d", event.StreamID, first, known)
			}
			ids[event.StreamID] = append(ids[event.StreamID], delta.TokenIDs...)
			if event.StreamID == ended && !closed {
				closed = true
				if err := errors.Join(session.Cancel(ended), session.CloseSend()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if !slices.Equal(ids[plain], alone.TokenIDs()) || !slices.Equal(ids[attached], alone.TokenIDs()[4:]) ||
		len(ids[chat]) == 0 {
		t.Error(ids, alone.TokenIDs())
	}
	failed, _ := last[wrong].(headrace.Failed)
	if failed.Err == nil || !errors.Is(failed.Err, headrace.ErrInvalid) || len(failed.Err.Violations) != 1 {
		t.Error(last[wrong])
	}
	for _, id := range []uint32{plain, chat, attached, ended} {
		if _, is := last[id].(headrace.Done); !is {
			t.Error(id, last[id])
		}
	}
}

func TestSecuredServerKnowsWhoMayDoWhat(t *testing.T) {
	address := fromEnvironment(t, "HEADRACE_TEST_TLS_SERVER")
	files := headrace.TLS{CAFile: fromEnvironment(t, "HEADRACE_TEST_CA")}
	with := func(key string) *headrace.Client {
		return connect(t, address, headrace.WithTLS(files), headrace.WithAPIKey(key))
	}
	known := with(fromEnvironment(t, "HEADRACE_TEST_KEY"))
	answered, err := known.GenerateDurable(background, story, greedy(8)).Result()
	if err != nil || len(answered.TokenIDs()) != 8 {
		t.Error(answered, err)
	}
	_, admin := known.Admin().ListRepository(background)
	_, stranger := with("hr-unknown").Complete(background, story, greedy(1))
	_, nobody := connect(t, address, headrace.WithTLS(files)).Generate(background, story, greedy(1)).Result()
	if !errors.Is(admin, headrace.ErrPermissionDenied) || !errors.Is(stranger, headrace.ErrUnauthenticated) ||
		!errors.Is(nobody, headrace.ErrUnauthenticated) {
		t.Error(admin, stranger, nobody)
	}
	if _, err := connect(t, address).Complete(background, story, greedy(1)); !errors.Is(err, headrace.ErrUnavailable) {
		t.Error("in the clear:", err)
	}
	few := with(fromEnvironment(t, "HEADRACE_TEST_FEW_KEY"))
	if _, err := few.Complete(background, story, greedy(1)); err != nil {
		t.Error(err)
	}
	var failure *headrace.Error
	_, err = few.Complete(background, story, greedy(1))
	if !errors.As(err, &failure) || !errors.Is(err, headrace.ErrOverloaded) || failure.RetryAfter <= 0 ||
		failure.RetryAfter > time.Minute {
		t.Errorf("%+v", err)
	}
}
