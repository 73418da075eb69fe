package headrace_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	headrace "github.com/headrace/headrace/clients/go"
)

var background = context.Background()

func TestStreamIsReadAsEventsAsTextOrWhole(t *testing.T) {
	client := start(t, &fake{})
	options := headrace.Options(headrace.WithMaxTokens(3), headrace.WithLogprobs(2))
	events := read(t, client.Generate(background, headrace.Text("hello"), options))
	if len(events) != 7 || events[0] != (headrace.Accepted{requestID, "fake@1", 3}) ||
		events[1] != (headrace.Started{1}) {
		t.Error(events)
	}
	text := ""
	for piece, err := range client.Chat(background, []headrace.Message{headrace.User("hello")}, options).Text() {
		if err != nil {
			t.Fatal(err)
		}
		text += piece
	}
	whole, err := client.Generate(background, headrace.TokenIDs{1, 2}, options, headrace.WithOutputs(2)).Result()
	if err != nil || text != answer(0, 0, 3) || whole.Text() != text || whole.Outputs[1].Text != answer(1, 0, 3) {
		t.Fatal(text, whole, err)
	}
	if whole.FinishReason() != headrace.FinishLength || whole.Usage.OutputTokens != 6 ||
		whole.Ledger.TTFT != 3*time.Millisecond || whole.RequestID != requestID {
		t.Errorf("%+v", whole)
	}
	if top := whole.Outputs[1].Logprobs.Top(2); len(top) != 2 || top[0].TokenID != tokenID(1, 2) ||
		top[0].Logprob != -2 {
		t.Error(top)
	}
}

func TestCompleteIsTheWholeAnswer(t *testing.T) {
	client := start(t, &fake{})
	whole, err := client.Complete(background, headrace.Text("hello"))
	if err != nil || whole.Text() != answer(0, 0, 2) ||
		whole.Outputs[0].Matched != (headrace.MatchedStop{TokenID: 7, IsToken: true}) {
		t.Fatal(whole, err)
	}
	if p := whole.PromptLogprobs; p.FirstTokenIndex != 1 || p.NextTokenIndex() != 4 || p.Logprobs.Sampled[2] != -3 {
		t.Errorf("%+v", p)
	}
}

func TestReadingInPartsLosesNothing(t *testing.T) {
	stream := start(t, &fake{}).Generate(background, headrace.Text("hello"), headrace.WithMaxTokens(4))
	for range 3 {
		if event, err := stream.Next(); err != nil {
			t.Fatal(event, err)
		}
	}
	whole, err := stream.Result()
	if err != nil || whole.Text() != answer(0, 0, 4) || stream.RequestID() != requestID ||
		stream.Done().Usage != whole.Usage {
		t.Error(whole, err)
	}
	if event, err := stream.Next(); err != io.EOF {
		t.Error(event, err)
	}
}

func TestLeavingALoopCancelsTheGeneration(t *testing.T) {
	f := &fake{}
	for _, err := range start(t, f).Generate(background, headrace.Text("endless")).Text() {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	select {
	case <-f.cancelled:
	case <-time.After(30 * time.Second):
		t.Error("the server still generates")
	}
}

func TestClosingAStreamEndsItsLoopWithoutAnError(t *testing.T) {
	stream := start(t, &fake{}).Generate(background, headrace.Text("endless"))
	time.AfterFunc(50*time.Millisecond, stream.Close)
	if events := read(t, stream); len(events) < 2 {
		t.Error(events)
	}
	if whole, err := stream.Result(); !errors.Is(err, headrace.ErrCancelled) {
		t.Error(whole, err)
	}
}

func TestContextsEndStreams(t *testing.T) {
	client := start(t, &fake{})
	ctx, cancel := context.WithTimeout(background, 50*time.Millisecond)
	defer cancel()
	_, err := client.Generate(ctx, headrace.Text("endless")).Result()
	if !errors.Is(err, headrace.ErrDeadline) || !errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	ctx, cancel = context.WithCancel(background)
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := client.Generate(ctx, headrace.Text("endless")).Result(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := client.Generate(ctx, headrace.Text("endless")).Result(); !errors.Is(err, context.Canceled) {
		t.Error("with a context that was cancelled before:", err)
	}
}

func TestErrorsSayWhatTheServerSaid(t *testing.T) {
	client := start(t, &fake{})
	var failure *headrace.Error
	_, err := client.Generate(background, headrace.Text("invalid")).Result()
	if !errors.As(err, &failure) || !errors.Is(err, headrace.ErrInvalid) || errors.Is(err, headrace.ErrNotFound) {
		t.Fatal(err)
	}
	want := headrace.Violation{"spec.sampling.top_p", "must be above 0 and at most 1 (given: 7)"}
	if len(failure.Violations) != 1 || failure.Violations[0] != want ||
		!strings.Contains(err.Error(), "spec.sampling.top_p: must be above 0") {
		t.Error(failure)
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Error("grpc-go sees", status.Code(err))
	}
	_, err = client.Generate(background, headrace.Text("overloaded")).Result()
	if !errors.As(err, &failure) || !errors.Is(err, headrace.ErrOverloaded) ||
		failure.RetryAfter != 1500*time.Millisecond {
		t.Error(err)
	}
	_, err = client.Generate(background, headrace.Text("broken")).Result()
	if !errors.As(err, &failure) || !errors.Is(err, headrace.ErrUnavailable) ||
		failure.RequestID != "req-from-details" {
		t.Error(err)
	}
}

func TestUnfinishedAnswersAreErrors(t *testing.T) {
	client := start(t, &fake{})
	messages := map[string]string{
		"failing":     "a step produced NaN",
		"no-done":     "before the generation did",
		"bad columns": "not of the same number",
	}
	for prompt, message := range messages {
		var failure *headrace.Error
		_, err := client.Generate(background, headrace.Text(prompt)).Result()
		if !errors.As(err, &failure) || !errors.Is(err, headrace.ErrInternal) ||
			!strings.Contains(err.Error(), message) || failure.RequestID != requestID {
			t.Error(prompt, err)
		}
		var last error
		for _, last = range client.Generate(background, headrace.Text(prompt)).Text() {
		}
		if last == nil || last.Error() != err.Error() {
			t.Error(prompt, "as text:", last)
		}
	}
}

func TestTextOfSeveralOutputsIsRefused(t *testing.T) {
	var last error
	for _, last = range start(t, &fake{}).Generate(background, headrace.Text("hello"), headrace.WithOutputs(2)).Text() {
	}
	if last == nil || !strings.Contains(last.Error(), "several") {
		t.Error(last)
	}
}

func TestTextThatIsNoUTF8IsRefusedByName(t *testing.T) {
	f := &fake{}
	client, bad := start(t, f), "\xff"
	_, complete := client.Complete(background, headrace.Text(bad))
	_, generate := client.Generate(background, headrace.Text("x"), headrace.WithStop("fine", bad)).Result()
	_, chat := client.Chat(background, []headrace.Message{headrace.User("x"), headrace.User(bad)}).Result()
	_, subscribe := client.Subscribe(background, bad).Result()
	_, tokenize := client.Tokenize(background, bad, nil)
	for field, err := range map[string]error{
		"spec.text": complete, "spec.stop.strings[1]": generate, "messages[1].parts[0].text": chat,
		"request_id": subscribe, "text": tokenize,
	} {
		var failure *headrace.Error
		if !errors.As(err, &failure) || !errors.Is(err, headrace.ErrInvalid) || failure.Violations[0].Field != field {
			t.Error(field, err)
		}
	}
	if len(f.requests) != 0 {
		t.Error("sent all the same:", f.requests)
	}
}
