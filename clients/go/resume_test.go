package headrace_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	headrace "github.com/headrace/headrace/clients/go"
	pb "github.com/headrace/headrace/clients/go/headracev1"
)

// read collects a stream's events to its end.
func read(t *testing.T, stream *headrace.Stream) []headrace.Event {
	t.Helper()
	var events []headrace.Event
	for event, err := range stream.Events() {
		if err != nil {
			t.Fatalf("after %v: %v", events, err)
		}
		events = append(events, event)
	}
	return events
}

// checkNothingLostOrDoubled holds a subscription's events against the log from first on.
func checkNothingLostOrDoubled(t *testing.T, events []headrace.Event, outputs []uint32, first uint32, logprobs bool) {
	t.Helper()
	seen := map[string]int{}
	ids, texts, next := map[uint32][]uint32{}, map[uint32]string{}, map[uint32]uint32{}
	var prompt []float32
	for _, event := range events {
		seen[fmt.Sprintf("%T", event)]++
		switch event := event.(type) {
		case headrace.Delta:
			if at, begun := next[event.OutputIndex]; begun && at != event.FirstTokenIndex {
				t.Errorf("output %d: token %d follows %d", event.OutputIndex, event.FirstTokenIndex, at)
			}
			next[event.OutputIndex] = event.NextTokenIndex()
			ids[event.OutputIndex] = append(ids[event.OutputIndex], event.TokenIDs...)
			texts[event.OutputIndex] += event.Text
			if logprobs && (event.Logprobs == nil || event.Logprobs.Sampled[0] != -float32(event.FirstTokenIndex) ||
				event.Logprobs.Top(len(event.TokenIDs) - 1)[0].TokenID != event.TokenIDs[len(event.TokenIDs)-1]) {
				t.Errorf("log probabilities are not the tokens' own: %+v", event)
			}
		case headrace.PromptLogprobs:
			prompt = append(prompt, event.Logprobs.Sampled...)
		}
	}
	for _, output := range outputs {
		var want []uint32
		for i := first; i < logTokens; i++ {
			want = append(want, tokenID(output, i))
		}
		if !slices.Equal(ids[output], want) || texts[output] != answer(output, first, logTokens) {
			t.Errorf("output %d: %v %q", output, ids[output], texts[output])
		}
	}
	if logprobs && !slices.Equal(prompt, []float32{-1, -2, -3, -4, -5, -6}) {
		t.Errorf("prompt: %v", prompt)
	}
	if seen["headrace.Accepted"] != 1 || seen["headrace.Started"] != 1 || seen["headrace.Done"] != 1 ||
		seen["headrace.OutputFinished"] != len(outputs) {
		t.Errorf("events: %v", seen)
	}
}

func TestSubscriptionLosesAndDoublesNothing(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 1))
		f := &fake{outputs: 1 + r.Uint32N(3), logprobs: r.IntN(2) == 0}
		for range r.IntN(5) {
			f.breaks = append(f.breaks, r.IntN(28))
		}
		first, read1 := r.Uint32N(logTokens+1), r.IntN(2) == 0
		options, outputs := []headrace.SubscribeOption{headrace.WithFromToken(first)}, []uint32{0, 1, 2}[:f.outputs]
		if read1 {
			options, outputs = append(options, headrace.WithOutputIndex(f.outputs-1)), outputs[f.outputs-1:]
		}
		t.Run(fmt.Sprintf("seed %d breaks %v outputs %v from %d", seed, f.breaks, outputs, first), func(t *testing.T) {
			client := start(t, f, headrace.WithRetry(headrace.RetryPolicy{InitialBackoff: time.Millisecond}))
			events := read(t, client.Subscribe(context.Background(), requestID, options...))
			checkNothingLostOrDoubled(t, events, outputs, first, f.logprobs)
		})
	}
}

func TestBrokenSubscriptionSaysSoAndAsksForTheNextToken(t *testing.T) {
	f := &fake{breaks: []int{5}} // accepted, started, and tokens 0 to 5 in deltas of two
	client := start(t, f)
	events := read(t, client.Subscribe(context.Background(), requestID, headrace.WithOutputIndex(0)))
	i := slices.IndexFunc(events, func(e headrace.Event) bool { _, is := e.(headrace.Reconnecting); return is })
	broken, _ := events[i].(headrace.Reconnecting)
	if broken.Attempt != 1 || broken.Delay <= 0 || !errors.Is(broken.Err, headrace.ErrUnavailable) ||
		broken.Err.RequestID != requestID {
		t.Errorf("%+v", broken)
	}
	if again := f.requests[1].(*pb.SubscribeRequest); again.GetFromToken() != 6 {
		t.Errorf("asked again from token %d", again.GetFromToken())
	}
	checkNothingLostOrDoubled(t, events, []uint32{0}, 0, false)
}

