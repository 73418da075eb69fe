package headrace_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	headrace "github.com/headrace/headrace/clients/go"
	pb "github.com/headrace/headrace/clients/go/headracev1"
)

func openSession(t *testing.T, client *headrace.Client) *headrace.Session {
	t.Helper()
	session, err := client.Session(background)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(session.Close)
	return session
}

// begun is the id of a request that was sent.
func begun(id uint32, err error) func(*testing.T) uint32 {
	return func(t *testing.T) uint32 {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
}

func TestSessionYieldsTheEventsOfAllGenerations(t *testing.T) {
	session := openSession(t, start(t, &fake{}))
	first := begun(session.Submit(headrace.Text("hello"), headrace.WithOutputs(2)))(t)
	attached := begun(session.Attach(requestID, headrace.WithFromToken(5)))(t)
	bad := begun(session.SubmitChat(nil, headrace.WithDetached(true), headrace.WithIdempotencyKey("k")))(t)
	if first != 1 || attached != 2 || bad != 3 {
		t.Error(first, attached, bad)
	}
	if err := session.CloseSend(); err != nil {
		t.Fatal(err)
	}
	found := map[uint32][]headrace.Event{}
	for event, err := range session.Events() {
		if err != nil {
			t.Fatal(err)
		}
		found[event.StreamID] = append(found[event.StreamID], event.Event)
	}
	var deltas []headrace.Delta
	for _, event := range slices.Concat(found[first], found[attached]) {
		if delta, is := event.(headrace.Delta); is {
			deltas = append(deltas, delta)
		}
	}
	want := []headrace.Delta{
		{OutputIndex: 0, FirstTokenIndex: 0, TokenIDs: []uint32{100, 101}, Text: "ab"},
		{OutputIndex: 1, FirstTokenIndex: 0, TokenIDs: []uint32{200}, Text: "x"},
		{OutputIndex: 0, FirstTokenIndex: 2, TokenIDs: []uint32{102}},
		{OutputIndex: 0, FirstTokenIndex: 5, TokenIDs: []uint32{105, 106}, Text: "w5 w6 "},
		{OutputIndex: 0, FirstTokenIndex: 7, TokenIDs: []uint32{9}},
	}
	if !reflect.DeepEqual(deltas, want) {
		t.Errorf("%+v", deltas)
	}
	for id, events := range found {
		if _, last := events[len(events)-1].(headrace.Done); !last {
			t.Error(id, events)
		}
	}
}

func TestSessionStepsAreColumnsOfEqualLength(t *testing.T) {
	session := openSession(t, start(t, &fake{}))
	id := begun(session.Submit(headrace.Text("hello")))(t)
	_ = session.CloseSend()
	if _, err := session.Submit(headrace.Text("late")); err == nil || !strings.Contains(err.Error(), "CloseSend") {
		t.Error(err)
	}
	var tokens []headrace.SessionTokens
	for step, err := range session.Steps() {
		if err != nil {
			t.Fatal(err)
		}
		if len(step.Tokens.TokenIDs) > 0 {
			tokens = append(tokens, step.Tokens)
		}
	}
	want := []headrace.SessionTokens{
		{StreamIDs: []uint32{id, id, id}, OutputIndices: []uint32{0, 1, 0}, TokenIDs: []uint32{100, 200, 101},
			Texts: []string{"a", "x", "b"}},
		{StreamIDs: []uint32{id}, OutputIndices: []uint32{0}, TokenIDs: []uint32{102}, Texts: []string{""}},
	}
	if !reflect.DeepEqual(tokens, want) {
		t.Errorf("%+v", tokens)
	}
}

func TestGenerationThatFailsLeavesTheSessionAlone(t *testing.T) {
	session := openSession(t, start(t, &fake{}))
	bad := begun(session.Submit(headrace.Text("bad")))(t)
	good := begun(session.Submit(headrace.Text("good")))(t)
	_ = session.CloseSend()
	ended := map[uint32]headrace.Event{}
	for event, err := range session.Events() {
		if err != nil {
			t.Fatal(err)
		}
		ended[event.StreamID] = event.Event
	}
	failed, _ := ended[bad].(headrace.Failed)
	if _, is := ended[good].(headrace.Done); !is || !errors.Is(failed.Err, headrace.ErrInvalid) {
		t.Error(ended)
	}
}

func TestSessionCancelsAndDetaches(t *testing.T) {
	f := &fake{}
	session := openSession(t, start(t, f))
	left, ended := begun(session.Submit(headrace.Text("open")))(t), begun(session.Submit(headrace.Text("open")))(t)
	for event, err := range session.Events() {
		if err != nil {
			t.Fatal(err)
		}
		if _, is := event.Event.(headrace.Accepted); is && event.StreamID == ended {
			if err := errors.Join(session.Detach(left), session.Cancel(ended), session.CloseSend()); err != nil {
				t.Fatal(err)
			}
		} else if event.StreamID == left && !is {
			t.Error("an event after detaching:", event)
		}
	}
	var sent []bool
	for _, request := range f.requests {
		if request, is := request.(*pb.SessionRequest); is && request.GetCancel() != nil {
			sent = append(sent, request.GetCancel().GetDetach())
		}
	}
	if !slices.Equal(sent, []bool{true, false}) {
		t.Error(sent)
	}
	if err := errors.Join(session.Cancel(left), session.Cancel(ended), session.Detach(99)); err != nil {
		t.Error("what has ended needs no request:", err)
	}
}

func TestSessionEndsWithItsContextOrWhenClosed(t *testing.T) {
	client := start(t, &fake{})
	ctx, cancel := context.WithCancel(background)
	session, err := client.Session(ctx)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	for _, err = range session.Events() {
	}
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	closed := openSession(t, client)
	closed.Close()
	for event, err := range closed.Events() {
		t.Error(event, err)
	}
	if _, err := closed.Submit(headrace.Text("late")); err == nil {
		t.Error("a request of a closed session went out")
	}
}