func TestSubscriptionSurvivesAServerThatGoesAndComesBack(t *testing.T) {
	first := &fake{breaks: []int{6}, outputs: 2, stalled: make(chan struct{})}
	address, server := serve(t, first, "127.0.0.1:0")
	retry := headrace.RetryPolicy{
		MaxAttempts: 1000, InitialBackoff: 10 * time.Millisecond, MaxBackoff: 50 * time.Millisecond,
	}
	client := connect(t, address, headrace.WithRetry(retry))
	go func() {
		<-first.stalled
		server.Stop() // cuts the connection
		time.Sleep(200 * time.Millisecond)
		serve(t, &fake{outputs: 2}, address)
	}()
	events := read(t, client.Subscribe(context.Background(), requestID))
	if !slices.ContainsFunc(events, func(e headrace.Event) bool { _, is := e.(headrace.Reconnecting); return is }) {
		t.Error("no Reconnecting event")
	}
	checkNothingLostOrDoubled(t, events, []uint32{0, 1}, 0, false)
}

func TestDurableGenerationIsSubmittedOnce(t *testing.T) {
	f := &fake{breaks: []int{4, 0, 7}, failures: 2}
	client := start(t, f)
	answered, err := client.GenerateDurable(context.Background(), headrace.Text("hello")).Result()
	if err != nil || answered.Text() != answer(0, 0, logTokens) || len(answered.TokenIDs()) != logTokens {
		t.Fatal(answered, err)
	}
	keys := map[string]bool{}
	for _, request := range f.requests {
		if submit, is := request.(*pb.SubmitRequest); is {
			keys[submit.GetIdempotencyKey()] = true
		}
	}
	if f.attempts["Submit"] != 3 || len(keys) != 1 || keys[""] {
		t.Error(f.attempts, keys)
	}
}

func TestSubscriptionGivesUpAfterItsAttemptsAndAtItsDeadline(t *testing.T) {
	f := &fake{breaks: make([]int, 5000)}
	client := start(t, f, headrace.WithRetry(headrace.RetryPolicy{MaxAttempts: 3, InitialBackoff: time.Millisecond}))
	_, err := client.Subscribe(context.Background(), requestID).Result()
	if !errors.Is(err, headrace.ErrUnavailable) || f.attemptsOf("Subscribe") != 3 {
		t.Error(err, f.attemptsOf("Subscribe"))
	}
	retry := headrace.RetryPolicy{MaxAttempts: 4000, InitialBackoff: 50 * time.Millisecond, Multiplier: 1}
	client = start(t, f, headrace.WithRetry(retry))
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	begun := time.Now()
	if _, err := client.Subscribe(ctx, requestID).Result(); err == nil || time.Since(begun) > 20*time.Second {
		t.Error(err, time.Since(begun))
	}
}

func TestAttemptsAreCountedAnewAfterEveryEvent(t *testing.T) {
	f := &fake{breaks: []int{3, 4, 5, 6, 7, 7, 7}} // more than the three attempts, never in a row
	client := start(t, f, headrace.WithRetry(headrace.RetryPolicy{MaxAttempts: 3, InitialBackoff: time.Millisecond}))
	answered, err := client.Subscribe(context.Background(), requestID).Result()
	if err != nil || answered.Text() != answer(0, 0, logTokens) || f.attemptsOf("Subscribe") != 8 {
		t.Error(answered, err, f.attemptsOf("Subscribe"))
	}
}

func TestUnknownRequestIsNotTriedAgain(t *testing.T) {
	f := &fake{}
	client := start(t, f)
	_, err := client.Subscribe(context.Background(), "nobody's").Result()
	if !errors.Is(err, headrace.ErrNotFound) || f.attemptsOf("Subscribe") != 1 {
		t.Error(err, f.attemptsOf("Subscribe"))
	}
}

func TestClosingWhileItWaitsToReconnectEndsTheStream(t *testing.T) {
	client := start(t, &fake{breaks: make([]int, 50)},
		headrace.WithRetry(headrace.RetryPolicy{InitialBackoff: time.Hour, MaxBackoff: time.Hour}))
	stream := client.Subscribe(context.Background(), requestID)
	if event, err := stream.Next(); err != nil {
		t.Fatal(event, err)
	}
	time.AfterFunc(50*time.Millisecond, stream.Close)
	if rest := read(t, stream); len(rest) != 0 {
		t.Error(rest)
	}
}

func TestCancellingWhileItWaitsToReconnectIsAnError(t *testing.T) {
	client := start(t, &fake{breaks: make([]int, 50)},
		headrace.WithRetry(headrace.RetryPolicy{InitialBackoff: time.Hour, MaxBackoff: time.Hour}))
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err := client.Subscribe(ctx, requestID).Result()
	if !errors.Is(err, context.Canceled) || !errors.Is(err, headrace.ErrCancelled) {
		t.Error(err)
	}
}
